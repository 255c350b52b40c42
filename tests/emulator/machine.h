// The emulated machine: what a thread, a warp, a CTA and a cluster are, and what the files of the
// core need of one another. One launch runs at a time, in one host thread; its CUDA threads are
// fibers that the scheduler (scheduler.cpp) picks at random.
//
// Ways that threads may be ordered go through clocks (clocks.h): each thread, and each mbarrier's
// asynchronous writes, are a component; an epoch counts a component's releases.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clocks.h"
#include "shape.h"

namespace emu {

// Shared memory lies where 32-bit addresses reach, so that a shared address is a host address.
constexpr u32 kArena = 0x20000000;
constexpr u32 kWindow = 0x80000;    // of a CTA
constexpr u32 kDynamicStart = 128;  // dynamic memory is aligned to no more than that
constexpr u32 kGuard = 64;          // bytes behind it that nothing may change
constexpr u32 kSharedLimit = 227 * 1024;
constexpr u32 kMostCtas = 64;        // resident at a time
constexpr u32 kMostThreads = 16384;  // the same
constexpr u32 kMbarriers = 32;       // of a CTA
constexpr u32 kNamedBarriers = 16;
constexpr u32 kMostCluster = 16;

struct Cta;
struct Cluster;
struct Fiber;

enum class Wait { kNone, kWarp, kBarrier, kMbarrier, kCluster };

// A cp.async that has not been waited for; of `size` bytes, those beyond `bytes` become zero.
struct Copy {
  u32 to;
  const u8* from;
  u32 size, bytes;
  i32 group;
};

// A thread's part in a warpgroup's product that has not been waited for.
struct Product {
  float* d[64];
  u32 floats;
  u32 a[4];
  u64 b;
  bool fp16, adds, committed;
};

// One CUDA thread.
struct Fiber {
  Cta* cta = nullptr;
  u32 thread = 0, lane = 0, warp = 0;
  u32 self = 0;    // its component
  u32 global = 0;  // its number in the grid
  void* stack = nullptr;
  void* site = nullptr;  // where in the kernel's code it last called the emulator
  bool done = false;
  bool waited = false;  // for the kernel ahead

  Clock knows;  // everything but its own component, of which it knows all
  u32 epoch = 1;
  Clock fenced;  // what the last fence.proxy.async ordered before bulk copies
  u32 fenced_epoch = 0;
  Clock initialised;  // what the last fence.mbarrier_init released
  u32 initialised_epoch = 0;

  std::vector<Copy> copies;
  i32 copy_group = 0;

  std::vector<Product> products;
  bool products_fenced = false;  // registers, since the last wait

  bool cluster_due = false;  // has arrived at the cluster's barrier and not waited
  u32 cluster_phase = 0;

  Wait wait = Wait::kNone;
  u64 awaited = 0, detail = 0;
};

using Fibers = std::vector<Fiber*>;

// Lanes deposit, and read after the last has come; two sets, since a slow lane may read while the
// others are in the next collective.
struct Warp {
  u32 arrived = 0, round = 0;
  const char* operation = nullptr;
  u64 value[2][kWarpSize];
  float sums[2][kWarpSize][4];
  u32 operands[kWarpSize][6];
  Fibers waiting;
};

struct NamedBarrier {
  u32 arrived = 0;
  i32 count = 0;
  Fibers waiting;
};

struct Mbarrier {
  Cta* cta = nullptr;
  u32 address = 0, index = 0;
  u32 expected = 0, pending = 0, phase = 0;
  i64 bytes = 0;      // announced and not come
  u32 under_way = 0;  // transfers
  Clock releases;     // of the phase that runs
  Clock complete;     // of the one that ended
  Memo memo;
  Fibers waiting;
};

// What is known of a granule of shared memory.
struct Cell {
  u32 writer = 0, epoch = 0;
  bool async = false;        // written by the asynchronous proxy
  bool atomic = false;       // by an atomic: others may follow it in no order
  std::vector<u64> readers;  // since then: component << 32 | epoch
};

struct Cta {
  Cluster* cluster = nullptr;
  u32 index = 0, rank = 0;
  u32 window = 0;
  u32 live = 0;
  bool waited = false;  // one of its threads, for the kernel ahead
  std::deque<Fiber> fibers;
  std::vector<Warp> warps;
  NamedBarrier barriers[kNamedBarriers];
  std::map<u32, Mbarrier> mbarriers;
  std::vector<Cell>* cells = nullptr;
  std::map<u32, u32> variables;  // number of a __shared__ variable -> offset in the window
  u32 static_end = 0;

