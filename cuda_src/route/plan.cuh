// What the kernels of the fused plan share: reading pairs, ranking them within a block, and turning
// the rows of each (expert, slot) into places in all lists.
//
// A *key* numbers (expert, slot digit), where digit 0 is 'no adapter' and digit s + 1 is slot s, so
// that keys rise in row order. Where a batch is said to hold few of many slots, digit n + 1 is the
// nth slot that it holds instead: the order is the same, and the keys are few. A list place follows
// from integer counts alone; no order comes from an atomic.
#pragma once
#include "lora/slot_entry.cuh"
#include "ptx/memory.cuh"
#include "ptx/scan.cuh"
#include "ptx/types.cuh"

constexpr u32 kForeign = 0xffffffffu;
constexpr int kMaxWarps = 32;
constexpr int kNumberedSlots = 1024;  // most slots of a table where those held are numbered
constexpr int kNumbers = 256;         // and most of them that a batch may be said to hold

__device__ __forceinline__ u32 divide(u32 value, u32 magic) {
  return magic == 0 ? value : __umulhi(value, magic);
}

// The sizes of a call (_sizes in ops/plan.py). A magic number m of a divisor gives the quotient
// of n as the upper half of n * m, for n * divisor < 2^32; 0 stands for the divisor 1.
struct __align__(8) PlanSizes {
  i32 pairs, top_k, k_major;
  u32 divisor, divisor_magic;  // of a pair: top_k, or the number of tokens where k_major
  i32 num_experts, start_expert;
  i32 digits;  // max_loras + 1, or fewer: the slots held are numbered, digits - 1 at most
  u32 digits_magic;
  i32 tile_shift;  // log2 of a full tile's rows
  i32 max_loras;

  __device__ __forceinline__ i32 keys() const { return num_experts * digits; }
  __device__ __forceinline__ i32 tokens() const {
    return static_cast<i32>(k_major ? divisor : divide(pairs, divisor_magic));
  }
  __device__ __forceinline__ i32 tile_rows() const { return 1 << tile_shift; }
  // Place in its tile of the row with this number in its segment.
  __device__ __forceinline__ i32 place_in_tile(i32 index) const {
    return index & (tile_rows() - 1);
  }
  __device__ __forceinline__ bool numbers_slots() const { return digits <= max_loras; }
  // `slots`: by number.
  __device__ __forceinline__ i32 slot_of(i32 digit, const u16* slots) const {
    return digit > 0 && numbers_slots() ? slots[digit - 1] : digit - 1;
  }
};
static_assert(sizeof(PlanSizes) == 48, "packed in ops/_plan_choice.py makes 48 bytes");

// The arrays of a Routing and a Segments.
struct PlanLists {
  i32* row_to_pair;
  i32* pair_to_row;
  i64* offsets;
  i32* seg_start;
  i32* seg_expert;
  i32* seg_slot;
  i32* seg_count;
  TileRecord* tiles;
  i32* tile_count;
};
static_assert(sizeof(PlanLists) == 72, "_pointers in ops/plan.py packs 72 bytes");

// Local expert and slot digit of a pair in one word; kForeign for a pair that is not ours.
struct Group {
  u32 bits;

  __device__ __forceinline__ bool foreign() const { return bits == kForeign; }
  __device__ __forceinline__ i32 expert() const { return static_cast<i32>(bits & 0xffffu); }
  __device__ __forceinline__ i32 digit() const { return static_cast<i32>(bits >> 16); }
  __device__ __forceinline__ u32 key(const PlanSizes& sizes) const {
    return foreign() ? kForeign : static_cast<u32>(expert() * sizes.digits + digit());
  }
};

// What is loaded of a pair, apart from what is made of it, so that many loads can be in flight.
struct PairInput {
  i32 id;
  i32 slot;
};

__device__ __forceinline__ PairInput load_pair(const i32* topk_ids, const i32* token_to_slot,
                                               const PlanSizes& sizes, i32 pair) {
  if (pair >= sizes.pairs) return PairInput{-1, -1};
  const i32 quotient = static_cast<i32>(divide(pair, sizes.divisor_magic));
  const i32 rest = pair - quotient * static_cast<i32>(sizes.divisor);
  const i32 token = sizes.k_major ? rest : quotient;
  const i64 place = sizes.k_major ? static_cast<i64>(rest) * sizes.top_k + quotient : pair;
  return PairInput{topk_ids[place], token_to_slot[token]};
}

