// Barriers of a CTA (bar.sync), mbarriers, and the cluster's barrier.
#include "machine.h"
#include "ptx.h"

namespace emu {
namespace {

constexpr u32 kMostBytes = 1u << 20;  // that an mbarrier can announce

void init_mbarrier(u32 address, u32 arrivals) {
  need_aligned(address, 8);
  shared_write(address, 8);
  Cta& cta = *machine.now->cta;
  if (cta.mbarriers.count(address) != 0) fail("an mbarrier is initialised twice");
  if (cta.mbarriers.size() >= kMbarriers) fail("more than %u mbarriers", kMbarriers);
  Mbarrier m;
  m.cta = &cta;
  m.address = address;
  m.index = static_cast<u32>(cta.mbarriers.size());
  m.expected = m.pending = arrivals;
  m.releases = Clock::zero();
  m.complete = Clock::zero();
  cta.mbarriers[address] = m;
}

void arrive(u32 address, u32 bytes) {
  pause_maybe();
  Mbarrier& m = mbarrier_at(address, true, "arrive");
  if (bytes >= kMostBytes) fail("an mbarrier is to expect %u bytes", bytes);
  if (m.pending == 0) {
    fail("more than %u arrivals in phase %u of mbarrier %u (%s)", m.expected, m.phase, m.index,
         shared_place(address).c_str());
  }
  release(*machine.now, m.releases);
  m.bytes += bytes;
  --m.pending;
  check_phase(m);
  pause_maybe();
}

bool phase_done(Mbarrier& m, u32 parity) {
  if ((m.phase & 1) == parity) return false;
  if (m.phase != 0) acquire(*machine.now, m.complete, m.memo);
  return true;
}

void wait(u32 address, u32 parity) {
  if (parity > 1) fail("an mbarrier's parity is %u", parity);
  pause_maybe();
  Mbarrier& m = mbarrier_at(address, true, "wait");
  while (!phase_done(m, parity)) block(Wait::kMbarrier, address, parity, m.waiting);
  pause_maybe();
}

void arrive_at_cluster() {
  pause_maybe();
  Fiber& f = *machine.now;
  Cluster& cluster = *f.cta->cluster;
  if (f.cluster_due) fail("barrier.cluster.arrive twice without a wait");
  f.cluster_due = true;
  f.cluster_phase = cluster.phase;
  if (f.initialised) {
    cluster.releases.join(f.initialised);
    cluster.releases.raise(f.self, f.initialised_epoch);
  }
  ++cluster.arrived;
  check_cluster_phase(cluster);
}

}  // namespace

void bar_sync(i32 id, i32 threads) {
  pause_maybe();
  if (id < 0 || id >= static_cast<i32>(kNamedBarriers)) fail("bar.sync %d", id);
  NamedBarrier& b = machine.now->cta->barriers[id];
  if (threads % static_cast<i32>(kWarpSize) != 0 ||
      threads > static_cast<i32>(machine.shape.threads)) {
    fail("bar.sync of %d threads", threads);
  }
  if (b.arrived != 0 && b.count != threads) {
    fail("bar.sync %d of %d threads, and of %d elsewhere", id, threads, b.count);
  }
  b.count = threads;
  if (++b.arrived < static_cast<u32>(threads)) {
    block(Wait::kBarrier, static_cast<u64>(id), 0, b.waiting);
  } else {
    b.arrived = 0;
    Fibers all = b.waiting;
    all.push_back(machine.now);
    order_all(all);
    wake(b.waiting);
  }
  pause_maybe();
}

// `own`: it must be this CTA's.
Mbarrier& mbarrier_at(u32 address, bool own, const char* user) {
  Fiber& f = *machine.now;
  Cta* cta = cta_at(address, *f.cta->cluster);
  if (cta == nullptr || (own && cta != f.cta)) {
    fail("%s: %x is no address of %s", user, address, own ? "this CTA" : "this cluster");
  }
  const auto found = cta->mbarriers.find(address);
  if (found == cta->mbarriers.end()) {
    fail("%s: there is no mbarrier at %s", user, shared_place(address).c_str());
  }
  const Cell& cell = cell_at(*cta, address);
  if (!happened_before(f, cell.writer, cell.epoch)) {
    fail("%s: the mbarrier at %s may not be initialised yet: %s did it in no order", user,
         shared_place(address).c_str(), component_name(f, cell.writer).c_str());
  }
  return found->second;
}

void check_phase(Mbarrier& m) {
  if (m.pending != 0) return;
  if (m.bytes < 0) {
    fail("%lld bytes more than announced in phase %u of mbarrier %u (%s)", -m.bytes, m.phase,
         m.index, shared_place(m.address).c_str());
  }
  if (m.bytes != 0) return;
  ++m.phase;
  m.releases.raise(async_component(m), m.phase);
  m.complete = m.releases;
  m.releases = Clock::zero();
  m.memo = Memo();
  m.pending = m.expected;
  wake(m.waiting);
}

void check_cluster_phase(Cluster& cluster) {
  if (cluster.live == 0 || cluster.arrived < cluster.live) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.complete = cluster.releases;
  cluster.releases = Clock::zero();
  cluster.memo = Memo();
  wake(cluster.waiting);
}

// A thread that exits counts no more.
void leave_barriers(Fiber& f) {
  Cluster& cluster = *f.cta->cluster;
  if (f.cluster_due && f.cluster_phase == cluster.phase) --cluster.arrived;
  --cluster.live;
  check_cluster_phase(cluster);
}

void check_barriers_at_exit(const Cta& cta) {
  for (const auto& [address, m] : cta.mbarriers) {
    if (m.bytes != 0 || m.pending != m.expected) {
      fail("the CTA exits within a phase of mbarrier %u: pending %u of %u, bytes %lld", m.index,
           m.pending, m.expected, m.bytes);
    }
  }
}

namespace ptx {

void mbarrier_init(u32 address, u32 arrivals) {
  EMU_SITE();
  init_mbarrier(address, arrivals);
}
void fence_mbarrier_init() {
  Fiber& f = *machine.now;
  f.initialised = f.knows;
  f.initialised_epoch = f.epoch++;
}
void mbarrier_arrive(u32 address) {
  EMU_SITE();
  arrive(address, 0);
}
void mbarrier_expect(u32 address, u32 bytes) {
  EMU_SITE();
  arrive(address, bytes);
}
void mbarrier_wait(u32 address, u32 parity) {
  EMU_SITE();
  wait(address, parity);
}
void bar_sync(i32 id, i32 threads) {
  EMU_SITE();
  emu::bar_sync(id, threads);
}
void cluster_arrive_relaxed() {
  EMU_SITE();
  arrive_at_cluster();
}
void cluster_wait() {
  EMU_SITE();
  pause_maybe();
  Fiber& f = *machine.now;
  Cluster& cluster = *f.cta->cluster;
  if (!f.cluster_due) fail("barrier.cluster.wait without an arrive");
  f.cluster_due = false;
  while (cluster.phase == f.cluster_phase) block(Wait::kCluster, 0, 0, cluster.waiting);
  acquire(f, cluster.complete, cluster.memo);
}
void cluster_rank(u32& rank) { rank = machine.now->cta->rank; }
void cluster_index(u32& index) { index = machine.now->cta->cluster->index; }
void cluster_size(u32& size) { size = machine.shape.cluster; }

void wait_for_predecessor() {
  EMU_SITE();
  pause_maybe();
  machine.now->waited = true;
}
void release_successor() {
  EMU_SITE();
  if (!machine.now->waited) fail("griddepcontrol.launch_dependents before the wait");
}

}  // namespace ptx
}  // namespace emu
