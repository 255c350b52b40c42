// Segmented expand of large batches, ranks up to 16 · KS: the update of lora/expand.cu, bit for
// bit, at the rate of the memory. One work item a warp: (row tile, slice, 128 / KS columns), taken
// 8 rows at a time. Warps share nothing and never wait for each other.
//
// In: h of the shrink ahead, the same tiles and slot entries, y. Out: y of the tiles' rows; no
// other byte of y is written, so rows of no adapter keep their bits.
//
// Many warps with few registers keep the memory busy, not much in flight in each: y of the next
// rows is asked for when these are done. B of an item stays in registers.
//
// The shrink waits for all work before it, so only h may still be missing when this kernel starts:
// lists, y and B are fetched ahead of the wait.
#include "lora/expand.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 8;  // that a warp takes at a time

// Ranks 4t .. 4t + 3 of every step of a token, at `address` if there are any, as they lie. Up to
// four splits, which the host gives large batches at most, are loaded all at once.
template <int KS>
__device__ __forceinline__ void load_hidden(float4 (&h)[KS], const float* address, i32 ranks,
                                            const ExpandArgs& args) {
  if (args.splits == 1) {
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      h[k] = load_floats(address + k * kRankStep, ranks > k * kRankStep);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < KS; ++k) {
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = load_floats(address + k * kRankStep + i * args.split_stride,
                         ranks > k * kRankStep && i < args.splits);
    }
    h[k] = add_parts(add_parts(v[0], v[1]), add_parts(v[2], v[3]));
  }
}

// The 2-byte terms of a token's h; returns the exponent by which fp16 scales it.
template <typename T, int KS>
__device__ __forceinline__ i32 hidden_terms(Terms (&terms)[KS], const float4 (&h)[KS], i32 rank) {
  const i32 first = 4 * (threadIdx.x & 3);
  i32 exponent = 0;
  if (IsFp16<T>::value) {
    float row_max = 0.f;
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      row_max = fmaxf(row_max, max_abs(own_ranks(h[k], k * kRankStep + first, rank)));
    }
    exponent = fp16_exponent(max_of_token(row_max));
  }
#pragma unroll
  for (int k = 0; k < KS; ++k) {
    terms[k] = split_terms<T>(own_ranks(h[k], k * kRankStep + first, rank), power_of_two(exponent));
  }
  return exponent;
}

// The row of y of token 2t + j of eight rows of a tile, at this lane's column.
template <typename T>
__device__ __forceinline__ T* y_row(T* y, const ExpandArgs& args, const TileRows& found, i32 row0,
                                    int j) {
  return y + found.index(row0 + 2 * (threadIdx.x & 3) + j, row0 >= kWarp) * args.ldy;
}

// What y holds there, where it comes in pieces: `columns` from this lane's on.
template <typename T, int CB>
__device__ __forceinline__ void load_y(uint4 (&before)[2][CB], T* y, const ExpandArgs& args,
                                       const TileRows& found, i32 row0, i32 rows, i32 columns) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const T* row = y_row(y, args, found, row0, j);
    const bool valid = row0 + 2 * (threadIdx.x & 3) + j < rows;
#pragma unroll
    for (int c = 0; c < CB; ++c) {
      before[j][c] =
          load16_once_if(row + c * kBlockColumns, valid && columns >= c * kBlockColumns + 8);
    }
  }
}

}  // namespace

