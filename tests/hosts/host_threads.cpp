// Threads that share what was opened and one planned op, each with addresses of its own. In: an
// export's folder. Out: launches, which go to the driver; built with the thread sanitizer, it fails
// on a race in cupylora.h.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#define CUPYLORA_IMPLEMENTATION
#include "cupylora.h"

extern "C" int cuDevicePrimaryCtxRetain(void**, int);
extern "C" int cuCtxSetCurrent(void*);

namespace {

constexpr int kThreads = 6, kRounds = 50;
std::atomic<int> failures{0};

void work(const cupylora* c, const cupylora_op* shared, void* context, int number) {
  const uint64_t own = 0x100000ull * static_cast<uint64_t>(number + 1);
  const cupylora_batch batch = {5, 2, 8, 0, 4, 0, 16, 0, 0};
  cupylora_error error;
  cupylora_lists lists;
  static thread_local cupylora_op op;
  cuCtxSetCurrent(context);
  failures += cupylora_lists_at(&batch, own, &lists, &error) != CUPYLORA_OK;
  for (int i = 0; i < kRounds; ++i) {
    failures += cupylora_plan_lists(c, &batch, &op, &error) != CUPYLORA_OK;
    failures +=
        cupylora_enqueue_lists(&op, nullptr, own, own, &lists, 0, 0, own, &error) != CUPYLORA_OK;
    failures += cupylora_enqueue_delta(shared, nullptr, own, own, &lists, own, own, 1 << 20, own,
                                       &error) != CUPYLORA_OK;
  }
}

}  // namespace

int main(int count, char** words) {
  const cupylora_batch batch = {5, 2, 8, 0, 4, 0, 16, 0, 0};
  const cupylora_delta delta = {
      CUPYLORA_BFLOAT16, 64, 16,          48, CUPYLORA_BY_TOKEN, CUPYLORA_BY_PAIR, 0,
      CUPYLORA_PAIR,     1,  {{48, 0, 1}}};
  static cupylora_op shared;
  void* context = nullptr;
  cupylora* c = nullptr;
  cupylora_error error;
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
  if (count != 2 || cupylora_open(words[1], &c, &error) != CUPYLORA_OK ||
      cupylora_plan_delta(c, &batch, &delta, &shared, &error) != CUPYLORA_OK) {
    fputs(error.text, stderr);
    return 2;
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, c, &shared, context, i);
  for (std::thread& thread : threads) thread.join();
  cupylora_close(c);
  return failures == 0 ? 0 : 1;
}
