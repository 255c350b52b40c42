// Products of a warpgroup. Each warp's part is done when it waits: nothing of D is there before,
// and B is read no sooner, so that a slot that is handed on too early is seen. That the four warps
// issue together is not modelled.
#include <cstring>

#include "machine.h"
#include "ptx.h"

namespace emu {
namespace {

constexpr u32 kLine = 128, kEight = 1024, kStep = 32;
constexpr u64 kForm = u64{1} << 62 | u64{kEight / 16} << 32 | u64{1} << 16;
constexpr u32 kWords = 4;

Fiber& lane_of(u32 lane) { return machine.now->cta->fibers[machine.now->warp * kWarpSize + lane]; }

u32 first_byte(u64 operand) {
  const u32 offset = static_cast<u32>(operand & 0x3fff) << 4;
  if ((operand & ~u64{0x3fff}) != kForm || offset % kEight >= 4 * kStep || offset % kStep != 0) {
    fail("a product's operand of a form that is not modelled: %016llx",
         static_cast<unsigned long long>(operand));
  }
  return machine.now->cta->window + offset;
}

// B [16, 8] of the columns from `column` on.
template <float (*kValue)(u32)>
void read_b(double (&b)[16][8], const Product& product, u32 column) {
  for (u32 n = 0; n < 8; ++n) {
    for (u32 k = 0; k < 16; k += 2) {
      const u32 plain = first_byte(product.b) + (column + n) * kLine + k * 2;
      const u32 address = plain ^ (plain / kLine % 8) << 4;
      shared_read_async(address, 4);
      u32 word;
      memcpy(&word, host(address), 4);
      b[k][n] = kValue(word);
      b[k + 1][n] = kValue(word >> 16);
    }
  }
}

template <float (*kValue)(u32)>
void multiply_one(u32 index) {
  const Product first = lane_of(0).products[index];
  double a[16][16], b[16][8];
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    place_a<kValue>(a, lane, lane_of(lane).products[index].a);
  }
  for (u32 i = 0; i < first.floats / 4; ++i) {
    Products sums;
    read_b<kValue>(b, first, i * 8);
    multiply(a, b, sums);
    for (u32 lane = 0; lane < kWarpSize; ++lane) {
      const Product& own = lane_of(lane).products[index];
      for (u32 j = 0; j < 4; ++j) {
        float& d = *own.d[i * 4 + j];
        const double before = own.adds ? d : 0;
        d = static_cast<float>(before + sums[lane / 4 + j / 2 * 8][lane % 4 * 2 + j % 2]);
      }
    }
  }
}

void finish_products() {
  const std::vector<Product>& products = lane_of(0).products;
  for (u32 i = 0; i < products.size(); ++i) {
    products[i].fp16 ? multiply_one<half_value>(i) : multiply_one<bfloat_value>(i);
  }
}

}  // namespace

namespace ptx {

void wgmma_fence() { machine.now->products_fenced = true; }
void wgmma_commit() {
  for (Product& product : machine.now->products) product.committed = true;
}
void wgmma(bool fp16, const void* const* operands, u32 count) {
  EMU_SITE();
  pause_maybe();
  Fiber& f = *machine.now;
  if (!f.products_fenced) fail("a product without wgmma.fence since the last wait");
  Product product = {};
  product.floats = count - kWords - 2;
  for (u32 i = 0; i < product.floats; ++i) {
    product.d[i] = static_cast<float*>(const_cast<void*>(operands[i]));
  }
  operands += product.floats;
  for (u32 i = 0; i < kWords; ++i) product.a[i] = *static_cast<const u32*>(operands[i]);
  product.b = *static_cast<const u64*>(operands[kWords]);
  product.adds = *static_cast<const i32*>(operands[kWords + 1]) != 0;
  product.fp16 = fp16;
  f.products.push_back(product);
}
void wgmma_wait() {
  static const char kName[] = "a wait for products";
  EMU_SITE();
  pause_maybe();
  Fiber& f = *machine.now;
  for (const Product& product : f.products) {
    if (!product.committed) fail("a wait for products that were not committed");
  }
  meet_warp(kName, finish_products);
  f.products.clear();
  f.products_fenced = false;
}

}  // namespace ptx
}  // namespace emu
