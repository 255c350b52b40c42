/* cupylora for C and C++ hosts: LoRA deltas of mixed batches, on the CUDA driver alone.
 *
 * Sizes of a call -> cupylora_plan_*: kernels, launches, workspace size (slow; once a shape)
 * addresses       -> cupylora_enqueue_*: launches on a stream (fast; every step, or captured once)
 *
 * `cupylora export` writes this file, the two that it includes, and the cubins that they name. One
 * C or C++ file of a program defines CUPYLORA_IMPLEMENTATION before it includes this; link with
 * -ldl -lm.
 *
 * Enqueue allocates nothing, waits for nothing and keeps nothing: it may run inside a capture, and
 * in several threads at once, also with one op. All of an opened cupylora belongs to the context
 * that was current when it was opened; have that context current in every call.
 *
 * Why no <cuda.h>: little is needed of it, its ABI is stable, and so this compiles where no toolkit
 * is and never clashes where one is. CUdeviceptr converts to uint64_t, CUstream to void*.
 * Functions are found in libcuda.so.1 by dlsym: a program starts where there is no driver, too.
 */
#ifndef CUPYLORA_H_
#define CUPYLORA_H_

#include <stddef.h>
#include <stdint.h>

#define CUPYLORA_ABI 1

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cupylora_status {
  CUPYLORA_OK = 0,
  CUPYLORA_BAD_ARGUMENT = 1, /* null, misaligned, out of range, of another table */
  CUPYLORA_TOO_SMALL = 2,    /* a workspace */
  CUPYLORA_BAD_EXPORT = 3,   /* a file is missing, or not the one that the table was written with */
  CUPYLORA_NO_DEVICE = 4,    /* no driver, no context, or an architecture that was not exported */
  CUPYLORA_DRIVER = 5        /* the driver refused: see cupylora_error.driver */
} cupylora_status;

/* What went wrong, for the caller who passed it; NULL is fine wherever one is taken. */
typedef struct cupylora_error {
  cupylora_status status;
  int driver; /* CUresult, or 0 */
  char text[240];
} cupylora_error;

typedef enum { CUPYLORA_BFLOAT16, CUPYLORA_FLOAT16, CUPYLORA_FLOAT32 } cupylora_dtype;

/* What a row of x or y stands for. A pair is a (token, choice), a row a pair after sorting. */
typedef enum { CUPYLORA_BY_TOKEN, CUPYLORA_BY_PAIR, CUPYLORA_BY_ROW } cupylora_rows;

/* Bytes that kernels set in the status word, which should be pinned host memory set to 0: a slot
 * not below max_loras, a rank out of range (both then count as no adapter), a list too long or
 * adapters beyond max_active (the last of them then count as none). */
enum { CUPYLORA_FAULT_SLOT = 0, CUPYLORA_FAULT_RANK = 1, CUPYLORA_FAULT_CAPACITY = 3 };

/* Sizes of a batch. A dense layer has one expert and top_k 1. */
typedef struct cupylora_batch {
  int32_t tokens;       /* T; 0 is fine, with addresses all the same */
  int32_t top_k;        /* k */
  int32_t experts;      /* local experts E, up to 2048 */
  int32_t start_expert; /* global id of the first */
  int32_t max_loras;    /* slots of the table, up to 4096 */
  int32_t max_active;   /* most adapters in the batch, a promise; 0: not known. For speed */
  int32_t max_rank;     /* the largest of any adapter. For the tiles: speed only */
  int32_t tile_rows;    /* 8, 16, 32 or 64; 0: chosen */
  int32_t k_major;      /* a pair's number: 0: t * k + j, 1: j * T + t */
} cupylora_batch;

/* Device addresses of a batch's lists; R = T * k, S: runs of one (expert, slot) that there can be.
 */
typedef struct cupylora_lists {
  uint64_t row_to_pair;           /* int32 [R] */
  uint64_t pair_to_row;           /* int32 [R], -1: not ours */
  uint64_t expert_offsets;        /* int64 [E + 1] */
  uint64_t seg_start;             /* int32 [S + 1] */
  uint64_t seg_expert, seg_slot;  /* int32 [S] */
  uint64_t seg_count, tile_count; /* int32 [1] */
  uint64_t tiles;                 /* 64 bytes each, aligned to 16 */
} cupylora_lists;

/* A module's delta goes to columns y_column + n * y_stride of y. */
typedef struct cupylora_slice {
  int32_t out_features, y_column, y_stride;
} cupylora_slice;

typedef enum { CUPYLORA_AUTO, CUPYLORA_PAIR, CUPYLORA_CLUSTER, CUPYLORA_RING } cupylora_choice;

/* y += scale * (x A^T) B^T for the modules that share x: up to 8 slices of y. */
typedef struct cupylora_delta {
  cupylora_dtype dtype; /* of x, y, A and B */
  int32_t in_features, max_rank;
  int32_t y_width;      /* columns of y */
  cupylora_rows x_rows; /* x: [T or R, in_features] */
  cupylora_rows y_rows; /* y: [R, y_width], by pair or by row */
  int32_t plan_settled; /* 1: a kernel stands between the batch's plan and this in the stream */
  cupylora_choice kernel;
  int32_t num_slices;
  cupylora_slice slices[8];
} cupylora_delta;

typedef enum { CUPYLORA_SILU, CUPYLORA_GELU, CUPYLORA_RELU2, CUPYLORA_SWIGLU_OAI } cupylora_kind;
typedef enum { CUPYLORA_GATE_FIRST, CUPYLORA_UP_FIRST, CUPYLORA_INTERLEAVED } cupylora_layout;

/* out [R, hidden] of x [R, 2 * hidden] (hidden where not gated). alpha, limit: SWIGLU_OAI's. */
typedef struct cupylora_activation {
  cupylora_dtype dtype;
  cupylora_kind kind;
  int32_t gated;
  cupylora_layout layout;
  float alpha, limit;
  int32_t hidden;
  int32_t with_bias;  /* of the local experts, [E, columns of x] */
  cupylora_rows rows; /* x and out by pair or by row */
} cupylora_activation;

