// Segmented shrink of large batches: the sums of lora/shrink.cu, bit for bit. One work item a CTA:
// (row tile, part of R of its rows, group of MT rank tiles, K split).
//
// In: x, tile records, the slot entries of the slices. Out: h, as lora/shrink.cu.
//
// Where a tile's ranks are many, reading A again for every few rows is what costs: so a CTA's eight
// warps share R rows and all ranks of the group. They copy a chunk of K together into a ring of
// slots, filled ahead across work items, and each multiplies some of the rank tiles by some of the
// rows: every warp has all of the item's K, so its sums are complete and go straight to h.
//
// Lists are fetched an item ahead, and A before the kernel ahead has ended where the work list is
// known to be complete.
#include "lora/shrink_chunks.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kCopyRows = kThreads / 8;  // lines of 128 bytes that the CTA copies at a time
constexpr u32 kTurnBytes = kCopyRows * kChunkBytes;

#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ >= 1200
constexpr bool kManyFit = true;
#else
constexpr bool kManyFit = false;
#endif

template <int MT, int R>
struct WideShape {
  static constexpr int kRankWarps = 4;  // that share the group's ranks
  static constexpr int kRowWarps = kWarps / kRankWarps;
  static constexpr int kOwnTiles = MT / kRankWarps;
  static constexpr int kOwnRows = R / kRowWarps;
  static constexpr int kNT = kOwnRows / 8;
  static constexpr int kTiles = kOwnTiles * kNT;  // products of a warp
  static constexpr u32 kXBytes = R * kChunkBytes;
  static constexpr u32 kSlotBytes = kXBytes + MT * kRankTile * kChunkBytes;
  static constexpr int kSlots = MT == 8 && R == 32 ? 3 : 4;
  static constexpr int kXCopies = R / kCopyRows;  // of a thread
  static constexpr int kACopies = ceil_div(MT * kRankTile, kCopyRows);
  // Two where the compiler finds registers for them.
  static constexpr int kBlocksPerSm = MT == 8 && (R > 32 || !kManyFit) ? 1 : 2;
  static_assert(kOwnRows >= 8 && kXCopies >= 1);
};

// A thread's N lines of x: where registers are short, their rows, else their addresses.
template <int N, bool SHORT>
struct XLines {
  u32 row[N];

  __device__ __forceinline__ void set(const ShrinkArgs&, int i, i64 found) {
    row[i] = static_cast<u32>(found);
  }
  __device__ __forceinline__ const u8* at(const ShrinkArgs& args, int i) const {
    const u32 pitch = static_cast<u32>(args.x_pitch);  // of K, an i32, 2-byte elements
    return args.x + static_cast<u64>(row[i]) * pitch;
  }
};
template <int N>
struct XLines<N, false> {
  const u8* line[N];

  __device__ __forceinline__ void set(const ShrinkArgs& args, int i, i64 found) {
    line[i] = args.x + found * args.x_pitch;
  }
  __device__ __forceinline__ const u8* at(const ShrinkArgs&, int i) const { return line[i]; }
};

// What the CTA copies into its slots, a chunk at a time. Walks the work items ahead of the
// products; the lists of the item after the next are under way. Every warp keeps the same account.
template <int MT, int R>
struct Source {
  using Shape = WideShape<MT, R>;
  static constexpr int kX = Shape::kXCopies, kA = Shape::kACopies;
  static constexpr u32 kPieces = 1u << (kA + kX);

  u32 at;
  i32 place, end;  // of the chunk at hand in their order, and of the last one behind it
  i32 chunk;
  i32 next_rows;  // of the tile of item at + grid
  TileRows next_found;
  SliceFactors next_factors;
  XLines<kX, (kX > 1 && Shape::kBlocksPerSm > 1)> x;  // this thread's, kCopyRows apart
  const u8* a[kA];
  u32 a_step[kA];  // bytes from a chunk to the next
  // A bit for each line of A that is one of the adapter's ranks, then for each line of x that is a
  // row; then whether all of A is packed, on 16-byte boundaries, and K in whole chunks.
  u32 flags;

  __device__ __forceinline__ Source(const ShrinkArgs& args, const KOrder& order, u32 chunks,
                                    u32 items) {
    at = blockIdx.x;
    if (at >= items) return;
    look_up(args, at);
    begin(args, order, chunks, items);
  }
  // Goes to the chunk at a place in the item's order.
  __device__ __forceinline__ void enter(i32 to, u32 chunks) {
    place = to;
    chunk = load2_shared(chunks + 2 * place);
  }
  __device__ __forceinline__ void next(const ShrinkArgs& args, const KOrder& order, u32 chunks,
                                       u32 items) {
    if (++place < end) {
      chunk = load2_shared(chunks + 2 * place);
      return;
    }
    at += gridDim.x;
    begin(args, order, chunks, items);
  }

