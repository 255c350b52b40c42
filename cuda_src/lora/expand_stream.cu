// Segmented expand of large batches, ranks up to 16 · KS where lora/expand_direct.cu takes fewer:
// the update of lora/expand.cu, bit for bit, at the rate of the memory.
//
// In: h of the shrink ahead, the same tiles (of up to 64 rows) and slot entries, y. Out: y of the
// tiles' rows; no other byte of y is written, so rows of no adapter keep their bits.
//
// Work is counted in blocks of 128 columns of a tile; a CTA takes runs of neighbouring ones,
// reading h once per tile and slice of a run. One warp copies y and one copies B into a ring of
// shared memory, across tiles without a pause. A slot holds up to 64 rows of 128 columns, or fewer
// rows of as many more columns, so that small tiles keep as much in flight. Each of four warps owns
// 16 rows, or the same rows as another and other columns; it holds their h as 2-byte terms in
// registers and writes y straight to memory.
//
// The shrink waits for all work before it, so only h may still be missing when this kernel starts:
// the copying warps never wait, the others before they read h.
#include "lora/expand.cuh"
#include "ptx/slot_ring.cuh"

namespace {

constexpr int kUsers = 4;
constexpr int kThreads = (kUsers + 2) * kWarp;
constexpr int kMaxSlots = 16;
constexpr int kWarpRows = 16;
constexpr int kNT = kWarpRows / 8;
constexpr int kRunColumns = 128;
constexpr int kLongRun = 8;  // blocks from which on a CTA's share is cut into several runs
constexpr int kManyRuns = 4;
constexpr u32 kYBytes = 64 * kRunColumns * 2;
constexpr u32 kPieceBytes = 16;
constexpr u32 kTokenPairBytes = kWarp * kPieceBytes;  // a warp's pieces of tokens 2t or 2t + 1
// Of 64 columns of a warp's rows: in a slot column by column, row group by row group.
constexpr u32 kWarpBytes = 2 * kNT * kTokenPairBytes;

// A tile's part in a run: one slice, neighbouring columns.
struct Segment {
  const TileRecord* record;
  Tile tile;
  i32 slice;
  i32 first, columns;  // of the slice
  i32 rank;
  i32 row_groups;    // of 16 rows: 1, 2 or 4
  i32 slot_columns;  // that a slot takes, a multiple of 128
  float scale;
  const u8* b;

  __device__ __forceinline__ i32 steps() const { return ceil_div(rank, kRankStep); }
};

// Column blocks of all tiles, and of a run. The host launches this kernel only where 31 bits number
// them.
struct Runs {
  u32 total, length;

