// Thin wrappers over memory instructions: wide loads, asynchronous copies, ldmatrix.
#pragma once
#include "ptx/types.cuh"

// 16 or 8 bytes through the read-only path, zeros where `valid` is false. Volatile keeps the loads
// of a pipeline stage issued together, ahead of the products that use the stage before.
__device__ __forceinline__ uint4 load16_if(const void* address, bool valid) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(static_cast<u32>(valid)));
  return v;
}

// The same for memory that this kernel also writes: not through the read-only path.
__device__ __forceinline__ uint4 load16_rw_if(const void* address, bool valid) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(static_cast<u32>(valid)));
  return v;
}

// The same of what is used once: not kept in the L1.
__device__ __forceinline__ uint4 load16_once_if(const void* address, bool valid) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(static_cast<u32>(valid)));
  return v;
}

__device__ __forceinline__ u32 load4_rw_if(const void* address, bool valid) {
  u32 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@p ld.global.u32 %0, [%1];\n"
      "}\n"
      : "=&r"(v)
      : "l"(address), "r"(static_cast<u32>(valid)));
  return v;
}

__device__ __forceinline__ void store4_if(void* address, u32 v, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p st.global.u32 [%0], %1;\n"
      "}\n" ::"l"(address),
      "r"(v), "r"(static_cast<u32>(valid))
      : "memory");
}

__device__ __forceinline__ uint2 load8_if(const void* address, bool valid) {
  uint2 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "@p ld.global.nc.v2.u32 {%0, %1}, [%2];\n"
      "}\n"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(address), "r"(static_cast<u32>(valid)));
  return v;
}

// Brings the 128-byte line of an address into the L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
}

__device__ __forceinline__ void prefetch_line_to_stay(const void* address) {
  asm volatile("prefetch.global.L2::evict_last [%0];\n" ::"l"(address));
}

// Programmatic dependent launch (from sm_90 on; elsewhere a kernel starts when all before it is
// done). Before the wait a kernel may touch nothing that its predecessor writes; a pointer to such
// memory must not be __restrict__, or a load through it could be moved ahead of the wait.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Lets the successor start (and wait) while this kernel runs on.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
// Both, at the first call: for a thread that looks things up for as long as it may.
struct Predecessor {
  bool waited = false;

  __device__ __forceinline__ void wait() {
    if (waited) return;
    wait_for_predecessor();
    release_successor();
    waited = true;
  }
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A byte that several threads may set to one value at a time.
__device__ __forceinline__ void store1_relaxed(u32 address, u32 value) {
  asm volatile("st.relaxed.cta.shared.u8 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint4 load16_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load8_shared(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load4_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ u16 load2_shared(u32 address) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store2_shared(u32 address, u16 v) {
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(address), "h"(v) : "memory");
}
__device__ __forceinline__ void store4_shared(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store16_shared(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
// Zeros instead where `valid` is false.
__device__ __forceinline__ uint4 load16_shared_if(u32 address, bool valid) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (valid) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
  }
  return v;
}
__device__ __forceinline__ uint2 load8_shared_if(u32 address, bool valid) {
  uint2 v = make_uint2(0, 0);
  if (valid) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "r"(address));
  }
  return v;
}
// Four neighbouring 2-byte elements, `count` of them valid and the rest zero.
__device__ __forceinline__ uint2 gather4_shared(u32 address, i32 count) {
  u32 element[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u16 v = 0;
    if (i < count) asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(address + 2 * i));
    element[i] = v;
  }
  return make_uint2(element[0] | (element[1] << 16), element[2] | (element[3] << 16));
}

// Copies `bytes` (0..16) to shared memory and fills the rest of the 16 with zeros.
__device__ __forceinline__ void copy16_async(u32 shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(bytes));
}
__device__ __forceinline__ void copy4_async(u32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global));
}
__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;\n" ::); }
template <int kPending>
__device__ __forceinline__ void wait_async() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// What is streamed through once leaves the L2 first.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy16_async_if(u32 shared, const void* global, bool valid,
                                                u64 policy) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<u32>(valid)), "l"(policy));
}
// A 16-byte copy (of `bytes`, 0 or 16, the rest zeros), if `valid`, of a row that is read on: the
// L2 fetches 256 bytes.
__device__ __forceinline__ void copy16_async_ahead_if(u32 shared, const void* global, int bytes,
                                                      bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "@p cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(static_cast<u32>(valid)));
}
__device__ __forceinline__ void store16_streaming(void* global, const uint4& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(global), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