template <typename T, int KS>
__global__ void __launch_bounds__(kThreads, 4) lora_expand_direct(ExpandArgs args) {
  constexpr int CB = 2 / KS;
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const SliceColumns& slices = args.slices;
  const u32 per_tile = slices.first_block[args.num_slices];
  const u32 items = *args.tile_count * per_tile, step = gridDim.x * kWarps;
  Predecessor predecessor;
  for (u32 at = blockIdx.x * kWarps + threadIdx.x / kWarp; at < items; at += step) {
    const u32 tile_index = at / per_tile;
    const i32 block = at - tile_index * per_tile;
    const TileRecord& record = args.tiles[tile_index];
    const Tile tile = record.head;
    const TileRows found(args.rows(), record, tile, args.y_by);
    const i32 slice = slice_of_block(slices, block);
    const SlotEntry entry = load_entry(args.entries, slice, tile.slot, args.max_loras, args.status);
    const i32 rank = safe_rank(entry, args.max_rank, nullptr);  // the shrink has reported it
    const i32 rows = rank == 0 ? 0 : tile.rows;
    const i32 column = (block - slices.first_block[slice]) * (CB * kBlockColumns) + 8 * g;
    const i32 columns = slices.out_features[slice] - column;  // valid ones from this lane's on
    const i32 piece_columns = args.y_vector ? columns : 0;
    const i32 stride = slices.y_stride[slice];
    T* const y =
        reinterpret_cast<T*>(args.y) + slices.y_column[slice] + static_cast<i64>(column) * stride;
    uint4 before[2][CB];
    load_y<T>(before, y, args, found, 0, rows, piece_columns);

    Weights weights[CB][KS];
    const u8* b = b_base(entry, tile, args.start_expert);
    const bool b_vector = rank % 4 == 0 && reinterpret_cast<u64>(b) % 8 == 0;
    b += (static_cast<i64>(column) * rank + 4 * t) * 2;
#pragma unroll
    for (int i = 0; i < CB * KS; ++i) {
      const int c = i / KS, k = i % KS;
      weights[c][k].load(b + (c * kBlockColumns * rank + k * kRankStep) * 2,
                         static_cast<i64>(rank) * 2, columns - c * kBlockColumns,
                         rank - k * kRankStep - 4 * t, b_vector, unknown_zero());
    }
    predecessor.wait();
    const i64 h_pitch = static_cast<i64>(args.num_slices) * args.rank_pitch;
    const float* h_at =
        args.h + (tile.first_row + g) * h_pitch + static_cast<i64>(slice) * args.rank_pitch + 4 * t;
    float4 h[KS];
    load_hidden(h, h_at, g < rows ? rank - 4 * t : 0, args);

#pragma unroll 1
    for (i32 row0 = 0; row0 < rows; row0 += kRows) {
      Terms terms[KS];
      const i32 exponent = hidden_terms<T>(terms, h, rank);
      h_at += kRows * h_pitch;
      load_hidden(h, h_at, row0 + kRows + g < rows ? rank - 4 * t : 0, args);
      float scale[2];
      T* row[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scale[j] = token_scale<T>(entry.scale, exponent, j);
        T* const own = y_row(y, args, found, row0, j);
        row[j] = row0 + 2 * t + j < rows ? own : nullptr;
      }
#pragma unroll
      for (int c = 0; c < CB; ++c) {
        float acc[1][kMTiles][4] = {};
#pragma unroll
        for (int k = 0; k < KS; ++k) {
#pragma unroll
          for (int mt = 0; mt < kMTiles; ++mt) {
            mma_16816<T>(acc[0][mt], weights[c][k].quad[mt], terms[k].hi.x, terms[k].hi.y);
          }
#pragma unroll
          for (int mt = 0; mt < kMTiles; ++mt) {
            mma_16816<T>(acc[0][mt], weights[c][k].quad[mt], terms[k].lo.x, terms[k].lo.y);
          }
        }
        if (piece_columns >= c * kBlockColumns + 8) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 sum = added<T>(before[j][c], acc[0], j, scale[j]);
            if (row[j] != nullptr) store16_streaming(row[j] + c * kBlockColumns, sum);
          }
        } else {
          add_elements<T, 1>(row, static_cast<i64>(c * kBlockColumns) * stride, stride,
                             columns - c * kBlockColumns, acc, scale);
        }
      }
      load_y<T>(before, y, args, found, row0 + kRows, rows, piece_columns);
    }
  }
  predecessor.wait();
}
