// Prefix scans over a warp and over a block: integers, any associative operation, always in thread
// order.
#pragma once
#include "ptx/types.cuh"

struct Sum {
  __device__ __forceinline__ i32 operator()(i32 a, i32 b) const { return a + b; }
};
struct Max {
  __device__ __forceinline__ i32 operator()(i32 a, i32 b) const { return max_int(a, b); }
};

template <typename Op>
__device__ __forceinline__ i32 warp_inclusive(i32 value, Op op) {
  const i32 lane = threadIdx.x % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const i32 other = __shfl_up_sync(kFullMask, value, offset);
    if (lane >= offset) value = op(other, value);
  }
  return value;
}

// Inclusive scan over the block's threads (whole warps). `scratch` has one word a warp of a full
// block (32) and may be reused as soon as this returns.
template <typename Op>
__device__ __forceinline__ i32 block_inclusive(i32 value, i32 identity, i32* scratch, Op op) {
  const i32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  value = warp_inclusive(value, op);
  if (lane == kWarp - 1) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    const bool live = lane < static_cast<i32>(blockDim.x) / kWarp;
    const i32 sum = warp_inclusive(live ? scratch[lane] : identity, op);
    __syncwarp();
    if (live) scratch[lane] = sum;
  }
  __syncthreads();
  const i32 before = warp == 0 ? identity : scratch[warp - 1];
  __syncthreads();
  return op(before, value);
}