  // `slot`: this thread's place in it.
  __device__ __forceinline__ void copy_x(const ShrinkArgs& args, u32 slot) const {
    const u32 offset = static_cast<u32>(chunk) * kChunkBytes + threadIdx.x % 8 * 16;
    const i32 in_k = args.in_features - chunk * kChunk - threadIdx.x % 8 * 8;
    if (args.x_vector) {
      const int bytes = in_k > 0 ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kX; ++i) {
        copy16_async_ahead_if(slot + i * kTurnBytes, x.at(args, i) + offset, bytes,
                              (flags >> (kA + i) & 1) != 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kX; ++i) {
        if ((flags >> (kA + i) & 1) == 0) continue;
        store16_shared(slot + i * kTurnBytes, gather8(x.at(args, i) + offset, in_k));
      }
    }
  }
  __device__ __forceinline__ void copy_a(const ShrinkArgs& args, u32 slot) const {
    slot += Shape::kXBytes;
    if ((flags & kPieces) != 0) {
#pragma unroll
      for (int i = 0; i < kA; ++i) {
        const u8* from = a[i] + static_cast<u64>(static_cast<u32>(chunk)) * a_step[i];
        copy16_async_ahead_if(slot + i * kTurnBytes, from, 16, (flags >> i & 1) != 0);
      }
    } else {
      copy_a_apart(args, slot);
    }
  }

 private:
  // Asks for what the lists say of item `index`.
  __device__ __forceinline__ void look_up(const ShrinkArgs& args, u32 index) {
    const Work work(args, index);
    next_rows = work.tile.rows;
    next_found = TileRows(args.rows(), *work.item.record, work.tile, args.x_by);
    next_factors = SliceFactors(args, work.tile);
  }
  // Goes on to the next item that is something to do.
  __device__ __forceinline__ void begin(const ShrinkArgs& args, const KOrder& order, u32 chunks,
                                        u32 items) {
    for (; at < items; at += gridDim.x) {
      const ShrinkItem item(args, at);
      const i32 first_row = item.part * R, rows = next_rows - first_row;
      const TileRows found = next_found;
      const SliceFactors factors = next_factors;
      if (at + gridDim.x < items) look_up(args, at + gridDim.x);
      const RangeShare share = item_share(args, order, item.split);
      place = order.first(share.first);
      end = order.first(share.first + share.count);
      if (rows <= 0 || place == end || factors.left_for(args, item.group, MT) <= 0) continue;
      chunk = load2_shared(chunks + 2 * place);
      find_x(args, found, first_row, rows);
      find_a(args, factors, item.group);
      return;
    }
  }
  __device__ __forceinline__ void find_x(const ShrinkArgs& args, const TileRows& found,
                                         i32 first_row, i32 rows) {
    flags = 0;
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      const i32 line = i * kCopyRows + threadIdx.x / 8, n = first_row + i * kCopyRows;
      x.set(args, i, found.index(first_row + line, n >= kWarp));
      if (line < rows) flags |= 1u << (kA + i);
    }
  }
  __device__ __forceinline__ void find_a(const ShrinkArgs& args, const SliceFactors& factors,
                                         i32 group) {
    const i32 line = threadIdx.x / 8, index = threadIdx.x % 8;
    i32 counted = group * MT + line / kRankTile;  // the rank tile of the first line
    i32 slice[kA], first[kA];
#pragma unroll
    for (int i = 0; i < kA; ++i) slice[i] = first[i] = -1;
    bool pieces = args.in_features % kChunk == 0;
    for (i32 s = 0; s < args.num_slices; ++s) {
      const AView view = factors.view(s, args.in_features);
      pieces &= view.rank == 0 || (view.packed && view.vector());
      const i32 tiles = ceil_div(view.rank, kRankTile);
#pragma unroll
      for (int i = 0; i < kA; ++i) {
        const i32 own = counted + i * (kCopyRows / kRankTile);
        if (own >= 0 && own < tiles) {
          slice[i] = s;
          first[i] = own * kRankTile;
        }
      }
      counted -= tiles;
    }
    if (pieces) flags |= kPieces;
#pragma unroll
    for (int i = 0; i < kA; ++i) {
      const AView view = factors.view(max_int(0, slice[i]), args.in_features);
      const i32 rank = max_int(0, first[i]) + line % kRankTile;
      if (slice[i] >= 0 && rank < view.rank) flags |= 1u << i;
      a_step[i] = static_cast<u32>(view.rank) * kChunkBytes;
      a[i] = view.base + static_cast<u32>(rank) * kChunkBytes + ((index ^ (rank & 7)) << 4);
    }
  }
  // The last chunk of a K that is no multiple of 64, and an A that is not packed or does not lie in
  // pieces.
  __device__ __forceinline__ void copy_a_apart(const ShrinkArgs& args, u32 slot) const {
    const Work work(args, at);
    const SliceFactors factors(args, work.tile);
    const i32 line = threadIdx.x / 8, index = threadIdx.x % 8;
    slot -= slot_piece(line, index);
#pragma unroll 1
    for (i32 mt = 0; mt < MT; ++mt) {
      i32 counted = work.item.group * MT + mt, slice = 0, first = kNoRank;
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
      if (line < kRankTile) {
        const uint4 v = view.load(first + line, chunk, index, vector);
        store16_shared(slot + mt * kRankTile * kChunkBytes + slot_piece(line, index), v);
      }
    }
  }
};

