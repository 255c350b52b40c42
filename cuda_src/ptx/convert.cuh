// Conversions between float and the 16-bit types, one value or a packed pair. Round to nearest
// even.
#pragma once
#include "ptx/types.cuh"

template <typename T>
struct Elem;

template <>
struct Elem<Bf16> {
  static __device__ __forceinline__ float to_float(Bf16 v) {
    return __uint_as_float(static_cast<u32>(v.bits) << 16);
  }
  static __device__ __forceinline__ Bf16 from_float(float f) {
    Bf16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(f));
    return out;
  }
  static __device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    return out;
  }
  static __device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(u32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
  }
};

template <>
struct Elem<Fp16> {
  static __device__ __forceinline__ float to_float(Fp16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
    return f;
  }
  static __device__ __forceinline__ Fp16 from_float(float f) {
    Fp16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(f));
    return out;
  }
  static __device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    return out;
  }
  static __device__ __forceinline__ float low(u32 pair) {
    return to_float(Fp16{static_cast<u16>(pair & 0xffffu)});
  }
  static __device__ __forceinline__ float high(u32 pair) {
    return to_float(Fp16{static_cast<u16>(pair >> 16)});
  }
};

template <>
struct Elem<float> {
  static __device__ __forceinline__ float to_float(float v) { return v; }
  static __device__ __forceinline__ float from_float(float f) { return f; }
};
