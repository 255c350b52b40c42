// Fibers and their schedule. In: a Shape and the body of a thread. Out: 0, or 1 and a message that
// says what went wrong, in which thread and where in the code.
//
// Clusters come as others leave, as they do on a device; of the threads that can run, any may be
// next. A seed gives the same schedule every time.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "machine.h"

namespace emu {

Machine machine;

namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr u64 kMostSteps = 4000000000ull;
constexpr size_t kMostLines = 40;  // of a report

struct Failure {};  // thrown to the scheduler's own loop

void* scheduler_stack;
u8* stacks;
size_t stacks_bytes;
std::vector<std::pair<u64, u64>> code;  // of the program that runs, and its constants
bool failed;

// Saves the registers that a call keeps, and the stack pointer, and goes on with another stack.
extern "C" void emu_switch(void** save, void* to);
asm(R"(
  .text
  .globl emu_switch
  .hidden emu_switch
emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
constexpr int kSavedRegisters = 6;

void to_scheduler() { emu_switch(&machine.now->stack, scheduler_stack); }

void make_ready(Fiber* f) {
  f->wait = Wait::kNone;
  machine.ready.push_back(f);
}

std::string thread_name(const Fiber& f) {
  char text[96];
  snprintf(text, sizeof text, "cluster %u cta %u warp %u lane %u", f.cta->cluster->index,
           f.cta->rank, f.warp, f.lane);
  return text;
}

std::string code_place(const void* site) {
  char text[48];
  const u64 start = code.empty() ? 0 : code.front().first;
  snprintf(text, sizeof text, "[code+0x%llx]", reinterpret_cast<u64>(site) - start);
  return text;
}

void leave_cta(Fiber& f) {
  Cta& cta = *f.cta;
  cta.waited |= f.waited;
  if (--cta.live != 0) return;
  for (const Transfer& t : machine.transfers) {
    if (t.barrier->cta == &cta) fail("the CTA exits with asynchronous work on the way to it");
  }
  check_barriers_at_exit(cta);
  if (!cta.waited) fail("a CTA exits, and none of its threads has waited for the kernel ahead");
}

void thread_main() {
  machine.body();
  Fiber& f = *machine.now;
  f.done = true;
  if (!f.copies.empty()) fail("a thread exits with cp.async under way");
  if (machine.shape.each_waits != 0 && !f.waited) {
    fail("a thread exits without griddepcontrol.wait");
  }
  leave_barriers(f);
  leave_cta(f);
  to_scheduler();
  abort();
}

void reserve_stacks(size_t threads) {
  if (threads * kStackBytes <= stacks_bytes) return;
  if (stacks != nullptr) munmap(stacks, stacks_bytes);
  stacks_bytes = threads * kStackBytes;
  void* at = mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) fail("no memory for %zu stacks", threads);
  stacks = static_cast<u8*>(at);
}

// The loaded object that holds `body`: its code and constants are no memory of the kernel's.
void find_code(Body body) {
  code.clear();
  const auto visit = [](dl_phdr_info* info, size_t, void* wanted) {
    std::vector<std::pair<u64, u64>> found;
    bool mine = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      const u64 start = info->dlpi_addr + header.p_vaddr, end = start + header.p_memsz;
      found.emplace_back(start, end);
      mine |= start <= reinterpret_cast<u64>(wanted) && reinterpret_cast<u64>(wanted) < end;
    }
    if (mine) code = found;
    return mine ? 1 : 0;
  };
  dl_iterate_phdr(visit, reinterpret_cast<void*>(body));
}

void open_fiber(Cta& cta, u32 thread, u32 slot, const Clock& nothing) {
  const Shape& shape = machine.shape;
  Fiber& f = cta.fibers.emplace_back();
  f.cta = &cta;
  f.thread = thread;
  f.lane = thread % kWarpSize;
  f.warp = thread / kWarpSize;
  f.self = cta.rank * shape.threads + thread;
  f.global = cta.index * shape.threads + thread;
  f.knows = nothing;
  f.waited = shape.dependent == 0;
  const size_t place =
      static_cast<size_t>(slot * shape.cluster + cta.rank) * shape.threads + thread;
  u64* top = reinterpret_cast<u64*>(stacks + kStackBytes * (place + 1));
  *--top = 0;  // as a call would have it, for the alignment
  *--top = reinterpret_cast<u64>(thread_main);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
  f.stack = top;
  make_ready(&f);
}

