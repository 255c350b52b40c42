// Kernels for tests of the emulator: each with one fault of a kind, or with none. All take 64
// words.
#include "ptx/async.cuh"
#include "ptx/memory.cuh"

template <bool kOrdered>
__global__ void neighbour(u32* out) {
  __shared__ u32 words[64];
  words[threadIdx.x] = threadIdx.x;
  if (kOrdered) __syncthreads();
  out[threadIdx.x] = words[(threadIdx.x + 32) % 64];
}
__global__ void unset(u32* out) {
  __shared__ u32 words[2];
  out[0] = words[0];
}
template <int kAt>
__global__ void store_at(u32* out) {
  if (threadIdx.x == 0) out[kAt] = 1;
}
__global__ void store_same(u32* out) { out[threadIdx.x] = 1; }
__global__ void store_high(u16* out) { *reinterpret_cast<u32*>(out + 1) = 1; }
__global__ void shared_overrun(u32* out) {
  __shared__ u32 words[4];
  words[threadIdx.x % 8] = 0;
}
__global__ void diverge(u32* out) {
  if (threadIdx.x == 5) {
    __syncwarp();
  } else {
    out[threadIdx.x] = __shfl_sync(kFullMask, 1, 0);
  }
}
__global__ void half_barrier(u32* out) {
  if (threadIdx.x < 32) __syncthreads();
}
template <bool kWaits>
__global__ void after_the_one_ahead(u32* out) {
  if (kWaits) wait_for_predecessor();
  release_successor();
  out[threadIdx.x] = 1;
}
__global__ void early(u32* out) {
  out[threadIdx.x] = 1;
  wait_for_predecessor();
}
template <int kWaits>
__global__ void copy_in(u32* out) {
  __shared__ __align__(16) u32 words[4];
  if (threadIdx.x == 0) {
    copy16_async(shared_address(words), out, 16);
    commit_async();
    if (kWaits) wait_async<0>();
    out[4] = words[0];
  }
}
template <bool kInit, int kBytes>
__global__ void bulk_in(u32* out) {
  __shared__ __align__(16) u32 words[4];
  __shared__ u64 barrier;
  const u32 full = shared_address(&barrier);
  if (threadIdx.x == 0) {
    if (kInit) mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_expect(full, kBytes);
    bulk_load(shared_address(words), out, 16, full);
    mbarrier_wait(full, 0);
    out[4] = words[0];
  }
}
__global__ void bulk_over_stores(u32* out) {
  __shared__ __align__(16) u32 words[4];
  __shared__ u64 barrier;
  const u32 full = shared_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    words[0] = 1;
    mbarrier_expect(full, 16);
    bulk_load(shared_address(words), out, 16, full);
    mbarrier_wait(full, 0);
  }
}
template <bool kStays>
__global__ void push_to_other(u32* out) {
  __shared__ __align__(16) float word[4];
  __shared__ u64 barrier;
  const u32 full = shared_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_expect(full, 4);
  }
  cluster_arrive_relaxed();
  cluster_wait();
  if (threadIdx.x == 0) {
    const u32 other = cluster_rank() ^ 1;
    push1(map_shared(shared_address(word), other), 2.f, map_shared(full, other));
    if (kStays) mbarrier_wait(full, 0);
    if (kStays) out[cluster_rank()] = static_cast<u32>(word[0]);
  }
}
