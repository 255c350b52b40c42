// The slot table's record and the row maps of a LoRA work list, as the kernels read them.
// The host side is SLOT_ENTRY and Segments in cupylora/worklists.py; the two must agree byte for
// byte.
#pragma once
#include "ptx/types.cuh"

struct __align__(16) SlotEntry {
  u64 a_ptr;
  u64 b_ptr;
  i64 a_expert_stride;  // bytes; 0: one A for all experts
  i64 b_expert_stride;
  i32 rank;
  float scale;
  i32 a_layout;
  i32 generation;
};
static_assert(sizeof(SlotEntry) == 48, "SLOT_ENTRY in worklists.py has 48 bytes");

constexpr i32 kLayoutPacked = 1;
constexpr int kChunkBytes = 128;

// One row tile of a segment.
struct __align__(16) Tile {
  i32 first_row;
  i32 rows;
  i32 expert;
  i32 slot;
};

// A tile in a list: its head, and the pairs of its first rows, so that a tile of that many rows
// needs no further list. Past the tile's rows the pairs are -1.
constexpr int kTilePairs = 8;
struct __align__(16) TileRecord {
  Tile head;
  i32 pairs[kTilePairs];
  i32 unused[4];  // zeros
};
static_assert(sizeof(TileRecord) == 64, "TILE_INTS in worklists.py is 16");

// What a sorted row indexes in x or y.
enum RowIndex : i32 { kByToken = 0, kByPair = 1, kByRow = 2 };

struct RowMap {
  const i32* row_to_pair;
  i32 top_k;
  i32 num_tokens;
  i32 k_major;

  __device__ __forceinline__ i32 token(i32 pair) const {
    const u32 p = static_cast<u32>(pair);  // a pair of a valid row; unsigned divides faster
    return static_cast<i32>(k_major ? p % static_cast<u32>(num_tokens)
                                    : p / static_cast<u32>(top_k));
  }
  __device__ __forceinline__ i64 index(i32 row, RowIndex by) const {
    if (by == kByRow) return row;
    const i32 pair = row_to_pair[row];
    return by == kByPair ? pair : token(pair);
  }
};

// The entry of a slot; of one outside the table, which a work list made elsewhere may hold, an
// entry of rank 0, which no kernel reads on from.
__device__ __forceinline__ SlotEntry load_entry(const SlotEntry* entries, i32 slice, i32 slot,
                                                i32 max_loras, i32* status = nullptr) {
  if (static_cast<u32>(slot) < static_cast<u32>(max_loras)) {
    return entries[static_cast<i64>(slice) * max_loras + slot];
  }
  if (slot >= max_loras) raise_status(status, kStatusSlotRange);
  return SlotEntry{};
}

// Rank of an entry, 0 for what must not run: a table written by a host that did not validate cannot
// make a kernel write outside its workspace.
__device__ __forceinline__ i32 safe_rank(const SlotEntry& entry, i32 max_rank, i32* status) {
  if (entry.rank >= 0 && entry.rank <= max_rank) return entry.rank;
  if (threadIdx.x % kWarp == 0) raise_status(status, kStatusRankRange);
  return 0;
}

// Where each slice's columns lie in y, passed by value (LoraSlice in worklists.py).
constexpr int kMaxSlices = 8;
struct __align__(8) SliceColumns {
  i32 out_features[kMaxSlices];
  i32 y_column[kMaxSlices];
  i32 y_stride[kMaxSlices];
  i32 first_block[kMaxSlices + 1];  // column blocks before each slice
};

// Slice that owns column block `block`.
__device__ __forceinline__ i32 slice_of_block(const SliceColumns& slices, i32 block) {
  i32 slice = 0;
  while (block >= slices.first_block[slice + 1]) ++slice;
  return slice;
}
