// Grouped GEMM on the tensor cores: D[m, n] = beta·D + alpha · A[m, k] · B[n, k]ᵀ for every problem
// of a list in device memory. 2-byte A and B, row-major, any alignment; D of the same type or
// float.
//
// In: GemmProblems and the tile_start of tiles.cu. Out: D. The grid is fixed; CTAs take output
// tiles in turn. K is added in steps of 16 from 0 up in one accumulator, whatever the tile height,
// so a row's bits do not depend on how many rows its problem has, nor on its place among them.
//
// Pipeline: kStages stages of [BM + 128] x 64 elements filled by cp.async, 16-byte pieces swizzled
// by row so that ldmatrix has no bank conflicts. Rows that start off a 16-byte boundary are
// gathered by element into the same places.
#include "gemm/problems.cuh"
#include "mma/mma.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace {

constexpr int kTileN = 128;
constexpr int kTileK = 64;
constexpr int kPieces = kTileK / 8;
constexpr int kSteps = kTileK / 16;

template <int BM>
struct GemmShape {
  static constexpr int kWarpsM = BM == 16 ? 1 : 2;
  static constexpr int kWarpsN = BM == 16 ? 4 : 2;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarp;
  static constexpr int kStages = BM == 128 ? 3 : 4;
  static constexpr int kMTiles = BM / kWarpsM / 16;
  static constexpr int kNTiles = kTileN / kWarpsN / 8;
  static constexpr int kStageElements = (BM + kTileN) * kTileK;
};

// Rows [0, rows) of a row-major operand into a stage: row r, piece p at (r, p ^ (r & 7)). A thread
// takes one piece of every kStep-th row, which are swizzled alike.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_rows(u16* stage, const u16* base, i64 ld, i32 rows, i32 k_left,
                                          bool vector) {
  constexpr int kStep = kThreads / kPieces;
  static_assert(kStep % 8 == 0, "rows of a thread must share their swizzle");
  const i32 piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces;
  const i32 count = max_int(0, min_int(8, k_left - piece * 8));
  u16* to = stage + row0 * kTileK + ((piece ^ (row0 & 7)) << 3);
  const u16* from = base + row0 * ld + piece * 8;
  if (vector) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const bool live = row0 + i * kStep < rows && count > 0;
      copy16_async(shared_address(to + i * kStep * kTileK), live ? from : base,
                   live ? count * 2 : 0);
      from += kStep * ld;
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRows / kStep; ++i) {
    const i32 valid = row0 + i * kStep < rows ? count : 0;
#pragma unroll 1
    for (int e = 0; e < 8; ++e) to[i * kStep * kTileK + e] = e < valid ? from[e] : 0;
    from += kStep * ld;
  }
}

// Address of the 8x8 matrix row that this lane supplies to ldmatrix.
__device__ __forceinline__ u32 matrix_row(const u16* stage, i32 row, i32 piece) {
  return shared_address(stage + row * kTileK + ((piece ^ (row & 7)) << 3));
}

// What a warp multiplies in one step of 16 k.
template <int BM>
struct Operands {
  using Shape = GemmShape<BM>;
  u32 a[Shape::kMTiles][4];
  u32 b[Shape::kNTiles / 2][4];

  __device__ __forceinline__ void read(const u16* stage_a, const u16* stage_b, i32 warp_row,
                                       i32 warp_column, i32 step, i32 lane) {
#pragma unroll
    for (int mt = 0; mt < Shape::kMTiles; ++mt) {
      const i32 row = warp_row + mt * 16 + lane % 16;
      ldmatrix_x4(a[mt], matrix_row(stage_a, row, step * 2 + lane / 16));
    }
#pragma unroll
    for (int nt = 0; nt < Shape::kNTiles / 2; ++nt) {
      const i32 row = warp_column + nt * 16 + (lane / 16) * 8 + lane % 8;
      ldmatrix_x4(b[nt], matrix_row(stage_b, row, step * 2 + (lane / 8) % 2));
    }
  }
};

// alpha · sum, plus D where asked: operations by name, since a contraction left to the compiler can
// differ from one element of a tile to the next.
template <typename OutT>
__device__ __forceinline__ void store_one(OutT* d, float alpha, float sum, bool add) {
  const float v = add ? __fmaf_rn(alpha, sum, Elem<OutT>::to_float(*d)) : __fmul_rn(alpha, sum);
  *d = Elem<OutT>::from_float(v);
}

}  // namespace

