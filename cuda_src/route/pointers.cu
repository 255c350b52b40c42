// From slots to addresses to problems: what a host that owns a grouped GEMM needs.
//
// slot_lookup: token_to_slot -> per (module, token) what the slot holds (TokenLora).
// pointer_expand: Routing + TokenLora -> per (module, row) rank, A, B, scale (RowLora); ghost and
// base rows are written as rank 0 and null, never left stale. problem_rows / problem_segments:
// RowLora -> shrink and expand problems (LoraProblems), one a row or one a run of equal rows.
// expert_problems: one base-weight problem per expert.
#include "lora/slot_entry.cuh"
#include "ptx/memory.cuh"
#include "ptx/scan.cuh"
#include "ptx/types.cuh"
#include "route/experts.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kRunThreads = 1024;

// One GemmProblems: arrays of the same length, all fields of problem p at index p.
struct Problems {
  i32* m;
  i32* n;
  i32* k;
  u64* a;
  u64* b;
  u64* d;
  i64* lda;
  i64* ldb;
  i64* ldd;
  float* alpha;

  __device__ __forceinline__ void write(i32 p, i32 m_, i32 n_, i32 k_, u64 a_, u64 b_, u64 d_,
                                        i64 lda_, i64 ldb_, i64 ldd_, float alpha_) const {
    m[p] = m_;
    n[p] = n_;
    k[p] = k_;
    a[p] = a_;
    b[p] = b_;
    d[p] = d_;
    lda[p] = lda_;
    ldb[p] = ldb_;
    ldd[p] = ldd_;
    alpha[p] = alpha_;
  }
};

// What all problems of one module share.
struct ModuleShape {
  u64 x, h, y;
  i64 ldx, ldy;
  i32 itemsize, h_itemsize, in_features, out_features, max_rank;
};

struct RowArrays {
  const i32* rank;
  const u64* a;
  const u64* b;
  const float* scale;

  // 0 for a rank that must not run.
  __device__ __forceinline__ i32 safe_rank(i32 row, i32 max_rank) const {
    return rank[row] < 0 || rank[row] > max_rank ? 0 : rank[row];
  }
  // Whether two rows of one expert belong to one problem. Rows of rank 0 are alike.
  __device__ __forceinline__ bool same(i32 r, i32 s, i32 max_rank) const {
    const i32 own = safe_rank(r, max_rank);
    if (own != safe_rank(s, max_rank)) return false;
    return own == 0 ||
           (a[r] == a[s] && b[r] == b[s] && __float_as_uint(scale[r]) == __float_as_uint(scale[s]));
  }
};

__device__ __forceinline__ void write_pair(const Problems& shrink, const Problems& expand,
                                           const ModuleShape& shape, const RowArrays& rows, i32 p,
                                           i32 row, i32 m, i32* status) {
  if (m == 0) {
    shrink.write(p, 0, 0, 0, 0, 0, 0, shape.ldx, shape.in_features, shape.max_rank, 1.f);
    expand.write(p, 0, 0, 0, 0, 0, 0, shape.max_rank, 0, shape.ldy, 0.f);
    return;
  }
  const i32 rank = rows.safe_rank(row, shape.max_rank);
  if (rank != rows.rank[row]) raise_status(status, kStatusRankRange);
  const u64 x = shape.x + static_cast<u64>(row) * shape.ldx * shape.itemsize;
  const u64 h = shape.h + static_cast<u64>(row) * shape.max_rank * shape.h_itemsize;
  const u64 y = shape.y + static_cast<u64>(row) * shape.ldy * shape.itemsize;
  const bool lora = rank > 0;
  shrink.write(p, m, rank, shape.in_features, x, lora ? rows.a[row] : 0, h, shape.ldx,
               shape.in_features, shape.max_rank, 1.f);
  expand.write(p, m, shape.out_features, rank, h, lora ? rows.b[row] : 0, y, shape.max_rank, rank,
               shape.ldy, lora ? rows.scale[row] : 0.f);
}

}  // namespace