/* out [T, hidden] = residual + sum over the k choices of weight * (y + bias). */
typedef struct cupylora_finalize {
  cupylora_dtype dtype;
  int32_t hidden;
  int32_t with_bias;    /* [E, hidden] */
  cupylora_rows y_rows; /* by pair or by row */
} cupylora_finalize;

/* Launches ready for addresses. It is yours: no memory is behind it, it may be copied, and enqueue
 * never changes it. Of its fields only workspace_bytes is for you. */
typedef struct cupylora_patch {
  uint16_t at;          /* byte of the arguments */
  uint8_t given, bytes; /* what is added there */
} cupylora_patch;
typedef struct cupylora_attribute {
  int32_t id, pad;
  uint32_t value[16];
} cupylora_attribute;
typedef struct cupylora_launch {
  void* function;
  const uint16_t* at; /* offsets of the parameters */
  uint32_t params, patches, attributes, grid, block, shared;
  cupylora_attribute attribute[2];
  cupylora_patch patch[20];
  uint64_t args[40]; /* room that the table is checked against, as that of patch and params */
} cupylora_launch;
typedef struct cupylora cupylora;
typedef struct cupylora_op {
  uint64_t workspace_bytes; /* that enqueue needs, aligned to 16; 0: none */
  const cupylora* owner;
  int32_t kind, launches, itemsize, with_bias;
  int32_t fused, x_vector, y_vector, y_pieces, y_pairs; /* the last four as far as sizes allow */
  cupylora_launch launch[8];
} cupylora_op;

/* Loads the kernels of the current context's device from an export's folder. Close it in the same
 * context, when nothing that was enqueued with it runs any more; ops planned with it end there. */
cupylora_status cupylora_open(const char* folder, cupylora** out, cupylora_error* error);
void cupylora_close(cupylora* opened);

/* Rows of a tile as chosen for the batch, and one buffer for all its lists. */
int32_t cupylora_tile_rows(const cupylora_batch* batch);
cupylora_status cupylora_lists_bytes(const cupylora_batch* batch, uint64_t* bytes,
                                     cupylora_error* error);
cupylora_status cupylora_lists_at(const cupylora_batch* batch, uint64_t address,
                                  cupylora_lists* lists, cupylora_error* error);

/* An op is for one number of tokens. All that work on a batch are planned with the same `batch`. */
cupylora_status cupylora_plan_lists(const cupylora* opened, const cupylora_batch* batch,
                                    cupylora_op* op, cupylora_error* error);
cupylora_status cupylora_plan_delta(const cupylora* opened, const cupylora_batch* batch,
                                    const cupylora_delta* delta, cupylora_op* op,
                                    cupylora_error* error);
cupylora_status cupylora_plan_activation(const cupylora* opened, const cupylora_batch* batch,
                                         const cupylora_activation* activation, cupylora_op* op,
                                         cupylora_error* error);
cupylora_status cupylora_plan_finalize(const cupylora* opened, const cupylora_batch* batch,
                                       const cupylora_finalize* finalize, cupylora_op* op,
                                       cupylora_error* error);

/* topk_ids: int32 [T, k] global experts, for a dense layer T zeros; token_to_slot: int32 [T],
 * negative: no adapter. status: the fault word, or 0. All addresses are the device's. */
cupylora_status cupylora_enqueue_lists(const cupylora_op* op, void* stream, uint64_t topk_ids,
                                       uint64_t token_to_slot, const cupylora_lists* lists,
                                       uint64_t workspace, uint64_t workspace_bytes,
                                       uint64_t status, cupylora_error* error);
/* entries: slot-table records [num_slices, max_loras], aligned to 16. Rows of no adapter keep their
 * bits. */
cupylora_status cupylora_enqueue_delta(const cupylora_op* op, void* stream, uint64_t x, uint64_t y,
                                       const cupylora_lists* lists, uint64_t entries,
                                       uint64_t workspace, uint64_t workspace_bytes,
                                       uint64_t status, cupylora_error* error);
/* lists: NULL where all rows are alive and there is no bias. */
cupylora_status cupylora_enqueue_activation(const cupylora_op* op, void* stream, uint64_t x,
                                            uint64_t bias, const cupylora_lists* lists,
                                            uint64_t out, cupylora_error* error);
/* weights: float32 [T, k]; residual: [T, hidden] or 0, may be out. */
cupylora_status cupylora_enqueue_finalize(const cupylora_op* op, void* stream, uint64_t y,
                                          uint64_t weights, const cupylora_lists* lists,
                                          uint64_t bias, uint64_t residual, uint64_t out,
                                          cupylora_error* error);

/* A file of `cupylora pack`, wherever it lies in memory (mapped, say), which must stay. Its form is
 * checked here, its content by `cupylora inspect`: open packs of your own making. */
typedef struct cupylora_pack {
  const unsigned char *entries, *names;
  const unsigned char* blocks; /* copy blocks_bytes to a device address aligned to 256 */
  uint64_t blocks_bytes;
  int32_t adapters, rows; /* rows of a slot table: layers * modules */
  int32_t max_rank;
  cupylora_dtype dtype;
} cupylora_pack;

#define CUPYLORA_ENTRY_BYTES 48
#define CUPYLORA_NAME_BYTES 64

cupylora_status cupylora_pack_open(const void* file, uint64_t bytes, cupylora_pack* pack,
                                   cupylora_error* error);
/* Number of the adapter of this name, -1: none. */
int32_t cupylora_pack_find(const cupylora_pack* pack, const char* name);
/* The record (CUPYLORA_ENTRY_BYTES) of an adapter in one row of a slot table, its blocks at
 * blocks_address. It goes to place [row][slot] of the table; generation: any number. */
cupylora_status cupylora_table_entry(const cupylora_pack* pack, int32_t adapter, int32_t row,
                                     uint64_t blocks_address, int32_t generation, void* record,
                                     cupylora_error* error);

#ifdef __cplusplus
}
#endif
#endif /* CUPYLORA_H_ */

