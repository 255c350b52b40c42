// Expand of down fused with the weighted sum: out[t] = residual + sum over choices j, in order, of
// weight · (y + delta of down + bias), in float, rounded once; foreign choices are skipped. The
// base outputs y are read once and never written.
//
// In: h of the shrink ahead in the stream, y, the routing and the segments, which tell a row's
// expert and slot. A CTA takes one token and a range of columns, 64 at a time: warp j computes the
// delta of choice j (of 8 at a time) into shared memory, then a thread a column adds up. Every
// (token, choice) reads its own B: right where segments hold a row or two.
//
// The delta is fused multiply-adds on h in float. As many lanes as a column of B has 16-byte pieces
// (a power of two) share it, so that a warp reads B in whole lines; their sums are added by a fixed
// tree. A rank or an address that does not allow this takes a column a lane.
//
// The shrink waits for all work before it, so only h may still be missing when this kernel starts:
// everything else is fetched ahead of the wait.
#include "lora/slot_entry.cuh"
#include "lora/split_sum.cuh"
#include "moe/piece.cuh"
#include "moe/search.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

// Packed by cupylora/ops/lora_finalize.py.
struct __align__(8) LoraFinalizeArgs {
  const float* h;
  i64 split_stride;
  const u8* y;
  const float* weights;
  const i32* pair_to_row;
  const i64* offsets;
  const SlotEntry* entries;
  const i32* seg_start;
  const i32* seg_expert;
  const i32* seg_slot;
  const i32* seg_count;
  const u8* bias;      // null: none
  const u8* residual;  // null: none; may be out
  u8* out;
  i32* status;
  i32 splits, rank_pitch;
  i32 by_pair;  // rows of y lie by pair, else by row
  i32 num_tokens, top_k, k_major, num_experts;
  i32 hidden;
  i32 max_loras, start_expert, max_rank;
  i32 cta_columns;  // a multiple of 64
};
static_assert(sizeof(LoraFinalizeArgs) == 168, "ops/lora_finalize.py packs 168 bytes");

namespace {

constexpr int kChoices = 8;  // at a time, a warp each
constexpr int kThreads = kChoices * kWarp;
constexpr int kColumns = 64;
constexpr int kBatch = 4;  // pieces of B that a lane has in flight, twice

// What the adding threads need to know of a choice.
struct Summand {
  i32 at;  // row of y, -1: not ours
  i32 expert;
  i32 rank;
  float scale;
  float weight;
};

// One choice of the token, looked up by a whole warp.
template <typename T>
struct Choice {
  i32 row = -1;  // sorted row, -1: not ours
  i32 rank = 0;  // 0: no delta
  const u8* b = nullptr;

  // Returns what the adding threads need.
  __device__ __forceinline__ Summand look_up(const LoraFinalizeArgs& args, i64 token, i32 j,
                                             i32 segments) {
    *this = Choice{};
    Summand summand{-1, 0, 0, 0.f, 0.f};
    if (j >= args.top_k) return summand;
    const i64 pair =
        args.k_major ? static_cast<i64>(j) * args.num_tokens + token : token * args.top_k + j;
    row = args.pair_to_row[pair];
    summand.weight = args.weights[token * args.top_k + j];
    if (row < 0) return summand;
    summand.at = args.by_pair ? static_cast<i32>(pair) : row;
    if (args.bias != nullptr) {
      summand.expert = warp_last_at_most(args.offsets, args.num_experts, row);
    }
    // The closing entry of the list stands for rows that no segment holds.
    const i32 segment = warp_last_at_most(args.seg_start, segments + 1, row);
    const i32 slot = segment < segments ? args.seg_slot[segment] : -1;
    if (slot < 0) return summand;
    const i64 expert = static_cast<i64>(args.seg_expert[segment]) + args.start_expert;
    const SlotEntry entry = load_entry(args.entries, 0, slot, args.max_loras, args.status);
    rank = safe_rank(entry, args.max_rank, nullptr);  // the shrink has reported it
    b = reinterpret_cast<const u8*>(entry.b_ptr) + expert * entry.b_expert_stride;
    summand.rank = rank;
    summand.scale = entry.scale;
    return summand;
  }
};

// How a warp's lanes share the columns of B, and the warp's part of h.
template <typename T>
struct Dot {
  static constexpr int kPer = kPieceElements<T>;
  i32 shift;  // 2^shift lanes take a column
  i32 piece;  // of its column that this lane takes
  i32 slot;   // its column among those of a step
  bool shared, live;
  float h[kPer];

