// Segmented shrink of large batches: the sums of lora/shrink.cu, bit for bit, at the rate of the
// memory. One work item a CTA: (row tile, part of its rows, group of MT rank tiles, K split).
//
// In: x, tile records, the slot entries of the slices. Out: h, as lora/shrink.cu.
//
// The four warps of a CTA share K: each has an aligned quarter of the item's K ranges, so a node of
// the canonical tree, for all rows of the part. A warp copies what it multiplies, a chunk of K
// after the other, into slots of its own that it fills ahead across work items: no warp waits for
// another but where the four sums of an item are added. A slot's rows of x serve all ranks of the
// group, its ranks of A all rows, so a value is read from shared memory once.
//
// Lists are fetched an item ahead, and A before the kernel ahead has ended where the work list is
// known to be complete.
#include "lora/shrink_chunks.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kCopyRows = 4;  // lines of 128 bytes that a warp copies at a time

// R: rows of a part. Two slots a warp: more, or more rows, leave room for fewer warps, and it is by
// their number that the memory is kept busy.
template <int MT, int R>
struct StreamShape {
  static constexpr int kRows = R;
  static constexpr int kNT = kRows / 8;
  static constexpr int kTiles = MT * kNT;
  static constexpr int kSlots = 2;
  static constexpr u32 kXBytes = kRows * kChunkBytes;
  static constexpr u32 kSlotBytes = kXBytes + MT * kRankTile * kChunkBytes;
  // Sums on their way to the other warps: a row's ranks, padded so that lanes meet other banks.
  static constexpr u32 kSumPitch = (MT * kRankTile + 4) * 4;
};

// A warp's share of the ranges of an item: a power of two, maybe none.
__device__ __forceinline__ RangeShare warp_share(const ShrinkArgs& args, const KOrder& order,
                                                 i32 split) {
  const i32 ranges = order.ranges / args.splits, warp = threadIdx.x / kWarp;
  const i32 count = max_int(1, ranges / kWarps);
  return RangeShare{split * ranges + warp * count, warp * count < ranges ? count : 0};
}

// What a warp copies into its slots, a chunk at a time. Walks the work items ahead of the products;
// the lists of the item after the next are under way.
template <int MT, int R>
struct Source {
  using Shape = StreamShape<MT, R>;
  static constexpr int kX = Shape::kRows / kCopyRows;

  u32 at;
  Chunks chunks;
  Tile next_tile;  // of item at + grid
  TileRows next_found;
  SliceFactors next_factors;
  TileRows found;
  SliceFactors factors;
  i32 group, first_row, rows;  // rows: of the part
  const u8* a[MT];             // line lane / 8 of a rank tile
  u32 a_step[MT];              // bytes from a chunk to the next
  i32 own_ranks[MT];
  bool pieces;  // all of A is packed, on 16-byte boundaries

  __device__ __forceinline__ Source(const ShrinkArgs& args, const KOrder& order, u32 items) {
    at = blockIdx.x;
    if (at >= items) return;
    look_up(args, at);
    begin(args, order, items);
  }
  __device__ __forceinline__ void next(const ShrinkArgs& args, const KOrder& order, u32 items) {
    chunks.next(order);
    if (chunks.left()) return;
    at += gridDim.x;
    begin(args, order, items);
  }

