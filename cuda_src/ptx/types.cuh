// Fixed-width names for NVRTC (which has no <cstdint>) and the element types of weights and
// activations. Lowest level: includes nothing, knows no kernel.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// 16-bit floats as bit patterns: arithmetic happens in float, products in the tensor cores.
struct Bf16 {
  u16 bits;
};
struct Fp16 {
  u16 bits;
};

constexpr int kWarp = 32;
constexpr u32 kFullMask = 0xffffffffu;

// Bits of the status word that device code sets instead of failing (the host reports them).
constexpr i32 kStatusSlotRange = 1;
constexpr i32 kStatusRankRange = 2;
constexpr i32 kStatusLayout = 4;
constexpr i32 kStatusCapacity = 8;

// The word lives in pinned host memory, so the host can look at it without a synchronisation.
__device__ __forceinline__ void raise_status(i32* status, i32 bit) {
  if (status != nullptr) atomicOr_system(status, bit);
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int min_int(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_int(int a, int b) { return a > b ? a : b; }
