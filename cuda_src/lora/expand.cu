// Segmented expand of small batches and of ranks above 64: y[row, column] += scale · h[row, rank] ·
// B[column, rank], in place, one work item a warp: (row tile, slice, block of columns, part of the
// tile's rows). Warps share nothing and never wait for each other. Larger batches of up to 32 ranks
// take lora/expand_direct.cu, of up to 64 lora/expand_stream.cu.
//
// In: the split sums of the shrink ahead, the same tiles and slot entries, y. Out: y of the tiles'
// rows; no other byte of y is written, so rows of no adapter keep their bits.
//
// The shrink waits for all work before it, so only h may still be missing when this kernel starts:
// lists, y and B are fetched ahead of the wait.
#include "lora/expand.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;

}  // namespace

template <typename T, int NT>
__global__ void __launch_bounds__(kThreads, 3) lora_expand(ExpandArgs args) {
  constexpr int kHeld = 2 / NT;  // rank steps of h that a warp keeps in registers
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const SliceColumns& slices = args.slices;
  const i32 per_tile = slices.first_block[args.num_slices] * args.parts;
  const i64 items = static_cast<i64>(*args.tile_count) * per_tile;
  const i64 warps = static_cast<i64>(gridDim.x) * kWarps;
  Predecessor predecessor;

  for (i64 at = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarp; at < items;
       at += warps) {
    const i64 tile_index = at / per_tile;
    const i32 rest = static_cast<i32>(at - tile_index * per_tile);
    const i32 block = rest / args.parts, row0 = (rest - block * args.parts) * NT * 8;
    const TileRecord& record = args.tiles[tile_index];
    const Tile tile = record.head;
    if (row0 >= tile.rows) continue;
    const i32 slice = slice_of_block(slices, block);
    const SlotEntry entry = load_entry(args.entries, slice, tile.slot, args.max_loras, args.status);
    const i32 rank = safe_rank(entry, args.max_rank, nullptr);  // the shrink has reported it
    if (rank == 0) continue;

    const TileRows found(args.rows(), record, tile, args.y_by);
    T* rows[2 * NT];  // of y, tokens 2t and 2t + 1 of every n-tile, null beyond the tile
#pragma unroll
    for (int i = 0; i < 2 * NT; ++i) {
      const i32 n = row0 + i / 2 * 8 + 2 * t + i % 2;
      const i64 row = found.index(n, row0 >= kWarp);
      rows[i] = n < tile.rows ? reinterpret_cast<T*>(args.y) + row * args.ldy : nullptr;
    }
    const u8* b = b_base(entry, tile, args.start_expert);
    const bool b_vector = rank % 4 == 0 && reinterpret_cast<u64>(b) % 8 == 0;
    const i64 pitch = static_cast<i64>(rank) * 2;
    const Hidden hidden(args, tile, slice, rank);
    i32 exponent[NT] = {};  // row scales of fp16: of token g of every n-tile
    const i32 out = slices.out_features[slice], stride = slices.y_stride[slice];
    const i32 first = (block - slices.first_block[slice]) * args.block_columns;
    const i32 last = min_int(out, first + args.block_columns);
    Terms terms[kHeld][NT];  // of the current kHeld · 16 ranks; up to so many are read once an item

    for (i32 column0 = first; column0 < last; column0 += kBlockColumns) {
      const i32 column = column0 + 8 * g;
      const i32 columns = out - column;  // valid ones of this lane's 8
      const bool vector = args.y_vector && columns >= 8;
      const i64 y_column = slices.y_column[slice] + static_cast<i64>(column) * stride;
      uint4 before[2 * NT];
#pragma unroll
      for (int i = 0; i < 2 * NT; ++i) {
        before[i] = load16_rw_if(rows[i] + y_column, vector && rows[i] != nullptr);
      }
      // B of a step is fetched before its h is waited for.
      Weights weights;
      weights.load(b + column * pitch + 8 * t, pitch, columns, rank - 4 * t, b_vector,
                   unknown_zero());
      predecessor.wait();
      if (IsFp16<T>::value && column0 == first) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          float row_max = 0.f;
          for (i32 k = 4 * t; k < rank; k += kRankStep) {
            row_max = fmaxf(row_max, max_abs(hidden.load(row0 + nt * 8 + g, k)));
          }
          exponent[nt] = fp16_exponent(max_of_token(row_max));
        }
      }
      float acc[NT][kMTiles][4] = {};
      for (i32 base = 0; base < rank; base += kHeld * kRankStep) {
        if (column0 == first || rank > kHeld * kRankStep) {
#pragma unroll
          for (int i = 0; i < kHeld * NT; ++i) {
            const i32 k = base + i / NT * kRankStep + 4 * t;
            terms[i / NT][i % NT] = split_terms<T>(hidden.load(row0 + i % NT * 8 + g, k),
                                                   power_of_two(exponent[i % NT]));
          }
        }
#pragma unroll
        for (int s = 0; s < kHeld; ++s) {
          if (base + s * kRankStep >= rank) break;
#pragma unroll
          for (int i = 0; i < NT * kMTiles; ++i) {
            const int mt = i % kMTiles, nt = i / kMTiles;
            const Terms& h = terms[s][nt];
            mma_16816<T>(acc[nt][mt], weights.quad[mt], h.hi.x, h.hi.y);
            mma_16816<T>(acc[nt][mt], weights.quad[mt], h.lo.x, h.lo.y);
          }
          const i32 next = base + (s + 1) * kRankStep + 4 * t;
          if (next - 4 * t >= rank) break;
          weights.load(b + column * pitch + next * 2, pitch, columns, rank - next, b_vector,
                       unknown_zero());
        }
      }
      float scale[2 * NT];
#pragma unroll
      for (int i = 0; i < 2 * NT; ++i) {
        scale[i] = token_scale<T>(entry.scale, exponent[i / 2], i % 2);
      }
      if (vector) {
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
          const uint4 sum = added<T>(before[i], acc[i / 2], i % 2, scale[i]);
          if (rows[i] != nullptr) *reinterpret_cast<uint4*>(rows[i] + y_column) = sum;
        }
      } else {
        add_elements<T, NT>(rows, y_column, stride, columns, acc, scale);
      }
    }
  }
  predecessor.wait();
}
