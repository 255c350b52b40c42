// The plan of a large batch in two launches over the whole device: rows sorted by (expert, slot,
// pair), segments, tiles.
//
// In: topk_ids [T, k] global expert ids, token_to_slot [T]. Out: the lists of a Routing and of
// Segments (cupylora/worklists.py). `plan_count` ranks the pairs of each block among their key and
// leaves the block's rows of every key; `plan_place` adds those up (every block of it for itself),
// and each pair writes its own entries of the lists, those of its tile's record included.
#include "route/plan.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kRankBits = 11;
constexpr u32 kRankMask = (1u << kRankBits) - 1u;
constexpr int kVectorKeys = 8;     // keys in 16 bytes of counts
constexpr int kPackedBlocks = 16;  // blocks whose counts can be added in 16 bits
constexpr int kAhead = 8;          // tokens of a thread whose slots are loaded at once

__device__ __forceinline__ i32 padded_keys(const PlanSizes& sizes) {
  return ceil_div(sizes.keys(), kVectorKeys) * kVectorKeys;
}

// First row and first tile of every key in shared memory, in the place of the number of rows.
struct SumTable {
  int2* keys;

  __device__ __forceinline__ i32 total(i32 key) const { return keys[key].x; }
  __device__ __forceinline__ void set(i32 key, i32 row, i32 tile) const {
    keys[key] = make_int2(row, tile);
  }
};

__device__ __forceinline__ void add_packed(uint4& sum, const uint4& counts) {
  sum.x += counts.x;
  sum.y += counts.y;
  sum.z += counts.z;
  sum.w += counts.w;
}

__device__ __forceinline__ i32 unpacked(const uint4& packed, int i) {
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
  return static_cast<i32>(i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16);
}

// Rows of 8 keys over all blocks into `all`, and over those before `block` into `before`. Sums of
// up to kPackedBlocks blocks stay packed; shared memory, not registers, holds them between.
__device__ __forceinline__ void sum_blocks(const uint4* counts, i32 stride, i32 blocks, i32 block,
                                           int2* all, i32* before) {
  for (i32 base = 0; base < blocks; base += kPackedBlocks) {
    uint4 every = make_uint4(0, 0, 0, 0), earlier = every;
#pragma unroll
    for (int i = 0; i < kPackedBlocks; ++i) {
      const uint4 held = base + i < blocks ? *counts : make_uint4(0, 0, 0, 0);
      counts += stride;
      add_packed(every, held);
      if (base + i < block) add_packed(earlier, held);
    }
#pragma unroll
    for (int i = 0; i < kVectorKeys; ++i) {
      all[i].x = (base == 0 ? 0 : all[i].x) + unpacked(every, i);
      before[i] = (base == 0 ? 0 : before[i]) + unpacked(earlier, i);
    }
  }
}

}  // namespace

// A block ranks kColumns * kRounds * 32 pairs. ranked [pairs]: key << 11 | rank, kForeign for a
// pair that is not ours. counts [blocks][padded keys]: rows of each key, 16 bits; behind them the
// slots by number, where those held are numbered, for which each block reads all of token_to_slot.
// Dynamic shared memory: kColumns bytes for every padded key.
template <int kColumns, int kRounds>
__global__ void __launch_bounds__(kThreads, 1)
    plan_count(const i32* topk_ids, const i32* token_to_slot, PlanSizes sizes, u32* ranked,
               u32* counts, i32* status) {
  constexpr int kPairs = kColumns * kRounds * kWarp;
  static_assert(kPairs <= 1 << kRankBits && kPairs * kPackedBlocks < 1 << 16, "packed counts");
  extern __shared__ __align__(16) u8 memory[];
  __shared__ __align__(16) u8 marks[kNumberedSlots];
  const ColumnTable<kColumns> table{memory};
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 first_pair =
      warp < kColumns ? (blockIdx.x * kColumns + warp) * kRounds * kWarp + lane : sizes.pairs;
  const i32 keys = padded_keys(sizes);
  clear_shared(memory, keys * kColumns);
  if (sizes.numbers_slots()) clear_marks(marks, sizes);
  wait_for_predecessor();
  release_successor();
  PairInput inputs[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    inputs[r] = load_pair(topk_ids, token_to_slot, sizes, first_pair + r * kWarp);
  }
  i32 ahead[kAhead];
  if (sizes.numbers_slots()) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const i32 token = threadIdx.x + i * kThreads;
      ahead[i] = token < sizes.tokens() ? token_to_slot[token] : -1;
    }
  }
  __syncthreads();
  if (sizes.numbers_slots()) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) mark_slot(marks, sizes, ahead[i]);
    for (i32 token = threadIdx.x + kAhead * kThreads; token < sizes.tokens(); token += kThreads) {
      mark_slot(marks, sizes, token_to_slot[token]);
    }
    __syncthreads();
  }
  Group groups[kRounds];
  u32 ranks[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) groups[r] = group_of(inputs[r], sizes, status);
  if (sizes.numbers_slots()) {
    u16* slots = reinterpret_cast<u16*>(counts + static_cast<i64>(gridDim.x) * (keys / 2));
    number_slots(marks, sizes, groups, blockIdx.x == 0 ? slots : nullptr, status);
  }
  rank_pairs<kColumns, kRounds>(table, sizes, groups, ranks);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const i32 pair = first_pair + r * kWarp;
    if (pair >= sizes.pairs) continue;
    const u32 key = groups[r].key(sizes);
    ranked[pair] = key == kForeign ? kForeign : key << kRankBits | ranks[r];
  }
  u32* row = counts + static_cast<i64>(blockIdx.x) * (keys / 2);
  for (i32 i = threadIdx.x; i < keys / 2; i += kThreads) {
    row[i] = static_cast<u32>(table.total(i * 2)) | static_cast<u32>(table.total(i * 2 + 1)) << 16;
  }
}