  __device__ __forceinline__ explicit Runs(const ExpandArgs& args) {
    const u32 per_tile = args.slices.first_block[args.num_slices];
    total = *args.tile_count * per_tile;
    const u32 share = (total + gridDim.x - 1) / gridDim.x;
    if (share < kManyRuns * kLongRun) {
      // Equal shares, in one run or a few.
      const u32 runs = gridDim.x * max_int(1, share / kLongRun);
      length = (total + runs - 1) / runs;
    } else {
      // Shares are even anyway: runs that keep to the tiles where they can.
      const u32 parts = max_int(1, per_tile / kLongRun);
      length = (per_tile + parts - 1) / parts;
      length *= max_int(1, kLongRun / length);
    }
  }
};

// Calls f(segment) for everything that this CTA does, in order.
template <typename F>
__device__ __forceinline__ void each_segment(const ExpandArgs& args, const volatile Runs& runs,
                                             const F& f) {
  const SliceColumns& slices = args.slices;
  const i32 per_tile = slices.first_block[args.num_slices];
  for (u32 at = blockIdx.x; at * runs.length < runs.total; at += gridDim.x) {
    const u32 start = at * runs.length;
    const u32 tile_index = start / static_cast<u32>(per_tile);
    i32 block = start - tile_index * per_tile;
    i32 left = min_int(runs.length, runs.total - start);
    const TileRecord* record = args.tiles + tile_index;
    while (left > 0) {
      Segment s;
      s.record = record;
      s.tile = record->head;
      s.slice = slice_of_block(slices, block);
      const i32 end = slices.first_block[s.slice + 1];
      const i32 count = min_int(left, end - block);
      s.first = (block - slices.first_block[s.slice]) * kRunColumns;
      s.columns = min_int(count * kRunColumns, slices.out_features[s.slice] - s.first);
      left -= count;
      block += count;
      if (block == per_tile) {
        block = 0;
        ++record;
      }
      const SlotEntry entry =
          load_entry(args.entries, s.slice, s.tile.slot, args.max_loras, args.status);
      s.rank = safe_rank(entry, args.max_rank, nullptr);  // the shrink has reported it
      if (s.rank == 0) continue;
      s.scale = entry.scale;
      s.b = b_base(entry, s.tile, args.start_expert) + static_cast<i64>(s.first) * s.rank * 2;
      s.row_groups = s.tile.rows <= kWarpRows ? 1 : s.tile.rows <= 2 * kWarpRows ? 2 : 4;
      const i32 room = args.b_bytes / (kRunColumns * s.steps() * kRankStep * 2);
      s.slot_columns = kRunColumns * min_int(kUsers / s.row_groups, room);
      f(s);
    }
  }
}

// Where B lies in a slot: 8 columns after the other, of each of them the rank steps, of a step the
// 32 bytes of each column. Within four columns the order is turned by the number of the eight, so
// that the lanes of a product's load use different banks.
constexpr u32 kStepBytes = 8 * kRankStep * 2;
__device__ __forceinline__ u32 b_place(i32 column, i32 step, i32 steps) {
  const i32 eight = column >> 3;
  return (eight * steps + step) * kStepBytes + ((column & 7) ^ (eight & 3)) * (kRankStep * 2);
}

// A warp copies four columns at a time, their steps one after the other.
__device__ __forceinline__ void copy_b(const ExpandArgs& args, const Runs& runs, SlotRing ring) {
  const i32 lane = threadIdx.x % kWarp, half = lane & 1, inner = lane >> 1 & 3;
  each_segment(args, runs, [&](const Segment& s) {
    const i32 steps = s.steps();
    const u32 inverse = (65536 + steps - 1) / steps;  // exact for what a slot holds
    const bool vector = s.rank % 8 == 0 && reinterpret_cast<u64>(s.b) % 16 == 0;
    for (i32 done = 0; done < s.columns; done += s.slot_columns) {
      const u32 slot = ring.acquire() + kYBytes + half * kPieceBytes;
      const i32 columns = min_int(s.slot_columns, s.columns - done);
      const u8* b = s.b + static_cast<i64>(done) * s.rank * 2;
      const i32 quads = ceil_div(columns, 4) * steps;
#pragma unroll 4
      for (i32 at = lane >> 3; at < quads; at += kWarp / 8) {
        const i32 quad = (at * inverse) >> 16, step = at - quad * steps;
        const i32 column = quad * 4 + inner, rank = step * kRankStep + half * 8;
        const u32 place = slot + b_place(column, step, steps);
        const u8* address = b + (column * s.rank + rank) * 2;
        const i32 ranks = column < columns ? s.rank - rank : 0;  // beyond them zeros
        if (vector) {
          copy16_async(place, address, ranks > 0 ? 16 : 0);
        } else {
          store16_shared(place, gather8(address, ranks));
        }
      }
      ring.commit(!vector);
    }
  });
  wait_async<0>();
}

// Pieces as the warps that add will hold them; what cannot be had in pieces is left to them.
template <typename T>
__device__ __forceinline__ void copy_y(const ExpandArgs& args, const Runs& runs, SlotRing ring) {
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const u64 policy = evict_first_policy();
  each_segment(args, runs, [&](const Segment& s) {
    const TileRows found(args.rows(), *s.record, s.tile, args.y_by);
    const i64 first = args.slices.y_column[s.slice] + s.first + 8 * g;
    const i32 own_rows = s.tile.rows - 2 * t;
    const T* rows[kUsers][2 * kNT];
#pragma unroll
    for (int group = 0; group < kUsers; ++group) {
#pragma unroll
      for (int i = 0; i < 2 * kNT; ++i) {
        const i32 n = group * kWarpRows + i / 2 * 8 + 2 * t + i % 2;
        const i64 row = found.index(n, group * kWarpRows >= kWarp);
        rows[group][i] = reinterpret_cast<const T*>(args.y) + row * args.ldy + first;
      }
    }
    for (i32 done = 0; done < s.columns; done += s.slot_columns) {
      const u32 slot = ring.acquire() + lane * kPieceBytes;
      const i32 end = min_int(s.slot_columns, s.columns - done), own_columns = end - 8 * g;
#pragma unroll
      for (int group = 0; group < kUsers; ++group) {
        if (!args.y_vector || group * kWarpRows >= s.tile.rows) break;
        u32 place = slot + group * kWarpBytes;
        for (i32 c = 0; c < end; c += kBlockColumns) {
#pragma unroll
          for (int i = 0; i < 2 * kNT; ++i) {
            const bool valid = group * kWarpRows + i / 2 * 8 + i % 2 < own_rows;
            copy16_async_if(place + i * kTokenPairBytes, rows[group][i] + done + c,
                            valid && c + 8 <= own_columns, policy);
          }
          place += s.row_groups * kWarpBytes;
        }
      }
      ring.commit(false);
    }
  });
  wait_async<0>();
}

// One rank step of a lane's 8 columns of B.
struct Weights {
  Quad quad[kMTiles];

