// fill_uniform: writes out[i] = round(scale * u(i)), u uniform in [-1, 1), a hash of seed and i.
//
// In: out [count], seed, scale. Every element depends on its index alone, so the result does not
// depend on the grid, and the NumPy twin computes the same bits.
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace {

// Every step is exact in float32: 24 random bits, scaled to [0, 2), shifted to [-1, 1).
__device__ __forceinline__ float uniform(u64 index, u64 seed) {
  u64 z = index + seed * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<float>(z >> 40) * 0x1p-23f - 1.0f;
}

}  // namespace

template <typename T>
__global__ void fill_uniform(T* out, u64 count, u64 seed, float scale) {
  const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    out[i] = Elem<T>::from_float(uniform(i, seed) * scale);
  }
}
