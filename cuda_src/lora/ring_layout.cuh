// What the two roles of the ring kernel (ring.cu) share: how an item's rank divides the work, what
// a stage of the ring holds, and where things lie in shared memory.
#pragma once
#include "lora/items.cuh"
#include "lora/slow_path.cuh"

constexpr int kConsumers = 4;
constexpr int kConsumerThreads = kConsumers * kWarp;
constexpr int kThreads = kConsumerThreads + kWarp;
constexpr int kConsumerBarrier = 1;
constexpr int kMaxStages = 6;
constexpr int kRowBytes = 512;  // of a tile's row in a stage
// Bytes from row to row: the rows that a warp reads together fall into different banks.
constexpr int kRowPitch = kRowBytes + 16;

// MT: rank tiles that an adapter may have; NT: 8-row groups of a tile.
template <int MT, int NT>
struct RingShape {
  static constexpr int kRankTiles = MT;
  static constexpr int kTokens = NT * 8;
  static constexpr int kWeightBytes = MT == 4 ? 16384 : 8192;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kRowPitch;
  static constexpr int kBlocksPerSm = MT * NT == 1 ? 4 : MT * NT == 2 ? 3 : 2;
};

// How an item's rank divides the work among the warps: `ways` of them share a rank tile and take
// different chains; a stage holds `per_warp` chunks of A for each of those.
template <int MT>
struct RankShare {
  i32 tiles;  // of 16 ranks, a power of two
  i32 ways;   // 4 / tiles
  i32 per_warp;
  i32 rank_shift;     // log2 of the ranks kept in shared memory
  i32 stage_columns;  // of B per stage, a multiple of 64

  __device__ __forceinline__ explicit RankShare(i32 rank) {
    const i32 log = MT == 1 || rank <= 16 ? 0 : MT == 2 || rank <= 32 ? 1 : 2;
    tiles = 1 << log;
    ways = 4 >> log;
    per_warp = MT == 4 && log > 0 ? 2 : 1;
    rank_shift = 4 + log;
    stage_columns = (256 >> log) * per_warp;
  }
  __device__ __forceinline__ i32 ranks() const { return 1 << rank_shift; }
  __device__ __forceinline__ i32 stage_chunks() const { return ways * per_warp; }
  // Floats from token to token of the chains' sums.
  __device__ __forceinline__ i32 pitch() const { return ranks() + (MT == 1 ? 2 : 4); }
};

// What producer and consumers know of an item.
struct __align__(16) ItemHead {
  i32 rank;  // 0: there are no more items
  float scale;
  i32 rows;
  i32 tile;
  i32 slice;
  i32 first_column;  // of the slice, and how many, that this CTA expands
  i32 columns;
  i32 bulk;  // 0: bypasses the ring, 1: A, x and B go through it, 2: y too
};

// In shared memory, one for each stage: `item` and `y` come with an item's first stage.
template <int TOKENS>
struct __align__(16) Header {
  ItemHead item;
  i32 x_chunk;  // of any stage of A: its first chunk and the bytes of a row of x
  i32 x_bytes;
  i32 unused[2];
  u64 y[TOKENS];  // where the rows' first columns lie
};

// What the lists say of the coming items, copied ahead into shared memory: a load into registers
// would hold up the copies that follow it, and a cold list costs more than a stage.
template <int TOKENS>
struct __align__(16) ListsAhead {
  TileRecord tile[3];
  SlotEntry entry[2];
  i32 pair[2][TOKENS];  // of all rows; a record has those of 8
};

// A place in the ring: producer and consumers walk it alike.
struct RingPlace {
  i32 stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance(i32 stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Addresses in this CTA's shared memory.
template <typename Shape>
struct RingShared {
  u32 stages;
  i32 stage_count;
  u32 full, empty, pushed;  // barriers: kMaxStages, kMaxStages, 2
  Header<Shape::kTokens>* headers;
  ListsAhead<Shape::kTokens>* lists;

  __device__ __forceinline__ u32 weights(i32 stage) const {
    return stages + stage * Shape::kStageBytes;
  }
  __device__ __forceinline__ u32 rows(i32 stage) const {
    return weights(stage) + Shape::kWeightBytes;
  }
};
