// The computing warps of the ring kernel (ring.cu). In: the stages that the producer fills. Out: y
// of the items' rows, and an arrival at a stage's `empty` barrier from each warp that is done with
// it.
#pragma once
#include "lora/hidden.cuh"
#include "lora/ring_layout.cuh"
#include "lora/tuning.cuh"
#include "ptx/async.cuh"

#if __CUDA_ARCH__ >= 900

// The operands of a chunk for one warp: its rank tile's rows g and g + 8, and x of every n-tile.
template <int NT>
struct ChunkOperands {
  uint4 top[2], bottom[2];
  uint4 x[2][NT];
};

template <typename T, int NT>
__device__ __forceinline__ void multiply_chunk(float (&acc)[NT][4], const ChunkOperands<NT>& c) {
  const u32 zero = NT > 1 ? quad_zero() : 0;  // else a fragment has one product
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const uint4 top = c.top[u], bottom = c.bottom[u];
    const Quad low(make_uint2(top.x, top.y), make_uint2(bottom.x, bottom.y), zero);
    const Quad high(make_uint2(top.z, top.w), make_uint2(bottom.z, bottom.w), zero);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      mma_16816<T>(acc[nt], low, c.x[u][nt].x, c.x[u][nt].y);
      mma_16816<T>(acc[nt], high, c.x[u][nt].z, c.x[u][nt].w);
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
  u32 turns;  // bit 0: which of the two buffers of chain sums; above it: items so far

  ItemHead item;
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
    item = header.item;
    if (item.rank == 0) return false;
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
    const bool top_valid = row < item.rank, bottom_valid = row + 8 < item.rank;
    const u32 start = shared.weights(place.stage) + in_stage * kChunkBytes * item.rank;
    const u32 x = shared.rows(place.stage) + g * kRowPitch + in_stage * kChunkBytes + t * 16;
    const i32 width = args.in_features - chunk * kChunk;
    if (width >= kChunk) {
      // Piece 4 + t lies 64 bytes off in x, and under the swizzle at the other value of bit 6 in A.
      const u32 a = start + row * kChunkBytes + ((t ^ g) << 4);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        c.top[u] = load16_shared_if(a ^ (u * 64), top_valid);
        c.bottom[u] = load16_shared_if((a ^ (u * 64)) + 8 * kChunkBytes, bottom_valid);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          c.x[u][nt] = load16_shared_if(x + u * 64 + nt * 8 * kRowPitch, true);
        }
      }
      return;
    }
    // The last chunk of a K that is no multiple of 64: shorter rows, not swizzled.
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const bool in_k = (u * 4 + t) * 8 < width;
      const u32 top = start + row * 2 * width + (u * 4 + t) * 16;
      c.top[u] = load16_shared_if(top, in_k && top_valid);
      c.bottom[u] = load16_shared_if(top + 16 * width, in_k && bottom_valid);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        c.x[u][nt] = load16_shared_if(x + u * 64 + nt * 8 * kRowPitch, in_k);
      }
    }
  }
  // One range's sums. Where a warp has all four chains of its rank tile, `sums` are its
  // products' elements; else the chains meet in shared memory and thread `threadIdx.x` gets
  // elements threadIdx.x + 128 i of [token][rank].
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
    float* const buffer = chain_sums + (turns & 1) * args.chain_floats;
    turns ^= 1;
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
      if (token >= item.rows) break;
      const float* p = buffer + token * pitch + (e & (share.ranks() - 1));
      sums[i] = add_chains(p[0], p[block], p[2 * block], p[3 * block]);
    }
  }

  __device__ __forceinline__ void shrink(const RankShare<MT>& share, float (&own)[NT * MT]) {
    const i32 rank_tile = warp / share.ways, first_chain = warp % share.ways;
    const i32 ranges = order.ranges / size, first_range = rank_in * ranges;
    // A header alone: of an item that bypasses the ring, or of a CTA whose ranges are empty.
    if (item.bulk == 0 || order.first(first_range) >= order.chunks) release();
    TreeSum<> tree[NT * MT];
    for (i32 r = 0; r < ranges; ++r) {
      const i32 begin = order.first(first_range + r), end = order.first(first_range + r + 1);
      // Chains first_chain + j · ways.
      float acc[MT][NT][4] = {};
      if (item.bulk == 0) {
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
      for (int i = 0; i < NT * MT; ++i) own[i] = tree[i].add(r, sums[i]);
    }
  }

  __device__ __forceinline__ void bypass_range(const RankShare<MT>& share, i32 begin, i32 end,
                                               float (&acc)[MT][NT][4]) const {
    BypassedRange<MT, NT> range;  // in memory, unlike `acc`
    range.tile = item.tile;
    range.slice = item.slice;
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
                                                   const float (&own)[NT * MT]) {
    const u32 buffer = turns >> 1 & 1;
    const i32 ranks = share.ranks(), source_floats = kTokens * ranks;
    float* const incoming = arriving + buffer * size * kTokens * args.sum_ranks;
    const u32 arrived = shared.pushed + 8 * buffer;
    if (size > 1 && threadIdx.x == 0) {
      mbarrier_expect(arrived, static_cast<u32>(size * item.rows * ranks * 4));
    }
#pragma unroll
    for (int i = 0; i < NT * MT; ++i) {
      // Where add_range left the element.
      i32 e = threadIdx.x + i * kConsumerThreads;
      if (MT == kChains && share.ways == 1) {
        const i32 token = i / 4 * 8 + 2 * t + (i & 1);
        e = token * ranks + warp * kRankTile + g + (i >> 1 & 1) * 8;
      }
      if (e >> share.rank_shift >= item.rows) continue;
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
      mbarrier_wait(arrived, turns >> 2 & 1);
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
        if (nt * 8 + g < item.rows && s < share.tiles) {
          const i32 k = s * kRankStep + 4 * t;
          const float* source = incoming + (nt * 8 + g) * ranks + k;
          const float4 sum = tree_of_cluster(size, [&](i32 cta) {
            return *reinterpret_cast<const float4*>(source + cta * source_floats);
          });
          h[s] = own_ranks(sum, k, item.rank);
        }
      }
      make_terms<T>(h, item.scale, terms[nt], scale[nt]);
    }
  }

  // Of B in the stage: column `column` and the one behind it, this lane's ranks of every step.
  // Where columns lie 64 or 128 bytes apart, lanes of different g take the steps in different
  // order, so that they meet different banks.
  template <int RT>
  __device__ __forceinline__ void load_b(Quad (&to)[RT], i32 column) const {
    constexpr int kTurns = MT == 4 ? RT - 1 : 0;
    // Where lanes change steps, their values come of an operation as it is.
    const u32 zero = kTurns == 0 ? quad_zero() : 0;
    const u32 b = shared.weights(place.stage) + (column * item.rank + 4 * t) * 2;
#pragma unroll
    for (int s = 0; s < RT; ++s) {
      const i32 step = s ^ (g & kTurns);
      const bool in_rank = step * kRankStep + 4 * t < item.rank;
      const uint2 top = load8_shared_if(b + step * kRankStep * 2, in_rank);
      const uint2 bottom = load8_shared_if(b + step * kRankStep * 2 + 2 * item.rank, in_rank);
      to[s] = Quad(top, bottom, zero);
    }
    if constexpr (kTurns >= 1) turn_back<1>(to);
    if constexpr (kTurns >= 2) turn_back<2>(to);
  }
  // Changes places s and s ^ BIT in lanes whose g has that bit.
  template <int BIT, int RT>
  __device__ __forceinline__ void turn_back(Quad (&b)[RT]) const {
    const bool turned = (g & BIT) != 0;
#pragma unroll
    for (int s = 0; s < RT; ++s) {
      if ((s & BIT) != 0) continue;
      const Quad first = b[s], second = b[s | BIT];
      b[s] = turned ? second : first;
      b[s | BIT] = turned ? first : second;
    }
  }

  // This warp's column tiles of a stage that holds B and y, for an adapter of up to 16 RT ranks, a
  // multiple of 4: everything is read before the first product.
  template <int RT>
  __device__ __forceinline__ void expand_stage(i32 c, i32 valid, const Terms (&terms)[NT][MT],
                                               const float (&scale)[NT][2]) const {
    constexpr int kTiles = kConsumers / RT * (MT == 4 && RT > 1 ? 2 : 1);
    Quad b[kTiles][RT];
    u32 before[kTiles][NT][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const i32 column = (warp + i * kConsumers) * kColumnTile + 2 * g;
      const u32 y = shared.rows(place.stage) + 2 * t * kRowPitch + 2 * column;
      load_b<RT>(b[i], column);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) before[i][nt][j] = load4_shared(y + (nt * 8 + j) * kRowPitch);
      }
    }
    float delta[kTiles][NT][4] = {};