  __device__ __forceinline__ void copy_x(const ShrinkArgs& args, u32 slot) const {
    const i32 lane = threadIdx.x % kWarp, index = lane % 8, line = lane / 8;
    const u8* piece = args.x + static_cast<u32>(chunks.chunk) * kChunkBytes + index * 16;
    const u32 pitch = static_cast<u32>(args.x_pitch);  // of K, an i32, 2-byte elements
    const i32 in_k = args.in_features - chunks.chunk * kChunk - index * 8;
    slot += slot_piece(line, index);  // lines that are four apart have the same parity
    if (args.x_vector) {
      const int bytes = in_k > 0 ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kX; ++i) {
        if (i % 4 == 0 && i * kCopyRows >= rows) break;
        copy16_async_ahead_if(slot + i * kCopyRows * kChunkBytes, piece + row(i) * pitch, bytes,
                              i * kCopyRows + line < rows);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kX; ++i) {
        const u64 own = row(i);
        if (i * kCopyRows + line < rows) {
          store16_shared(slot + i * kCopyRows * kChunkBytes, gather8(piece + own * pitch, in_k));
        }
      }
    }
  }
  // A line of no rank is filled with zeros.
  __device__ __forceinline__ void copy_a(const ShrinkArgs& args, u32 slot) const {
    const i32 lane = threadIdx.x % kWarp, index = lane % 8, line = lane / 8;
    slot += Shape::kXBytes;
    if (!pieces || (chunks.chunk + 1) * kChunk > args.in_features) {
      copy_a_apart(args, slot);
      return;
    }
    slot += slot_piece(line, index);
    // Every fourth line has its pieces in the other half.
    const i32 even = ((index ^ line) << 4), odd = even ^ (kCopyRows << 4);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const u8* chunk = a[mt] + static_cast<u64>(static_cast<u32>(chunks.chunk)) * a_step[mt];
#pragma unroll
      for (int i = 0; i < kRankTile / kCopyRows; ++i) {
        const i32 at_line = mt * kRankTile + i * kCopyRows;
        copy16_async(slot + at_line * kChunkBytes,
                     chunk + (i % 2 == 0 ? even : odd) + i * kCopyRows * kChunkBytes,
                     i * kCopyRows + line < own_ranks[mt] ? 16 : 0);
      }
    }
  }

 private:
  // By all lanes: the row of x for line 4i + lane / 8.
  __device__ __forceinline__ u64 row(int i) const {
    const i32 n = first_row + i * kCopyRows;
    return static_cast<u32>(found.index(n + threadIdx.x % kWarp / 8, n >= kWarp));
  }
  // Asks for what the lists say of item `index`.
  __device__ __forceinline__ void look_up(const ShrinkArgs& args, u32 index) {
    const Work work(args, index);
    next_tile = work.tile;
    next_found = TileRows(args.rows(), *work.item.record, work.tile, args.x_by);
    next_factors = SliceFactors(args, work.tile);
  }
  // Goes on to the next item that is something to do for this warp.
  __device__ __forceinline__ void begin(const ShrinkArgs& args, const KOrder& order, u32 items) {
    for (; at < items; at += gridDim.x) {
      const ShrinkItem item(args, at);
      first_row = item.part * Shape::kRows;
      rows = next_tile.rows - first_row;
      group = item.group;
      found = next_found;
      factors = next_factors;
      if (at + gridDim.x < items) look_up(args, at + gridDim.x);
      chunks = Chunks(order, warp_share(args, order, item.split));
      if (rows <= 0 || !chunks.left() || factors.left_for(args, group, MT) <= 0) continue;
      find_a(args);
      return;
    }
  }
  __device__ __forceinline__ void find_a(const ShrinkArgs& args) {
    const RankTiles<MT> ranks(args, factors, group);
    pieces = ranks.vector();
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const AView& view = ranks.a[mt];
      pieces &= view.packed || mt >= ranks.count;
      a[mt] = view.base + (ranks.first[mt] + threadIdx.x % kWarp / 8) * kChunkBytes;
      a_step[mt] = view.rank * kChunkBytes;
      own_ranks[mt] = view.rank - ranks.first[mt];
    }
  }
  // The last chunk of a K that is no multiple of 64, and an A that is not packed or does not lie in
  // pieces.
  __device__ __forceinline__ void copy_a_apart(const ShrinkArgs& args, u32 slot) const {
    const i32 lane = threadIdx.x % kWarp, index = lane % 8;
#pragma unroll 1
    for (i32 mt = 0; mt < MT; ++mt) {
      i32 counted = group * MT + mt, slice = 0, first = kNoRank;
      for (i32 s = 0; s < args.num_slices; ++s) {
        const i32 tiles = ceil_div(factors.rank_of(s), kRankTile);
        if (counted >= 0 && counted < tiles) {
          slice = s;
          first = counted * kRankTile;
        }
        counted -= tiles;
      }
      const AView view = factors.view(slice, args.in_features);
      const bool vector = view.vector();
#pragma unroll 1
      for (i32 line = lane / 8; line < kRankTile; line += kCopyRows) {
        const uint4 v = view.load(first + line, chunks.chunk, index, vector);
        store16_shared(slot + mt * kRankTile * kChunkBytes + slot_piece(line, index), v);
      }
    }
  }
};