void open_cluster(u32 index, u32 slot) {
  const Shape& shape = machine.shape;
  machine.clusters.push_back(std::make_unique<Cluster>());
  Cluster& cluster = *machine.clusters.back();
  cluster.index = index;
  cluster.slot = slot;
  cluster.live = machine.cluster_threads();
  cluster.releases = Clock::zero();
  cluster.complete = Clock::zero();
  const Clock nothing = Clock::zero();
  for (u32 rank = 0; rank < shape.cluster; ++rank) {
    Cta& cta = cluster.ctas.emplace_back();
    cta.cluster = &cluster;
    cta.rank = rank;
    cta.index = index * shape.cluster + rank;
    cta.live = shape.threads;
    cta.warps.resize(shape.threads / kWarpSize);
    open_shared(cta);
    for (u32 t = 0; t < shape.threads; ++t) open_fiber(cta, t, slot, nothing);
  }
}

// Returns the slot that a cluster has left.
u32 close_cluster(const Cluster* cluster) {
  const u32 slot = cluster->slot;
  for (const Cta& cta : cluster->ctas) close_shared(cta);
  auto& all = machine.clusters;
  all.erase(std::find_if(all.begin(), all.end(), [&](auto& c) { return c.get() == cluster; }));
  return slot;
}

std::string waits_for(const Fiber& f) {
  char text[160];
  switch (f.wait) {
    case Wait::kMbarrier: {
      const Mbarrier& m = f.cta->mbarriers.at(static_cast<u32>(f.awaited));
      snprintf(text, sizeof text,
               "mbarrier %u (%s) parity %llu: phase %u, pending %u of %u, bytes %lld, %u under way",
               m.index, shared_place(m.address).c_str(), f.detail, m.phase, m.pending, m.expected,
               m.bytes, m.under_way);
      return text;
    }
    case Wait::kBarrier:
      snprintf(text, sizeof text, "bar.sync %llu", f.awaited);
      return text;
    case Wait::kWarp:
      return "the other lanes of its warp";
    case Wait::kCluster:
      return "the cluster's barrier";
    default:
      return "nothing";
  }
}

[[noreturn]] void report_deadlock() {
  std::map<std::string, int> lanes;
  for (const auto& cluster : machine.clusters) {
    for (const Cta& cta : cluster->ctas) {
      for (const Fiber& f : cta.fibers) {
        if (f.done) continue;
        char head[64];
        snprintf(head, sizeof head, "cluster %u cta %u warp %u waits for ", cluster->index,
                 cta.rank, f.warp);
        ++lanes[head + waits_for(f) + " " + code_place(f.site)];
      }
    }
  }
  std::string text = "deadlock";
  size_t lines = 0;
  for (const auto& [line, count] : lanes) {
    if (++lines > kMostLines) break;
    text += "\n  " + std::to_string(count) + " lanes of " + line;
  }
  machine.message = text;
  failed = true;
  throw Failure{};
}

// Returns the thread that ran.
Fiber* run_one() {
  const u32 i = machine.below(static_cast<u32>(machine.ready.size()));
  Fiber* f = machine.ready[i];
  machine.ready[i] = machine.ready.back();
  machine.ready.pop_back();
  machine.now = f;
  emu_switch(&scheduler_stack, f->stack);
  machine.now = nullptr;
  if (failed) throw Failure{};
  return f;
}

