// Segmented expand: y[row, column] += scale · h[row, rank] · B[column, rank], in place, one work
// item a warp: (row tile, slice, block of columns, part of the tile's rows). Warps share nothing
// and never wait for each other.
//
// In: the split sums of lora/shrink.cu, the same tiles and slot entries, y. Out: y of the tiles'
// rows; no other byte of y is written, so rows of no adapter keep their bits.
//
// h = sum of its splits in order, in float; it enters the product as two 2-byte terms (hi + lo),
// for fp16 scaled per row by a power of two that neither overflows nor loses the small terms. y is
// rounded once.
//
// Columns are the 16-row operand: product mt of 4 takes columns 8g + 2mt (its row g) and 8g + 2mt +
// 1 (its row g + 8), so that a lane ends with 8 neighbouring columns of y, one 16-byte access a
// token. y and B are fetched before h is read, since only h needs arithmetic before its use.
#include "lora/slot_entry.cuh"
#include "mma/mma.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kColumns = 64;  // of a warp at a time
constexpr int kMTiles = 4;
constexpr int kRankStep = 16;

template <typename T>
struct IsFp16 {
  static constexpr bool value = false;
};
template <>
struct IsFp16<Fp16> {
  static constexpr bool value = true;
};

// Exponent q that brings a row of this maximum below 2^15; 2^-q is exact.
__device__ __forceinline__ i32 fp16_exponent(float row_max) {
  const i32 biased = (__float_as_uint(row_max) >> 23) & 0xff;
  return biased == 0 ? 0 : max_int(-126, min_int(126, 14 - (biased - 127)));
}
__device__ __forceinline__ float power_of_two(i32 exponent) {
  return __uint_as_float(static_cast<u32>(127 + exponent) << 23);
}

// Four neighbouring ranks of one token, summed over the splits in order.
struct Hidden {
  const float* base;
  i64 row_stride, split_stride;
  i32 splits, rank;

  __device__ __forceinline__ float4 load(i32 n, i32 k) const {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    const float* p = base + n * row_stride + k;
#pragma unroll 2
    for (i32 s = 0; s < splits; ++s, p += split_stride) {
      const float4 v = *reinterpret_cast<const float4*>(p);
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    // Ranks beyond the adapter's own were never written.
    return make_float4(k < rank ? sum.x : 0.f, k + 1 < rank ? sum.y : 0.f,
                       k + 2 < rank ? sum.z : 0.f, k + 3 < rank ? sum.w : 0.f);
  }
};

// The two 2-byte terms of four values: what the products take as ranks 4t .. 4t + 3.
struct Terms {
  uint2 hi, lo;
};

template <typename T>
__device__ __forceinline__ u32 low_term(float a, float b, u32 hi) {
  return Elem<T>::pack(a - Elem<T>::low(hi), b - Elem<T>::high(hi));
}

template <typename T>
__device__ __forceinline__ Terms split_terms(float4 v, float scale) {
  v.x *= scale;
  v.y *= scale;
  v.z *= scale;
  v.w *= scale;
  Terms t;
  t.hi = make_uint2(Elem<T>::pack(v.x, v.y), Elem<T>::pack(v.z, v.w));
  t.lo = make_uint2(low_term<T>(v.x, v.y, t.hi.x), low_term<T>(v.z, v.w, t.hi.y));
  return t;
}

// Four neighbouring ranks of one column of B; `count` of them are valid.
__device__ __forceinline__ uint2 load_b(const u8* address, i32 count, bool vector) {
  if (vector) return load8_if(address, count > 0);
  const u16* p = reinterpret_cast<const u16*>(address);
  const u32 e0 = count > 0 ? p[0] : 0, e1 = count > 1 ? p[1] : 0;
  const u32 e2 = count > 2 ? p[2] : 0, e3 = count > 3 ? p[3] : 0;
  return make_uint2(e0 | (e1 << 16), e2 | (e3 << 16));
}

// One rank step of this lane's 8 columns of B: the products' weight operands.
struct BOperand {
  uint2 pair[kMTiles][2];
};

template <typename T>
__device__ __forceinline__ u32 add_pair(u32 y, float d0, float d1, float scale) {
  return Elem<T>::pack(__fmaf_rn(d0, scale, Elem<T>::low(y)),
                       __fmaf_rn(d1, scale, Elem<T>::high(y)));
}

// Adds a lane's 8 columns of token 2t + j to y; `before` is what y held, where it could be fetched
// as one vector.
template <typename T>
__device__ __forceinline__ void update(T* y, const uint4& before, const float (&acc)[kMTiles][4],
                                       int j, float scale, i32 columns, i32 stride, bool vector) {
  if (vector) {
    *reinterpret_cast<uint4*>(y) =
        make_uint4(add_pair<T>(before.x, acc[0][j], acc[0][2 + j], scale),
                   add_pair<T>(before.y, acc[1][j], acc[1][2 + j], scale),
                   add_pair<T>(before.z, acc[2][j], acc[2][2 + j], scale),
                   add_pair<T>(before.w, acc[3][j], acc[3][2 + j], scale));
    return;
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    if (c < columns) {
      const float delta = acc[c / 2][(c & 1) * 2 + j];
      y[c * stride] =
          Elem<T>::from_float(__fmaf_rn(delta, scale, Elem<T>::to_float(y[c * stride])));
    }
  }
}

}  // namespace

