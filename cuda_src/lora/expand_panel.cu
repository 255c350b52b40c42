// Segmented expand of large batches, ranks up to 16 · KS: the update of lora/expand.cu, bit for
// bit. A CTA has a panel of 256 columns of one slice, and a run of neighbouring tiles; each of its
// four warps owns 64 of the columns and keeps B of them in registers for as long as tiles share an
// adapter and an expert.
//
// In: h of the shrink ahead, the same tiles (of up to 64 rows) and slot entries, y. Out: y of the
// tiles' rows; no other byte of y is written, so rows of no adapter keep their bits.
//
// h of a tile is made into 2-byte terms once, by all warps, for the products of all. Everything
// else that a tile takes is under way while the tiles before it are worked on: its record three
// tiles ahead, its entry and pairs two, h one, and of y four groups of 8 rows. What a lane copies
// of h and y is what it reads again, so it only has to wait for its own copies.
//
// The shrink waits for all work before it, so only h may still be missing when this kernel starts:
// lists, y and B are fetched ahead of the wait.
#include "lora/expand.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kGroupRows = 8;  // that a warp takes at a time
constexpr int kAhead = 4;      // groups of y under way
constexpr int kMaxRows = 64;
constexpr int kPartRows = 16;  // tiles are cut between CTAs at multiples of it
constexpr u32 kPieceBytes = 16;
constexpr i32 kLineBytes = 128;

struct __align__(16) TileLists {
  TileRecord record;
  SlotEntry entry;
  i32 pairs[kMaxRows];
};
constexpr int kLists = 4;  // tiles whose lists are at hand or under way

// Where the rows of a tile lie in y, 0 for rows that the tile, or this CTA, does not have.
struct __align__(16) RowAddresses {
  u64 y[kMaxRows];
};

// Neighbouring tiles, cut into equal parts of rows where that is finer than tiles.
struct Run {
  i32 first, count;
  i32 skip;  // rows of the first tile that are another CTA's
  i32 stop;  // and rows of the last one up to which they are not

  __device__ __forceinline__ Run(const ExpandArgs& args, u32 part) {
    const u32 per_tile = max_int(1, args.tile_rows / kPartRows);
    const u64 units = static_cast<u64>(*args.tile_count) * per_tile;
    const u64 begin = units * part / args.parts, end = units * (part + 1) / args.parts;
    first = static_cast<i32>(begin / per_tile);
    skip = static_cast<i32>(begin % per_tile) * kPartRows;
    count = end > begin ? static_cast<i32>((end - 1) / per_tile) - first + 1 : 0;
    stop = static_cast<i32>(end - static_cast<u64>(first + count - 1) * per_tile) * kPartRows;
  }
};

struct RowSpan {
  i32 begin, end;  // of a tile
};

// What all tiles of a CTA have in common.
struct Place {
  TileLists* lists;
  RowAddresses* rows;
  i32* exponents;     // fp16: of each row of the tile at hand
  u32 hidden, terms;  // a tile's h as it comes, split by split, and its terms
  u32 y_slots;        // of this lane
  i32 slice, column;  // of this lane's first column
  i32 columns;        // valid ones from there on
  u32 column_offset;  // of it in a row of y, bytes, where columns are neighbours
};

template <typename T, int KS>
struct Panel {
  static constexpr int kPieces = KS * 4;                // of a row of h, four ranks each
  static constexpr int kTurnRows = kThreads / kPieces;  // of h, that the CTA takes at a time
  static constexpr u32 kHiddenRow = kPieces * kPieceBytes;
  static constexpr u32 kYSlot = 2 * kWarp * kPieceBytes;  // of a warp: a group of rows

  const ExpandArgs& args;
  const Run run;
  const Place at;
  const u64 policy;
  const u8* b = nullptr;  // of the panel's B in registers: where it lies, and its rank
  i32 rank = 0;
  Weights weights[KS];