  // `step`: the address of this lane's ranks in it; `turn` as in b_place.
  __device__ __forceinline__ void load(u32 step, u32 turn) {
    uint2 column[2 * kMTiles];
#pragma unroll
    for (int c = 0; c < 2 * kMTiles; ++c) {
      column[c] = load8_shared(step + ((c & 4) + ((c & 3) ^ turn)) * (kRankStep * 2));
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      quad[m] = Quad(column[2 * m], column[2 * m + 1], unknown_zero());
    }
  }
};

// Token n's ranks 4t .. 4t + 3 of every step. Up to four splits, which the host gives large batches
// at most, are loaded all at once.
template <int KS>
__device__ __forceinline__ void load_hidden(float4 (&h)[KS], const Hidden& hidden, i32 n) {
  const i32 k0 = 4 * (threadIdx.x & 3), ranks = n < hidden.rows ? hidden.rank - k0 : 0;
  const float* row = hidden.row(n) + k0;
  if (hidden.splits == 1) {
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      h[k] = load_floats(row + k * kRankStep, ranks > k * kRankStep);
    }
  } else {
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      h[k] = hidden.sum4(row + k * kRankStep, ranks > k * kRankStep);
    }
  }
#pragma unroll
  for (int k = 0; k < KS; ++k) h[k] = hidden.own(h[k], k * kRankStep + k0);
}

// The 2-byte terms of a token's h, and the exponent by which fp16 scales it.
template <typename T, int KS>
__device__ __forceinline__ void hidden_terms(Terms (&terms)[KS], i32& exponent,
                                             const Hidden& hidden, i32 n) {
  float4 h[KS];
  load_hidden(h, hidden, n);
  if (IsFp16<T>::value) {
    float row_max = 0.f;
#pragma unroll
    for (int k = 0; k < KS; ++k) row_max = fmaxf(row_max, max_abs(h[k]));
    exponent = fp16_exponent(max_of_token(row_max));
  }
#pragma unroll
  for (int k = 0; k < KS; ++k) terms[k] = split_terms<T>(h[k], power_of_two(exponent));
}

