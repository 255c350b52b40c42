// The one tensor-core product every kernel uses: D[16,8] += A[16,16] · B[16,8], float accumulation.
//
// Lane (g, t) = (lane / 4, lane % 4) holds of A: rows g and g+8 at k = 2t, 2t+1 (a0, a1) and at
// k = 2t+8, 2t+9 (a2, a3); of B: column g at the same k (b0, b1); of D: row g, columns 2t and 2t+1
// (d0, d1), and row g+8 (d2, d3). The k positions may be permuted if A and B are permuted alike.
#pragma once
#include "ptx/types.cuh"

template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                          u32 b1);

template <>
__device__ __forceinline__ void mma_16816<Bf16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16816<Fp16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The A of one product as its instruction wants it, in four neighbouring registers: rows g (top)
// and g + 8 (bottom) at k 2t .. 2t + 1, then at 2t + 8 .. 2t + 9.
//
// `zero` is 0, but must not be known to the compiler: it moves values of wide loads, which have
// neighbours of their own, anew for each product that takes them; results of an operation it places
// where the products want them.
struct Quad {
  u32 a0, a1, a2, a3;

  Quad() = default;
  __device__ __forceinline__ Quad(uint2 top, uint2 bottom, u32 zero)
      : a0(top.x ^ zero), a1(bottom.x ^ zero), a2(top.y ^ zero), a3(bottom.y ^ zero) {}
};
__device__ __forceinline__ u32 unknown_zero() { return threadIdx.y; }  // blocks have one row

template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const Quad& a, u32 b0, u32 b1) {
  mma_16816<T>(d, a.a0, a.a1, a.a2, a.a3, b0, b1);
}
