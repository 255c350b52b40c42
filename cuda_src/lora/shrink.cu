// Segmented shrink: h[row, rank] = sum over K of A[rank, K] · x[row, K], one work item per
// (row tile, slice, block of 16·MT ranks, K splits).
//
// In: x, the tile list of build_segments, the slot entries of the slices. Out: float partial sums,
// h[split][row][slice][rank], read by lora/expand.cu.
//
// Canonical order of the K sum (what makes a row's bits independent of its batch and of the tile
// shape): K is cut into splits of 1024; in a split, warp w of 4 adds chunks w, w+4, ... of 64, in
// order, on the tensor cores; the four warps' sums are added in warp order, the splits in split
// order (here when one CTA owns all splits, else by the expand).
//
// Weights are the 16-row operand, tokens the 8-column one: a decode segment of few rows wastes
// little, and operands go from memory straight to registers, 16 bytes a lane (8 consecutive k, fed
// to two products with k permuted alike in both operands).
#include "lora/slot_entry.cuh"
#include "mma/mma.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kChunk = 64;    // k per packed chunk of a 2-byte type
constexpr int kSplit = 1024;  // k per split

template <int MT, int NT>
struct ShrinkShape {
  static constexpr int kRegsPerStage = 8 * MT + 4 * NT;
  static constexpr int kStages = kRegsPerStage <= 16 ? 4 : kRegsPerStage <= 40 ? 2 : 1;
  static constexpr int kBlocksPerSm = MT * NT <= 2 ? 4 : MT * NT <= 4 ? 3 : 2;
  static constexpr int kRows = NT * 8;
  static constexpr int kRanks = MT * 16;
  static constexpr int kPitch = kRanks + 4;  // floats between tokens in the reduction buffer
};

// One expert's A: where a row's bytes of a chunk start, and how the chunk's pieces are swizzled.
// A block stays below 4 GiB, so offsets into it are 32-bit.
struct AView {
  const u8* base;
  i32 rank;
  i32 in_features;
  bool packed;

  __device__ __forceinline__ i32 chunk_width(i32 chunk) const {
    return min_int(kChunk, in_features - chunk * kChunk);
  }
  __device__ __forceinline__ u32 chunk_offset(i32 chunk) const {
    return static_cast<u32>(chunk) * kChunkBytes * (packed ? rank : 1);
  }
  __device__ __forceinline__ u32 row_bytes(i32 chunk) const {
    return 2u * (packed ? chunk_width(chunk) : in_features);
  }
  // Full packed chunks are swizzled; their tail and a row-major A are not.
  __device__ __forceinline__ u32 swizzle(i32 chunk, i32 row) const {
    return packed && chunk_width(chunk) == kChunk ? row & 7 : 0;
  }
  __device__ __forceinline__ u32 element_offset(i32 row, i32 k) const {
    const i32 chunk = k / kChunk, inner = k % kChunk;
    const u32 piece = static_cast<u32>(inner >> 3) ^ swizzle(chunk, row);
    return chunk_offset(chunk) + row * row_bytes(chunk) + (piece << 4) + 2 * (inner & 7);
  }
};

// Where one lane's piece of a unit starts.
struct Piece {
  i32 chunk;
  i32 index;   // of the 16-byte piece in the chunk
  i32 k_left;  // elements from its start to the end of K
};

template <typename T>
__device__ __forceinline__ void multiply_pieces(float (&acc)[4], const uint4& top,
                                                const uint4& bottom, const uint4& x) {
  mma_16816<T>(acc, top.x, bottom.x, top.y, bottom.y, x.x, x.y);
  mma_16816<T>(acc, top.z, bottom.z, top.w, bottom.w, x.z, x.w);
}

template <typename T, int MT, int NT>
struct ShrinkItem {
  using Shape = ShrinkShape<MT, NT>;
  AView a;
  const u8* x_row[NT];  // token g of every n-tile, null beyond the tile's rows
  i32 rank_base;
  i32 in_features;

  struct Stage {
    uint4 a[MT][2];
    uint4 x[NT];
  };

