// Segmented shrink: h[row, rank] = sum over K of A[rank, K] · x[row, K], one work item per (row
// tile, group of MT rank tiles, K splits). A rank tile is 16 ranks of one slice; tiles of several
// slices go together, so that slices that share x read it once.
//
// In: x, the tile list of build_segments, the slot entries of the slices. Out: float partial sums,
// h[split][row][slice][rank], read by lora/expand.cu.
//
// Canonical order of the K sum (what makes a row's bits independent of its batch and of the tile
// shape): K is cut into splits of 512; in a split, warp w of 4 adds chunks w and w + 4 of 64, in
// order, on the tensor cores; the four warps' sums are added in warp order, the splits in split
// order (here when one CTA owns all splits, else by the expand).
//
// Weights are the 16-row operand, tokens the 8-column one: a decode segment of few rows wastes
// little, and operands go from memory straight to registers, 16 bytes a lane (8 consecutive k, fed
// to two products with k permuted alike in both operands). A warp's units follow each other without
// a gap from split to split, so loads stay in flight across the reduction between splits.
#include "lora/slot_entry.cuh"
#include "mma/mma.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kChunk = 64;                            // k per packed chunk of a 2-byte type
constexpr int kSplit = 512;                           // k per split
constexpr int kUnits = 2 * kSplit / kChunk / kWarps;  // of 32 k, per warp and split
constexpr int kRankTile = 16;

template <int MT, int NT>
struct ShrinkShape {
  static constexpr int kRegsPerStage = 8 * MT + 4 * NT;
  static constexpr int kStages = kRegsPerStage <= 20 ? 4 : kRegsPerStage <= 40 ? 2 : 1;
  static constexpr int kBlocksPerSm = MT * NT == 1 ? 4 : MT < 4 && MT * NT <= 4 ? 3 : 2;
  static constexpr int kRows = NT * 8;
  static constexpr int kRanks = MT * kRankTile;
  static constexpr int kPitch = kRanks + 4;  // floats between tokens in the reduction buffer
  // In the reduction a thread owns one rank, of every kRowStep-th token.
  static constexpr int kRowStep = kThreads / kRanks;
  static constexpr int kOwn = kRows / kRowStep;
  static_assert(kUnits % kStages == 0, "a split's units must fall on the same stages every time");
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
  __device__ __forceinline__ const u8* piece(i32 row, i32 chunk, i32 index) const {
    return base + chunk_offset(chunk) + row * row_bytes(chunk) +
           ((index ^ swizzle(chunk, row)) << 4);
  }
  __device__ __forceinline__ const u8* element(i32 row, i32 k) const {
    const i32 inner = k % kChunk;
    return piece(row, k / kChunk, inner >> 3) + 2 * (inner & 7);
  }
};

// What the items of a launch share, and how one is found.
struct ShrinkList {
  const SlotEntry* entries;
  i32 max_loras, start_expert, in_features, max_rank, rank_tiles;

  __device__ __forceinline__ AView view(const Tile& tile, i32 slice, i32* status) const {
    const SlotEntry entry = load_entry(entries, slice, tile.slot, max_loras);
    return AView{reinterpret_cast<const u8*>(entry.a_ptr) +
                     static_cast<i64>(tile.expert + start_expert) * entry.a_expert_stride,
                 safe_rank(entry, max_rank, status), in_features, entry.a_layout == kLayoutPacked};
  }
};

template <typename T, int MT, int NT>
struct ShrinkItem {
  using Shape = ShrinkShape<MT, NT>;
  AView a[MT];
  i32 rank_base[MT];    // first rank of each tile; at least a[mt].rank where there is none
  const u8* x_row[NT];  // token g of every n-tile, null beyond the tile's rows
  i32 in_features;

  struct Stage {
    uint4 a[MT][2];
    uint4 x[NT];
  };

  // The u-th unit that warp `warp` adds, counted from k = 0.
  __device__ __forceinline__ void load(Stage& s, i32 warp, i32 u, i32 lane) const {
    const i32 chunk = warp + (u >> 1) * kWarps;
    const i32 index = (u & 1) * 4 + (lane & 3);
    const bool in_k = chunk * kChunk + index * 8 < in_features;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = rank_base[mt] + half * 8 + (lane >> 2);
        s.a[mt][half] = load16_if(a[mt].piece(row, chunk, index), in_k && row < a[mt].rank);
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const u8* address = x_row[nt] + static_cast<i64>(chunk) * kChunkBytes + index * 16;
      s.x[nt] = load16_if(address, in_k && x_row[nt] != nullptr);
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], const Stage& s) const {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      if (MT > 1 && rank_base[mt] >= a[mt].rank) continue;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint4 &top = s.a[mt][0], &bottom = s.a[mt][1], &x = s.x[nt];
        mma_16816<T>(acc[mt][nt], top.x, bottom.x, top.y, bottom.y, x.x, x.y);
        mma_16816<T>(acc[mt][nt], top.z, bottom.z, top.w, bottom.w, x.z, x.w);
      }
    }
  }
};

// One element of h over K range [k, k_end), from operands aligned to their element only: the slow
// way, one float chain in order of k.
template <typename T>
__device__ __forceinline__ float gathered_dot(const AView& a, i32 row, const u8* x_row, i32 k,
                                              i32 k_end) {
  const T* x = reinterpret_cast<const T*>(x_row);
  float sum = 0.f;
#pragma unroll 1
  for (; k < k_end; ++k) {
    const T weight = *reinterpret_cast<const T*>(a.element(row, k));
    sum = __fmaf_rn(Elem<T>::to_float(weight), Elem<T>::to_float(x[k]), sum);
  }
  return sum;
}

}  // namespace