#if defined(CUPYLORA_IMPLEMENTATION) && !defined(CUPYLORA_IMPLEMENTED)
#define CUPYLORA_IMPLEMENTED
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cupylora_table.h"
#if CUPYLORA_TABLE_ABI != CUPYLORA_ABI
#error "cupylora.h and cupylora_table.h are of different exports"
#endif
#if CUPYLORA_MOST_ARGS > 320 || CUPYLORA_MOST_PARAMS > 24 || CUPYLORA_MOST_POINTERS > 17 || \
    CUPYLORA_MAX_SLICES != 8
#error "a kernel has more arguments than cupylora_launch has room for"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* --- Faults and the driver ------------------------------------------------------------------- */

typedef struct cupylora_i_config { /* CUlaunchConfig */
  uint32_t grid[3], block[3], shared;
  void* stream;
  const cupylora_attribute* attributes;
  uint32_t num_attributes;
} cupylora_i_config;

struct cupylora {
  struct { /* functions alone, in the order of their names in cupylora_i_symbols */
    int (*context_device)(int* device);
    int (*device_attribute)(int* value, int attribute, int device);
    int (*load)(void** module, const void* image);
    int (*unload)(void* module);
    int (*function)(void** function, void* module, const char* name);
    int (*get_attribute)(int* value, int attribute, void* function);
    int (*set_attribute)(void* function, int attribute, int value);
    int (*blocks)(int* blocks, void* function, int threads, size_t shared);
    int (*clusters)(int* clusters, void* function, const cupylora_i_config* config);
    int (*launch)(const cupylora_i_config* config, void* function, void** params, void** extra);
    int (*error_name)(int status, const char** name);
  } driver;
  const char* arch;
  int processors, capability, shared_block, shared_sm;
  void* library;
  void* modules[CUPYLORA_FILES];
  void* functions[CUPYLORA_KERNELS]; /* NULL: of another architecture */
};

static cupylora_status cupylora_i_fail(cupylora_error* error, cupylora_status status, int driver,
                                       const char* format, ...) {
  va_list values;
  if (error == NULL) return status;
  error->status = status;
  error->driver = driver;
  va_start(values, format);
  vsnprintf(error->text, sizeof error->text, format, values);
  va_end(values);
  return status;
}

static cupylora_status cupylora_i_ok(cupylora_error* error) {
  if (error == NULL) return CUPYLORA_OK;
  error->status = CUPYLORA_OK;
  error->driver = 0;
  error->text[0] = 0;
  return CUPYLORA_OK;
}

static cupylora_status cupylora_i_refused(const cupylora* c, int status, const char* what,
                                          cupylora_error* error) {
  const char* name = NULL;
  if (c->driver.error_name(status, &name) != 0 || name == NULL) name = "unknown";
  return cupylora_i_fail(error, CUPYLORA_DRIVER, status, "%.120s failed: %s (status %d)", what,
                         name, status);
}

#define CUPYLORA_I_NEED(condition, ...) \
  if (!(condition)) return cupylora_i_fail(error, CUPYLORA_BAD_ARGUMENT, 0, __VA_ARGS__)
#define CUPYLORA_I_RANGE(value, low, high)                                 \
  CUPYLORA_I_NEED((int64_t)(value) >= (low) && (int64_t)(value) <= (high), \
                  "%s is %d; %d to %d is needed", #value, (int)(value), (int)(low), (int)(high))
#define CUPYLORA_I_TRY(call)                                  \
  do {                                                        \
    const cupylora_status cupylora_i_got = (call);            \
    if (cupylora_i_got != CUPYLORA_OK) return cupylora_i_got; \
  } while (0)

/* Returns the name of a function that the driver lacks, or NULL. */
static const char* cupylora_i_symbols(cupylora* c) {
  static const char names[][48] = {"cuCtxGetDevice",
                                   "cuDeviceGetAttribute",
                                   "cuModuleLoadData",
                                   "cuModuleUnload",
                                   "cuModuleGetFunction",
                                   "cuFuncGetAttribute",
                                   "cuFuncSetAttribute",
                                   "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                                   "cuOccupancyMaxActiveClusters",
                                   "cuLaunchKernelEx",
                                   "cuGetErrorName"};
  void* found[sizeof names / sizeof names[0]];
  size_t i;
  for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
    found[i] = dlsym(c->library, names[i]);
    if (found[i] == NULL) return names[i];
  }
  memcpy(&c->driver, found, sizeof found);
  return NULL;
}

static cupylora_status cupylora_i_device(cupylora* c, cupylora_error* error) {
  int device = 0, major = 0, minor = 0, status = c->driver.context_device(&device), i;
  int* const values[] = {&c->processors, &major, &minor, &c->shared_sm, &c->shared_block};
  const int attributes[] = {16, 75, 76, 81, 97}; /* CU_DEVICE_ATTRIBUTE_* of those */
  if (status != 0) {
    return cupylora_i_fail(error, CUPYLORA_NO_DEVICE, status,
                           "no CUDA context is current in this thread (status %d)", status);
  }
  for (i = 0; i < 5; ++i) {
    status = c->driver.device_attribute(values[i], attributes[i], device);
    if (status != 0) return cupylora_i_refused(c, status, "a query of the device", error);
  }
  c->capability = major * 10 + minor;
  c->arch = major == 8    ? "sm_80"
            : major == 9  ? "sm_90a"
            : major == 10 ? "sm_100"
            : major == 12 ? "sm_120"
                          : NULL;
  if (c->arch != NULL) return CUPYLORA_OK;
  return cupylora_i_fail(error, CUPYLORA_NO_DEVICE, 0,
                         "compute capability %d.%d is not supported; 8.x, 9.x, 10.x or 12.x is",
                         major, minor);
}

static uint64_t cupylora_i_fnv1a(const unsigned char* data, uint64_t bytes) {
  uint64_t value = UINT64_C(0xcbf29ce484222325), at, i;
  for (at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    for (i = 0; i < 8 && at + i < bytes; ++i) word |= (uint64_t)data[at + i] << (8 * i);
    value = (value ^ word) * UINT64_C(0x100000001b3);
  }
  return (value ^ bytes) * UINT64_C(0x100000001b3);
}

