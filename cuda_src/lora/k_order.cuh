// The canonical order of the K sum of the 16-bit shrink: what makes a row's bits independent of its
// batch, of the tile shape and of the kernel that serves it. It follows from K alone.
//
// K is cut into chunks of 64, and the chunks into up to 16 ranges of equal length (the last ones
// may be shorter or empty). In a range, chunk i belongs to chain i % 4; a chain is one tensor-core
// accumulator that starts at zero and takes its chunks in order, a chunk as two units of 32 k and a
// unit as two products (mma.cuh): lane (g, t) feeds bytes 16t .. 16t + 7 of the unit to the first
// and the next 8 to the second. range = ((chain 0 + chain 1) + chain 2) + chain 3. The ranges, a
// power of two of them, are added as a binary tree, neighbours first: so any aligned power of two
// of them is a node of the tree and can be one CTA's share.
#pragma once
#include "ptx/types.cuh"

constexpr int kChunk = 64;  // k per packed chunk of a 2-byte type
constexpr int kChains = 4;
constexpr int kMaxRanges = 16;
constexpr int kRangeTarget = 192;  // k that a range has at least, where K allows

struct KOrder {
  i32 chunks;
  i32 ranges;
  i32 length;  // chunks per range

  __device__ __forceinline__ explicit KOrder(i32 in_features) {
    chunks = ceil_div(in_features, kChunk);
    const i32 possible = max_int(1, in_features / kRangeTarget);
    ranges = min_int(kMaxRanges, 1 << (31 - __clz(possible)));
    length = ceil_div(chunks, ranges);
  }
  __device__ __forceinline__ i32 first(i32 range) const { return min_int(chunks, range * length); }
};

// Adds leaves of the binary tree one after the other: after 2^n of them `add` has returned the sum
// of their subtree; up to 2^LEVELS of them. The levels are registers: only compile-time indices.
template <int LEVELS = 4>
struct TreeSum {
  static constexpr int kLevels = LEVELS;
  float level[kLevels] = {};

  __device__ __forceinline__ float add(i32 leaf, float value) {
    bool carries = true;  // selects, not branches: the levels stay in registers
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      const float merged = level[l] + value;
      const bool right = (leaf >> l) & 1;
      level[l] = carries && !right ? value : level[l];
      carries = carries && right;
      value = carries ? merged : value;
    }
    return value;
  }
};

// ((a + b) + c) + d
__device__ __forceinline__ float add_chains(float a, float b, float c, float d) {
  return ((a + b) + c) + d;
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The tree over N leaves, `leaf(i)` the i-th.
template <int N, typename Leaf>
__device__ __forceinline__ float4 tree_of(const Leaf& leaf, i32 first = 0) {
  if constexpr (N == 1) {
    return leaf(first);
  } else {
    const float4 left = tree_of<N / 2>(leaf, first);
    return add4(left, tree_of<N / 2>(leaf, first + N / 2));
  }
}
// Over the CTAs of a cluster: 1, 2, 4 or 8.
template <typename Leaf>
__device__ __forceinline__ float4 tree_of_cluster(i32 size, const Leaf& leaf) {
  if (size == 8) return tree_of<8>(leaf);
  if (size == 4) return tree_of<4>(leaf);
  return size == 2 ? tree_of<2>(leaf) : tree_of<1>(leaf);
}