// A slot that does not exist is reported and counts as no adapter.
__device__ __forceinline__ Group group_of(const PairInput& input, const PlanSizes& sizes,
                                          i32* status) {
  const bool bad_slot = input.slot >= sizes.max_loras;
  if (bad_slot) raise_status(status, kStatusSlotRange);
  // Both are at least 0 where it matters, so that the difference cannot wrap.
  const u32 local = static_cast<u32>(input.id) - static_cast<u32>(sizes.start_expert);
  if (input.id < 0 || local >= static_cast<u32>(sizes.num_experts)) return Group{kForeign};
  const u32 digit = input.slot < 0 || bad_slot ? 0 : input.slot + 1;
  return Group{local | digit << 16};
}

// marks [kNumberedSlots]: a byte for each slot, 1 where the batch holds it.
__device__ __forceinline__ void clear_marks(u8* marks, const PlanSizes& sizes) {
  for (i32 i = threadIdx.x; i < ceil_div(sizes.max_loras, kWarp) * kWarp; i += blockDim.x) {
    marks[i] = 0;
  }
}

__device__ __forceinline__ void mark_slot(u8* marks, const PlanSizes& sizes, i32 slot) {
  if (static_cast<u32>(slot) < static_cast<u32>(sizes.max_loras)) {
    store1_relaxed(shared_address(marks + slot), 1);
  }
}

// The slots that a batch holds, over a warp, all of which calls.
struct HeldSlots {
  u32 bits;    // of slots 32 * lane and up
  i32 before;  // held below those

  static __device__ __forceinline__ HeldSlots of(const u8* marks, const PlanSizes& sizes) {
    constexpr u32 kGather = 0x10204080u;  // the lowest bits of a word's bytes into its upper 4
    const i32 first = static_cast<i32>(threadIdx.x % kWarp) * kWarp;
    u32 bits = 0;
    if (first < sizes.max_loras) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = *reinterpret_cast<const uint4*>(marks + first + half * 16);
        const u32 nibbles = (four.x * kGather) >> 28 | (four.y * kGather) >> 28 << 4 |
                            (four.z * kGather) >> 28 << 8 | (four.w * kGather) >> 28 << 12;
        bits |= nibbles << (half * 16);
      }
    }
    const i32 held = __popc(bits);
    return HeldSlots{bits, warp_inclusive(held, Sum()) - held};
  }
  // Slots held below this one. Each lane asks for its own, which may be none that there is.
  __device__ __forceinline__ i32 number(i32 slot) const {
    const u32 lane = static_cast<u32>(slot) / kWarp % kWarp, bit = slot % kWarp;
    const u32 word = __shfl_sync(kFullMask, bits, lane);
    return __shfl_sync(kFullMask, before, lane) + __popc(word & ((1u << bit) - 1u));
  }
};

// Digits of slots become digits of their numbers; `slots` by number and the status are for those
// blocks that give them. A slot that is one too many is reported and counts as no adapter. All of
// the block call, with the marks complete.
template <int kRounds>
__device__ __forceinline__ void number_slots(const u8* marks, const PlanSizes& sizes,
                                             Group (&groups)[kRounds], u16* slots, i32* status) {
  const HeldSlots held = HeldSlots::of(marks, sizes);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const Group group = groups[r];
    const bool numbered = !group.foreign() && group.digit() > 0;
    const i32 number = held.number(numbered ? group.digit() - 1 : 0);
    if (numbered) {
      const u32 digit = number < sizes.digits - 1 ? number + 1 : 0;
      groups[r] = Group{static_cast<u32>(group.expert()) | digit << 16};
    }
  }
  if (slots == nullptr) return;
  const i32 lane = threadIdx.x % kWarp;
  for (i32 first = threadIdx.x - lane; first < sizes.max_loras; first += blockDim.x) {
    const i32 number = held.number(first + lane);
    if (__shfl_sync(kFullMask, held.bits, first / kWarp) >> lane & 1u) {
      if (number < sizes.digits - 1) {
        slots[number] = static_cast<u16>(first + lane);
      } else {
        raise_status(status, kStatusCapacity);
      }
    }
  }
}