static cupylora_status cupylora_i_load_file(cupylora* c, const char* folder, int index,
                                            cupylora_error* error) {
  const cupylora_file* file = &cupylora_files[index];
  unsigned char* image = (unsigned char*)malloc((size_t)file->bytes + 1);
  char path[4096];
  FILE* stream;
  uint64_t got = 0;
  int status = 0;
  snprintf(path, sizeof path, "%s/%s", folder, file->path);
  stream = image == NULL ? NULL : fopen(path, "rb");
  if (stream != NULL) {
    got = fread(image, 1, (size_t)file->bytes + 1, stream);
    fclose(stream);
  }
  if (got == file->bytes && cupylora_i_fnv1a(image, got) == file->fnv1a) {
    status = c->driver.load(&c->modules[index], image);
    free(image);
    return status == 0 ? CUPYLORA_OK : cupylora_i_refused(c, status, file->path, error);
  }
  free(image);
  return cupylora_i_fail(
      error, CUPYLORA_BAD_EXPORT, 0, "%.90s/%.60s %s; cubins and headers have to be of one export",
      folder, file->path, stream == NULL ? "cannot be read" : "is not what cupylora_table.h names");
}

static cupylora_status cupylora_i_load_kernel(cupylora* c, int index, cupylora_error* error) {
  const cupylora_kernel* kernel = &cupylora_kernels[index];
  void* module = c->modules[kernel->file];
  int used = 0, status = c->driver.function(&c->functions[index], module, kernel->mangled);
  if (status == 0 && cupylora_functions[kernel->function].dynamic_shared) {
    /* To the most there is, once: raised by need, two threads could undo one another's. */
    status = c->driver.get_attribute(&used, 1, c->functions[index]); /* static shared memory */
    if (status == 0) {
      status = c->driver.set_attribute(c->functions[index], 8, c->shared_block - used);
    }
  }
  return status == 0 ? CUPYLORA_OK : cupylora_i_refused(c, status, kernel->mangled, error);
}

static cupylora_status cupylora_i_load(cupylora* c, const char* folder, cupylora_error* error) {
  const char* missing;
  int i, files = 0;
  c->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (c->library == NULL) {
    return cupylora_i_fail(error, CUPYLORA_NO_DEVICE, 0, "libcuda.so.1 cannot be loaded");
  }
  missing = cupylora_i_symbols(c);
  if (missing != NULL) {
    return cupylora_i_fail(error, CUPYLORA_NO_DEVICE, 0,
                           "the driver lacks %s; one for CUDA 12 or newer is needed", missing);
  }
  CUPYLORA_I_TRY(cupylora_i_device(c, error));
  for (i = 0; i < CUPYLORA_FILES; ++i) {
    if (strcmp(cupylora_files[i].arch, c->arch) != 0) continue;
    CUPYLORA_I_TRY(cupylora_i_load_file(c, folder, i, error));
    ++files;
  }
  if (files == 0) {
    return cupylora_i_fail(error, CUPYLORA_NO_DEVICE, 0,
                           "the export has no kernels for %s; export with --arch %s", c->arch,
                           c->arch);
  }
  for (i = 0; i < CUPYLORA_KERNELS; ++i) {
    if (c->modules[cupylora_kernels[i].file] == NULL) continue;
    CUPYLORA_I_TRY(cupylora_i_load_kernel(c, i, error));
  }
  return cupylora_i_ok(error);
}

cupylora_status cupylora_open(const char* folder, cupylora** out, cupylora_error* error) {
  cupylora_status status;
  CUPYLORA_I_NEED(out != NULL, "out is NULL");
  *out = NULL;
  CUPYLORA_I_NEED(folder != NULL && strlen(folder) < 4000, "folder is NULL or too long");
  *out = (cupylora*)calloc(1, sizeof **out);
  CUPYLORA_I_NEED(*out != NULL, "no memory for %d bytes", (int)sizeof **out);
  status = cupylora_i_load(*out, folder, error);
  if (status == CUPYLORA_OK) return status;
  cupylora_close(*out);
  *out = NULL;
  return status;
}

void cupylora_close(cupylora* opened) {
  int i;
  if (opened == NULL) return;
  for (i = 0; i < CUPYLORA_FILES; ++i) {
    if (opened->modules[i] != NULL) opened->driver.unload(opened->modules[i]);
  }
  if (opened->library != NULL) dlclose(opened->library);
  free(opened);
}

/* --- Arithmetic, and lists of a batch -------------------------------------------------------- */

static int64_t cupylora_i_min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t cupylora_i_max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t cupylora_i_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t cupylora_i_up(int64_t a, int64_t b) { return cupylora_i_ceil(a, b) * b; }

/* Exponent of the greatest power of two up to `value`, which is at least 1. */
static int cupylora_i_log2(int64_t value) {
  int exponent = 0;
  while (value >> (exponent + 1)) ++exponent;
  return exponent;
}

static int32_t cupylora_i_tile_rows(int64_t rows, int64_t experts, int64_t active, int64_t rank) {
  const double shared = (double)rows / (double)(experts * cupylora_i_max(1, active));
  int i;
  for (i = 0; i < CUPYLORA_TILE_CHOICES_ROWS; ++i) {
    const int64_t* row = cupylora_tile_choices[i];
    if (row[0] <= rank && rank <= row[1] && rows >= row[2] && shared >= (double)row[3]) {
      return (int32_t)row[4];
    }
  }
  return 8;
}

static int64_t cupylora_i_segment_capacity(int64_t rows, int64_t experts, int64_t loras) {
  return cupylora_i_max(1, cupylora_i_min(rows, experts * (loras + 1)));
}

static int64_t cupylora_i_tile_capacity(int64_t rows, int64_t segments, int64_t tile_rows) {
  return cupylora_i_max(1, cupylora_i_min(rows, segments + rows / tile_rows));
}

/* m with n / divisor == n * m >> 32 for n * divisor < 2^32; 0 stands for 1. */
static int64_t cupylora_i_magic(int64_t divisor) {
  return divisor == 1 ? 0 : (INT64_C(1) << 32) / divisor + 1;
}