// A warp's slots: fills them ahead of the products.
template <int MT, int R>
struct Slots {
  using Shape = StreamShape<MT, R>;
  static constexpr int kAhead = Shape::kSlots - 1;

  const ShrinkArgs& args;
  const KOrder& order;
  u32 items;
  u32 base;
  i32 fill_at = 0, use_at = 0;
  Source<MT, R> source;

  __device__ __forceinline__ Slots(const ShrinkArgs& args, const KOrder& order, u32 items, u32 base)
      : args(args), order(order), items(items), base(base), source(args, order, items) {}

  // Fills one, the one that was used last, if anything is left. Each fill is a group of copies.
  __device__ __forceinline__ void fill() {
    if (source.at < items) {
      const u32 slot = base + fill_at * Shape::kSlotBytes;
      source.copy_a(args, slot);
      source.copy_x(args, slot);
      source.next(args, order, items);
    }
    commit_async();
    fill_at = fill_at + 1 == Shape::kSlots ? 0 : fill_at + 1;
  }
  // The first ones: A at once, x when the kernel ahead has ended.
  __device__ __forceinline__ void fill_first(bool waited) {
    Source<MT, R> ahead = source;
#pragma unroll 1
    for (int i = 0; i < kAhead && ahead.at < items; ++i) {
      ahead.copy_a(args, base + i * Shape::kSlotBytes);
      ahead.next(args, order, items);
    }
    if (!waited) wait_for_predecessor();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      if (source.at < items) {
        source.copy_x(args, base + i * Shape::kSlotBytes);
        source.next(args, order, items);
      }
      commit_async();
    }
    fill_at = kAhead;
  }
  // The next slot's address, once it is filled; the one before may be filled again.
  __device__ __forceinline__ u32 use() {
    wait_async<kAhead - 1>();
    __syncwarp();
    const u32 slot = base + use_at * Shape::kSlotBytes;
    use_at = use_at + 1 == Shape::kSlots ? 0 : use_at + 1;
    return slot;
  }
};

// The products of one chunk, unit by unit.
template <typename T, int MT, int R>
__device__ __forceinline__ void multiply_chunk(float (&acc)[StreamShape<MT, R>::kTiles][4],
                                               u32 slot) {
  using Shape = StreamShape<MT, R>;
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const u32 zero = unknown_zero();
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const u32 piece = slot + slot_piece(g, u * 4 + t);
    multiply_unit<T, MT, Shape::kNT>(acc, piece, piece + Shape::kXBytes, zero);
  }
}

// A warp's share of an item's sums, from its slots.
template <typename T, int MT, int R>
__device__ __forceinline__ void sum_share(float (&sum)[StreamShape<MT, R>::kTiles][4],
                                          Slots<MT, R>& slots, const RangeShare& share,
                                          u32 levels) {
  constexpr int kTiles = StreamShape<MT, R>::kTiles;
  const Tree<kTiles> tree{levels + threadIdx.x % kWarp * 16, 31 - __clz(share.count)};
  for (i32 leaf = 0; leaf < share.count; ++leaf) {
    const i32 first = slots.order.first(share.first + leaf);
    const i32 end = slots.order.first(share.first + leaf + 1);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] = -0.f;  // adding to it changes no bit
#pragma unroll 1
    for (i32 chain = first; chain < first + kChains; ++chain) {
      float acc[kTiles][4] = {};
#pragma unroll 1
      for (i32 chunk = chain; chunk < end; chunk += kChains) {
        const u32 slot = slots.use();
        slots.fill();
        multiply_chunk<T, MT, R>(acc, slot);
      }
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] += acc[i / 4][i % 4];
    }
    tree.add(leaf, sum);
  }
}

