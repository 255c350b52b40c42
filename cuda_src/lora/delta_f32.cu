// Segmented LoRA delta for float32: the same work items and order contract as shrink.cu and
// expand.cu with fused multiply-adds instead of tensor cores (no TF32: float32 means float32).
//
// Shrink: one warp per (row tile, slice, rank); lanes take k = lane, lane + 32, ... and are added
// by a fixed tree, so a row's sum depends on K alone. Expand: one thread per column, ranks in
// order.
#include "lora/slot_entry.cuh"
#include "ptx/types.cuh"

namespace {
constexpr int kThreads = 128;
constexpr int kMaxRows = 32;  // of a tile's part
constexpr int kChunk = kChunkBytes / 4;

__device__ __forceinline__ float a_element(const u8* base, i32 layout, i32 rank, i32 in_features,
                                           i32 row, i32 k) {
  const float* a = reinterpret_cast<const float*>(base);
  if (layout != kLayoutPacked) return a[static_cast<i64>(row) * in_features + k];
  const i32 chunk = k / kChunk, inner = k % kChunk;
  const float* start = a + static_cast<i64>(chunk) * kChunk * rank;
  const i32 width = in_features - chunk * kChunk;
  if (width < kChunk) return start[row * width + inner];
  return start[row * kChunk + ((((inner >> 2) ^ (row & 7)) << 2) | (inner & 3))];
}
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    lora_shrink_f32(const float* __restrict__ x, i64 ldx, i32 x_by,
                    const i32* __restrict__ row_to_pair, i32 top_k, i32 num_tokens, i32 k_major,
                    const TileRecord* __restrict__ tiles, const i32* __restrict__ tile_count,
                    const SlotEntry* __restrict__ entries, i32 num_slices, i32 max_loras,
                    i32 start_expert, i32 in_features, i32 max_rank, float* __restrict__ h,
                    i32* status) {
  const RowMap rows{row_to_pair, top_k, num_tokens, k_major};
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i64 items = static_cast<i64>(*tile_count) * num_slices;
  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tiles[item / num_slices].head;
    const i32 slice = static_cast<i32>(item % num_slices);
    const SlotEntry entry = load_entry(entries, slice, tile.slot, max_loras, status);
    const i32 rank = safe_rank(entry, max_rank, status);
    const u8* a = reinterpret_cast<const u8*>(entry.a_ptr) +
                  static_cast<i64>(tile.expert + start_expert) * entry.a_expert_stride;
    for (i32 m = warp; m < rank; m += kThreads / kWarp) {
      for (i32 n = 0; n < tile.rows; ++n) {
        const float* x_row = x + rows.index(tile.first_row + n, static_cast<RowIndex>(x_by)) * ldx;
        float sum = 0.f;
#pragma unroll 4
        for (i32 k = lane; k < in_features; k += kWarp) {
          sum = __fmaf_rn(a_element(a, entry.a_layout, rank, in_features, m, k), x_row[k], sum);
        }
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2) {
          sum += __shfl_xor_sync(kFullMask, sum, offset);
        }
        if (lane == 0) {
          h[(static_cast<i64>(tile.first_row + n) * num_slices + slice) * max_rank + m] = sum;
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    lora_expand_f32(const float* __restrict__ h, float* __restrict__ y, i64 ldy, i32 y_by,
                    const i32* __restrict__ row_to_pair, i32 top_k, i32 num_tokens, i32 k_major,
                    const TileRecord* __restrict__ tiles, const i32* __restrict__ tile_count,
                    const SlotEntry* __restrict__ entries, i32 num_slices, i32 max_loras,
                    i32 start_expert, i32 max_rank, SliceColumns slices, i32 parts, i32* status) {
  __shared__ float hidden[kMaxRows][kThreads];
  const RowMap rows{row_to_pair, top_k, num_tokens, k_major};
  const i32 per_tile = slices.first_block[num_slices] * parts;
  const i64 items = static_cast<i64>(*tile_count) * per_tile;
  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
    Tile tile = tiles[item / per_tile].head;
    const i32 block = static_cast<i32>(item % per_tile) / parts;
    const i32 part_row = static_cast<i32>(item % parts) * kMaxRows;
    tile.first_row += part_row;
    tile.rows = min_int(kMaxRows, tile.rows - part_row);
    if (tile.rows <= 0) continue;
    const i32 slice = slice_of_block(slices, block);
    const SlotEntry entry = load_entry(entries, slice, tile.slot, max_loras, status);
    const i32 rank = safe_rank(entry, max_rank, status);
    if (rank == 0) continue;
    const i32 column = (block - slices.first_block[slice]) * kThreads + threadIdx.x;
    const bool valid = column < slices.out_features[slice];
    const float* b = reinterpret_cast<const float*>(reinterpret_cast<const u8*>(entry.b_ptr) +
                                                    static_cast<i64>(tile.expert + start_expert) *
                                                        entry.b_expert_stride) +
                     static_cast<i64>(column) * rank;
    float acc[kMaxRows] = {};
    for (i32 base = 0; base < rank; base += kThreads) {
      const i32 width = min_int(kThreads, rank - base);
      __syncthreads();
      for (i32 n = 0; n < tile.rows; ++n) {
        const i64 row = static_cast<i64>(tile.first_row + n) * num_slices + slice;
        if (threadIdx.x < width) hidden[n][threadIdx.x] = h[row * max_rank + base + threadIdx.x];
      }
      __syncthreads();
      for (i32 m = 0; valid && m < width; ++m) {
        const float weight = b[base + m];
#pragma unroll
        for (int n = 0; n < kMaxRows; ++n) {
          if (n < tile.rows) acc[n] = __fmaf_rn(hidden[n][m], weight, acc[n]);
        }
      }
    }
    const i64 offset = slices.y_column[slice] + static_cast<i64>(column) * slices.y_stride[slice];
#pragma unroll
    for (int n = 0; n < kMaxRows; ++n) {
      if (valid && n < tile.rows) {
        float* target =
            y + rows.index(tile.first_row + n, static_cast<RowIndex>(y_by)) * ldy + offset;
        *target = __fmaf_rn(acc[n], entry.scale, *target);
      }
    }
  }
}