// A thread a pair; `block_pairs` is how many a block of plan_count had, a multiple of kThreads.
// Dynamic shared memory: 12 bytes for every padded key, and 8.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    plan_place(const u32* ranked, const uint4* counts, i32 blocks, i32 block_pairs, PlanSizes sizes,
               PlanLists lists) {
  extern __shared__ __align__(16) u8 memory[];
  __shared__ Totals scratch[kMaxWarps];
  __shared__ u16 slots[kNumbers];
  const i32 keys = padded_keys(sizes), vectors = keys / kVectorKeys;
  const SumTable table{reinterpret_cast<int2*>(memory)};
  i32* earlier = reinterpret_cast<i32*>(table.keys + keys + 1);  // rows in the blocks before
  const i32 pair = blockIdx.x * kThreads + threadIdx.x;
  wait_for_predecessor();
  release_successor();
  const u32 own = pair < sizes.pairs ? ranked[pair] : kForeign;
  const i32 block = static_cast<i32>(blockIdx.x) * kThreads / block_pairs;
  if (sizes.numbers_slots() && threadIdx.x < sizes.digits - 1) {
    const i64 behind = static_cast<i64>(blocks) * vectors;
    slots[threadIdx.x] = reinterpret_cast<const u16*>(counts + behind)[threadIdx.x];
  }
  for (i32 v = threadIdx.x; v < vectors; v += kThreads) {
    const i32 key = v * kVectorKeys;
    sum_blocks(counts + v, vectors, blocks, block, table.keys + key, earlier + key);
  }
  __syncthreads();
  const i32 writer = min_int(threadIdx.x / kWarp, gridDim.x - 1);  // a block for each warp's part
  const bool writes = writer == static_cast<i32>(blockIdx.x);
  const Totals all = scan_keys(table, sizes, lists, slots, writes, scratch);

  if (pair >= sizes.pairs) return;
  i32 row = -1;
  if (own != kForeign) {
    const u32 key = own >> kRankBits;
    const int2 base = table.keys[key];
    const i32 index = earlier[key] + static_cast<i32>(own & kRankMask);
    row = base.x + index;
    lists.row_to_pair[row] = pair;
    const i32 expert = static_cast<i32>(divide(key, sizes.digits_magic));
    const i32 digit = static_cast<i32>(key) - expert * sizes.digits;
    if (digit > 0) {
      TileRecord* record = lists.tiles + base.y + (index >> sizes.tile_shift);
      const i32 place = sizes.place_in_tile(index);
      if (place < kTilePairs) record->pairs[place] = pair;
      if (place == 0) {
        const i32 rows = min_int(table.keys[key + 1].x - row, sizes.tile_rows());
        int4* quarters = reinterpret_cast<int4*>(record);
        quarters[0] = make_int4(row, rows, expert, sizes.slot_of(digit, slots));
        quarters[3] = make_int4(0, 0, 0, 0);
        for (i32 i = rows; i < kTilePairs; ++i) record->pairs[i] = -1;
      }
    }
  }
  lists.pair_to_row[pair] = row;
  // A row behind the valid ones is no pair's: the thread of that number writes it.
  if (pair >= all.rows) lists.row_to_pair[pair] = -1;
}
