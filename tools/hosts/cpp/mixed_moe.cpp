// A host without Python: a mixed batch through one layer's LoRA, in a CUDA graph of its own.
//
//   mixed_moe EXPORT PACK CASE
//
// EXPORT: a folder of `cupylora export`. PACK: a file of `cupylora pack`. CASE: a folder with
// case.txt (sizes, and which adapter is in which slot), the batch's arrays, and want_*.bin, what
// the outputs must be, bit for bit. tests/host_case.py writes one, and
// tests/test_cpp_hosts.py builds and runs it all.
//
// What it shows, in order: open the kernels, bring a pack to the device, plan, size one workspace,
// capture, replay. Dense: q, k and v side by side. MoE: gate and up, activation, down, weighted
// sum; base outputs are given, since GEMMs are the host's own affair.
//
//   g++ -std=c++17 -IEXPORT/include mixed_moe.cpp -lcuda -ldl -lm -o mixed_moe
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "driver.h"
#define CUPYLORA_IMPLEMENTATION
#include "cupylora.h"

namespace {

using Bytes = std::vector<char>;

[[noreturn]] void stop(const std::string& why) {
  fprintf(stderr, "mixed_moe: %s\n", why.c_str());
  exit(1);
}

// Driver calls, and calls of cupylora with `error` behind them.
void need(CUresult status, const char* doing) {
  const char* name = "unknown";
  if (status == 0) return;
  cuGetErrorName(status, &name);
  stop(std::string(doing) + ": " + name);
}

cupylora_error error;

void need(cupylora_status status) {
  if (status != CUPYLORA_OK) stop(error.text);
}

Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) stop(path + " cannot be read");
  return Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

CUdeviceptr allocate(size_t bytes) {
  CUdeviceptr address = 0;
  need(cuMemAlloc(&address, std::max<size_t>(bytes, 16)), "allocating");
  return address;
}

CUdeviceptr upload(const Bytes& bytes) {
  const CUdeviceptr address = allocate(bytes.size());
  if (!bytes.empty()) need(cuMemcpyHtoD(address, bytes.data(), bytes.size()), "copying");
  return address;
}

// case.txt: lines of a name and a number, and "slot NUMBER NAME" for each adapter that is loaded.
struct Case {
  std::string folder;
  std::map<std::string, int> sizes;
  std::map<int, std::string> slots;

  explicit Case(const std::string& path) : folder(path) {
    std::ifstream file(path + "/case.txt");
    std::string line, key;
    if (!file) stop(path + "/case.txt cannot be read");
    while (std::getline(file, line)) {
      std::istringstream words(line);
      words >> key;
      if (key == "slot") {
        int slot = 0;
        words >> slot >> slots[slot];
      } else {
        words >> sizes[key];
      }
    }
  }
  int at(const std::string& name) const {
    const auto found = sizes.find(name);
    if (found == sizes.end()) stop("case.txt has no " + name);
    return found->second;
  }
  Bytes array(const std::string& name) const { return read_file(folder + "/" + name + ".bin"); }
};

// The adapters' blocks on the device, and a slot table [rows, max_loras] that points at them.
struct Adapters {
  CUdeviceptr blocks = 0, table = 0;
  int max_loras;

  Adapters(const Bytes& file, const Case& c) : max_loras(c.at("max_loras")) {
    cupylora_pack pack;
    need(cupylora_pack_open(file.data(), file.size(), &pack, &error));
    blocks = allocate(pack.blocks_bytes);
    need(cuMemcpyHtoD(blocks, pack.blocks, pack.blocks_bytes), "copying the pack");
    Bytes host(static_cast<size_t>(pack.rows) * max_loras * CUPYLORA_ENTRY_BYTES);
    for (const auto& [slot, name] : c.slots) {
      const int adapter = cupylora_pack_find(&pack, name.c_str());
      if (adapter < 0) stop("the pack has no " + name);
      for (int row = 0; row < pack.rows; ++row) {
        char* place = &host[(static_cast<size_t>(row) * max_loras + slot) * CUPYLORA_ENTRY_BYTES];
        need(cupylora_table_entry(&pack, adapter, row, blocks, 1, place, &error));
      }
    }
    table = upload(host);
  }
  // Neighbouring rows: the modules of one delta.
  CUdeviceptr row(int first) const {
    return table + static_cast<CUdeviceptr>(first) * max_loras * CUPYLORA_ENTRY_BYTES;
  }
};

