// What the shrink kernels share: their arguments, how a work item is found, and which rank
// tiles it takes. ShrinkArgs is packed by cupylora/ops/_lora_pair.py.
//
// A rank tile is 16 ranks of one slice. The rank tiles that a tile's adapter has, of all slices one
// after the other, are dealt out in groups of MT: so slices that share x read it together, and an
// adapter costs its own ranks, not max_rank.
#pragma once
#include "lora/operands.cuh"
#include "lora/tile_rows.cuh"

struct __align__(8) ShrinkArgs {
  const u8* x;
  i64 x_pitch;  // bytes
  const i32* row_to_pair;
  const TileRecord* tiles;
  const i32* tile_count;
  const SlotEntry* entries;
  float* h;  // [split][row][slice][rank_pitch]
  i64 split_stride;
  i32* status;
  i32 x_by, top_k, num_tokens, k_major;
  i32 num_slices, max_loras, start_expert;
  i32 in_features, max_rank;
  i32 rank_pitch;
  i32 rank_groups;  // that an adapter of max_rank in all slices has
  i32 splits;       // of K, over CTAs: a power of two, at most the ranges
  i32 parts;        // of a tile's rows, over CTAs
  i32 sum_bytes;    // stream, wide, group: shared memory for a warp's sums
  i32 slots;        // group: chunks of K that shared memory has room for
  i32 x_vector;     // rows of x start on 16-byte boundaries
  i32 plan_settled;

  __device__ __forceinline__ RowMap rows() const {
    return RowMap{row_to_pair, top_k, num_tokens, k_major};
  }
};
static_assert(sizeof(ShrinkArgs) == 144, "ops/_lora_pair.py packs 144 bytes");
static_assert(kMaxSlices <= kWarp, "a lane holds a slice's entry");

struct ShrinkItem {
  const TileRecord* record;
  i32 part, group, split;

  static __device__ __forceinline__ i64 count(const ShrinkArgs& args) {
    return static_cast<i64>(*args.tile_count) * args.parts * args.rank_groups * args.splits;
  }
  // Splits of one tile follow each other.
  template <typename I>
  __device__ __forceinline__ ShrinkItem(const ShrinkArgs& args, I index) {
    const i32 per_tile = args.parts * args.rank_groups * args.splits;
    const I tile = index / per_tile;
    const u32 rest = static_cast<u32>(index - tile * per_tile);
    const u32 upper = rest / static_cast<u32>(args.splits);
    record = args.tiles + tile;
    split = rest - upper * args.splits;
    part = upper / static_cast<u32>(args.rank_groups);
    group = upper - part * args.rank_groups;
  }
};

// The A of a tile's adapter, slice s in lane s of each warp: one look-up for all slices.
struct SliceFactors {
  u64 a;
  i32 rank;  // 0 beyond the slices
  i32 packed;

  SliceFactors() = default;
  __device__ __forceinline__ SliceFactors(const ShrinkArgs& args, const Tile& tile) {
    const i32 slice = threadIdx.x % kWarp;
    SlotEntry entry = {};
    if (slice < args.num_slices) {
      entry = load_entry(args.entries, slice, tile.slot, args.max_loras, args.status);
    }
    rank = entry.rank;
    if (rank < 0 || rank > args.max_rank) {
      raise_status(args.status, kStatusRankRange);
      rank = 0;
    }
    a = entry.a_ptr + static_cast<i64>(tile.expert + args.start_expert) * entry.a_expert_stride;
    packed = entry.a_layout == kLayoutPacked;
  }
  __device__ __forceinline__ i32 rank_of(i32 slice) const {
    return __shfl_sync(kFullMask, rank, slice);
  }
  __device__ __forceinline__ AView view(i32 slice, i32 in_features) const {
    const u64 base = __shfl_sync(kFullMask, a, slice);
    return AView{reinterpret_cast<const u8*>(base), rank_of(slice), in_features,
                 __shfl_sync(kFullMask, packed, slice) != 0};
  }
  // Rank tiles of all slices, less those of the groups of `size` before `group`.
  __device__ __forceinline__ i32 left_for(const ShrinkArgs& args, i32 group, i32 size) const {
    i32 tiles = -group * size;
    for (i32 s = 0; s < args.num_slices; ++s) tiles += ceil_div(rank_of(s), kRankTile);
    return tiles;
  }
};

template <int MT>
struct RankTiles {
  AView a[MT];    // rank 0 where the group has no such tile
  i32 first[MT];  // rank
  i32 count;

  __device__ __forceinline__ RankTiles(const ShrinkArgs& args, const SliceFactors& factors,
                                       i32 group) {
    i32 slice[MT];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) slice[mt] = first[mt] = 0;
    i32 before = -group * MT;  // tiles of the slices before, without those of other groups
    for (i32 s = 0; s < args.num_slices; ++s) {
      const i32 tiles = ceil_div(factors.rank_of(s), kRankTile);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const i32 own = mt - before;
        if (own >= 0 && own < tiles) {
          slice[mt] = s;
          first[mt] = own * kRankTile;
        }
      }
      before += tiles;
    }
    count = max_int(0, min_int(MT, before));
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      a[mt] = factors.view(slice[mt], args.in_features);
      if (mt >= count) a[mt].rank = 0;
    }
  }
  __device__ __forceinline__ bool vector() const {
    bool all = true;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) all &= mt >= count || a[mt].vector();
    return all;
  }
};

// Where a rank goes that is counted over the rank tiles of all slices.
struct RankPlace {
  i32 slice = -1;  // -1: nowhere
  i32 rank = 0;

  __device__ __forceinline__ RankPlace(const ShrinkArgs& args, const SliceFactors& factors,
                                       i32 counted) {
    for (i32 s = 0; s < args.num_slices; ++s) {
      const i32 own = factors.rank_of(s);
      if (counted >= 0 && counted < own) {
        slice = s;
        rank = counted;
      }
      counted -= ceil_div(own, kRankTile) * kRankTile;
    }
  }
};

// Where a row's sums of a slice go.
__device__ __forceinline__ float* h_row(const ShrinkArgs& args, const Tile& tile, i32 n, i32 slice,
                                        i32 split) {
  return args.h + split * args.split_stride +
         (static_cast<i64>(tile.first_row + n) * args.num_slices + slice) * args.rank_pitch;
}
