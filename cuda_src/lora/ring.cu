// Segmented LoRA delta of batches that read many weights, in one node: y[row] += scale · (x Aᵀ) Bᵀ,
// a cluster of CTAs an item (items.cuh). Built for bandwidth: persistent CTAs, several on an SM,
// each with a ring of shared-memory stages that one warp fills with bulk copies and four warps
// consume.
//
// In: x, tile records, slot entries. Out: y of the tiles' rows; no other byte of y is written.
//
// A stage holds 8 or 16 KB of weights and the rows that go with them: chunks of packed A with that
// part of the tile's x rows, then blocks of B's columns with that part of the tile's y rows. An
// item's first stage also carries its header, so consumers read no list. CTA c of C takes the c-th
// share of the K ranges; its sum of h goes into the shared memory of all C CTAs; each adds them as
// the top of the K tree (k_order.cuh) and expands its own columns.
//
// Operands that bulk copies cannot take (alignment, row-major A) bypass the ring: the header comes
// alone, and the consumers fetch them themselves, into the same places of the same products.
//
// Shared memory between CTAs: as in cluster.cu, the buffers for incoming sums alternate.
#include "lora/hidden.cuh"
#include "lora/items.cuh"
#include "lora/slow_path.cuh"
#include "ptx/async.cuh"

namespace {

constexpr int kConsumers = 4;
constexpr int kConsumerThreads = kConsumers * kWarp;
constexpr int kThreads = kConsumerThreads + kWarp;
constexpr int kConsumerBarrier = 1;
constexpr int kMaxStages = 6;
constexpr int kRowBytes = 512;  // of a tile's row in a stage
// Bytes from row to row: the rows that a warp reads together fall into different banks.
constexpr int kRowPitch = kRowBytes + 16;

// MT: rank tiles that an adapter may have; NT: 8-row groups of a tile.
template <int MT, int NT>
struct RingShape {
  static constexpr int kRankTiles = MT;
  static constexpr int kTokens = NT * 8;
  static constexpr int kWeightBytes = MT == 4 ? 16384 : 8192;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kRowPitch;
  static constexpr int kBlocksPerSm = MT * NT == 1 ? 4 : MT * NT == 2 ? 3 : 2;
};

// How an item's rank divides the work among the warps: `ways` of them share a rank tile and take
// different chains; a stage holds `per_warp` chunks of A for each of those.
template <int MT>
struct RankShare {
  i32 tiles;  // of 16 ranks, a power of two
  i32 ways;   // 4 / tiles
  i32 per_warp;
  i32 rank_shift;     // log2 of the ranks kept in shared memory
  i32 stage_columns;  // of B per stage, a multiple of 64

