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
  static constexpr int kBlocksPerSm = MT == 1 ? 2 : 1;
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

}  // namespace

template <typename T, int MT, int STAGES>
__global__ void __launch_bounds__(kThreads, ClusterShape<MT, STAGES>::kBlocksPerSm)
    lora_cluster(const __grid_constant__ DeltaArgs args) {
#if __CUDA_ARCH__ >= 900
  using Shape = ClusterShape<MT, STAGES>;
  constexpr int kPitch = Shape::kPitch, kColumnTiles = Shape::kColumnTiles;
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(8) u64 barriers[3];
  const u32 b_full = shared_address(&barriers[0]);
  const u32 pushed = shared_address(&barriers[1]);  // two of them
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const i32 size = static_cast<i32>(cluster_size()), rank_in = static_cast<i32>(cluster_rank());
  if (threadIdx.x == 0) {
    mbarrier_init(b_full, 1);
    mbarrier_init(pushed, 1);
    mbarrier_init(pushed + 8, 1);
    fence_mbarrier_init();
  }
  cluster_arrive_relaxed();

  const KOrder order(args.in_features);
  const i32 own_ranges = order.ranges / size;
  const i32 cell_count = own_ranges * kChains;
  const ChunkCursor start{order, rank_in * own_ranges, ceil_div(order.length, kChains), warp, 0};
  float* const cells = reinterpret_cast<float*>(shared);
  float* const sums = cells + cell_count * Shape::kBlock;  // [2][size] blocks
  u8* const b_shared = reinterpret_cast<u8*>(sums + 2 * size * Shape::kBlock);
  const u32 b_start = shared_address(b_shared);

  if (!args.plan_settled) {
    wait_for_predecessor();
    release_successor();
  }
  const i32 items = item_count(args);
  i32 round = 0;     // items taken so far
  i32 b_rounds = 0;  // of them, with a bulk copy of B
  for (i32 at = static_cast<i32>(cluster_index()); at < items; at += args.clusters) {
    const Item item = item_at(args, at);
    const TileRecord* record = args.tiles + item.tile;
    const Tile tile = record->head;
    const i32 x_pair = record->pairs[g];
    const int2 y_pairs = *reinterpret_cast<const int2*>(&record->pairs[2 * t]);
    const SlotEntry entry =
        load_entry(args.entries, item.slice, tile.slot, args.max_loras, args.status);
    const i32 rank = safe_rank(entry, args.max_rank, args.status);
    if (rank == 0) continue;  // of the whole cluster: it reads the same entry
    const i32 rank_tiles = ceil_div(rank, kRankTile);
    const ColumnShare columns(args, item, rank_in, size);

    if (round > 0) {
      __syncthreads();  // of the item before: its cells and its B have been read
    }
    const u8* b =
        b_base(entry, tile, args.start_expert) + static_cast<i64>(columns.first) * rank * 2;
    const u32 b_bytes = static_cast<u32>(columns.count) * rank * 2;
    const bool b_bulk = b_bytes > 0 && b_bytes % 16 == 0 && reinterpret_cast<u64>(b) % 16 == 0;
    if (b_bulk) {
      if (threadIdx.x == 0) {
        if (round > 0) fence_async_proxy();
        mbarrier_expect(b_full, b_bytes);
        bulk_load(b_start, b, b_bytes, b_full);
      }
    } else {
      for (u32 i = threadIdx.x; i < b_bytes / 2; i += kThreads) {
        reinterpret_cast<u16*>(b_shared)[i] = reinterpret_cast<const u16*>(b)[i];
      }
    }

    const AView a = a_view(entry, tile, args.start_expert, rank, args.in_features);
    const bool a_vector = a.vector();
    ChunkStage<MT> stages[Shape::kStages];
    // One branch for all of a chunk's loads, so that they leave together.
    const auto load_a = [&](ChunkStage<MT>& s, i32 chunk) {
      if (a_vector) {
        each_a_piece<MT>(s, [&](i32 row, i32 index) {
          return a.load_vector(chunk < 0 ? rank : row, max_int(chunk, 0), index);
        });
      } else {
        each_a_piece<MT>(s, [&](i32 row, i32 index) {
          return a.gather(chunk < 0 ? rank : row, max_int(chunk, 0), index);
        });
      }
    };
    ChunkCursor ahead = start;
#pragma unroll
    for (int d = 0; d < Shape::kStages; ++d, ahead.advance()) {
      if (ahead.cell < cell_count) load_a(stages[d], ahead.chunk());
    }

    const u8* x_row = nullptr;
    if (g < tile.rows) {
      x_row = args.x + row_index(args, tile.first_row + g, x_pair, args.x_by) * args.ldx * 2;
    }
    const auto load_own_x = [&](ChunkStage<MT>& s, i32 chunk) {
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
    };
    // y of this lane's column pairs, tokens 2t and 2t + 1.
    const i32 stride = args.slices.y_stride[item.slice];
    u8* y_row[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const i32 n = 2 * t + j, pair = j == 0 ? y_pairs.x : y_pairs.y;
      y_row[j] = args.y +
                 2 * (args.ldy * row_index(args, tile.first_row + n, pair, args.y_by) +
                      args.slices.y_column[item.slice] + static_cast<i64>(columns.first) * stride);
    }
    // y in column pairs and B in groups of 4 ranks.
    const bool whole = args.y_access != kYElement && columns.count % 2 == 0 && rank % 4 == 0;

    if (args.plan_settled && round == 0) {
      wait_for_predecessor();
      release_successor();
    }
    ahead = start;
#pragma unroll
    for (int d = 0; d < Shape::kStages; ++d, ahead.advance()) {
      if (ahead.cell < cell_count) load_own_x(stages[d], ahead.chunk());
    }
    u32 before[kColumnTiles][2];
    const auto load_y = [&](i32 first_tile) {
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const i32 column = (first_tile + i * kWarps) * kColumnTile + 2 * g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          before[i][j] = load4_rw_if(y_row[j] + 2 * column,
                                     whole && 2 * t + j < tile.rows && column < columns.count);
        }
      }
    };
    load_y(warp);

    float acc[MT][4];
    ChunkCursor now = start;
    while (now.cell < cell_count) {
#pragma unroll
      for (int d = 0; d < Shape::kStages; ++d, now.advance(), ahead.advance()) {
        if (now.cell >= cell_count) break;
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
        if (ahead.cell < cell_count) {
          load_a(stages[d], ahead.chunk());
          load_own_x(stages[d], ahead.chunk());
        }
        if (now.ends_cell()) {
          float* out = cells + now.cell * Shape::kBlock;
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              out[(2 * t + (e & 1)) * kPitch + mt * kRankTile + g + (e >> 1) * 8] = acc[mt][e];
            }
          }
        }
      }
    }
    __syncthreads();

    // Every group of MT warps adds the CTA's cells and sends the sum to other CTAs of the cluster.
    const i32 buffer = round & 1;
    const u32 arrived = pushed + 8 * buffer;
    if (threadIdx.x == 0) {
      mbarrier_expect(arrived, static_cast<u32>(size * tile.rows * rank_tiles * kRankTile * 4));
    }
    const i32 quad = warp % MT * kWarp + lane;
    const i32 token = quad / (4 * MT), first_rank = quad % (4 * MT) * 4;
    const bool sends = token < tile.rows && first_rank < rank_tiles * kRankTile;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (sends) {
      const float* cell = cells + token * kPitch + first_rank;
      const auto range_sum = [&](i32 range) {
        const float* p = cell + range * kChains * Shape::kBlock;
        const float4 c0 = float4_at(p), c1 = float4_at(p + Shape::kBlock);
        const float4 c2 = float4_at(p + 2 * Shape::kBlock), c3 = float4_at(p + 3 * Shape::kBlock);
        return make_float4(add_chains(c0.x, c1.x, c2.x, c3.x), add_chains(c0.y, c1.y, c2.y, c3.y),
                           add_chains(c0.z, c1.z, c2.z, c3.z), add_chains(c0.w, c1.w, c2.w, c3.w));
      };
      if (own_ranges == 1) {
        sum = range_sum(0);
      } else if (own_ranges == 2) {
        sum = tree_of<2>(range_sum);
      } else {
        TreeSum<3> x, y, z, w;
#pragma unroll 1
        for (i32 i = 0; i < own_ranges / 2; ++i) {
          const float4 v = tree_of<2>(range_sum, 2 * i);
          sum = make_float4(x.add(i, v.x), y.add(i, v.y), z.add(i, v.z), w.add(i, v.w));
        }
      }
    }
    if (round == 0) cluster_wait();  // the other CTAs' barriers are initialised
    if (sends) {
      const u32 place = shared_address(sums + (buffer * size + rank_in) * Shape::kBlock +
                                       token * kPitch + first_rank);
      for (i32 target = warp / MT; target < size; target += kWarps / MT) {
        push4(map_shared(place, target), sum, map_shared(arrived, target));
      }
    }
    mbarrier_wait(arrived, (round >> 1) & 1);

    Terms terms[MT];
    float4 h[MT];
    float row_max = 0.f;