extern "C" __global__ void slot_lookup(const i32* __restrict__ token_to_slot, i32 num_tokens,
                                       const SlotEntry* __restrict__ table, i32 modules,
                                       i32 max_loras, i32 max_rank, i32 a_layout,
                                       i32* __restrict__ rank, u64* __restrict__ a,
                                       u64* __restrict__ b, i64* __restrict__ a_stride,
                                       i64* __restrict__ b_stride, float* __restrict__ scale,
                                       i32* status) {
  const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<i64>(modules) * num_tokens) return;
  const i32 module = static_cast<i32>(index / num_tokens);
  const i32 slot = token_to_slot[index % num_tokens];
  SlotEntry entry = {};
  if (slot >= max_loras) {
    raise_status(status, kStatusSlotRange);
  } else if (slot >= 0) {
    entry = load_entry(table, module, slot, max_loras);
    const bool rank_fits = entry.rank >= 0 && entry.rank <= max_rank;
    const bool layout_fits = entry.rank == 0 || entry.a_layout == a_layout;
    if (!rank_fits) raise_status(status, kStatusRankRange);
    if (rank_fits && !layout_fits) raise_status(status, kStatusLayout);
    if (!rank_fits || !layout_fits || entry.rank == 0) entry = SlotEntry{};
  }
  rank[index] = entry.rank;
  a[index] = entry.a_ptr;
  b[index] = entry.b_ptr;
  a_stride[index] = entry.a_expert_stride;
  b_stride[index] = entry.b_expert_stride;
  scale[index] = entry.scale;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    pointer_expand(const i32* __restrict__ row_to_pair, const i64* __restrict__ global_offsets,
                   i32 num_tokens, i32 top_k, i32 k_major, i32 num_experts, i32 start_expert,
                   i32 modules, const i32* __restrict__ token_rank, const u64* __restrict__ token_a,
                   const u64* __restrict__ token_b, const i64* __restrict__ a_stride,
                   const i64* __restrict__ b_stride, const float* __restrict__ token_scale,
                   i32* __restrict__ row_token, i32* __restrict__ row_expert,
                   i32* __restrict__ rank, u64* __restrict__ a, u64* __restrict__ b,
                   float* __restrict__ scale) {
  __shared__ i32 offsets[kMaxExperts + 1];
  load_offsets(offsets, global_offsets, num_experts);
  const RowMap map{row_to_pair, top_k, num_tokens, k_major};
  const i32 num_rows = num_tokens * top_k;
  const i32 row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= num_rows) return;
  const bool ghost = row >= offsets[num_experts];
  const i32 token = ghost ? -1 : map.token(row_to_pair[row]);
  const i32 expert = ghost ? -1 : expert_of_row(offsets, num_experts, row);
  row_token[row] = token;
  row_expert[row] = expert;
  for (i32 module = 0; module < modules; ++module) {
    const i64 from = static_cast<i64>(module) * num_tokens + token;
    const i64 to = static_cast<i64>(module) * num_rows + row;
    const i32 own = ghost ? 0 : token_rank[from];
    const bool lora = own != 0;
    const i64 global_expert = static_cast<i64>(expert) + start_expert;
    rank[to] = own;
    a[to] = lora ? token_a[from] + global_expert * a_stride[from] : 0;
    b[to] = lora ? token_b[from] + global_expert * b_stride[from] : 0;
    scale[to] = lora ? token_scale[from] : 0.f;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    problem_rows(const i64* __restrict__ offsets, i32 num_experts, i32 num_rows, RowArrays rows,
                 ModuleShape shape, Problems shrink, Problems expand,
                 i32* __restrict__ shrink_count, i32* __restrict__ expand_count,
                 i64* __restrict__ splitk_offsets, i32 splitk_slices, i32* status) {
  const i32 row = blockIdx.x * kThreads + threadIdx.x;
  if (row == 0) {
    *shrink_count = num_rows;
    *expand_count = num_rows;
  }
  const i64 per_row = static_cast<i64>(shape.max_rank) * splitk_slices;
  if (splitk_offsets != nullptr && row <= num_rows) splitk_offsets[row] = row * per_row;
  if (row >= num_rows) return;
  const i32 m = row < offsets[num_experts] ? 1 : 0;
  write_pair(shrink, expand, shape, rows, row, row, m, status);
}

// One CTA walks all rows: a run starts where the expert or any field differs from the row before.
extern "C" __global__ void __launch_bounds__(kRunThreads)
    problem_runs(const i64* __restrict__ global_offsets, i32 num_experts, RowArrays rows,
                 ModuleShape shape, Problems shrink, Problems expand,
                 i32* __restrict__ shrink_count, i32* __restrict__ expand_count,
                 i64* __restrict__ splitk_offsets, i32 splitk_slices, i32 max_problems,
                 i32* status) {
  __shared__ i32 offsets[kMaxExperts + 1];
  __shared__ i32 scratch[kWarp];
  __shared__ i32 cut;  // row behind the last problem: where the first one without room begins
  load_offsets(offsets, global_offsets, num_experts);
  const i32 valid = offsets[num_experts];
  if (threadIdx.x == 0) cut = valid;
  const i64 per_row = static_cast<i64>(shape.max_rank) * splitk_slices;
  const auto starts = [&](i32 row) {
    return row == 0 || offsets[expert_of_row(offsets, num_experts, row)] == row ||
           !rows.same(row - 1, row, shape.max_rank);
  };
  i32 before = 0;
  for (i32 base = 0; base < valid; base += kRunThreads) {
    const i32 row = base + threadIdx.x;
    if (row < valid && rows.safe_rank(row, shape.max_rank) != rows.rank[row]) {
      raise_status(status, kStatusRankRange);
    }
    const bool start = row < valid && starts(row);
    const i32 end = before + block_inclusive(start ? 1 : 0, 0, scratch, Sum());
    if (start && end <= max_problems) shrink.m[end - 1] = row;
    if (start && end == max_problems + 1) cut = row;
    if (threadIdx.x == kRunThreads - 1) scratch[0] = end;
    __syncthreads();
    before = scratch[0];
    __syncthreads();
  }
  // shrink.m holds the first rows now. A chunk reads them, and the next one's first, before it
  // overwrites its own.
  const i32 count = min_int(before, max_problems);
  if (threadIdx.x == 0 && before > max_problems) raise_status(status, kStatusCapacity);
  __syncthreads();
  for (i32 base = 0; base < count; base += kRunThreads) {
    const i32 p = base + threadIdx.x;
    const i32 row = p < count ? shrink.m[p] : cut;
    const i32 end = p + 1 < count ? shrink.m[p + 1] : cut;
    __syncthreads();
    if (p < count) {
      write_pair(shrink, expand, shape, rows, p, row, end - row, status);
      if (splitk_offsets != nullptr) splitk_offsets[p] = row * per_row;
    }
  }
  if (threadIdx.x == 0) {
    *shrink_count = count;
    *expand_count = count;
    if (splitk_offsets != nullptr) splitk_offsets[count] = cut * per_row;
  }
}

// Part of the chain of dependent launches, so its pointers are not __restrict__.
extern "C" __global__ void expert_problems(const i64* offsets, i32 num_experts, u64 x, u64 w, u64 y,
                                           i64 ldx, i64 ldy, i32 itemsize, i32 in_features,
                                           i32 out_features, Problems problems, i32* count) {
  const i32 e = blockIdx.x * blockDim.x + threadIdx.x;
  wait_for_predecessor();
  release_successor();
  if (e == 0) *count = num_experts;
  if (e >= num_experts) return;
  const i64 first = offsets[e];
  const u64 weight_bytes = static_cast<u64>(in_features) * out_features * itemsize;
  problems.write(e, static_cast<i32>(offsets[e + 1] - first), out_features, in_features,
                 x + first * ldx * itemsize, w + e * weight_bytes, y + first * ldy * itemsize, ldx,
                 in_features, ldy, 1.f);
}