  __device__ __forceinline__ explicit RankShare(i32 rank) {
    const i32 log = MT == 1 || rank <= 16 ? 0 : MT == 2 || rank <= 32 ? 1 : 2;
    tiles = 1 << log;
    ways = 4 >> log;
    per_warp = MT == 4 && log > 0 ? 2 : 1;
    rank_shift = 4 + log;
    stage_columns = (256 >> log) * per_warp;
  }
  __device__ __forceinline__ i32 ranks() const { return 1 << rank_shift; }
  __device__ __forceinline__ i32 stage_chunks() const { return ways * per_warp; }
  // Floats from token to token of the chains' sums.
  __device__ __forceinline__ i32 pitch() const { return ranks() + (MT == 1 ? 2 : 4); }
};

// The order in which a CTA takes its `count` ranges: turn ^ order. Items start at different places
// of their blocks, since equal places of many blocks would load the same few memory channels. The
// sum does not see it: flipping bits of a leaf's number swaps the two sides of nodes of the tree.
__device__ __forceinline__ i32 range_order(i32 tile, i32 slice, i32 count) {
  return (tile + 3 * slice) & (count - 1);
}

// What the consumers must know of an item.
template <int TOKENS>
struct __align__(16) Header {
  i32 rank;  // 0: there are no more items
  float scale;
  i32 rows;
  i32 tile;
  i32 slice;
  i32 first_column;  // of the slice, and how many, that this CTA expands
  i32 columns;
  i32 bulk;     // 0: bypasses the ring, 1: A, x and B go through it, 2: y too
  i32 x_chunk;  // of any stage of A: its first chunk and the bytes of a row of x
  i32 x_bytes;
  i32 unused[2];
  u64 y[TOKENS];  // where the rows' first columns lie
};

// What the lists say of the coming items, copied ahead into shared memory: a load into registers
// would hold up the copies that follow it, and a cold list costs more than a stage.
template <int TOKENS>
struct __align__(16) ListsAhead {
  TileRecord tile[3];
  SlotEntry entry[2];
  i32 pair[2][TOKENS];  // of all rows; a record has those of 8
};

// A place in the ring: producer and consumers walk it alike.
struct RingPlace {
  i32 stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance(i32 stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Addresses in this CTA's shared memory.
template <typename Shape>
struct RingShared {
  u32 stages;
  i32 stage_count;
  u32 full, empty, pushed;  // barriers: kMaxStages, kMaxStages, 2
  Header<Shape::kTokens>* headers;
  ListsAhead<Shape::kTokens>* lists;

  __device__ __forceinline__ u32 weights(i32 stage) const {
    return stages + stage * Shape::kStageBytes;
  }
  __device__ __forceinline__ u32 rows(i32 stage) const {
    return weights(stage) + Shape::kWeightBytes;
  }
};

#if __CUDA_ARCH__ >= 900

// The warp that fills the ring. Lane 0 copies weights, lane r row r of x and y.
template <typename Shape>
struct Producer {
  const DeltaArgs& args;
  const RingShared<Shape> shared;
  const KOrder order;
  const i32 size, rank_in, lane;
  const i32 items;
  bool wait;  // the kernel ahead has not been waited for yet
  RingPlace place;

  struct Work {
    i32 rank, rows;
    const u8 *a, *b;          // b at the CTA's first column
    const u8 *x_row, *y_row;  // of this lane's row, y at the CTA's first column
    i32 columns;
    i32 bulk;
  };

  __device__ __forceinline__ void wait_ahead() {
    wait_for_predecessor();
    release_successor();
    wait = false;
  }
  __device__ __forceinline__ void claim() {
    mbarrier_wait(shared.empty + 8 * place.stage, place.parity ^ 1);
  }
  // Announces what will come into the claimed stage.
  __device__ __forceinline__ u32 announce(u32 bytes) {
    const u32 full = shared.full + 8 * place.stage;
    if (lane == 0) mbarrier_expect(full, bytes);
    return full;
  }

  struct Chunks {
    i32 first, count;
  };
  // Bytes of one row in a stage's chunks.
  __device__ __forceinline__ u32 row_bytes(const Chunks& chunks) const {
    return 2u * min_int(chunks.count * kChunk, args.in_features - chunks.first * kChunk);
  }
  __device__ __forceinline__ void copy_x(const Work& work, const Chunks& chunks, u32 full) {
    if (lane < work.rows) {
      bulk_load(shared.rows(place.stage) + lane * kRowPitch,
                work.x_row + static_cast<i64>(chunks.first) * kChunkBytes, row_bytes(chunks), full);
    }
  }
  // x of `held` stages from `begin` on, whose headers say which chunks they hold: every lane takes
  // rows of other stages, since the first item's x is what all wait for.
  __device__ __forceinline__ void copy_held_x(const RingPlace& begin, i32 held, const Work& work) {
    wait_ahead();
    const u64 row_address = reinterpret_cast<u64>(work.x_row);
    for (i32 base = 0; base < held * work.rows; base += kWarp) {
      const i32 i = base + lane, n = i / work.rows, row = i - n * work.rows;
      const u64 from = __shfl_sync(kFullMask, row_address, row);
      if (n >= held) continue;
      i32 stage = begin.stage + n;
      if (stage >= shared.stage_count) stage -= shared.stage_count;
      const Header<Shape::kTokens>& header = shared.headers[stage];
      bulk_load(shared.rows(stage) + row * kRowPitch,
                reinterpret_cast<const u8*>(from) + static_cast<i64>(header.x_chunk) * kChunkBytes,
                header.x_bytes, shared.full + 8 * stage);
    }
    __syncwarp();
  }
  // Calls `visit` with every stage's chunks, in order.
  template <typename Visit>
  __device__ __forceinline__ void each_stage(i32 stage_chunks, i32 turns,
                                             const Visit& visit) const {
    const i32 own = order.ranges / size;
    for (i32 turn = 0; turn < own; ++turn) {
      const i32 r = rank_in * own + (turn ^ turns), end = order.first(r + 1);
      for (i32 c = order.first(r); c < end; c += stage_chunks) {
        visit(Chunks{c, min_int(stage_chunks, end - c)});
      }
    }
  }

  // Places an item's header in the claimed stage.
  __device__ __forceinline__ void write_header(const Header<Shape::kTokens>& common,
                                               const Work& work) {
    Header<Shape::kTokens>& header = shared.headers[place.stage];
    if (lane == 0) {
      header.rank = common.rank;
      header.scale = common.scale;
      header.rows = common.rows;
      header.tile = common.tile;
      header.slice = common.slice;
      header.first_column = common.first_column;
      header.columns = common.columns;
      header.bulk = common.bulk;
    }
    if (lane < Shape::kTokens) header.y[lane] = reinterpret_cast<u64>(work.y_row);
    __syncwarp();
  }

  // A and x. The first item's first weights are asked for before the kernel ahead has ended; its x
  // comes after that.
  __device__ __forceinline__ void shrink(const Header<Shape::kTokens>& header, const Work& work) {
    const AView a{work.a, work.rank, args.in_features, true};
    const i32 stage_chunks = RankShare<Shape::kRankTiles>(work.rank).stage_chunks();
    const RingPlace begin = place;
    i32 held = 0;
    bool first = true;
    const i32 turns = range_order(header.tile, header.slice, order.ranges / size);
    each_stage(stage_chunks, turns, [&](const Chunks& chunks) {
      if (wait && held == shared.stage_count) copy_held_x(begin, held, work);
      claim();
      if (first) write_header(header, work);
      first = false;
      const u32 bytes = row_bytes(chunks);
      if (wait) {
        if (lane == 0) {
          shared.headers[place.stage].x_chunk = chunks.first;
          shared.headers[place.stage].x_bytes = bytes;
        }
        __syncwarp();
        ++held;
      }
      const u32 full = announce(bytes * (work.rank + work.rows));
      if (lane == 0) {
        bulk_load(shared.weights(place.stage), a.base + a.chunk_offset(chunks.first),
                  bytes * work.rank, full);
      }
      if (!wait) copy_x(work, chunks, full);
      place.advance(shared.stage_count);
    });
    if (wait) copy_held_x(begin, held, work);
    // A CTA without chunks still has to say what the item is.
    if (first) header_alone(header, work);
  }

  __device__ __forceinline__ void header_alone(const Header<Shape::kTokens>& header,
                                               const Work& work) {
    claim();
    write_header(header, work);
    announce(0);
    place.advance(shared.stage_count);
  }

  __device__ __forceinline__ void expand(const Work& work) {
    const i32 step = RankShare<Shape::kRankTiles>(work.rank).stage_columns;
    const u32 y_rows = work.bulk == 2 ? work.rows : 0;
    for (i32 c = 0; c < work.columns; c += step) {
      const u32 bytes = 2u * min_int(step, work.columns - c);
      claim();
      const u32 full = announce(bytes * (work.rank + y_rows));
      if (lane == 0) {
        bulk_load(shared.weights(place.stage), work.b + static_cast<i64>(c) * work.rank * 2,
                  bytes * work.rank, full);
      }
      if (lane < y_rows) {
        bulk_load(shared.rows(place.stage) + lane * kRowPitch, work.y_row + 2 * static_cast<i64>(c),
                  bytes, full);
      }
      place.advance(shared.stage_count);
    }
  }

  // Item `n` of this cluster is number first + n · step of all; beyond them there is nothing to
  // copy.
  __device__ __forceinline__ bool exists(i32 n) const {
    return static_cast<i32>(cluster_index()) + n * args.clusters < items;
  }
  __device__ __forceinline__ Item place_of(i32 n) const {
    return item_at(args, static_cast<i32>(cluster_index()) + n * args.clusters);
  }
  __device__ __forceinline__ void copy_tile(i32 n) const {
    if (!exists(n) || lane >= static_cast<i32>(sizeof(TileRecord) / 16)) return;
    copy16_async(shared_address(&shared.lists->tile[n % 3]) + lane * 16,
                 reinterpret_cast<const u8*>(args.tiles + place_of(n).tile) + lane * 16, 16);
  }
  // The rest needs the tile to have come.
  __device__ __forceinline__ void copy_rest(i32 n) const {
    if (!exists(n)) return;
    const Tile tile = shared.lists->tile[n % 3].head;
    const bool known = static_cast<u32>(tile.slot) < static_cast<u32>(args.max_loras);
    if (lane < static_cast<i32>(sizeof(SlotEntry) / 16) && known) {
      const SlotEntry* entry =
          args.entries + static_cast<i64>(place_of(n).slice) * args.max_loras + tile.slot;
      copy16_async(shared_address(&shared.lists->entry[n % 2]) + lane * 16,
                   reinterpret_cast<const u8*>(entry) + lane * 16, 16);
    }
    if (Shape::kTokens > kTilePairs && lane < min_int(tile.rows, Shape::kTokens)) {
      copy4_async(shared_address(&shared.lists->pair[n % 2][lane]),
                  args.row_to_pair + tile.first_row + lane);
    }
  }
  __device__ __forceinline__ void wait_lists() const {
    commit_async();
    wait_async<0>();
    __syncwarp();
  }

  __device__ __forceinline__ void item(i32 n) {
    const TileRecord& record = shared.lists->tile[n % 3];
    Tile tile = record.head;
    tile.rows = min_int(tile.rows, Shape::kTokens);
    const Item item = place_of(n);
    const bool known = static_cast<u32>(tile.slot) < static_cast<u32>(args.max_loras);
    if (tile.slot >= args.max_loras) raise_status(args.status, kStatusSlotRange);
    const SlotEntry entry = known ? shared.lists->entry[n % 2] : SlotEntry{};
    const i32* pairs = Shape::kTokens > kTilePairs ? shared.lists->pair[n % 2] : record.pairs;
    const i32 pair = lane < tile.rows ? pairs[lane] : 0;
    const ColumnShare columns(args, item, rank_in, size);
    Header<Shape::kTokens> header;
    Work work;
    work.rank = safe_rank(entry, args.max_rank, args.status);
    if (work.rank == 0) return;  // for the whole cluster: it reads the same entry
    work.rows = tile.rows;
    const AView a = a_view(entry, tile, args.start_expert, work.rank, args.in_features);
    work.a = a.base;
    work.b =
        b_base(entry, tile, args.start_expert) + static_cast<i64>(columns.first) * work.rank * 2;
    work.columns = columns.count;
    const bool bulk = a.packed && a.vector() && args.x_vector &&
                      reinterpret_cast<u64>(work.b) % 16 == 0 &&
                      columns.count * (work.rank & 7) % 8 == 0;
    work.bulk = !bulk ? 0 : args.y_access == kYPiece ? 2 : 1;
    const i32 row = tile.first_row + lane;
    work.x_row = args.x + 2 * args.ldx * row_index(args, row, pair, args.x_by);
    work.y_row = args.y + 2 * (args.ldy * row_index(args, row, pair, args.y_by) +
                               args.slices.y_column[item.slice] +
                               static_cast<i64>(columns.first) * args.slices.y_stride[item.slice]);
    header.rank = work.rank;
    header.scale = entry.scale;
    header.rows = tile.rows;
    header.tile = item.tile;
    header.slice = item.slice;
    header.first_column = columns.first;
    header.columns = columns.count;
    header.bulk = work.bulk;
    if (bulk) {
      shrink(header, work);
      expand(work);
    } else {
      header_alone(header, work);
    }
  }

  __device__ __forceinline__ void run() {
    copy_tile(0);
    copy_tile(1);
    wait_lists();
    copy_rest(0);
    wait_lists();
    for (i32 n = 0; exists(n); ++n) {
      copy_rest(n + 1);
      copy_tile(n + 2);
      item(n);
      wait_lists();
    }
    claim();
    if (lane == 0) shared.headers[place.stage].rank = 0;
    announce(0);
    if (wait) wait_ahead();
  }
};

// The operands of a chunk for one warp: its rank tile's rows g and g + 8, and x of every n-tile.
template <int NT>
struct ChunkOperands {
  uint4 top[2], bottom[2];
  uint4 x[2][NT];
};

template <typename T, int NT>
__device__ __forceinline__ void multiply_chunk(float (&acc)[NT][4], const ChunkOperands<NT>& c) {
#pragma unroll
  for (int u = 0; u < 2; ++u) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      mma_16816<T>(acc[nt], c.top[u].x, c.bottom[u].x, c.top[u].y, c.bottom[u].y, c.x[u][nt].x,
                   c.x[u][nt].y);
      mma_16816<T>(acc[nt], c.top[u].z, c.bottom[u].z, c.top[u].w, c.bottom[u].w, c.x[u][nt].z,
                   c.x[u][nt].w);
    }
  }
}

// Shrink of one range of an item that bypasses the ring: chains first, first + ways, ... of it, at
// rank rows `row` and `row` + 8.
template <int MT, int NT>
struct BypassedRange {
  float acc[MT][NT][4];
  i32 tile, slice, row, first, end, ways;
};
template <typename T, int MT, int NT>
__device__ __noinline__ void bypass_chains(const DeltaArgs& args, BypassedRange<MT, NT>& range) {
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < MT; ++j) {
    float acc[NT][4] = {};
#pragma unroll 1
    for (i32 chunk = range.first + j * range.ways; chunk < range.end && j * range.ways < kChains;
         chunk += kChains) {
      ChunkOperands<NT> c;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        c.top[u] = bypass_a(args, range.tile, range.slice, range.row, chunk, u * 4 + t);
        c.bottom[u] = bypass_a(args, range.tile, range.slice, range.row + 8, chunk, u * 4 + t);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          c.x[u][nt] = bypass_x(args, range.tile, nt * 8 + g, chunk, u * 4 + t);
        }
      }
      multiply_chunk<T>(acc, c);
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) range.acc[j][nt][e] = acc[nt][e];
    }
  }
}

