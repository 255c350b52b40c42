// What the fused LoRA kernels can be built with other than they ship: the value here is the shipped
// one, and tools/tune_kernels.py alone overrides it, to time the other beside it. No value changes
// a result.
#pragma once
#include "mma/mma.cuh"

// 1: weights that two or more products take are moved once into the registers that these want
// (Quad of mma/mma.cuh), instead of, as the compiler likes, for each product.
#ifndef QUADS
#define QUADS 0
#endif

// What Quads are made with.
__device__ __forceinline__ u32 quad_zero() { return QUADS != 0 ? unknown_zero() : 0; }