// Returns a cluster that has come to its end with this step, or null.
Cluster* step() {
  if (++machine.steps > kMostSteps) fail("the launch takes more than %llu steps", kMostSteps);
  auto& transfers = machine.transfers;
  if (!transfers.empty() && (machine.ready.empty() || machine.chance(machine.shape.deliver))) {
    deliver(machine.below(static_cast<u32>(transfers.size())));
    return nullptr;
  }
  if (machine.ready.empty()) report_deadlock();
  const Fiber* f = run_one();
  return f->done && f->cta->cluster->live == 0 ? f->cta->cluster : nullptr;
}

void run_grid() {
  const Shape& shape = machine.shape;
  const u32 all = shape.grid_x * shape.grid_y / shape.cluster;
  const u32 room = std::min(kMostCtas / shape.cluster, kMostThreads / machine.cluster_threads());
  std::vector<u32> free_slots;
  for (u32 slot = 0; slot < std::min(room, all); ++slot) free_slots.push_back(slot);
  u32 opened = 0;
  while (opened < all || !machine.clusters.empty()) {
    while (opened < all && !free_slots.empty()) {
      open_cluster(opened++, free_slots.back());
      free_slots.pop_back();
    }
    const Cluster* ended = step();
    if (ended != nullptr) free_slots.push_back(close_cluster(ended));
  }
  if (!machine.transfers.empty()) fail("asynchronous work is left at the end");
}

void check_shape() {
  const Shape& shape = machine.shape;
  if (shape.threads == 0 || shape.threads > 1024 || shape.threads % kWarpSize != 0) {
    fail("a launch of %u threads a CTA", shape.threads);
  }
  if (shape.cluster == 0 || shape.cluster > kMostCluster || shape.grid_x == 0 ||
      shape.grid_y == 0 || shape.grid_x % shape.cluster != 0) {
    fail("a launch of %u x %u CTAs in clusters of %u", shape.grid_x, shape.grid_y, shape.cluster);
  }
  if (shape.smem > kSharedLimit) fail("a launch with %u bytes of shared memory", shape.smem);
}

void reset() {
  machine.clusters.clear();
  machine.transfers.clear();
  machine.ready.clear();
  machine.now = nullptr;
}

}  // namespace

void fail(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  failed = true;
  machine.message = text;
  if (machine.now == nullptr) throw Failure{};
  machine.message += " @ " + thread_name(*machine.now) + " " + code_place(machine.now->site);
  to_scheduler();
  abort();
}

void pause_maybe() {
  if (!machine.chance(machine.shape.pause)) return;
  make_ready(machine.now);
  to_scheduler();
}

void block(Wait wait, u64 awaited, u64 detail, Fibers& list) {
  machine.now->wait = wait;
  machine.now->awaited = awaited;
  machine.now->detail = detail;
  list.push_back(machine.now);
  to_scheduler();
}

void wake(Fibers& list) {
  for (Fiber* f : list) make_ready(f);
  list.clear();
}

bool is_private(u64 address) {
  const u64 first = reinterpret_cast<u64>(stacks);
  if (address >= first && address < first + stacks_bytes) return true;
  return std::any_of(code.begin(), code.end(), [&](const auto& part) {
    return address >= part.first && address < part.second;
  });
}

int run(const Shape& shape, Body body) {
  machine.shape = shape;
  machine.body = body;
  machine.random.seed(shape.seed);
  machine.steps = 0;
  machine.message.clear();
  failed = false;
  try {
    check_shape();
    find_code(body);
    Clock::resize(machine.cluster_threads() + kMbarriers * shape.cluster);
    reserve_stacks(
        std::min<size_t>(static_cast<size_t>(shape.grid_x) * shape.grid_y * shape.threads,
                         std::max(kMostThreads, machine.cluster_threads())));
    open_ranges();
    run_grid();
  } catch (const Failure&) {
  }
  reset();
  return failed ? 1 : 0;
}

}  // namespace emu

extern "C" {
__attribute__((visibility("default"))) const char* emulator_message() {
  return emu::machine.message.c_str();
}
__attribute__((visibility("default"))) unsigned long long emulator_steps() {
  return emu::machine.steps;
}
}
