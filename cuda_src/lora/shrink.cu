// Segmented shrink of small batches: h[row, rank] = sum over K of A[rank, K] · x[row, K], one work
// item per (row tile, up to 16 of its rows, group of MT rank tiles, K split). Larger batches take
// lora/shrink_stream.cu.
//
// In: x, tile records, the slot entries of the slices. Out: float partial sums,
// h[split][row][slice] [rank], read by lora/expand.cu and others through lora/split_sum.cuh.
//
// The four warps are the four chains of the K order (k_order.cuh). Weights are the 16-row operand,
// tokens the 8-column one: a decode segment of few rows wastes little, and operands go from memory
// straight to registers, 16 bytes a lane. A warp's chunks follow each other without a gap from
// range to range, so loads stay in flight across the sums between ranges.
#include "lora/shrink.cuh"
#include "mma/mma.cuh"

namespace {

constexpr int kThreads = kChains * kWarp;

template <int MT, int NT>
struct ShrinkShape {
  static constexpr int kStages = 2 * MT + NT <= 5 ? 2 : 1;  // chunks in flight per warp
  static constexpr int kBlocksPerSm = MT * NT == 1 ? 4 : MT < 4 ? 3 : 2;
  static constexpr int kRows = NT * 8;
  static constexpr int kRanks = MT * kRankTile;
  static constexpr int kPitch = kRanks + 4;  // floats between tokens in the reduction buffer
  // In the reduction a thread owns one rank, of every kRowStep-th token.
  static constexpr int kRowStep = kThreads / kRanks;
  static constexpr int kOwn = kRows / kRowStep;
};

// One chunk of this lane's operands.
template <int MT, int NT>
struct Stage {
  uint4 a[2][MT][2];
  uint4 x[2][NT];

  __device__ __forceinline__ void load_a(const RankTiles<MT>& ranks, i32 chunk, bool vector) {
    const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
    // The slow path apart: calls between the loads would keep them from being in flight together.
    if (vector) {
      each([&](int u, int mt, int half) {
        return ranks.a[mt].load_vector(ranks.first[mt] + half * 8 + g, chunk, u * 4 + t);
      });
    } else {
      each([&](int u, int mt, int half) {
        return ranks.a[mt].gather(ranks.first[mt] + half * 8 + g, chunk, u * 4 + t);
      });
    }
  }
  template <typename Load>
  __device__ __forceinline__ void each(const Load& load) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        a[u][mt][0] = load(u, mt, 0);
        a[u][mt][1] = load(u, mt, 1);
      }
    }
  }
  __device__ __forceinline__ void load_x(const u8* const (&rows)[NT], i32 in_features, i32 chunk,
                                         bool vector) {
    const i32 t = threadIdx.x % 4;
    if (vector) {
#pragma unroll
      for (int i = 0; i < 2 * NT; ++i) {
        x[i / NT][i % NT] = ::load_x(rows[i % NT], in_features, chunk, i / NT * 4 + t, true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * NT; ++i) {
        x[i / NT][i % NT] = ::load_x(rows[i % NT], in_features, chunk, i / NT * 4 + t, false);
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], i32 count) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        if (MT > 1 && mt >= count) continue;
        const uint4 &top = a[u][mt][0], &bottom = a[u][mt][1];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const uint4& b = x[u][nt];
          mma_16816<T>(acc[mt][nt], top.x, bottom.x, top.y, bottom.y, b.x, b.y);
          mma_16816<T>(acc[mt][nt], top.z, bottom.z, top.w, bottom.w, b.z, b.w);
        }
      }
    }
  }
};

// This warp's chunks of an item, one a round, the same number of rounds in every range.
struct Rounds {
  KOrder order;
  i32 first_range, per_range, count;

  __device__ __forceinline__ Rounds(i32 in_features, i32 splits, i32 split) : order(in_features) {
    const i32 ranges = order.ranges / splits;
    first_range = split * ranges;
    per_range = ceil_div(order.length, kChains);
    count = ranges * per_range;
  }
  __device__ __forceinline__ i32 leaf(i32 round) const {
    return static_cast<u32>(round) / static_cast<u32>(per_range);
  }
  // -1: the chain has no chunk in this round.
  __device__ __forceinline__ i32 chunk(i32 round) const {
    const i32 range = first_range + leaf(round);
    const i32 at =
        order.first(range) + threadIdx.x / kWarp + kChains * (round - leaf(round) * per_range);
    return at < order.first(range + 1) ? at : -1;
  }
};

}  // namespace