  __device__ __forceinline__ TileLists& lists_of(i32 i) const { return at.lists[i % kLists]; }
  __device__ __forceinline__ u64* rows_of(i32 i) const { return at.rows[i % 2].y; }
  __device__ __forceinline__ i32 rank_of(i32 i) const {
    return safe_rank(lists_of(i).entry, args.max_rank, nullptr);  // the shrink has reported it
  }
  // The rows of tile i that are this CTA's; none where its adapter has no rank.
  __device__ __forceinline__ RowSpan span_of(i32 i) const {
    const i32 rows = rank_of(i) == 0 ? 0 : lists_of(i).record.head.rows;
    return RowSpan{i == 0 ? run.skip : 0, i + 1 == run.count ? min_int(rows, run.stop) : rows};
  }
  // Steps that a tile is given, whatever rows it has.
  __device__ __forceinline__ i32 steps() const {
    return max_int(kAhead, args.tile_rows / kGroupRows);
  }
  // Valid columns from the warp's first on; maybe none.
  __device__ __forceinline__ i32 warp_columns() const {
    return at.columns + 8 * (threadIdx.x % kWarp >> 2);
  }
  // Whether the lane's columns of y can be had in a piece.
  __device__ __forceinline__ bool in_pieces() const { return args.y_vector && at.columns >= 8; }

  __device__ __forceinline__ void copy_record(i32 i) const {
    const i32 piece = threadIdx.x;
    if (i >= run.count || piece >= static_cast<i32>(sizeof(TileRecord) / kPieceBytes)) return;
    const u8* from = reinterpret_cast<const u8*>(args.tiles + run.first + i);
    copy16_async(shared_address(&lists_of(i).record) + piece * kPieceBytes,
                 from + piece * kPieceBytes, kPieceBytes);
  }
  // What the record leads to: the slot's entry, zeros for a slot outside the table, and the pairs.
  __device__ __forceinline__ void copy_lists(i32 i) const {
    if (i >= run.count) return;
    TileLists& to = lists_of(i);
    const Tile& tile = to.record.head;
    const i32 piece = threadIdx.x, n = threadIdx.x - kWarp;
    if (piece < static_cast<i32>(sizeof(SlotEntry) / kPieceBytes)) {
      const bool in_table = static_cast<u32>(tile.slot) < static_cast<u32>(args.max_loras);
      const i64 index = static_cast<i64>(at.slice) * args.max_loras + (in_table ? tile.slot : 0);
      copy16_async(shared_address(&to.entry) + piece * kPieceBytes,
                   reinterpret_cast<const u8*>(args.entries + index) + piece * kPieceBytes,
                   in_table ? kPieceBytes : 0);
    } else if (args.y_by != kByRow && n >= 0 && n < min_int(tile.rows, kMaxRows)) {
      copy4_async(shared_address(to.pairs + n), args.row_to_pair + tile.first_row + n);
    }
  }
  // Where the rows of tile i lie, for all warps.
  __device__ __forceinline__ void find_rows(i32 i) const {
    const i32 n = threadIdx.x;
    if (i >= run.count || n >= kMaxRows) return;
    const RowSpan span = span_of(i);
    u64 address = 0;
    if (n >= span.begin && n < span.end) {
      const TileLists& tile = lists_of(i);
      i64 row = tile.record.head.first_row + n;
      if (args.y_by != kByRow) row = tile.pairs[n];
      if (args.y_by == kByToken && args.top_k > 1) row = args.rows().token(row);
      const i64 first = row * args.ldy + args.slices.y_column[at.slice];
      address = reinterpret_cast<u64>(args.y) + first * sizeof(T);
    }
    rows_of(i)[n] = address;
  }