  // The j-th unit that warp `warp` adds in split `split`.
  __device__ __forceinline__ Piece piece(i32 split, i32 warp, i32 j, i32 lane) const {
    const i32 chunk = split * (kSplit / kChunk) + warp + (j >> 1) * kWarps;
    const i32 index = (j & 1) * 4 + (lane & 3);
    return Piece{chunk, index, in_features - chunk * kChunk - index * 8};
  }
  __device__ __forceinline__ const u8* x_piece(i32 nt, const Piece& p) const {
    return x_row[nt] + static_cast<i64>(p.chunk) * kChunkBytes + p.index * 16;
  }

  __device__ __forceinline__ void load(Stage& s, const Piece& p, i32 lane) const {
    const i32 g = lane >> 2;
    const u32 row_bytes = a.row_bytes(p.chunk);
    // Rows 8 apart are swizzled alike.
    const u8* lane_base = a.base + a.chunk_offset(p.chunk) + (rank_base + g) * row_bytes +
                          ((p.index ^ a.swizzle(p.chunk, g)) << 4);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = mt * 16 + half * 8;
        s.a[mt][half] =
            load16_if(lane_base + row * row_bytes, rank_base + g + row < a.rank && p.k_left > 0);
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      s.x[nt] = load16_if(x_piece(nt, p), x_row[nt] != nullptr && p.k_left > 0);
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], const Stage& s) const {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      if (MT > 1 && rank_base + mt * 16 >= a.rank) break;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        multiply_pieces<T>(acc[mt][nt], s.a[mt][0], s.a[mt][1], s.x[nt]);
      }
    }
  }

  // Units of this warp in the split; chunks beyond K are not counted.
  __device__ __forceinline__ i32 units(i32 split, i32 warp) const {
    const i32 chunks =
        min_int(ceil_div(in_features, kChunk) - split * (kSplit / kChunk), kSplit / kChunk);
    return chunks <= warp ? 0 : 2 * ((chunks - warp - 1) / kWarps + 1);
  }

  __device__ __forceinline__ void accumulate(float (&acc)[MT][NT][4], i32 split, i32 warp,
                                             i32 lane) const {
    const i32 count = units(split, warp);
    Stage stages[Shape::kStages];
#pragma unroll
    for (int i = 0; i < Shape::kStages; ++i) {
      if (i < count) load(stages[i], piece(split, warp, i, lane), lane);
    }
    for (i32 base = 0; base < count; base += Shape::kStages) {
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) {
        if (base + i < count) {
          multiply(acc, stages[i]);
          const i32 next = base + i + Shape::kStages;
          if (next < count) load(stages[i], piece(split, warp, next, lane), lane);
        }
      }
    }
  }
};

// total[i] += v with a run-time i, without an indexed register array.
template <int N>
__device__ __forceinline__ void add_at(float (&total)[N], int i, float v) {
#pragma unroll
  for (int j = 0; j < N; ++j) total[j] += j == i ? v : 0.f;
}

// One element of h over K range [k, k_end), from operands aligned to their element only: the slow
// way, one float chain in order of k.
template <typename T>
__device__ __forceinline__ float gathered_dot(const AView& a, i32 row, const u8* x_row, i32 k,
                                              i32 k_end) {
  const T* x = reinterpret_cast<const T*>(x_row);
  float sum = 0.f;
#pragma unroll 1
  for (; k < k_end; ++k) {
    const T weight = *reinterpret_cast<const T*>(a.base + a.element_offset(row, k));
    sum = __fmaf_rn(Elem<T>::to_float(weight), Elem<T>::to_float(x[k]), sum);
  }
  return sum;
}

}  // namespace

