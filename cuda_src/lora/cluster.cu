// Segmented LoRA delta of small batches in one node: y[row] += scale · (x Aᵀ) Bᵀ, a cluster of CTAs
// an item (items.cuh). Built for latency: everything a CTA needs is requested at once.
//
// In: x, tile records, slot entries. Out: y of the tiles' rows; no other byte of y is written.
//
// CTA c of C takes the c-th share of the K ranges: A and x go from global memory straight to
// registers, B comes meanwhile as one bulk copy, y into registers. The CTA's sum of h is stored
// into the shared memory of all C CTAs; each adds the C sums as the top of the K tree
// (k_order.cuh) and expands its own columns. Weights are fetched before the kernel ahead has ended.
//
// Shared memory between CTAs: the buffers for incoming sums alternate from item to item, which is
// enough: a CTA sends sums of item i + 2 only after it received those of item i + 1 from every CTA,
// and each of those sent them after its own reads of item i's. Nobody leaves before all sums for it
// have come, so no CTA stores into one that has ended.
#include "lora/hidden.cuh"
#include "lora/items.cuh"
#include "lora/slow_path.cuh"
#include "lora/tuning.cuh"
#include "ptx/async.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTokens = 8;

// MT: rank tiles that an adapter may have; STAGES: chunks that a warp has in flight.
template <int MT, int STAGES>
struct ClusterShape {
  static constexpr int kStages = STAGES;
  // Of a warp at a time; y of the first ones is fetched early.
  static constexpr int kColumnTiles = MT * STAGES == 2 ? 2 : 4;
  static constexpr int kRanks = MT * kRankTile;
  // Floats from token to token: a warp's accumulators fall into different banks.
  static constexpr int kPitch = kRanks + 4;
  static constexpr int kBlock = kTokens * kPitch;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr int kBlocksPerSm = 1;  // its shared memory holds no second one
#else
  static constexpr int kBlocksPerSm = MT == 1 && STAGES <= 2 ? 2 : 1;
#endif
};

// One chunk of this lane's operands.
template <int MT>
struct ChunkStage {
  uint4 a[2][MT][2];
  uint4 x[2];
};

// Fills a stage's A operands from `load(row, piece of the chunk)`.
template <int MT, typename Load>
__device__ __forceinline__ void each_a_piece(ChunkStage<MT>& s, const Load& load) {
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        s.a[u][mt][half] = load(mt * kRankTile + half * 8 + g, u * 4 + t);
      }
    }
  }
}

// Walks the chunks that a warp adds: cells (range, chain) w, w + 8, ... of the CTA's share, in each
// cell every fourth chunk of the range. A cell takes as many steps as the longest chain has chunks.
struct ChunkCursor {
  KOrder order;
  i32 first_range;
  i32 steps;
  i32 cell;
  i32 step;

  // -1 where the cell's chain is shorter.
  __device__ __forceinline__ i32 chunk() const {
    const i32 range = first_range + cell / kChains;
    const i32 found = order.first(range) + cell % kChains + step * kChains;
    return found < order.first(range + 1) ? found : -1;
  }
  __device__ __forceinline__ bool ends_cell() const { return step == steps - 1; }
  __device__ __forceinline__ void advance() {
    if (++step == steps) {
      step = 0;
      cell += kWarps;
    }
  }
};