template <typename T, int NT>
__global__ void __launch_bounds__(kThreads, 3)
    lora_expand(const float* h, i32 splits, i64 split_stride, i32 rank_pitch, T* y, i64 ldy,
                i32 y_by, const i32* row_to_pair, i32 top_k, i32 num_tokens, i32 k_major,
                const Tile* tiles, const i32* tile_count, const SlotEntry* entries, i32 num_slices,
                i32 max_loras, i32 start_expert, i32 max_rank, SliceColumns slices,
                i32 block_columns, i32 parts, i32 y_vector, i32* status) {
  constexpr int kHeld = 2 / NT;  // rank steps of h that a warp keeps in registers
  const RowMap rows{row_to_pair, top_k, num_tokens, k_major};
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const i32 per_tile = slices.first_block[num_slices] * parts;
  const i64 items = static_cast<i64>(*tile_count) * per_tile;
  const i64 warps = static_cast<i64>(gridDim.x) * kWarps;
  i64 at = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  Tile next = at < items ? tiles[at / per_tile] : Tile{};
  // Only h and y depend on the kernel before; the first item's weights come while it still runs.
  if (at < items) {
    const i32 block = static_cast<i32>(at % per_tile) / parts;
    const i32 slice = slice_of_block(slices, block);
    const SlotEntry entry = load_entry(entries, slice, next.slot, max_loras);
    const i32 first = (block - slices.first_block[slice]) * block_columns;
    const i32 bytes = min_int(kColumns, slices.out_features[slice] - first) * entry.rank * 2;
    const u8* b = reinterpret_cast<const u8*>(entry.b_ptr) +
                  static_cast<i64>(next.expert + start_expert) * entry.b_expert_stride +
                  static_cast<i64>(first) * entry.rank * 2;
    if (entry.rank <= max_rank) {
      for (i32 at_byte = lane * 128; at_byte < bytes; at_byte += kWarp * 128) {
        prefetch_line(b + at_byte);
      }
    }
  }
  wait_for_predecessor();
  release_successor();

  for (; at < items; at += warps) {
    Tile tile = next;
    if (at + warps < items) next = tiles[(at + warps) / per_tile];
    const i32 block = static_cast<i32>(at % per_tile) / parts;
    const i32 part_row = static_cast<i32>(at % parts) * NT * 8;
    tile.first_row += part_row;
    tile.rows -= part_row;
    if (tile.rows <= 0) continue;
    const i32 slice = slice_of_block(slices, block);
    const SlotEntry entry = load_entry(entries, slice, tile.slot, max_loras);
    const i32 rank = safe_rank(entry, max_rank, status);
    if (rank == 0) continue;

    i32 y_row[NT][2];  // row of y of tokens 2t and 2t + 1 of every n-tile, -1 beyond the tile
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const i32 n = nt * 8 + 2 * t + j;
        y_row[nt][j] =
            n < tile.rows
                ? static_cast<i32>(rows.index(tile.first_row + n, static_cast<RowIndex>(y_by)))
                : -1;
      }
    }
    const u8* b = reinterpret_cast<const u8*>(entry.b_ptr) +
                  static_cast<i64>(tile.expert + start_expert) * entry.b_expert_stride;
    const bool b_vector = rank % 4 == 0 && reinterpret_cast<u64>(b) % 8 == 0;
    const i64 row_stride = static_cast<i64>(num_slices) * rank_pitch;
    const Hidden hidden{h + tile.first_row * row_stride + static_cast<i64>(slice) * rank_pitch,
                        row_stride, split_stride, splits, rank};

    // Row scales of fp16: of token g of every n-tile.
    i32 exponent[NT] = {};
    if (IsFp16<T>::value) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        float row_max = 0.f;
        for (i32 k = 4 * t; nt * 8 + g < tile.rows && k < rank; k += kRankStep) {
          const float4 v = hidden.load(nt * 8 + g, k);
          row_max =
              fmaxf(fmaxf(row_max, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
        }
        row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, 2));
        exponent[nt] = fp16_exponent(row_max);
      }
    }

    const i32 out = slices.out_features[slice], stride = slices.y_stride[slice];
    const i32 first = (block - slices.first_block[slice]) * block_columns;
    const i32 last = min_int(out, first + block_columns);
    Terms terms[kHeld][NT];  // of the current kHeld · 16 ranks; up to so many are read once an item
    for (i32 column0 = first; column0 < last; column0 += kColumns) {
      const i32 column = column0 + 8 * g;
      const i32 columns = out - column;  // valid ones of this lane's 8
      const bool vector = y_vector && columns >= 8;
      T* y_column = y + slices.y_column[slice] + static_cast<i64>(column) * stride;
      uint4 before[NT][2];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          before[nt][j] = load16_rw_if(y_column + y_row[nt][j] * ldy, vector && y_row[nt][j] >= 0);
        }
      }
      const auto fetch = [&](BOperand& w, i32 k) {
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const i32 c = 2 * mt + j;
            const u8* address = b + (static_cast<i64>(column + c) * rank + k) * 2;
            w.pair[mt][j] = load_b(address, c < columns ? rank - k : 0, b_vector);
          }
        }
      };
      // B of a step is fetched before its h is waited for.
      BOperand w;
      fetch(w, 4 * t);
      float acc[NT][kMTiles][4] = {};
      for (i32 base = 0; base < rank; base += kHeld * kRankStep) {
        if (column0 == first || rank > kHeld * kRankStep) {
#pragma unroll
          for (int s = 0; s < kHeld; ++s) {
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
              const i32 k = base + s * kRankStep + 4 * t;
              float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
              if (nt * 8 + g < tile.rows && k < rank) v = hidden.load(nt * 8 + g, k);
              terms[s][nt] = split_terms<T>(v, power_of_two(exponent[nt]));
            }
          }
        }
#pragma unroll
        for (int s = 0; s < kHeld; ++s) {
          if (base + s * kRankStep >= rank) break;
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const Terms& h_terms = terms[s][nt];
#pragma unroll
            for (int mt = 0; mt < kMTiles; ++mt) {
              const uint2 top = w.pair[mt][0], bottom = w.pair[mt][1];
              mma_16816<T>(acc[nt][mt], top.x, bottom.x, top.y, bottom.y, h_terms.hi.x,
                           h_terms.hi.y);
              mma_16816<T>(acc[nt][mt], top.x, bottom.x, top.y, bottom.y, h_terms.lo.x,
                           h_terms.lo.y);
            }
          }
          fetch(w, base + (s + 1) * kRankStep + 4 * t);
        }
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float scale = entry.scale;
          if (IsFp16<T>::value) {
            // The scale of token 2t + j lies with the lanes of g = 2t + j.
            const i32 q = __shfl_sync(kFullMask, exponent[nt], (2 * t + j) * 4);
            scale *= power_of_two(-q);
          }
          if (y_row[nt][j] >= 0) {
            update(y_column + y_row[nt][j] * ldy, before[nt][j], acc[nt], j, scale, columns, stride,
                   vector);
          }
        }
      }
    }
  }
}
