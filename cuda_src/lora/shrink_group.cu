// Segmented shrink of large batches by warpgroup products: the sums of lora/shrink.cu, bit for bit.
// One work item a CTA: (row tile, part of R of its rows, group of eight rank tiles, K split).
// sm_90a only.
//
// In: x, tile records, the slot entries of the slices. Out: h, as lora/shrink.cu.
//
// Copying warps fill a ring of slots with a chunk of K each, across work items without a pause, a
// team of them one slot at a time; two warpgroups multiply, each half of the ranks by all rows. A
// comes by bulk copies, as it is packed, and goes on to registers, where lanes choose their words.
// x is taken from shared memory by the product itself, so its words lie there in the canonical
// order of K (k_order.cuh): the copying warps load pieces into registers and store each of their
// words in its place.
//
// Memory order: a slot is full when each warp of the team has stored its words, fenced them for the
// asynchronous proxy that the product reads them by, and arrived, and the bytes of A have come; it
// is empty when every multiplying warp has waited for its products and arrived.
//
// A is asked for before the kernel ahead has ended where the work list is known to be complete.
#include "lora/shrink_chunks.cuh"
#include "mma/wgmma.cuh"
#include "ptx/async.cuh"
#include "ptx/slot_ring.cuh"

namespace {

constexpr int kUsers = 8;    // warps that multiply, a rank tile each
constexpr int kCopiers = 8;  // warps that copy
constexpr int kTeam = 2;     // of them, that fill a slot together
constexpr int kTeams = kCopiers / kTeam;
constexpr int kThreads = (kUsers + kCopiers) * kWarp;
constexpr int kTurnRows = 4;    // lines of x that a copier loads at a time
constexpr int kMostSlots = 16;  // and at least kTeams
constexpr u32 kTurnBytes = kTurnRows * kChunkBytes;
constexpr u32 kSlotAlign = 1024;  // what the product wants of x's address
constexpr u32 kABytes = kUsers * kRankTile * kChunkBytes;

template <int R>
struct GroupShape {
  static constexpr int kNT = R / 8;
  static constexpr int kTeamRows = R / kTeam;  // of each
  static constexpr int kTurns = kTeamRows / kTurnRows;
  static constexpr u32 kXBytes = R * kChunkBytes;
  static constexpr u32 kSlotBytes = kXBytes + kABytes;
  static_assert(kSlotBytes % kSlotAlign == 0 && kTeamRows % 8 == 0);
};

// A work item, and the A of its tile's adapter.
struct Found : Work {
  u32 index;
  SliceFactors factors;

  __device__ __forceinline__ Found(const ShrinkArgs& args, u32 at)
      : Work(args, at), index(at), factors(args, tile) {}
};

// Calls f(found, share, rows) for everything that this CTA does, in order.
template <int R, typename F>
__device__ __forceinline__ void each_item(const ShrinkArgs& args, const KOrder& order, const F& f) {
  const u32 items = static_cast<u32>(ShrinkItem::count(args));
#pragma unroll 1
  for (u32 at = blockIdx.x; at < items; at += gridDim.x) {
    const Found found(args, at);
    const i32 rows = min_int(R, found.tile.rows - found.item.part * R);
    if (rows <= 0 || found.factors.left_for(args, found.item.group, kUsers) <= 0) continue;
    f(found, item_share(args, order, found.item.split), rows);
  }
}

// What a lane brings of A, chunk for chunk of an item: lane s the rows of slice s.
struct ACopy {
  const u8* from;
  u32 to, step, bytes;  // `to`: from A's place in a slot; `step`: from a chunk to the next
  u32 total;            // of all lanes
  bool bulk;            // whether A lies in pieces, packed in whole chunks