typedef enum {
  CUPYLORA_I_RANKED,
  CUPYLORA_I_TABLE,
  CUPYLORA_I_LARGE,
  CUPYLORA_I_SORTED
} cupylora_i_way;

/* How a batch's lists are made. a, b: numbers of the kernel's name. */
typedef struct cupylora_i_plan {
  cupylora_i_way way;
  int a, b;
  int64_t grid, threads, shared, cost;
  int64_t block_pairs, place_grid, place_shared, counts_at, workspace; /* of LARGE */
} cupylora_i_plan;

static int64_t cupylora_i_table_cost(int64_t keys, const int64_t* shape) {
  const int64_t many = cupylora_i_max(0, shape[0] * shape[1] * 32 - CUPYLORA_TABLE_PAIRS);
  return 400 + keys * 45 / 128 + keys * shape[0] / 64 + shape[1] * 150 +
         many * CUPYLORA_TABLE_PAIR_COST;
}

static void cupylora_i_ranked(int64_t pairs, cupylora_i_plan* plan) {
  plan->way = CUPYLORA_I_RANKED;
  plan->a = pairs <= CUPYLORA_RANK_ALWAYS ? 8 : 4;
  plan->grid = 1;
  plan->threads = cupylora_i_max(256, cupylora_i_up(pairs * plan->a, 32));
  plan->cost = 150 + pairs * pairs / 32;
}

static void cupylora_i_large(int64_t pairs, int64_t keys, int64_t most, cupylora_i_plan* plan) {
  const int64_t padded = cupylora_i_up(keys, CUPYLORA_VECTOR_KEYS);
  int i;
  plan->place_shared = padded * CUPYLORA_PLACE_KEY_BYTES + 8;
  if (pairs > CUPYLORA_LARGE_MOST || plan->place_shared + CUPYLORA_PLACE_STATIC > most) return;
  for (i = CUPYLORA_PLAN_COUNTS_ROWS - 1; i >= 0; --i) { /* the first that fits counts */
    const int64_t columns = cupylora_plan_counts[i][0], rounds = cupylora_plan_counts[i][1];
    if (padded * columns + CUPYLORA_COUNT_STATIC > most) continue;
    plan->way = CUPYLORA_I_LARGE;
    plan->a = (int)columns, plan->b = (int)rounds;
    plan->block_pairs = columns * rounds * 32;
    plan->grid = cupylora_i_ceil(pairs, plan->block_pairs);
    plan->threads = CUPYLORA_PLACE_THREADS;
    plan->shared = padded * columns;
    plan->place_grid = cupylora_i_ceil(pairs, CUPYLORA_PLACE_THREADS);
    plan->counts_at = cupylora_i_up(pairs * 4, 16);
    plan->workspace = plan->counts_at + plan->grid * padded * 2 + CUPYLORA_NUMBERS * 2;
    plan->cost = CUPYLORA_LARGE_COST + keys * 5 / 2;
  }
}

/* divisor: of a pair, as the kernels divide; shared: bytes that a block may have. */
static cupylora_i_plan cupylora_i_choose_plan(int64_t pairs, int64_t divisor, int64_t keys,
                                              int64_t shared) {
  const int64_t most = cupylora_i_min(shared, CUPYLORA_MOST_SHARED);
  const int64_t* best = NULL;
  cupylora_i_plan plan, large;
  int i;
  memset(&plan, 0, sizeof plan);
  plan.way = CUPYLORA_I_SORTED, plan.cost = CUPYLORA_NO_COST;
  large = plan;
  if (pairs * divisor >= INT64_C(1) << 32) return plan;
  for (i = 0; i < CUPYLORA_PLAN_TABLES_ROWS; ++i) {
    const int64_t* shape = cupylora_plan_tables[i];
    const int64_t bytes = cupylora_i_up((keys + 1) * shape[0], 16);
    if (pairs > shape[0] * shape[1] * 32 || bytes + CUPYLORA_TABLE_STATIC > most) continue;
    if (best == NULL || cupylora_i_table_cost(keys, shape) < cupylora_i_table_cost(keys, best)) {
      best = shape;
    }
  }
  if (pairs <= CUPYLORA_RANK_ALWAYS ||
      (pairs <= CUPYLORA_RANK_MOST &&
       (best == NULL || 150 + pairs * pairs / 32 < cupylora_i_table_cost(keys, best)))) {
    cupylora_i_ranked(pairs, &plan);
    return plan;
  }
  cupylora_i_large(pairs, keys, most, &large);
  if (best == NULL || large.cost <= cupylora_i_table_cost(keys, best)) {
    plan = large;
  } else {
    plan.way = CUPYLORA_I_TABLE;
    plan.a = (int)best[0], plan.b = (int)best[1];
    plan.threads = best[0] > 16 || pairs > 512 || keys > 4096 ? 1024 : 512;
    plan.grid = 1;
    while (plan.grid * CUPYLORA_SHARE < pairs) plan.grid *= 2;
    plan.shared = cupylora_i_up((keys + 1) * best[0], 16);
    plan.cost = cupylora_i_table_cost(keys, best);
  }
  return plan;
}

/* --- Sizes of a batch and of its lists ------------------------------------------------------- */

static int64_t cupylora_i_rows(const cupylora_batch* b) { return (int64_t)b->tokens * b->top_k; }

int32_t cupylora_tile_rows(const cupylora_batch* batch) {
  if (batch == NULL || batch->tile_rows != 0) return batch == NULL ? 0 : batch->tile_rows;
  return cupylora_i_tile_rows(cupylora_i_rows(batch), batch->experts, batch->max_active,
                              batch->max_rank);
}

static int64_t cupylora_i_segments(const cupylora_batch* b) {
  return cupylora_i_segment_capacity(cupylora_i_rows(b), b->experts, b->max_loras);
}

static int64_t cupylora_i_tiles(const cupylora_batch* b) {
  return cupylora_i_tile_capacity(cupylora_i_rows(b), cupylora_i_segments(b),
                                  cupylora_tile_rows(b));
}

