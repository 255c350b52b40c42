// What cupylora.h declares of the driver, held against the toolkit's own cuda.h. Compiling is the
// test.
#include <cuda.h>

#include <cstddef>
#define CUPYLORA_IMPLEMENTATION
#include "cupylora.h"

static_assert(sizeof(cupylora_i_config) == sizeof(CUlaunchConfig), "size");
static_assert(offsetof(cupylora_i_config, block) == offsetof(CUlaunchConfig, blockDimX), "block");
static_assert(offsetof(cupylora_i_config, shared) == offsetof(CUlaunchConfig, sharedMemBytes), "");
static_assert(offsetof(cupylora_i_config, stream) == offsetof(CUlaunchConfig, hStream), "stream");
static_assert(offsetof(cupylora_i_config, attributes) == offsetof(CUlaunchConfig, attrs), "attrs");
static_assert(offsetof(cupylora_i_config, num_attributes) == offsetof(CUlaunchConfig, numAttrs),
              "numAttrs");
static_assert(sizeof(cupylora_attribute) == sizeof(CUlaunchAttribute), "size");
static_assert(offsetof(cupylora_attribute, value) == offsetof(CUlaunchAttribute, value), "value");
static_assert(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION == 4, "cluster");
static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6, "dependent");
static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == 16, "processors");
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75, "major");
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == 76, "minor");
static_assert(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR == 81, "shared of an SM");
static_assert(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == 97, "shared of a block");
static_assert(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES == 1, "static shared");
static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8, "dynamic shared");
static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t) && sizeof(CUresult) == sizeof(int), "types");
