// Segments: maximal runs of rows with one (expert, slot), and the row tiles of the runs with an
// adapter, from any row order that is grouped by expert.
//
// In: row_to_pair, expert_first_token_offset, token_to_slot. Out: the lists of Segments
// (cupylora/worklists.py). Up to 1024 rows one CTA does it all; above, `segment_counts` summarises
// every 1024 rows, and each CTA of `segment_fill` derives from the summaries before it where its
// own segments and tiles start. The lists depend on the rows alone, not on timing.
#include "lora/slot_entry.cuh"
#include "ptx/scan.cuh"
#include "ptx/types.cuh"
#include "route/experts.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxTileRows = 64;
constexpr i32 kNone = -1;

struct Rows {
  const i32* row_to_pair;
  const i32* offsets;  // shared memory
  const i32* token_to_slot;
  i32 num_tokens, top_k, k_major, num_experts, max_loras;

  __device__ __forceinline__ i32 valid() const { return offsets[num_experts]; }
  __device__ __forceinline__ i32 slot(i32 row, i32* status) const {
    const RowMap map{row_to_pair, top_k, num_tokens, k_major};
    const i32 slot = token_to_slot[map.token(row_to_pair[row])];
    if (slot < max_loras) return slot < 0 ? -1 : slot;
    raise_status(status, kStatusSlotRange);
    return -1;
  }
};

// What 1024 rows contribute: enough to continue behind them without reading them again.
struct Summary {
  i32 starts;      // segments that start here
  i32 last_start;  // row of the last of them, kNone if none
  i32 lead_rows;   // rows before the first start, when they belong to a segment with an adapter
  i32 own_tiles;   // tiles of the segments that start here, cut at the end of these rows
};

// This thread's row: its group, and whether a segment starts with it.
struct RowState {
  bool valid;
  bool start;
  i32 expert;
  i32 slot;
};

__device__ __forceinline__ RowState row_state(const Rows& rows, i32 row, i32 valid, i32* status) {
  RowState s{row < valid, false, kNone, kNone};
  if (!s.valid) return s;
  s.expert = expert_of_row(rows.offsets, rows.num_experts, row);
  s.slot = rows.slot(row, status);
  s.start = row == 0 || rows.offsets[s.expert] == row || rows.slot(row - 1, nullptr) != s.slot;
  return s;
}

// One bit a row, set where a segment starts or the rows end: for the CTA's own rows and as many
// after them as a tile may reach into.
__device__ __forceinline__ void mark_boundary(u32* boundaries, i32 index, const RowState& s) {
  const u32 votes = __ballot_sync(kFullMask, s.start || !s.valid);
  if (index % kWarp == 0) boundaries[index / kWarp] = votes;
}

// Rows from `index` to the next boundary, at most `limit`.
__device__ __forceinline__ i32 rows_to_boundary(const u32* boundaries, i32 index, i32 limit) {
  for (i32 next = index + 1; next < index + limit; next = (next / kWarp + 1) * kWarp) {
    const u32 word = boundaries[next / kWarp] >> (next % kWarp);
    if (word != 0) return min_int(limit, next + __ffs(static_cast<i32>(word)) - 1 - index);
  }
  return limit;
}

// A tile's record: 64 bytes in four stores.
__device__ __forceinline__ void write_record(TileRecord& record, const Tile& head,
                                             const i32* row_to_pair) {
  int4 pairs[kTilePairs / 4];
  i32* pair = reinterpret_cast<i32*>(pairs);
#pragma unroll
  for (int i = 0; i < kTilePairs; ++i) {
    pair[i] = i < head.rows ? row_to_pair[head.first_row + i] : -1;
  }
  int4* out = reinterpret_cast<int4*>(&record);
  out[0] = make_int4(head.first_row, head.rows, head.expert, head.slot);
  out[1] = pairs[0];
  out[2] = pairs[1];
  out[3] = make_int4(0, 0, 0, 0);
}