  bool exited() const { return live == 0; }
};

struct Cluster {
  u32 index = 0, slot = 0;
  u32 live = 0;
  std::deque<Cta> ctas;
  u32 arrived = 0, phase = 0;
  Clock releases, complete;
  Memo memo;
  Fibers waiting;
};

// Asynchronous work that the scheduler brings to its end at any time: bytes for an mbarrier (of a
// bulk copy, in parts; of st.async, in one), or the arrival of a thread once its copies have come.
struct Transfer {
  enum Kind { kBulk, kPush, kArrival } kind;
  Mbarrier* barrier;
  u32 phase;  // of the barrier, as it began
  u32 to = 0, left = 0;
  const u8* from = nullptr;
  u8 data[16] = {};
  std::vector<Copy> copies;
  const Fiber* copier = nullptr;  // whose copies they are
  Clock releases;

  Transfer(Kind kind, Mbarrier& barrier) : kind(kind), barrier(&barrier), phase(barrier.phase) {}
};

// A generator for schedules (xorshift64*), as std::shuffle takes one.
struct Random {
  using result_type = u64;
  u64 state = 1;

  static constexpr u64 min() { return 0; }
  static constexpr u64 max() { return ~0ull; }
  void seed(u64 value) { state = value * 2 + 1; }
  u64 operator()() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dull;
  }
};

struct Machine {
  Shape shape;
  Body body = nullptr;
  Fiber* now = nullptr;  // null: the scheduler
  Random random;
  Fibers ready;
  std::vector<Transfer> transfers;
  std::deque<std::unique_ptr<Cluster>> clusters;  // resident
  u64 steps = 0;
  std::string message;

  u32 below(u32 bound) { return static_cast<u32>((random() >> 32) % bound); }
  bool chance(u32 in_a_million) { return in_a_million != 0 && below(1000000) < in_a_million; }
  u32 cluster_threads() const { return shape.threads * shape.cluster; }
  u32 static_start() const { return (kDynamicStart + shape.smem + kGuard + 127) / 128 * 128; }
};
extern Machine machine;

// scheduler.cpp
// Reports a fault and ends the launch; the first one counts.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
void pause_maybe();
void block(Wait wait, u64 awaited, u64 detail, Fibers& list);
void wake(Fibers& list);
bool is_private(u64 address);  // a thread's stack, the program's constants

// Notes where in the kernel the caller was called from, for `fail`.
#define EMU_SITE() (::emu::machine.now->site = __builtin_return_address(0))

// warp.cpp
using Products = double[16][8];
float half_value(u32 bits);
float bfloat_value(u32 bits);
// A lane's part of A [16, 16], as mma/mma.cuh describes it.
template <float (*kValue)(u32)>
void place_a(double (&a)[16][16], u32 lane, const u32* words) {
  const u32 g = lane / 4, t = lane % 4;
  for (u32 i = 0; i < 4; ++i) {
    double* row = &a[g + (i & 1) * 8][2 * t + (i >> 1) * 8];
    row[0] = kValue(words[i]);
    row[1] = kValue(words[i] >> 16);
  }
}
void multiply(const double (&a)[16][16], const double (&b)[16][8], Products& sum);
void meet_warp(const char* operation, void (*finish)());  // the last lane runs `finish`

// order.cpp
inline bool happened_before(const Fiber& f, u32 component, u32 epoch) {
  return component == f.self || epoch <= f.knows[component];
}
u32 async_component(const Mbarrier& barrier);
std::string component_name(const Fiber& f, u32 component);
void release(Fiber& f, Clock& into);
void acquire(Fiber& f, const Clock& from, Memo& memo);
void order_all(const Fibers& fibers);  // each before all others

// shared_memory.cpp
void open_shared(Cta& cta);
void close_shared(const Cta& cta);
bool is_shared(u64 address);
Cta* cta_at(u32 address, Cluster& cluster);  // null: none of the cluster's
std::string shared_place(u32 address);
inline u8* host(u32 shared) { return reinterpret_cast<u8*>(static_cast<u64>(shared)); }
void shared_read(u32 address, u32 bytes);
void shared_read_async(u32 address, u32 bytes);  // by the asynchronous proxy
enum class Write { kPlain, kAtomic, kPush, kBulk };
void shared_write(u32 address, u32 bytes);
void shared_write(Cta& cta, u32 address, u32 bytes, u32 component, u32 epoch, Write how);
const Cell& cell_at(Cta& cta, u32 address);

// global_memory.cpp
void open_ranges();
enum class Read { kPlain, kBulk };
void global_read(u64 address, u32 bytes, Read how = Read::kPlain);
void global_write(u64 address, u32 bytes);
void check_unwritten(u64 address, u32 bytes);  // as bulk bytes are fetched
void need_aligned(u64 address, u32 bytes);

// barriers.cpp
void bar_sync(i32 id, i32 threads);
void check_phase(Mbarrier& barrier);
Mbarrier& mbarrier_at(u32 address, bool own, const char* user);
void check_cluster_phase(Cluster& cluster);
void leave_barriers(Fiber& f);
void check_barriers_at_exit(const Cta& cta);

// async_copies.cpp
void deliver(u32 transfer);

}  // namespace emu
