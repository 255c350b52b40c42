// What the shrinks of large batches share: the chunks of K of a work item in the order of their
// sums, how they lie in a slot of shared memory, and the sums of ranges.
#pragma once
#include "lora/shrink.cuh"
#include "mma/mma.cuh"

constexpr i32 kNoRank = 1 << 30;

// Piece `index` of a line of a slot: lines of different parity use different halves of the banks in
// a load of 8 lanes.
__device__ __forceinline__ u32 slot_piece(i32 line, i32 index) {
  return line * kChunkBytes + ((index ^ ((line & 1) << 2)) << 4);
}

// Piece `index` of a line whose pieces are exchanged by its number, as packed A has them.
__device__ __forceinline__ u32 swizzled_piece(i32 line, i32 index) {
  return line * kChunkBytes + ((index ^ (line & 7)) << 4);
}

// Neighbouring ranges of K, a power of two of them or none.
struct RangeShare {
  i32 first, count;
};

__device__ __forceinline__ RangeShare item_share(const ShrinkArgs& args, const KOrder& order,
                                                 i32 split) {
  const i32 ranges = order.ranges / args.splits;
  return RangeShare{split * ranges, ranges};
}

// Their chunks, in the order of the sums: range by range, chain by chain.
struct Chunks {
  i32 range, last_range;
  i32 first, end;  // of the range
  i32 chain, chunk;

  Chunks() = default;
  __device__ __forceinline__ Chunks(const KOrder& order, const RangeShare& share) {
    range = share.first;
    last_range = share.first + share.count;
    enter(order);
  }
  __device__ __forceinline__ bool left() const { return range < last_range; }
  __device__ __forceinline__ void next(const KOrder& order) {
    chunk += kChains;
    if (chunk < end) return;
    chunk = ++chain;
    if (chain < min_int(end, first + kChains)) return;
    ++range;
    enter(order);
  }

 private:
  // Ranges beyond the last chunk are empty.
  __device__ __forceinline__ void enter(const KOrder& order) {
    first = order.first(range);
    end = order.first(range + 1);
    chain = chunk = first;
    if (first == end) range = last_range;
  }
};

// Lists the chunks of K in the order of their sums: of each range, chain by chain. By a whole CTA.
template <int kThreads>
__device__ __forceinline__ void list_chunks(u32 chunks, const KOrder& order) {
  for (i32 i = threadIdx.x; i < order.chunks; i += kThreads) {
    const i32 range = i / order.length, first = range * order.length;
    const i32 length = min_int(order.chunks - first, order.length);
    i32 left = i - first, chain = 0;
    while (left >= ceil_div(length - chain, kChains)) {
      left -= ceil_div(length - chain, kChains);
      ++chain;
    }
    store2_shared(chunks + 2 * i, static_cast<u16>(first + chain + left * kChains));
  }
}

// What the lists say of a work item.
struct Work {
  ShrinkItem item;
  Tile tile;

  __device__ __forceinline__ Work(const ShrinkArgs& args, u32 at)
      : item(args, at), tile(item.record->head) {}
};

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

// A unit's A of 16 ranks: of the two products.
struct UnitA {
  Quad first, second;

  // `line`: the address of rank g's piece.
  __device__ __forceinline__ UnitA(u32 line, u32 zero) {
    const uint4 top = load16_shared(line), bottom = load16_shared(line + 8 * kChunkBytes);
    first = Quad(make_uint2(top.x, top.y), make_uint2(bottom.x, bottom.y), zero);
    second = Quad(make_uint2(top.z, top.w), make_uint2(bottom.z, bottom.w), zero);
  }
};

// The products of a unit of a chunk: MT rank tiles by NT times 8 rows. x_piece, a_piece: where this
// lane's piece of their first line lies; lines that are 8 apart lie alike.
template <typename T, int MT, int NT>
__device__ __forceinline__ void multiply_unit(float (&acc)[MT * NT][4], u32 x_piece, u32 a_piece,
                                              u32 zero) {
  constexpr u32 kEight = 8 * kChunkBytes;
  uint4 x[NT];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) x[nt] = load16_shared(x_piece + nt * kEight);
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const UnitA a(a_piece + 2 * m * kEight, zero);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) mma_16816<T>(acc[m * NT + nt], a.first, x[nt].x, x[nt].y);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) mma_16816<T>(acc[m * NT + nt], a.second, x[nt].z, x[nt].w);
  }
}
