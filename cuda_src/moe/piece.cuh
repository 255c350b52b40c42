// Rows in pieces: as many neighbouring elements as 16 bytes hold. A piece is what a lane loads,
// works on in float and stores. Where addresses do not allow 16 bytes at a time (kVector false),
// the same piece is moved element by element: that never changes a value.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/types.cuh"

template <typename T>
constexpr int kPieceElements = 16 / static_cast<int>(sizeof(T));

// Elements p[0], p[step], ...: `count` of them (any number), zeros in place of the others.
template <typename T>
__device__ __forceinline__ uint4 gather_piece(const T* p, i32 step, i32 count) {
  u64 half[2] = {0, 0};
  constexpr int kBits = 8 * sizeof(T);
  const i32 end = min_int(count, kPieceElements<T>);
#pragma unroll 1
  for (i32 e = 0; e < end; ++e) {
    u64 bits;
    if constexpr (sizeof(T) == 4) {
      bits = reinterpret_cast<const u32*>(p)[static_cast<i64>(e) * step];
    } else {
      bits = reinterpret_cast<const u16*>(p)[static_cast<i64>(e) * step];
    }
    bits <<= (e * kBits) & 63;
    if (e * kBits < 64) {
      half[0] |= bits;
    } else {
      half[1] |= bits;
    }
  }
  return make_uint4(static_cast<u32>(half[0]), static_cast<u32>(half[0] >> 32),
                    static_cast<u32>(half[1]), static_cast<u32>(half[1] >> 32));
}

// The piece at p, of which `count` elements are valid; in vector form all or none of them.
template <bool kVector, typename T>
__device__ __forceinline__ uint4 load_piece(const T* p, i32 count) {
  return kVector ? load16_rw_if(p, count > 0) : gather_piece(p, 1, count);
}

template <bool kVector, typename T>
__device__ __forceinline__ void store_piece(T* p, const uint4& piece, i32 count) {
  if constexpr (kVector) {
    if (count > 0) *reinterpret_cast<uint4*>(p) = piece;
    return;
  }
  const u64 half[2] = {piece.x | static_cast<u64>(piece.y) << 32,
                       piece.z | static_cast<u64>(piece.w) << 32};
  constexpr int kBits = 8 * sizeof(T);
  const i32 end = min_int(count, kPieceElements<T>);
#pragma unroll 1
  for (i32 e = 0; e < end; ++e) {
    const u64 bits = (e * kBits < 64 ? half[0] : half[1]) >> ((e * kBits) & 63);
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<u32*>(p)[e] = static_cast<u32>(bits);
    } else {
      reinterpret_cast<u16*>(p)[e] = static_cast<u16>(bits);
    }
  }
}

template <typename T>
__device__ __forceinline__ void unpack_piece(const uint4& piece, float (&v)[kPieceElements<T>]) {
  const u32 word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      v[i] = __uint_as_float(word[i]);
    } else {
      v[2 * i] = Elem<T>::low(word[i]);
      v[2 * i + 1] = Elem<T>::high(word[i]);
    }
  }
}

// The piece of these values, each rounded once.
template <typename T>
__device__ __forceinline__ uint4 pack_piece(const float (&v)[kPieceElements<T>]) {
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      word[i] = __float_as_uint(v[i]);
    } else {
      word[i] = Elem<T>::pack(v[2 * i], v[2 * i + 1]);
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}
