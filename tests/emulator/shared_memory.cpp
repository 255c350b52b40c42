// Shared memory: where it lies, its bounds, and for each granule who wrote and read it, so that two
// accesses in no order are seen however the schedule happened to place them.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cuda.h"
#include "machine.h"

namespace emu {
namespace {

constexpr u8 kUnset = 0xff;  // NaN in every float type

std::vector<Cell> cell_pool[kMostCtas];

void map_arena() {
  static bool mapped = false;
  if (mapped) return;
  void* at = mmap(host(kArena), static_cast<size_t>(kWindow) * kMostCtas, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0);
  if (at != host(kArena)) fail("the address range of shared memory is taken");
  mapped = true;
}

u32 granule_of(const Cta& cta, u32 address) {
  return (address - cta.window) >> machine.shape.granule_log2;
}

void clear_cells(Cta& cta, u32 first_byte, u32 last_byte) {
  const u32 first = first_byte >> machine.shape.granule_log2;
  const u32 last = (last_byte + 1) >> machine.shape.granule_log2;
  if (cta.cells->size() < last + 1) cta.cells->resize(last + 1);
  for (u32 i = first; i <= last; ++i) {
    Cell& cell = (*cta.cells)[i];
    cell.epoch = 0;
    cell.async = cell.atomic = false;
    cell.readers.clear();
  }
}

bool in_bounds(const Cta& cta, u32 address, u32 bytes) {
  if (address < cta.window) return false;
  const u32 first = address - cta.window, last = first + bytes;
  const bool dynamic = first >= kDynamicStart && last <= kDynamicStart + machine.shape.smem;
  return dynamic || (first >= machine.static_start() && last <= cta.static_end);
}

[[noreturn]] void race(const char* what, u32 granule, const Cta& cta, u32 component, u32 epoch) {
  const u32 address = cta.window + (granule << machine.shape.granule_log2);
  const Fiber& f = *machine.now;
  fail("race: %s at %s, against %s (its epoch %u; %u is known here)", what,
       shared_place(address).c_str(), component_name(f, component).c_str(), epoch,
       component == f.self ? f.epoch : f.knows[component]);
}

// Readers that everything from here on is ordered behind need not be kept.
void forget_ordered(Cell& cell) {
  const Fiber& f = *machine.now;
  const auto ordered = [&](u64 reader) {
    return happened_before(f, static_cast<u32>(reader >> 32), static_cast<u32>(reader));
  };
  auto& all = cell.readers;
  all.erase(std::remove_if(all.begin(), all.end(), ordered), all.end());
}

void note_reader(Cell& cell) {
  const Fiber& f = *machine.now;
  const u64 me = static_cast<u64>(f.self) << 32 | f.epoch;
  if (!cell.readers.empty() && cell.readers.back() == me) return;
  if (cell.readers.size() == cell.readers.capacity()) forget_ordered(cell);
  cell.readers.push_back(me);
}

// A fence between a generic write and what the asynchronous proxy does there: of the thread that
// wrote, behind its write, or of this one.
void check_fenced(const Cell& cell, u32 address, const char* what) {
  const Fiber& f = *machine.now;
  const u32 threads = machine.shape.threads;
  const Fiber& writer = f.cta->cluster->ctas[cell.writer / threads].fibers[cell.writer % threads];
  const bool own = f.fenced && cell.epoch <= f.fenced[cell.writer];
  if (cell.epoch > writer.fenced_epoch && !own) {
    fail("%s generic writes without fence.proxy.async at %s", what, shared_place(address).c_str());
  }
}

}  // namespace

void open_shared(Cta& cta) {
  map_arena();
  const u32 place = cta.cluster->slot * machine.shape.cluster + cta.rank;
  cta.window = kArena + place * kWindow;
  cta.cells = &cell_pool[place];
  cta.static_end = machine.static_start();
  memset(host(cta.window), kUnset, machine.static_start());
  clear_cells(cta, 0, machine.static_start());
}

void close_shared(const Cta& cta) {
  const u8* guard = host(cta.window + kDynamicStart + machine.shape.smem);
  const bool whole = std::all_of(guard, guard + kGuard, [](u8 b) { return b == kUnset; });
  if (!whole) fail("the bytes behind the shared memory of CTA %u have changed", cta.index);
}

bool is_shared(u64 address) {
  return address >= kArena && address < kArena + static_cast<u64>(kWindow) * kMostCtas;
}

Cta* cta_at(u32 address, Cluster& cluster) {
  if (!is_shared(address)) return nullptr;
  const u32 place = (address - kArena) / kWindow, first = cluster.slot * machine.shape.cluster;
  const bool mine = place >= first && place < first + cluster.ctas.size();
  return mine ? &cluster.ctas[place - first] : nullptr;
}

std::string shared_place(u32 address) {
  char text[96];
  const u32 offset = (address - kArena) % kWindow, place = (address - kArena) / kWindow;
  const u32 rank = place % machine.shape.cluster, first_static = machine.static_start();
  if (offset >= first_static) {
    snprintf(text, sizeof text, "cta %u static+%u", rank, offset - first_static);
  } else {
    snprintf(text, sizeof text, "cta %u dynamic+%d", rank,
             static_cast<i32>(offset) - static_cast<i32>(kDynamicStart));
  }
  return text;
}

const Cell& cell_at(Cta& cta, u32 address) { return (*cta.cells)[granule_of(cta, address)]; }

void shared_read(u32 address, u32 bytes) {
  Cta& cta = *machine.now->cta;
  if (!in_bounds(cta, address, bytes)) {
    fail("shared read of %u bytes out of bounds at %s", bytes, shared_place(address).c_str());
  }
  const u32 last = granule_of(cta, address + bytes - 1);
  for (u32 i = granule_of(cta, address); i <= last; ++i) {
    Cell& cell = (*cta.cells)[i];
    if (cell.epoch == 0 && machine.shape.may_read_unset == 0) {
      fail("read of unset shared memory at %s", shared_place(address).c_str());
    }
    if (cell.epoch != 0 && !happened_before(*machine.now, cell.writer, cell.epoch)) {
      race("read after write", i, cta, cell.writer, cell.epoch);
    }
    note_reader(cell);
  }
}

void shared_read_async(u32 address, u32 bytes) {
  shared_read(address, bytes);
  Cta& cta = *machine.now->cta;
  const u32 last = granule_of(cta, address + bytes - 1);
  for (u32 i = granule_of(cta, address); i <= last; ++i) {
    const Cell& cell = (*cta.cells)[i];
    if (cell.epoch != 0 && !cell.async) check_fenced(cell, address, "a product of");
  }
}

void shared_write(u32 address, u32 bytes) {
  const Fiber& f = *machine.now;
  shared_write(*f.cta, address, bytes, f.self, f.epoch, Write::kPlain);
}

void shared_write(Cta& cta, u32 address, u32 bytes, u32 component, u32 epoch, Write how) {
  const Fiber& f = *machine.now;
  if (!in_bounds(cta, address, bytes)) {
    fail("shared write of %u bytes out of bounds at %s", bytes, shared_place(address).c_str());
  }
  if (how == Write::kPlain && bytes < 1u << machine.shape.granule_log2) {
    fail("shared write of %u byte, which this launch does not track alone", bytes);
  }
  const u32 last = granule_of(cta, address + bytes - 1);
  for (u32 i = granule_of(cta, address); i <= last; ++i) {
    Cell& cell = (*cta.cells)[i];
    // Atomics among themselves need no order; only the last of them is remembered.
    const bool both_atomic = how == Write::kAtomic && cell.atomic;
    if (cell.epoch != 0 && !both_atomic && !happened_before(f, cell.writer, cell.epoch)) {
      race("write after write", i, cta, cell.writer, cell.epoch);
    }
    if (cell.epoch != 0 && how == Write::kBulk && !cell.async)
      check_fenced(cell, address, "a bulk copy over");
    for (const u64 reader : cell.readers) {
      const u32 who = static_cast<u32>(reader >> 32), when = static_cast<u32>(reader);
      if (!happened_before(f, who, when)) race("write after read", i, cta, who, when);
    }
    cell.readers.clear();
    cell.writer = component;
    cell.epoch = epoch;
    cell.async = how == Write::kPush || how == Write::kBulk;
    cell.atomic = how == Write::kAtomic;
  }
}

unsigned char* dynamic_shared() { return host(machine.now->cta->window + kDynamicStart); }

unsigned char* shared_variable(u32 number, u32 bytes) {
  constexpr u32 kAlignment = 16;
  Cta& cta = *machine.now->cta;
  const auto found = cta.variables.find(number);
  if (found != cta.variables.end()) return host(cta.window + found->second);
  const u32 at = (cta.static_end + kAlignment - 1) / kAlignment * kAlignment;
  cta.static_end = at + bytes;
  if (machine.shape.smem + cta.static_end - machine.static_start() > kSharedLimit) {
    fail("more than %u bytes of shared memory", kSharedLimit);
  }
  clear_cells(cta, at, cta.static_end);
  memset(host(cta.window + at), kUnset, bytes);
  cta.variables[number] = at;
  return host(cta.window + at);
}

u32 atomic_rmw(u32* address, u32 operand, u32 (*operation)(u32, u32)) {
  EMU_SITE();
  const u64 at = reinterpret_cast<u64>(address);
  if (!is_shared(at)) fail("an atomic on global memory, which is not modelled");
  need_aligned(at, 4);
  pause_maybe();
  const Fiber& f = *machine.now;
  shared_write(*f.cta, static_cast<u32>(at), 4, f.self, f.epoch, Write::kAtomic);
  const u32 before = *address;
  *address = operation(before, operand);
  return before;
}

}  // namespace emu
