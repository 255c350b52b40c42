/* Calls every function of cupylora.h with what is missing or unplanned, and prints the statuses:
 * none may crash. In: an export's folder. Out: a line a call, "NAME STATUS TEXT". */
#define CUPYLORA_IMPLEMENTATION
#include "cupylora.h"

#define SHOW(name, call)                                 \
  do {                                                   \
    error.text[0] = 0;                                   \
    printf("%s %d %s\n", name, (int)(call), error.text); \
  } while (0)

static cupylora_error error;

static void set_context(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void* set = library == NULL ? NULL : dlsym(library, "cuCtxSetCurrent");
  int (*set_function)(void*);
  if (set == NULL) exit(2);
  memcpy(&set_function, &set, sizeof set);
  set_function(library);
}

int main(int count, char** words) {
  const cupylora_batch batch = {4, 2, 8, 0, 4, 0, 16, 0, 0};
  cupylora_delta delta;
  cupylora_activation activation;
  cupylora_finalize finalize;
  cupylora_op op, other;
  cupylora_lists lists;
  cupylora_pack pack;
  cupylora* c = NULL;
  uint64_t bytes = 0;
  unsigned char record[CUPYLORA_ENTRY_BYTES];
  if (count != 2) return 2;
  memset(&op, 0, sizeof op);
  memset(&other, 0, sizeof other);
  memset(&delta, 0, sizeof delta);
  memset(&activation, 0, sizeof activation);
  memset(&finalize, 0, sizeof finalize);
  SHOW("open-no-context", cupylora_open(words[1], &c, &error));
  set_context();
  SHOW("open-null", cupylora_open(NULL, &c, &error));
  SHOW("open-nowhere", cupylora_open(words[1], NULL, &error));
  SHOW("open-missing", cupylora_open("/nowhere", &c, &error));
  SHOW("open", cupylora_open(words[1], &c, &error));
  cupylora_close(c);
  SHOW("open-silent", cupylora_open("/nowhere", &c, NULL));
  SHOW("open", cupylora_open(words[1], &c, NULL));
  SHOW("bytes-null", cupylora_lists_bytes(NULL, &bytes, &error));
  SHOW("bytes-nowhere", cupylora_lists_bytes(&batch, NULL, &error));
  SHOW("at-null", cupylora_lists_at(&batch, 0, &lists, &error));
  SHOW("at-nowhere", cupylora_lists_at(&batch, 256, NULL, &error));
  SHOW("at", cupylora_lists_at(&batch, 256, &lists, &error));
  SHOW("plan-closed", cupylora_plan_lists(NULL, &batch, &op, &error));
  SHOW("plan-no-batch", cupylora_plan_lists(c, NULL, &op, &error));
  SHOW("plan-no-op", cupylora_plan_lists(c, &batch, NULL, &error));
  SHOW("plan-no-delta", cupylora_plan_delta(c, &batch, NULL, &op, &error));
  SHOW("plan-empty-delta", cupylora_plan_delta(c, &batch, &delta, &op, &error));
  SHOW("plan-no-activation", cupylora_plan_activation(c, &batch, NULL, &op, &error));
  SHOW("plan-empty-activation", cupylora_plan_activation(c, &batch, &activation, &op, &error));
  SHOW("plan-no-finalize", cupylora_plan_finalize(c, &batch, NULL, &op, &error));
  SHOW("plan-empty-finalize", cupylora_plan_finalize(c, &batch, &finalize, &op, &error));
  SHOW("unplanned-lists", cupylora_enqueue_lists(&other, NULL, 256, 256, &lists, 0, 0, 0, &error));
  SHOW("unplanned-delta",
       cupylora_enqueue_delta(&other, NULL, 256, 256, &lists, 256, 0, 0, 0, &error));
  delta.in_features = 64, delta.max_rank = 16, delta.y_width = 8, delta.y_rows = CUPYLORA_BY_PAIR;
  delta.num_slices = 1, delta.slices[0].out_features = 9, delta.slices[0].y_stride = 1;
  SHOW("plan-wide-delta", cupylora_plan_delta(c, &batch, &delta, &op, &error));
  SHOW("failed-plan", cupylora_enqueue_delta(&op, NULL, 256, 256, &lists, 256, 0, 0, 0, &error));
  SHOW("null-op", cupylora_enqueue_lists(NULL, NULL, 256, 256, &lists, 0, 0, 0, &error));
  SHOW("plan", cupylora_plan_lists(c, &batch, &op, &error));
  SHOW("other-op", cupylora_enqueue_delta(&op, NULL, 256, 256, &lists, 256, 0, 0, 0, &error));
  SHOW("no-lists", cupylora_enqueue_lists(&op, NULL, 256, 256, NULL, 0, 0, 0, &error));
  SHOW("no-ids", cupylora_enqueue_lists(&op, NULL, 0, 256, &lists, 0, 0, 0, &error));
  SHOW("odd-ids", cupylora_enqueue_lists(&op, NULL, 257, 256, &lists, 0, 0, 0, &error));
  SHOW("odd-status", cupylora_enqueue_lists(&op, NULL, 256, 256, &lists, 0, 0, 2, &error));
  SHOW("silent", cupylora_enqueue_lists(&op, NULL, 0, 256, &lists, 0, 0, 0, NULL));
  lists.tiles += 4;
  SHOW("odd-tiles", cupylora_enqueue_lists(&op, NULL, 256, 256, &lists, 0, 0, 0, &error));
  lists.tiles -= 4;
  lists.seg_count = 0;
  SHOW("null-list", cupylora_enqueue_lists(&op, NULL, 256, 256, &lists, 0, 0, 0, &error));
  SHOW("pack-null", cupylora_pack_open(NULL, 0, &pack, &error));
  SHOW("pack-nowhere", cupylora_pack_open(record, 8, NULL, &error));
  memset(&pack, 0, sizeof pack);
  SHOW("entry-none", cupylora_table_entry(&pack, 0, 0, 256, 0, record, &error));
  SHOW("entry-null", cupylora_table_entry(NULL, 0, 0, 256, 0, record, &error));
  printf("find %d\n", cupylora_pack_find(NULL, "x"));
  cupylora_close(c);
  cupylora_close(NULL);
  return 0;
}