  __device__ __forceinline__ ACopy(const ShrinkArgs& args, const Found& found) {
    const i32 lane = threadIdx.x % kWarp;
    const SliceFactors& factors = found.factors;
    const i32 rank = lane < args.num_slices ? factors.rank : 0;
    const i32 tiles = ceil_div(rank, kRankTile);
    i32 before = -found.item.group * kUsers;  // the group's tiles of the slices before
    for (i32 s = 0; s < args.num_slices; ++s) {
      const i32 others = __shfl_sync(kFullMask, tiles, s);
      if (s < lane) before += others;
    }
    const i32 first = max_int(0, before), end = min_int(kUsers, before + tiles);
    const i32 line = (first - before) * kRankTile;
    const i32 lines = max_int(0, min_int(rank, (end - before) * kRankTile) - line);
    const bool pieces = rank == 0 || (factors.packed && factors.a % 16 == 0);
    bulk = !__any_sync(kFullMask, !pieces) && args.in_features % kChunk == 0;
    from = reinterpret_cast<const u8*>(factors.a) + line * kChunkBytes;
    to = first * kRankTile * kChunkBytes;
    step = static_cast<u32>(rank) * kChunkBytes;
    bytes = lines * kChunkBytes;
    total = __reduce_add_sync(kFullMask, bytes);
  }
  // By a whole warp.
  __device__ __forceinline__ void start(u32 place, i32 chunk, u32 full) const {
    if (threadIdx.x % kWarp == 0) mbarrier_expect(full, total);
    if (bytes > 0) {
      bulk_load(place + to, from + static_cast<u64>(static_cast<u32>(chunk)) * step, bytes, full);
    }
  }
};

// Where A is not packed or does not lie in pieces, in any slice, or K is no multiple of 64: a chunk
// of A by a whole warp.
__device__ __forceinline__ void copy_a_apart(const ShrinkArgs& args, u32 index, i32 chunk,
                                             u32 place) {
  const i32 line = threadIdx.x % kWarp / 8, piece = threadIdx.x % 8;
  const Found found(args, index);
#pragma unroll 1
  for (i32 mt = 0; mt < kUsers; ++mt) {
    const RankTiles<1> tile(args, found.factors, found.item.group * kUsers + mt);
    const bool vector = tile.vector();
#pragma unroll 1
    for (i32 n = line; n < kRankTile; n += kWarp / 8) {
      const uint4 v = tile.a[0].load(tile.first[0] + n, chunk, piece, vector);
      store16_shared(place + swizzled_piece(mt * kRankTile + n, piece), v);
    }
  }
}

// The rows of x of an item that a lane loads, kTurnRows apart.
template <int R>
struct XCopy {
  static constexpr int kTurns = GroupShape<R>::kTurns;
  u32 row[kTurns];
  u32 valid = 0;  // a bit for each that the tile has

  __device__ __forceinline__ XCopy(const ShrinkArgs& args, const Found& found, i32 rows,
                                   i32 first) {
    const TileRows lists(args.rows(), *found.item.record, found.tile, args.x_by);
    const i32 line = threadIdx.x % kWarp / 8, part = found.item.part * R;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const i32 n = first + i * kTurnRows;
      row[i] = static_cast<u32>(lists.index(part + n + line, part + n >= kWarp));
      if (n + line < rows) valid |= 1u << i;
    }
  }
  __device__ __forceinline__ const u8* at(const ShrinkArgs& args, int i) const {
    const u32 pitch = static_cast<u32>(args.x_pitch);  // of K, an i32, 2-byte elements
    return args.x + static_cast<u64>(row[i]) * pitch;
  }
  // This lane's pieces of a chunk; zeros for rows that there are not.
  __device__ __forceinline__ void load(uint4 (&v)[kTurns], const ShrinkArgs& args,
                                       i32 chunk) const {
    const i32 piece = threadIdx.x % 8;
    if (args.x_vector) {
      const bool in_k = chunk * kChunk + piece * 8 < args.in_features;
      const u32 offset = static_cast<u32>(chunk) * kChunkBytes + piece * 16;
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        v[i] = load16_rw_if(at(args, i) + offset, in_k && (valid >> i & 1) != 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const u8* own = (valid >> i & 1) != 0 ? at(args, i) : nullptr;
        v[i] = load_x(own, args.in_features, chunk, piece, false);
      }
    }
  }
};

// Word q of a unit's piece p is word p of the unit's piece q of the same line.
template <int N>
__device__ __forceinline__ void store_words(const uint4 (&v)[N], u32 lines) {
  const i32 line = threadIdx.x % kWarp / 8, piece = threadIdx.x % 8;
  const u32 to = lines + swizzled_piece(line, piece & 4) + (piece & 3) * 4;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const u32 own = (to ^ ((i & 1) << 6)) + i * kTurnBytes;  // every second turn has lines 4 to 7
    store4_shared(own, v[i].x);
    store4_shared(own ^ 16, v[i].y);
    store4_shared(own ^ 32, v[i].z);
    store4_shared(own ^ 48, v[i].w);
  }
}

