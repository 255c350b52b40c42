// A tile's rows of x or y, found once by a whole warp: a lane looks up rows `lane` and `lane + 32`
// and hands them to the lanes that need them, so that the look-ups are in flight together.
#pragma once
#include "lora/slot_entry.cuh"

struct TileRows {
  i32 low, high;

  TileRows() = default;

  __device__ __forceinline__ TileRows(const RowMap& map, const TileRecord& record, const Tile& tile,
                                      i32 by) {
    const i32 lane = threadIdx.x % kWarp;
    if (by == kByRow) {
      low = tile.first_row + lane;
      high = low + kWarp;
      return;
    }
    const i32 carried = record.pairs[lane % kTilePairs];
    low = high = 0;
    if (tile.rows <= kTilePairs) {
      if (lane < tile.rows) low = carried;
    } else {
      if (lane < tile.rows) low = map.row_to_pair[tile.first_row + lane];
      if (lane + kWarp < tile.rows) high = map.row_to_pair[tile.first_row + lane + kWarp];
    }
    if (by == kByToken) {
      low = map.token(low);
      high = map.token(high);
    }
  }
  // By all lanes: the row of token n of the tile; `upper` (n is 32 or more) is the same for all.
  __device__ __forceinline__ i64 index(i32 n, bool upper) const {
    return __shfl_sync(kFullMask, upper ? high : low, n % kWarp);
  }
};