static cupylora_status cupylora_i_check_batch(const cupylora_batch* batch, cupylora_error* error) {
  CUPYLORA_I_NEED(batch != NULL, "batch is NULL");
  CUPYLORA_I_RANGE(batch->tokens, 0, INT32_MAX);
  CUPYLORA_I_RANGE(batch->top_k, 1, INT32_MAX);
  CUPYLORA_I_NEED(cupylora_i_rows(batch) <= CUPYLORA_MAX_ROWS, "the batch has over %d rows",
                  CUPYLORA_MAX_ROWS);
  CUPYLORA_I_RANGE(batch->experts, 1, CUPYLORA_MAX_EXPERTS);
  CUPYLORA_I_RANGE(batch->start_expert, 0, INT32_MAX);
  CUPYLORA_I_RANGE(batch->max_loras, 1, CUPYLORA_MAX_LORAS);
  CUPYLORA_I_RANGE(batch->max_active, 0, INT32_MAX);
  CUPYLORA_I_RANGE(batch->max_rank, 1, CUPYLORA_MAX_RANK);
  CUPYLORA_I_RANGE(batch->k_major, 0, 1);
  CUPYLORA_I_NEED(batch->tile_rows == 0 || batch->tile_rows == 8 || batch->tile_rows == 16 ||
                      batch->tile_rows == 32 || batch->tile_rows == 64,
                  "batch->tile_rows is %d; 8, 16, 32, 64 or 0 is needed", batch->tile_rows);
  return CUPYLORA_OK;
}

/* Places of the lists from `address` on, in the order of cupylora_lists, and their end. */
static void cupylora_i_lists(const cupylora_batch* b, uint64_t address, uint64_t places[10]) {
  const int64_t rows = cupylora_i_rows(b), segments = cupylora_i_segments(b);
  const int64_t tiles = cupylora_i_tiles(b) * CUPYLORA_TILE_INTS, offsets = 2 * b->experts + 2;
  const int64_t ints[] = {rows, rows, offsets, segments + 1, segments, segments, 1, 1, tiles};
  int i;
  for (i = 0; i < 9; ++i) {
    places[i] = address;
    address += (uint64_t)cupylora_i_up(ints[i] * 4, 256);
  }
  places[9] = address;
}

cupylora_status cupylora_lists_bytes(const cupylora_batch* batch, uint64_t* bytes,
                                     cupylora_error* error) {
  uint64_t places[10];
  CUPYLORA_I_NEED(bytes != NULL, "bytes is NULL");
  CUPYLORA_I_TRY(cupylora_i_check_batch(batch, error));
  cupylora_i_lists(batch, 0, places);
  *bytes = places[9];
  return cupylora_i_ok(error);
}

cupylora_status cupylora_lists_at(const cupylora_batch* batch, uint64_t address,
                                  cupylora_lists* lists, cupylora_error* error) {
  uint64_t places[10];
  CUPYLORA_I_NEED(lists != NULL, "lists is NULL");
  CUPYLORA_I_NEED(address != 0 && address % 16 == 0, "address is 0 or not aligned to 16 bytes");
  CUPYLORA_I_TRY(cupylora_i_check_batch(batch, error));
  cupylora_i_lists(batch, address, places);
  memcpy(lists, places, sizeof *lists);
  return cupylora_i_ok(error);
}

#include "cupylora_plan.h"

/* --- Enqueueing ------------------------------------------------------------------------------ */

static cupylora_status cupylora_i_run(const cupylora_op* op, int first, int last, void* stream,
                                      const uint64_t* given, cupylora_error* error) {
  for (; first < last; ++first) {
    const cupylora_launch* launch = &op->launch[first];
    cupylora_i_config config;
    uint64_t args[40], wide;
    unsigned char* bytes = (unsigned char*)args;
    void* params[24];
    uint32_t i, narrow;
    int status;
    memcpy(args, launch->args, sizeof args);
    for (i = 0; i < launch->patches; ++i) {
      const cupylora_patch patch = launch->patch[i];
      if (patch.bytes == 8) {
        memcpy(&wide, bytes + patch.at, 8);
        wide += given[patch.given];
        memcpy(bytes + patch.at, &wide, 8);
      } else {
        narrow = (uint32_t)given[patch.given];
        memcpy(bytes + patch.at, &narrow, 4);
      }
    }
    for (i = 0; i < launch->params; ++i) params[i] = bytes + launch->at[i];
    memset(&config, 0, sizeof config);
    config.grid[0] = launch->grid, config.block[0] = launch->block;
    config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
    config.shared = launch->shared, config.stream = stream;
    config.attributes = launch->attribute, config.num_attributes = launch->attributes;
    status = op->owner->driver.launch(&config, launch->function, params, NULL);
    if (status != 0) return cupylora_i_refused(op->owner, status, "a launch", error);
  }
  return cupylora_i_ok(error);
}