  __device__ __forceinline__ explicit Dot(const Choice<T>& choice) {
    const i32 lane = threadIdx.x % kWarp, pieces = choice.rank / kPer;
    shared = choice.rank > 0 && choice.rank % kPer == 0 && pieces <= kWarp &&
             reinterpret_cast<u64>(choice.b) % 16 == 0;
    shift = 0;
    while ((1 << shift) < pieces && shift < 5) ++shift;
    piece = lane & ((1 << shift) - 1);
    slot = lane >> shift;
    live = shared && piece < pieces;
  }

  __device__ __forceinline__ i32 steps() const { return shared ? (kColumns / kWarp) << shift : 0; }
  __device__ __forceinline__ i32 column(i32 step) const { return step * (kWarp >> shift) + slot; }

  // Pieces of kBatch steps from `step` on, of the `columns` columns from `first` on.
  __device__ __forceinline__ void load(uint4 (&w)[kBatch], const Choice<T>& choice, i32 first,
                                       i32 columns, i32 step) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const i32 c = column(step + i);
      const u8* address =
          choice.b + (static_cast<i64>(first) + c) * choice.rank * static_cast<i32>(sizeof(T)) +
          piece * 16;
      w[i] = load16_if(address, live && step + i < steps() && c < columns);
    }
  }

  __device__ __forceinline__ void load_hidden(const LoraFinalizeArgs& args,
                                              const Choice<T>& choice) {
    const float* p = args.h + choice.row * static_cast<i64>(args.rank_pitch) + piece * kPer;
#pragma unroll
    for (int i = 0; i < kPer; i += 4) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if constexpr (sizeof(T) == 4) {  // rows of float32 h start anywhere
        if (live) v = make_float4(p[i], p[i + 1], p[i + 2], p[i + 3]);
      } else {
        if (live) v = sum_splits<float4>(p + i, args.split_stride, args.splits);
      }
      h[i] = v.x;
      h[i + 1] = v.y;
      h[i + 2] = v.z;
      h[i + 3] = v.w;
    }
  }

  // Products of a batch's columns into shared memory.
  __device__ __forceinline__ void multiply(const uint4 (&w)[kBatch], i32 step,
                                           float* products) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (step + i >= steps()) break;
      float b[kPer], sum = 0.f;
      unpack_piece<T>(w[i], b);
#pragma unroll
      for (int e = 0; e < kPer; ++e) sum = __fmaf_rn(b[e], h[e], sum);
      for (i32 offset = (1 << shift) / 2; offset > 0; offset /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, offset));
      }
      if (piece == 0) products[column(step + i)] = sum;
    }
  }
};

