// take_batch: the next batch of slots from the host's ring to where a step's kernels read it, and
// padding behind the batch's rows. The first kernel of every step, so that a captured step is one
// launch whatever the batch.
//
// In: the ring in pinned host memory, and the number of the last batch taken. A place holds its
// batch's number and tokens (8 bytes each), then the slots. Out: slots [rows], -1 beyond the batch;
// rows of each run of padding from the batch's tokens on set to its byte; the number of the batch
// taken, here and in host memory, which frees the place.
//
// The place of the next number holds another one where a graph is launched without a batch: then
// everything stays as it is. One block.
#include "ptx/types.cuh"

struct PadRun {
  u8* rows;
  u64 row_bytes;
  u64 word;  // the byte, four times
};

namespace {

constexpr u64 kHead = 16;
constexpr u32 kAtOnce = 4;

__device__ __forceinline__ void fill_bytes(u64 begin, u64 end, u32 word) {
  for (u64 at = begin; at < end; ++at) *reinterpret_cast<u8*>(at) = static_cast<u8>(word);
}

// By one warp: whole words, and by one thread the bytes before and behind them.
__device__ __forceinline__ void pad_run(const PadRun& run, u32 first, u32 end, u32 lane) {
  const u32 word = static_cast<u32>(run.word);
  const u64 begin = reinterpret_cast<u64>(run.rows) + first * run.row_bytes;
  const u64 behind = reinterpret_cast<u64>(run.rows) + end * run.row_bytes;
  const u64 words = (begin + 3) / 4 * 4, rest = behind / 4 * 4;
  for (u64 at = words + 4 * lane; at < rest; at += 128) *reinterpret_cast<u32*>(at) = word;
  if (lane == 0) {
    fill_bytes(begin, words < behind ? words : behind, word);
    if (words <= rest) fill_bytes(rest, behind, word);
  }
}

}  // namespace

__global__ void take_batch(u64* taken, const u8* ring, u64* told, i32* slots, u32 rows, u32 places,
                           u64 place_bytes, const PadRun* runs, u32 num_runs) {
  const u64 number = *taken + 1;
  const u8* const place = ring + number % places * place_bytes;
  // Volatile: the host writes there between launches. Slots are asked for together with the head,
  // since each answer takes a way over the bus.
  const volatile u64* const head = reinterpret_cast<const volatile u64*>(place);
  const volatile i32* const given = reinterpret_cast<const volatile i32*>(place + kHead);
  const u64 found = head[0];
  const u32 tokens = static_cast<u32>(head[1]);
  for (u32 base = threadIdx.x; base < rows; base += kAtOnce * blockDim.x) {
    i32 slot[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 row = base + i * blockDim.x;
      slot[i] = row < rows ? given[row] : -1;
    }
    if (found != number) return;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 row = base + i * blockDim.x;
      if (row < rows) slots[row] = row < tokens ? slot[i] : -1;
    }
  }
  if (found != number) return;
  if (tokens < rows) {
    for (u32 run = threadIdx.x / 32; run < num_runs; run += blockDim.x / 32) {
      pad_run(runs[run], tokens, rows, threadIdx.x % 32);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *taken = number;
    *reinterpret_cast<volatile u64*>(told) = number;
  }
}
