/* Plans and enqueues the calls that it reads, one a line, each from scratch: what
 * tests/test_host_choice.py compares with the ops' own launches, and tests/test_host_faults.py
 * refuses. In: "lists|delta|activation|finalize" and numbers, on stdin. Out: a line for each with
 * status, workspace bytes and text; launches go to the driver. */
#define CUPYLORA_IMPLEMENTATION
#include "cupylora.h"

static cupylora_error error;
static cupylora_op op;

static long long next(void) {
  long long value = 0;
  if (scanf("%lld", &value) != 1) exit(2);
  return value;
}

static cupylora_batch read_batch(void) {
  cupylora_batch b;
  b.tokens = (int32_t)next(), b.top_k = (int32_t)next(), b.experts = (int32_t)next();
  b.start_expert = (int32_t)next(), b.max_loras = (int32_t)next(), b.max_active = (int32_t)next();
  b.max_rank = (int32_t)next(), b.tile_rows = (int32_t)next(), b.k_major = (int32_t)next();
  return b;
}

static cupylora_lists read_lists(void) {
  uint64_t places[9];
  cupylora_lists lists;
  int i;
  for (i = 0; i < 9; ++i) places[i] = (uint64_t)next();
  memcpy(&lists, places, sizeof lists);
  return lists;
}

static cupylora_status lists(const cupylora* c) {
  const cupylora_batch b = read_batch();
  const cupylora_lists at = read_lists();
  const uint64_t ids = (uint64_t)next(), slots = (uint64_t)next(), work = (uint64_t)next();
  const uint64_t bytes = (uint64_t)next(), status = (uint64_t)next();
  cupylora_status got = cupylora_plan_lists(c, &b, &op, &error);
  if (got == CUPYLORA_OK) {
    got = cupylora_enqueue_lists(&op, NULL, ids, slots, &at, work, bytes, status, &error);
  }
  return got;
}

static cupylora_status delta(const cupylora* c) {
  const cupylora_batch b = read_batch();
  const cupylora_lists at = read_lists();
  cupylora_delta d;
  uint64_t p[6];
  cupylora_status got;
  int i;
  memset(&d, 0, sizeof d);
  d.dtype = (cupylora_dtype)next(), d.in_features = (int32_t)next(), d.max_rank = (int32_t)next();
  d.y_width = (int32_t)next(), d.x_rows = (cupylora_rows)next(), d.y_rows = (cupylora_rows)next();
  d.plan_settled = (int32_t)next(), d.kernel = (cupylora_choice)next();
  d.num_slices = (int32_t)next();
  for (i = 0; i < d.num_slices && i < 8; ++i) {
    d.slices[i].out_features = (int32_t)next(), d.slices[i].y_column = (int32_t)next();
    d.slices[i].y_stride = (int32_t)next();
  }
  for (i = 0; i < 6; ++i) p[i] = (uint64_t)next();
  got = cupylora_plan_delta(c, &b, &d, &op, &error);
  if (got == CUPYLORA_OK) {
    got = cupylora_enqueue_delta(&op, NULL, p[0], p[1], &at, p[2], p[3], p[4], p[5], &error);
  }
  return got;
}

static cupylora_status activation(const cupylora* c) {
  const cupylora_batch b = read_batch();
  const cupylora_lists at = read_lists();
  cupylora_activation a;
  uint64_t x, bias, out;
  cupylora_status got;
  a.dtype = (cupylora_dtype)next(), a.kind = (cupylora_kind)next(), a.gated = (int32_t)next();
  a.layout = (cupylora_layout)next(), a.hidden = (int32_t)next(), a.with_bias = (int32_t)next();
  a.rows = (cupylora_rows)next();
  a.alpha = 1.702f, a.limit = 7.0f;
  x = (uint64_t)next(), bias = (uint64_t)next(), out = (uint64_t)next();
  got = cupylora_plan_activation(c, &b, &a, &op, &error);
  if (got == CUPYLORA_OK) {
    got = cupylora_enqueue_activation(&op, NULL, x, bias, &at, out, &error);
  }
  return got;
}

static cupylora_status finalize(const cupylora* c) {
  const cupylora_batch b = read_batch();
  const cupylora_lists at = read_lists();
  cupylora_finalize f;
  uint64_t p[5];
  cupylora_status got;
  int i;
  f.dtype = (cupylora_dtype)next(), f.hidden = (int32_t)next(), f.with_bias = (int32_t)next();
  f.y_rows = (cupylora_rows)next();
  for (i = 0; i < 5; ++i) p[i] = (uint64_t)next();
  got = cupylora_plan_finalize(c, &b, &f, &op, &error);
  if (got == CUPYLORA_OK) {
    got = cupylora_enqueue_finalize(&op, NULL, p[0], p[1], &at, p[2], p[3], p[4], &error);
  }
  return got;
}

/* The driver's functions that find a context, which a host has anyway. */
static void make_context(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void *retain = dlsym(library, "cuDevicePrimaryCtxRetain"), *context = NULL;
  void* set = dlsym(library, "cuCtxSetCurrent");
  int (*retain_function)(void**, int);
  int (*set_function)(void*);
  memcpy(&retain_function, &retain, sizeof retain);
  memcpy(&set_function, &set, sizeof set);
  retain_function(&context, 0);
  set_function(context);
}

int main(int count, char** words) {
  cupylora* c = NULL;
  char name[16];
  if (count != 2) return 2;
  make_context();
  if (cupylora_open(words[1], &c, &error) != CUPYLORA_OK) {
    printf("%d 0 %s\n", error.status, error.text);
    return 1;
  }
  while (scanf("%15s", name) == 1) {
    cupylora_status got = CUPYLORA_BAD_ARGUMENT;
    if (strcmp(name, "lists") == 0) got = lists(c);
    if (strcmp(name, "delta") == 0) got = delta(c);
    if (strcmp(name, "activation") == 0) got = activation(c);
    if (strcmp(name, "finalize") == 0) got = finalize(c);
    printf("%d %llu %s\n", got, (unsigned long long)op.workspace_bytes, error.text);
  }
  cupylora_close(c);
  return 0;
}