// The slow way: two columns a lane, ranks in order.
template <typename T>
__device__ __forceinline__ void multiply_columns(const LoraFinalizeArgs& args,
                                                 const Choice<T>& choice, i32 first, i32 columns,
                                                 float* products) {
  const i32 lane = threadIdx.x % kWarp;
  const float* h = args.h + choice.row * static_cast<i64>(args.rank_pitch);
  const T* b =
      reinterpret_cast<const T*>(choice.b) + (static_cast<i64>(first) + lane) * choice.rank;
  float sum[2] = {};
  for (i32 base = 0; base < choice.rank; base += kWarp) {
    const float own = base + lane < choice.rank
                          ? sum_splits<float>(h + base + lane, args.split_stride, args.splits)
                          : 0.f;
    const i32 count = min_int(kWarp, choice.rank - base);
#pragma unroll 1
    for (i32 m = 0; m < count; ++m) {
      const float value = __shfl_sync(kFullMask, own, m);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lane + i * kWarp >= columns) continue;
        const i64 at = static_cast<i64>(i) * kWarp * choice.rank + base + m;
        sum[i] = __fmaf_rn(Elem<T>::to_float(b[at]), value, sum[i]);
      }
    }
  }
  products[lane] = sum[0];
  products[lane + kWarp] = sum[1];
}

}  // namespace

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) lora_finalize(LoraFinalizeArgs args) {
  __shared__ Summand summands[kChoices];
  __shared__ float products[kChoices][kColumns];
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i64 token = blockIdx.x;
  const i64 start = static_cast<i64>(blockIdx.y) * args.cta_columns;
  const i32 first = static_cast<i32>(start < args.hidden ? start : args.hidden);
  const i32 last = first + min_int(args.cta_columns, args.hidden - first);
  const bool at_once = args.top_k <= kChoices;  // one look-up serves all columns
  const i32 segments = *args.seg_count;
  const T* y = reinterpret_cast<const T*>(args.y);
  const T* bias = reinterpret_cast<const T*>(args.bias);
  const T* residual = reinterpret_cast<const T*>(args.residual);
  bool waited = false;

  Choice<T> choice;
  Dot<T> dot(choice);
  uint4 pieces[kBatch];
  for (i32 column0 = first; column0 < last; column0 += kColumns) {
    const i32 columns = min_int(kColumns, last - column0);
    const i32 column = column0 + threadIdx.x;
    const bool adds = static_cast<i32>(threadIdx.x) < columns;
    float sum = 0.f;
    for (i32 base = 0; base < args.top_k; base += kChoices) {
      if (column0 == first || !at_once) {
        const Summand summand = choice.look_up(args, token, base + warp, segments);
        if (lane == 0) summands[warp] = summand;
        dot = Dot<T>(choice);
        dot.load(pieces, choice, column0, columns, 0);
      }
      __syncthreads();  // the choices are known, and the products before them are added
      T own[kChoices], offset[kChoices];
#pragma unroll
      for (int j = 0; j < kChoices; ++j) {
        own[j] = offset[j] = T{};
        if (!adds || summands[j].at < 0) continue;
        own[j] = y[static_cast<i64>(summands[j].at) * args.hidden + column];
        if (bias != nullptr) {
          offset[j] = bias[static_cast<i64>(summands[j].expert) * args.hidden + column];
        }
      }
      if (!waited) {
        wait_for_predecessor();
        release_successor();
      }
      if (!waited || !at_once) dot.load_hidden(args, choice);
      waited = true;

      if (dot.shared) {
        for (i32 step = 0; step < dot.steps(); step += kBatch) {
          uint4 next[kBatch];
          dot.load(next, choice, column0, columns, step + kBatch);
          dot.multiply(pieces, step, products[warp]);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) pieces[i] = next[i];
        }
      } else if (choice.rank > 0) {
        multiply_columns(args, choice, column0, columns, products[warp]);
      }
      // The next columns' B comes while these are added.
      const i32 following = column0 + kColumns;
      if (at_once) dot.load(pieces, choice, following, last - following, 0);
      __syncthreads();
      if (adds) {
        if (base == 0 && residual != nullptr) {
          sum = Elem<T>::to_float(residual[token * args.hidden + column]);
        }
#pragma unroll
        for (int j = 0; j < kChoices; ++j) {
          const Summand& summand = summands[j];
          if (summand.at < 0) continue;
          float v = Elem<T>::to_float(own[j]);
          if (summand.rank > 0) {
            v = __fmaf_rn(products[j][threadIdx.x], summand.scale, v);
          }
          if (bias != nullptr) v = __fadd_rn(v, Elem<T>::to_float(offset[j]));
          sum = __fmaf_rn(summand.weight, v, sum);
        }
      }
      if (!at_once) __syncthreads();  // the choices may be replaced
    }
    if (adds) {
      reinterpret_cast<T*>(args.out)[token * args.hidden + column] = Elem<T>::from_float(sum);
    }
  }
}
