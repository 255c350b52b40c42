// Grouped GEMM for float32, by fused multiply-adds (no TF32). The same contract and work list as
// grouped.cu: 64 x 64 output tiles, K added from 0 up in one accumulator an element.
#include "gemm/problems.cuh"
#include "ptx/memory.cuh"

namespace {
constexpr int kThreads = 256;
constexpr int kTile = 64;
constexpr int kTileK = 16;
constexpr int kPitch = kTile + 4;

// Transposed into shared memory, so that a thread's four rows lie side by side.
__device__ __forceinline__ void load_rows(float (*to)[kPitch], const float* base, i64 ld, i32 rows,
                                          i32 k_left) {
  for (i32 i = threadIdx.x; i < kTile * kTileK; i += kThreads) {
    const i32 row = i / kTileK, k = i % kTileK;
    to[k][row] = row < rows && k < k_left ? base[row * ld + k] : 0.f;
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_gemm_f32(GemmProblems problems, i32 capacity, const i32* tile_start, i32 beta) {
  __shared__ float a_tile[kTileK][kPitch];
  __shared__ float b_tile[kTileK][kPitch];
  wait_for_predecessor();
  release_successor();
  const i32 count = min_int(*problems.count, capacity);
  const i32 tiles = tile_start[count];
  const i32 row0 = (threadIdx.x / 16) * 4, column0 = (threadIdx.x % 16) * 4;
  for (i32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const OutputTile at = find_tile(tile_start, problems, count, tile, kTile, kTile);
    const i32 p = at.problem;
    const i32 k = problems.k[p];
    const i32 m_left = problems.m[p] - at.row, n_left = problems.n[p] - at.column;
    const i64 lda = problems.lda[p], ldb = problems.ldb[p], ldd = problems.ldd[p];
    const float* a = reinterpret_cast<const float*>(problems.a[p]) + at.row * lda;
    const float* b = reinterpret_cast<const float*>(problems.b[p]) + at.column * ldb;
    float acc[4][4] = {};
    for (i32 k0 = 0; k0 < k; k0 += kTileK) {
      __syncthreads();
      load_rows(a_tile, a + k0, lda, m_left, k - k0);
      load_rows(b_tile, b + k0, ldb, n_left, k - k0);
      __syncthreads();
#pragma unroll
      for (int kk = 0; kk < kTileK; ++kk) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            acc[i][j] = __fmaf_rn(a_tile[kk][row0 + i], b_tile[kk][column0 + j], acc[i][j]);
          }
        }
      }
    }
    const float alpha = problems.alpha[p];
    float* d = reinterpret_cast<float*>(problems.d[p]) + at.row * ldd + at.column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (row0 + i >= m_left || column0 + j >= n_left) continue;
        float* out = d + (row0 + i) * ldd + column0 + j;
        *out = beta != 0 ? __fmaf_rn(alpha, acc[i][j], *out) : __fmul_rn(alpha, acc[i][j]);
      }
    }
  }
}
