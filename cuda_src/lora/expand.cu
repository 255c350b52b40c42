// Segmented expand: y[row, column] += scale · h[row, rank] · B[column, rank], in place, one work
// item per (row tile, slice, block of columns).
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
// token.
#include "lora/slot_entry.cuh"
#include "mma/mma.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRankBlock = 64;
constexpr int kPitch = kRankBlock + 16;  // elements between tokens of h in shared memory
constexpr int kWarpColumns = 64;
constexpr int kStepColumns = kWarps * kWarpColumns;

template <typename T>
struct IsFp16 {
  static constexpr bool value = false;
};
template <>
struct IsFp16<Fp16> {
  static constexpr bool value = true;
};

// 2^-q for the row maximum's exponent: the row then lies below 2^15, its inverse is exact.
__device__ __forceinline__ i32 fp16_exponent(float row_max) {
  const i32 biased = (__float_as_uint(row_max) >> 23) & 0xff;
  return biased == 0 ? 0 : max_int(-126, min_int(126, 14 - (biased - 127)));
}
__device__ __forceinline__ float power_of_two(i32 exponent) {
  return __uint_as_float(static_cast<u32>(127 + exponent) << 23);
}

template <typename T, int NT>
struct HiddenTile {
  static constexpr int kRows = NT * 8;
  static constexpr int kLanes = kThreads / kRows;  // threads that share a row; at most a half-warp
  T hi[kRows][kPitch];
  T lo[kRows][kPitch];
  float descale[kRows];

  static __device__ __forceinline__ float value(const float* h, i64 split_stride, i32 splits) {
    float sum = 0.f;
    for (i32 s = 0; s < splits; ++s) sum += h[s * split_stride];
    return sum;
  }

  // Fills ranks [base, base + 64) of every row, zeros beyond the tile's rows and the own rank.
  __device__ __forceinline__ void fill(const float* h, i64 row_stride, i64 split_stride, i32 splits,
                                       i32 rows, i32 rank, i32 base) {
    const i32 n = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const float* row = h + n * row_stride;
    const bool valid = n < rows;
    i32 exponent = 0;
    if (IsFp16<T>::value) {
      float row_max = 0.f;
      for (i32 k = lane; valid && k < rank; k += kLanes) {
        row_max = fmaxf(row_max, fabsf(value(row + k, split_stride, splits)));
      }
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        row_max = fmaxf(row_max, __shfl_xor_sync(kFullMask, row_max, offset));
      }
      exponent = fp16_exponent(row_max);
      if (lane == 0) descale[n] = power_of_two(-exponent);
    }
    const i32 padded = min_int(kRankBlock, ceil_div(rank - base, 16) * 16);
    for (i32 k = lane; k < padded; k += kLanes) {
      float v = 0.f;
      if (valid && base + k < rank) {
        v = value(row + base + k, split_stride, splits) * power_of_two(exponent);
      }
      hi[n][k] = Elem<T>::from_float(v);
      lo[n][k] = Elem<T>::from_float(v - Elem<T>::to_float(hi[n][k]));
    }
  }
};

// Four neighbouring ranks of one column of B.
__device__ __forceinline__ uint2 load_b(const u8* address, i32 count, bool vector) {
  if (vector) return load8_if(address, count > 0);
  const u16* p = reinterpret_cast<const u16*>(address);
  const u32 e0 = count > 0 ? p[0] : 0, e1 = count > 1 ? p[1] : 0;
  const u32 e2 = count > 2 ? p[2] : 0, e3 = count > 3 ? p[3] : 0;
  return make_uint2(e0 | (e1 << 16), e2 | (e3 << 16));
}

template <typename T>
__device__ __forceinline__ u32 add_pair(u32 y, float d0, float d1, float scale) {
  return Elem<T>::pack(__fmaf_rn(d0, scale, Elem<T>::low(y)),
                       __fmaf_rn(d1, scale, Elem<T>::high(y)));
}

}  // namespace

