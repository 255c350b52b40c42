// Counts the output tiles of a list of grouped-GEMM problems: tile_start [P+1], the work list of
// the kernels beside this file. One CTA; sizes and the number of problems are device data.
#include "gemm/problems.cuh"
#include "ptx/memory.cuh"
#include "ptx/scan.cuh"

constexpr int kThreads = 1024;

extern "C" __global__ void __launch_bounds__(kThreads)
    gemm_tiles(GemmProblems problems, i32 capacity, i32 tile_m, i32 tile_n, i32 beta,
               i32* tile_start) {
  __shared__ i32 scratch[kWarp];
  wait_for_predecessor();
  release_successor();
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
    const i32 end = before + block_inclusive(tiles, 0, scratch, Sum());
    if (p < count) tile_start[p] = end - tiles;
    if (threadIdx.x == kThreads - 1) scratch[0] = end;
    __syncthreads();
    before = scratch[0];
    __syncthreads();
  }
  if (threadIdx.x == 0) tile_start[count] = before;
}
