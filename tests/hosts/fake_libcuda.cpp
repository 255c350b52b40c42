// A libcuda.so.1 without a GPU, for host programs in C and C++: memory is the host's, streams run
// at once, and launches go to the emulator, to a log, or nowhere.
//
// In: a text file named by CUPYLORA_FAKE_CUDA, which tests/hosts/driver.py writes: what the device
// is, and each kernel's parameters and emulated library. Out: what the driver's functions return. A
// launch that the emulator faults ends the program with its report.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "../emulator/shape.h"

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kNotFound = 500, kCapturing = 900;
constexpr uint64_t kGuard = 256;

struct Kernel {
  std::string mangled, program, name, library;
  unsigned each_waits, may_read_unset, granule_log2;
  std::vector<std::pair<unsigned, unsigned>> places;  // offset and size of the parameters
};

struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  const void* attributes;
  uint32_t num_attributes;
};

struct Attribute {
  int32_t id, pad;
  uint32_t value[16];
};

// What a launch is, with its arguments as they were then.
struct Launch {
  const Kernel* kernel;
  emu::Shape shape;
  std::vector<unsigned char> args;
};

struct Range {
  uint64_t first, size;
  unsigned flags;
};

struct Stream {
  bool capturing = false;
  std::vector<Launch> captured;
};

struct Device {
  std::string core, log, mode = "emulate";
  std::map<int, int> attributes;
  std::map<std::string, Kernel> kernels;
  std::map<uint32_t, int> clusters;
  int blocks = 1;
  unsigned long long seed = 1;
  unsigned deliver = 0, pause = 0;
  std::vector<Range> ranges;
  std::vector<std::unique_ptr<Stream>> streams;
  std::mutex lock;

  Device() {
    const char* path = getenv("CUPYLORA_FAKE_CUDA");
    std::ifstream file(path == nullptr ? "" : path);
    std::string line;
    while (std::getline(file, line)) read(line);
  }

  void read(const std::string& line) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "core") words >> core;
    if (key == "log") words >> log;
    if (key == "mode") words >> mode;
    if (key == "blocks") words >> blocks;
    if (key == "schedule") words >> seed >> deliver >> pause;
    if (key == "attribute") {
      int id = 0;
      words >> id >> attributes[id];
    }
    if (key == "clusters") {
      uint32_t size = 0;
      words >> size >> clusters[size];
    }
    if (key != "kernel") return;
    Kernel k;
    words >> k.mangled >> k.program >> k.name >> k.library >> k.each_waits >> k.may_read_unset >>
        k.granule_log2;
    unsigned offset, size;
    while (words >> offset >> size) k.places.emplace_back(offset, size);
    kernels[k.mangled] = k;
  }
};

Device& device() {
  static Device made;
  return made;
}

thread_local bool has_context = false;

bool any_capture() {
  for (const auto& stream : device().streams) {
    if (stream->capturing) return true;
  }
  return false;
}

template <typename F>
F symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) {
    fprintf(stderr, "fake libcuda: %s\n", dlerror());
    abort();
  }
  F function;
  memcpy(&function, &found, sizeof function);
  return function;
}

void* library(const std::string& path, int mode) {
  static std::map<std::string, void*> opened;
  void*& handle = opened[path];
  if (handle == nullptr) handle = dlopen(path.c_str(), RTLD_NOW | mode);
  if (handle == nullptr) {
    fprintf(stderr, "fake libcuda: %s\n", dlerror());
    abort();
  }
  return handle;
}

