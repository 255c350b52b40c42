// Segmented shrink of large batches: the sums of lora/shrink.cu, bit for bit, at the rate of the
// memory. One work item per (row tile of up to 64 rows, group of MT rank tiles, K split).
//
// In: x, tile records, the slot entries of the slices. Out: h, as lora/shrink.cu.
//
// One warp copies x rows and one copies A, a chunk of K a slot, into a ring of shared memory that
// they fill across work items without a pause, so how much is in flight does not depend on
// registers or on where the products are. A slot holds what the tile has, rows and ranks of 128
// bytes. The warps that multiply own tokens (and, with MT = 4, half of the ranks) and walk K alone:
// they take a range's chunks chain by chain, so that one accumulator is live at a time.
//
// A comes before the kernel ahead has ended where the work list is known to be complete.
#include "lora/shrink.cuh"
#include "mma/mma.cuh"
#include "ptx/slot_ring.cuh"

namespace {

constexpr int kTileRows = 64;
constexpr int kUsers = 4;  // warps that multiply
constexpr int kThreads = (kUsers + 2) * kWarp;
constexpr int kMaxSlots = 16;
constexpr u32 kXBytes = kTileRows * kChunkBytes;
constexpr int kCopyRows = 4;  // lines of 128 bytes that a warp copies at a time

// How the product tiles of a chunk are shared: a warp has n-tiles token_warp, token_warp +
// kTokenWarps, ... and kM neighbouring rank tiles.
template <int MT>
struct StreamShape {
  static constexpr int kRankWarps = MT == 4 ? 2 : 1;
  static constexpr int kTokenWarps = kUsers / kRankWarps;
  static constexpr int kM = MT / kRankWarps;
  static constexpr int kNT = kTileRows / 8 / kTokenWarps;
  static constexpr int kTiles = kM * kNT;
  static constexpr u32 kSlotBytes = kXBytes + MT * kRankTile * kChunkBytes;
};

// Piece `index` of a line of a slot: lines of different parity use different halves of the banks in
// a load of 8 lanes.
__device__ __forceinline__ u32 slot_piece(i32 line, i32 index) {
  return line * kChunkBytes + ((index ^ ((line & 1) << 2)) << 4);
}

// Calls f(chunk) for every chunk of an item in the order of the slots: range by range, chain by
// chain.
template <typename F>
__device__ __forceinline__ void each_chunk(const ShrinkArgs& args, i32 split, const F& f) {
  const KOrder order(args.in_features);
  const i32 ranges = order.ranges / args.splits;
  for (i32 range = split * ranges; range < (split + 1) * ranges; ++range) {
    const i32 first = order.first(range), end = order.first(range + 1);
    for (i32 chain = first; chain < min_int(end, first + kChains); ++chain) {
      for (i32 chunk = chain; chunk < end; chunk += kChains) f(chunk);
    }
  }
}

// Calls f(item, tile, factors) for every work item of this CTA. The host launches this kernel only
// where items are numbered in 31 bits.
template <int MT, typename F>
__device__ __forceinline__ void each_item(const ShrinkArgs& args, const F& f) {
  const u32 items = static_cast<u32>(ShrinkItem::count(args));
  for (u32 at = blockIdx.x; at < items; at += gridDim.x) {
    const ShrinkItem item(args, at);
    const Tile tile = item.record->head;
    const SliceFactors factors(args, tile);
    if (factors.left_for(args, item.group, MT) > 0) f(item, tile, factors);
  }
}

// A slot's lines of A. A line of no rank is filled with zeros.
template <int MT>
__device__ __forceinline__ void copy_a(const ShrinkArgs& args, SlotRing ring) {
  const i32 lane = threadIdx.x % kWarp, index = lane % 8, row0 = lane / 8;
  each_item<MT>(args, [&](const ShrinkItem& item, const Tile&, const SliceFactors& factors) {
    const RankTiles<MT> ranks(args, factors, item.group);
    const bool vector = ranks.vector();
    each_chunk(args, item.split, [&](i32 chunk) {
      const u32 slot = ring.acquire() + kXBytes;
      const bool in_k = chunk * kChunk + index * 8 < args.in_features;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        if (mt >= ranks.count) break;
        const AView& a = ranks.a[mt];
        const u8* base = a.base + a.chunk_offset(chunk);
        if (vector) {
#pragma unroll
          for (int i = 0; i < kRankTile; i += kCopyRows) {
            const i32 row = ranks.first[mt] + i + row0;
            const bool valid = in_k && row < a.rank;
            copy16_async(slot + slot_piece(mt * kRankTile + i + row0, index),
                         base + a.piece(row, chunk, index), valid ? 16 : 0);
          }
        } else {
#pragma unroll 1
          for (i32 i = row0; i < kRankTile; i += kCopyRows) {
            store16_shared(slot + slot_piece(mt * kRankTile + i, index),
                           a.gather(ranks.first[mt] + i, chunk, index));
          }
        }
      }
      ring.commit(!vector);
    });
  });
  wait_async<0>();
}