// Fills the slots: every team some of them, in turn. `chunks`: their list, in the order of sums.
template <int R>
__device__ __forceinline__ void copy(const ShrinkArgs& args, const KOrder& order, SlotRing ring,
                                     u32 chunks) {
  using Shape = GroupShape<R>;
  const i32 copier = threadIdx.x / kWarp - kUsers;
  const i32 team = copier / kTeam, first_row = copier % kTeam * Shape::kTeamRows;
  const bool brings_a = first_row == 0;
  i32 turn = team;  // slots until this team's next one
  Predecessor predecessor;
  each_item<R>(args, order, [&](const Found& found, const RangeShare& share, i32 rows) {
    const u32 index = found.index;
    const ACopy a(args, found);
    const XCopy<R> x(args, found, rows, first_row);
    const i32 end = order.first(share.first + share.count);
    i32 at = order.first(share.first) + turn;
#pragma unroll 1
    for (; at < end; at += kTeams) {
      ring.skip(turn);
      turn = kTeams - 1;
      const i32 chunk = load2_shared(chunks + 2 * at);
      uint4 v[Shape::kTurns];
      const bool ahead = predecessor.waited;
      if (ahead) x.load(v, args, chunk);
      const u32 slot = ring.acquire();
      if (brings_a && a.bulk) {
        a.start(slot + Shape::kXBytes, chunk, ring.full());
      } else if (brings_a) {
        copy_a_apart(args, index, chunk, slot + Shape::kXBytes);
      }
      if (!ahead) {
        predecessor.wait();
        x.load(v, args, chunk);
      }
      store_words(v, slot + first_row * kChunkBytes);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % kWarp == 0) {
        mbarrier_arrive(ring.full());
        if (brings_a && !a.bulk) mbarrier_arrive(ring.full());
      }
      ring.advance();
    }
    ring.skip(end - (at - turn));
    turn = at - end;
  });
  predecessor.wait();
}

// The products of a warp: its rank tile by the part's rows.
template <typename T, int R>
struct Products {
  static constexpr int kNT = GroupShape<R>::kNT;
  const KOrder& order;
  u32 a_line;  // of this lane's first piece of A in a slot

  // A of the four steps of a chunk. Lanes of odd g take the second unit first, so that the eight
  // lanes of a load use different banks.
  __device__ __forceinline__ void load_a(u32 (&a)[4][4], u32 slot) const {
    const u32 line = slot + a_line;
    const uint4 top[2] = {load16_shared(line), load16_shared(line ^ 64)};
    const uint4 bottom[2] = {load16_shared(line + 8 * kChunkBytes),
                             load16_shared((line ^ 64) + 8 * kChunkBytes)};
    const bool odd = threadIdx.x >> 2 & 1;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4 &t = top[u], &b = bottom[u], &t2 = top[1 - u], &b2 = bottom[1 - u];
      a[2 * u][0] = odd ? t2.x : t.x;
      a[2 * u][1] = odd ? b2.x : b.x;
      a[2 * u][2] = odd ? t2.y : t.y;
      a[2 * u][3] = odd ? b2.y : b.y;
      a[2 * u + 1][0] = odd ? t2.z : t.z;
      a[2 * u + 1][1] = odd ? b2.z : b.z;
      a[2 * u + 1][2] = odd ? t2.w : t.w;
      a[2 * u + 1][3] = odd ? b2.w : b.w;
    }
  }
  // The next chunk's, from zero if FRESH.
  template <bool FRESH>
  __device__ __forceinline__ void next_chunk(float (&acc)[kNT][4], SlotRing& ring) const {
    const u32 slot = ring.wait();
    u32 a[4][4];
    load_a(a, slot);
    wgmma_fence();
    Wgmma<T, kNT>::template run<FRESH>(acc, a[0], wgmma_operand(slot, 0));
#pragma unroll
    for (int step = 1; step < 4; ++step) {
      Wgmma<T, kNT>::template run<false>(acc, a[step], wgmma_operand(slot, step));
    }
    wgmma_commit();
    wgmma_wait(acc);
    ring.release();
  }
  // An item's sums; `levels`: of this warp's K tree.
  __device__ __forceinline__ void sum_item(float (&sum)[kNT][4], SlotRing& ring,
                                           const RangeShare& share, u32 levels) const {
    const Tree<kNT> tree{levels + threadIdx.x % kWarp * 16, 31 - __clz(share.count)};
#pragma unroll 1
    for (i32 leaf = 0; leaf < share.count; ++leaf) {
      const i32 first = order.first(share.first + leaf);
      const i32 end = order.first(share.first + leaf + 1);
#pragma unroll
      for (int i = 0; i < kNT * 4; ++i) sum[i / 4][i % 4] = 0.f;
      // No sum of chains is -0, so zero may come before the first, and chains without chunks be
      // left out.
#pragma unroll 1
      for (i32 chain = first; chain < min_int(end, first + kChains); ++chain) {
        float acc[kNT][4];
        next_chunk<true>(acc, ring);
#pragma unroll 1
        for (i32 chunk = chain + kChains; chunk < end; chunk += kChains) {
          next_chunk<false>(acc, ring);
        }
#pragma unroll
        for (int i = 0; i < kNT * 4; ++i) sum[i / 4][i % 4] += acc[i / 4][i % 4];
      }
      tree.add(leaf, sum);
    }
  }
};

