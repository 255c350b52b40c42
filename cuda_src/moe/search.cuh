// Searches in sorted lists by a whole warp: 32 places are looked at in one step, so that a list of
// 1,024 takes two dependent loads. All lanes take part.
#pragma once
#include "ptx/types.cuh"

// Last of `count` >= 1 ascending values that is at most `key`, which the first one is taken to be.
// The key is the same in all lanes.
template <typename V>
__device__ __forceinline__ i32 warp_last_at_most(const V* values, i32 count, i64 key) {
  const i32 lane = threadIdx.x % kWarp;
  i32 low = 0;
  while (count > 1) {
    const i32 step = ceil_div(count, kWarp);
    const bool below = lane * step < count && values[low + lane * step] <= key;
    const i32 skipped = max_int(0, __popc(__ballot_sync(kFullMask, below)) - 1) * step;
    low += skipped;
    count = min_int(step, count - skipped);
  }
  return low;
}

// The same for a key of its own in every lane, over a list whose first level is in registers
// (`coarse`, made with the same list): one more step of independent loads.
template <typename V>
struct LaneSearch {
  const V* values;
  i32 count, step;
  i64 coarse;

  __device__ __forceinline__ LaneSearch(const V* values_, i32 count_)
      : values(values_), count(count_), step(ceil_div(count_, kWarp)) {
    const i32 at = static_cast<i32>(threadIdx.x % kWarp) * step;
    coarse = at < count ? static_cast<i64>(values[at]) : 0x7fffffffffffffffll;
  }

  // Of the keys of lanes 0 .. keys - 1.
  __device__ __forceinline__ i32 last_at_most(i64 key, i32 keys) const {
    const i32 lane = threadIdx.x % kWarp;
    i32 found = 0;
    for (i32 from = 0; from < keys; ++from) {
      const i64 theirs = __shfl_sync(kFullMask, key, from);
      const i32 below = __popc(__ballot_sync(kFullMask, coarse <= theirs));
      if (lane == from) found = max_int(0, below - 1) * step;
    }
    const i32 end = min_int(step, count - found);
    i32 more = 0;
    for (i32 i = 1; i < end; ++i) more += values[found + i] <= key;
    return found + more;
  }
};
