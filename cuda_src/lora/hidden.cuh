// The rank-sized intermediate h on its way into the expand: two 2-byte terms (hi + lo) whose sum
// keeps its error below the rounding of y. In fp16 a row is scaled by a power of two first, so that
// it neither overflows nor loses the small terms; the scale is taken back with the adapter's.
//
// Canonical order of the expand: ranks in steps of 16, in order, hi before lo; lane (g, t) feeds
// ranks 4t .. 4t + 3 of a step. y is rounded once.
#pragma once
#include "mma/mma.cuh"
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

constexpr int kRankStep = 16;

template <typename T>
struct IsFp16 {
  static constexpr bool value = false;
};
template <>
struct IsFp16<Fp16> {
  static constexpr bool value = true;
};

// Exponent q that brings a row of this maximum below 2^15; 2^-q is exact.
__device__ __forceinline__ i32 fp16_exponent(float row_max) {
  const i32 biased = (__float_as_uint(row_max) >> 23) & 0xff;
  return biased == 0 ? 0 : max_int(-126, min_int(126, 14 - (biased - 127)));
}
__device__ __forceinline__ float power_of_two(i32 exponent) {
  return __uint_as_float(static_cast<u32>(127 + exponent) << 23);
}

__device__ __forceinline__ float max_abs(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Values of ranks k .. k + 3 of an adapter of `rank` of them. What a product summed up for ranks
// beyond its own, zeros times x, is no number where x is infinite: zero, so that it adds nothing.
__device__ __forceinline__ float4 own_ranks(float4 v, i32 k, i32 rank) {
  return make_float4(k < rank ? v.x : 0.f, k + 1 < rank ? v.y : 0.f, k + 2 < rank ? v.z : 0.f,
                     k + 3 < rank ? v.w : 0.f);
}

// The two 2-byte terms of four values: what the products take as ranks 4t .. 4t + 3.
struct Terms {
  uint2 hi, lo;
};

// What hi leaves over; 0 where hi is not finite, so that an infinite h stays infinite.
__device__ __forceinline__ float remainder_of(float value, float hi) {
  return fabsf(hi) <= 3.4028235e38f ? value - hi : 0.f;
}
template <typename T>
__device__ __forceinline__ u32 low_term(float a, float b, u32 hi) {
  return Elem<T>::pack(remainder_of(a, Elem<T>::low(hi)), remainder_of(b, Elem<T>::high(hi)));
}

template <typename T>
__device__ __forceinline__ Terms split_terms(float4 v, float scale) {
  v.x *= scale;
  v.y *= scale;
  v.z *= scale;
  v.w *= scale;
  Terms t;
  t.hi = make_uint2(Elem<T>::pack(v.x, v.y), Elem<T>::pack(v.z, v.w));
  t.lo = make_uint2(low_term<T>(v.x, v.y, t.hi.x), low_term<T>(v.z, v.w, t.hi.y));
  return t;
}

// The terms of token g of this lane from its ranks (h[s]: ranks 16s + 4t .. + 3), and what the
// products of tokens 2t and 2t + 1 are scaled by.
template <typename T, int MT>
__device__ __forceinline__ void make_terms(const float4 (&h)[MT], float adapter_scale,
                                           Terms (&terms)[MT], float (&scale)[2]) {
  i32 exponent = 0;
  if (IsFp16<T>::value) {
    float row_max = 0.f;
#pragma unroll
    for (int s = 0; s < MT; ++s) row_max = fmaxf(row_max, max_abs(h[s]));
    row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, 2));
    exponent = fp16_exponent(row_max);
  }
#pragma unroll
  for (int s = 0; s < MT; ++s) terms[s] = split_terms<T>(h[s], power_of_two(exponent));
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    scale[j] = adapter_scale;
    if (IsFp16<T>::value) {
      // The exponent of token 2t + j lies with the lanes of g = 2t + j.
      const i32 token = 2 * (threadIdx.x & 3) + j;
      scale[j] *= power_of_two(-__shfl_sync(kFullMask, exponent, token * 4));
    }
  }
}

// One rank step of 16 columns of B (top: the product's row g, bottom: row g + 8) times h: first its
// hi terms, then its lo ones. Apart, so that other products can stand between the two.
template <typename T>
__device__ __forceinline__ void multiply_hi(float (&acc)[4], uint2 top, uint2 bottom,
                                            const Terms& h) {
  mma_16816<T>(acc, top.x, bottom.x, top.y, bottom.y, h.hi.x, h.hi.y);
}
template <typename T>
__device__ __forceinline__ void multiply_lo(float (&acc)[4], uint2 top, uint2 bottom,
                                            const Terms& h) {
  mma_16816<T>(acc, top.x, bottom.x, top.y, bottom.y, h.lo.x, h.lo.y);
}
template <typename T>
__device__ __forceinline__ void multiply_hi(float (&acc)[4], const Quad& b, const Terms& h) {
  mma_16816<T>(acc, b, h.hi.x, h.hi.y);
}
template <typename T>
__device__ __forceinline__ void multiply_lo(float (&acc)[4], const Quad& b, const Terms& h) {
  mma_16816<T>(acc, b, h.lo.x, h.lo.y);
}
template <typename T>
__device__ __forceinline__ void multiply_terms(float (&acc)[4], uint2 top, uint2 bottom,
                                               const Terms& h) {
  multiply_hi<T>(acc, top, bottom, h);
  multiply_lo<T>(acc, top, bottom, h);
}

// Two neighbouring columns of y plus their deltas, rounded once.
template <typename T>
__device__ __forceinline__ u32 add_pair(u32 y, float d0, float d1, float scale) {
  return Elem<T>::pack(__fmaf_rn(d0, scale, Elem<T>::low(y)),
                       __fmaf_rn(d1, scale, Elem<T>::high(y)));
}
template <typename T>
__device__ __forceinline__ void add_one(T* y, float delta, float scale) {
  *y = Elem<T>::from_float(__fmaf_rn(delta, scale, Elem<T>::to_float(*y)));
}