// The CTA's slots: filled ahead of the products.
template <int MT, int R>
struct Slots {
  using Shape = WideShape<MT, R>;
  static constexpr int kAhead = Shape::kSlots - 1;

  const ShrinkArgs& args;
  const KOrder& order;
  u32 chunks;
  u32 items;
  u32 base, own;  // of the slots, and of this thread's place in the first
  i32 fill_at = 0, use_at = 0;
  Source<MT, R> source;

  __device__ __forceinline__ Slots(const ShrinkArgs& args, const KOrder& order, u32 chunks,
                                   u32 items, u32 base)
      : args(args),
        order(order),
        chunks(chunks),
        items(items),
        base(base),
        own(base + slot_piece(threadIdx.x / 8, threadIdx.x % 8)),
        source(args, order, chunks, items) {}

  // Fills one, the one that was used last, if anything is left. Each fill is a group of copies.
  __device__ __forceinline__ void fill() {
    if (source.at < items) {
      const u32 slot = own + fill_at * Shape::kSlotBytes;
      source.copy_a(args, slot);
      source.copy_x(args, slot);
      source.next(args, order, chunks, items);
    }
    commit_async();
    fill_at = fill_at + 1 == Shape::kSlots ? 0 : fill_at + 1;
  }
  // The first ones: A of the first item at once, x when the kernel ahead has ended.
  __device__ __forceinline__ void fill_first(bool waited) {
    const i32 here = source.place;
    i32 early = 0;
    if (!waited) {
#pragma unroll 1
      for (; early < kAhead && source.at < items && here + early < source.end; ++early) {
        source.enter(here + early, chunks);
        source.copy_a(args, own + early * Shape::kSlotBytes);
      }
      wait_for_predecessor();
      if (early > 0) source.enter(here, chunks);
    }
#pragma unroll 1
    for (i32 i = 0; i < kAhead; ++i) {
      if (source.at < items) {
        const u32 slot = own + i * Shape::kSlotBytes;
        if (i >= early) source.copy_a(args, slot);
        source.copy_x(args, slot);
        source.next(args, order, chunks, items);
      }
      commit_async();
    }
    fill_at = kAhead;
  }
  // The next slot's address, once all threads' parts of it are there; nobody uses the one before
  // any longer, so it may be filled again.
  __device__ __forceinline__ u32 use() {
    wait_async<kAhead - 1>();
    __syncthreads();
    const u32 slot = base + use_at * Shape::kSlotBytes;
    use_at = use_at + 1 == Shape::kSlots ? 0 : use_at + 1;
    return slot;
  }
};

// The products of a warp, and where its rows and ranks lie in a slot.
template <typename T, int MT, int R>
struct Products {
  using Shape = WideShape<MT, R>;
  static constexpr int kNT = Shape::kNT, kTiles = Shape::kTiles;

  u32 x_line, a_line;  // of this lane

  // Those of one chunk, unit by unit: the second one's pieces are in the other half of the line.
  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4], u32 slot) const {
    const u32 zero = unknown_zero();
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const u32 half = u * kChunkBytes / 2;
      multiply_unit<T, Shape::kOwnTiles, kNT>(acc, (slot + x_line) ^ half, (slot + a_line) ^ half,
                                              zero);
    }
  }
  __device__ __forceinline__ void next_chunk(float (&acc)[kTiles][4], Slots<MT, R>& slots) const {
    const u32 slot = slots.use();
    multiply(acc, slot);
    slots.fill();
  }
  // A chain of a range, from zero.
  __device__ __forceinline__ void sum_chain(float (&acc)[kTiles][4], Slots<MT, R>& slots, i32 chain,
                                            i32 end) const {
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) acc[i / 4][i % 4] = 0.f;
    next_chunk(acc, slots);