template <typename T, typename OutT, int BM>
__global__ void __launch_bounds__(GemmShape<BM>::kThreads, 1)
    grouped_gemm(GemmProblems problems, i32 capacity, const i32* tile_start, i32 beta) {
  using Shape = GemmShape<BM>;
  extern __shared__ __align__(128) u16 stages[];
  wait_for_predecessor();
  release_successor();
  const i32 count = min_int(*problems.count, capacity);
  const i32 tiles = tile_start[count];
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 warp_row = (warp / Shape::kWarpsN) * Shape::kMTiles * 16;
  const i32 warp_column = (warp % Shape::kWarpsN) * Shape::kNTiles * 8;

  for (i32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const OutputTile at = find_tile(tile_start, problems, count, tile, BM, kTileN);
    const i32 p = at.problem;
    const i32 k = problems.k[p];
    const i32 m_left = problems.m[p] - at.row, n_left = problems.n[p] - at.column;
    const i64 lda = problems.lda[p], ldb = problems.ldb[p];
    const u16* a = reinterpret_cast<const u16*>(problems.a[p]) + at.row * lda;
    const u16* b = reinterpret_cast<const u16*>(problems.b[p]) + at.column * ldb;
    const bool a_vector = lda % 8 == 0 && reinterpret_cast<u64>(a) % 16 == 0;
    const bool b_vector = ldb % 8 == 0 && reinterpret_cast<u64>(b) % 16 == 0;
    const i32 k_tiles = ceil_div(k, kTileK);

    const auto load = [&](i32 k_tile) {
      if (k_tile < k_tiles) {
        u16* stage = stages + (k_tile % Shape::kStages) * Shape::kStageElements;
        const i32 k0 = k_tile * kTileK;
        load_rows<BM, Shape::kThreads>(stage, a + k0, lda, m_left, k - k0, a_vector);
        load_rows<kTileN, Shape::kThreads>(stage + BM * kTileK, b + k0, ldb, n_left, k - k0,
                                           b_vector);
      }
      commit_async();  // an empty group keeps the count of pending groups the same at the end
    };

    float acc[Shape::kMTiles][Shape::kNTiles][4] = {};
    __syncthreads();  // the tile before has read its last stage
#pragma unroll
    for (int s = 0; s < Shape::kStages - 1; ++s) load(s);
    for (i32 k_tile = 0; k_tile < k_tiles; ++k_tile) {
      wait_async<Shape::kStages - 2>();
      __syncthreads();  // this stage is filled for all, the one refilled next is read by all
      load(k_tile + Shape::kStages - 1);
      const u16* stage_a = stages + (k_tile % Shape::kStages) * Shape::kStageElements;
      const u16* stage_b = stage_a + BM * kTileK;
      // The next step's operands are read while this one's products run.
      Operands<BM> operands[2];
      operands[0].read(stage_a, stage_b, warp_row, warp_column, 0, lane);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) {
          operands[(step + 1) & 1].read(stage_a, stage_b, warp_row, warp_column, step + 1, lane);
        }
        const Operands<BM>& now = operands[step & 1];
#pragma unroll
        for (int mt = 0; mt < Shape::kMTiles; ++mt) {
#pragma unroll
          for (int nt = 0; nt < Shape::kNTiles; ++nt) {
            const u32 *a4 = now.a[mt], *b4 = now.b[nt / 2];
            mma_16816<T>(acc[mt][nt], a4[0], a4[1], a4[2], a4[3], b4[(nt & 1) * 2],
                         b4[(nt & 1) * 2 + 1]);
          }
        }
      }
    }
    wait_async<0>();

    const float alpha = problems.alpha[p];
    const i64 ldd = problems.ldd[p];
    OutT* d = reinterpret_cast<OutT*>(problems.d[p]) + at.row * ldd + at.column;
    const i32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int mt = 0; mt < Shape::kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = warp_row + mt * 16 + half * 8 + g;
        if (row >= m_left) continue;
        OutT* out = d + row * ldd;
#pragma unroll
        for (int nt = 0; nt < Shape::kNTiles; ++nt) {
          const i32 column = warp_column + nt * 8 + 2 * t;
          const float* sums = &acc[mt][nt][half * 2];
          if (column < n_left) store_one(out + column, alpha, sums[0], beta != 0);
          if (column + 1 < n_left) store_one(out + column + 1, alpha, sums[1], beta != 0);
        }
      }
    }
  }
}
