// The row-wise parts of the MoE chain: permute (x into row order), activation, finalize.
//
// permute: x [T, H] -> [R, H] in row order, ghost rows zero. activation: gate and up (or up alone)
// -> hidden, computed in float, rounded once. finalize: out[t] = residual + sum over choices j, in
// order, of weight · (y + bias), float, rounded once; foreign choices are skipped.
#include "lora/slot_entry.cuh"
#include "ptx/convert.cuh"
#include "route/experts.cuh"

namespace {

constexpr int kThreads = 256;

enum Activation : i32 { kSilu = 0, kGelu = 1, kRelu2 = 2, kSwigluOai = 3 };
enum GateUpLayout : i32 { kGateFirst = 0, kUpFirst = 1, kInterleaved = 2 };

__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }

__device__ __forceinline__ float activate(float v, i32 kind) {
  switch (kind) {
    case kSilu:
      return v * sigmoid(v);
    case kGelu:
      return 0.5f * v * (1.f + erff(v * 0.70710678118654752f));
    default: {
      const float positive = v < 0.f ? 0.f : v;  // NaN stays NaN
      return positive * positive;
    }
  }
}

__device__ __forceinline__ float clamped_swiglu(float gate, float up, float alpha, float limit) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return g * sigmoid(alpha * g) * (u + 1.f);
}

}  // namespace

template <typename T>
__global__ void __launch_bounds__(kThreads)
    permute_rows(const T* __restrict__ x, const i32* __restrict__ row_to_pair,
                 const i64* __restrict__ offsets, i32 num_experts, i32 num_tokens, i32 top_k,
                 i32 k_major, i32 width, i32 vector, T* __restrict__ out) {
  const RowMap map{row_to_pair, top_k, num_tokens, k_major};
  const i64 row = blockIdx.x;
  const bool ghost = row >= offsets[num_experts];
  const T* from = ghost ? nullptr : x + static_cast<i64>(map.token(row_to_pair[row])) * width;
  T* to = out + row * width;
  constexpr int kPer = 16 / sizeof(T);
  if (vector) {
    for (i32 i = threadIdx.x; i < width / kPer; i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] =
          ghost ? make_uint4(0, 0, 0, 0) : reinterpret_cast<const uint4*>(from)[i];
    }
    return;
  }
  for (i32 i = threadIdx.x; i < width; i += kThreads) to[i] = ghost ? T{} : from[i];
}

// rows: null row_to_pair means that every row of x is live and none has an expert.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    activation(const T* __restrict__ x, i32 num_rows, i32 hidden, i32 kind, i32 gated, i32 layout,
               float alpha, float limit, const T* __restrict__ bias,
               const i32* __restrict__ row_to_pair, const i64* __restrict__ offsets,
               i32 num_experts, i32 by_pair, T* __restrict__ out) {
  const i64 row = blockIdx.x;
  i64 at = row;
  i32 expert = 0;
  if (row_to_pair != nullptr) {
    if (row >= offsets[num_experts]) return;
    if (by_pair) at = row_to_pair[row];
    if (bias != nullptr) expert = expert_of_row(offsets, num_experts, row);
  }
  const i32 width = gated ? 2 * hidden : hidden;
  const T* in = x + at * width;
  const T* b = bias == nullptr ? nullptr : bias + static_cast<i64>(expert) * width;
  const auto value = [&](i32 column) {
    const float v = Elem<T>::to_float(in[column]);
    return b == nullptr ? v : v + Elem<T>::to_float(b[column]);
  };
  const i32 first = blockIdx.y * kThreads + threadIdx.x;
  for (i32 i = first; i < hidden; i += gridDim.y * kThreads) {
    float result;
    if (!gated) {
      result = activate(value(i), kind);
    } else {
      const i32 gate_column = layout == kGateFirst ? i : layout == kUpFirst ? hidden + i : 2 * i;
      const i32 up_column = layout == kGateFirst ? hidden + i : layout == kUpFirst ? i : 2 * i + 1;
      const float gate = value(gate_column), up = value(up_column);
      result =
          kind == kSwigluOai ? clamped_swiglu(gate, up, alpha, limit) : activate(gate, kind) * up;
    }
    out[at * hidden + i] = Elem<T>::from_float(result);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    finalize(const T* __restrict__ y, const float* __restrict__ weights,
             const i32* __restrict__ pair_to_row, const i64* __restrict__ offsets, i32 num_experts,
             i32 num_tokens, i32 top_k, i32 k_major, i32 hidden, i32 by_pair,
             const T* __restrict__ bias, const T* __restrict__ residual, T* __restrict__ out) {
  extern __shared__ i32 choices[];  // [top_k] row of y or -1, then [top_k] expert
  const i64 token = blockIdx.x;
  for (i32 j = threadIdx.x; j < top_k; j += kThreads) {
    const i32 pair =
        k_major ? j * num_tokens + static_cast<i32>(token) : static_cast<i32>(token) * top_k + j;
    const i32 row = pair_to_row[pair];
    choices[j] = row < 0 ? -1 : by_pair ? pair : row;
    if (bias != nullptr && row >= 0) {
      choices[top_k + j] = expert_of_row(offsets, num_experts, row);
    }
  }
  __syncthreads();
  const i32 first = blockIdx.y * kThreads + threadIdx.x;
  for (i32 i = first; i < hidden; i += gridDim.y * kThreads) {
    float sum = residual == nullptr ? 0.f : Elem<T>::to_float(residual[token * hidden + i]);
    for (i32 j = 0; j < top_k; ++j) {
      const i32 at = choices[j];
      if (at < 0) continue;
      float v = Elem<T>::to_float(y[static_cast<i64>(at) * hidden + i]);
      if (bias != nullptr) {
        v += Elem<T>::to_float(bias[static_cast<i64>(choices[top_k + j]) * hidden + i]);
      }
      sum = __fmaf_rn(weights[token * top_k + j], v, sum);
    }
    out[token * hidden + i] = Elem<T>::from_float(sum);
  }
}
