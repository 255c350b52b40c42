// Where the operands of the 16-bit LoRA products lie, and their loads from global memory: A (packed
// or row-major), x rows, B. 16 bytes at a time where addresses allow, else element by element, with
// the same values in the same places: the path never changes a result.
#pragma once
#include "lora/k_order.cuh"
#include "lora/slot_entry.cuh"
#include "ptx/memory.cuh"

constexpr int kRankTile = 16;

// 8 neighbouring elements of a row, `count` of them valid and the rest zero, from an address that
// is aligned to its element only.
__device__ __noinline__ uint4 gather8(const u8* address, i32 count) {
  const u16* p = reinterpret_cast<const u16*>(address);
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = 2 * i < count ? p[2 * i] : 0, high = 2 * i + 1 < count ? p[2 * i + 1] : 0;
    word[i] = low | (high << 16);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// One expert's A: where a row's bytes of a chunk start, and how the chunk's pieces are swizzled.
// A block stays below 4 GiB, so offsets into it are 32-bit.
struct AView {
  const u8* base;
  i32 rank;
  i32 in_features;
  bool packed;

  __device__ __forceinline__ bool vector() const {
    return reinterpret_cast<u64>(base) % 16 == 0 && in_features % 8 == 0;
  }
  __device__ __forceinline__ i32 chunk_width(i32 chunk) const {
    return min_int(kChunk, in_features - chunk * kChunk);
  }
  __device__ __forceinline__ u32 chunk_offset(i32 chunk) const {
    return static_cast<u32>(chunk) * kChunkBytes * (packed ? rank : 1);
  }
  __device__ __forceinline__ u32 row_bytes(i32 chunk) const {
    return 2u * (packed ? chunk_width(chunk) : in_features);
  }
  // Full packed chunks are swizzled; their tail and a row-major A are not.
  __device__ __forceinline__ u32 swizzle(i32 chunk, i32 row) const {
    return packed && chunk_width(chunk) == kChunk ? row & 7 : 0;
  }
  // Byte offset, from the chunk's start, of 16-byte piece `index` (8 k) of a row.
  __device__ __forceinline__ u32 piece(i32 row, i32 chunk, i32 index) const {
    return row * row_bytes(chunk) + ((index ^ swizzle(chunk, row)) << 4);
  }
  // The piece from global memory, zeros beyond the rank or K: of an A whose `vector()` holds, and
  // of any.
  __device__ __forceinline__ uint4 load_vector(i32 row, i32 chunk, i32 index) const {
    const u8* address = base + chunk_offset(chunk) + piece(row, chunk, index);
    return load16_if(address, row < rank && index * 8 < in_features - chunk * kChunk);
  }
  __device__ __forceinline__ uint4 gather(i32 row, i32 chunk, i32 index) const {
    const i32 left = row < rank ? in_features - chunk * kChunk - index * 8 : 0;
    return gather8(base + chunk_offset(chunk) + piece(row, chunk, index), left);
  }
  __device__ __forceinline__ uint4 load(i32 row, i32 chunk, i32 index, bool aligned) const {
    return aligned ? load_vector(row, chunk, index) : gather(row, chunk, index);
  }
};

// The same piece of a row of x; the row is null beyond the tile. x may be written by the kernel
// before this one, so it is read after the wait and not through the read-only path.
__device__ __forceinline__ uint4 load_x(const u8* row, i32 in_features, i32 chunk, i32 index,
                                        bool aligned) {
  const i32 k = chunk * kChunk + index * 8;
  const i32 left = row != nullptr ? in_features - k : 0;
  const u8* address = row + static_cast<i64>(k) * 2;
  return aligned ? load16_rw_if(address, left > 0) : gather8(address, left);
}

__device__ __forceinline__ AView a_view(const SlotEntry& entry, const Tile& tile, i32 start_expert,
                                        i32 rank, i32 in_features) {
  return AView{reinterpret_cast<const u8*>(entry.a_ptr) +
                   static_cast<i64>(tile.expert + start_expert) * entry.a_expert_stride,
               rank, in_features, entry.a_layout == kLayoutPacked};
}

__device__ __forceinline__ const u8* b_base(const SlotEntry& entry, const Tile& tile,
                                            i32 start_expert) {
  return reinterpret_cast<const u8*>(entry.b_ptr) +
         static_cast<i64>(tile.expert + start_expert) * entry.b_expert_stride;
}

// Ranks 4t .. 4t + 3 of a rank step of one column of B; `count` of them are valid.
__device__ __forceinline__ uint2 load_b4(const u8* address, i32 count, bool vector) {
  if (vector) return load8_if(address, count > 0);
  const u16* p = reinterpret_cast<const u16*>(address);
  const u32 e0 = count > 0 ? p[0] : 0, e1 = count > 1 ? p[1] : 0;
  const u32 e2 = count > 2 ? p[2] : 0, e3 = count > 3 ? p[3] : 0;
  return make_uint2(e0 | (e1 << 16), e2 | (e3 << 16));
}
