// read_stream: reads `count` 16-byte values and does nothing with them; a yardstick for the bench.
//
// In: data [count]. Out: nothing; `sink` is written in a case that does not occur, so that the
// loads stay. A thread has kUnroll loads in flight and strides over the grid.
#include "ptx/types.cuh"

namespace {

constexpr i32 kThreads = 256;
constexpr u32 kNever = 0x12345678u;

}  // namespace

template <int kUnroll>
__global__ void __launch_bounds__(kThreads)
    read_stream(const uint4* __restrict__ data, u64 count, u32* __restrict__ sink) {
  const u64 stride = static_cast<u64>(gridDim.x) * kThreads * kUnroll;
  u32 mixed = 0;
  for (u64 i = static_cast<u64>(blockIdx.x) * kThreads * kUnroll + threadIdx.x; i < count;
       i += stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const u64 at = i + static_cast<u64>(u) * kThreads;
      v[u] = at < count ? __ldg(data + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) mixed ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (mixed == kNever) *sink = mixed;
}
