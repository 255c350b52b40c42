// pad_rows: sets the rows behind a batch's own, where buffers of a step must hold something there.
//
// In: the batch's tokens, in device memory so that a captured launch pads what each batch needs,
// and the step's rows; runs of rows. Out: rows [tokens, rows) of every run, each byte the run's.
// Block (run, piece): 16 bytes a thread and turn; one thread each the bytes before and behind
// those.
#include "ptx/types.cuh"

struct PadRun {
  u8* rows;
  u64 row_bytes;
  u64 word;  // the byte, four times
};

namespace {

__device__ __forceinline__ void fill_bytes(u64 begin, u64 end, u32 word) {
  for (u64 at = begin; at < end; ++at) *reinterpret_cast<u8*>(at) = static_cast<u8>(word);
}

}  // namespace

__global__ void pad_rows(const u32* tokens, u32 rows, const PadRun* runs) {
  const u32 first = *tokens;
  if (first >= rows) return;
  const PadRun run = runs[blockIdx.x];
  const u64 begin = reinterpret_cast<u64>(run.rows) + first * run.row_bytes;
  const u64 end = reinterpret_cast<u64>(run.rows) + rows * run.row_bytes;
  const u64 aligned = (begin + 15) / 16 * 16, last = end / 16 * 16;
  const u64 from = aligned < end ? aligned : end;  // a short run has no 16 bytes
  const u64 behind = last > from ? last : from;
  const u32 word = static_cast<u32>(run.word);
  const u32 thread = blockIdx.y * blockDim.x + threadIdx.x, threads = gridDim.y * blockDim.x;
  const uint4 four = make_uint4(word, word, word, word);
  for (u64 at = from + 16 * thread; at < behind; at += 16 * threads) {
    *reinterpret_cast<uint4*>(at) = four;
  }
  if (thread == 0) fill_bytes(begin, from, word);
  if (thread == 1) fill_bytes(behind, end, word);
}
