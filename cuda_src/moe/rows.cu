// The row-wise parts of the MoE chain: permute (x into row order), activation, finalize.
//
// permute: x [T, H] -> [R, H] in row order, ghost rows zero. activation: gate and up (or up alone)
// -> hidden, computed in float, rounded once. finalize: out[t] = residual + sum over choices j, in
// order, of weight · (y + bias), float, rounded once; foreign choices are skipped.
//
// The unit of work is a warp's item: 32 pieces of 16 bytes of one row. A warp looks up its items'
// rows together and has all their loads in flight before it uses the first; nothing is shared
// between warps, so a launch may have blocks of any number of them. kVector: every piece of every
// operand lies on a 16-byte boundary and is whole. kBias: there is a bias. Every operand may come
// from the kernel before, so nothing is read ahead of the wait and no pointer is __restrict__.
#include "lora/slot_entry.cuh"
#include "moe/gate_up.cuh"
#include "moe/piece.cuh"
#include "moe/search.cuh"
#include "ptx/memory.cuh"

namespace {

constexpr int kThreads = 256;  // at most
// What a warp has in flight: items of permute (a load each) and of activation (two loads, with a
// bias four), rows of y of finalize. ops/_row_items.py knows the first two.
template <bool kVector>
constexpr int kPermuteAhead = kVector ? 4 : 1;
template <bool kVector>
constexpr int kActivationAhead = kVector ? 2 : 1;
template <bool kVector, bool kBias>
constexpr int kRowsAhead = !kVector ? 2
                           : kBias  ? 4
                                    : 8;

// A warp's items, up to kAhead neighbouring ones, `count` of them live: row, and first element of
// this lane's piece.
template <typename T, int kAhead>
struct Items {
  i32 count;
  i64 row[kAhead];
  i32 column[kAhead];

  __device__ __forceinline__ Items(u32 items, u32 blocks, u32 per_warp) {
    const u32 first = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp * per_warp;
    count = first < items ? static_cast<i32>(min(per_warp, items - first)) : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const u32 whole = (first + i) / blocks, block = first + i - whole * blocks;
      row[i] = whole;
      column[i] = static_cast<i32>((block * kWarp + threadIdx.x % kWarp) * kPieceElements<T>);
    }
  }
};

}  // namespace

template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    permute_rows(const T* x, const i32* row_to_pair, const i64* offsets, i32 num_experts,
                 i32 num_tokens, i32 top_k, i32 k_major, i32 width, u32 blocks, u32 num_items,
                 u32 per_warp, T* out) {
  constexpr int kAhead = kPermuteAhead<kVector>;
  const RowMap map{row_to_pair, top_k, num_tokens, k_major};
  const Items<T, kAhead> items(num_items, blocks, per_warp);
  wait_for_predecessor();
  release_successor();
  if (items.count == 0) return;
  const i64 valid = offsets[num_experts];
  i32 pair[kAhead];
  uint4 piece[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    pair[i] = i < items.count ? row_to_pair[items.row[i]] : -1;
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const bool live = i < items.count && items.row[i] < valid;
    const i32 column = items.column[i];
    const T* from = x + static_cast<i64>(live ? map.token(pair[i]) : 0) * width + column;
    piece[i] = load_piece<kVector>(from, live ? width - column : 0);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i >= items.count) break;
    const i32 column = items.column[i];
    store_piece<kVector>(out + items.row[i] * width + column, piece[i], width - column);
  }
}