// One of the warps that empty the ring. Its lane (g, t) has h of rank rows g and g + 8 of a rank
// tile at tokens 2t and 2t + 1, and of y the column pairs 2g of a column tile at those tokens.
template <typename T, int MT, int NT>
struct Consumer {
  using Shape = RingShape<MT, NT>;
  static constexpr int kTokens = Shape::kTokens;

  const DeltaArgs& args;
  const RingShared<Shape>& shared;
  const KOrder order;
  float* const chain_sums;  // of two ranges
  float* const arriving;    // h of each CTA, for two items
  const i32 size, rank_in, warp, g, t;
  RingPlace place;
  i32 flip;  // which of the two buffers of chain sums

  // The item.
  i32 rank, rows, tile, slice, first_column, columns, bulk;
  float adapter_scale;
  u64 y_row[NT][2];

  __device__ __forceinline__ void wait_full() const {
    mbarrier_wait(shared.full + 8 * place.stage, place.parity);
  }
  // Every warp waits for and releases every stage, its own or not: so none is a whole round of the
  // ring ahead of or behind another, which the one bit of a barrier's parity could not tell.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(shared.empty + 8 * place.stage);
    place.advance(shared.stage_count);
  }

  // False where there is no further item.
  __device__ __forceinline__ bool read_header() {
    wait_full();
    const Header<kTokens>& header = shared.headers[place.stage];
    rank = header.rank;
    if (rank == 0) return false;
    adapter_scale = header.scale;
    rows = header.rows;
    tile = header.tile;
    slice = header.slice;
    first_column = header.first_column;
    columns = header.columns;
    bulk = header.bulk;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int j = 0; j < 2; ++j) y_row[nt][j] = header.y[nt * 8 + 2 * t + j];
    }
    return true;
  }

  __device__ __forceinline__ void load_chunk(ChunkOperands<NT>& c, i32 chunk, i32 in_stage,
                                             i32 rank_tile) const {
    const i32 row = rank_tile * kRankTile + g;
    const bool top_valid = row < rank, bottom_valid = row + 8 < rank;
    const u32 start = shared.weights(place.stage) + in_stage * kChunkBytes * rank;
    const u32 x = shared.rows(place.stage) + g * kRowPitch + in_stage * kChunkBytes + t * 16;
    const i32 width = args.in_features - chunk * kChunk;
    if (width >= kChunk) {
      // Piece 4 + t lies 64 bytes off in x, and under the swizzle at the other value of bit 6 in A.
      const u32 a = start + row * kChunkBytes + ((t ^ g) << 4);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        c.top[u] = shared16_if(a ^ (u * 64), top_valid);
        c.bottom[u] = shared16_if((a ^ (u * 64)) + 8 * kChunkBytes, bottom_valid);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          c.x[u][nt] = shared16_if(x + u * 64 + nt * 8 * kRowPitch, true);
        }
      }
      return;
    }
    // The last chunk of a K that is no multiple of 64: shorter rows, not swizzled.
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const bool in_k = (u * 4 + t) * 8 < width;
      const u32 top = start + row * 2 * width + (u * 4 + t) * 16;
      c.top[u] = shared16_if(top, in_k && top_valid);
      c.bottom[u] = shared16_if(top + 16 * width, in_k && bottom_valid);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        c.x[u][nt] = shared16_if(x + u * 64 + nt * 8 * kRowPitch, in_k);
      }
    }
  }
  // One range's sums. Where a warp has all four chains of its rank tile, `sums` are its products'
  // elements; else the chains meet in shared memory and thread `threadIdx.x` gets elements
  // threadIdx.x + 128 i of [token][rank].
  __device__ __forceinline__ void add_range(const RankShare<MT>& share,
                                            const float (&acc)[MT][NT][4], float (&sums)[NT * MT]) {
    if (MT == kChains && share.ways == 1) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[(nt * 4 + e) % (NT * MT)] =
              add_chains(acc[0][nt][e], acc[1 % MT][nt][e], acc[2 % MT][nt][e], acc[3 % MT][nt][e]);
        }
      }
      return;
    }
    const i32 rank_tile = warp / share.ways, first_chain = warp % share.ways;
    const i32 pitch = share.pitch(), block = kTokens * pitch;
    float* const buffer = chain_sums + flip * args.chain_floats;
    flip ^= 1;
