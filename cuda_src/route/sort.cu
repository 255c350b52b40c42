// Route: pairs (token, choice) sorted by (local expert, slot, pair), stable and the same every
// time.
//
// In: topk_ids [T, k] global expert ids, token_to_slot [T]. Out: row_to_pair, pair_to_row,
// expert_first_token_offset. Foreign pairs sort last and become ghost rows.
//
// Two ways to the same lists. Up to a few thousand pairs, `route_rank` gives each pair its row in
// one launch by counting the pairs that sort before it. Above, two stable counting sorts by digit
// (slot, then expert): `digit_histogram`, `digit_scan`, `digit_scatter` each. No order comes from
// an atomic: atomics only count.
#include "ptx/scan.cuh"
#include "ptx/types.cuh"

namespace {

constexpr int kRankThreads = 1024;
constexpr int kThreadsPerPair = 8;
constexpr int kSortThreads = 512;
constexpr u32 kForeign = 0xffffffffu;

struct Pairs {
  const i32* topk_ids;
  const i32* token_to_slot;
  i32 num_tokens, top_k, k_major, num_experts, start_expert, max_loras;

  __device__ __forceinline__ i32 count() const { return num_tokens * top_k; }
  __device__ __forceinline__ i32 token(i32 pair) const {
    return k_major ? pair % num_tokens : pair / top_k;
  }
  // Local expert of a pair, num_experts for one that is not ours.
  __device__ __forceinline__ i32 expert(i32 pair) const {
    const i32 t = token(pair);
    const i32 j = k_major ? pair / num_tokens : pair - t * top_k;
    const i64 local = static_cast<i64>(topk_ids[static_cast<i64>(t) * top_k + j]) - start_expert;
    return local < 0 || local >= num_experts ? num_experts : static_cast<i32>(local);
  }
  // Slot + 1 of a pair's token; 0 is 'no adapter', also for a slot that does not exist.
  __device__ __forceinline__ i32 slot_digit(i32 pair, i32* status) const {
    const i32 slot = token_to_slot[token(pair)];
    if (slot < 0) return 0;
    if (slot < max_loras) return slot + 1;
    raise_status(status, kStatusSlotRange);
    return 0;
  }
  __device__ __forceinline__ u32 key(i32 pair, i32* status) const {
    const i32 e = expert(pair), digit = slot_digit(pair, status);  // reported for any token
    return e == num_experts ? kForeign : static_cast<u32>(e) * (max_loras + 1) + digit;
  }
};

}  // namespace

// One CTA ranks 128 pairs, 8 threads each, against the keys of all pairs (dynamic shared memory,
// padded to a multiple of 32 words). Every CTA also writes its share of the expert offsets.
extern "C" __global__ void __launch_bounds__(kRankThreads)
    route_rank(const i32* __restrict__ topk_ids, const i32* __restrict__ token_to_slot,
               i32 num_tokens, i32 top_k, i32 k_major, i32 num_experts, i32 start_expert,
               i32 max_loras, i32* __restrict__ row_to_pair, i32* __restrict__ pair_to_row,
               i64* __restrict__ offsets, i32* status) {
  extern __shared__ u32 keys[];
  const Pairs pairs{topk_ids, token_to_slot, num_tokens,   top_k,
                    k_major,  num_experts,   start_expert, max_loras};
  const i32 count = pairs.count();
  const i32 padded = ceil_div(count, kWarp) * kWarp;
  for (i32 p = threadIdx.x; p < padded; p += kRankThreads) {
    keys[p] = p < count ? pairs.key(p, status) : kForeign;
  }
  __syncthreads();

  const i32 pair = blockIdx.x * (kRankThreads / kThreadsPerPair) + threadIdx.x / kThreadsPerPair;
  const i32 part = threadIdx.x % kThreadsPerPair;
  const u32 own = pair < count ? keys[pair] : kForeign;
  i32 before = 0;
  // Threads of a pair take 4-word groups in turn, so that a warp reads 8 different groups, four
  // broadcasts each.
  for (i32 p = part * 4; p < padded; p += kThreadsPerPair * 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(&keys[p]);
    before += other.x < own || (other.x == own && p < pair);
    before += other.y < own || (other.y == own && p + 1 < pair);
    before += other.z < own || (other.z == own && p + 2 < pair);
    before += other.w < own || (other.w == own && p + 3 < pair);
  }
#pragma unroll
  for (int offset = kThreadsPerPair / 2; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(kFullMask, before, offset);
  }
  if (part == 0 && pair < count) {
    const bool foreign = own == kForeign;
    // Foreign pairs come after all others and are ordered too, so every row is written.
    row_to_pair[before] = foreign ? -1 : pair;
    pair_to_row[pair] = foreign ? -1 : before;
  }

  const i32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i32 warps = gridDim.x * (kRankThreads / kWarp);
  for (i32 e = blockIdx.x * (kRankThreads / kWarp) + warp; e <= num_experts; e += warps) {
    const u32 first = static_cast<u32>(e) * (max_loras + 1);
    i32 smaller = 0;
    for (i32 p = lane; p < count; p += kWarp) smaller += keys[p] < first;
    smaller = __reduce_add_sync(kFullMask, smaller);
    if (lane == 0) offsets[e] = smaller;
  }
}

