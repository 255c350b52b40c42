// Expand of gate and up fused with the activation: out[row] = act(gate + delta of gate, up + delta
// of up), also for the rows of no adapter, from the base outputs y, which are read once and never
// written. Sums stay in float from y to the one rounding of out.
//
// In: h of the shrink ahead in the stream, y, the work list of build_segments. Work items are
// warps': first (row tile, part of its rows, 64 columns of out) for rows with adapters, then (32
// rows, 32 pieces of columns) for the base rows among them, found by the segments' slots. Warps
// share nothing.
//
// The shrink waits for all work before it, so only h may still be missing when this kernel starts:
// lists, y and B are fetched ahead of the wait. Nothing is written before it. The products are
// those of expand.cu: columns are the 16-row operand, and product mt of 4 takes columns 8g + 2mt
// and 8g + 2mt + 1, so that a lane ends with 8 neighbouring columns of gate and of up, a piece.
#include "lora/expand.cuh"
#include "lora/split_sum.cuh"
#include "moe/gate_up.cuh"
#include "moe/piece.cuh"
#include "moe/search.cuh"
#include "ptx/memory.cuh"

// Packed by cupylora/ops/lora_activation.py.
struct __align__(8) ExpandActivationArgs {
  const float* h;
  i64 split_stride;
  const u8* y;
  const i32* row_to_pair;
  const TileRecord* tiles;
  const i32* tile_count;
  const SlotEntry* entries;
  const i32* seg_start;
  const i32* seg_expert;
  const i32* seg_slot;
  const i32* seg_count;
  const u8* bias;  // null: none
  u8* out;
  i32* status;
  i32 splits, rank_pitch;
  i32 by_pair;  // rows of y and out lie by pair, else by row
  i32 num_rows;
  i32 max_loras, start_expert, max_rank;
  i32 parts;  // of a tile's rows
  ActivationForm form;

  __device__ __forceinline__ i32 modules() const { return form.gated ? 2 : 1; }
};
static_assert(sizeof(ExpandActivationArgs) == 168, "ops/lora_activation.py packs 168 bytes");

namespace {

constexpr int kThreads = 128;  // at most
constexpr int kRowsAhead = 4;  // base rows that a warp has in flight

// Blocks that an SM shall hold: as many as the registers of the tile items allow without spills.
template <int NT, bool kVector>
constexpr int kBlocksPerSm = NT == 1 && kVector && __CUDA_ARCH__ < 1200 ? 3 : 2;

// One module's B for a tile's expert.
struct Factor {
  const u8* b;
  i32 rank;  // 0: no delta
  float scale;
  bool vector;

  __device__ __forceinline__ Factor(const ExpandActivationArgs& args, const Tile& tile,
                                    i32 module) {
    SlotEntry entry = {};
    if (module < args.modules()) {
      entry = load_entry(args.entries, module, tile.slot, args.max_loras, args.status);
    }
    rank = safe_rank(entry, args.max_rank, nullptr);  // the shrink has reported it
    scale = entry.scale;
    b = b_base(entry, tile, args.start_expert);
    vector = rank % 4 == 0 && reinterpret_cast<u64>(b) % 8 == 0;
  }
};

// Four neighbouring ranks of one row's h; ranks beyond the adapter's own were never written.
__device__ __forceinline__ float4 load_hidden(const ExpandActivationArgs& args, i64 row, i32 module,
                                              i32 k, i32 rank) {
  const float* p = args.h + (row * args.modules() + module) * static_cast<i64>(args.rank_pitch) + k;
  const float4 v = sum_splits<float4>(p, args.split_stride, args.splits);
  return make_float4(v.x, k + 1 < rank ? v.y : 0.f, k + 2 < rank ? v.z : 0.f,
                     k + 3 < rank ? v.w : 0.f);
}

// Four neighbouring ranks of a column of B from an address aligned to its element only.
__device__ __forceinline__ uint2 gather_b4(const u8* address, i32 count) {
  u64 bits = 0;
  const i32 end = min_int(count, 4);
#pragma unroll 1  // beside the fast path: few registers
  for (i32 e = 0; e < end; ++e) {
    bits |= static_cast<u64>(reinterpret_cast<const u16*>(address)[e]) << (16 * e);
  }
  return make_uint2(static_cast<u32>(bits), static_cast<u32>(bits >> 32));
}

// One rank step of a lane's 8 columns of B.
struct Weights {
  uint2 pair[kMTiles][2];