#pragma unroll
    for (int j = 0; j < MT; ++j) {
      if (j * share.ways >= kChains) continue;
      float* p = buffer + (first_chain + j * share.ways) * block + rank_tile * kRankTile + g +
                 2 * t * pitch;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) p[(nt * 8 + (e & 1)) * pitch + (e >> 1) * 8] = acc[j][nt][e];
      }
    }
    // One barrier a range: who writes this buffer again, two ranges on, has passed the barrier in
    // between, which all reach after reading here.
    barrier_of(kConsumerBarrier, kConsumerThreads);
#pragma unroll
    for (int i = 0; i < NT * MT; ++i) {
      const i32 e = threadIdx.x + i * kConsumerThreads, token = e >> share.rank_shift;
      if (token >= rows) break;
      const float* p = buffer + token * pitch + (e & (share.ranks() - 1));
      sums[i] = add_chains(p[0], p[block], p[2 * block], p[3 * block]);
    }
  }

  __device__ __forceinline__ void shrink(const RankShare<MT>& share, float (&own)[NT * MT]) {
    const i32 rank_tile = warp / share.ways, first_chain = warp % share.ways;
    const i32 ranges = order.ranges / size, first_range = rank_in * ranges;
    // A header alone: of an item that bypasses the ring, or of a CTA whose ranges are empty.
    if (bulk == 0 || order.first(first_range) >= order.chunks) release();
    const i32 turns = range_order(tile, slice, ranges);
    TreeSum<> tree[NT * MT];
    for (i32 turn = 0; turn < ranges; ++turn) {
      const i32 r = first_range + (turn ^ turns);
      const i32 begin = order.first(r), end = order.first(r + 1);
      // Chains first_chain + j · ways.
      float acc[MT][NT][4] = {};
      if (bulk == 0) {
        bypass_range(share, begin, end, acc);
      } else {
        for (i32 base = begin; base < end; base += kChains) {
#pragma unroll
          for (int j = 0; j < MT; ++j) {
            const i32 stage_chunk = base + j * share.ways, chunk = stage_chunk + first_chain;
            if (j * share.ways >= kChains || stage_chunk >= end) break;
            const i32 in_stage = MT == 4 ? j & (share.per_warp - 1) : 0;
            if (in_stage == 0) wait_full();
            if (chunk < end) {
              ChunkOperands<NT> c;
              load_chunk(c, chunk, in_stage * share.ways + first_chain, rank_tile);
              multiply_chunk<T>(acc[j], c);
            }
            const bool last = (j + 1) * share.ways >= kChains || stage_chunk + share.ways >= end;
            if (in_stage == share.per_warp - 1 || last) release();
          }
        }
      }
      float sums[NT * MT] = {};
      add_range(share, acc, sums);
#pragma unroll
      for (int i = 0; i < NT * MT; ++i) own[i] = tree[i].add(turn, sums[i]);
    }
  }

  __device__ __forceinline__ void bypass_range(const RankShare<MT>& share, i32 begin, i32 end,
                                               float (&acc)[MT][NT][4]) const {
    BypassedRange<MT, NT> range;  // in memory, unlike `acc`
    range.tile = tile;
    range.slice = slice;
    range.row = warp / share.ways * kRankTile + g;
    range.first = begin + warp % share.ways;
    range.end = end;
    range.ways = share.ways;
    bypass_chains<T>(args, range);
#pragma unroll
    for (int j = 0; j < MT; ++j) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[j][nt][e] = range.acc[j][nt][e];
      }
    }
  }

  // Gives the CTA's sums to all CTAs of the cluster. Returns where those of all are:
  // [CTA][token][rank].
  __device__ __forceinline__ const float* exchange(const RankShare<MT>& share,
                                                   const float (&own)[NT * MT], i32 round) {
    const i32 ranks = share.ranks(), source_floats = kTokens * ranks;
    float* const incoming = arriving + (round & 1) * size * kTokens * args.sum_ranks;
    const u32 arrived = shared.pushed + 8 * (round & 1);
    if (size > 1 && threadIdx.x == 0) {
      mbarrier_expect(arrived, static_cast<u32>(size * rows * ranks * 4));
    }
#pragma unroll
    for (int i = 0; i < NT * MT; ++i) {
      // Where add_range left the element.
      i32 e = threadIdx.x + i * kConsumerThreads;
      if (MT == kChains && share.ways == 1) {
        const i32 token = i / 4 * 8 + 2 * t + (i & 1);
        e = token * ranks + warp * kRankTile + g + (i >> 1 & 1) * 8;
      }
      if (e >> share.rank_shift >= rows) continue;
      if (size == 1) {
        incoming[e] = own[i];
      } else {
        const u32 to = shared_address(incoming + rank_in * source_floats + e);
        for (i32 c = 0; c < size; ++c) push1(map_shared(to, c), own[i], map_shared(arrived, c));
      }
    }
    if (size == 1) {
      barrier_of(kConsumerBarrier, kConsumerThreads);
    } else {
      mbarrier_wait(arrived, (round >> 1) & 1);
    }
    return incoming;
  }

  __device__ __forceinline__ void read_terms(const RankShare<MT>& share, const float* incoming,
                                             Terms (&terms)[NT][MT], float (&scale)[NT][2]) const {
    const i32 ranks = share.ranks(), source_floats = kTokens * ranks;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float4 h[MT];
#pragma unroll
      for (int s = 0; s < MT; ++s) {
        h[s] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (nt * 8 + g < rows && s < share.tiles) {
          const i32 k = s * kRankStep + 4 * t;
          const float* source = incoming + (nt * 8 + g) * ranks + k;
          const float4 sum = tree_of_cluster(size, [&](i32 cta) {
            return *reinterpret_cast<const float4*>(source + cta * source_floats);
          });
          h[s] = own_ranks(sum, k, rank);
        }
      }
      make_terms<T>(h, adapter_scale, terms[nt], scale[nt]);
    }
  }

  // This warp's column tiles of a stage that holds B and y, for an adapter of up to 16 RT ranks, a
  // multiple of 4: everything is read before the first product.
  template <int RT>
  __device__ __forceinline__ void expand_stage(i32 c, i32 valid, const Terms (&terms)[NT][MT],
                                               const float (&scale)[NT][2]) const {
    constexpr int kTiles = kConsumers / RT * (MT == 4 && RT > 1 ? 2 : 1);
    uint2 top[kTiles][RT], bottom[kTiles][RT];
    u32 before[kTiles][NT][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const i32 column = (warp + i * kConsumers) * kColumnTile + 2 * g;
      const u32 b = shared.weights(place.stage) + (column * rank + 4 * t) * 2;
      const u32 y = shared.rows(place.stage) + 2 * t * kRowPitch + 2 * column;
#pragma unroll
      for (int s = 0; s < RT; ++s) {
        const bool in_rank = s * kRankStep + 4 * t < rank;
        top[i][s] = shared8_if(b + s * kRankStep * 2, in_rank);
        bottom[i][s] = shared8_if(b + s * kRankStep * 2 + 2 * rank, in_rank);
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) before[i][nt][j] = shared4(y + (nt * 8 + j) * kRowPitch);
      }
    }
    float delta[kTiles][NT][4] = {};
