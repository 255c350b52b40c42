// What the expand kernels share: their arguments, h, and the rows and columns of y. ExpandArgs is
// packed by cupylora/ops/_lora_pair.py.
//
// Columns are the 16-row operand: product mt of 4 takes columns 8g + 2mt (its row g) and 8g + 2mt +
// 1 (its row g + 8), so that a lane ends with 8 neighbouring columns of y, one 16-byte access a
// token.
#pragma once
#include "lora/hidden.cuh"
#include "lora/operands.cuh"
#include "lora/split_sum.cuh"
#include "lora/tile_rows.cuh"

constexpr int kMTiles = 4;
constexpr int kBlockColumns = 64;  // kMTiles products

struct __align__(8) ExpandArgs {
  const float* h;  // [split][row][slice][rank_pitch]
  i64 split_stride;
  u8* y;
  i64 ldy;  // elements
  const i32* row_to_pair;
  const TileRecord* tiles;
  const i32* tile_count;
  const SlotEntry* entries;
  i32* status;
  i32 y_by, top_k, num_tokens, k_major;
  i32 num_slices, max_loras, start_expert;
  i32 max_rank;
  i32 rank_pitch, splits;
  i32 parts;          // small: of a tile's rows, over warps; panel: of all tiles, over CTAs
  i32 block_columns;  // small: that a warp takes for one reading of h
  i32 slots;          // stream: of the ring
  i32 b_bytes;        // stream: room for B in a slot
  i32 y_vector;       // every slice's columns lie in aligned 16-byte pieces
  i32 tile_rows;      // panel: most of a tile
  SliceColumns slices;

  __device__ __forceinline__ RowMap rows() const {
    return RowMap{row_to_pair, top_k, num_tokens, k_major};
  }
};
static_assert(sizeof(ExpandArgs) == 272, "ops/_lora_pair.py packs 272 bytes");

__device__ __forceinline__ float4 load_floats(const float* p, bool valid) {
  const uint4 v = load16_rw_if(p, valid);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}

// h of a tile's tokens in one slice, and the 2-byte terms of it.
struct Hidden {
  const float* base;
  i64 row_stride, split_stride;
  i32 splits, rank, rows;

  __device__ __forceinline__ Hidden(const ExpandArgs& args, const Tile& tile, i32 slice, i32 rank)
      : row_stride(static_cast<i64>(args.num_slices) * args.rank_pitch),
        split_stride(args.split_stride),
        splits(args.splits),
        rank(rank),
        rows(tile.rows) {
    base = args.h + tile.first_row * row_stride + static_cast<i64>(slice) * args.rank_pitch;
  }
  __device__ __forceinline__ const float* row(i32 n) const { return base + n * row_stride; }
  __device__ __forceinline__ float4 sum(const float* p) const {
    return sum_splits<float4>(p, split_stride, splits);
  }
  // The same of up to four splits, with all loads in flight together.
  __device__ __forceinline__ float4 sum4(const float* p, bool valid) const {
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = load_floats(p + i * split_stride, valid && i < splits);
    }
    return add_parts(add_parts(v[0], v[1]), add_parts(v[2], v[3]));
  }
  // Without what lies beyond the adapter's ranks, which was never written.
  __device__ __forceinline__ float4 own(float4 v, i32 k) const {
    return make_float4(k < rank ? v.x : 0.f, k + 1 < rank ? v.y : 0.f, k + 2 < rank ? v.z : 0.f,
                       k + 3 < rank ? v.w : 0.f);
  }
  // Ranks k .. k + 3 of token n.
  __device__ __forceinline__ float4 load(i32 n, i32 k) const {
    if (n >= rows || k >= rank) return make_float4(0.f, 0.f, 0.f, 0.f);
    return own(sum(row(n) + k), k);
  }
};

// Of the four lanes that hold a token's ranks.
__device__ __forceinline__ float max_of_token(float v) {
  v = fmaxf(v, __shfl_xor_sync(kFullMask, v, 1));
  return fmaxf(v, __shfl_xor_sync(kFullMask, v, 2));
}

// Four neighbouring ranks of a column of B, beside the fast path: few registers.
__device__ __noinline__ uint2 gather4(const u8* address, i32 ranks) {
  u64 bits = 0;
  const i32 end = min_int(ranks, 4);
#pragma unroll 1
  for (i32 e = 0; e < end; ++e) {
    bits |= static_cast<u64>(reinterpret_cast<const u16*>(address)[e]) << (16 * e);
  }
  return make_uint2(static_cast<u32>(bits), static_cast<u32>(bits >> 32));
}

// One rank step of this lane's 8 columns of B: the products' weight operands.
struct Weights {
  Quad quad[kMTiles];

  // `ranks` and `columns` are those that are left.
  __device__ __forceinline__ void load(const u8* address, i64 pitch, i32 columns, i32 ranks,
                                       bool vector, u32 zero) {
    uint2 column[2 * kMTiles];
    if (vector) {
#pragma unroll
      for (int c = 0; c < 2 * kMTiles; ++c, address += pitch) {
        column[c] = load_b4(address, c < columns ? ranks : 0, true);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 2 * kMTiles; ++c, address += pitch) {
        column[c] = gather4(address, c < columns ? ranks : 0);
      }
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) quad[m] = Quad(column[2 * m], column[2 * m + 1], zero);
  }
};

// What multiplies the products of tokens 2t (0) and 2t + 1 (1): the adapter's scale, and back from
// the exponent by which fp16 scaled the token, which the lanes of its g hold.
template <typename T>
__device__ __forceinline__ float token_scale(float scale, i32 exponent, int j) {
  if (!IsFp16<T>::value) return scale;
  const i32 token = 2 * (threadIdx.x & 3) + j;
  return scale * power_of_two(-__shfl_sync(kFullMask, exponent, token * 4));
}

// Adds this lane's 8 columns of token 2t + j to y; `before` is what y held, where it was fetched as
// a vector.
template <typename T>
__device__ __forceinline__ uint4 added(const uint4& before, const float (&acc)[kMTiles][4], int j,
                                       float scale) {
  return make_uint4(add_pair<T>(before.x, acc[0][j], acc[0][2 + j], scale),
                    add_pair<T>(before.y, acc[1][j], acc[1][2 + j], scale),
                    add_pair<T>(before.z, acc[2][j], acc[2][2 + j], scale),
                    add_pair<T>(before.w, acc[3][j], acc[3][2 + j], scale));
}
// Adds this lane's columns to y element by element, an element of all its tokens at a time so that
// some loads are in flight together. rows[2 nt + j] is token 2t + j of n-tile nt, or null.
template <typename T, int NT>
__device__ __forceinline__ void add_elements(T* const (&rows)[2 * NT], i64 y_column, i32 stride,
                                             i32 columns, const float (&acc)[NT][kMTiles][4],
                                             const float (&scale)[2 * NT]) {
#pragma unroll
  for (int c = 0; c < 8; ++c, y_column += stride) {
    if (c >= columns) break;
#pragma unroll
    for (int base = 0; base < 2 * NT; base += 2) {
      T before[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (rows[base + j] != nullptr) before[j] = rows[base + j][y_column];
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (rows[base + j] == nullptr) continue;
        const float delta = acc[base / 2][c / 2][(c & 1) * 2 + j];
        rows[base + j][y_column] =
            Elem<T>::from_float(__fmaf_rn(delta, scale[base + j], Elem<T>::to_float(before[j])));
      }
    }
  }
}