// A slot's lines of x; those beyond the tile's rows keep what they hold, as nothing is made of it.
template <int MT>
__device__ __forceinline__ void copy_x(const ShrinkArgs& args, SlotRing ring) {
  constexpr int kCopies = kTileRows / kCopyRows, kTogether = 4;
  const i32 lane = threadIdx.x % kWarp, index = lane % 8, row0 = lane / 8;
  bool waited = false;
  each_item<MT>(args, [&](const ShrinkItem& item, const Tile& tile, const SliceFactors&) {
    const TileRows found(args.rows(), *item.record, tile, args.x_by);
    const i32 own_rows = tile.rows - row0;
    const u8* rows[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const i64 row = found.index(i * kCopyRows + row0, i * kCopyRows >= kWarp);
      rows[i] = args.x + row * args.x_pitch + index * 16;
    }
    if (!waited) wait_for_predecessor();
    waited = true;
    each_chunk(args, item.split, [&](i32 chunk) {
      // Lines that a warp copies together differ by an even number.
      const u32 slot = ring.acquire() + slot_piece(row0, index);
      const u32 offset = static_cast<u32>(chunk) * kChunkBytes;
      const i32 left = args.in_features - chunk * kChunk - index * 8;
      if (args.x_vector) {
        const int bytes = left > 0 ? 16 : 0;
#pragma unroll
        for (int base = 0; base < kCopies; base += kTogether) {
          if (base * kCopyRows >= tile.rows) break;
#pragma unroll
          for (int i = base; i < base + kTogether; ++i) {
            copy16_async_ahead_if(slot + i * kCopyRows * kChunkBytes, rows[i] + offset, bytes,
                                  i * kCopyRows < own_rows);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (i * kCopyRows >= own_rows) continue;
          store16_shared(slot + i * kCopyRows * kChunkBytes, gather8(rows[i] + offset, left));
        }
      }
      ring.commit(!args.x_vector);
    });
  });
  wait_async<0>();
}

// The binary tree over ranges (k_order.cuh) of a warp's product tiles; its levels lie in shared
// memory, 16 bytes a lane and tile, since they are touched once a range.
template <int kTiles>
struct Tree {
  u32 base;  // of this lane
  i32 levels;

  // Leaf 0, 1, ...; after 2^n of them `value` is their sum.
  __device__ __forceinline__ void add(i32 leaf, float (&value)[kTiles][4]) const {
    i32 level = 0;
    u32 place = base;
#pragma unroll 1
    for (; level < levels && ((leaf >> level) & 1); ++level) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i, place += kWarp * 16) {
        const uint4 left = load16_shared(place);
        value[i][0] = __uint_as_float(left.x) + value[i][0];
        value[i][1] = __uint_as_float(left.y) + value[i][1];
        value[i][2] = __uint_as_float(left.z) + value[i][2];
        value[i][3] = __uint_as_float(left.w) + value[i][3];
      }
    }
    if (level == levels) return;
#pragma unroll
    for (int i = 0; i < kTiles; ++i, place += kWarp * 16) {
      store16_shared(place, make_uint4(__float_as_uint(value[i][0]), __float_as_uint(value[i][1]),
                                       __float_as_uint(value[i][2]), __float_as_uint(value[i][3])));
    }
  }
};

