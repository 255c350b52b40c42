// The plan of a small batch in one launch: rows sorted by (expert, slot, pair), segments, tiles.
//
// In: topk_ids [T, k] global expert ids, token_to_slot [T]. Out: the lists of a Routing and of
// Segments (cupylora/worklists.py). `plan_rank`, for the fewest pairs, counts for each pair those
// that sort before it. `plan_table` counts the rows of every (expert, slot) and derives all places
// from a scan over them; its blocks all do that work, which costs less than exchanging it would,
// and share the writing. Nothing that a kernel before may still read or write is touched ahead of
// the wait for it.
#include "route/plan.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kPairBits = 8;      // of a sort key in plan_rank
constexpr int kSharePairs = 256;  // most rows, and tiles, that a block of plan_table writes

// Bits set below bit `index`.
__device__ __forceinline__ i32 bits_below(const u32* words, i32 index) {
  i32 sum = 0;
  for (i32 w = 0; w < index / kWarp; ++w) sum += __popc(words[w]);
  return sum + __popc(words[index / kWarp] & ((1u << (index % kWarp)) - 1u));
}

// First of the `count` rising values that is at least `bound`.
__device__ __forceinline__ i32 lower_bound(const u32* values, i32 count, u32 bound) {
  i32 low = 0, high = count;
  while (low < high) {
    const i32 middle = (low + high) / 2;
    if (values[middle] < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// count -= value < bound, by the borrow of a subtraction: two instructions.
__device__ __forceinline__ void uncount_below(u32& count, u32 value, u32 bound) {
  asm("{\n"
      ".reg .u32 t;\n"
      "sub.cc.u32 t, %1, %2;\n"
      "subc.u32 %0, %0, 0;\n"
      "}\n"
      : "+r"(count)
      : "r"(value), "r"(bound));
}

template <int kParts>
__device__ __forceinline__ u32 sum_of_parts(u32 value) {
#pragma unroll
  for (int offset = kParts / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

}  // namespace

// One block, kParts threads a pair, up to kThreads / kParts pairs (at least so many threads as
// pairs). A sort key is (key, pair), so that no two are equal.
template <int kParts>
__global__ void __launch_bounds__(kThreads, 1)
    plan_rank(const i32* topk_ids, const i32* token_to_slot, PlanSizes sizes, PlanLists lists,
              i32* status) {
  constexpr int kPairs = kThreads / kParts;
  constexpr int kWords = kPairs / kWarp;
  constexpr u32 kPairMask = (1u << kPairBits) - 1u;
  static_assert(kPairs <= 1 << kPairBits && kParts >= 4, "a pair's threads write its record");
  __shared__ __align__(16) u32 keys[kPairs];
  __shared__ Group groups[kPairs];
  __shared__ u32 sorted[kPairs];
  __shared__ u32 starts[kWords], tile_starts[kWords];  // a bit a row
  const i32 thread = threadIdx.x, pairs = sizes.pairs;
  const i32 padded = ceil_div(pairs, 4 * kParts) * 4 * kParts;
  if (thread < kWords) starts[thread] = tile_starts[thread] = 0;
  wait_for_predecessor();
  release_successor();
  if (thread < padded) {
    const PairInput input = load_pair(topk_ids, token_to_slot, sizes, thread);
    const Group group = group_of(input, sizes, status);
    groups[thread] = group;
    keys[thread] = group.key(sizes) << kPairBits | thread;
  }
  __syncthreads();

  const i32 pair = thread / kParts, part = thread % kParts;
  const bool real = pair < pairs;
  const u32 own = real ? keys[pair] : 0, first_of_key = own & ~kPairMask;
  const Group group = real ? groups[pair] : Group{kForeign};
  u32 before[2] = {}, smaller[2] = {};  // pairs before this one, and of smaller keys: negative
  for (i32 p = part * 4; p < padded; p += kParts * 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(&keys[p]);
    uncount_below(before[0], other.x, own);
    uncount_below(before[1], other.y, own);
    uncount_below(smaller[0], other.x, first_of_key);
    uncount_below(smaller[1], other.y, first_of_key);
    uncount_below(before[0], other.z, own);
    uncount_below(before[1], other.w, own);
    uncount_below(smaller[0], other.z, first_of_key);
    uncount_below(smaller[1], other.w, first_of_key);
  }
  // Both counts in one word: neither exceeds 16 bits.
  const u32 counts =
      sum_of_parts<kParts>((smaller[0] + smaller[1]) * 0xffff0000u - before[0] - before[1]);
  const i32 row = counts & 0xffffu, index = row - static_cast<i32>(counts >> 16);
  const bool start = !group.foreign() && index == 0;
  const bool tile = !group.foreign() && group.digit() > 0 && sizes.place_in_tile(index) == 0;
  if (part == 0 && real) {
    sorted[row] = own;
    if (start) atomicOr(&starts[row / kWarp], 1u << (row % kWarp));
    if (tile) atomicOr(&tile_starts[row / kWarp], 1u << (row % kWarp));
  }
  __syncthreads();

  if (__any_sync(kFullMask, tile)) {
    u32 held = 0;  // rows of the tile
    for (i32 i = part; i < sizes.tile_rows(); i += kParts) {
      held += tile && row + i < pairs && (sorted[row + i] & ~kPairMask) == first_of_key ? 1 : 0;
    }
    held = sum_of_parts<kParts>(held);
    if (tile && part < 4) {
      const Tile head{row, static_cast<i32>(held), group.expert(), group.digit() - 1};
      int4* record = reinterpret_cast<int4*>(lists.tiles + bits_below(tile_starts, row));
      record[part] = record_quarter(
          part, head, [&](i32 i) { return static_cast<i32>(sorted[row + i] & kPairMask); });
    }
  }
  if (part == 0 && real) lists.pair_to_row[pair] = group.foreign() ? -1 : row;
  if (part == 0 && start) {
    const i32 segment = bits_below(starts, row);
    lists.seg_start[segment] = row;
    lists.seg_expert[segment] = group.expert();
    lists.seg_slot[segment] = group.digit() - 1;
  }
  if (thread < pairs) {
    const u32 key = sorted[thread];
    const bool ghost = key >= kForeign << kPairBits;
    lists.row_to_pair[thread] = ghost ? -1 : static_cast<i32>(key & kPairMask);
  }
  for (i32 e = thread; e <= sizes.num_experts; e += blockDim.x) {
    const u32 bound = static_cast<u32>(e * sizes.digits) << kPairBits;
    const i32 offset = lower_bound(sorted, pairs, bound);
    lists.offsets[e] = offset;
    if (e == sizes.num_experts) {
      const i32 segments = bits_below(starts, kPairs - 1) + (starts[kWords - 1] >> 31);
      *lists.seg_count = segments;
      *lists.tile_count = bits_below(tile_starts, kPairs - 1) + (tile_starts[kWords - 1] >> 31);
      lists.seg_start[segments] = offset;
    }
  }
}

// kColumns * kRounds * 32 pairs at most. The grid is a power of two, 1 << grid_shift blocks, that
// gives each at most kSharePairs pairs; at least kColumns warps a block, at most kMaxWarps, a power
// of two. Dynamic shared memory:
// kColumns bytes for every key and one more, rounded up to 16.
template <int kColumns, int kRounds>
__global__ void __launch_bounds__(kThreads, 1)
    plan_table(const i32* topk_ids, const i32* token_to_slot, PlanSizes sizes, PlanLists lists,
               i32 grid_shift, i32* status) {
  constexpr int kPairs = kColumns * kRounds * kWarp;
  static_assert(kPairs < 1 << 16 && kRounds * kWarp < 256, "pairs of a block and of a column");
  extern __shared__ __align__(16) u8 memory[];
  __shared__ u16 row_pairs[kPairs];
  __shared__ uint2 heads[kSharePairs];  // rows << 16 | first row, digit << 16 | expert
  __shared__ Totals scratch[kMaxWarps];
  __shared__ __align__(16) u8 marks[kNumberedSlots];
  __shared__ u16 slots[kNumbers];
  const ColumnTable<kColumns> table{memory};
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  i32* reported = blockIdx.x == 0 ? status : nullptr;
  const i32 first_pair = warp < kColumns ? warp * kRounds * kWarp + lane : sizes.pairs;
  clear_shared(memory, (sizes.keys() + 1) * kColumns);
  if (sizes.numbers_slots()) clear_marks(marks, sizes);
  wait_for_predecessor();
  release_successor();
  PairInput inputs[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    inputs[r] = load_pair(topk_ids, token_to_slot, sizes, first_pair + r * kWarp);
  }
  __syncthreads();
  if (sizes.numbers_slots()) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) mark_slot(marks, sizes, inputs[r].slot);
    __syncthreads();
  }
  Group groups[kRounds];
  u32 ranks[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    groups[r] = group_of(inputs[r], sizes, reported);
  }
  if (sizes.numbers_slots()) number_slots(marks, sizes, groups, slots, reported);
  rank_pairs<kColumns, kRounds>(table, sizes, groups, ranks);
  const bool writes = (warp & ((1 << grid_shift) - 1)) == static_cast<i32>(blockIdx.x);
  const Totals all = scan_keys(table, sizes, lists, slots, writes, scratch);

  const auto share = [&](i32 items) { return (items + (1 << grid_shift) - 1) >> grid_shift; };
  const i32 pair_share = share(sizes.pairs), first_row = blockIdx.x * pair_share;
  const i32 tile_share = share(all.tiles), first_tile = blockIdx.x * tile_share;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const i32 pair = first_pair + r * kWarp;
    i32 row = -1;
    if (!groups[r].foreign()) {
      const u32 key = groups[r].key(sizes), base = table.base(key);
      row = static_cast<i32>((base & 0xffffu) + ranks[r]);
      row_pairs[row] = static_cast<u16>(pair);
      const u32 place = (base >> 16) + (ranks[r] >> sizes.tile_shift) - first_tile;
      const bool tile = groups[r].digit() > 0 && sizes.place_in_tile(ranks[r]) == 0;
      if (tile && place < static_cast<u32>(tile_share)) {
        const i32 end = static_cast<i32>(table.base(key + 1) & 0xffffu);
        const u32 rows = min_int(end - row, sizes.tile_rows());
        heads[place] = make_uint2(rows << 16 | row, groups[r].bits);
      }
    }
    const bool mine = static_cast<u32>(pair - first_row) < static_cast<u32>(pair_share);
    if (mine && pair < sizes.pairs) lists.pair_to_row[pair] = row;
  }
  __syncthreads();

  const i32 end_row = min_int(first_row + pair_share, sizes.pairs);
  for (i32 row = first_row + threadIdx.x; row < end_row; row += blockDim.x) {
    lists.row_to_pair[row] = row < all.rows ? row_pairs[row] : -1;
  }
  const i32 tiles = min_int(tile_share, all.tiles - first_tile);
  for (i32 i = threadIdx.x; i < tiles * 4; i += blockDim.x) {
    const uint2 packed = heads[i / 4];
    const Group group{packed.y};
    const Tile head{static_cast<i32>(packed.x & 0xffffu), static_cast<i32>(packed.x >> 16),
                    group.expert(), sizes.slot_of(group.digit(), slots)};
    int4* record = reinterpret_cast<int4*>(lists.tiles + first_tile + i / 4);
    record[i % 4] = record_quarter(
        i % 4, head, [&](i32 at) { return static_cast<i32>(row_pairs[head.first_row + at]); });
  }
}
