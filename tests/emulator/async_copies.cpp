// Asynchronous copies: cp.async, bulk copies, st.async. Their bytes are unset until they come,
// which the scheduler decides, in parts and in any order.
#include <algorithm>
#include <cstring>

#include "machine.h"
#include "ptx.h"

namespace emu {
namespace {

constexpr u8 kUnset = 0xff;

void start_copy(u32 to, const void* from, u32 size, u32 bytes) {
  pause_maybe();
  need_aligned(to, size);
  if (bytes > size) fail("cp.async of %u of %u bytes", bytes, size);
  if (bytes != 0) {
    need_aligned(reinterpret_cast<u64>(from), size);
    global_read(reinterpret_cast<u64>(from), bytes);
  }
  shared_write(to, size);
  memset(host(to), kUnset, size);
  Fiber& f = *machine.now;
  f.copies.push_back({to, static_cast<const u8*>(from), size, bytes, f.copy_group});
}

void place(const Copy& copy) {
  memset(host(copy.to), 0, copy.size);
  memcpy(host(copy.to), copy.from, copy.bytes);
}

// Takes those of groups before `group` out of `copies`.
void take_before(i32 group, std::vector<Copy>& copies, std::vector<Copy>& taken) {
  const auto behind = std::partition(copies.begin(), copies.end(),
                                     [&](const Copy& copy) { return copy.group >= group; });
  taken.insert(taken.end(), behind, copies.end());
  copies.erase(behind, copies.end());
}

// Waits until at most `left` groups are under way. Copies that an arrival waits for come too; they
// are not written anew, since who waits for the barrier knows of them by that arrival.
void wait_groups(i32 left) {
  pause_maybe();
  Fiber& f = *machine.now;
  std::vector<Copy> own, arriving;
  take_before(f.copy_group - left, f.copies, own);
  for (Transfer& t : machine.transfers) {
    if (t.copier == &f) take_before(f.copy_group - left, t.copies, arriving);
  }
  std::shuffle(own.begin(), own.end(), machine.random);
  for (const Copy& copy : own) {
    shared_write(copy.to, copy.size);
    place(copy);
  }
  for (const Copy& copy : arriving) place(copy);
}

// The arrival counts in the phase that runs: without it the phase cannot end.
void arrive_after_copies(u32 address) {
  pause_maybe();
  Fiber& f = *machine.now;
  Mbarrier& m = mbarrier_at(address, true, "arrive after copies");
  Transfer t(Transfer::kArrival, m);
  t.copies.swap(f.copies);
  t.copier = &f;
  t.releases = Clock::zero();
  release(f, t.releases);
  ++m.under_way;
  machine.transfers.push_back(t);
}

void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  pause_maybe();
  need_aligned(to, 16);
  need_aligned(reinterpret_cast<u64>(from), 16);
  if (bytes % 16 != 0 || bytes == 0) fail("a bulk copy of %u bytes", bytes);
  Mbarrier& m = mbarrier_at(barrier, true, "bulk copy");
  Cta& cta = *machine.now->cta;
  if (cta_at(to, *cta.cluster) != &cta) fail("a bulk copy to %x, outside the CTA", to);
  global_read(reinterpret_cast<u64>(from), bytes, Read::kBulk);
  shared_write(cta, to, bytes, async_component(m), m.phase + 1, Write::kBulk);
  const Cell& init = cell_at(cta, barrier);
  if (init.epoch > cta.fibers[init.writer % machine.shape.threads].initialised_epoch) {
    fail("a bulk copy for the mbarrier at %s without fence.mbarrier_init",
         shared_place(barrier).c_str());
  }
  memset(host(to), kUnset, bytes);
  ++m.under_way;
  Transfer t(Transfer::kBulk, m);
  t.to = to;
  t.left = bytes;
  t.from = static_cast<const u8*>(from);
  machine.transfers.push_back(t);
}

void push(u32 to, const float* values, u32 bytes, u32 barrier) {
  pause_maybe();
  need_aligned(to, bytes);
  Fiber& f = *machine.now;
  Cta* cta = cta_at(to, *f.cta->cluster);
  if (cta == nullptr) fail("st.async to %x, outside the cluster", to);
  Mbarrier& m = mbarrier_at(barrier, false, "st.async");
  if (m.cta != cta) fail("st.async with data and barrier in different CTAs");
  if (cta->exited()) fail("st.async into CTA %u, which has exited", cta->rank);
  shared_write(*cta, to, bytes, async_component(m), m.phase + 1, Write::kPush);
  if (machine.shape.strict_push == 0) release(f, m.releases);
  Transfer t(Transfer::kPush, m);
  t.to = to;
  t.left = bytes;
  memcpy(t.data, values, bytes);
  memset(host(to), kUnset, bytes);
  ++m.under_way;
  machine.transfers.push_back(t);
}

// Bytes that come now: of a bulk copy at times only some, in whole pieces of 16.
u32 arriving_bytes(const Transfer& t) {
  const bool in_part = t.kind == Transfer::kBulk && t.left > 16 && machine.below(3) == 0;
  return in_part ? 16 * (1 + machine.below(t.left / 16)) : t.left;
}

void check_target(const Transfer& t) {
  const Mbarrier& m = *t.barrier;
  if (m.phase != t.phase) {
    fail("bytes of phase %u come in phase %u of mbarrier %u (%s)", t.phase, m.phase, m.index,
         shared_place(m.address).c_str());
  }
  if (m.cta->exited()) fail("asynchronous bytes come to CTA %u, which has exited", m.cta->rank);
}

void deliver_arrival(Transfer& t) {
  Mbarrier& m = *t.barrier;
  std::shuffle(t.copies.begin(), t.copies.end(), machine.random);
  for (const Copy& copy : t.copies) place(copy);
  m.releases.join(t.releases);
  if (m.pending == 0) fail("more than %u arrivals at mbarrier %u", m.expected, m.index);
  --m.pending;
  t.left = 0;
}

void deliver_bytes(Transfer& t) {
  const u32 bytes = arriving_bytes(t);
  if (t.kind == Transfer::kBulk) check_unwritten(reinterpret_cast<u64>(t.from), bytes);
  memcpy(host(t.to), t.kind == Transfer::kBulk ? t.from : t.data, bytes);
  check_target(t);
  t.to += bytes;
  t.from += t.kind == Transfer::kBulk ? bytes : 0;
  t.left -= bytes;
  t.barrier->bytes -= bytes;
}

}  // namespace

