// Grouped-GEMM problems as kernels read them (GemmProblems in cupylora/worklists.py), and the walk
// over their output tiles.
#pragma once
#include "ptx/types.cuh"

struct GemmProblems {
  const i32* m;
  const i32* n;
  const i32* k;
  const u64* a;
  const u64* b;
  const u64* d;
  const i64* lda;
  const i64* ldb;
  const i64* ldd;
  const float* alpha;
  const i32* count;
};

struct OutputTile {
  i32 problem;
  i32 row;     // first row of D
  i32 column;  // first column of D
};

// tile_start[p] tiles lie before problem p, tile_start[count] in all. Row tiles of one weight tile
// are neighbours, so that they find it in the L2.
__device__ __forceinline__ OutputTile find_tile(const i32* tile_start, const GemmProblems& problems,
                                                i32 count, i32 tile, i32 tile_m, i32 tile_n) {
  i32 low = 0, high = count;
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    if (tile_start[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const i32 inner = tile - tile_start[low];
  const i32 row_tiles = ceil_div(problems.m[low], tile_m);
  return OutputTile{low, (inner % row_tiles) * tile_m, (inner / row_tiles) * tile_n};
}