void emulate(const Launch& launch) {
  Device& d = device();
  void* core = library(d.core, RTLD_GLOBAL);
  void* code = library(launch.kernel->library, RTLD_LOCAL);
  symbol<void (*)()>(core, "emulator_clear_ranges")();
  const auto add = symbol<void (*)(uint64_t, uint64_t, unsigned)>(core, "emulator_add_range");
  for (const Range& r : d.ranges) add(r.first, r.size, r.flags);
  const auto run = symbol<int (*)(const char*, const emu::Shape*, const unsigned char*, unsigned)>(
      code, "emulate");
  const int fault = run(launch.kernel->name.c_str(), &launch.shape, launch.args.data(),
                        static_cast<unsigned>(launch.args.size()));
  if (fault != 0) {
    const char* why = symbol<const char* (*)()>(core, "emulator_message")();
    fprintf(stderr, "%s/%s: fault %d %s\n", launch.kernel->program.c_str(),
            launch.kernel->name.c_str(), fault, why);
    exit(3);
  }
  const auto written = symbol<int (*)(unsigned)>(core, "emulator_range_written");
  for (size_t i = 0; i < d.ranges.size(); ++i) {
    unsigned& flags = d.ranges[i].flags;
    const bool late = written(static_cast<unsigned>(i)) != 0 && (flags & emu::kByAnyone) == 0;
    flags = (flags & ~static_cast<unsigned>(emu::kLate)) | (late ? emu::kLate : 0u);
  }
}

void record(const Launch& launch) {
  static FILE* file = fopen(device().log.c_str(), "w");
  const emu::Shape& s = launch.shape;
  fprintf(file, "%s/%s %u %u %u %u %u ", launch.kernel->program.c_str(),
          launch.kernel->name.c_str(), s.grid_x, s.threads, s.smem, s.cluster, s.dependent);
  for (unsigned char byte : launch.args) fprintf(file, "%02x", byte);
  fprintf(file, "\n");
  fflush(file);
}

void run(const Launch& launch) {
  const std::lock_guard<std::mutex> alone(device().lock);
  if (!device().log.empty()) record(launch);
  if (device().mode == "emulate") emulate(launch);
}

int host_memory(uint64_t bytes, unsigned flags, uint64_t* address) {
  if (!has_context) return kInvalidContext;
  if (any_capture()) return kCapturing;
  if (bytes == 0) return kInvalidValue;
  void* room = aligned_alloc(kGuard, (bytes + 2 * kGuard - 1) / kGuard * kGuard + 2 * kGuard);
  memset(room, 0xFF, bytes + kGuard);
  *address = reinterpret_cast<uint64_t>(room) + kGuard;
  device().ranges.push_back({*address, bytes, flags});
  return 0;
}

int free_memory(uint64_t address) {
  std::vector<Range>& ranges = device().ranges;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].first != address) continue;
    free(reinterpret_cast<void*>(address - kGuard));
    ranges.erase(ranges.begin() + static_cast<long>(i));
    return 0;
  }
  return kInvalidValue;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API cuInit(unsigned) { return 0; }
API cuDeviceGet(int* number, int) { return *number = 0, 0; }
API cuDevicePrimaryCtxRetain(void** context, int) { return *context = &device(), 0; }
API cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API cuCtxSetCurrent(void* context) { return has_context = context != nullptr, 0; }
API cuCtxGetDevice(int* number) { return *number = 0, has_context ? 0 : kInvalidContext; }

API cuDeviceGetAttribute(int* value, int id, int) {
  const auto found = device().attributes.find(id);
  if (found == device().attributes.end()) return kInvalidValue;
  return *value = found->second, 0;
}

API cuGetErrorName(int status, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kCapturing, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(status);
  return found == names.end() ? kInvalidValue : (*name = found->second, 0);
}

API cuModuleLoadData(void** module, const void* image) {
  if (any_capture()) return kCapturing;
  if (memcmp(image,
             "\x7f"
             "ELF",
             4) != 0)
    return kInvalidValue;
  return *module = &device(), 0;
}
API cuModuleUnload(void*) { return 0; }
API cuModuleGetFunction(void** function, void*, const char* name) {
  const auto found = device().kernels.find(name);
  if (found == device().kernels.end()) return kNotFound;
  return *function = &found->second, 0;
}
API cuFuncGetAttribute(int* value, int, void*) { return *value = 1024, 0; }
API cuFuncSetAttribute(void*, int, int) { return any_capture() ? kCapturing : 0; }
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  return *blocks = device().blocks, 0;
}
API cuOccupancyMaxActiveClusters(int* clusters, void*, const Config* config) {
  const auto* attribute = static_cast<const Attribute*>(config->attributes);
  return *clusters = device().clusters[attribute->value[0]], 0;
}