// The products of one chunk with this warp's tokens and ranks; the tile has `count` rank tiles from
// the warp's first on.
template <typename T, int MT>
__device__ __forceinline__ void multiply_chunk(float (&acc)[StreamShape<MT>::kTiles][4], u32 x_slot,
                                               u32 a_slot, i32 token_warp, i32 count, i32 rows) {
  using Shape = StreamShape<MT>;
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    uint4 x[Shape::kNT];
#pragma unroll
    for (int nt = 0; nt < Shape::kNT; ++nt) {
      const i32 n = (nt * Shape::kTokenWarps + token_warp) * 8;
      if (n < rows) x[nt] = load16_shared(x_slot + slot_piece(n + g, u * 4 + t));
    }
#pragma unroll
    for (int m = 0; m < Shape::kM; ++m) {
      if (m >= count) break;
      const i32 line = m * kRankTile + g;
      const uint4 top = load16_shared(a_slot + slot_piece(line, u * 4 + t));
      const uint4 bottom = load16_shared(a_slot + slot_piece(line + 8, u * 4 + t));
#pragma unroll
      for (int nt = 0; nt < Shape::kNT; ++nt) {
        if ((nt * Shape::kTokenWarps + token_warp) * 8 >= rows) break;
        float (&d)[4] = acc[m * Shape::kNT + nt];
        mma_16816<T>(d, top.x, bottom.x, top.y, bottom.y, x[nt].x, x[nt].y);
        mma_16816<T>(d, top.z, bottom.z, top.w, bottom.w, x[nt].z, x[nt].w);
      }
    }
  }
}

template <typename T, int MT>
__device__ __forceinline__ void multiply(const ShrinkArgs& args, SlotRing ring, u32 levels) {
  using Shape = StreamShape<MT>;
  constexpr int kM = Shape::kM, kNT = Shape::kNT, kTiles = Shape::kTiles;
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const i32 token_warp = warp % Shape::kTokenWarps, first_m = warp / Shape::kTokenWarps * kM;
  const KOrder order(args.in_features);
  const i32 ranges = order.ranges / args.splits;
  const i32 depth = 31 - __clz(ranges);
  const Tree<kTiles> tree{levels + (warp * depth * kTiles * kWarp + lane) * 16, depth};
  each_item<MT>(args, [&](const ShrinkItem& item, const Tile& tile, const SliceFactors& factors) {
    const i32 count = factors.left_for(args, item.group, MT) - first_m;
    float sum[kTiles][4];
    for (i32 leaf = 0; leaf < ranges; ++leaf) {
      const i32 first = order.first(item.split * ranges + leaf);
      const i32 end = order.first(item.split * ranges + leaf + 1);
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] = -0.f;  // adding to it changes no bit
#pragma unroll 1
      for (i32 chain = first; chain < first + kChains; ++chain) {
        float acc[kTiles][4] = {};
#pragma unroll 1
        for (i32 chunk = chain; chunk < end; chunk += kChains) {
          const u32 slot = ring.wait();
          multiply_chunk<T, MT>(acc, slot, slot + kXBytes + first_m * kRankTile * kChunkBytes,
                                token_warp, count, tile.rows);
          ring.release();
        }
#pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] += acc[i / 4][i % 4];
      }
      tree.add(leaf, sum);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 counted = (item.group * MT + first_m + m) * kRankTile + half * 8 + g;
        const RankPlace place(args, factors, counted);
#pragma unroll
        for (int i = 0; i < kNT * 2; ++i) {
          const i32 n = (i / 2 * Shape::kTokenWarps + token_warp) * 8 + 2 * t + i % 2;
          if (place.slice >= 0 && n < tile.rows) {
            h_row(args, tile, n, place.slice, item.split)[place.rank] =
                sum[m * kNT + i / 2][half * 2 + i % 2];
          }
        }
      }
    }
  });
}

}  // namespace

template <typename T, int MT>
__global__ void __launch_bounds__(kThreads, 2) lora_shrink_stream(ShrinkArgs args) {
  using Shape = StreamShape<MT>;
  extern __shared__ __align__(128) u8 slots[];  // the ring's, then the trees' levels
  __shared__ u64 barriers[2 * kMaxSlots];
  SlotRing ring(shared_address(barriers), shared_address(slots), Shape::kSlotBytes, args.slots);
  if (threadIdx.x == 0) ring.init(2 * kWarp, kUsers);
  __syncthreads();
  const i32 warp = threadIdx.x / kWarp;
  if (warp < kUsers) {
    // The successor may start once all work before this kernel is done, so that the work list that
    // both read, and y, are complete for it too.
    wait_for_predecessor();
    release_successor();
    multiply<T, MT>(args, ring, shared_address(slots) + args.slots * Shape::kSlotBytes);
    return;
  }
  if (!args.plan_settled) wait_for_predecessor();
  if (warp == kUsers) {
    copy_x<MT>(args, ring);
  } else {
    copy_a<MT>(args, ring);
  }
}