  // h of tile i, every split. Of ranks beyond the adapter's own, which were never written, zeros.
  __device__ __forceinline__ void copy_hidden(i32 i) const {
    if (i >= run.count) return;
    const RowSpan span = span_of(i);
    const i64 pitch = static_cast<i64>(args.num_slices) * args.rank_pitch;
    const i32 piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces, own_rank = rank_of(i);
    const float* from = args.h + (lists_of(i).record.head.first_row + row0) * pitch +
                        static_cast<i64>(at.slice) * args.rank_pitch + piece * 4;
    const int bytes = piece * 4 < own_rank ? kPieceBytes : 0;
    u32 to = at.hidden + threadIdx.x * kPieceBytes;
    for (i32 s = 0; s < args.splits; ++s) {
      const float* row = from;
      for (i32 n = row0, place = 0; n < span.end;
           n += kTurnRows, place += kThreads * kPieceBytes, row += kTurnRows * pitch) {
        copy16_async(to + place, row, bytes);
      }
      from += args.split_stride;
      to += args.tile_rows * kHiddenRow;
    }
  }
  __device__ __forceinline__ float4 hidden_at(u32 from, i32 split) const {
    const uint4 v = load16_shared(from + split * args.tile_rows * kHiddenRow);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
  }
  // The sum of the splits (split_sum.cuh); the host asks for 1, 2 or 4 of them.
  __device__ __forceinline__ float4 hidden_sum(u32 from) const {
    float4 sum = hidden_at(from, 0);
    if (args.splits > 1) sum = add_parts(sum, hidden_at(from, 1));
    if (args.splits > 2) sum = add_parts(sum, add_parts(hidden_at(from, 2), hidden_at(from, 3)));
    return sum;
  }
  // Where four ranks of a row have their terms, hi before lo: rows of different parity use
  // different halves of the banks in a load of 8 lanes.
  __device__ __forceinline__ u32 terms_at(i32 row, i32 piece) const {
    return at.terms + row * kHiddenRow + ((piece ^ (KS > 1 ? (row & 1) << 2 : 0)) * kPieceBytes);
  }
  // The terms of tile i, each lane of what it has copied.
  __device__ __forceinline__ void make_terms(i32 i) const {
    const i32 end = span_of(i).end, piece = threadIdx.x % kPieces, own_rank = rank_of(i);
    u32 from = at.hidden + threadIdx.x * kPieceBytes;
    for (i32 first = 0; first < end; first += kTurnRows, from += kThreads * kPieceBytes) {
      const i32 row = first + threadIdx.x / kPieces;
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if (row < end) v = own_ranks(hidden_sum(from), piece * 4, own_rank);
      i32 exponent = 0;
      if (IsFp16<T>::value) {
        float row_max = max_abs(v);
#pragma unroll
        for (int lane = 1; lane < kPieces; lane *= 2) {
          row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, lane));
        }
        exponent = fp16_exponent(row_max);
        if (piece == 0 && row < args.tile_rows) at.exponents[row] = exponent;
      }
      const Terms made = split_terms<T>(v, power_of_two(exponent));
      if (row < args.tile_rows) {
        store16_shared(terms_at(row, piece),
                       make_uint4(made.hi.x, made.hi.y, made.lo.x, made.lo.y));
      }
    }
  }

  __device__ __forceinline__ u32 y_place(i32 group, int j) const {
    return at.y_slots + group % kAhead * kYSlot + j * (kWarp * kPieceBytes);
  }
  // The addresses of the rows of tokens 2t and 2t + 1 of a group.
  __device__ __forceinline__ void row_addresses(u64 (&row)[2], i32 i, i32 group) const {
    const u64* from = rows_of(i) + group * kGroupRows + 2 * (threadIdx.x & 3);
    const uint4 v = load16_shared(shared_address(from));
    row[0] = v.x | static_cast<u64>(v.y) << 32;
    row[1] = v.z | static_cast<u64>(v.w) << 32;
  }
  // This lane's pieces of a group of tile i; what cannot be had in pieces is left.
  __device__ __forceinline__ void copy_y(i32 i, i32 group) const {
    u64 row[2];
    row_addresses(row, i, group);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u8* from = reinterpret_cast<const u8*>(row[j]) + at.column_offset;
      copy16_async_if(y_place(group, j), from, row[j] != 0 && in_pieces(), policy);
    }
  }

  __device__ __forceinline__ const u8* b_of(i32 i) const {
    const TileLists& tile = lists_of(i);
    return b_base(tile.entry, tile.record.head, args.start_expert);
  }
  // B for tile i, if it is not the one that is here.
  __device__ __forceinline__ void load_b(i32 i) {
    const u8* const wanted = b_of(i);
    const i32 own_rank = rank_of(i);
    if ((wanted == b && own_rank == rank) || own_rank == 0) return;
    b = wanted;
    rank = own_rank;
    const i32 t = threadIdx.x & 3;
    const bool vector = rank % 4 == 0 && reinterpret_cast<u64>(b) % 8 == 0;
    const u8* from = b + (static_cast<i64>(at.column) * rank + 4 * t) * 2;
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      weights[k].load(from + k * kRankStep * 2, static_cast<i64>(rank) * 2, at.columns,
                      rank - k * kRankStep - 4 * t, vector, unknown_zero());
    }
  }
  // Brings this warp's B for tile i into the L2.
  __device__ __forceinline__ void prefetch_b(i32 i) const {
    const u8* const wanted = b_of(i);
    const i32 own_rank = rank_of(i), lane = threadIdx.x % kWarp;
    if (wanted == b || own_rank == 0) return;
    const i64 first = at.column - 8 * (lane >> 2);
    const i32 bytes = min_int(kBlockColumns, warp_columns()) * own_rank * 2;
    for (i32 byte = lane * kLineBytes; byte < bytes; byte += kWarp * kLineBytes) {
      prefetch_line(wanted + first * own_rank * 2 + byte);
    }
  }

  // One step of ranks: first the hi terms of h, then the lo ones.
  __device__ __forceinline__ void multiply(float (&acc)[1][kMTiles][4], const uint4& h,
                                           int k) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) mma_16816<T>(acc[0][m], weights[k].quad[m], h.x, h.y);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) mma_16816<T>(acc[0][m], weights[k].quad[m], h.z, h.w);
  }
  // The products of a group of rows of tile i, and its y. What is in shared memory is asked for
  // ahead of the products.
  __device__ __forceinline__ void add_delta(i32 i, i32 group, i32 rank_steps,
                                            float adapter_scale) const {
    const i32 g = threadIdx.x % kWarp >> 2, t = threadIdx.x & 3, row0 = group * kGroupRows;
    uint4 h[KS], before[2];
#pragma unroll
    for (int k = 0; k < KS; ++k) h[k] = load16_shared(terms_at(row0 + g, k * 4 + t));
    u64 row[2];
    row_addresses(row, i, group);
#pragma unroll
    for (int j = 0; j < 2; ++j) before[j] = load16_shared(y_place(group, j));
    float acc[1][kMTiles][4] = {};
    if (rank_steps == KS) {
#pragma unroll
      for (int k = 0; k < KS; ++k) multiply(acc, h[k], k);
    } else {
#pragma unroll
      for (int k = 0; k < KS - 1; ++k) {
        if (k < rank_steps) multiply(acc, h[k], k);
      }
    }
    float scale[2] = {adapter_scale, adapter_scale};
    if (IsFp16<T>::value) {
      const i32* exponent = at.exponents + row0 + 2 * t;
      scale[0] *= power_of_two(-exponent[0]);
      scale[1] *= power_of_two(-exponent[1]);
    }
    if (in_pieces()) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 sum = added<T>(before[j], acc[0], j, scale[j]);
        u8* const to = reinterpret_cast<u8*>(row[j]) + at.column_offset;
        if (row[j] != 0) store16_streaming(to, sum);
      }
    } else {
      const i32 stride = args.slices.y_stride[at.slice];
      T* const rows[2] = {reinterpret_cast<T*>(row[0]), reinterpret_cast<T*>(row[1])};
      add_elements<T, 1>(rows, static_cast<i64>(at.column) * stride, stride, at.columns, acc,
                         scale);
    }
  }

  // Lists and y of the first tiles, and h of the first.
  __device__ __forceinline__ void begin() {
    for (i32 i = 0; i < kLists - 1; ++i) copy_record(i);
    commit_async();
    wait_async<0>();
    __syncthreads();
    copy_lists(0);
    copy_lists(1);
    commit_async();
    wait_async<0>();
    __syncthreads();
    find_rows(0);
    __syncthreads();
    for (i32 group = 0; group < kAhead; ++group) copy_y(0, group);
    commit_async();
    load_b(0);
    wait_for_predecessor();
    release_successor();
    copy_hidden(0);
    commit_async();
    for (int i = 0; i < kAhead - 1; ++i) commit_async();
  }

  // In each step a group of copies: of what is wanted kAhead steps on, and in a tile's first step
  // what its successors take.
  __device__ __forceinline__ void go() {
    if (run.count == 0) {
      wait_for_predecessor();
      release_successor();
      return;
    }
    begin();
    const bool idle = warp_columns() <= 0;
    const i32 all = steps();
    for (i32 i = 0; i < run.count; ++i) {
      load_b(i);
      wait_async<kAhead - 1>();
      __syncthreads();  // no warp reads the terms, or the rows, of the tile before
      make_terms(i);
      find_rows(i + 1);
      __syncthreads();  // the terms and rows, and the lists that others copied
      copy_record(i + kLists - 1);
      copy_lists(i + 2);
      copy_hidden(i + 1);
      if (i + 1 < run.count) prefetch_b(i + 1);
      const RowSpan span = span_of(i);
      const float scale = lists_of(i).entry.scale;
      const i32 rank_steps = ceil_div(rank_of(i), kRankStep);
      const i32 first = span.begin / kGroupRows, end = ceil_div(span.end, kGroupRows);
#pragma unroll 1
      for (i32 group = 0; group < all; ++group) {
        wait_async<kAhead - 1>();
        if (group >= first && group < end && !idle) add_delta(i, group, rank_steps, scale);
        const i32 ahead = group + kAhead;
        if (ahead < all) {
          copy_y(i, ahead);
        } else if (i + 1 < run.count) {
          copy_y(i + 1, ahead - all);
        }
        commit_async();
      }
    }
    wait_async<0>();
  }
};

}  // namespace

