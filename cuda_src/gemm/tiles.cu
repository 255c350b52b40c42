// Counts the output tiles of a list of grouped-GEMM problems: tile_start [P+1], the work list of
// the kernels beside this file. One CTA; sizes and the number of problems are device data.
#include "gemm/problems.cuh"

constexpr int kThreads = 1024;

extern "C" __global__ void __launch_bounds__(kThreads)
    gemm_tiles(GemmProblems problems, i32 capacity, i32 tile_m, i32 tile_n, i32 beta,
               i32* __restrict__ tile_start) {
  __shared__ i32 warp_sums[kThreads / kWarp];
  const i32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const i32 count = min_int(*problems.count, capacity);
  i32 before = 0;
  for (i32 base = 0; base < count; base += kThreads) {
    const i32 p = base + threadIdx.x;
    i32 tiles = 0;
    if (p < count) {
      const i32 m = problems.m[p], n = problems.n[p];
      // With k = 0 there is nothing to add; only beta = 0 has zeros to write.
      const bool runs = m > 0 && n > 0 && (problems.k[p] > 0 || beta == 0);
      tiles = runs ? ceil_div(m, tile_m) * ceil_div(n, tile_n) : 0;
    }
    i32 inclusive = tiles;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const i32 other = __shfl_up_sync(kFullMask, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    if (lane == kWarp - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    i32 ahead = before, total = 0;
    for (i32 w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) ahead += warp_sums[w];
      total += warp_sums[w];
    }
    __syncthreads();
    if (p < count) tile_start[p] = ahead + inclusive - tiles;
    before += total;
  }
  if (threadIdx.x == 0) tile_start[count] = before;
}