API cuLaunchKernelEx(const Config* config, void* function, void** params, void**) {
  if (device().mode == "nothing") return 0;
  if (!has_context) return kInvalidContext;
  const Device& d = device();
  Launch launch;
  launch.kernel = static_cast<const Kernel*>(function);
  launch.shape = {};
  launch.shape.grid_x = config->grid[0], launch.shape.grid_y = config->grid[1];
  launch.shape.cluster = 1, launch.shape.threads = config->block[0];
  launch.shape.smem = config->shared;
  launch.shape.each_waits = launch.kernel->each_waits;
  launch.shape.may_read_unset = launch.kernel->may_read_unset;
  launch.shape.granule_log2 = launch.kernel->granule_log2;
  launch.shape.seed = d.seed, launch.shape.deliver = d.deliver, launch.shape.pause = d.pause;
  for (uint32_t i = 0; i < config->num_attributes; ++i) {
    const Attribute& attribute = static_cast<const Attribute*>(config->attributes)[i];
    if (attribute.id == 4) launch.shape.cluster = attribute.value[0];
    if (attribute.id == 6) launch.shape.dependent = attribute.value[0];
  }
  const auto& places = launch.kernel->places;
  launch.args.resize(places.back().first + places.back().second);
  for (size_t i = 0; i < places.size(); ++i) {
    memcpy(launch.args.data() + places[i].first, params[i], places[i].second);
  }
  auto* stream = static_cast<Stream*>(config->stream);
  if (stream != nullptr && stream->capturing) {
    stream->captured.push_back(launch);
  } else {
    run(launch);
  }
  return 0;
}

API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  return host_memory(bytes, emu::kWritable, address);
}
API cuMemFree_v2(uint64_t address) { return free_memory(address); }
API cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  uint64_t address = 0;
  const int status = host_memory(bytes, emu::kWritable | emu::kByAnyone, &address);
  return *memory = reinterpret_cast<void*>(address), status;
}
API cuMemFreeHost(void* memory) { return free_memory(reinterpret_cast<uint64_t>(memory)); }
API cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  if (any_capture()) return kCapturing;
  return memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
}
API cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  if (any_capture()) return kCapturing;
  return memcpy(to, reinterpret_cast<void*>(from), bytes), 0;
}

API cuStreamCreate(void** stream, unsigned) {
  device().streams.push_back(std::make_unique<Stream>());
  return *stream = device().streams.back().get(), 0;
}
API cuStreamDestroy_v2(void*) { return 0; }
API cuStreamSynchronize(void*) { return any_capture() ? kCapturing : 0; }
API cuStreamBeginCapture_v2(void* stream, int) {
  return static_cast<Stream*>(stream)->capturing = true, 0;
}
API cuStreamEndCapture(void* stream, void** graph) {
  auto* own = static_cast<Stream*>(stream);
  own->capturing = false;
  return *graph = new std::vector<Launch>(std::move(own->captured)), 0;
}
API cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  return *executable = new std::vector<Launch>(*static_cast<std::vector<Launch>*>(graph)), 0;
}
API cuGraphLaunch(void* executable, void*) {
  for (const Launch& launch : *static_cast<std::vector<Launch>*>(executable)) run(launch);
  return 0;
}
API cuGraphDestroy(void* graph) { return delete static_cast<std::vector<Launch>*>(graph), 0; }
API cuGraphExecDestroy(void* graph) { return delete static_cast<std::vector<Launch>*>(graph), 0; }