template <typename T, int MT, int NT>
__global__ void __launch_bounds__(kThreads, ShrinkShape<MT, NT>::kBlocksPerSm)
    lora_shrink(const u8* x, i64 ldx, i32 x_by, const i32* row_to_pair, i32 top_k, i32 num_tokens,
                i32 k_major, const Tile* tiles, const i32* tile_count, const SlotEntry* entries,
                i32 num_slices, i32 max_loras, i32 start_expert, i32 in_features, i32 max_rank,
                i32 rank_tiles, i32 rank_pitch, i32 split_groups, i64 split_stride, i32 x_vector,
                float* h, i32* status) {
  using Shape = ShrinkShape<MT, NT>;
  using Item = ShrinkItem<T, MT, NT>;
  __shared__ float partial[kWarps][Shape::kRows][Shape::kPitch];
  // The successor may run ahead to its own wait only once all before this kernel is done, so that
  // the work list that both read is complete for it too.
  wait_for_predecessor();
  release_successor();
  const RowMap rows{row_to_pair, top_k, num_tokens, k_major};
  const ShrinkList list{entries, max_loras, start_expert, in_features, max_rank, rank_tiles};
  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 own_rank = threadIdx.x % Shape::kRanks, own_row = threadIdx.x / Shape::kRanks;
  const i32 splits = ceil_div(in_features, kSplit);
  const i32 rank_groups = ceil_div(num_slices * rank_tiles, MT);
  const i32 per_tile = rank_groups * split_groups;
  const i32 warp_units = 2 * ceil_div(max_int(0, ceil_div(in_features, kChunk) - warp), kWarps);
  const i64 items = static_cast<i64>(*tile_count) * per_tile;
  Tile next = blockIdx.x < items ? tiles[blockIdx.x / per_tile] : Tile{};

  for (i64 at = blockIdx.x; at < items; at += gridDim.x) {
    const Tile tile = next;
    if (at + gridDim.x < items) next = tiles[(at + gridDim.x) / per_tile];
    const i32 rest = static_cast<i32>(at % per_tile);
    const i32 group = rest % split_groups;
    const i32 first_rank_tile = (rest / split_groups) * MT;

    Item item;
    item.in_features = in_features;
    bool any = false, vector = x_vector != 0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const i32 q = first_rank_tile + mt;
      const i32 slice = min_int(q / rank_tiles, num_slices - 1);
      item.a[mt] = list.view(tile, slice, status);
      item.rank_base[mt] = q < num_slices * rank_tiles ? (q % rank_tiles) * kRankTile : max_rank;
      any |= item.rank_base[mt] < item.a[mt].rank;
      vector &= reinterpret_cast<u64>(item.a[mt].base) % 16 == 0;
    }
    if (!any) continue;
    const auto x_address = [&](i32 n) {
      return x + rows.index(tile.first_row + n, static_cast<RowIndex>(x_by)) * ldx * 2;
    };
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const i32 n = nt * 8 + (lane >> 2);
      item.x_row[nt] = n < tile.rows ? x_address(n) : nullptr;
    }

    const i32 per_group = ceil_div(splits, split_groups);
    const i32 first = group * per_group, last = min_int(splits, first + per_group);
    const i32 end = min_int(warp_units, last * kUnits);
    float total[Shape::kOwn];
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) total[i] = 0.f;

    if (vector) {
      typename Item::Stage stages[Shape::kStages];
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) {
        if (first * kUnits + i < end) item.load(stages[i], warp, first * kUnits + i, lane);
      }
      for (i32 split = first; split < last; ++split) {
        float acc[MT][NT][4] = {};
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          const i32 u = split * kUnits + i;
          if (u < end) item.multiply(acc, stages[i % Shape::kStages]);
          const i32 ahead = u + Shape::kStages;
          if (ahead < end) item.load(stages[i % Shape::kStages], warp, ahead, lane);
        }
        const i32 g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              partial[warp][nt * 8 + 2 * t + (i & 1)][mt * kRankTile + g + (i >> 1) * 8] =
                  acc[mt][nt][i];
            }
          }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Shape::kOwn; ++i) {
          const i32 n = own_row + i * Shape::kRowStep;
          float sum = partial[0][n][own_rank];
#pragma unroll
          for (int w = 1; w < kWarps; ++w) sum += partial[w][n][own_rank];
          total[i] += sum;
        }
        __syncthreads();
      }
    }

    const i32 q = first_rank_tile + own_rank / kRankTile;
    const i32 slice = q / rank_tiles;
    if (slice >= num_slices) continue;
    const AView a = list.view(tile, slice, nullptr);
    const i32 m = (q % rank_tiles) * kRankTile + own_rank % kRankTile;
    if (m >= a.rank) continue;
    float* out = h + group * split_stride + static_cast<i64>(slice) * rank_pitch + m;
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
      const i32 n = own_row + i * Shape::kRowStep;
      if (n >= tile.rows) continue;
      if (!vector) {
        for (i32 split = first; split < last; ++split) {
          total[i] += gathered_dot<T>(a, m, x_address(n), split * kSplit,
                                      min_int(in_features, (split + 1) * kSplit));
        }
      }
      out[static_cast<i64>(tile.first_row + n) * num_slices * rank_pitch] = total[i];
    }
  }
}