template <typename T, int MT, int NT>
__global__ void __launch_bounds__(kThreads, ShrinkShape<MT, NT>::kBlocksPerSm)
    lora_shrink(const u8* __restrict__ x, i64 ldx, i32 x_by, const i32* __restrict__ row_to_pair,
                i32 top_k, i32 num_tokens, i32 k_major, const Tile* __restrict__ tiles,
                const i32* __restrict__ tile_count, const SlotEntry* __restrict__ entries,
                i32 num_slices, i32 max_loras, i32 start_expert, i32 in_features, i32 max_rank,
                i32 rank_blocks, i32 split_groups, i64 split_stride, i32 x_vector,
                float* __restrict__ h, i32* status) {
  using Shape = ShrinkShape<MT, NT>;
  __shared__ float partial[kWarps][Shape::kRows][Shape::kPitch];
  const RowMap rows{row_to_pair, top_k, num_tokens, k_major};
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 splits = ceil_div(in_features, kSplit);
  const i32 per_tile = num_slices * rank_blocks * split_groups;
  const i64 items = static_cast<i64>(*tile_count) * per_tile;

  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tiles[item / per_tile];
    i32 rest = static_cast<i32>(item % per_tile);
    const i32 group = rest % split_groups;
    rest /= split_groups;
    const i32 rank_base = (rest % rank_blocks) * Shape::kRanks;
    const i32 slice = rest / rank_blocks;
    const SlotEntry entry = load_entry(entries, slice, tile.slot, max_loras);
    const i32 rank = safe_rank(entry, max_rank, status);
    if (rank_base >= rank) continue;

    ShrinkItem<T, MT, NT> work;
    work.a = AView{reinterpret_cast<const u8*>(entry.a_ptr) +
                       static_cast<i64>(tile.expert + start_expert) * entry.a_expert_stride,
                   rank, in_features, entry.a_layout == kLayoutPacked};
    work.rank_base = rank_base;
    work.in_features = in_features;
    // Whether A and x lie on 16-byte boundaries wherever a piece starts.
    const bool vector = x_vector && reinterpret_cast<u64>(work.a.base) % 16 == 0;
    const auto x_address = [&](i32 n) {
      return x + rows.index(tile.first_row + n, static_cast<RowIndex>(x_by)) * ldx * 2;
    };
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const i32 n = nt * 8 + (lane >> 2);
      work.x_row[nt] = n < tile.rows ? x_address(n) : nullptr;
    }

    // Thread i owns elements i, i + 128, ... of the [rows][ranks] sum, rank fastest.
    float total[MT * NT];
#pragma unroll
    for (int i = 0; i < MT * NT; ++i) total[i] = 0.f;
    const i32 per_group = ceil_div(splits, split_groups);
    const i32 last = min_int(splits, (group + 1) * per_group);
    for (i32 split = group * per_group; split < last; ++split) {
      if (!vector) {
#pragma unroll 1
        for (int i = 0; i < MT * NT; ++i) {
          const i32 e = i * kThreads + threadIdx.x;
          const i32 n = e / Shape::kRanks, m = rank_base + e % Shape::kRanks;
          if (n < tile.rows && m < rank) {
            add_at(total, i,
                   gathered_dot<T>(work.a, m, x_address(n), split * kSplit,
                                   min_int(in_features, (split + 1) * kSplit)));
          }
        }
        continue;
      }
      float acc[MT][NT][4] = {};
      work.accumulate(acc, split, warp, lane);
      const i32 g = lane >> 2, t = lane & 3;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            partial[warp][nt * 8 + 2 * t + (i & 1)][mt * 16 + g + (i >> 1) * 8] = acc[mt][nt][i];
          }
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < MT * NT; ++i) {
        const i32 e = i * kThreads + threadIdx.x;
        const i32 n = e / Shape::kRanks, m = e % Shape::kRanks;
        float sum = partial[0][n][m];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) sum += partial[w][n][m];
        total[i] += sum;
      }
      __syncthreads();
    }
    float* out = h + group * split_stride +
                 (static_cast<i64>(tile.first_row) * num_slices + slice) * max_rank + rank_base;
#pragma unroll
    for (int i = 0; i < MT * NT; ++i) {
      const i32 e = i * kThreads + threadIdx.x;
      const i32 n = e / Shape::kRanks, m = e % Shape::kRanks;
      if (n < tile.rows && rank_base + m < rank) {
        out[static_cast<i64>(n) * num_slices * max_rank + m] = total[i];
      }
    }
  }
}