struct Layer {
  cupylora_op dense_lists, lists, qkv, first, activate, down, sum;
  cupylora_batch dense, moe;
};

cupylora_batch batch_of(const Case& c, bool dense) {
  cupylora_batch b = {};
  b.tokens = c.at("tokens");
  b.top_k = dense ? 1 : c.at("top_k");
  b.experts = dense ? 1 : c.at("experts");
  b.max_loras = c.at("max_loras");
  b.max_rank = c.at("max_rank");
  b.tile_rows = c.at("tile_rows");
  return b;
}

cupylora_delta delta_of(const Case& c, int in_features, const std::vector<int>& widths) {
  cupylora_delta d = {};
  d.dtype = CUPYLORA_BFLOAT16;
  d.in_features = in_features;
  d.max_rank = c.at("max_rank");
  d.x_rows = CUPYLORA_BY_TOKEN;
  d.y_rows = CUPYLORA_BY_PAIR;
  for (int width : widths) {
    d.slices[d.num_slices++] = {width, d.y_width, 1};
    d.y_width += width;
  }
  return d;
}

// Sizes in, launches out: once for each number of tokens that a host has graphs for.
void plan(const cupylora* kernels, const Case& c, Layer* layer) {
  const int hidden = c.at("hidden"), intermediate = c.at("intermediate");
  const cupylora_batch &dense = layer->dense = batch_of(c, true),
                       &moe = layer->moe = batch_of(c, false);
  const cupylora_delta qkv = delta_of(c, hidden, {c.at("q"), c.at("k"), c.at("v")});
  const cupylora_delta first = delta_of(c, hidden, {intermediate, intermediate});
  cupylora_delta down = delta_of(c, intermediate, {hidden});
  down.x_rows = CUPYLORA_BY_PAIR;
  cupylora_activation activation = {};
  activation.kind = CUPYLORA_SILU;
  activation.gated = 1;
  activation.hidden = intermediate;
  activation.rows = CUPYLORA_BY_PAIR;
  cupylora_finalize sum = {};
  sum.hidden = hidden;
  sum.y_rows = CUPYLORA_BY_PAIR;
  need(cupylora_plan_lists(kernels, &dense, &layer->dense_lists, &error));
  need(cupylora_plan_lists(kernels, &moe, &layer->lists, &error));
  need(cupylora_plan_delta(kernels, &dense, &qkv, &layer->qkv, &error));
  need(cupylora_plan_delta(kernels, &moe, &first, &layer->first, &error));
  need(cupylora_plan_activation(kernels, &moe, &activation, &layer->activate, &error));
  need(cupylora_plan_delta(kernels, &moe, &down, &layer->down, &error));
  need(cupylora_plan_finalize(kernels, &moe, &sum, &layer->sum, &error));
}

cupylora_lists lists_of(const cupylora_batch& batch) {
  uint64_t bytes = 0;
  cupylora_lists lists;
  need(cupylora_lists_bytes(&batch, &bytes, &error));
  need(cupylora_lists_at(&batch, allocate(bytes), &lists, &error));
  return lists;
}

// All device memory of a step, allocated once.
struct Memory {
  CUdeviceptr ids, zeros, slots, weights, x, qkv, gate_up, hidden, down, out, workspace;
  uint64_t workspace_bytes = 0;
  cupylora_lists dense, moe;
  uint64_t status;

  Memory(const Case& c, const Layer& layer) {
    const size_t tokens = c.at("tokens"), rows = tokens * c.at("top_k");
    ids = upload(c.array("topk_ids"));
    zeros = upload(Bytes(tokens * 4));
    slots = upload(c.array("token_to_slot"));
    weights = upload(c.array("topk_weights"));
    x = upload(c.array("x"));
    qkv = upload(c.array("qkv"));
    gate_up = upload(c.array("gate_up"));
    down = upload(c.array("down"));
    hidden = allocate(rows * c.at("intermediate") * 2);
    out = allocate(tokens * c.at("hidden") * 2);
    for (const cupylora_op* op : {&layer.dense_lists, &layer.lists, &layer.qkv, &layer.first,
                                  &layer.activate, &layer.down, &layer.sum}) {
      workspace_bytes = std::max(workspace_bytes, op->workspace_bytes);
    }
    workspace = allocate(workspace_bytes);
    dense = lists_of(layer.dense);
    moe = lists_of(layer.moe);
    void* word = nullptr;
    need(cuMemHostAlloc(&word, 4, 0), "pinning the status word");
    memset(word, 0, 4);
    status = reinterpret_cast<uint64_t>(word);
  }
  // Deltas are added in place, so base outputs are made anew for each step.
  void restore(const Case& c) const {
    for (const auto& [address, name] :
         {std::pair<CUdeviceptr, const char*>{qkv, "qkv"}, {gate_up, "gate_up"}, {down, "down"}}) {
      const Bytes bytes = c.array(name);
      need(cuMemcpyHtoD(address, bytes.data(), bytes.size()), "copying");
    }
  }
};

