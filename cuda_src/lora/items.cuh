// What the fused LoRA kernels (one node from x to y) share: their arguments, and how a work item is
// found. An item is (row tile, slice, column part); a cluster of C CTAs takes it together, each
// with C-th of the K ranges in the shrink and `cta_columns` columns of the part in the expand.
// DeltaArgs is packed by cupylora/ops/_lora_fused.py.
#pragma once
#include "lora/operands.cuh"

struct __align__(8) DeltaArgs {
  const u8* x;
  i64 ldx;  // elements
  u8* y;
  i64 ldy;
  const i32* row_to_pair;
  const TileRecord* tiles;
  const i32* tile_count;
  const SlotEntry* entries;
  i32* status;
  i32 x_by, y_by;
  i32 top_k, num_tokens, k_major;
  i32 num_slices, max_loras, start_expert;
  i32 in_features, max_rank;
  i32 clusters;     // in the grid
  i32 cta_columns;  // a multiple of 64
  i32 x_vector;     // rows of x start on 16-byte boundaries
  i32 y_access;     // YAccess
  i32 plan_settled;
  i32 stages;           // ring
  i32 chain_floats;     // ring: room for the chains' sums of one range
  i32 sum_ranks;        // ring: ranks that an incoming sum has room for
  SliceColumns slices;  // first_block counts parts
};

// How y may be accessed: element by element, in aligned pairs, in aligned 16-byte pieces.
enum YAccess : i32 { kYElement = 0, kYPair = 1, kYPiece = 2 };

struct Item {
  i32 tile;
  i32 slice;
  i32 part;
};

// The host launches these kernels only where items are numbered in 32 bits.
__device__ __forceinline__ i32 item_count(const DeltaArgs& args) {
  return *args.tile_count * args.slices.first_block[args.num_slices];
}

__device__ __forceinline__ Item item_at(const DeltaArgs& args, i32 index) {
  const i32 per_tile = args.slices.first_block[args.num_slices];
  const i32 tile = static_cast<i32>(static_cast<u32>(index) / static_cast<u32>(per_tile));
  const i32 rest = index - tile * per_tile;
  const i32 slice = slice_of_block(args.slices, rest);
  return Item{tile, slice, rest - args.slices.first_block[slice]};
}

__device__ __forceinline__ RowMap row_map(const DeltaArgs& args) {
  return RowMap{args.row_to_pair, args.top_k, args.num_tokens, args.k_major};
}

// Row of x or y of a sorted row whose pair is known.
__device__ __forceinline__ i64 row_index(const DeltaArgs& args, i32 row, i32 pair, i32 by) {
  if (by == kByRow) return row;
  return by == kByPair ? pair : row_map(args).token(pair);
}

// The columns of an item's slice that fall to CTA `rank` of `size`.
struct ColumnShare {
  i32 first;  // of the slice
  i32 count;  // may be 0

  ColumnShare() = default;
  __device__ __forceinline__ ColumnShare(const DeltaArgs& args, const Item& item, i32 rank,
                                         i32 size) {
    const i64 start = (static_cast<i64>(item.part) * size + rank) * args.cta_columns;
    const i32 out = args.slices.out_features[item.slice];
    first = static_cast<i32>(start < out ? start : out);
    count = min_int(args.cta_columns, out - first);
  }
};