// Writes h of a lane's two ranks, counted over the rank tiles of all slices, from `row` of the tile
// on; `rows`: that there are from there.
template <int kNT>
__device__ __forceinline__ void store_sums(const ShrinkArgs& args, const Found& found, i32 rank,
                                           i32 row, i32 rows, const float (&sum)[kNT][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RankPlace place(args, found.factors, rank + half * 8);
    if (place.slice < 0) continue;
#pragma unroll
    for (int i = 0; i < 2 * kNT; ++i) {
      const i32 n = i / 2 * 8 + i % 2;
      if (n >= rows) continue;
      h_row(args, found.tile, row + n, place.slice, found.item.split)[place.rank] =
          sum[i / 2][half * 2 + i % 2];
    }
  }
}

template <typename T, int R>
__device__ __forceinline__ void multiply(const ShrinkArgs& args, const KOrder& order, SlotRing ring,
                                         u32 levels) {
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const u32 own = GroupShape<R>::kXBytes + warp * kRankTile * kChunkBytes;
  const Products<T, R> products{order, own + swizzled_piece(g, (g & 1) * 4 + t)};
  // The successor may start once all work before this kernel is done, so that the work list that
  // both read, and y, are complete for it too.
  Predecessor predecessor;
  each_item<R>(args, order, [&](const Found& found, const RangeShare& share, i32 rows) {
    predecessor.wait();
    float sum[GroupShape<R>::kNT][4];
    products.sum_item(sum, ring, share, levels);
    const i32 rank = (found.item.group * kUsers + warp) * kRankTile + g;
    store_sums(args, found, rank, found.item.part * R + 2 * t, rows - 2 * t, sum);
  });
  predecessor.wait();
}

}  // namespace

template <typename T, int R>
__global__ void __launch_bounds__(kThreads, 1) lora_shrink_group(ShrinkArgs args) {
  using Shape = GroupShape<R>;
  // From an aligned address on: the slots; for each multiplying warp the levels of its tree; the
  // chunks in their order.
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[2 * kMostSlots];
  const i32 warp = threadIdx.x / kWarp;
  const KOrder order(args.in_features);
  const u32 base = (shared_address(memory) + kSlotAlign - 1) & ~(kSlotAlign - 1);
  const u32 levels = base + args.slots * Shape::kSlotBytes;
  const u32 chunks = levels + kUsers * args.sum_bytes;
  SlotRing ring(shared_address(barriers), base, Shape::kSlotBytes, args.slots);
  list_chunks<kThreads>(chunks, order);
  if (threadIdx.x == 0) {
    ring.init(kTeam + 1, kUsers);
    fence_mbarrier_init();  // for the bulk copies
  }
  __syncthreads();
  if (!args.plan_settled) wait_for_predecessor();
  if (warp < kUsers) {
    multiply<T, R>(args, order, ring, levels + warp * args.sum_bytes);
  } else {
    copy<R>(args, order, ring, chunks);
  }
}