// One step: what a server would do between its GEMMs. One workspace serves all in turn.
void enqueue(const Layer& l, const Memory& m, const Adapters& a, const Case& c, CUstream s) {
  const uint64_t w = m.workspace, n = m.workspace_bytes;
  need(cupylora_enqueue_lists(&l.dense_lists, s, m.zeros, m.slots, &m.dense, w, n, m.status,
                              &error));
  need(cupylora_enqueue_delta(&l.qkv, s, m.x, m.qkv, &m.dense, a.row(c.at("q_row")), w, n, m.status,
                              &error));
  need(cupylora_enqueue_lists(&l.lists, s, m.ids, m.slots, &m.moe, w, n, m.status, &error));
  need(cupylora_enqueue_delta(&l.first, s, m.x, m.gate_up, &m.moe, a.row(c.at("gate_row")), w, n,
                              m.status, &error));
  need(cupylora_enqueue_activation(&l.activate, s, m.gate_up, 0, &m.moe, m.hidden, &error));
  need(cupylora_enqueue_delta(&l.down, s, m.hidden, m.down, &m.moe, a.row(c.at("down_row")), w, n,
                              m.status, &error));
  need(cupylora_enqueue_finalize(&l.sum, s, m.down, m.weights, &m.moe, 0, 0, m.out, &error));
}

// Returns how many bytes differ from want_NAME.bin.
size_t compare(const Case& c, CUdeviceptr address, const char* name) {
  const Bytes want = c.array(std::string("want_") + name);
  Bytes got(want.size());
  need(cuMemcpyDtoH(got.data(), address, got.size()), "copying back");
  size_t wrong = 0;
  for (size_t i = 0; i < want.size(); ++i) wrong += got[i] != want[i];
  printf("%-8s %zu bytes, %zu differ\n", name, want.size(), wrong);
  return wrong;
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) stop("use: mixed_moe EXPORT PACK CASE");
  CUdevice device;
  CUcontext context;
  CUstream stream;
  CUgraph graph;
  CUgraphExec executable;
  need(cuInit(0), "starting the driver");
  need(cuDeviceGet(&device, 0), "finding a device");
  need(cuDevicePrimaryCtxRetain(&context, device), "opening the device");
  need(cuCtxSetCurrent(context), "taking the context");
  need(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "making a stream");

  cupylora* kernels = nullptr;
  need(cupylora_open(words[1], &kernels, &error));
  const Case c(words[3]);
  const Bytes pack = read_file(words[2]);
  const Adapters adapters(pack, c);
  Layer layer;
  plan(kernels, c, &layer);
  const Memory memory(c, layer);

  need(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capturing");
  enqueue(layer, memory, adapters, c, stream);
  need(cuStreamEndCapture(stream, &graph), "ending the capture");
  need(cuGraphInstantiateWithFlags(&executable, graph, 0), "making the graph");

  size_t wrong = 0;
  for (int replay = 0; replay < 2; ++replay) {
    memory.restore(c);
    need(cuGraphLaunch(executable, stream), "launching the graph");
    need(cuStreamSynchronize(stream), "waiting");
    wrong += compare(c, memory.qkv, "qkv");
    wrong += compare(c, memory.hidden, "hidden");
    wrong += compare(c, memory.down, "down");
    wrong += compare(c, memory.out, "out");
  }
  uint32_t faults;
  memcpy(&faults, reinterpret_cast<void*>(memory.status), 4);
  cupylora_close(kernels);
  puts(wrong == 0 && faults == 0 ? "PASS" : "FAIL");
  return wrong == 0 && faults == 0 ? 0 : 1;
}