// A 16-byte quarter of a tile's record; pair_at(i) is the pair of the tile's row i.
template <typename PairAt>
__device__ __forceinline__ int4 record_quarter(i32 quarter, const Tile& head, PairAt pair_at) {
  if (quarter == 0) return make_int4(head.first_row, head.rows, head.expert, head.slot);
  if (quarter == 3) return make_int4(0, 0, 0, 0);
  const i32 i = (quarter - 1) * 4;
  int4 pairs;
  pairs.x = i < head.rows ? pair_at(i) : -1;
  pairs.y = i + 1 < head.rows ? pair_at(i + 1) : -1;
  pairs.z = i + 2 < head.rows ? pair_at(i + 2) : -1;
  pairs.w = i + 3 < head.rows ? pair_at(i + 3) : -1;
  return pairs;
}

// Rows of each key and column in a byte of shared memory: rows[keys + 1][kColumns]. A column
// belongs to one warp and to consecutive pairs, at most 255 of them, in column order. Once the
// counts are used up, the first word of a key's bytes holds the key's first row and tile.
template <int kColumns>
struct ColumnTable {
  static constexpr int kWords = kColumns >= 16 ? 4 : 2;  // of a piece: one load
  static constexpr int kPieces = kColumns / (kWords * 4);
  static_assert(kPieces * kWords * 4 == kColumns, "a row is whole pieces");
  u8* rows;

  __device__ __forceinline__ u8* cell(u32 key, i32 column) const {
    return rows + key * kColumns + column;
  }
  __device__ __forceinline__ void load(u32 key, i32 piece, u32 (&words)[kWords]) const {
    const u8* at = cell(key, piece * kWords * 4);
    if constexpr (kWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(at);
      words[0] = v.x;
      words[1] = v.y;
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(at);
      words[0] = v.x;
      words[1] = v.y;
      words[2] = v.z;
      words[3] = v.w;
    }
  }
  __device__ __forceinline__ i32 total(i32 key) const {
    u32 words[kWords], sum = 0;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      load(key, piece, words);
#pragma unroll
      for (int i = 0; i < kWords; ++i) sum = __dp4a(words[i], 0x01010101u, sum);
    }
    return static_cast<i32>(sum);
  }
  __device__ __forceinline__ void set(i32 key, i32 row, i32 tile) const {
    *reinterpret_cast<u32*>(rows + key * kColumns) = static_cast<u32>(row) | static_cast<u32>(tile)
                                                                                 << 16;
  }
  __device__ __forceinline__ u32 base(i32 key) const {
    return *reinterpret_cast<const u32*>(rows + key * kColumns);
  }
};

__device__ __forceinline__ void clear_shared(u8* memory, i32 bytes) {
  for (i32 i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(memory + i) = make_uint4(0, 0, 0, 0);
  }
}

// Ranks the block's pairs among those of their key: warp w < kColumns holds, in round r, the pairs
// (w * kRounds + r) * 32 + lane. Needs a cleared table and a block of at least kColumns warps, all
// of which call; the counts are complete on return.
template <int kColumns, int kRounds>
__device__ __forceinline__ void rank_pairs(const ColumnTable<kColumns>& table,
                                           const PlanSizes& sizes, const Group (&groups)[kRounds],
                                           u32 (&ranks)[kRounds]) {
  using Table = ColumnTable<kColumns>;
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (warp < kColumns) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const u32 key = groups[r].key(sizes);
      const u32 peers = __match_any_sync(kFullMask, key);
      const u32 earlier = peers & ((1u << lane) - 1u);
      const u32 held = key == kForeign ? 0 : *table.cell(key, warp);
      ranks[r] = held + __popc(earlier);
      __syncwarp();
      if (key != kForeign && earlier == 0) {
        *table.cell(key, warp) = static_cast<u8>(held + __popc(peers));
      }
      __syncwarp();
    }
  }
  __syncthreads();
  if (warp >= kColumns) return;
#pragma unroll
  for (int piece = 0; piece < Table::kPieces; ++piece) {
    // Bytes before this warp's count 1.
    u32 weights[Table::kWords], words[Table::kWords];
#pragma unroll
    for (int i = 0; i < Table::kWords; ++i) {
      const i32 bytes = min_int(max_int(warp - (piece * Table::kWords + i) * 4, 0), 4);
      weights[i] = bytes == 4 ? 0x01010101u : 0x01010101u & ((1u << (bytes * 8)) - 1u);
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (groups[r].foreign()) continue;
      table.load(groups[r].key(sizes), piece, words);
#pragma unroll
      for (int i = 0; i < Table::kWords; ++i) ranks[r] = __dp4a(words[i], weights[i], ranks[r]);
    }
  }
}

