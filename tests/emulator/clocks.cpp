// Vector clocks: storage. Freed clocks are kept for the next ones, which come by the million.
#include "clocks.h"

#include <cstdlib>

namespace emu {
namespace {

u32 components;

template <typename Data>
std::vector<Data*>& spare() {
  static std::vector<Data*> list;
  return list;
}

// The hot loop of all happens-before work.
__attribute__((optimize("O3"))) void raise_all(u32* to, const u32* from, u32 count) {
  for (u32 i = 0; i < count; ++i) to[i] = to[i] > from[i] ? to[i] : from[i];
}

}  // namespace

void Clock::resize(u32 count) {
  for (Data* data : spare<Data>()) free(data);
  spare<Data>().clear();
  components = (count + 7) & ~7u;
}

Clock::Data* Clock::allocate() {
  std::vector<Data*>& list = spare<Data>();
  Data* data;
  if (list.empty()) {
    data = static_cast<Data*>(malloc(sizeof(Data) + 4 * components));
  } else {
    data = list.back();
    list.pop_back();
  }
  data->holders = 1;
  return data;
}

void Clock::drop() {
  if (data_ != nullptr && --data_->holders == 0) spare<Data>().push_back(data_);
  data_ = nullptr;
}

Clock Clock::zero() {
  Clock clock;
  clock.data_ = allocate();
  memset(clock.data_->at, 0, 4 * components);
  return clock;
}

Clock Clock::copy() const {
  Clock clock;
  clock.data_ = allocate();
  memcpy(clock.data_->at, data_->at, 4 * components);
  return clock;
}

void Clock::join(const Clock& other) {
  if (!is(other)) raise_all(data_->at, other.data_->at, components);
}

}  // namespace emu