template <typename T, int KS>
__device__ __forceinline__ void add_delta(const ExpandArgs& args, const Runs& runs, SlotRing ring) {
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const u32 turn = g & 3;
  each_segment(args, runs, [&](const Segment& s) {
    const i32 group = warp % s.row_groups, row0 = group * kWarpRows;
    const i32 steps = s.steps();
    const Hidden hidden(args, s.tile, s.slice, s.rank);
    T* rows[2 * kNT];  // null beyond the tile
    i32 exponent[kNT] = {};
    Terms terms[kNT][KS];
#pragma unroll
    for (int nt = 0; nt < kNT; ++nt) {
      hidden_terms<T>(terms[nt], exponent[nt], hidden, row0 + nt * 8 + g);
    }
    const TileRows found(args.rows(), *s.record, s.tile, args.y_by);
#pragma unroll
    for (int i = 0; i < 2 * kNT; ++i) {
      const i32 n = row0 + i / 2 * 8 + 2 * t + i % 2;
      const i64 row = found.index(n, row0 >= kWarp);
      rows[i] = n < s.tile.rows ? reinterpret_cast<T*>(args.y) + row * args.ldy : nullptr;
    }
    const i32 stride = args.slices.y_stride[s.slice];
    for (i32 done = 0; done < s.columns; done += s.slot_columns) {
      const u32 slot = ring.wait();
      const i32 end = min_int(s.slot_columns, s.columns - done);
      for (i32 block = warp / s.row_groups; block * kBlockColumns < end && row0 < s.tile.rows;
           block += kUsers / s.row_groups) {
        const i32 column = block * kBlockColumns + 8 * g, columns = end - column;
        const u32 b = slot + kYBytes + (column >> 3) * steps * kStepBytes + t * 8;
        float acc[kNT][kMTiles][4] = {};
#pragma unroll
        for (int k = 0; k < KS; ++k) {
          if (k >= steps) break;
          Weights weights;
          weights.load(b + k * kStepBytes, turn);
#pragma unroll
          for (int i = 0; i < kMTiles * kNT; ++i) {
            const int mt = i / kNT, nt = i % kNT;
            mma_16816<T>(acc[nt][mt], weights.quad[mt], terms[nt][k].hi.x, terms[nt][k].hi.y);
          }
#pragma unroll
          for (int i = 0; i < kMTiles * kNT; ++i) {
            const int mt = i / kNT, nt = i % kNT;
            mma_16816<T>(acc[nt][mt], weights.quad[mt], terms[nt][k].lo.x, terms[nt][k].lo.y);
          }
        }
        const u32 before = slot + (block * s.row_groups + group) * kWarpBytes + lane * kPieceBytes;
        const i64 y_column =
            args.slices.y_column[s.slice] + static_cast<i64>(s.first + done + column) * stride;
        float scale[2 * kNT];
#pragma unroll
        for (int i = 0; i < 2 * kNT; ++i) {
          scale[i] = token_scale<T>(s.scale, exponent[i / 2], i % 2);
        }
        if (args.y_vector && columns >= 8) {
          uint4 y[2 * kNT];
#pragma unroll
          for (int i = 0; i < 2 * kNT; ++i) y[i] = load16_shared(before + i * kTokenPairBytes);
#pragma unroll
          for (int i = 0; i < 2 * kNT; ++i) {
            const uint4 sum = added<T>(y[i], acc[i / 2], i % 2, scale[i]);
            if (rows[i] != nullptr) store16_streaming(rows[i] + y_column, sum);
          }
        } else {
          add_elements<T, kNT>(rows, y_column, stride, columns, acc, scale);
        }
      }
      ring.release();
    }
  });
}

}  // namespace

template <typename T, int KS>
__global__ void __launch_bounds__(kThreads, 2) lora_expand_stream(ExpandArgs args) {
  extern __shared__ __align__(128) u8 slots[];
  __shared__ u64 barriers[2 * kMaxSlots];
  SlotRing ring(shared_address(barriers), shared_address(slots), kYBytes + args.b_bytes,
                args.slots);
  __shared__ __align__(8) u8 room[sizeof(Runs)];
  Runs& runs = *reinterpret_cast<Runs*>(room);
  if (threadIdx.x == 0) {
    runs = Runs(args);
    ring.init(2 * kWarp, kUsers);
  }
  __syncthreads();
  const i32 warp = threadIdx.x / kWarp;
  if (warp == kUsers) {
    copy_y<T>(args, runs, ring);
  } else if (warp == kUsers + 1) {
    copy_b(args, runs, ring);
  } else {
    wait_for_predecessor();
    release_successor();
    add_delta<T, KS>(args, runs, ring);
  }
}
