// The PTX instructions that cuda_src uses, as functions: results by reference first, then operands,
// in the order of the asm statement. instructions.py says which statement becomes which function.
#pragma once
#include "shape.h"

namespace emu::ptx {

#define EMU_API __attribute__((visibility("default")))

// plain_memory.cpp
EMU_API void load_global16_if(u32& x, u32& y, u32& z, u32& w, const void* address, u32 valid);
EMU_API void load_global8_if(u32& x, u32& y, const void* address, u32 valid);
EMU_API void load_global4_if(u32& x, const void* address, u32 valid);
EMU_API void store_global4_if(void* address, u32 x, u32 valid);
EMU_API void store_global16(void* address, u32 x, u32 y, u32 z, u32 w);
EMU_API void load_shared16(u32& x, u32& y, u32& z, u32& w, u32 address);
EMU_API void load_shared8(u32& x, u32& y, u32 address);
EMU_API void load_shared4(u32& x, u32 address);
EMU_API void load_shared2(u16& x, u32 address);
EMU_API void store_shared16(u32 address, u32 x, u32 y, u32 z, u32 w);
EMU_API void store_shared4(u32 address, u32 x);
EMU_API void store_shared2(u32 address, u16 x);
EMU_API void store_shared1_relaxed(u32 address, u32 x);
inline void prefetch(const void*) {}
inline void evict_first_policy(u64& policy) { policy = 0; }

// async_copies.cpp
EMU_API void copy16_async(u32 to, const void* from, i32 bytes);
EMU_API void copy4_async(u32 to, const void* from);
EMU_API void copy16_async_if(u32 to, const void* from, i32 bytes, u32 valid);
EMU_API void copy16_async_hinted_if(u32 to, const void* from, u32 valid, u64 policy);
EMU_API void commit_async();
EMU_API void wait_async(i32 groups);
EMU_API void mbarrier_arrive_after_copies(u32 barrier);
EMU_API void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier);
EMU_API void fence_async_proxy();
EMU_API void map_shared(u32& mapped, u32 address, u32 rank);
EMU_API void push4(u32 to, float x, float y, float z, float w, u32 barrier);
EMU_API void push1(u32 to, float value, u32 barrier);

// barriers.cpp
EMU_API void mbarrier_init(u32 address, u32 arrivals);
EMU_API void fence_mbarrier_init();
EMU_API void mbarrier_arrive(u32 address);
EMU_API void mbarrier_expect(u32 address, u32 bytes);
EMU_API void mbarrier_wait(u32 address, u32 parity);
EMU_API void bar_sync(i32 id, i32 threads);
EMU_API void cluster_arrive_relaxed();
EMU_API void cluster_wait();
EMU_API void cluster_rank(u32& rank);
EMU_API void cluster_index(u32& index);
EMU_API void cluster_size(u32& size);
EMU_API void wait_for_predecessor();
EMU_API void release_successor();

// warp.cpp
EMU_API void mma_bf16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3,
                      u32 b0, u32 b1);
EMU_API void mma_fp16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3,
                      u32 b0, u32 b1);
EMU_API void ldmatrix_x4(u32& r0, u32& r1, u32& r2, u32& r3, u32 address);

// wgmma.cpp. Operands: the floats of D, four words of A, B's descriptor, whether D is added to.
EMU_API void wgmma_fence();
EMU_API void wgmma_commit();
EMU_API void wgmma_wait();
EMU_API void wgmma(bool fp16, const void* const* operands, u32 count);
template <typename... Operands>
inline void wgmma_bf16(const Operands&... operands) {
  const void* const all[] = {&operands...};
  wgmma(false, all, sizeof...(operands));
}
template <typename... Operands>
inline void wgmma_fp16(const Operands&... operands) {
  const void* const all[] = {&operands...};
  wgmma(true, all, sizeof...(operands));
}
inline void nothing(const float&) {}

// Arithmetic. A NaN becomes the one NaN that the device's conversions give.
inline u16 bf16_of(float value) {
  const u32 bits = __builtin_bit_cast(u32, value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline u16 fp16_of(float value) {
  if (value != value) return 0x7fff;
  return __builtin_bit_cast(u16, static_cast<_Float16>(value));
}
inline void float_to_bf16(u16& out, float value) { out = bf16_of(value); }
inline void float_to_fp16(u16& out, float value) { out = fp16_of(value); }
inline void fp16_to_float(float& out, u16 bits) {
  out = static_cast<float>(__builtin_bit_cast(_Float16, bits));
}
inline void floats_to_bf16x2(u32& out, float high, float low) {
  out = static_cast<u32>(bf16_of(high)) << 16 | bf16_of(low);
}
inline void floats_to_fp16x2(u32& out, float high, float low) {
  out = static_cast<u32>(fp16_of(high)) << 16 | fp16_of(low);
}
inline void exp2_approx(float& out, float value) { out = __builtin_exp2f(value); }
inline void reciprocal_approx(float& out, float value) { out = 1.f / value; }
inline void subtract_borrow(u32& count, u32 value, u32 bound) { count -= value < bound ? 1 : 0; }

}  // namespace emu::ptx