// Tiles that start in rows [first, first + count) of a segment, counted from the segment's start.
__device__ __forceinline__ i32 tile_starts(i32 first, i32 count, i32 tile_rows) {
  return ceil_div(first + count, tile_rows) - ceil_div(first, tile_rows);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    segment_counts(const i32* __restrict__ row_to_pair, const i64* __restrict__ global_offsets,
                   const i32* __restrict__ token_to_slot, i32 num_tokens, i32 top_k, i32 k_major,
                   i32 num_experts, i32 max_loras, i32 tile_rows, Summary* __restrict__ summaries,
                   i32* status) {
  __shared__ i32 scratch[kWarps];
  __shared__ i32 offsets[kMaxExperts + 1];
  load_offsets(offsets, global_offsets, num_experts);
  const Rows rows{row_to_pair, offsets, token_to_slot, num_tokens,
                  top_k,       k_major, num_experts,   max_loras};
  const i32 row = blockIdx.x * kThreads + threadIdx.x;
  const RowState s = row_state(rows, row, rows.valid(), status);
  const i32 begin = block_inclusive(s.start ? row : kNone, kNone, scratch, Max());
  const i32 starts = block_inclusive(s.start ? 1 : 0, 0, scratch, Sum());
  const bool tile = s.valid && s.slot >= 0 && begin >= 0 && (row - begin) % tile_rows == 0;
  const i32 tiles = block_inclusive(tile ? 1 : 0, 0, scratch, Sum());
  const bool lead = s.valid && s.slot >= 0 && begin == kNone;
  const i32 lead_rows = block_inclusive(lead ? 1 : 0, 0, scratch, Sum());
  if (threadIdx.x == kThreads - 1) {
    summaries[blockIdx.x] = Summary{starts, begin, lead_rows, tiles};
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    segment_fill(const i32* __restrict__ row_to_pair, const i64* __restrict__ global_offsets,
                 const i32* __restrict__ token_to_slot, i32 num_tokens, i32 top_k, i32 k_major,
                 i32 num_experts, i32 max_loras, i32 tile_rows,
                 const Summary* __restrict__ summaries, i32 max_segments, i32 max_tiles,
                 i32* __restrict__ seg_start, i32* __restrict__ seg_expert,
                 i32* __restrict__ seg_slot, i32* __restrict__ seg_count,
                 TileRecord* __restrict__ tiles, i32* __restrict__ tile_count, i32* status) {
  __shared__ i32 scratch[kWarps];
  __shared__ i32 carry[3];  // segments, tiles before this CTA; start of the segment it continues
  __shared__ i32 starts_in_block[kThreads + 1];
  __shared__ u32 boundaries[(kThreads + kMaxTileRows) / kWarp];
  __shared__ i32 offsets[kMaxExperts + 1];
  load_offsets(offsets, global_offsets, num_experts);
  const Rows rows{row_to_pair, offsets, token_to_slot, num_tokens,
                  top_k,       k_major, num_experts,   max_loras};

  i32 segments_before = 0, tiles_before = 0, open_start = kNone;
  for (i32 base = 0; base < static_cast<i32>(blockIdx.x); base += kThreads) {
    const i32 b = base + threadIdx.x;
    const Summary s = b < static_cast<i32>(blockIdx.x) ? summaries[b] : Summary{0, kNone, 0, 0};
    const i32 last = max_int(open_start, block_inclusive(s.last_start, kNone, scratch, Max()));
    const i32 up_to = threadIdx.x == 0 ? open_start : kNone;
    // The start of the segment that block b continues is the last start before b.
    starts_in_block[threadIdx.x + 1] = last;
    if (threadIdx.x == 0) starts_in_block[0] = up_to;
    __syncthreads();
    const i32 open = starts_in_block[threadIdx.x];
    const i32 lead = s.lead_rows > 0 ? tile_starts(b * kThreads - open, s.lead_rows, tile_rows) : 0;
    const i32 segment_sum = block_inclusive(s.starts, 0, scratch, Sum());
    const i32 tile_sum = block_inclusive(s.own_tiles + lead, 0, scratch, Sum());
    if (threadIdx.x == kThreads - 1) {
      carry[0] = segments_before + segment_sum;
      carry[1] = tiles_before + tile_sum;
      carry[2] = last;
    }
    __syncthreads();
    segments_before = carry[0];
    tiles_before = carry[1];
    open_start = carry[2];
    __syncthreads();
  }

  const i32 valid = rows.valid();
  const i32 row = blockIdx.x * kThreads + threadIdx.x;
  const RowState s = row_state(rows, row, valid, blockIdx.x == 0 ? status : nullptr);
  mark_boundary(boundaries, threadIdx.x, s);
  if (threadIdx.x < kMaxTileRows) {
    mark_boundary(boundaries, kThreads + threadIdx.x,
                  row_state(rows, row + kThreads, valid, nullptr));
  }
  const i32 begin =
      max_int(open_start, block_inclusive(s.start ? row : kNone, kNone, scratch, Max()));
  const i32 segment = segments_before + block_inclusive(s.start ? 1 : 0, 0, scratch, Sum()) - 1;
  const bool is_tile = s.valid && s.slot >= 0 && (row - begin) % tile_rows == 0;
  const i32 tile = tiles_before + block_inclusive(is_tile ? 1 : 0, 0, scratch, Sum()) - 1;

  if (s.start && segment < max_segments) {
    seg_start[segment] = row;
    seg_expert[segment] = s.expert;
    seg_slot[segment] = s.slot;
  }
  if (is_tile && tile < max_tiles) {
    const i32 count = rows_to_boundary(boundaries, threadIdx.x, tile_rows);
    write_record(tiles[tile], Tile{row, count, s.expert, s.slot}, row_to_pair);
  }
  // A list without room ends where its next segment would have begun.
  if (s.start && segment == max_segments) seg_start[max_segments] = row;
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kThreads - 1) {
    const i32 count = segment + 1;
    *seg_count = min_int(count, max_segments);
    *tile_count = min_int(tile + 1, max_tiles);
    if (count > max_segments) {
      raise_status(status, kStatusCapacity);
    } else {
      seg_start[count] = valid;
    }
  }
}
