// Happens-before: what threads learn of one another at barriers.
#include <cstdio>

#include "machine.h"

namespace emu {

u32 async_component(const Mbarrier& barrier) {
  return machine.cluster_threads() + barrier.cta->rank * kMbarriers + barrier.index;
}

std::string component_name(const Fiber& f, u32 component) {
  char text[96];
  const u32 threads = machine.shape.threads, all = machine.cluster_threads();
  if (component == f.self) return "this thread";
  if (component < all) {
    snprintf(text, sizeof text, "cta %u warp %u lane %u", component / threads,
             component % threads / kWarpSize, component % kWarpSize);
  } else {
    snprintf(text, sizeof text, "what mbarrier %u of cta %u counts", (component - all) % kMbarriers,
             (component - all) / kMbarriers);
  }
  return text;
}

void release(Fiber& f, Clock& into) {
  into.join(f.knows);
  into.raise(f.self, f.epoch);
  ++f.epoch;
}

void acquire(Fiber& f, const Clock& from, Memo& memo) {
  if (memo.before && memo.before.is(f.knows)) {
    f.knows = memo.after;
    return;
  }
  Clock after = f.knows.copy();
  after.join(from);
  memo = Memo{f.knows, after};
  f.knows = after;
}

void order_all(const Fibers& fibers) {
  Clock all = fibers[0]->knows.copy();
  const Clock* seen = &fibers[0]->knows;
  for (Fiber* f : fibers) {
    if (!f->knows.is(*seen)) all.join(f->knows);
    seen = &f->knows;
  }
  for (Fiber* f : fibers) {
    all.raise(f->self, f->epoch);
    ++f->epoch;
  }
  for (Fiber* f : fibers) f->knows = all;
}

}  // namespace emu