  __device__ __forceinline__ void load(const Factor& factor, i32 column, i32 columns, i32 k) {
    const i32 ranks = factor.rank - k;
    const i64 pitch = static_cast<i64>(factor.rank) * 2;
    const u8* address = factor.b + column * pitch + k * 2;
    if (factor.vector) {
#pragma unroll
      for (int c = 0; c < 2 * kMTiles; ++c, address += pitch) {
        pair[c / 2][c & 1] = load8_if(address, c < columns && ranks > 0);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 2 * kMTiles; ++c, address += pitch) {
        pair[c / 2][c & 1] = gather_b4(address, c < columns ? ranks : 0);
      }
    }
  }
};

// Where a tile item lies in the list.
struct TilePlace {
  i64 tile;
  i32 block, part;

  __device__ __forceinline__ TilePlace(const ExpandActivationArgs& args, i64 index, i32 columns) {
    const i32 per_tile = ceil_div(args.form.hidden, columns) * args.parts;
    tile = index / per_tile;
    const i32 rest = static_cast<i32>(index - tile * per_tile);
    block = rest / args.parts;
    part = rest - block * args.parts;
  }
};

// Brings an item's weights into the L2.
__device__ __forceinline__ void prefetch_item(const ExpandActivationArgs& args, i64 index) {
  const TilePlace place(args, index, kBlockColumns);
  const Tile tile = args.tiles[place.tile].head;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const Factor factor(args, tile, m);
    const i32 first = place.block * kBlockColumns;
    const i32 bytes = min_int(kBlockColumns, args.form.hidden - first) * factor.rank * 2;
    const u8* b = factor.b + static_cast<i64>(first) * factor.rank * 2;
    for (i32 i = static_cast<i32>(threadIdx.x % kWarp) * 128; i < bytes; i += kWarp * 128) {
      prefetch_line(b + i);
    }
  }
}

// Rows of y and out of the tokens 2t and 2t + 1 of every 8 of a part, -1 beyond the tile.
template <int NT>
struct PartRows {
  i32 row[NT][2];

  __device__ __forceinline__ PartRows(const ExpandActivationArgs& args, const TileRecord& record,
                                      const Tile& tile, i32 first, i32 t) {
    // A tile of 8 rows carries their pairs.
    const bool carried = NT == 1 && args.parts == 1;
    const int2 pairs =
        carried ? *reinterpret_cast<const int2*>(record.pairs + 2 * t) : make_int2(-1, -1);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const i32 n = first + nt * 8 + 2 * t + j;
        if (n >= tile.rows) {
          row[nt][j] = -1;
        } else if (!args.by_pair) {
          row[nt][j] = tile.first_row + n;
        } else {
          row[nt][j] = carried ? (j ? pairs.y : pairs.x) : args.row_to_pair[tile.first_row + n];
        }
      }
    }
  }
};

