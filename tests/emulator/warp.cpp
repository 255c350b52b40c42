// What a warp does together: shuffles, votes, reductions, tensor-core products, ldmatrix. They hand
// values over and order nothing in memory; only __syncwarp does.
#include <cstring>

#include "cuda.h"
#include "machine.h"
#include "ptx.h"

namespace emu {
namespace {

Warp& own_warp() { return machine.now->cta->warps[machine.now->warp]; }

// Waits for all lanes; the last one runs `finish` before any goes on.
template <typename Finish>
void meet(const char* operation, const Finish& finish) {
  Warp& warp = own_warp();
  if (warp.arrived != 0 && warp.operation != operation) {
    fail("a diverged warp: %s here, %s in other lanes", operation, warp.operation);
  }
  warp.operation = operation;
  if (++warp.arrived < kWarpSize) {
    block(Wait::kWarp, 0, 0, warp.waiting);
    return;
  }
  warp.arrived = 0;
  finish(warp);
  ++warp.round;
  wake(warp.waiting);
}

// Every lane's value.
const u64* exchange(const char* operation, u64 value) {
  Warp& warp = own_warp();
  u64* all = warp.value[warp.round & 1];
  all[machine.now->lane] = value;
  meet(operation, [](Warp&) {});
  return all;
}

// The names are compared by address, so each is one object.
constexpr char kShuffle[] = "a shuffle", kBallot[] = "a vote", kMatch[] = "match",
               kReduce[] = "a reduction", kSyncwarp[] = "__syncwarp", kBf16[] = "mma of bfloat16",
               kFp16[] = "mma of float16", kLdmatrix[] = "ldmatrix";

void need_all(u32 mask) {
  if (mask != ~0u) fail("a collective of lanes %08x; only whole warps are modelled", mask);
}

struct HalfTable {
  float value[1 << 16];
  HalfTable() {
    for (u32 bits = 0; bits < 1u << 16; ++bits) {
      value[bits] = __builtin_bit_cast(_Float16, static_cast<u16>(bits));
    }
  }
};

// A [16, 16] and B [16, 8] from the lanes' operands, as mma/mma.cuh describes them.
template <float (*kValue)(u32)>
void unpack(const Warp& warp, double (&a)[16][16], double (&b)[16][8]) {
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    const u32 g = lane / 4, t = lane % 4;
    const u32* operand = warp.operands[lane];
    place_a<kValue>(a, lane, operand);
    for (u32 i = 0; i < 2; ++i) {
      const u32 k = 2 * t + i * 8;
      b[k][g] = kValue(operand[4 + i]);
      b[k + 1][g] = kValue(operand[4 + i] >> 16);
    }
  }
}

template <float (*kValue)(u32)>
void multiply_add(Warp& warp) {
  double a[16][16], b[16][8];
  Products products;
  unpack<kValue>(warp, a, b);
  multiply(a, b, products);
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    const u32 g = lane / 4, t = lane % 4;
    float* d = warp.sums[warp.round & 1][lane];
    for (u32 i = 0; i < 4; ++i) {
      d[i] = static_cast<float>(d[i] + products[g + i / 2 * 8][2 * t + i % 2]);
    }
  }
}

template <float (*kValue)(u32)>
void mma(const char* name, float (&d)[4], const u32 (&operands)[6]) {
  Warp& warp = own_warp();
  const u32 lane = machine.now->lane, set = warp.round & 1;
  memcpy(warp.sums[set][lane], d, sizeof d);
  memcpy(warp.operands[lane], operands, sizeof operands);
  meet(name, [](Warp& w) { multiply_add<kValue>(w); });
  memcpy(d, warp.sums[set][lane], sizeof d);
}

u32 load_matrix_word(const u64* rows, u32 matrix) {
  const u32 lane = machine.now->lane;
  const u32 address = static_cast<u32>(rows[matrix * 8 + lane / 4]) + lane % 4 * 4;
  shared_read(address, 4);
  u32 word;
  memcpy(&word, host(address), 4);
  return word;
}

}  // namespace

