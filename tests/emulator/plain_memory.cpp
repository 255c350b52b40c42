// Loads and stores that the sources write as PTX, so that the compiler's hooks do not see them.
#include <cstring>

#include "machine.h"
#include "ptx.h"

namespace emu {
namespace {

template <typename... Word>
void load_global(const void* address, Word&... words) {
  constexpr u32 kBytes = (sizeof(Word) + ...);
  need_aligned(reinterpret_cast<u64>(address), kBytes);
  pause_maybe();
  global_read(reinterpret_cast<u64>(address), kBytes);
  const u8* from = static_cast<const u8*>(address);
  ((memcpy(&words, from, sizeof words), from += sizeof words), ...);
}

template <typename... Word>
void store_global(void* address, const Word&... words) {
  constexpr u32 kBytes = (sizeof(Word) + ...);
  need_aligned(reinterpret_cast<u64>(address), kBytes);
  global_write(reinterpret_cast<u64>(address), kBytes);
  u8* to = static_cast<u8*>(address);
  ((memcpy(to, &words, sizeof words), to += sizeof words), ...);
}

template <typename... Word>
void load_shared(u32 address, Word&... words) {
  constexpr u32 kBytes = (sizeof(Word) + ...);
  need_aligned(address, kBytes);
  pause_maybe();
  shared_read(address, kBytes);
  const u8* from = host(address);
  ((memcpy(&words, from, sizeof words), from += sizeof words), ...);
}

template <typename... Word>
void store_shared(u32 address, const Word&... words) {
  constexpr u32 kBytes = (sizeof(Word) + ...);
  need_aligned(address, kBytes);
  pause_maybe();
  shared_write(address, kBytes);
  u8* to = host(address);
  ((memcpy(to, &words, sizeof words), to += sizeof words), ...);
}

}  // namespace

namespace ptx {

void load_global16_if(u32& x, u32& y, u32& z, u32& w, const void* address, u32 valid) {
  EMU_SITE();
  x = y = z = w = 0;
  if (valid != 0) load_global(address, x, y, z, w);
}
void load_global8_if(u32& x, u32& y, const void* address, u32 valid) {
  EMU_SITE();
  x = y = 0;
  if (valid != 0) load_global(address, x, y);
}
void load_global4_if(u32& x, const void* address, u32 valid) {
  EMU_SITE();
  x = 0;
  if (valid != 0) load_global(address, x);
}
void store_global4_if(void* address, u32 x, u32 valid) {
  EMU_SITE();
  if (valid != 0) store_global(address, x);
}
void store_global16(void* address, u32 x, u32 y, u32 z, u32 w) {
  EMU_SITE();
  store_global(address, x, y, z, w);
}
void load_shared16(u32& x, u32& y, u32& z, u32& w, u32 address) {
  EMU_SITE();
  load_shared(address, x, y, z, w);
}
void load_shared8(u32& x, u32& y, u32 address) {
  EMU_SITE();
  load_shared(address, x, y);
}
void load_shared4(u32& x, u32 address) {
  EMU_SITE();
  load_shared(address, x);
}
void load_shared2(u16& x, u32 address) {
  EMU_SITE();
  load_shared(address, x);
}
void store_shared16(u32 address, u32 x, u32 y, u32 z, u32 w) {
  EMU_SITE();
  store_shared(address, x, y, z, w);
}
void store_shared4(u32 address, u32 x) {
  EMU_SITE();
  store_shared(address, x);
}
void store_shared2(u32 address, u16 x) {
  EMU_SITE();
  store_shared(address, x);
}
// Such stores need no order among themselves, as atomics need none.
void store_shared1_relaxed(u32 address, u32 x) {
  EMU_SITE();
  pause_maybe();
  const Fiber& f = *machine.now;
  shared_write(*f.cta, address, 1, f.self, f.epoch, Write::kAtomic);
  *host(address) = static_cast<unsigned char>(x);
}

}  // namespace ptx
}  // namespace emu