template <typename T, int NT, bool kVector>
__device__ __forceinline__ void activate_tile(const ExpandActivationArgs& args, i64 index,
                                              i64 following, Predecessor& predecessor) {
  const ActivationForm& form = args.form;
  const i32 lane = threadIdx.x % kWarp, g = lane >> 2, t = lane & 3;
  const TilePlace place(args, index, kBlockColumns);
  const TileRecord& record = args.tiles[place.tile];
  const Tile tile = record.head;
  const i32 first = place.part * NT * 8;
  if (tile.rows <= first) return;
  const PartRows<NT> rows(args, record, tile, first, t);
  const Factor factors[2] = {Factor(args, tile, 0), Factor(args, tile, 1)};
  const i32 column = place.block * kBlockColumns + 8 * g, columns = form.hidden - column;

  Weights weights[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) weights[m].load(factors[m], column, columns, 4 * t);
  const T* y = reinterpret_cast<const T*>(args.y);
  GateUpPieces<T, kVector> pieces[NT][2];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const i32 row = rows.row[nt][j];
      pieces[nt][j].load(y + static_cast<i64>(row) * form.width(), column, row < 0 ? 0 : columns,
                         form);
    }
  }
  // Few registers are left: the bias is fetched where it is added.
  const T* bias_row =
      reinterpret_cast<const T*>(args.bias) + static_cast<i64>(tile.expert) * form.width();
  const i32 biased = args.bias == nullptr ? 0 : columns;
  GateUpPieces<T, kVector>::prefetch(bias_row, column, biased, form);
  if (following >= 0) prefetch_item(args, following);
  predecessor.wait();

  float acc[2][NT][kMTiles][4] = {};
  i32 exponent[2][NT] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const Factor& factor = factors[m];
    const auto hidden = [&](int nt, i32 k) {
      const i32 n = first + nt * 8 + g;
      if (n >= tile.rows || k >= factor.rank) return make_float4(0.f, 0.f, 0.f, 0.f);
      return load_hidden(args, tile.first_row + n, m, k, factor.rank);
    };
    if (IsFp16<T>::value) {
      // Row scales, of token g of every 8.
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        float row_max = 0.f;
        for (i32 k = 4 * t; k < factor.rank; k += kRankStep) {
          row_max = fmaxf(row_max, max_abs(hidden(nt, k)));
        }
        exponent[m][nt] = fp16_exponent(max_of_token(row_max));
      }
    }
    for (i32 base = 0; base < factor.rank; base += kRankStep) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const Terms terms = split_terms<T>(hidden(nt, base + 4 * t), power_of_two(exponent[m][nt]));
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          multiply_terms<T>(acc[m][nt][mt], weights[m].pair[mt][0], weights[m].pair[mt][1], terms);
        }
      }
      if (base + kRankStep < factor.rank) {
        weights[m].load(factor, column, columns, base + kRankStep + 4 * t);
      }
    }
  }

  GateUpPieces<T, kVector> bias;
  bias.load(bias_row, column, biased, form);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float scale[2] = {token_scale<T>(factors[0].scale, exponent[0][nt], j),
                              token_scale<T>(factors[1].scale, exponent[1][nt], j)};
      const i32 row = rows.row[nt][j];
      if (row < 0 || columns <= 0) continue;
      GateUp<T> values(pieces[nt][j], form);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const int part = (c & 1) * 2 + j;
        // Without a delta a value keeps its bits, the sign of a zero included.
        if (factors[0].rank > 0) {
          values.gate[c] = __fmaf_rn(acc[0][nt][c / 2][part], scale[0], values.gate[c]);
        }
        if (factors[1].rank > 0) {
          values.up[c] = __fmaf_rn(acc[1][nt][c / 2][part], scale[1], values.up[c]);
        }
      }
      if (args.bias != nullptr) values.add(GateUp<T>(bias, form));
      T* out = reinterpret_cast<T*>(args.out) + static_cast<i64>(row) * form.hidden + column;
      store_piece<kVector>(out, values.activated(form), columns);
    }
  }
}

// The same for float32: fused multiply-adds, a lane's four columns of one row at a time.
template <bool kVector>
__device__ __forceinline__ void activate_tile_f32(const ExpandActivationArgs& args, i64 index,
                                                  Predecessor& predecessor) {
  constexpr int kPer = kPieceElements<float>;
  const ActivationForm& form = args.form;
  const TilePlace place(args, index, kWarp * kPer);
  const Tile tile = args.tiles[place.tile].head;
  const Factor factors[2] = {Factor(args, tile, 0), Factor(args, tile, 1)};
  const i32 lane = threadIdx.x % kWarp;
  const i32 column = (place.block * kWarp + lane) * kPer, columns = form.hidden - column;
  predecessor.wait();
  if (columns <= 0) return;
  GateUpPieces<float, kVector> bias;
  bias.load(
      reinterpret_cast<const float*>(args.bias) + static_cast<i64>(tile.expert) * form.width(),
      column, args.bias == nullptr ? 0 : columns, form);
  for (i32 n = 0; n < tile.rows; ++n) {
    const i64 sorted = tile.first_row + n;
    const i64 row = args.by_pair ? args.row_to_pair[sorted] : sorted;
    GateUpPieces<float, kVector> pieces;
    pieces.load(reinterpret_cast<const float*>(args.y) + row * form.width(), column, columns, form);
    GateUp<float> values(pieces, form);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const i32 rank = factors[m].rank;
      if (rank == 0) continue;
      const float* h = args.h + (sorted * args.modules() + m) * static_cast<i64>(args.rank_pitch);
      const float* b = reinterpret_cast<const float*>(factors[m].b);
      float acc[kPer] = {};
      for (i32 k = 0; k < rank; ++k) {
#pragma unroll
        for (int c = 0; c < kPer; ++c) {
          if (c < columns)
            acc[c] = __fmaf_rn(h[k], b[(column + c) * static_cast<i64>(rank) + k], acc[c]);
        }
      }
      float (&sum)[kPer] = m ? values.up : values.gate;
#pragma unroll
      for (int c = 0; c < kPer; ++c) sum[c] = __fmaf_rn(acc[c], factors[m].scale, sum[c]);
    }
    if (args.bias != nullptr) values.add(GateUp<float>(bias, form));
    float* out = reinterpret_cast<float*>(args.out) + row * form.hidden + column;
    store_piece<kVector>(out, values.activated(form), columns);
  }
}

__device__ __forceinline__ i32 base_blocks(const ExpandActivationArgs& args, i32 per_piece) {
  return ceil_div(args.form.hidden, kWarp * per_piece);
}