template <typename T, int KS>
__global__ void __launch_bounds__(kThreads, 3) lora_expand_panel(ExpandArgs args) {
  using Own = Panel<T, KS>;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ TileLists lists[kLists];
  __shared__ RowAddresses rows[2];
  __shared__ i32 exponents[kMaxRows];
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const SliceColumns& slices = args.slices;
  const u32 panels = slices.first_block[args.num_slices];
  const u32 part = blockIdx.x / panels;
  const i32 panel = blockIdx.x - part * panels;
  const i32 slice = slice_of_block(slices, panel);
  const i32 column =
      ((panel - slices.first_block[slice]) * kWarps + warp) * kBlockColumns + 8 * (lane >> 2);
  const u32 hidden = shared_address(memory);
  const u32 terms = hidden + args.splits * args.tile_rows * Own::kHiddenRow;
  const u32 y_slots = terms + args.tile_rows * Own::kHiddenRow;
  const Place place{lists,
                    rows,
                    exponents,
                    hidden,
                    terms,
                    y_slots + warp * kAhead * Own::kYSlot + lane * kPieceBytes,
                    slice,
                    column,
                    slices.out_features[slice] - column,
                    static_cast<u32>(column) * static_cast<u32>(sizeof(T))};
  Own own{args, Run(args, part), place, evict_first_policy()};
  own.go();
}
