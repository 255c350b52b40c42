// What cupylora_enqueue_* costs the host above a bare cuLaunchKernelEx of the same kernel.
//
//   enqueue_cost EXPORT
//
// Batches of launches take turns: bare ones, everything prepared ahead, and enqueues of each
// operation; the medians of their times are compared. The kernels run over empty lists, or nowhere
// at all on a driver that drops launches (tests/hosts/fake_libcuda.cpp). Exit code 1: an operation
// costs more than 0.5 microseconds a launch above the bare one.
//
//   g++ -std=c++17 -O2 -IEXPORT/include enqueue_cost.cpp -lcuda -ldl -lm -o enqueue_cost
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "driver.h"
#define CUPYLORA_IMPLEMENTATION
#include "cupylora.h"

namespace {

constexpr int kLaunches = 200, kBatches = 301;
constexpr double kMost = 500;  // nanoseconds

cupylora_error error;

void need(int status, const char* doing) {
  if (status == 0) return;
  fprintf(stderr, "enqueue_cost: %s: status %d %s\n", doing, status, error.text);
  exit(2);
}

CUdeviceptr zeros(size_t bytes) {
  CUdeviceptr address = 0;
  const std::vector<char> none(bytes);
  need(cuMemAlloc(&address, bytes), "allocating");
  need(cuMemcpyHtoD(address, none.data(), bytes), "copying");
  return address;
}

// One way to launch, and what a launch of it took in each batch.
struct Way {
  const char* name;
  int launches;
  std::function<void()> call;
  std::vector<double> ns;

  double median() {
    std::sort(ns.begin(), ns.end());
    return ns[ns.size() / 2];
  }
};

void time_batch(Way* way, CUstream stream) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kLaunches; ++i) way->call();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  way->ns.push_back(took.count() / kLaunches / way->launches);
  need(cuStreamSynchronize(stream), "waiting");
}

}  // namespace

int main(int count, char** words) {
  CUdevice device;
  CUcontext context;
  CUstream stream;
  if (count != 2) return 2;
  need(cuInit(0), "starting the driver");
  need(cuDeviceGet(&device, 0), "finding a device");
  need(cuDevicePrimaryCtxRetain(&context, device), "opening the device");
  need(cuCtxSetCurrent(context), "taking the context");
  need(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "making a stream");
  cupylora* c = nullptr;
  need(cupylora_open(words[1], &c, &error), "opening the export");

  const cupylora_batch batch = {1, 8, 128, 0, 16, 0, 16, 0, 0};
  cupylora_delta delta = {CUPYLORA_BFLOAT16,
                          2048,
                          16,
                          1536,
                          CUPYLORA_BY_TOKEN,
                          CUPYLORA_BY_PAIR,
                          0,
                          CUPYLORA_AUTO,
                          2,
                          {{768, 0, 1}, {768, 768, 1}}};
  const cupylora_activation silu = {
      CUPYLORA_BFLOAT16, CUPYLORA_SILU, 1, CUPYLORA_GATE_FIRST, 0, 0, 768, 0, CUPYLORA_BY_PAIR};
  const cupylora_finalize sum = {CUPYLORA_BFLOAT16, 2048, 0, CUPYLORA_BY_PAIR};
  static cupylora_op lists_op, delta_op, silu_op, sum_op;
  need(cupylora_plan_lists(c, &batch, &lists_op, &error), "planning");
  need(cupylora_plan_delta(c, &batch, &delta, &delta_op, &error), "planning");
  need(cupylora_plan_activation(c, &batch, &silu, &silu_op, &error), "planning");
  need(cupylora_plan_finalize(c, &batch, &sum, &sum_op, &error), "planning");

  cupylora_lists lists;
  uint64_t bytes = 0;
  need(cupylora_lists_bytes(&batch, &bytes, &error), "sizing");
  need(cupylora_lists_at(&batch, zeros(bytes), &lists, &error), "placing");
  const uint64_t room = 1 << 20, x = zeros(room), y = zeros(room), table = zeros(room),
                 work = zeros(delta_op.workspace_bytes + room), slots = zeros(256);

  // The bare launch: the delta's first kernel, its arguments as planned, and no address but null
  // ones: of an empty list, since *tile_count is what it reads first.
  const cupylora_launch& launch = delta_op.launch[0];
  std::vector<uint64_t> args(launch.args, launch.args + 40);
  std::vector<void*> params;
  for (uint32_t i = 0; i < launch.patches; ++i) {
    const bool address = launch.patch[i].bytes == 8;
    if (address) memcpy(reinterpret_cast<char*>(args.data()) + launch.patch[i].at, &x, 8);
  }
  for (uint32_t i = 0; i < launch.params; ++i) {
    params.push_back(reinterpret_cast<char*>(args.data()) + launch.at[i]);
  }
  cupylora_i_config config = {{launch.grid, 1, 1}, {launch.block, 1, 1}, launch.shared, stream,
                              launch.attribute,    launch.attributes};
  const uint64_t n = delta_op.workspace_bytes + room;
  std::vector<Way> ways = {
      {"bare launch",
       1,
       [&] { c->driver.launch(&config, launch.function, params.data(), nullptr); },
       {}},
      {"lists",
       lists_op.launches,
       [&] { cupylora_enqueue_lists(&lists_op, stream, slots, slots, &lists, work, n, 0, &error); },
       {}},
      {"delta",
       delta_op.launches,
       [&] { cupylora_enqueue_delta(&delta_op, stream, x, y, &lists, table, work, n, 0, &error); },
       {}},
      {"activation",
       1,
       [&] { cupylora_enqueue_activation(&silu_op, stream, x, 0, &lists, y, &error); },
       {}},
      {"finalize",
       1,
       [&] { cupylora_enqueue_finalize(&sum_op, stream, x, table, &lists, 0, 0, y, &error); },
       {}},
  };
  for (int i = 0; i < kBatches; ++i) {
    for (Way& way : ways) time_batch(&way, stream);
    need(error.status, "enqueueing");
  }
  const double bare = ways[0].median();
  bool within = true;
  printf("%-12s %7s %11s   nanoseconds a launch, median of %d batches of %d\n", "", "ns",
         "above bare", kBatches, kLaunches);
  for (Way& way : ways) {
    printf("%-12s %7.0f %11.0f\n", way.name, way.median(), way.median() - bare);
    within &= way.median() - bare <= kMost;
  }
  cupylora_close(c);
  puts(within ? "PASS" : "FAIL");
  return within ? 0 : 1;
}
