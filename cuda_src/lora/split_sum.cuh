// What the shrink leaves in `splits` places (a power of two, at most 16), summed as a binary tree,
// neighbours first: the order in which the shrink adds them where it adds them itself.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ float add_parts(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float4 add_parts(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                     __fadd_rn(a.w, b.w));
}

// Splits first .. first + 3, of which those from `splits` on count as zero.
template <typename V>
__device__ __forceinline__ V add_four_splits(const float* p, i64 stride, i32 first, i32 splits) {
  V v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = V{};
    if (first + i < splits) v[i] = *reinterpret_cast<const V*>(p + (first + i) * stride);
  }
  return add_parts(add_parts(v[0], v[1]), add_parts(v[2], v[3]));
}

// The sum at p: a float, or a float4 from a 16-byte boundary on.
template <typename V>
__device__ __forceinline__ V sum_splits(const float* p, i64 stride, i32 splits) {
  if (splits == 1) return *reinterpret_cast<const V*>(p);
  V sum = add_four_splits<V>(p, stride, 0, splits);
  if (splits > 4) sum = add_parts(sum, add_four_splits<V>(p, stride, 4, splits));
  if (splits > 8) {
    sum = add_parts(sum, add_parts(add_four_splits<V>(p, stride, 8, splits),
                                   add_four_splits<V>(p, stride, 12, splits)));
  }
  return sum;
}
