// The fused kernels' ways for operands that lie or align otherwise than their fast paths take:
// fetched element by element into the same places of the same products. Not inlined, so that they
// cost the fast paths neither registers nor instructions.
#pragma once
#include "lora/hidden.cuh"
#include "lora/items.cuh"

constexpr int kColumnTile = 16;  // of the expand's product

// Operands in global memory: piece `index` of a chunk of A's row, of
// the x row of token n, and ranks k .. k + 3 of a column of B.
__device__ __noinline__ uint4 bypass_a(const DeltaArgs& args, i32 tile, i32 slice, i32 row,
                                       i32 chunk, i32 index) {
  const Tile t = args.tiles[tile].head;
  const SlotEntry entry = load_entry(args.entries, slice, t.slot, args.max_loras);
  const i32 rank = safe_rank(entry, args.max_rank, nullptr);
  return a_view(entry, t, args.start_expert, rank, args.in_features).gather(row, chunk, index);
}
__device__ __noinline__ uint4 bypass_x(const DeltaArgs& args, i32 tile, i32 n, i32 chunk,
                                       i32 index) {
  const Tile t = args.tiles[tile].head;
  const i32 row = t.first_row + n, k = chunk * kChunk + index * 8;
  if (n >= t.rows) return make_uint4(0, 0, 0, 0);
  const i64 at = row_index(args, row, args.row_to_pair[row], args.x_by);
  return gather8(args.x + 2 * (args.ldx * at + k), args.in_features - k);
}
__device__ __noinline__ uint2 bypass_b(const DeltaArgs& args, i32 tile, i32 slice, i32 column,
                                       i32 k, i32 count) {
  const Tile t = args.tiles[tile].head;
  const SlotEntry entry = load_entry(args.entries, slice, t.slot, args.max_loras);
  const i64 element = static_cast<i64>(column) * entry.rank + k;
  return load_b4(b_base(entry, t, args.start_expert) + element * 2, count, false);
}

// `valid` columns of the expand: column c of the CTA's is the first of them, and column
// first_column of the slice the CTA's first.
template <int MT, int NT>
struct AnyStage {
  Terms terms[NT][MT];
  float scale[NT][2];
  u64 y_row[NT][2];
  u32 weights;  // B in shared memory, from column c on; 0: in global memory
  i32 tile, slice, rank, rows, first_column, c, valid;
};
template <typename T, int WARPS, int MT, int NT>
__device__ __noinline__ void expand_any(const DeltaArgs& args, const AnyStage<MT, NT>& s) {
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const i32 stride = args.slices.y_stride[s.slice];
#pragma unroll 1
  for (i32 first = warp * kColumnTile; first < s.valid; first += WARPS * kColumnTile) {
    const i32 column = first + 2 * g;
    float delta[NT][4] = {};
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      if (i * kRankStep >= s.rank) break;
      const i32 k = i * kRankStep + 4 * t, left = s.rank - k;
      const i32 top_left = column < s.valid ? left : 0;
      const i32 bottom_left = column + 1 < s.valid ? left : 0;
      uint2 top, bottom;
      if (s.weights != 0) {
        const u32 b = s.weights + (column * s.rank + k) * 2;
        top = gather4_shared(b, top_left);
        bottom = gather4_shared(b + 2 * s.rank, bottom_left);
      } else {
        const i32 at = s.first_column + s.c + column;
        top = bypass_b(args, s.tile, s.slice, at, k, top_left);
        bottom = bypass_b(args, s.tile, s.slice, at + 1, k, bottom_left);
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) multiply_terms<T>(delta[nt], top, bottom, s.terms[nt][i]);
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (nt * 8 + 2 * t + j >= s.rows) continue;
        T* y = reinterpret_cast<T*>(s.y_row[nt][j]) + static_cast<i64>(s.c + column) * stride;
        if (column < s.valid) add_one(y, delta[nt][j], s.scale[nt][j]);
        if (column + 1 < s.valid) add_one(y + stride, delta[nt][2 + j], s.scale[nt][j]);
      }
    }
  }
}