void deliver(u32 index) {
  Transfer& t = machine.transfers[index];
  Mbarrier& m = *t.barrier;
  t.kind == Transfer::kArrival ? deliver_arrival(t) : deliver_bytes(t);
  if (t.left == 0) {
    --m.under_way;
    t = machine.transfers.back();
    machine.transfers.pop_back();
  }
  check_phase(m);
}

namespace ptx {

void copy16_async(u32 to, const void* from, i32 bytes) {
  EMU_SITE();
  start_copy(to, from, 16, static_cast<u32>(bytes));
}
void copy4_async(u32 to, const void* from) {
  EMU_SITE();
  start_copy(to, from, 4, 4);
}
void copy16_async_if(u32 to, const void* from, i32 bytes, u32 valid) {
  EMU_SITE();
  if (valid != 0) start_copy(to, from, 16, static_cast<u32>(bytes));
}
void copy16_async_hinted_if(u32 to, const void* from, u32 valid, u64) {
  EMU_SITE();
  if (valid != 0) start_copy(to, from, 16, 16);
}
void commit_async() { ++machine.now->copy_group; }
void wait_async(i32 groups) {
  EMU_SITE();
  wait_groups(groups);
}
void mbarrier_arrive_after_copies(u32 barrier) {
  EMU_SITE();
  arrive_after_copies(barrier);
}
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  EMU_SITE();
  bulk_copy(to, from, bytes, barrier);
}
void fence_async_proxy() {
  Fiber& f = *machine.now;
  f.fenced = f.knows;
  f.fenced_epoch = f.epoch++;
}
void map_shared(u32& mapped, u32 address, u32 rank) {
  EMU_SITE();
  const Cta& cta = *machine.now->cta;
  if (rank >= machine.shape.cluster) fail("mapa to rank %u of %u", rank, machine.shape.cluster);
  if (cta_at(address, *cta.cluster) != &cta) fail("mapa of an address of another CTA");
  mapped = address - cta.window + cta.cluster->ctas[rank].window;
}
void push4(u32 to, float x, float y, float z, float w, u32 barrier) {
  EMU_SITE();
  const float values[4] = {x, y, z, w};
  push(to, values, 16, barrier);
}
void push1(u32 to, float value, u32 barrier) {
  EMU_SITE();
  push(to, &value, 4, barrier);
}

}  // namespace ptx
}  // namespace emu
