// Global memory: the ranges that kernels may touch, and who wrote each element of the writable
// ones. In: ranges registered by device.py. An element that one thread wrote may be touched by
// another only if the two are ordered, which only threads of one cluster can be.
#include <algorithm>
#include <cstdio>

#include "machine.h"

namespace emu {
namespace {

constexpr u32 kUnit = 2;  // bytes that are tracked together: the smallest element

struct Owner {
  u32 writer;  // 1 + its number in the grid; 0: none yet
  u32 epoch;
};

struct Range {
  u64 first, last;
  u32 flags;
  u32 number;  // in the order that they were registered
  bool written;
  std::vector<Owner> owners;

  bool has(u64 address, u32 bytes) const { return address >= first && address + bytes <= last; }
};

std::vector<Range> ranges;
size_t hit;  // where the last access fell

Range* range_of(u64 address, u32 bytes) {
  if (hit < ranges.size() && ranges[hit].has(address, bytes)) return &ranges[hit];
  const auto behind = std::upper_bound(ranges.begin(), ranges.end(), address,
                                       [](u64 a, const Range& r) { return a < r.first; });
  if (behind == ranges.begin() || !(behind - 1)->has(address, bytes)) return nullptr;
  hit = static_cast<size_t>(behind - 1 - ranges.begin());
  return &ranges[hit];
}

std::string nearby(u64 address) {
  constexpr u64 kNear = 4096;
  char text[96];
  std::string all;
  for (const Range& r : ranges) {
    if (address + kNear <= r.first || address >= r.last + kNear) continue;
    snprintf(text, sizeof text, " %lld of the %llu bytes of range %u;",
             static_cast<i64>(address - r.first), r.last - r.first, r.number);
    all += text;
  }
  return all.empty() ? " far from all ranges" : " at byte" + all;
}

Range& checked(u64 address, u32 bytes, const char* what) {
  Range* range = range_of(address, bytes);
  if (range == nullptr) {
    fail("global %s of %u bytes out of bounds,%s", what, bytes, nearby(address).c_str());
  }
  if ((range->flags & kLate) != 0 && !machine.now->waited) {
    fail("global %s of range %u, which the kernel ahead may write, before griddepcontrol.wait",
         what, range->number);
  }
  return *range;
}

bool tracked(const Range& range) { return !range.owners.empty(); }

// Whether what `owner` wrote is ordered before this thread's access.
bool ordered(const Owner& owner) {
  const Fiber& f = *machine.now;
  const u32 threads = machine.cluster_threads(), writer = owner.writer - 1;
  if (writer == f.global) return true;
  return writer / threads == f.global / threads &&
         happened_before(f, writer % threads, owner.epoch);
}

template <typename Visit>
void each_unit(Range& range, u64 address, u32 bytes, const Visit& visit) {
  if (!tracked(range)) return;
  const u64 last = (address + bytes - range.first + kUnit - 1) / kUnit;
  for (u64 i = (address - range.first) / kUnit; i < last; ++i) visit(range.owners[i], i);
}

[[noreturn]] void clash(const char* what, u64 unit, const Owner& owner) {
  fail("bytes %llu of range %u are %s after thread %u of the grid wrote them", unit * kUnit,
       ranges[hit].number, what, owner.writer - 1);
}

}  // namespace

void need_aligned(u64 address, u32 bytes) {
  if (address % bytes != 0) fail("misaligned %u byte access at %llx", bytes, address);
}

void open_ranges() {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.first < b.first; });
  for (Range& r : ranges) {
    r.owners.clear();
    r.written = false;
    const bool tracks = (r.flags & kWritable) != 0 && (r.flags & kByAnyone) == 0;
    if (tracks) r.owners.resize((r.last - r.first + kUnit - 1) / kUnit, Owner{0, 0});
  }
}

void global_read(u64 address, u32 bytes, Read how) {
  Range& range = checked(address, bytes, "read");
  const bool bulk = how == Read::kBulk && (range.flags & kOnce) != 0;
  each_unit(range, address, bytes, [&](const Owner& owner, u64 i) {
    if (owner.writer != 0 && (bulk || !ordered(owner))) clash("read", i, owner);
  });
}

void global_write(u64 address, u32 bytes) {
  Range& range = checked(address, bytes, "write");
  if ((range.flags & kWritable) == 0) fail("write to range %u, which is read-only", range.number);
  range.written = true;
  const Fiber& f = *machine.now;
  const bool once = (range.flags & kOnce) != 0;
  each_unit(range, address, bytes, [&](Owner& owner, u64 i) {
    if (owner.writer != 0 && (once || !ordered(owner))) clash("written again", i, owner);
    owner = Owner{f.global + 1, f.epoch};
  });
}

void check_unwritten(u64 address, u32 bytes) {
  Range* range = range_of(address, bytes);
  if (range == nullptr || (range->flags & kOnce) == 0) return;
  each_unit(*range, address, bytes, [&](const Owner& owner, u64 i) {
    if (owner.writer != 0) clash("fetched by a bulk copy", i, owner);
  });
}

}  // namespace emu

extern "C" {
__attribute__((visibility("default"))) void emulator_clear_ranges() {
  emu::ranges.clear();
  emu::hit = 0;
}
__attribute__((visibility("default"))) void emulator_add_range(emu::u64 first, emu::u64 bytes,
                                                               emu::u32 flags) {
  const emu::u32 number = static_cast<emu::u32>(emu::ranges.size());
  emu::ranges.push_back({first, first + bytes, flags, number, false, {}});
}
// Whether the last launch wrote the range that was registered as number `number`.
__attribute__((visibility("default"))) int emulator_range_written(emu::u32 number) {
  for (const emu::Range& r : emu::ranges) {
    if (r.number == number) return r.written ? 1 : 0;
  }
  return 0;
}
}
