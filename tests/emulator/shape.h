// What a launch asks of the emulator: the interface between the core library, the programs compiled
// from cuda_src and the Python side (device.py), which fills a Shape field by field.
#pragma once
#include <cstdint>

namespace emu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr u32 kWarpSize = 32;

struct Shape {
  u32 grid_x, grid_y;
  u32 cluster;         // CTAs; 1: none
  u32 threads;         // of a CTA
  u32 smem;            // bytes of dynamic shared memory
  u32 dependent;       // launched so that it may start before the kernel ahead has ended
  u32 each_waits;      // every thread must wait for that kernel, not only one of each CTA
  u32 may_read_unset;  // shared memory that nothing has written
  u32 granule_log2;    // bytes of shared memory that are tracked together, 1 or 2
  u64 seed;            // of the schedule
  // In a million: that the scheduler delivers asynchronous bytes rather than run a thread, and that
  // a thread pauses where it touches what others may touch.
  u32 deliver, pause;
  // st.async orders only its own bytes; else also what its thread did before.
  u32 strict_push;
};

// What kernels may do with a range of global memory.
enum RangeFlags : u32 {
  kWritable = 1,
  kOnce = 2,      // an element is written at most once, and not fetched by a bulk copy after that
  kLate = 4,      // what a kernel ahead wrote: only after griddepcontrol.wait
  kByAnyone = 8,  // threads may write the same byte in no order, as they do the status word
};

using Body = void (*)();

// Runs `body` in every thread of the grid. 0: all went well; 1: a fault, see emulator_message.
__attribute__((visibility("default"))) int run(const Shape& shape, Body body);

}  // namespace emu
