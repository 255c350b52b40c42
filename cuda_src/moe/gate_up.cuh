// A MoE block's activation: where gate and up lie in a row of the first projection's output, and
// what becomes of them, in float. The same functions serve every kernel that activates, operation
// by operation (no contraction is left to the compiler), so that all of them give the same bits.
#pragma once
#include "moe/piece.cuh"
#include "ptx/types.cuh"

enum Activation : i32 { kSilu = 0, kGelu = 1, kRelu2 = 2, kSwigluOai = 3 };
enum GateUpLayout : i32 { kGateFirst = 0, kUpFirst = 1, kInterleaved = 2 };

// What all rows of a call share.
struct ActivationForm {
  i32 hidden;  // columns of the result
  i32 kind;
  i32 gated;
  i32 layout;
  float alpha;
  float limit;

  __device__ __forceinline__ i32 width() const { return gated ? 2 * hidden : hidden; }
};

// The two pieces of a row that hold `count` columns of the result from `column` on, as loaded: gate
// and up, or of interleaved columns the first and the second half of both; of a row that is not
// gated the first alone.
template <typename T, bool kVector>
struct GateUpPieces {
  uint4 first, second;

  __device__ __forceinline__ void load(const T* row, i32 column, i32 count,
                                       const ActivationForm& form) {
    const Place at(row, column, form);
    if constexpr (kVector) {
      first = load16_rw_if(at.first, count > 0);
      second = load16_rw_if(at.second, count > 0 && form.gated);
    } else {
      first = gather_piece(at.first, at.step, count);
      second = gather_piece(at.second, at.step, form.gated ? count : 0);
    }
  }

  // Brings what `load` would take into the L2.
  static __device__ __forceinline__ void prefetch(const T* row, i32 column, i32 count,
                                                  const ActivationForm& form) {
    const Place at(row, column, form);
    if (count > 0) prefetch_line(at.first);
    if (count > 0 && form.gated) prefetch_line(at.second);
  }

 private:
  struct Place {
    const T *first, *second;
    i32 step;

    __device__ __forceinline__ Place(const T* row, i32 column, const ActivationForm& form) {
      const bool mixed = form.gated && form.layout == kInterleaved;
      const bool up_first = form.gated && form.layout == kUpFirst;
      const i32 apart = mixed ? (kVector ? kPieceElements<T> : 1) : form.hidden;
      const T* start = row + (static_cast<i64>(column) << mixed);
      first = start + (up_first ? apart : 0);
      second = start + (up_first ? 0 : apart);
      step = mixed ? 2 : 1;
    }
  };
};

// Every second element of two neighbouring pieces, from the first or the second on.
template <typename T>
__device__ __forceinline__ uint4 every_second(const uint4& a, const uint4& b, bool odd) {
  if constexpr (sizeof(T) == 4) {
    return odd ? make_uint4(a.y, a.w, b.y, b.w) : make_uint4(a.x, a.z, b.x, b.z);
  } else {
    const u32 pick = odd ? 0x7632 : 0x5410;
    return make_uint4(__byte_perm(a.x, a.y, pick), __byte_perm(a.z, a.w, pick),
                      __byte_perm(b.x, b.y, pick), __byte_perm(b.z, b.w, pick));
  }
}

// Sigmoid of results that are rounded to 2 bytes: a few float roundings off, far below theirs. A
// power that is flushed to zero would not change 1 + power.
template <typename T>
__device__ __forceinline__ float sigmoid(float v) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(v, -1.4426950408889634f)));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(1.f, power)));
  return inverse;
}
template <>
__device__ __forceinline__ float sigmoid<float>(float v) {
  return __fdiv_rn(1.f, __fadd_rn(1.f, expf(-v)));
}

__device__ __forceinline__ float gelu(float v) {
  return __fmul_rn(__fmul_rn(0.5f, v), __fadd_rn(1.f, erff(__fmul_rn(v, 0.70710678118654752f))));
}
__device__ __forceinline__ float relu_squared(float v) {
  const float positive = v < 0.f ? 0.f : v;  // NaN stays NaN
  return __fmul_rn(positive, positive);
}

template <typename T>
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float alpha, float limit) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return __fmul_rn(__fmul_rn(g, sigmoid<T>(__fmul_rn(alpha, g))), __fadd_rn(u, 1.f));
}

// The values of a piece of gate and of up; of a row that is not gated `gate` alone.
template <typename T>
struct GateUp {
  static constexpr int kPer = kPieceElements<T>;
  float gate[kPer], up[kPer];

  template <bool kVector>
  __device__ __forceinline__ GateUp(const GateUpPieces<T, kVector>& raw,
                                    const ActivationForm& form) {
    const bool mixed = kVector && form.gated && form.layout == kInterleaved;
    unpack_piece<T>(mixed ? every_second<T>(raw.first, raw.second, false) : raw.first, gate);
    unpack_piece<T>(mixed ? every_second<T>(raw.first, raw.second, true) : raw.second, up);
  }

  __device__ __forceinline__ void add(const GateUp& bias) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      gate[i] = __fadd_rn(gate[i], bias.gate[i]);
      up[i] = __fadd_rn(up[i], bias.up[i]);
    }
  }

  // act(gate) · up, or act(gate) alone: the piece of the result, rounded once.
  __device__ __forceinline__ uint4 activated(const ActivationForm& form) {
    switch (form.kind) {
      case kSilu:
#pragma unroll
        for (int i = 0; i < kPer; ++i) gate[i] = __fmul_rn(gate[i], sigmoid<T>(gate[i]));
        break;
      case kGelu:
#pragma unroll
        for (int i = 0; i < kPer; ++i) gate[i] = gelu(gate[i]);
        break;
      case kRelu2:
#pragma unroll
        for (int i = 0; i < kPer; ++i) gate[i] = relu_squared(gate[i]);
        break;
      default:
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          gate[i] = clamped_swiglu<T>(gate[i], up[i], form.alpha, form.limit);
        }
        return pack_piece<T>(gate);
    }
    if (form.gated) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) gate[i] = __fmul_rn(gate[i], up[i]);
    }
    return pack_piece<T>(gate);
  }
};