// The base rows among 32 sorted rows, 32 pieces of columns.
template <typename T, bool kVector>
__device__ __forceinline__ void activate_base_rows(const ExpandActivationArgs& args, i64 index,
                                                   Predecessor& predecessor) {
  constexpr int kPer = kPieceElements<T>;
  const ActivationForm& form = args.form;
  const i32 lane = threadIdx.x % kWarp;
  const i32 blocks = base_blocks(args, kPer);
  const i32 row0 = static_cast<i32>(index / blocks) * kWarp;
  const i32 block = static_cast<i32>(index % blocks);
  const i32 column = (block * kWarp + lane) * kPer, columns = form.hidden - column;
  const i32 own = min_int(row0 + lane, args.num_rows - 1);
  const i32 at = args.by_pair ? args.row_to_pair[own] : own;

  // The segment of each lane's row: 32 rows reach into at most 32 of them. The closing entry of the
  // list stands for the ghost rows, which are nobody's.
  const i32 count = *args.seg_count;
  const i32 segment = warp_last_at_most(args.seg_start, count + 1, row0) + lane;
  const i32 slot = segment < count ? args.seg_slot[segment] : 0;
  const i32 expert = segment < count && args.bias != nullptr ? args.seg_expert[segment] : 0;
  const i32 next = segment < count ? args.seg_start[segment + 1] - row0 : kWarp;
  const u32 starts = __reduce_or_sync(kFullMask, next < kWarp ? 1u << next : 0u);
  const i32 mine = __popc(starts & (kFullMask >> (kWarp - 1 - lane)));
  const i32 row_slot = __shfl_sync(kFullMask, slot, mine);
  const i32 row_expert = __shfl_sync(kFullMask, expert, mine);
  u32 left = __ballot_sync(kFullMask, row_slot < 0);

  while (left != 0) {
    i32 row[kRowsAhead];
    GateUpPieces<T, kVector> pieces[kRowsAhead], biases[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const bool live = left != 0;
      const i32 from = live ? __ffs(static_cast<i32>(left)) - 1 : 0;
      left &= left - 1;
      const i32 there = __shfl_sync(kFullMask, at, from);
      const i64 e = __shfl_sync(kFullMask, row_expert, from);
      row[i] = live ? there : -1;
      pieces[i].load(reinterpret_cast<const T*>(args.y) + static_cast<i64>(there) * form.width(),
                     column, live ? columns : 0, form);
      biases[i].load(reinterpret_cast<const T*>(args.bias) + e * form.width(), column,
                     live && args.bias != nullptr ? columns : 0, form);
    }
    predecessor.wait();
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (row[i] < 0 || columns <= 0) continue;
      GateUp<T> values(pieces[i], form);
      if (args.bias != nullptr) values.add(GateUp<T>(biases[i], form));
      T* out = reinterpret_cast<T*>(args.out) + static_cast<i64>(row[i]) * form.hidden + column;
      store_piece<kVector>(out, values.activated(form), columns);
    }
  }
}

// This warp's items one after the other: those of tiles through `tile_item`, then base rows.
template <typename T, bool kVector, typename TileItem>
__device__ __forceinline__ void walk_items(const ExpandActivationArgs& args, i32 columns,
                                           Predecessor& predecessor, TileItem tile_item) {
  const i64 per_tile = static_cast<i64>(ceil_div(args.form.hidden, columns)) * args.parts;
  const i64 chunks = ceil_div(args.num_rows, kWarp);
  const i64 tile_items = *args.tile_count * per_tile;
  const i64 items = tile_items + chunks * base_blocks(args, kPieceElements<T>);
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / kWarp);
  i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  for (; at < tile_items; at += warps) tile_item(at, at + warps < tile_items ? at + warps : -1);
  for (; at < items; at += warps) {
    activate_base_rows<T, kVector>(args, at - tile_items, predecessor);
  }
  predecessor.wait();
}

}  // namespace

template <typename T, int NT, bool kVector>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<NT, kVector>))
    lora_expand_activation(ExpandActivationArgs args) {
  Predecessor predecessor;  // waited for wherever h or the first write comes up
  walk_items<T, kVector>(args, kBlockColumns, predecessor, [&](i64 at, i64 following) {
    activate_tile<T, NT, kVector>(args, at, following, predecessor);
  });
}

template <bool kVector>
__global__ void __launch_bounds__(kThreads) lora_expand_activation_f32(ExpandActivationArgs args) {
  Predecessor predecessor;
  walk_items<float, kVector>(args, kWarp * kPieceElements<float>, predecessor, [&](i64 at, i64) {
    activate_tile_f32<kVector>(args, at, predecessor);
  });
}