#pragma unroll 1
    for (i32 chunk = chain + kChains; chunk < end; chunk += kChains) next_chunk(acc, slots);
  }

  // An item's sums; `levels`: of this warp's K tree.
  __device__ __forceinline__ void sum_item(float (&sum)[kTiles][4], Slots<MT, R>& slots,
                                           const RangeShare& share, u32 levels) const {
    const Tree<kTiles> tree{levels + threadIdx.x % kWarp * 16, 31 - __clz(share.count)};
    for (i32 leaf = 0; leaf < share.count; ++leaf) {
      const i32 first = slots.order.first(share.first + leaf);
      const i32 end = slots.order.first(share.first + leaf + 1);
      if (first < end) {
        sum_chain(sum, slots, first, end);
      } else {
#pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] = 0.f;
      }
      // A chain without chunks is zero, and no sum is -0, so it may be left out.
#pragma unroll 1
      for (i32 chain = first + 1; chain < min_int(end, first + kChains); ++chain) {
        float acc[kTiles][4];
        sum_chain(acc, slots, chain, end);
#pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] += acc[i / 4][i % 4];
      }
      tree.add(leaf, sum);
    }
  }
};

// Writes h: this warp's rank tiles and rows.
template <int MT, int R>
__device__ __forceinline__ void store_sums(const ShrinkArgs& args, const Work& work,
                                           const SliceFactors& factors, i32 rows,
                                           const float (&sum)[WideShape<MT, R>::kTiles][4]) {
  using Shape = WideShape<MT, R>;
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const i32 first_rank =
      (work.item.group * MT + warp % Shape::kRankWarps * Shape::kOwnTiles) * kRankTile + g;
  const i32 first_row = work.item.part * R + warp / Shape::kRankWarps * Shape::kOwnRows + 2 * t;
#pragma unroll
  for (int half = 0; half < 2 * Shape::kOwnTiles; ++half) {
    const RankPlace place(args, factors, first_rank + half * 8);
    if (place.slice < 0) continue;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kNT; ++i) {
      const i32 n = i / 2 * 8 + i % 2;
      if (2 * t + n >= rows) continue;
      h_row(args, work.tile, first_row + n, place.slice, work.item.split)[place.rank] =
          sum[half / 2 * Shape::kNT + i / 2][half % 2 * 2 + i % 2];
    }
  }
}

}  // namespace

template <typename T, int MT, int R>
__global__ void __launch_bounds__(kThreads, (WideShape<MT, R>::kBlocksPerSm))
    lora_shrink_wide(ShrinkArgs args) {
  using Shape = WideShape<MT, R>;
  // The slots; for each warp the levels of its tree; the chunks in their order.
  extern __shared__ __align__(128) u8 memory[];
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const KOrder order(args.in_features);
  constexpr u32 kRoom = Shape::kSlots * Shape::kSlotBytes;
  const u32 base = shared_address(memory), levels = base + kRoom + warp * args.sum_bytes;
  const u32 chunks = base + kRoom + kWarps * args.sum_bytes;
  list_chunks<kThreads>(chunks, order);
  __syncthreads();
  if (!args.plan_settled) wait_for_predecessor();
  const u32 items = static_cast<u32>(ShrinkItem::count(args));
  Slots<MT, R> slots(args, order, chunks, items, base);
  slots.fill_first(!args.plan_settled);
  // The successor may start once all work before this kernel is done, so that the work list that
  // both read, and y, are complete for it too.
  release_successor();
  const i32 rank_warp = warp % Shape::kRankWarps, row_warp = warp / Shape::kRankWarps;
  const u32 piece = slot_piece(g, t);
  Products<T, MT, R> products{
      row_warp * Shape::kOwnRows * kChunkBytes + piece,
      Shape::kXBytes + rank_warp * Shape::kOwnTiles * kRankTile * kChunkBytes + piece};
  for (u32 at = blockIdx.x; at < items; at += gridDim.x) {
    const Work work(args, at);
    const SliceFactors factors(args, work.tile);
    const i32 rows = min_int(R, work.tile.rows - work.item.part * R);
    if (rows <= 0 || factors.left_for(args, work.item.group, MT) <= 0) continue;
    const i32 own_rows = rows - row_warp * Shape::kOwnRows;
    float sum[Shape::kTiles][4];
    products.sum_item(sum, slots, item_share(args, order, work.item.split), levels);
    store_sums<MT, R>(args, work, factors, own_rows, sum);
  }
  wait_async<0>();
}