float half_value(u32 bits) {
  static const HalfTable table;
  return table.value[bits & 0xffff];
}
float bfloat_value(u32 bits) { return __builtin_bit_cast(float, bits << 16); }

// In float64, in the order of the lanes that hold the operands: how a device adds is not specified.
__attribute__((optimize("O3"), target_clones("avx2", "default"))) void multiply(
    const double (&a)[16][16], const double (&b)[16][8], Products& sum) {
  static const int kOrder[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  memset(sum, 0, sizeof sum);
  for (int row = 0; row < 16; ++row) {
    for (const int k : kOrder) {
      for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
    }
  }
}

void meet_warp(const char* operation, void (*finish)()) {
  meet(operation, [finish](Warp&) { finish(); });
}

Coordinates thread_index() { return {machine.now->thread, 0, 0}; }
Coordinates block_index() {
  const u32 index = machine.now->cta->index;
  return {index % machine.shape.grid_x, index / machine.shape.grid_x, 0};
}
Coordinates block_size() { return {machine.shape.threads, 1, 1}; }
Coordinates grid_size() { return {machine.shape.grid_x, machine.shape.grid_y, 1}; }

void sync_block() {
  EMU_SITE();
  bar_sync(0, static_cast<i32>(machine.shape.threads));
}
void sync_warp() {
  EMU_SITE();
  meet(kSyncwarp, [](Warp& warp) {
    Fibers all = warp.waiting;
    all.push_back(machine.now);
    order_all(all);
  });
  pause_maybe();
}
u64 shuffle(u32 mask, u64 value, u32 lane) {
  EMU_SITE();
  need_all(mask);
  return exchange(kShuffle, value)[lane % kWarpSize];
}
u32 ballot(u32 mask, bool vote) {
  EMU_SITE();
  need_all(mask);
  const u64* votes = exchange(kBallot, vote);
  u32 word = 0;
  for (u32 i = 0; i < kWarpSize; ++i) word |= static_cast<u32>(votes[i]) << i;
  return word;
}
u32 match(u32 mask, u64 value) {
  EMU_SITE();
  need_all(mask);
  const u64* values = exchange(kMatch, value);
  u32 word = 0;
  for (u32 i = 0; i < kWarpSize; ++i) word |= static_cast<u32>(values[i] == value) << i;
  return word;
}
u32 reduce(u32 mask, u32 value, u32 (*operation)(u32, u32)) {
  EMU_SITE();
  need_all(mask);
  const u64* values = exchange(kReduce, value);
  u32 result = static_cast<u32>(values[0]);
  for (u32 i = 1; i < kWarpSize; ++i) result = operation(result, static_cast<u32>(values[i]));
  return result;
}

namespace ptx {

void mma_bf16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
              u32 b1) {
  EMU_SITE();
  float d[4] = {d0, d1, d2, d3};
  mma<bfloat_value>(kBf16, d, {a0, a1, a2, a3, b0, b1});
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
void mma_fp16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
              u32 b1) {
  EMU_SITE();
  float d[4] = {d0, d1, d2, d3};
  mma<half_value>(kFp16, d, {a0, a1, a2, a3, b0, b1});
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
// Lane 8m + r names row r of matrix m; lane (g, t) gets elements 2t and 2t + 1 of row g of each.
void ldmatrix_x4(u32& r0, u32& r1, u32& r2, u32& r3, u32 address) {
  EMU_SITE();
  need_aligned(address, 16);
  pause_maybe();
  const u64* rows = exchange(kLdmatrix, address);
  r0 = load_matrix_word(rows, 0);
  r1 = load_matrix_word(rows, 1);
  r2 = load_matrix_word(rows, 2);
  r3 = load_matrix_word(rows, 3);
}

}  // namespace ptx
}  // namespace emu