#pragma unroll
    for (int s = 0; s < RT; ++s) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          multiply_hi<T>(delta[i][nt], top[i][s], bottom[i][s], terms[nt][s]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          multiply_lo<T>(delta[i][nt], top[i][s], bottom[i][s], terms[nt][s]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      // Columns beyond the valid ones are products of their own and not stored.
      const i32 column = (warp + i * kConsumers) * kColumnTile + 2 * g;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          store4_if(
              reinterpret_cast<u8*>(y_row[nt][j]) + 2 * (c + column),
              add_pair<T>(before[i][nt][j], delta[i][nt][j], delta[i][nt][2 + j], scale[nt][j]),
              nt * 8 + 2 * t + j < rows && column < valid);
        }
      }
    }
  }

  __device__ __forceinline__ void expand(const RankShare<MT>& share, const Terms (&terms)[NT][MT],
                                         const float (&scale)[NT][2]) {
    const bool whole = bulk == 2 && rank % 4 == 0;
    for (i32 c = 0; c < columns; c += share.stage_columns) {
      const i32 valid = min_int(share.stage_columns, columns - c);
      if (bulk != 0) wait_full();
      if (!whole) {
        AnyStage<MT, NT> any;  // in memory, unlike what it is made of
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
          for (int i = 0; i < MT; ++i) any.terms[nt][i] = terms[nt][i];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            any.scale[nt][j] = scale[nt][j];
            any.y_row[nt][j] = y_row[nt][j];
          }
        }
        any.weights = bulk != 0 ? shared.weights(place.stage) : 0;
        any.tile = tile;
        any.slice = slice;
        any.rank = rank;
        any.rows = rows;
        any.first_column = first_column;
        any.c = c;
        any.valid = valid;
        expand_any<T, kConsumers>(args, any);
      } else if (share.tiles == 1) {
        expand_stage<1>(c, valid, terms, scale);
      } else if (share.tiles == 2) {
        expand_stage < MT<2 ? MT : 2>(c, valid, terms, scale);
      } else {
        expand_stage<MT>(c, valid, terms, scale);
      }
      if (bulk != 0) release();
    }
  }

  __device__ __forceinline__ void run() {
    for (i32 round = 0; read_header(); ++round) {
      const RankShare<MT> share(rank);
      float own[NT * MT] = {};
      shrink(share, own);
      const float* incoming = exchange(share, own, round);
      Terms terms[NT][MT];
      float scale[NT][2];
      read_terms(share, incoming, terms, scale);
      expand(share, terms, scale);
    }
  }
};