// A warp's sums to where the others find them.
template <int MT, int R>
__device__ __forceinline__ void publish(u32 place,
                                        const float (&sum)[StreamShape<MT, R>::kTiles][4],
                                        i32 rows) {
  using Shape = StreamShape<MT, R>;
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  __syncwarp();  // every lane has read its tree's levels, which lie where others' sums go
#pragma unroll
  for (int nt = 0; nt < Shape::kNT; ++nt) {
    if (nt * 8 >= rows) break;
#pragma unroll
    for (int i = 0; i < MT * 4; ++i) {
      const int m = i / 4, half = i / 2 % 2, j = i % 2;
      store4_shared(
          place + (nt * 8 + 2 * t + j) * Shape::kSumPitch + (m * kRankTile + half * 8 + g) * 4,
          __float_as_uint(sum[m * Shape::kNT + nt][half * 2 + j]));
    }
  }
}

// Adds the warps' sums and writes h: of every row four ranks a lane, rows dealt out to the CTA.
template <int MT, int R>
__device__ __forceinline__ void store_sums(const ShrinkArgs& args, const Work& work,
                                           const SliceFactors& factors, i32 rows, u32 places,
                                           u32 place_bytes, i32 shares) {
  using Shape = StreamShape<MT, R>;
  constexpr int kLanes = MT * kRankTile / 4;  // of a row
  const i32 rank = threadIdx.x % kLanes * 4;
  const RankPlace place(args, factors, work.item.group * MT * kRankTile + rank);
  for (i32 n = threadIdx.x / kLanes; n < rows; n += kThreads / kLanes) {
    const auto share = [&](i32 warp) {
      const uint4 v = load16_shared(places + warp * place_bytes + n * Shape::kSumPitch + rank * 4);
      return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                         __uint_as_float(v.w));
    };
    const float4 sum = shares == 4 ? tree_of<4>(share) : shares == 2 ? tree_of<2>(share) : share(0);
    if (place.slice < 0) continue;
    const i32 row = work.item.part * Shape::kRows + n;
    *reinterpret_cast<float4*>(h_row(args, work.tile, row, place.slice, work.item.split) +
                               place.rank) = sum;
  }
}

}  // namespace

template <typename T, int MT, int R>
__global__ void __launch_bounds__(kThreads, 2) lora_shrink_stream(ShrinkArgs args) {
  using Shape = StreamShape<MT, R>;
  // Each warp's slots; then for each warp its tree's levels, which its sums replace.
  extern __shared__ __align__(128) u8 memory[];
  const i32 warp = threadIdx.x / kWarp;
  const KOrder order(args.in_features);
  const u32 base = shared_address(memory),
            places = base + kWarps * Shape::kSlots * Shape::kSlotBytes;
  const u32 place_bytes = args.sum_bytes;
  if (!args.plan_settled) wait_for_predecessor();
  const u32 items = static_cast<u32>(ShrinkItem::count(args));
  Slots<MT, R> slots(args, order, items, base + warp * Shape::kSlots * Shape::kSlotBytes);
  slots.fill_first(!args.plan_settled);
  // The successor may start once all work before this kernel is done, so that the work list that
  // both read, and y, are complete for it too.
  release_successor();
  const i32 shares = min_int(kWarps, order.ranges / args.splits);
  for (u32 at = blockIdx.x; at < items; at += gridDim.x) {
    const Work work(args, at);
    const SliceFactors factors(args, work.tile);
    const i32 rows = min_int(Shape::kRows, work.tile.rows - work.item.part * Shape::kRows);
    if (rows <= 0 || factors.left_for(args, work.item.group, MT) <= 0) continue;
    const RangeShare share = warp_share(args, order, work.item.split);
    float sum[Shape::kTiles][4];
    const u32 place = places + warp * place_bytes;
    sum_share<T, MT, R>(sum, slots, share, place);
    if (warp < shares) publish<MT, R>(place, sum, rows);
    __syncthreads();
    store_sums<MT, R>(args, work, factors, rows, places, place_bytes, shares);
    __syncthreads();  // the places are free again
  }
  wait_async<0>();
}
