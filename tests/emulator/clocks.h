// Vector clocks: who knows of whose work. In: a size, one component for each thread of a cluster
// and for each of its mbarriers' asynchronous writes. Out: shared handles on clocks, since the
// threads that left a barrier together all know the same.
#pragma once
#include <cstring>
#include <utility>
#include <vector>

#include "shape.h"

namespace emu {

class Clock {
 public:
  // The components of all clocks from here on. No handle on an older clock may be left.
  static void resize(u32 components);
  static Clock zero();

  Clock() = default;
  Clock(const Clock& other) : data_(other.data_) {
    if (data_ != nullptr) ++data_->holders;
  }
  Clock(Clock&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Clock& operator=(Clock other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Clock() { drop(); }

  explicit operator bool() const { return data_ != nullptr; }
  bool is(const Clock& other) const { return data_ == other.data_; }
  u32 operator[](u32 component) const { return data_->at[component]; }
  // The changes below are seen through every handle on this clock.
  u32& at(u32 component) { return data_->at[component]; }
  void raise(u32 component, u32 epoch) {
    if (data_->at[component] < epoch) data_->at[component] = epoch;
  }
  void join(const Clock& other);
  Clock copy() const;

 private:
  struct Data {
    u32 holders;
    u32 at[1];
  };
  static Data* allocate();
  void drop();

  Data* data_ = nullptr;
};

// The last acquisition of a barrier's clock: threads that knew the same before know the same after.
struct Memo {
  Clock before, after;
};

}  // namespace emu
