// unpack_factors: bytes of an adapter's file -> blocks of the arena, as the LoRA kernels read them.
//
// In: part of the file, and records that say what lies where (FACTOR_PIECE in worklists.py). Out:
// every element converted (rounded once), in its expert, row and column, in the block's layout;
// `fault` is set if one of them is not finite, or lost by its ratio. Source order is kept:
// neighbouring threads read neighbours, and what they write to the same sectors meets in the L2.
#include "lora/slot_entry.cuh"
#include "ptx/convert.cuh"

struct __align__(16) FactorPiece {
  u64 source;
  u64 first;
  u64 target[2];
  i32 count;
  i32 source_type;
  u32 extent[3];
  i32 axis[3];
  u32 expert;
  u32 rows;
  u32 columns;
  u32 split;
  i32 interleaved;
  i32 packed;
  double ratio;
};
static_assert(sizeof(FactorPiece) == 96, "FACTOR_PIECE in worklists.py has 96 bytes");

namespace {

constexpr int kThreads = 256;
constexpr u32 kBlockElements = 4096;  // ops/unpack_factors.py knows it

enum SourceType : i32 { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
enum Axis : i32 { kExpert = 0, kRow = 1, kColumn = 2 };

// A file aligns its tensors to two bytes at least.
__device__ __forceinline__ float source_value(const u16* source, i32 type, u32 element) {
  if (type == kBf16) return Elem<Bf16>::to_float(Bf16{source[element]});
  if (type == kFp16) return Elem<Fp16>::to_float(Fp16{source[element]});
  return __uint_as_float(source[2 * element] | static_cast<u32>(source[2 * element + 1]) << 16);
}

// `value` times `ratio`, in double; whether float holds it as a normal number.
__device__ __forceinline__ bool scale_by(float& value, double ratio) {
  const double product = value * ratio;
  const bool kept = value == 0.f || ratio == 0.0 || product >= 0x1p-126 || product <= -0x1p-126;
  value = static_cast<float>(product);
  return kept;
}

// Where a tensor's element lies in it, counted on from the first of a block of threads.
struct Place {
  u32 at[3];

  __device__ __forceinline__ Place(const FactorPiece& piece, u64 flat) {
    const u64 rows = flat / piece.extent[2];
    at[2] = static_cast<u32>(flat - rows * piece.extent[2]);
    at[0] = static_cast<u32>(rows / piece.extent[1]);
    at[1] = static_cast<u32>(rows - static_cast<u64>(at[0]) * piece.extent[1]);
  }
  // `at[2] + elements` fits 32 bits: extents are below 2^31.
  __device__ __forceinline__ void advance(const FactorPiece& piece, u32 elements) {
    at[2] += elements;
    const u32 rows = at[1] + at[2] / piece.extent[2];
    at[2] %= piece.extent[2];
    at[0] += rows / piece.extent[1];
    at[1] = rows % piece.extent[1];
  }
};

// Element of a block of one expert: row-major, or K-chunks whose 16-byte pieces are swizzled
// (adapters/packing.py).
template <typename T>
__device__ __forceinline__ u64 element_of(const FactorPiece& piece, u32 row, u32 column) {
  constexpr u32 kChunk = kChunkBytes / sizeof(T), kPiece = 16 / sizeof(T);
  const u32 width = piece.columns, full = width / kChunk * kChunk;
  if (!piece.packed) return static_cast<u64>(row) * width + column;
  if (column >= full) {
    return static_cast<u64>(full) * piece.rows + static_cast<u64>(row) * (width - full) + column -
           full;
  }
  const u32 inner = column % kChunk;
  const u64 chunk_row = static_cast<u64>(column / kChunk) * piece.rows + row;
  return chunk_row * kChunk + ((inner / kPiece) ^ (row & 7)) * kPiece + inner % kPiece;
}

}  // namespace

template <typename T>
__global__ void __launch_bounds__(kThreads)
    unpack_factors(const u8* source, const FactorPiece* pieces, u8* target, i32* fault) {
  const FactorPiece piece = pieces[blockIdx.y];
  const u32 count = static_cast<u32>(piece.count), start = blockIdx.x * kBlockElements;
  if (start >= count) return;
  const u16* from = reinterpret_cast<const u16*>(source + piece.source);
  const Place first(piece, piece.first + start);
  const u32 end = min(count - start, kBlockElements);
  bool sound = true;
  for (u32 i = threadIdx.x; i < end; i += kThreads) {
    Place place = first;
    place.advance(piece, i);
    u32 by_axis[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) {
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        if (piece.axis[d] == axis) by_axis[axis] = place.at[d];
      }
    }
    u32 row = by_axis[kRow];
    const bool second = piece.interleaved ? row & 1 : row >= piece.split;
    row = piece.interleaved ? row / 2 : second ? row - piece.split : row;
    const u64 expert = static_cast<u64>(by_axis[kExpert] + piece.expert);
    T* block = reinterpret_cast<T*>(target + (second ? piece.target[1] : piece.target[0]));
    float exact = source_value(from, piece.source_type, start + i);
    if (piece.ratio != 1.0) sound = scale_by(exact, piece.ratio) && sound;
    const T value = Elem<T>::from_float(exact);
    // Infinities and NaNs, the source's or made by rounding, minus themselves are not 0.
    const float back = Elem<T>::to_float(value);
    sound = sound && back - back == 0.f;
    block[expert * piece.rows * piece.columns + element_of<T>(piece, row, by_axis[kColumn])] =
        value;
  }
  if (!sound) *fault = 1;
}
