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

// Faults that device code reports instead of failing: bytes of the status word (STATUS_* in
// worklists.py).
constexpr i32 kStatusSlotRange = 0;
constexpr i32 kStatusRankRange = 1;
constexpr i32 kStatusLayout = 2;
constexpr i32 kStatusCapacity = 3;

// The word lives in pinned host memory, so the host can look at it without a synchronisation. Each
// fault has a byte of its own: a plain store, since atomics on host memory are not to be had
// everywhere.
__device__ __forceinline__ void raise_status(i32* status, i32 fault) {
  if (status != nullptr) reinterpret_cast<volatile u8*>(status)[fault] = 1;
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int min_int(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_int(int a, int b) { return a > b ? a : b; }
