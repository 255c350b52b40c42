// Stands in for what CUDA's compiler knows by itself: keywords, vector types, built-in variables
// and functions. Included before a program's source.
#pragma once
#include "ptx.h"
#include "shape.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

// Declared by hand: <cmath> takes longer to read than most kernels.
extern "C" {
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float expf(float) noexcept;
float erff(float) noexcept;
}

namespace emu {

struct Coordinates {
  unsigned x, y, z;
};
EMU_API Coordinates thread_index();
EMU_API Coordinates block_index();
EMU_API Coordinates block_size();
EMU_API Coordinates grid_size();

EMU_API unsigned char* dynamic_shared();
// The __shared__ variable of this number in the program's text: the same for all of a CTA.
EMU_API unsigned char* shared_variable(u32 number, u32 bytes);
template <typename V>
V& shared(u32 number) {
  return *reinterpret_cast<V*>(shared_variable(number, sizeof(V)));
}

EMU_API void sync_block();
EMU_API void sync_warp();
EMU_API u64 shuffle(u32 mask, u64 value, u32 lane);
EMU_API u32 ballot(u32 mask, bool vote);
EMU_API u32 match(u32 mask, u64 value);
EMU_API u32 reduce(u32 mask, u32 value, u32 (*operation)(u32, u32));
EMU_API u32 atomic_rmw(u32* address, u32 operand, u32 (*operation)(u32, u32));

inline u32 add_words(u32 a, u32 b) { return a + b; }
inline u32 or_words(u32 a, u32 b) { return a | b; }

}  // namespace emu

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_size())
#define gridDim (emu::grid_size())

inline void __syncthreads() { emu::sync_block(); }
inline void __syncwarp() { emu::sync_warp(); }

template <typename V>
inline V __shfl_sync(unsigned mask, V value, int lane) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8);
  if constexpr (sizeof(V) == 4) {
    const unsigned bits = __builtin_bit_cast(unsigned, value);
    return __builtin_bit_cast(V, static_cast<unsigned>(emu::shuffle(mask, bits, lane)));
  } else {
    return __builtin_bit_cast(
        V, emu::shuffle(mask, __builtin_bit_cast(unsigned long long, value), lane));
  }
}
template <typename V>
inline V __shfl_xor_sync(unsigned mask, V value, int lanes) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % emu::kWarpSize) ^ lanes);
}
template <typename V>
inline V __shfl_up_sync(unsigned mask, V value, int lanes) {
  const int lane = static_cast<int>(threadIdx.x % emu::kWarpSize);
  return __shfl_sync(mask, value, lane < lanes ? lane : lane - lanes);
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return emu::ballot(mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return emu::ballot(mask, vote != 0) != 0; }
template <typename V>
inline unsigned __match_any_sync(unsigned mask, V value) {
  return emu::match(mask, static_cast<emu::u64>(value));
}
template <typename V>
inline V __reduce_add_sync(unsigned mask, V value) {
  return static_cast<V>(emu::reduce(mask, static_cast<unsigned>(value), emu::add_words));
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return emu::reduce(mask, value, emu::or_words);
}

inline int atomicAdd(int* address, int value) {
  return static_cast<int>(emu::atomic_rmw(reinterpret_cast<unsigned*>(address),
                                          static_cast<unsigned>(value), emu::add_words));
}
inline unsigned atomicOr(unsigned* address, unsigned value) {
  return emu::atomic_rmw(address, value, emu::or_words);
}

template <typename V>
inline V __ldg(const V* address) {
  return *address;
}
inline unsigned __cvta_generic_to_shared(const void* pointer) {
  return static_cast<unsigned>(reinterpret_cast<unsigned long long>(pointer));
}

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += ((a >> shift) & 255u) * ((b >> shift) & 255u);
  return sum;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = (selector >> (4 * i)) & 7u;
    result |= static_cast<unsigned>((bytes >> (8 * byte)) & 255u) << (8 * i);
  }
  return result;
}
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
