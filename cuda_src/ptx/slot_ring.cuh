// A ring of shared-memory slots between warps that fill them with cp.async and warps that use what
// is in them, from sm_80 on. Each slot has two mbarriers: `full`, on which every lane that fills
// arrives once its copies have come, and `empty`, on which every warp that uses the slot arrives.
//
// Every party walks the slots in the same order and has a SlotRing of its own.
#pragma once
#include "ptx/memory.cuh"

__device__ __forceinline__ void slot_barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void slot_barrier_arrive(u32 barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}\n" ::"r"(barrier)
      : "memory");
}
// Arrives once all earlier cp.async of this thread are complete.
__device__ __forceinline__ void slot_barrier_arrive_async(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void slot_barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// One party's place in the ring.
struct SlotRing {
  u32 barriers;  // shared address: `slots` full barriers, then `slots` empty ones
  u32 data;      // shared address of the first slot
  u32 slot_bytes;
  i32 slots;
  i32 at = 0;
  u32 parity = 0;

  __device__ __forceinline__ SlotRing(u32 barriers, u32 data, u32 slot_bytes, i32 slots)
      : barriers(barriers), data(data), slot_bytes(slot_bytes), slots(slots) {}

  // By one thread, ahead of a CTA barrier.
  __device__ __forceinline__ void init(u32 filling_lanes, u32 using_warps) const {
    for (i32 i = 0; i < slots; ++i) {
      slot_barrier_init(barriers + 8 * i, filling_lanes);
      slot_barrier_init(barriers + 8 * (slots + i), using_warps);
    }
  }
  __device__ __forceinline__ u32 full() const { return barriers + 8 * at; }
  __device__ __forceinline__ u32 empty() const { return barriers + 8 * (slots + at); }
  __device__ __forceinline__ u32 address() const { return data + at * slot_bytes; }
  __device__ __forceinline__ void advance() {
    if (++at == slots) {
      at = 0;
      parity ^= 1;
    }
  }
  // Leaves out slots, fewer than there are.
  __device__ __forceinline__ void skip(i32 count) {
    at += count;
    if (at >= slots) {
      at -= slots;
      parity ^= 1;
    }
  }

  // The party that fills: returns the slot's address once it is free (at first it is).
  __device__ __forceinline__ u32 acquire() const {
    slot_barrier_wait(empty(), parity ^ 1);
    return address();
  }
  // Hands the slot on when this lane's copies have come; `stored`: it was filled by plain stores.
  __device__ __forceinline__ void commit(bool stored) {
    if (stored) {
      slot_barrier_arrive(full());
    } else {
      slot_barrier_arrive_async(full());
    }
    advance();
  }

  // The party that uses: returns the slot's address once it is filled.
  __device__ __forceinline__ u32 wait() const {
    slot_barrier_wait(full(), parity);
    return address();
  }
  // By a whole warp that is done with the slot.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) slot_barrier_arrive(empty());
    advance();
  }
};