// Numbers of rows, tiles and segments, or where the next of each goes.
struct Totals {
  i32 rows, tiles, segments;

  __device__ __forceinline__ void add(i32 count, i32 digit, const PlanSizes& sizes) {
    rows += count;
    tiles += digit == 0 ? 0 : (count + sizes.tile_rows() - 1) >> sizes.tile_shift;
    segments += count > 0 ? 1 : 0;
  }
};

struct BlockTotals {
  Totals before;  // of the threads before this one
  Totals all;
};

// `scratch` has kMaxWarps entries. One barrier.
__device__ __forceinline__ BlockTotals block_totals(const Totals& own, Totals* scratch) {
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Totals inclusive{warp_inclusive(own.rows, Sum()), warp_inclusive(own.tiles, Sum()),
                         warp_inclusive(own.segments, Sum())};
  if (lane == kWarp - 1) scratch[warp] = inclusive;
  __syncthreads();
  const bool live = lane < static_cast<i32>(blockDim.x) / kWarp;
  const Totals sums = live ? scratch[lane] : Totals{0, 0, 0};
  const auto sum = [](i32 value) { return __reduce_add_sync(kFullMask, value); };
  const auto before = [&](i32 value, i32 up_to, i32 mine) {
    return sum(lane < warp ? value : 0) + up_to - mine;
  };
  return BlockTotals{Totals{before(sums.rows, inclusive.rows, own.rows),
                            before(sums.tiles, inclusive.tiles, own.tiles),
                            before(sums.segments, inclusive.segments, own.segments)},
                     Totals{sum(sums.rows), sum(sums.tiles), sum(sums.segments)}};
}

// Turns the rows of every key into the key's first row and tile, kept in the table (as is the end,
// under the number of keys), and writes the segments and the expert offsets. Every block of the
// grid does all of it; of the lists a warp's part is written where `writes` is set, which must be
// in one block, and what ends them by block 0. `table` gives total(key) and takes set(key, row,
// tile); `slots` are by number. All of the block call, a power of two of threads; the table is
// complete on return.
template <typename Table>
__device__ __forceinline__ Totals scan_keys(const Table& table, const PlanSizes& sizes,
                                            const PlanLists& lists, const u16* slots, bool writes,
                                            Totals* scratch) {
  const i32 keys = sizes.keys(), threads_log2 = __ffs(blockDim.x) - 1;
  // Odd, so that neighbouring threads read different banks.
  const i32 each = ((keys + static_cast<i32>(blockDim.x) - 1) >> threads_log2) | 1;
  const i32 first = min_int(threadIdx.x * each, keys), last = min_int(first + each, keys);
  i32 expert = static_cast<i32>(divide(first, sizes.digits_magic));
  i32 digit = first - expert * sizes.digits;
  Totals own{0, 0, 0};
  for (i32 key = first, d = digit; key < last; ++key) {
    own.add(table.total(key), d, sizes);
    if (++d == sizes.digits) d = 0;
  }
  const BlockTotals sums = block_totals(own, scratch);
  Totals at = sums.before;
  for (i32 key = first; key < last; ++key) {
    const i32 count = table.total(key);
    table.set(key, at.rows, at.tiles);
    if (writes && digit == 0) lists.offsets[expert] = at.rows;
    if (writes && count > 0) {
      lists.seg_start[at.segments] = at.rows;
      lists.seg_expert[at.segments] = expert;
      lists.seg_slot[at.segments] = sizes.slot_of(digit, slots);
    }
    at.add(count, digit, sizes);
    if (++digit == sizes.digits) {
      digit = 0;
      ++expert;
    }
  }
  if (threadIdx.x == 0) {
    table.set(keys, sums.all.rows, sums.all.tiles);
    if (blockIdx.x == 0) {
      lists.offsets[sizes.num_experts] = sums.all.rows;
      lists.seg_start[sums.all.segments] = sums.all.rows;
      *lists.seg_count = sums.all.segments;
      *lists.tile_count = sums.all.tiles;
    }
  }
  __syncthreads();
  return sums.all;
}