// Digit of the item at `position` of the pass's input order.
__device__ __forceinline__ i32 pass_digit(const Pairs& pairs, const i32* order, i32 position,
                                          i32 by_expert, i32* status) {
  const i32 pair = order == nullptr ? position : order[position];
  return by_expert ? pairs.expert(pair) : pairs.slot_digit(pair, status);
}

// histogram[digit][block]: items of each digit among this block's.
extern "C" __global__ void __launch_bounds__(kSortThreads)
    digit_histogram(const i32* __restrict__ topk_ids, const i32* __restrict__ token_to_slot,
                    i32 num_tokens, i32 top_k, i32 k_major, i32 num_experts, i32 start_expert,
                    i32 max_loras, const i32* __restrict__ order, i32 by_expert, i32 digits,
                    i32* __restrict__ histogram, i32* status) {
  extern __shared__ i32 bins[];
  const Pairs pairs{topk_ids, token_to_slot, num_tokens,   top_k,
                    k_major,  num_experts,   start_expert, max_loras};
  for (i32 d = threadIdx.x; d < digits; d += kSortThreads) bins[d] = 0;
  __syncthreads();
  const i32 position = blockIdx.x * kSortThreads + threadIdx.x;
  if (position < pairs.count()) {
    atomicAdd(&bins[pass_digit(pairs, order, position, by_expert, status)], 1);
  }
  __syncthreads();
  for (i32 d = threadIdx.x; d < digits; d += kSortThreads) {
    histogram[static_cast<i64>(d) * gridDim.x + blockIdx.x] = bins[d];
  }
}

// One warp a digit: histogram[digit][*] becomes its exclusive prefix, totals[digit] its sum.
extern "C" __global__ void digit_scan(i32* __restrict__ histogram, i32 digits, i32 blocks,
                                      i32* __restrict__ totals) {
  const i32 digit = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  const i32 lane = threadIdx.x % kWarp;
  if (digit >= digits) return;
  i32* row = histogram + static_cast<i64>(digit) * blocks;
  i32 carry = 0;
  for (i32 base = 0; base < blocks; base += kWarp) {
    const i32 value = base + lane < blocks ? row[base + lane] : 0;
    const i32 inclusive = warp_inclusive(value, Sum());
    if (base + lane < blocks) row[base + lane] = carry + inclusive - value;
    carry += __shfl_sync(kFullMask, inclusive, kWarp - 1);
  }
  if (lane == 0) totals[digit] = carry;
}

// Places every item behind the smaller digits, the same digit's earlier blocks and its earlier
// neighbours. The last pass (by expert) also writes pair_to_row and the expert offsets.
extern "C" __global__ void __launch_bounds__(kSortThreads)
    digit_scatter(const i32* __restrict__ topk_ids, const i32* __restrict__ token_to_slot,
                  i32 num_tokens, i32 top_k, i32 k_major, i32 num_experts, i32 start_expert,
                  i32 max_loras, const i32* __restrict__ order, i32 by_expert, i32 digits,
                  const i32* __restrict__ histogram, const i32* __restrict__ totals,
                  i32* __restrict__ sorted, i32* __restrict__ pair_to_row,
                  i64* __restrict__ offsets) {
  extern __shared__ i32 next[];  // [digits]: row of the next item of each digit
  __shared__ i32 scratch[kWarp];
  const Pairs pairs{topk_ids, token_to_slot, num_tokens,   top_k,
                    k_major,  num_experts,   start_expert, max_loras};
  i32 carry = 0;
  for (i32 base = 0; base < digits; base += kSortThreads) {
    const i32 d = base + threadIdx.x;
    const i32 total = d < digits ? totals[d] : 0;
    const i32 end = carry + block_inclusive(total, 0, scratch, Sum());
    if (d < digits) {
      next[d] = end - total + histogram[static_cast<i64>(d) * gridDim.x + blockIdx.x];
      if (by_expert && blockIdx.x == 0) offsets[d] = end - total;
    }
    if (threadIdx.x == kSortThreads - 1) scratch[0] = end;
    __syncthreads();
    carry = scratch[0];
    __syncthreads();
  }

  const i32 position = blockIdx.x * kSortThreads + threadIdx.x;
  const bool valid = position < pairs.count();
  const i32 pair = !valid ? -1 : order == nullptr ? position : order[position];
  const i32 digit = valid ? pass_digit(pairs, order, position, by_expert, nullptr) : -1;
  const u32 peers = __match_any_sync(kFullMask, digit);
  const i32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const i32 ahead = __popc(peers & ((1u << lane) - 1u));
  i32 row = 0;
  // Warps take their turns in order: that, not an atomic, decides who comes first.
  for (i32 turn = 0; turn < kSortThreads / kWarp; ++turn) {
    if (turn == warp && valid) row = next[digit] + ahead;
    __syncwarp();
    if (turn == warp && valid && ahead == 0) next[digit] += __popc(peers);
    __syncthreads();
  }
  if (!valid) return;
  const bool foreign = by_expert && digit == num_experts;
  sorted[row] = foreign ? -1 : pair;
  if (by_expert) pair_to_row[pair] = foreign ? -1 : row;
}