#pragma unroll
    for (int s = 0; s < RT; ++s) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          multiply_hi<T>(delta[i][nt], b[i][s], terms[nt][s]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          multiply_lo<T>(delta[i][nt], b[i][s], terms[nt][s]);
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
              nt * 8 + 2 * t + j < item.rows && column < valid);
        }
      }
    }
  }

  __device__ __forceinline__ void expand(const RankShare<MT>& share, const Terms (&terms)[NT][MT],
                                         const float (&scale)[NT][2]) {
    const bool whole = item.bulk == 2 && item.rank % 4 == 0;
    for (i32 c = 0; c < item.columns; c += share.stage_columns) {
      const i32 valid = min_int(share.stage_columns, item.columns - c);
      if (item.bulk != 0) wait_full();
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
        any.weights = item.bulk != 0 ? shared.weights(place.stage) : 0;
        any.tile = item.tile;
        any.slice = item.slice;
        any.rank = item.rank;
        any.rows = item.rows;
        any.first_column = item.first_column;
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
      if (item.bulk != 0) release();
    }
  }

  __device__ __forceinline__ void run() {
    for (; read_header(); turns += 2) {
      const RankShare<MT> share(item.rank);
      float own[NT * MT] = {};
      shrink(share, own);
      const float* incoming = exchange(share, own);
      Terms terms[NT][MT];
      float scale[NT][2];
      read_terms(share, incoming, terms, scale);
      expand(share, terms, scale);
    }
  }
};

#endif