#pragma unroll
    for (int s = 0; s < MT; ++s) {
      h[s] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (g < tile.rows && s < rank_tiles) {
        const float* source =
            sums + buffer * size * Shape::kBlock + g * kPitch + s * kRankStep + 4 * t;
        h[s] =
            tree_of_cluster(size, [&](i32 cta) { return float4_at(source + cta * Shape::kBlock); });
        h[s] = own_ranks(h[s], s * kRankStep + 4 * t, rank);
      }
      row_max = fmaxf(row_max, max_abs(h[s]));
    }
    i32 exponent = 0;
    if (IsFp16<T>::value) {
      row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, 2));
      exponent = fp16_exponent(row_max);
    }
#pragma unroll
    for (int s = 0; s < MT; ++s) terms[s] = split_terms<T>(h[s], power_of_two(exponent));
    float scale[2] = {entry.scale, entry.scale};
    if (IsFp16<T>::value) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // The scale of token 2t + j lies with the lanes of g = 2t + j.
        scale[j] *= power_of_two(-__shfl_sync(kFullMask, exponent, (2 * t + j) * 4));
      }
    }

    if (b_bulk) mbarrier_wait(b_full, b_rounds & 1);
    if (!whole) {
      AnyStage<MT, 1> any;
#pragma unroll
      for (int i = 0; i < MT; ++i) any.terms[0][i] = terms[i];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        any.scale[0][j] = scale[j];
        any.y_row[0][j] = reinterpret_cast<u64>(y_row[j]);
      }
      any.weights = b_start;
      any.slice = item.slice;
      any.rank = rank;
      any.rows = tile.rows;
      any.c = 0;
      any.valid = columns.count;
      expand_any<T, kWarps>(args, any);
    }
    for (i32 first_tile = warp; whole && first_tile * kColumnTile < columns.count;
         first_tile += kWarps * kColumnTiles) {
      if (first_tile != warp) load_y(first_tile);
      // Everything is read before the first product. Columns beyond the last are products of their
      // own and not stored.
      uint2 top[kColumnTiles][MT], bottom[kColumnTiles][MT];
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const i32 column = (first_tile + i * kWarps) * kColumnTile + 2 * g;
#pragma unroll
        for (int s = 0; s < MT; ++s) {
          const i32 k = s * kRankStep + 4 * t;
          const bool valid = k < rank && column < columns.count;
          const u32 p = b_start + (column * rank + k) * 2;
          top[i][s] = shared8_if(p, valid);
          bottom[i][s] = shared8_if(p + 2 * rank, valid);
        }
      }
      float delta[kColumnTiles][4] = {};
#pragma unroll
      for (int s = 0; s < MT; ++s) {
        if (s >= rank_tiles) break;
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) {
          multiply_hi<T>(delta[i], top[i][s], bottom[i][s], terms[s]);
        }
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) {
          multiply_lo<T>(delta[i], top[i][s], bottom[i][s], terms[s]);
        }
      }
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const i32 column = (first_tile + i * kWarps) * kColumnTile + 2 * g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          store4_if(y_row[j] + 2 * column,
                    add_pair<T>(before[i][j], delta[i][j], delta[i][2 + j], scale[j]),
                    2 * t + j < tile.rows && column < columns.count);
        }
      }
    }
    b_rounds += b_bulk ? 1 : 0;
    ++round;
  }
  if (args.plan_settled && round == 0) {
    // Whoever comes next relies on everything before this kernel being done when it is.
    wait_for_predecessor();
    release_successor();
  }
#endif
}