__device__ __forceinline__ float4 float4_at(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

#if __CUDA_ARCH__ >= 900

// One thread's view of its CTA. Lane (g, t) has A's rows g and g + 8 of every rank tile, x of token
// g, and of y the column pairs 2g of a column tile at tokens 2t and 2t + 1.
template <typename T, int MT, int STAGES>
struct ClusterCta {
  using Shape = ClusterShape<MT, STAGES>;
  static constexpr int kPitch = Shape::kPitch, kColumnTiles = Shape::kColumnTiles;

  const DeltaArgs& args;
  const KOrder order;
  float* const cells;  // [cell][token][rank]
  float* const sums;   // incoming, of two items: [2][size][token][rank]
  const u32 b_shared;
  const u32 b_full, pushed;  // barriers; two of the latter
  const i32 size, rank_in, warp, lane, g, t;
  const i32 own_ranges;
  i32 round;     // items taken so far
  i32 b_rounds;  // of them, with a bulk copy of B

  // The item.
  i32 rank, rank_tiles, rows, slice;
  float adapter_scale;
  ColumnShare columns;
  AView a;
  const u8* x_row;  // of token g, null beyond the tile
  u8* y_row[2];     // of tokens 2t and 2t + 1, at the CTA's first column
  bool b_bulk;
  bool whole;  // y goes in column pairs and B in groups of 4 ranks

  __device__ __forceinline__ ChunkCursor first_chunk() const {
    return ChunkCursor{order, rank_in * own_ranges, ceil_div(order.length, kChains), warp, 0};
  }
  __device__ __forceinline__ i32 cell_count() const { return own_ranges * kChains; }

  // Reads what the lists say of an item and asks for its B; false where there is nothing to add.
  __device__ __forceinline__ bool begin(i32 at) {
    const Item item = item_at(args, at);
    const TileRecord* record = args.tiles + item.tile;
    const Tile tile = record->head;
    const i32 x_pair = record->pairs[g];
    const int2 y_pairs = *reinterpret_cast<const int2*>(&record->pairs[2 * t]);
    const SlotEntry entry =
        load_entry(args.entries, item.slice, tile.slot, args.max_loras, args.status);
    rank = safe_rank(entry, args.max_rank, args.status);
    if (rank == 0) return false;  // for the whole cluster: it reads the same entry
    rank_tiles = ceil_div(rank, kRankTile);
    rows = min_int(tile.rows, kTokens);
    slice = item.slice;
    adapter_scale = entry.scale;
    columns = ColumnShare(args, item, rank_in, size);
    a = a_view(entry, tile, args.start_expert, rank, args.in_features);
    request_b(b_base(entry, tile, args.start_expert) + static_cast<i64>(columns.first) * rank * 2);

    x_row = g < rows
                ? args.x + 2 * args.ldx * row_index(args, tile.first_row + g, x_pair, args.x_by)
                : nullptr;
    const i64 first =
        args.slices.y_column[slice] + static_cast<i64>(columns.first) * args.slices.y_stride[slice];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const i32 row = tile.first_row + 2 * t + j, pair = j == 0 ? y_pairs.x : y_pairs.y;
      y_row[j] = args.y + 2 * (args.ldy * row_index(args, row, pair, args.y_by) + first);
    }
    whole = args.y_access != kYElement && columns.count % 2 == 0 && rank % 4 == 0;
    return true;
  }

  // B of the CTA's columns: one bulk copy, or element by element where that cannot be.
  __device__ __forceinline__ void request_b(const u8* b) {
    // Of the item before, the cells and B have been read.
    if (round > 0) __syncthreads();
    const u32 bytes = static_cast<u32>(columns.count) * rank * 2;
    b_bulk = bytes > 0 && bytes % 16 == 0 && reinterpret_cast<u64>(b) % 16 == 0;
    if (!b_bulk) {
      for (u32 i = threadIdx.x; i < bytes / 2; i += kThreads) {
        store2_shared(b_shared + 2 * i, reinterpret_cast<const u16*>(b)[i]);
      }
    } else if (threadIdx.x == 0) {
      if (round > 0) fence_async_proxy();
      mbarrier_expect(b_full, bytes);
      bulk_load(b_shared, b, bytes, b_full);
    }
  }

  // One branch for all of a chunk's loads, so that they leave together.
  __device__ __forceinline__ void load_a(ChunkStage<MT>& s, i32 chunk) const {
    if (a.vector()) {
      each_a_piece<MT>(s, [&](i32 row, i32 index) {
        return a.load_vector(chunk < 0 ? rank : row, max_int(chunk, 0), index);
      });
    } else {
      each_a_piece<MT>(s, [&](i32 row, i32 index) {
        return a.gather(chunk < 0 ? rank : row, max_int(chunk, 0), index);
      });
    }
  }
  __device__ __forceinline__ void load_x(ChunkStage<MT>& s, i32 chunk) const {
    const u8* row = chunk < 0 ? nullptr : x_row;
    const i32 left = row == nullptr ? 0 : args.in_features - chunk * kChunk - t * 8;
    row += static_cast<i64>(chunk) * kChunkBytes + t * 16;
    if (args.x_vector) {
      s.x[0] = load16_rw_if(row, left > 0);
      s.x[1] = load16_rw_if(row + 64, left > 32);
    } else {
      s.x[0] = gather8(row, left);
      s.x[1] = gather8(row + 64, left - 32);
    }
  }
  // y of the warp's column tiles from `first_tile` on.
  __device__ __forceinline__ void load_y(u32 (&y)[kColumnTiles][2], i32 first_tile) const {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const i32 column = (first_tile + i * kWarps) * kColumnTile + 2 * g;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        y[i][j] =
            load4_rw_if(y_row[j] + 2 * column, whole && 2 * t + j < rows && column < columns.count);
      }
    }
  }

  // The warp's cells, from what is in flight in `stages` on.
  __device__ __forceinline__ void shrink(ChunkStage<MT> (&stages)[STAGES]) const {
    ChunkCursor now = first_chunk(), ahead = now;
#pragma unroll
    for (int d = 0; d < STAGES; ++d) ahead.advance();
    float acc[MT][4];
    while (now.cell < cell_count()) {
#pragma unroll
      for (int d = 0; d < STAGES; ++d, now.advance(), ahead.advance()) {
        if (now.cell >= cell_count()) break;
        if (now.step == 0) {
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[mt][e] = 0.f;
          }
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const uint4 x = stages[d].x[u];
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
            const uint4 top = stages[d].a[u][mt][0], bottom = stages[d].a[u][mt][1];
            mma_16816<T>(acc[mt], top.x, bottom.x, top.y, bottom.y, x.x, x.y);
            mma_16816<T>(acc[mt], top.z, bottom.z, top.w, bottom.w, x.z, x.w);
          }
        }
        if (ahead.cell < cell_count()) {
          load_a(stages[d], ahead.chunk());
          load_x(stages[d], ahead.chunk());
        }
        if (now.ends_cell()) store_cell(acc, now.cell);
      }
    }
  }
  __device__ __forceinline__ void store_cell(const float (&acc)[MT][4], i32 cell) const {
    float* out = cells + cell * Shape::kBlock;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out[(2 * t + (e & 1)) * kPitch + mt * kRankTile + g + (e >> 1) * 8] = acc[mt][e];
      }
    }
  }

  // The CTA's sum of four ranks of a token, from its cells.
  __device__ __forceinline__ float4 add_cells(i32 token, i32 first_rank) const {
    const float* cell = cells + token * kPitch + first_rank;
    const auto range_sum = [&](i32 range) {
      const float* p = cell + range * kChains * Shape::kBlock;
      const float4 c0 = float4_at(p), c1 = float4_at(p + Shape::kBlock);
      const float4 c2 = float4_at(p + 2 * Shape::kBlock), c3 = float4_at(p + 3 * Shape::kBlock);
      return make_float4(add_chains(c0.x, c1.x, c2.x, c3.x), add_chains(c0.y, c1.y, c2.y, c3.y),
                         add_chains(c0.z, c1.z, c2.z, c3.z), add_chains(c0.w, c1.w, c2.w, c3.w));
    };
    if (own_ranges == 1) return range_sum(0);
    if (own_ranges == 2) return tree_of<2>(range_sum);
    TreeSum<3> x, y, z, w;
    float4 sum;
#pragma unroll 1
    for (i32 i = 0; i < own_ranges / 2; ++i) {
      const float4 v = tree_of<2>(range_sum, 2 * i);
      sum = make_float4(x.add(i, v.x), y.add(i, v.y), z.add(i, v.z), w.add(i, v.w));
    }
    return sum;
  }

  // Gives the CTA's sum to all CTAs of the cluster: every group of MT warps adds the cells and
  // serves other CTAs. Returns where the sums of all have arrived.
  __device__ __forceinline__ const float* exchange() const {
    const i32 buffer = round & 1;
    float* const incoming = sums + buffer * size * Shape::kBlock;
    const u32 arrived = pushed + 8 * buffer;
    if (size > 1 && threadIdx.x == 0) {
      mbarrier_expect(arrived, static_cast<u32>(size * rows * rank_tiles * kRankTile * 4));
    }
    const i32 quad = warp % MT * kWarp + lane;
    const i32 token = quad / (4 * MT), first_rank = quad % (4 * MT) * 4;
    const bool sends = token < rows && first_rank < rank_tiles * kRankTile;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (sends) sum = add_cells(token, first_rank);
    if (round == 0) cluster_wait();  // the other CTAs' barriers are initialised
    float* const place = incoming + rank_in * Shape::kBlock + token * kPitch + first_rank;
    if (size == 1) {
      // A CTA alone is no cluster to store into.
      if (sends && warp < MT) *reinterpret_cast<float4*>(place) = sum;
      __syncthreads();
      return incoming;
    }
    if (sends) {
      for (i32 target = warp / MT; target < size; target += kWarps / MT) {
        push4(map_shared(shared_address(place), target), sum, map_shared(arrived, target));
      }
    }
    mbarrier_wait(arrived, (round >> 1) & 1);
    return incoming;
  }

  __device__ __forceinline__ void read_terms(const float* incoming, Terms (&terms)[MT],
                                             float (&scale)[2]) const {
    float4 h[MT];
#pragma unroll
    for (int s = 0; s < MT; ++s) {
      h[s] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (g < rows && s < rank_tiles) {
        const i32 k = s * kRankStep + 4 * t;
        const float* source = incoming + g * kPitch + k;
        const float4 sum =
            tree_of_cluster(size, [&](i32 cta) { return float4_at(source + cta * Shape::kBlock); });
        h[s] = own_ranks(sum, k, rank);
      }
    }
    make_terms<T>(h, adapter_scale, terms, scale);
  }

  // `y`: what load_y(y, warp) found.
  __device__ __forceinline__ void expand(const Terms (&terms)[MT], const float (&scale)[2],
                                         u32 (&y)[kColumnTiles][2]) const {
    for (i32 first_tile = warp; first_tile * kColumnTile < columns.count;
         first_tile += kWarps * kColumnTiles) {
      if (first_tile != warp) load_y(y, first_tile);
      // Everything is read before the first product. Columns beyond the last are products of their
      // own and not stored.
      Quad b[kColumnTiles][MT];
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const i32 column = (first_tile + i * kWarps) * kColumnTile + 2 * g;
#pragma unroll
        for (int s = 0; s < MT; ++s) {
          const i32 k = s * kRankStep + 4 * t;
          const bool valid = k < rank && column < columns.count;
          const u32 p = b_shared + (column * rank + k) * 2;
          b[i][s] =
              Quad(load8_shared_if(p, valid), load8_shared_if(p + 2 * rank, valid), quad_zero());
        }
      }
      float delta[kColumnTiles][4] = {};
#pragma unroll
      for (int s = 0; s < MT; ++s) {
        if (s >= rank_tiles) break;
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) multiply_hi<T>(delta[i], b[i][s], terms[s]);
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) multiply_lo<T>(delta[i], b[i][s], terms[s]);
      }
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const i32 column = (first_tile + i * kWarps) * kColumnTile + 2 * g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          store4_if(y_row[j] + 2 * column,
                    add_pair<T>(y[i][j], delta[i][j], delta[i][2 + j], scale[j]),
                    2 * t + j < rows && column < columns.count);
        }
      }
    }
  }
  __device__ __forceinline__ void expand_slowly(const Terms (&terms)[MT],
                                                const float (&scale)[2]) const {
    AnyStage<MT, 1> any;  // in memory, unlike what it is made of
#pragma unroll
    for (int i = 0; i < MT; ++i) any.terms[0][i] = terms[i];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      any.scale[0][j] = scale[j];
      any.y_row[0][j] = reinterpret_cast<u64>(y_row[j]);
    }
    any.weights = b_shared;
    any.slice = slice;
    any.rank = rank;
    any.rows = rows;
    any.c = 0;
    any.valid = columns.count;
    expand_any<T, kWarps>(args, any);
  }

  // Weights before the wait for the kernel ahead, x and y after it.
  __device__ __forceinline__ void take(i32 at) {
    if (!begin(at)) return;
    ChunkStage<MT> stages[STAGES];
    ChunkCursor ahead = first_chunk();
#pragma unroll
    for (int d = 0; d < STAGES; ++d, ahead.advance()) {
      if (ahead.cell < cell_count()) load_a(stages[d], ahead.chunk());
    }
    if (args.plan_settled && round == 0) {
      wait_for_predecessor();
      release_successor();
    }
    ahead = first_chunk();
#pragma unroll
    for (int d = 0; d < STAGES; ++d, ahead.advance()) {
      if (ahead.cell < cell_count()) load_x(stages[d], ahead.chunk());
    }
    u32 y[kColumnTiles][2];
    load_y(y, warp);
    shrink(stages);
    __syncthreads();
    const float* incoming = exchange();
    Terms terms[MT];
    float scale[2];
    read_terms(incoming, terms, scale);
    if (b_bulk) mbarrier_wait(b_full, b_rounds & 1);
    if (whole) {
      expand(terms, scale, y);
    } else {
      expand_slowly(terms, scale);
    }
    b_rounds += b_bulk ? 1 : 0;
    ++round;
  }
};