template <typename T, int NT>
__global__ void __launch_bounds__(kThreads, 3)
    lora_expand(const float* __restrict__ h, i32 splits, i64 split_stride, T* __restrict__ y,
                i64 ldy, i32 y_by, const i32* __restrict__ row_to_pair, i32 top_k, i32 num_tokens,
                i32 k_major, const Tile* __restrict__ tiles, const i32* __restrict__ tile_count,
                const SlotEntry* __restrict__ entries, i32 num_slices, i32 max_loras,
                i32 start_expert, i32 max_rank, SliceColumns slices, i32 block_columns,
                i32 y_vector, i32* status) {
  __shared__ HiddenTile<T, NT> hidden;
  __shared__ T* y_row[NT * 8];
  const RowMap rows{row_to_pair, top_k, num_tokens, k_major};
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 g = lane >> 2, t = lane & 3;
  const i32 per_tile = slices.first_block[num_slices];
  const i64 items = static_cast<i64>(*tile_count) * per_tile;

  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tiles[item / per_tile];
    const i32 block = static_cast<i32>(item % per_tile);
    const i32 slice = slice_of_block(slices, block);
    const SlotEntry entry = load_entry(entries, slice, tile.slot, max_loras);
    const i32 rank = safe_rank(entry, max_rank, status);
    if (rank == 0) continue;

    const i32 out = slices.out_features[slice];
    const i32 y_stride = slices.y_stride[slice];
    const i32 first = (block - slices.first_block[slice]) * block_columns;
    const u8* b = reinterpret_cast<const u8*>(entry.b_ptr) +
                  static_cast<i64>(tile.expert + start_expert) * entry.b_expert_stride;
    const bool b_vector = rank % 4 == 0 && reinterpret_cast<u64>(b) % 8 == 0;
    const i64 row_stride = static_cast<i64>(num_slices) * max_rank;
    const float* h_tile = h + tile.first_row * row_stride + static_cast<i64>(slice) * max_rank;

    __syncthreads();  // the item before has read y_row and hidden
    if (threadIdx.x < NT * 8) {
      const i32 n = threadIdx.x;
      y_row[n] = n < tile.rows
                     ? y + rows.index(tile.first_row + n, static_cast<RowIndex>(y_by)) * ldy +
                           slices.y_column[slice]
                     : nullptr;
    }
    const i32 steps = ceil_div(min_int(block_columns, out - first), kStepColumns);
    for (i32 step = 0; step < steps; ++step) {
      const i32 column = first + step * kStepColumns + warp * kWarpColumns + 8 * g;
      const i32 columns = out - column;  // valid ones from here on, of this lane's 8
      float acc[4][NT][4] = {};
      for (i32 base = 0; base < rank; base += kRankBlock) {
        if (step == 0 || rank > kRankBlock) {
          if (step > 0 || base > 0) __syncthreads();
          hidden.fill(h_tile, row_stride, split_stride, splits, tile.rows, rank, base);
          __syncthreads();
        }
        const i32 k_steps = ceil_div(min_int(kRankBlock, rank - base), 16);
#pragma unroll 2
        for (i32 s = 0; s < k_steps; ++s) {
          const i32 k = base + s * 16 + 4 * t;
          uint2 w[4][2];
#pragma unroll
          for (int mt = 0; mt < 4; ++mt) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const i32 c = 2 * mt + j;
              const u8* address = b + (static_cast<i64>(column + c) * rank + k) * 2;
              w[mt][j] = load_b(address, c < columns ? rank - k : 0, b_vector);
            }
          }
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const i32 n = nt * 8 + g;
            const uint2 hi = *reinterpret_cast<const uint2*>(&hidden.hi[n][s * 16 + 4 * t]);
            const uint2 lo = *reinterpret_cast<const uint2*>(&hidden.lo[n][s * 16 + 4 * t]);
#pragma unroll
            for (int mt = 0; mt < 4; ++mt) {
              mma_16816<T>(acc[mt][nt], w[mt][0].x, w[mt][1].x, w[mt][0].y, w[mt][1].y, hi.x, hi.y);
              mma_16816<T>(acc[mt][nt], w[mt][0].x, w[mt][1].x, w[mt][0].y, w[mt][1].y, lo.x, lo.y);
            }
          }
        }
      }
      if (columns <= 0) continue;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const i32 n = nt * 8 + 2 * t + j;
          if (n >= tile.rows) continue;
          const float scale = IsFp16<T>::value ? entry.scale * hidden.descale[n] : entry.scale;
          T* target = y_row[n] + static_cast<i64>(column) * y_stride;
          if (y_vector && columns >= 8) {
            uint4 v = *reinterpret_cast<const uint4*>(target);
            v.x = add_pair<T>(v.x, acc[0][nt][j], acc[0][nt][2 + j], scale);
            v.y = add_pair<T>(v.y, acc[1][nt][j], acc[1][nt][2 + j], scale);
            v.z = add_pair<T>(v.z, acc[2][nt][j], acc[2][nt][2 + j], scale);
            v.w = add_pair<T>(v.w, acc[3][nt][j], acc[3][nt][2 + j], scale);
            *reinterpret_cast<uint4*>(target) = v;
          } else {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              if (c < columns) {
                T* element = target + c * y_stride;
                const float delta = acc[c / 2][nt][(c & 1) * 2 + j];
                *element =
                    Elem<T>::from_float(__fmaf_rn(delta, scale, Elem<T>::to_float(*element)));
              }
            }
          }
        }
      }
    }
  }
}
