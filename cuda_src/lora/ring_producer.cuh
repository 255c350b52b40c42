// The copying warp of the ring kernel (ring.cu). In: the lists, weights, x and y in global memory.
// Out: filled stages, each announced by its `full` barrier; an item's first stage carries its
// header.
#pragma once
#include "lora/ring_layout.cuh"
#include "ptx/async.cuh"

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
    ItemHead head;
    const u8 *a, *b;          // b at the CTA's first column
    const u8 *x_row, *y_row;  // of this lane's row, y at the CTA's first column
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
    if (lane < work.head.rows) {
      bulk_load(shared.rows(place.stage) + lane * kRowPitch,
                work.x_row + static_cast<i64>(chunks.first) * kChunkBytes, row_bytes(chunks), full);
    }
  }
  // x of `held` stages from `begin` on, whose headers say which chunks they hold: every lane takes
  // rows of other stages, since the first item's x is what all wait for.
  __device__ __forceinline__ void copy_held_x(const RingPlace& begin, i32 held, const Work& work) {
    wait_ahead();
    const u64 row_address = reinterpret_cast<u64>(work.x_row);
    for (i32 base = 0; base < held * work.head.rows; base += kWarp) {
      const i32 i = base + lane, n = i / work.head.rows, row = i - n * work.head.rows;
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
  __device__ __forceinline__ void each_stage(i32 stage_chunks, const Visit& visit) const {
    const i32 own = order.ranges / size;
    for (i32 r = rank_in * own; r < (rank_in + 1) * own; ++r) {
      const i32 end = order.first(r + 1);
      for (i32 c = order.first(r); c < end; c += stage_chunks) {
        visit(Chunks{c, min_int(stage_chunks, end - c)});
      }
    }
  }

  // Places an item's header in the claimed stage.
  __device__ __forceinline__ void write_header(const Work& work) {
    Header<Shape::kTokens>& header = shared.headers[place.stage];
    if (lane == 0) header.item = work.head;
    if (lane < Shape::kTokens) header.y[lane] = reinterpret_cast<u64>(work.y_row);
    __syncwarp();
  }

  // A and x. The first item's first weights are asked for before the kernel ahead has ended; its x
  // comes after that.
  __device__ __forceinline__ void shrink(const Work& work) {
    const AView a{work.a, work.head.rank, args.in_features, true};
    const i32 stage_chunks = RankShare<Shape::kRankTiles>(work.head.rank).stage_chunks();
    const RingPlace begin = place;
    i32 held = 0;
    bool first = true;
    each_stage(stage_chunks, [&](const Chunks& chunks) {
      if (wait && held == shared.stage_count) copy_held_x(begin, held, work);
      claim();
      if (first) write_header(work);
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
      const u32 full = announce(bytes * (work.head.rank + work.head.rows));
      if (lane == 0) {
        bulk_load(shared.weights(place.stage), a.base + a.chunk_offset(chunks.first),
                  bytes * work.head.rank, full);
      }
      if (!wait) copy_x(work, chunks, full);
      place.advance(shared.stage_count);
    });
    if (wait) copy_held_x(begin, held, work);
    // A CTA without chunks still has to say what the item is.
    if (first) header_alone(work);
  }

  __device__ __forceinline__ void header_alone(const Work& work) {
    claim();
    write_header(work);
    announce(0);
    place.advance(shared.stage_count);
  }

  __device__ __forceinline__ void expand(const Work& work) {
    const i32 step = RankShare<Shape::kRankTiles>(work.head.rank).stage_columns;
    const u32 y_rows = work.head.bulk == 2 ? work.head.rows : 0;
    for (i32 c = 0; c < work.head.columns; c += step) {
      const u32 bytes = 2u * min_int(step, work.head.columns - c);
      claim();
      const u32 full = announce(bytes * (work.head.rank + y_rows));
      if (lane == 0) {
        bulk_load(shared.weights(place.stage), work.b + static_cast<i64>(c) * work.head.rank * 2,
                  bytes * work.head.rank, full);
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
    const i32 rank = safe_rank(entry, args.max_rank, args.status);
    if (rank == 0) return;  // for the whole cluster: it reads the same entry

    const ColumnShare columns(args, item, rank_in, size);
    const AView a = a_view(entry, tile, args.start_expert, rank, args.in_features);
    const i32* pairs = Shape::kTokens > kTilePairs ? shared.lists->pair[n % 2] : record.pairs;
    const i32 row = tile.first_row + lane, pair = lane < tile.rows ? pairs[lane] : 0;
    Work work;
    work.a = a.base;
    work.b = b_base(entry, tile, args.start_expert) + static_cast<i64>(columns.first) * rank * 2;
    work.x_row = args.x + 2 * args.ldx * row_index(args, row, pair, args.x_by);
    work.y_row = args.y + 2 * (args.ldy * row_index(args, row, pair, args.y_by) +
                               args.slices.y_column[item.slice] +
                               static_cast<i64>(columns.first) * args.slices.y_stride[item.slice]);
    const bool bulk = a.packed && a.vector() && args.x_vector &&
                      reinterpret_cast<u64>(work.b) % 16 == 0 &&
                      columns.count * (rank & 7) % 8 == 0;
    const i32 through = !bulk ? 0 : args.y_access == kYPiece ? 2 : 1;
    work.head = ItemHead{rank,       entry.scale,   tile.rows,     item.tile,
                         item.slice, columns.first, columns.count, through};
    if (bulk) {
      shrink(work);
      expand(work);
    } else {
      header_alone(work);
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
    if (lane == 0) shared.headers[place.stage].item.rank = 0;
    announce(0);
    if (wait) wait_ahead();
  }
};

#endif
