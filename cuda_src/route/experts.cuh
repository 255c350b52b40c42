// Expert offsets in shared memory, and the expert of a sorted row.
#pragma once
#include "ptx/types.cuh"

constexpr int kMaxExperts = 2048;

__device__ __forceinline__ void load_offsets(i32* shared, const i64* __restrict__ global,
                                             i32 num_experts) {
  for (i32 e = threadIdx.x; e <= num_experts; e += blockDim.x) {
    shared[e] = static_cast<i32>(global[e]);
  }
  __syncthreads();
}

// Last expert that starts at or before the row: an empty expert shares its successor's offset.
template <typename Offset>
__device__ __forceinline__ i32 expert_of_row(const Offset* offsets, i32 num_experts, i64 row) {
  i32 low = 0, high = num_experts;
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    if (offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}
