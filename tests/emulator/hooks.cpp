// Loads and stores of the kernels' C++ code: -fsanitize=thread has the compiler call a hook before
// each. In: addresses. Out: the checks of shared and global memory; a thread's own stack and the
// program's constants are no business of theirs.
#include "machine.h"

namespace emu {
namespace {

void access(u64 address, u32 bytes, bool write) {
  if (is_private(address)) return;
  if (bytes <= 16 && (bytes & (bytes - 1)) == 0) need_aligned(address, bytes);
  if (is_shared(address)) {
    pause_maybe();
    write ? shared_write(static_cast<u32>(address), bytes)
          : shared_read(static_cast<u32>(address), bytes);
  } else {
    write ? global_write(address, bytes) : global_read(address, bytes);
  }
}

}  // namespace
}  // namespace emu

#define EMU_HOOK(name, bytes, write)                                \
  __attribute__((visibility("default"))) void name(void* address) { \
    if (emu::machine.now == nullptr) return;                        \
    EMU_SITE();                                                     \
    emu::access(reinterpret_cast<emu::u64>(address), bytes, write); \
  }
#define EMU_HOOKS(bytes)                               \
  EMU_HOOK(__tsan_read##bytes, bytes, false)           \
  EMU_HOOK(__tsan_write##bytes, bytes, true)           \
  EMU_HOOK(__tsan_unaligned_read##bytes, bytes, false) \
  EMU_HOOK(__tsan_unaligned_write##bytes, bytes, true) \
  EMU_HOOK(__tsan_volatile_read##bytes, bytes, false)  \
  EMU_HOOK(__tsan_volatile_write##bytes, bytes, true)
#define EMU_RANGE_HOOK(name, write)                                                        \
  __attribute__((visibility("default"))) void name(void* address, unsigned long bytes) {   \
    if (emu::machine.now == nullptr) return;                                               \
    EMU_SITE();                                                                            \
    emu::access(reinterpret_cast<emu::u64>(address), static_cast<emu::u32>(bytes), write); \
  }
#define EMU_IDLE_HOOK(name, ...) \
  __attribute__((visibility("default"))) void name(__VA_ARGS__) {}

extern "C" {
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
EMU_RANGE_HOOK(__tsan_read_range, false)
EMU_RANGE_HOOK(__tsan_write_range, true)
EMU_IDLE_HOOK(__tsan_func_entry, void*)
EMU_IDLE_HOOK(__tsan_func_exit)
EMU_IDLE_HOOK(__tsan_init)
EMU_IDLE_HOOK(__tsan_vptr_update, void*, void*)
EMU_IDLE_HOOK(__tsan_vptr_read, void*)
}
