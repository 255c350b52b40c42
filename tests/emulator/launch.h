// Included behind a program's source: unpacks a kernel's arguments, which lie as in C, and runs it.
#pragma once
#include <cstring>
#include <tuple>
#include <type_traits>

#include "shape.h"

namespace emu {

constexpr int kBadArguments = 2;
constexpr int kNoSuchKernel = 3;

template <typename P>
void take(P& value, const u8* packed, u32 room, u32& at) {
  static_assert(alignof(P) <= 8, "structs of arguments are packed with 8-byte alignment");
  at = (at + alignof(P) - 1) / alignof(P) * alignof(P);
  if (at + sizeof(P) <= room) memcpy(&value, packed + at, sizeof(P));
  at += sizeof(P);
}

template <auto kKernel, typename... P>
int start_with(void (*)(P...), const Shape& shape, const u8* packed, u32 bytes) {
  static std::tuple<std::remove_const_t<P>...> values;
  u32 at = 0;
  std::apply([&](auto&... value) { (take(value, packed, bytes, at), ...); }, values);
  if (at != bytes) return kBadArguments;
  return run(shape, [] { std::apply(kKernel, values); });
}

template <auto kKernel>
int start(const Shape& shape, const u8* packed, u32 bytes) {
  return start_with<kKernel>(kKernel, shape, packed, bytes);
}

struct Entry {
  const char* name;
  int (*start)(const Shape&, const u8*, u32);
};

template <u32 kCount>
int start_by_name(const Entry (&entries)[kCount], const char* name, const Shape& shape,
                  const u8* packed, u32 bytes) {
  for (const Entry& entry : entries) {
    if (strcmp(entry.name, name) == 0) return entry.start(shape, packed, bytes);
  }
  return kNoSuchKernel;
}

}  // namespace emu