// rows: null row_to_pair means that every row of x is live and none has an expert.
template <typename T, bool kVector, bool kBias>
__global__ void __launch_bounds__(kThreads, 4)
    activation(const T* x, i32 hidden, i32 kind, i32 gated, i32 layout, float alpha, float limit,
               const T* bias, const i32* row_to_pair, const i64* offsets, i32 num_experts,
               i32 by_pair, u32 blocks, u32 num_items, u32 per_warp, T* out) {
  constexpr int kAhead = kActivationAhead<kVector>;
  const ActivationForm form{hidden, kind, gated, layout, alpha, limit};
  const Items<T, kAhead> items(num_items, blocks, per_warp);
  wait_for_predecessor();
  release_successor();
  if (items.count == 0) return;
  const i64 valid = row_to_pair == nullptr ? 0x7fffffffffffffffll : offsets[num_experts];
  i64 at[kAhead];  // row of x and out
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    at[i] = items.row[i];
    if (row_to_pair != nullptr && by_pair && i < items.count) at[i] = row_to_pair[at[i]];
  }
  i32 left[kAhead];
  GateUpPieces<T, kVector> pieces[kAhead], biases[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const bool live = i < items.count && items.row[i] < valid;
    left[i] = live ? hidden - items.column[i] : 0;
    if constexpr (kBias) {
      const i64 e = live ? warp_last_at_most(offsets, num_experts, items.row[i]) : 0;
      biases[i].load(bias + e * form.width(), items.column[i], left[i], form);
    }
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    pieces[i].load(x + at[i] * form.width(), items.column[i], left[i], form);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (left[i] <= 0) continue;
    GateUp<T> values(pieces[i], form);
    if constexpr (kBias) values.add(GateUp<T>(biases[i], form));
    store_piece<kVector>(out + at[i] * hidden + items.column[i], values.activated(form), left[i]);
  }
}

template <typename T, bool kVector, bool kBias>
__global__ void __launch_bounds__(kThreads, 3)
    finalize(const T* y, const float* weights, const i32* pair_to_row, const i64* offsets,
             i32 num_experts, i32 num_tokens, i32 top_k, i32 k_major, i32 hidden, i32 by_pair,
             const T* bias, const T* residual, u32 blocks, u32 num_items, T* out) {
  constexpr int kPer = kPieceElements<T>, kGroup = kRowsAhead<kVector, kBias>;
  const Items<T, 1> items(num_items, blocks, 1);
  const i32 lane = threadIdx.x % kWarp;
  const i64 token = items.row[0];
  const i32 column = items.column[0], left = hidden - column;
  wait_for_predecessor();
  release_successor();
  if (items.count == 0) return;
  float sum[kPer] = {};
  if (residual != nullptr) {
    unpack_piece<T>(load_piece<kVector>(residual + token * hidden + column, left), sum);
  }
  for (i32 base = 0; base < top_k; base += kWarp) {
    // A lane looks up one choice: where its row of y lies (-1: not ours), weight and expert.
    const i32 j = base + lane, choices = min_int(kWarp, top_k - base);
    i32 at = -1, expert = 0;
    float weight = 0.f;
    i32 row = -1;
    if (j < top_k) {
      const i64 pair = k_major ? static_cast<i64>(j) * num_tokens + token : token * top_k + j;
      row = pair_to_row[pair];
      weight = weights[token * top_k + j];
      at = row < 0 ? -1 : by_pair ? static_cast<i32>(pair) : row;
    }
    if constexpr (kBias) {
      expert = LaneSearch<i64>(offsets, num_experts).last_at_most(row, choices);
    }
    for (i32 first = 0; first < choices; first += kGroup) {
      uint4 piece[kGroup], offset[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        // Lanes past the last choice hold -1.
        const i32 from = __shfl_sync(kFullMask, at, first + i);
        const T* p = y + static_cast<i64>(from < 0 ? 0 : from) * hidden + column;
        piece[i] = load_piece<kVector>(p, from < 0 ? 0 : left);
        if constexpr (kBias) {
          const i64 e = __shfl_sync(kFullMask, expert, first + i);
          offset[i] = load_piece<kVector>(bias + e * hidden + column, from < 0 ? 0 : left);
        }
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const i32 from = __shfl_sync(kFullMask, at, first + i);
        const float w = __shfl_sync(kFullMask, weight, first + i);
        if (from < 0) continue;
        float v[kPer];
        unpack_piece<T>(piece[i], v);
        if constexpr (kBias) {
          float b[kPer];
          unpack_piece<T>(offset[i], b);
#pragma unroll
          for (int c = 0; c < kPer; ++c) v[c] = __fadd_rn(v[c], b[c]);
        }
#pragma unroll
        for (int c = 0; c < kPer; ++c) sum[c] = __fmaf_rn(w, v[c], sum[c]);
      }
    }
  }
  store_piece<kVector>(out + token * hidden + column, pack_piece<T>(sum), left);
}