#define CUPYLORA_I_ADDRESS(address, alignment)                              \
  CUPYLORA_I_NEED((address) != 0 && (address) % (uint64_t)(alignment) == 0, \
                  "%s is 0 or not aligned to %d bytes", #address, (int)(alignment))

/* Checks what every enqueue takes and begins its `given`. */
static cupylora_status cupylora_i_start(const cupylora_op* op, int kind,
                                        const cupylora_lists* lists, uint64_t* given,
                                        cupylora_error* error) {
  static const uint8_t alignment[] = {4, 4, 8, 4, 4, 4, 4, 4, 16};
  int i;
  CUPYLORA_I_NEED(op != NULL && op->owner != NULL && op->kind == kind,
                  "op is not planned, or for another operation");
  memset(given, 0, CUPYLORA_I_GIVEN * sizeof *given);
  if (lists == NULL) return CUPYLORA_OK;
  memcpy(given + CUPYLORA_I_LISTS, lists, sizeof *lists);
  for (i = 0; i < 9; ++i) {
    CUPYLORA_I_NEED(
        given[CUPYLORA_I_LISTS + i] != 0 && given[CUPYLORA_I_LISTS + i] % alignment[i] == 0,
        "address %d of lists is 0 or not aligned to %d bytes", i, alignment[i]);
  }
  return CUPYLORA_OK;
}

static cupylora_status cupylora_i_scratch(const cupylora_op* op, uint64_t* given,
                                          uint64_t workspace, uint64_t workspace_bytes,
                                          uint64_t status, cupylora_error* error) {
  if (workspace_bytes < op->workspace_bytes) {
    return cupylora_i_fail(
        error, CUPYLORA_TOO_SMALL, 0, "the workspace has %llu bytes; %llu are needed",
        (unsigned long long)workspace_bytes, (unsigned long long)op->workspace_bytes);
  }
  if (op->workspace_bytes > 0) CUPYLORA_I_ADDRESS(workspace, 16);
  CUPYLORA_I_NEED(status % 4 == 0, "status is not aligned to 4 bytes");
  given[CUPYLORA_I_WORKSPACE] = workspace;
  given[CUPYLORA_I_STATUS] = status;
  return CUPYLORA_OK;
}

cupylora_status cupylora_enqueue_lists(const cupylora_op* op, void* stream, uint64_t topk_ids,
                                       uint64_t token_to_slot, const cupylora_lists* lists,
                                       uint64_t workspace, uint64_t workspace_bytes,
                                       uint64_t status, cupylora_error* error) {
  uint64_t given[CUPYLORA_I_GIVEN];
  CUPYLORA_I_NEED(lists != NULL, "lists is NULL");
  CUPYLORA_I_TRY(cupylora_i_start(op, CUPYLORA_I_FOR_LISTS, lists, given, error));
  CUPYLORA_I_TRY(cupylora_i_scratch(op, given, workspace, workspace_bytes, status, error));
  CUPYLORA_I_ADDRESS(topk_ids, 4);
  CUPYLORA_I_ADDRESS(token_to_slot, 4);
  given[CUPYLORA_I_A] = topk_ids, given[CUPYLORA_I_B] = token_to_slot;
  return cupylora_i_run(op, 0, op->launches, stream, given, error);
}

cupylora_status cupylora_enqueue_delta(const cupylora_op* op, void* stream, uint64_t x, uint64_t y,
                                       const cupylora_lists* lists, uint64_t entries,
                                       uint64_t workspace, uint64_t workspace_bytes,
                                       uint64_t status, cupylora_error* error) {
  uint64_t given[CUPYLORA_I_GIVEN];
  int vector;
  CUPYLORA_I_NEED(lists != NULL, "lists is NULL");
  CUPYLORA_I_TRY(cupylora_i_start(op, CUPYLORA_I_FOR_DELTA, lists, given, error));
  CUPYLORA_I_TRY(cupylora_i_scratch(op, given, workspace, workspace_bytes, status, error));
  CUPYLORA_I_ADDRESS(x, op->itemsize);
  CUPYLORA_I_ADDRESS(y, op->itemsize);
  CUPYLORA_I_ADDRESS(entries, 16);
  vector = op->y_vector && y % 16 == 0;
  given[CUPYLORA_I_A] = x, given[CUPYLORA_I_B] = y, given[CUPYLORA_I_ENTRIES] = entries;
  given[CUPYLORA_I_X_FLAG] = op->x_vector && x % 16 == 0;
  if (op->fused) { /* YAccess of lora/items.cuh */
    given[CUPYLORA_I_Y_FLAG] = vector && op->y_pieces ? 2 : op->y_pairs && y % 4 == 0 ? 1 : 0;
  } else {
    given[CUPYLORA_I_Y_FLAG] = (uint64_t)vector;
  }
  return cupylora_i_run(op, 0, op->launches, stream, given, error);
}

/* Enqueues rows by 16 bytes at a time where all addresses allow it, else by element. */
static cupylora_status cupylora_i_run_rows(const cupylora_op* op, void* stream,
                                           const uint64_t* given, cupylora_error* error) {
  const uint64_t all = given[CUPYLORA_I_A] | given[CUPYLORA_I_OUT] | given[CUPYLORA_I_BIAS] |
                       given[CUPYLORA_I_RESIDUAL];
  const int way = op->x_vector && all % 16 == 0 ? 0 : 1;
  CUPYLORA_I_NEED(all % (uint64_t)op->itemsize == 0, "an address is not aligned to %d bytes",
                  op->itemsize);
  CUPYLORA_I_NEED((given[CUPYLORA_I_BIAS] != 0) == op->with_bias,
                  "bias is %s, and the op was planned the other way",
                  op->with_bias ? "0" : "given");
  if (op->launches == 0) return cupylora_i_ok(error);
  return cupylora_i_run(op, way, way + 1, stream, given, error);
}

cupylora_status cupylora_enqueue_activation(const cupylora_op* op, void* stream, uint64_t x,
                                            uint64_t bias, const cupylora_lists* lists,
                                            uint64_t out, cupylora_error* error) {
  uint64_t given[CUPYLORA_I_GIVEN];
  CUPYLORA_I_TRY(cupylora_i_start(op, CUPYLORA_I_FOR_ROWS, lists, given, error));
  CUPYLORA_I_NEED(lists != NULL || !op->with_bias, "lists is NULL, and a bias needs them");
  CUPYLORA_I_NEED(x != 0 && out != 0, "x or out is 0");
  given[CUPYLORA_I_A] = x, given[CUPYLORA_I_BIAS] = bias, given[CUPYLORA_I_OUT] = out;
  return cupylora_i_run_rows(op, stream, given, error);
}

cupylora_status cupylora_enqueue_finalize(const cupylora_op* op, void* stream, uint64_t y,
                                          uint64_t weights, const cupylora_lists* lists,
                                          uint64_t bias, uint64_t residual, uint64_t out,
                                          cupylora_error* error) {
  uint64_t given[CUPYLORA_I_GIVEN];
  CUPYLORA_I_NEED(lists != NULL, "lists is NULL");
  CUPYLORA_I_TRY(cupylora_i_start(op, CUPYLORA_I_FOR_SUM, lists, given, error));
  CUPYLORA_I_NEED(y != 0 && out != 0, "y or out is 0");
  CUPYLORA_I_ADDRESS(weights, 4);
  given[CUPYLORA_I_A] = y, given[CUPYLORA_I_B] = weights, given[CUPYLORA_I_OUT] = out;
  given[CUPYLORA_I_BIAS] = bias, given[CUPYLORA_I_RESIDUAL] = residual;
  return cupylora_i_run_rows(op, stream, given, error);
}

/* --- Packs ----------------------------------------------------------------------------------- */

/* The first tensor of a pack: int64s, whose places are bytes from its own start. */
enum {
  CUPYLORA_I_MAGIC,
  CUPYLORA_I_VERSION,
  CUPYLORA_I_ADAPTERS,
  CUPYLORA_I_TABLE_ROWS,
  CUPYLORA_I_ENTRIES_AT,
  CUPYLORA_I_NAMES_AT,
  CUPYLORA_I_BLOCKS_AT,
  CUPYLORA_I_BLOCKS_BYTES,
  CUPYLORA_I_DTYPE,
  CUPYLORA_I_MAX_RANK,
  CUPYLORA_I_END,
  CUPYLORA_I_HEAD
};

cupylora_status cupylora_pack_open(const void* file, uint64_t bytes, cupylora_pack* pack,
                                   cupylora_error* error) {
  const unsigned char* data = (const unsigned char*)file;
  int64_t head[CUPYLORA_I_HEAD], i, room;
  uint64_t start = 0;
  CUPYLORA_I_NEED(file != NULL && pack != NULL, "file or pack is NULL");
  memset(pack, 0, sizeof *pack);
  if (bytes >= 8) memcpy(&start, data, 8);
  CUPYLORA_I_NEED(bytes >= 8 + sizeof head && start <= bytes - 8 - sizeof head,
                  "the file is cut short, or no pack");
  data += 8 + start;
  room = (int64_t)(bytes - 8 - start);
  memcpy(head, data, sizeof head);
  CUPYLORA_I_NEED(head[CUPYLORA_I_MAGIC] == INT64_C(0x4b434150414c5043), "the file is no pack");
  CUPYLORA_I_NEED(head[CUPYLORA_I_VERSION] == 1, "the pack is of version %d; 1 is read",
                  (int)head[CUPYLORA_I_VERSION]);
  CUPYLORA_I_NEED(head[CUPYLORA_I_END] == room, "the pack has %lld bytes of data; %lld are there",
                  (long long)head[CUPYLORA_I_END], (long long)room);
  for (i = CUPYLORA_I_ADAPTERS; i < CUPYLORA_I_END; ++i) {
    CUPYLORA_I_NEED(head[i] >= 0 && head[i] <= room, "number %d of the pack's head is damaged",
                    (int)i);
  }
  i = head[CUPYLORA_I_ADAPTERS];
  CUPYLORA_I_NEED(
      head[CUPYLORA_I_TABLE_ROWS] <= INT32_MAX && i <= INT32_MAX / CUPYLORA_NAME_BYTES &&
          i * CUPYLORA_NAME_BYTES <= room - head[CUPYLORA_I_NAMES_AT] &&
          (i == 0 || head[CUPYLORA_I_TABLE_ROWS] <=
                         (room - head[CUPYLORA_I_ENTRIES_AT]) / CUPYLORA_ENTRY_BYTES / i) &&
          head[CUPYLORA_I_BLOCKS_BYTES] <= room - head[CUPYLORA_I_BLOCKS_AT] &&
          head[CUPYLORA_I_DTYPE] <= 2,
      "the pack's head is damaged");
  pack->adapters = (int32_t)i, pack->rows = (int32_t)head[CUPYLORA_I_TABLE_ROWS];
  pack->entries = data + head[CUPYLORA_I_ENTRIES_AT];
  pack->names = data + head[CUPYLORA_I_NAMES_AT];
  pack->blocks = data + head[CUPYLORA_I_BLOCKS_AT];
  pack->blocks_bytes = (uint64_t)head[CUPYLORA_I_BLOCKS_BYTES];
  pack->dtype = (cupylora_dtype)head[CUPYLORA_I_DTYPE];
  pack->max_rank = (int32_t)head[CUPYLORA_I_MAX_RANK];
  return cupylora_i_ok(error);
}

int32_t cupylora_pack_find(const cupylora_pack* pack, const char* name) {
  int32_t i;
  if (pack == NULL || name == NULL) return -1;
  for (i = 0; i < pack->adapters; ++i) {
    const char* own = (const char*)pack->names + (size_t)i * CUPYLORA_NAME_BYTES;
    if (strncmp(own, name, CUPYLORA_NAME_BYTES) == 0 &&
        (own[CUPYLORA_NAME_BYTES - 1] == 0 || name[CUPYLORA_NAME_BYTES] == 0)) {
      return i;
    }
  }
  return -1;
}

cupylora_status cupylora_table_entry(const cupylora_pack* pack, int32_t adapter, int32_t row,
                                     uint64_t blocks_address, int32_t generation, void* record,
                                     cupylora_error* error) {
  unsigned char* out = (unsigned char*)record;
  uint64_t places[2];
  int32_t rank;
  CUPYLORA_I_NEED(pack != NULL && record != NULL, "pack or record is NULL");
  CUPYLORA_I_RANGE(adapter, 0, pack->adapters - 1);
  CUPYLORA_I_RANGE(row, 0, pack->rows - 1);
  CUPYLORA_I_ADDRESS(blocks_address, 256);
  memcpy(out, pack->entries + ((size_t)adapter * (size_t)pack->rows + (size_t)row) * 48, 48);
  memcpy(&rank, out + 32, 4);
  if (rank == 0) return cupylora_i_ok(error); /* the adapter does not touch this module */
  memcpy(places, out, sizeof places);
  CUPYLORA_I_NEED(places[0] < pack->blocks_bytes && places[1] < pack->blocks_bytes,
                  "an entry of the pack points behind its blocks");
  places[0] += blocks_address, places[1] += blocks_address;
  memcpy(out, places, sizeof places);
  memcpy(out + 44, &generation, 4);
  return cupylora_i_ok(error);
}

#ifdef __cplusplus
}
#endif
#endif /* CUPYLORA_IMPLEMENTATION */