// Brings what the lists say of the cluster's first item into the L2, while the tile count is read:
// its tile's record, if there is such a tile, and the entries of as many slots as the threads
// reach, which are the last to leave it. Those that the kernel ahead may still write lie in the L2
// all the same.
__device__ __forceinline__ void prefetch_lists(const DeltaArgs& args) {
  constexpr i32 kLine = 128;
  const i32 at = threadIdx.x * kLine;
  const i32 bytes = args.num_slices * args.max_loras * static_cast<i32>(sizeof(SlotEntry));
  if (at < bytes) prefetch_line_to_stay(reinterpret_cast<const u8*>(args.entries) + at);
  if (threadIdx.x == kThreads - 1) {
    prefetch_line(args.tiles + item_at(args, static_cast<i32>(cluster_index())).tile);
  }
}

#endif

}  // namespace

template <typename T, int MT, int STAGES>
__global__ void __launch_bounds__(kThreads, ClusterShape<MT, STAGES>::kBlocksPerSm)
    lora_cluster(const __grid_constant__ DeltaArgs args) {
#if __CUDA_ARCH__ >= 900
  using Shape = ClusterShape<MT, STAGES>;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(8) u64 barriers[3];
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 size = static_cast<i32>(cluster_size()), rank_in = static_cast<i32>(cluster_rank());
  prefetch_lists(args);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) mbarrier_init(shared_address(&barriers[i]), 1);
    fence_mbarrier_init();
  }
  cluster_arrive_relaxed();

  const KOrder order(args.in_features);
  const i32 own_ranges = order.ranges / size;
  float* const cells = reinterpret_cast<float*>(shared);
  float* const sums = cells + own_ranges * kChains * Shape::kBlock;
  ClusterCta<T, MT, STAGES> cta{args,
                                order,
                                cells,
                                sums,
                                shared_address(sums + 2 * size * Shape::kBlock),
                                shared_address(&barriers[0]),
                                shared_address(&barriers[1]),
                                size,
                                rank_in,
                                warp,
                                lane,
                                lane >> 2,
                                lane & 3,
                                own_ranges,
                                0,
                                0};
  if (!args.plan_settled) {
    wait_for_predecessor();
    release_successor();
  }
  const i32 items = item_count(args);
  for (i32 at = static_cast<i32>(cluster_index()); at < items; at += args.clusters) cta.take(at);
  if (args.plan_settled && cta.round == 0) {
    // Whoever comes next relies on everything before this kernel being done when it is.
    wait_for_predecessor();
    release_successor();
  }
#endif
}