#endif

}  // namespace

template <typename T, int MT, int NT>
__global__ void __launch_bounds__(kThreads, RingShape<MT, NT>::kBlocksPerSm)
    lora_ring(const __grid_constant__ DeltaArgs args) {
#if __CUDA_ARCH__ >= 900
  using Shape = RingShape<MT, NT>;
  constexpr int kTokens = Shape::kTokens;
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ __align__(8) u64 barriers[2 * kMaxStages + 2];
  // Behind the stages: headers, lists ahead, the chains' sums of two ranges, the incoming sums of
  // two items.
  u8* const behind = dynamic + args.stages * Shape::kStageBytes;
  const RingShared<Shape> shared{
      shared_address(dynamic),
      args.stages,
      shared_address(barriers),
      shared_address(barriers + kMaxStages),
      shared_address(barriers + 2 * kMaxStages),
      reinterpret_cast<Header<kTokens>*>(behind),
      reinterpret_cast<ListsAhead<kTokens>*>(behind + args.stages * sizeof(Header<kTokens>))};
  float* const chain_sums = reinterpret_cast<float*>(shared.lists + 1);
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 size = static_cast<i32>(cluster_size()), rank_in = static_cast<i32>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int s = 0; s < kMaxStages; ++s) {
      mbarrier_init(shared.full + 8 * s, 1);
      mbarrier_init(shared.empty + 8 * s, kConsumers);
    }
    mbarrier_init(shared.pushed, 1);
    mbarrier_init(shared.pushed + 8, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_arrive_relaxed();
  const bool early = args.plan_settled && warp == kConsumers;
  if (!early) {
    wait_for_predecessor();
    release_successor();
  }
  const KOrder order(args.in_features);
  if (warp == kConsumers) {
    Producer<Shape> producer{args, shared,           order, size,       rank_in,
                             lane, item_count(args), early, RingPlace()};
    producer.run();
  } else {
    cluster_wait();  // the other CTAs' barriers are initialised
    Consumer<T, MT, NT> consumer{
        args,        shared,  order, chain_sums, chain_sums + 2 * args.chain_floats,
        size,        rank_in, warp,  lane >> 2,  lane & 3,
        RingPlace(), 0};
    consumer.run();
  }
#endif
}