template <typename T, int MT, int NT>
__global__ void __launch_bounds__(kThreads, ShrinkShape<MT, NT>::kBlocksPerSm)
    lora_shrink(ShrinkArgs args) {
  using Shape = ShrinkShape<MT, NT>;
  // Two buffers alternate: one barrier a range is enough, since a warp writes a buffer again only
  // after the barrier that follows everybody's sums from it.
  __shared__ float partial[2][kChains][Shape::kRows][Shape::kPitch];
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const i32 own_rank = threadIdx.x % Shape::kRanks, own_row = threadIdx.x / Shape::kRanks;
  const bool x_vector = args.x_vector != 0;
  // The successor may start once all work before this kernel is done, so that the work list that
  // both read, and y, are complete for it too.
  Predecessor predecessor;
  if (!args.plan_settled) predecessor.wait();
  i32 buffer = 0;

  const i64 items = ShrinkItem::count(args);
  for (i64 at = blockIdx.x; at < items; at += gridDim.x) {
    const ShrinkItem item(args, at);
    Tile tile = item.record->head;
    const i32 row0 = item.part * Shape::kRows;
    if (row0 >= tile.rows) continue;
    const SliceFactors factors(args, tile);
    const RankTiles<MT> ranks(args, factors, item.group);
    if (ranks.count == 0) continue;
    const bool a_vector = ranks.vector();
    const RankPlace place(args, factors, item.group * Shape::kRanks + own_rank);
    const Rounds rounds(args.in_features, args.splits, item.split);

    Stage<MT, NT> stages[Shape::kStages];
#pragma unroll
    for (int i = 0; i < Shape::kStages; ++i) {
      const i32 chunk = i < rounds.count ? rounds.chunk(i) : -1;
      if (chunk >= 0) stages[i].load_a(ranks, chunk, a_vector);
    }
    const TileRows found(args.rows(), *item.record, tile, args.x_by);
    const u8* x_rows[NT];  // token g of every n-tile, null beyond the tile
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const i32 n = row0 + nt * 8 + g;
      const i64 row = found.index(n, row0 >= kWarp);
      x_rows[nt] = n < tile.rows ? args.x + row * args.x_pitch : nullptr;
    }
    predecessor.wait();
#pragma unroll
    for (int i = 0; i < Shape::kStages; ++i) {
      const i32 chunk = i < rounds.count ? rounds.chunk(i) : -1;
      if (chunk >= 0) stages[i].load_x(x_rows, args.in_features, chunk, x_vector);
    }

    float acc[MT][NT][4] = {};
    TreeSum<> tree[Shape::kOwn];
    float total[Shape::kOwn] = {};
    for (i32 base = 0; base < rounds.count; base += Shape::kStages) {
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) {
        const i32 round = base + i;
        if (round >= rounds.count) break;
        if (rounds.chunk(round) >= 0) stages[i].template multiply<T>(acc, ranks.count);
        const i32 ahead = round + Shape::kStages;
        const i32 next = ahead < rounds.count ? rounds.chunk(ahead) : -1;
        if (next >= 0) {
          stages[i].load_a(ranks, next, a_vector);
          stages[i].load_x(x_rows, args.in_features, next, x_vector);
        }
        const i32 leaf = rounds.leaf(round);
        if (rounds.leaf(round + 1) == leaf) continue;
        // The range's chains meet.
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              partial[buffer][warp][nt * 8 + 2 * t + (c & 1)][mt * kRankTile + g + (c >> 1) * 8] =
                  acc[mt][nt][c];
              acc[mt][nt][c] = 0.f;
            }
          }
        }
        __syncthreads();
#pragma unroll
        for (int o = 0; o < Shape::kOwn; ++o) {
          const i32 n = own_row + o * Shape::kRowStep;
          total[o] = tree[o].add(
              leaf, add_chains(partial[buffer][0][n][own_rank], partial[buffer][1][n][own_rank],
                               partial[buffer][2][n][own_rank], partial[buffer][3][n][own_rank]));
        }
        buffer ^= 1;
      }
    }

    if (place.slice < 0) continue;
#pragma unroll
    for (int o = 0; o < Shape::kOwn; ++o) {
      const i32 n = row0 + own_row + o * Shape::kRowStep;
      if (n < tile.rows) h_row(args, tile, n, place.slice, item.split)[place.rank] = total[o];
    }
  }
  predecessor.wait();
}
