/* From the sizes of a call to its launches: the part of cupylora.h that chooses. It is included
 * there, in the implementation, and nowhere else.
 *
 * First the rules, pure arithmetic: the C side of cupylora/ops/_lora_choice.py, _lora_fused.py,
 * _lora_pair.py, _plan_choice.py and _row_items.py, over the numbers that cupylora_table.h has from
 * there. No choice changes a result. Then cupylora_plan_*, which apply them: arguments are set by
 * the name that kernels have for them, and the table knows where each kernel keeps which. */

/* --- LoRA deltas ----------------------------------------------------------------------------- */

/* Sizes of one call, and what they lead one to expect. */
typedef struct cupylora_i_work {
  int64_t rows, experts, active, in_features, max_rank, tile_rows, tile_capacity;
  int num_slices;
  int64_t widths[CUPYLORA_MAX_SLICES], widest, width;
  double tiles, bytes;
} cupylora_i_work;

static void cupylora_i_expect(cupylora_i_work* w) {
  const int64_t places = cupylora_i_max(1, w->experts * w->active);
  const double groups = (double)places * (1 - pow(1 - 1 / (double)places, (double)w->rows));
  const double tiles = groups + ((double)w->rows - groups) / (double)w->tile_rows;
  double factors;
  int i;
  w->width = w->widest = 0;
  for (i = 0; i < w->num_slices; ++i) {
    w->width += w->widths[i];
    w->widest = cupylora_i_max(w->widest, w->widths[i]);
  }
  factors = groups * (double)w->max_rank * (double)(w->in_features * w->num_slices + w->width);
  w->tiles = (double)w->tile_capacity < tiles ? (double)w->tile_capacity : tiles;
  if (w->tiles < 1) w->tiles = 1;
  w->bytes = 2 * (factors + (double)w->rows * (double)(w->in_features + 2 * w->width));
}

static int64_t cupylora_i_k_ranges(int64_t in_features) {
  const int64_t most = cupylora_i_max(1, in_features / CUPYLORA_RANGE_FEATURES);
  return cupylora_i_min(CUPYLORA_MOST_RANGES, INT64_C(1) << cupylora_i_log2(most));
}

/* 16-rank tiles that the fused kernels have instances for. */
static int cupylora_i_rank_tiles(int64_t max_rank) {
  return max_rank <= 16 ? 1 : max_rank <= 32 ? 2 : 4;
}

static int64_t cupylora_i_parts(const cupylora_i_work* w, int64_t columns) {
  int64_t parts = 0;
  int i;
  for (i = 0; i < w->num_slices; ++i) parts += cupylora_i_ceil(w->widths[i], columns);
  return parts;
}

/* Whether a fused kernel with these limits has an instance, and numbers the items in 32 bits. */
static int cupylora_i_takes(const cupylora_i_work* w, const int64_t (*limits)[2], int rows) {
  int i;
  if (w->tile_capacity * cupylora_i_parts(w, CUPYLORA_COLUMN_STEP) >= CUPYLORA_ITEM_LIMIT) return 0;
  for (i = 0; i < rows; ++i) {
    if (limits[i][0] == w->tile_rows && w->max_rank <= limits[i][1]) return 1;
  }
  return 0;
}

typedef struct cupylora_i_shape {
  int64_t cluster, cta_columns, clusters;
} cupylora_i_shape;

static int64_t cupylora_i_cut(int64_t width, int64_t parts) {
  return cupylora_i_ceil(width, parts * CUPYLORA_COLUMN_STEP) * CUPYLORA_COLUMN_STEP;
}

static int64_t cupylora_i_cluster_sums(const cupylora_i_work* w, int64_t cluster) {
  const int64_t blocks = cupylora_i_k_ranges(w->in_features) / cluster * 4 + 2 * cluster;
  return blocks * 8 * (cupylora_i_rank_tiles(w->max_rank) * 16 + 4) * 4;
}

/* blocks: of the kernel that the device holds at a time. */
static cupylora_i_shape cupylora_i_cluster_shape(const cupylora_i_work* w, int64_t blocks) {
  const int64_t most = cupylora_i_min(CUPYLORA_MAX_CLUSTER, cupylora_i_k_ranges(w->in_features));
  const int64_t step = CUPYLORA_COLUMN_STEP, column_bytes = w->max_rank * 2;
  const double items = w->tiles * w->num_slices;
  cupylora_i_shape shape;
  int64_t parts, room, count;
  for (shape.cluster = 1; shape.cluster < most; shape.cluster *= 2) {
    const double share = (double)w->in_features / (double)shape.cluster;
    const double held = share > CUPYLORA_LONG_SHARE ? (double)blocks : (double)blocks / 2;
    if (share <= CUPYLORA_SHORT_SHARE || items * 2 * (double)shape.cluster > held) break;
  }
  parts = cupylora_i_ceil(w->widest * column_bytes, shape.cluster * CUPYLORA_B_BYTES);
  count = (int64_t)((double)blocks / 2 / (items * (double)shape.cluster));
  parts = cupylora_i_max(1, cupylora_i_min(parts, count));
  room = cupylora_i_min(CUPYLORA_B_LIMIT,
                        CUPYLORA_SHARED_LIMIT - cupylora_i_cluster_sums(w, shape.cluster));
  room = cupylora_i_max(step, room / column_bytes / step * step);
  shape.cta_columns = cupylora_i_min(room, cupylora_i_cut(w->widest, shape.cluster * parts));
  count = w->tile_capacity * cupylora_i_parts(w, shape.cluster * shape.cta_columns);
  shape.clusters = cupylora_i_max(1, cupylora_i_min(count, 4 * blocks / shape.cluster));
  return shape;
}

/* clusters: how many of 1, 2, 4 and 8 blocks the device holds at a time. */
static cupylora_i_shape cupylora_i_ring_shape(const cupylora_i_work* w, const int64_t clusters[4]) {
  const double weights =
      (double)w->max_rank * ((double)w->in_features + (double)w->width / w->num_slices) * 2;
  const int64_t items = (int64_t)ceil(w->tiles * w->num_slices);
  cupylora_i_shape shape = {1, 0, 0};
  double least = -1;
  int64_t most;
  int i;
  for (i = 0; i < 4 && INT64_C(1) << i <= cupylora_i_k_ranges(w->in_features); ++i) {
    const double share = 1 / (double)(1 << i) + CUPYLORA_START_BYTES / weights;
    const double time = (double)cupylora_i_ceil(items, clusters[i]) * share;
    if (least >= 0 && time >= least) continue;
    least = time;
    shape.cluster = INT64_C(1) << i;
    shape.clusters = clusters[i];
  }
  shape.cta_columns = cupylora_i_cut(w->widest, shape.cluster);
  most = w->tile_capacity * cupylora_i_parts(w, shape.cluster * shape.cta_columns);
  shape.clusters = cupylora_i_max(1, cupylora_i_min(most, shape.clusters));
  return shape;
}

static int64_t cupylora_i_chain_floats(const cupylora_i_work* w) {
  return w->tile_rows * CUPYLORA_CHAINS * (w->max_rank <= CUPYLORA_RANK_TILE ? 18 : 36);
}

/* Stages of a ring's block and, in `shared`, its bytes of shared memory. */
static int64_t cupylora_i_ring_room(const cupylora_i_work* w, int64_t cluster, int64_t* shared) {
  const int tiles = cupylora_i_rank_tiles(w->max_rank);
  const int64_t rows = w->tile_rows, held = tiles * (rows / CUPYLORA_TOKENS);
  const int64_t weights = w->max_rank > 2 * CUPYLORA_RANK_TILE ? 16384 : 8192;
  const int64_t stage = weights + rows * (512 + 16) + 48 + rows * 8;
  const int64_t few = weights == 8192 && rows == CUPYLORA_TOKENS ? CUPYLORA_FEW_STAGES : 3;
  const int64_t lists = 3 * CUPYLORA_TILE_INTS * 4 + 2 * CUPYLORA_SLOT_ENTRY_BYTES + 8 * rows;
  const int64_t sums = 2 * cluster * rows * tiles * CUPYLORA_RANK_TILE;
  const int64_t rest = lists + (2 * cupylora_i_chain_floats(w) + sums) * 4;
  int64_t blocks = held == 1 ? 4 : held == 2 ? 3 : 2, room, stages;
  for (;; --blocks) {
    room = CUPYLORA_SHARED_PER_SM / blocks - CUPYLORA_SHARED_PER_BLOCK - CUPYLORA_STATIC_SHARED;
    room -= rest;
    if (blocks == 1 || room >= few * stage) break;
  }
  stages = cupylora_i_min(CUPYLORA_RING_STAGES, room / stage);
  *shared = stages * stage + rest;
  return stages;
}

/* Chunks that a warp of the cluster kernel has in flight: the number of the instance. */
static int cupylora_i_cluster_stages(const cupylora_i_work* w, const cupylora_i_shape* shape) {
  const int64_t ranges = cupylora_i_k_ranges(w->in_features);
  const int64_t chunks = cupylora_i_ceil(w->in_features, CUPYLORA_CHUNK);
  const int64_t cells = ranges / shape->cluster * CUPYLORA_CHAINS;
  int64_t steps = cupylora_i_ceil(cells, CUPYLORA_CLUSTER_WARPS);
  steps *= cupylora_i_ceil(cupylora_i_ceil(chunks, ranges), CUPYLORA_CHAINS);
  if (steps == 1 || w->max_rank > CUPYLORA_RANK_TILE) return 1;
  if (steps < CUPYLORA_DEEP_STEPS) return 2;
  return shape->clusters * shape->cluster <= CUPYLORA_DEEP_CTAS ? 4 : 2;
}

/* The kernel for a call, where `asked` is one or CUPYLORA_AUTO; 0: that one cannot serve it. */
static int cupylora_i_choose(const cupylora_i_work* w, int asked, int hopper, int float32) {
  const int fused = hopper && !float32;
  const int cluster =
      fused && cupylora_i_takes(w, cupylora_cluster_limits, CUPYLORA_CLUSTER_LIMITS_ROWS);
  const int ring = fused && cupylora_i_takes(w, cupylora_ring_limits, CUPYLORA_RING_LIMITS_ROWS);
  if (asked == CUPYLORA_CLUSTER) return cluster ? asked : 0;
  if (asked == CUPYLORA_RING) return ring ? asked : 0;
  if (asked == CUPYLORA_PAIR) return asked;
  if (cluster && w->bytes <= CUPYLORA_CLUSTER_BYTES) return CUPYLORA_CLUSTER;
  return ring ? CUPYLORA_RING : CUPYLORA_PAIR;
}

/* h of the pair: float32 [splits, rows, slices, pitch]. */
typedef struct cupylora_i_hidden {
  int64_t pitch, splits, stride, bytes, groups;
  int group_tiles;
} cupylora_i_hidden;

/* Groups of so many rank tiles, of all slices. */
static int64_t cupylora_i_groups(const cupylora_i_work* w, int64_t tiles) {
  return cupylora_i_ceil(w->num_slices * cupylora_i_ceil(w->max_rank, CUPYLORA_RANK_TILE), tiles);
}

/* Whether the wide shrink serves, where there is shared memory for it. */
static int cupylora_i_is_wide(const cupylora_i_work* w) {
  return w->max_rank >= CUPYLORA_WIDE_RANK && w->rows >= CUPYLORA_WIDE_ROWS &&
         cupylora_i_ceil(w->in_features, CUPYLORA_PAIR_CHUNK) <= CUPYLORA_MOST_CHUNKS;
}

/* Rows of a part of a tile in the stream shrink. */
static int64_t cupylora_i_stream_part(int tiles, int64_t tile_rows) {
  const int64_t most = CUPYLORA_PART_TOKENS / cupylora_i_max(2, tiles);
  return cupylora_i_max(CUPYLORA_LEAST_PART, cupylora_i_min(tile_rows, most));
}

static cupylora_i_hidden cupylora_i_hidden_of(const cupylora_i_work* w, int float32) {
  const int64_t ranks = cupylora_i_ceil(w->max_rank, CUPYLORA_RANK_TILE);
  const int64_t together = w->num_slices * ranks, ranges = cupylora_i_k_ranges(w->in_features);
  cupylora_i_hidden h;
  int64_t tiles, most;
  h.group_tiles = together == 1 ? 1 : together == 2 ? 2 : 4;
  h.groups = cupylora_i_groups(w, h.group_tiles);
  tiles = cupylora_i_min(w->rows, w->experts);
  if (w->rows >= CUPYLORA_STREAM_ROWS) {
    const int64_t part = cupylora_i_stream_part(h.group_tiles, CUPYLORA_PART_TOKENS);
    tiles = cupylora_i_ceil(w->rows, part) + tiles / 2; /* an expert's last tile is a partial one */
    most = cupylora_i_min(CUPYLORA_STREAM_SPLITS, ranges / CUPYLORA_STREAM_RANGES);
    most = cupylora_i_min(most, CUPYLORA_STREAM_ITEMS / (tiles * h.groups));
  } else {
    tiles = cupylora_i_max(cupylora_i_max(1, cupylora_i_ceil(w->rows, 8)), tiles);
    most = cupylora_i_min(ranges, CUPYLORA_SHRINK_ITEMS / (tiles * h.groups));
  }
  h.splits = float32 ? 1 : INT64_C(1) << cupylora_i_log2(cupylora_i_max(1, most));
  h.pitch = float32 ? w->max_rank : ranks * CUPYLORA_RANK_TILE;
  h.stride = w->rows * w->num_slices * h.pitch;
  h.bytes = cupylora_i_max(1, h.splits * h.stride) * 4;
  return h;
}

/* Columns that a warp of the small expand takes for one reading of h. */
static int64_t cupylora_i_block_columns(const cupylora_i_work* w) {
  const int64_t groups = w->rows * cupylora_i_parts(w, CUPYLORA_EXPAND_COLUMNS);
  const int64_t wanted = cupylora_i_min(CUPYLORA_MOST_GROUPS, groups / CUPYLORA_TARGET_GROUPS);
  return CUPYLORA_EXPAND_COLUMNS * cupylora_i_max(1, wanted);
}

/* Slots of a ring that leave room for two blocks on an SM, or for one. */
static int64_t cupylora_i_ring_slots(int64_t slot, int64_t most, int64_t per_block,
                                     int64_t per_sm) {
  int64_t fits = 1;
  int blocks;
  for (blocks = 2; blocks >= 1; --blocks) {
    const int64_t room = cupylora_i_min(per_block - CUPYLORA_RESERVED_BYTES,
                                        per_sm / blocks - 2 * CUPYLORA_RESERVED_BYTES);
    fits = cupylora_i_max(1, cupylora_i_min(most, room / slot));
    if (fits >= CUPYLORA_FEWEST_SLOTS) break;
  }
  return fits;
}

/* --- Rows ------------------------------------------------------------------------------------ */

typedef struct cupylora_i_items {
  int64_t blocks, count, per_warp, grid, threads;
} cupylora_i_items;

static cupylora_i_items cupylora_i_row_items(int64_t rows, int64_t width, int itemsize,
                                             int64_t ahead) {
  cupylora_i_items items;
  int64_t warps;
  items.blocks = cupylora_i_ceil(width * itemsize, 32 * CUPYLORA_PIECE_BYTES);
  items.count = rows * items.blocks;
  items.per_warp = cupylora_i_max(1, cupylora_i_min(ahead, items.count / CUPYLORA_RESIDENT_WARPS));
  warps = cupylora_i_ceil(items.count, items.per_warp);
  items.threads = warps <= CUPYLORA_FEW_WARPS ? CUPYLORA_SMALL_THREADS : CUPYLORA_LARGE_THREADS;
  items.grid = cupylora_i_ceil(warps * 32, items.threads);
  return items;
}

/* --- Launches -------------------------------------------------------------------------------- */

/* What enqueue adds to arguments; the first nine are cupylora_lists. 0: nothing. */
enum {
  CUPYLORA_I_LISTS = 1,
  CUPYLORA_I_A = 10, /* x, or topk_ids */
  CUPYLORA_I_B,      /* y, token_to_slot, or weights */
  CUPYLORA_I_OUT,
  CUPYLORA_I_BIAS,
  CUPYLORA_I_RESIDUAL,
  CUPYLORA_I_ENTRIES,
  CUPYLORA_I_WORKSPACE,
  CUPYLORA_I_STATUS,
  CUPYLORA_I_X_FLAG,
  CUPYLORA_I_Y_FLAG,
  CUPYLORA_I_GIVEN
};
enum { CUPYLORA_I_FOR_LISTS = 1, CUPYLORA_I_FOR_DELTA, CUPYLORA_I_FOR_ROWS, CUPYLORA_I_FOR_SUM };

static const char* const cupylora_i_dtypes[] = {"bfloat16", "float16", "float32"};

/* Values of the arguments of coming launches, by the name that kernels have for them. */
typedef struct cupylora_i_build {
  const cupylora* c;
  const cupylora_batch* b;
  cupylora_op* op;
  cupylora_error* error;
  int64_t value[CUPYLORA_KEYS];
  uint8_t given[CUPYLORA_KEYS]; /* what enqueue adds to the value */
  int32_t slices[34];           /* SliceColumns of lora/slot_entry.cuh */
  int kernel;                   /* that cupylora_i_find found */
  int kind;                     /* of the op, once it is planned */
} cupylora_i_build;

#define CUPYLORA_I_SET(w, key, number) \
  ((w)->value[CUPYLORA_K_##key] = (int64_t)(number), (w)->given[CUPYLORA_K_##key] = 0)
#define CUPYLORA_I_GIVE(w, key, what, offset) \
  ((w)->value[CUPYLORA_K_##key] = (int64_t)(offset), (w)->given[CUPYLORA_K_##key] = (uint8_t)(what))

static cupylora_status cupylora_i_begin(cupylora_i_build* w, const cupylora* c,
                                        const cupylora_batch* batch, const void* sizes,
                                        cupylora_op* op, int kind, int dtype,
                                        cupylora_error* error) {
  static const uint8_t lists[] = {
      CUPYLORA_K_row_to_pair, CUPYLORA_K_pair_to_row, CUPYLORA_K_offsets,
      CUPYLORA_K_seg_start,   CUPYLORA_K_seg_expert,  CUPYLORA_K_seg_slot,
      CUPYLORA_K_seg_count,   CUPYLORA_K_tile_count,  CUPYLORA_K_tiles};
  int i;
  CUPYLORA_I_NEED(op != NULL, "op is NULL");
  memset(op, 0, sizeof *op);
  CUPYLORA_I_NEED(c != NULL && sizes != NULL, "a pointer to what is opened, or to sizes, is NULL");
  CUPYLORA_I_TRY(cupylora_i_check_batch(batch, error));
  CUPYLORA_I_RANGE(dtype, 0, 2);
  memset(w, 0, sizeof *w);
  w->c = c, w->b = batch, w->op = op, w->error = error, w->kind = kind;
  op->owner = c, op->itemsize = dtype == CUPYLORA_FLOAT32 ? 4 : 2;
  for (i = 0; i < 9; ++i) w->given[lists[i]] = (uint8_t)(CUPYLORA_I_LISTS + i);
  CUPYLORA_I_GIVE(w, global_offsets, CUPYLORA_I_LISTS + 2, 0);
  CUPYLORA_I_GIVE(w, status, CUPYLORA_I_STATUS, 0);
  CUPYLORA_I_GIVE(w, entries, CUPYLORA_I_ENTRIES, 0);
  CUPYLORA_I_GIVE(w, x, CUPYLORA_I_A, 0);
  CUPYLORA_I_GIVE(w, y, CUPYLORA_I_B, 0);
  CUPYLORA_I_GIVE(w, out, CUPYLORA_I_OUT, 0);
  CUPYLORA_I_GIVE(w, bias, CUPYLORA_I_BIAS, 0);
  CUPYLORA_I_GIVE(w, residual, CUPYLORA_I_RESIDUAL, 0);
  CUPYLORA_I_SET(w, num_tokens, cupylora_i_max(1, batch->tokens));
  CUPYLORA_I_SET(w, top_k, batch->top_k);
  CUPYLORA_I_SET(w, k_major, batch->k_major);
  CUPYLORA_I_SET(w, num_experts, batch->experts);
  CUPYLORA_I_SET(w, start_expert, batch->start_expert);
  CUPYLORA_I_SET(w, max_loras, batch->max_loras);
  return cupylora_i_ok(error);
}

/* Only an op whose planning came to its end can be enqueued. */
static cupylora_status cupylora_i_done(cupylora_i_build* w) {
  w->op->kind = w->kind;
  return cupylora_i_ok(w->error);
}

static cupylora_status cupylora_i_find(cupylora_i_build* w, const char* program, int dtype,
                                       const char* format, ...) {
  char full[64], name[64];
  va_list values;
  va_start(values, format);
  vsnprintf(name, sizeof name, format, values);
  va_end(values);
  snprintf(full, sizeof full, dtype < 0 ? "%s" : "%s_%s", program,
           dtype < 0 ? "" : cupylora_i_dtypes[dtype]);
  for (w->kernel = 0; w->kernel < CUPYLORA_KERNELS; ++w->kernel) {
    const cupylora_kernel* kernel = &cupylora_kernels[w->kernel];
    if (w->c->functions[w->kernel] != NULL && strcmp(kernel->program, full) == 0 &&
        strcmp(kernel->name, name) == 0) {
      return CUPYLORA_OK;
    }
  }
  return cupylora_i_fail(w->error, CUPYLORA_BAD_EXPORT, 0, "no kernel %s/%s for %s is exported",
                         full, name, w->c->arch);
}

/* Blocks of the kernel that the whole device holds at a time. */
static cupylora_status cupylora_i_resident(cupylora_i_build* w, int threads, int64_t shared,
                                           int64_t* blocks) {
  int found = 0;
  const int status =
      w->c->driver.blocks(&found, w->c->functions[w->kernel], threads, (size_t)shared);
  if (status != 0) return cupylora_i_refused(w->c, status, "an occupancy query", w->error);
  *blocks = w->c->processors * cupylora_i_max(1, found);
  return CUPYLORA_OK;
}

static void cupylora_i_attribute(cupylora_launch* launch, int id, int64_t x, uint32_t rest) {
  cupylora_attribute* attribute = &launch->attribute[launch->attributes++];
  attribute->id = id;
  attribute->value[0] = (uint32_t)x;
  attribute->value[1] = attribute->value[2] = rest;
}

/* Adds a launch of the kernel that was found, with the arguments as they are set. */
static void cupylora_i_add(cupylora_i_build* w, int64_t grid, int64_t block, int64_t shared,
                           int64_t cluster, int dependent) {
  const cupylora_function* function = &cupylora_functions[cupylora_kernels[w->kernel].function];
  cupylora_launch* launch = &w->op->launch[w->op->launches++];
  int i;
  launch->function = w->c->functions[w->kernel];
  launch->at = function->at;
  launch->params = function->params;
  launch->grid = (uint32_t)grid, launch->block = (uint32_t)block, launch->shared = (uint32_t)shared;
  if (cluster > 0) cupylora_i_attribute(launch, 4, cluster, 1);
  if (dependent && w->c->capability >= 90) cupylora_i_attribute(launch, 6, 1, 0);
  for (i = 0; i < function->fields; ++i) {
    const cupylora_field* field = &function->field[i];
    unsigned char* at = (unsigned char*)launch->args + field->at;
    if (field->key == CUPYLORA_K_slices) {
      memcpy(at, w->slices, field->bytes);
      continue;
    }
    memcpy(at, &w->value[field->key], field->bytes); /* little-endian, as every CUDA host is */
    if (w->given[field->key] != 0) {
      cupylora_patch* patch = &launch->patch[launch->patches++];
      patch->at = field->at, patch->given = w->given[field->key], patch->bytes = field->bytes;
    }
  }
}

/* --- Planning -------------------------------------------------------------------------------- */

/* Two stable counting sorts, by slot and then by expert; of few rows one kernel that ranks them. */
static cupylora_status cupylora_i_plan_sort(cupylora_i_build* w, int64_t rows) {
  const int64_t blocks = cupylora_i_max(1, cupylora_i_ceil(rows, CUPYLORA_SORT_THREADS));
  const int64_t digits = cupylora_i_max(w->b->max_loras, w->b->experts) + 1;
  const int64_t by_slot = 4 * digits * blocks, totals = by_slot + 4 * rows;
  int pass;
  if (rows <= CUPYLORA_RANK_LIMIT) {
    CUPYLORA_I_TRY(cupylora_i_find(w, "sort", -1, "route_rank"));
    cupylora_i_add(w, cupylora_i_max(1, cupylora_i_ceil(rows, CUPYLORA_PAIRS_PER_BLOCK)),
                   CUPYLORA_ROUTE_RANK_THREADS, cupylora_i_ceil(rows, 32) * 128, 0, 0);
    return CUPYLORA_OK;
  }
  w->op->workspace_bytes = (uint64_t)(totals + 4 * digits);
  CUPYLORA_I_GIVE(w, histogram, CUPYLORA_I_WORKSPACE, 0);
  CUPYLORA_I_GIVE(w, totals, CUPYLORA_I_WORKSPACE, totals);
  CUPYLORA_I_SET(w, blocks, blocks);
  for (pass = 0; pass < 2; ++pass) {
    const int64_t own = (pass == 0 ? w->b->max_loras : w->b->experts) + 1;
    CUPYLORA_I_SET(w, by_expert, pass);
    CUPYLORA_I_SET(w, digits, own);
    CUPYLORA_I_GIVE(w, order, pass == 0 ? 0 : CUPYLORA_I_WORKSPACE, pass == 0 ? 0 : by_slot);
    CUPYLORA_I_GIVE(w, sorted, pass == 0 ? CUPYLORA_I_WORKSPACE : CUPYLORA_I_LISTS,
                    pass == 0 ? by_slot : 0);
    CUPYLORA_I_GIVE(w, pair_to_row, pass == 0 ? 0 : CUPYLORA_I_LISTS + 1, 0);
    CUPYLORA_I_GIVE(w, offsets, pass == 0 ? 0 : CUPYLORA_I_LISTS + 2, 0);
    CUPYLORA_I_TRY(cupylora_i_find(w, "sort", -1, "digit_histogram"));
    cupylora_i_add(w, blocks, CUPYLORA_SORT_THREADS, own * 4, 0, 0);
    CUPYLORA_I_TRY(cupylora_i_find(w, "sort", -1, "digit_scan"));
    cupylora_i_add(w, cupylora_i_ceil(own, 8), 256, 0, 0, 0);
    CUPYLORA_I_TRY(cupylora_i_find(w, "sort", -1, "digit_scatter"));
    cupylora_i_add(w, blocks, CUPYLORA_SORT_THREADS, own * 4, 0, 0);
  }
  return CUPYLORA_OK;
}

static cupylora_status cupylora_i_plan_segments(cupylora_i_build* w, int64_t rows) {
  const int64_t blocks = cupylora_i_max(1, cupylora_i_ceil(rows, CUPYLORA_SEGMENT_THREADS));
  const uint64_t bytes = blocks > 1 ? (uint64_t)(blocks * CUPYLORA_SUMMARY_BYTES) : 0;
  CUPYLORA_I_SET(w, num_tokens, cupylora_i_max(1, w->b->tokens));
  CUPYLORA_I_SET(w, tile_rows, cupylora_tile_rows(w->b));
  CUPYLORA_I_SET(w, max_segments, cupylora_i_segments(w->b));
  CUPYLORA_I_SET(w, max_tiles, cupylora_i_tiles(w->b));
  CUPYLORA_I_GIVE(w, summaries, blocks > 1 ? CUPYLORA_I_WORKSPACE : 0, 0);
  if (blocks > 1) {
    CUPYLORA_I_TRY(cupylora_i_find(w, "segments", -1, "segment_counts"));
    cupylora_i_add(w, blocks, CUPYLORA_SEGMENT_THREADS, 0, 0, 0);
  }
  CUPYLORA_I_TRY(cupylora_i_find(w, "segments", -1, "segment_fill"));
  cupylora_i_add(w, blocks, CUPYLORA_SEGMENT_THREADS, 0, 0, 0);
  if (w->op->workspace_bytes < bytes) w->op->workspace_bytes = bytes;
  return cupylora_i_done(w);
}

cupylora_status cupylora_plan_lists(const cupylora* opened, const cupylora_batch* batch,
                                    cupylora_op* op, cupylora_error* error) {
  cupylora_i_build build, *w = &build;
  cupylora_i_plan plan, few;
  int64_t rows, divisor, digits;
  CUPYLORA_I_TRY(cupylora_i_begin(w, opened, batch, batch, op, CUPYLORA_I_FOR_LISTS, 0, error));
  rows = cupylora_i_rows(batch), digits = batch->max_loras + 1;
  divisor = batch->k_major && batch->top_k > 1 ? batch->tokens : batch->top_k;
  plan = cupylora_i_choose_plan(rows, divisor, batch->experts * digits, opened->shared_block);
  if (0 < batch->max_active && batch->max_active < batch->max_loras &&
      batch->max_loras <= CUPYLORA_NUMBERED_SLOTS && batch->max_active <= CUPYLORA_NUMBERS) {
    const int64_t keys = batch->experts * (batch->max_active + INT64_C(1));
    few = cupylora_i_choose_plan(rows, divisor, keys, opened->shared_block);
    few.cost += few.way == CUPYLORA_I_LARGE ? batch->tokens / CUPYLORA_NUMBER_TOKENS : 0;
    if (few.cost + CUPYLORA_NUMBER_COST < plan.cost) plan = few, digits = batch->max_active + 1;
  }
  CUPYLORA_I_GIVE(w, topk_ids, CUPYLORA_I_A, 0);
  CUPYLORA_I_GIVE(w, token_to_slot, CUPYLORA_I_B, 0);
  CUPYLORA_I_SET(w, num_tokens, batch->tokens);
  if (plan.way == CUPYLORA_I_SORTED) {
    CUPYLORA_I_TRY(cupylora_i_plan_sort(w, rows));
    return cupylora_i_plan_segments(w, rows);
  }
  divisor = cupylora_i_max(1, divisor);
  CUPYLORA_I_SET(w, pairs, rows);
  CUPYLORA_I_SET(w, k_major, batch->k_major && batch->top_k > 1);
  CUPYLORA_I_SET(w, divisor, divisor);
  CUPYLORA_I_SET(w, divisor_magic, cupylora_i_magic(divisor));
  CUPYLORA_I_SET(w, digits, digits);
  CUPYLORA_I_SET(w, digits_magic, cupylora_i_magic(digits));
  CUPYLORA_I_SET(w, tile_shift, cupylora_i_log2(cupylora_tile_rows(batch)));
  CUPYLORA_I_SET(w, grid_shift, cupylora_i_log2(plan.grid));
  if (plan.way == CUPYLORA_I_RANKED) {
    CUPYLORA_I_TRY(cupylora_i_find(w, "plan", -1, "rank_%d", plan.a));
  } else {
    const int table = plan.way == CUPYLORA_I_TABLE;
    CUPYLORA_I_TRY(cupylora_i_find(w, table ? "plan" : "plan_large", -1,
                                   table ? "table_%d_%d" : "count_%d_%d", plan.a, plan.b));
  }
  CUPYLORA_I_GIVE(w, ranked, CUPYLORA_I_WORKSPACE, 0);
  CUPYLORA_I_GIVE(w, counts, CUPYLORA_I_WORKSPACE, plan.counts_at);
  cupylora_i_add(w, plan.grid, plan.threads, plan.shared, 0, 1);
  if (plan.way == CUPYLORA_I_LARGE) {
    op->workspace_bytes = (uint64_t)plan.workspace;
    CUPYLORA_I_SET(w, blocks, plan.grid);
    CUPYLORA_I_SET(w, block_pairs, plan.block_pairs);
    CUPYLORA_I_TRY(cupylora_i_find(w, "plan_large", -1, "place"));
    cupylora_i_add(w, plan.place_grid, plan.threads, plan.place_shared, 0, 1);
  }
  return cupylora_i_done(w);
}

/* Column blocks of all slices; sets the slices as the kernels take them. */
static int64_t cupylora_i_slices(cupylora_i_build* w, const cupylora_delta* d, int64_t columns) {
  int i;
  for (i = 0; i < d->num_slices; ++i) {
    w->slices[i] = d->slices[i].out_features;
    w->slices[8 + i] = d->slices[i].y_column;
    w->slices[16 + i] = d->slices[i].y_stride;
    w->slices[25 + i] =
        w->slices[24 + i] + (int32_t)cupylora_i_ceil(d->slices[i].out_features, columns);
  }
  return w->slices[24 + d->num_slices];
}

static cupylora_status cupylora_i_check_delta(const cupylora_batch* batch,
                                              const cupylora_delta* delta, int itemsize,
                                              cupylora_error* error) {
  int i, j;
  CUPYLORA_I_RANGE(delta->in_features, 1, INT32_MAX);
  CUPYLORA_I_RANGE(delta->max_rank, 1, CUPYLORA_MAX_RANK);
  CUPYLORA_I_NEED((int64_t)delta->max_rank * delta->in_features * itemsize <= CUPYLORA_BLOCK_LIMIT,
                  "max_rank %d times in_features %d is more than the kernels address",
                  delta->max_rank, delta->in_features);
  CUPYLORA_I_RANGE(delta->x_rows, 0, 2);
  CUPYLORA_I_RANGE(delta->y_rows, 1, 2);
  CUPYLORA_I_RANGE(delta->kernel, 0, 3);
  CUPYLORA_I_RANGE(delta->plan_settled, 0, 1);
  CUPYLORA_I_RANGE(delta->num_slices, 1, CUPYLORA_MAX_SLICES);
  CUPYLORA_I_NEED(batch->max_rank >= 1, "batch->max_rank is %d", batch->max_rank);
  for (i = 0; i < delta->num_slices; ++i) {
    const cupylora_slice s = delta->slices[i];
    const int64_t last = s.y_column + (s.out_features - INT64_C(1)) * s.y_stride;
    CUPYLORA_I_RANGE(delta->slices[i].out_features, 1, INT32_MAX);
    CUPYLORA_I_RANGE(delta->slices[i].y_column, 0, INT32_MAX);
    CUPYLORA_I_RANGE(delta->slices[i].y_stride, 1, INT32_MAX);
    CUPYLORA_I_NEED(last < delta->y_width, "slice %d ends behind the %d columns of y", i,
                    delta->y_width);
    for (j = 0; j < i; ++j) {
      const cupylora_slice t = delta->slices[j];
      const int64_t end = t.y_column + (t.out_features - INT64_C(1)) * t.y_stride;
      const int apart = last < t.y_column || end < s.y_column ||
                        (s.y_stride == t.y_stride && (s.y_column - t.y_column) % t.y_stride != 0);
      CUPYLORA_I_NEED(apart, "slices %d and %d of y share columns", j, i);
    }
  }
  return CUPYLORA_OK;
}

/* What sizes alone say of y's alignment: 16-byte pieces of every slice, and pairs. */
static void cupylora_i_align(cupylora_op* op, const cupylora_delta* d) {
  int i;
  op->x_vector = d->in_features * (int64_t)op->itemsize % 16 == 0;
  op->y_vector = d->y_width * (int64_t)op->itemsize % 16 == 0;
  op->y_pieces = 1, op->y_pairs = d->y_width % 2 == 0;
  for (i = 0; i < d->num_slices; ++i) {
    const cupylora_slice s = d->slices[i];
    op->y_vector &= s.y_stride == 1 && s.y_column * (int64_t)op->itemsize % 16 == 0;
    op->y_pieces &= s.out_features % 8 == 0;
    op->y_pairs &= s.y_stride == 1 && s.y_column % 2 == 0;
  }
}

static cupylora_status cupylora_i_ring_clusters(cupylora_i_build* w, const cupylora_i_work* work,
                                                int64_t clusters[4]) {
  int i;
  for (i = 0; i < 4 && INT64_C(1) << i <= cupylora_i_k_ranges(work->in_features); ++i) {
    cupylora_attribute cluster = {4, 0, {1u << i, 1, 1}};
    cupylora_i_config config;
    int64_t shared;
    int found = 0, status;
    memset(&config, 0, sizeof config);
    (void)cupylora_i_ring_room(work, INT64_C(1) << i, &shared);
    config.grid[0] = 1u << i, config.block[0] = CUPYLORA_RING_THREADS;
    config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
    config.shared = (uint32_t)shared, config.attributes = &cluster, config.num_attributes = 1;
    status = w->c->driver.clusters(&found, w->c->functions[w->kernel], &config);
    if (status != 0) return cupylora_i_refused(w->c, status, "a query of clusters", w->error);
    clusters[i] = cupylora_i_max(1, found);
  }
  return CUPYLORA_OK;
}

/* One node: the cluster kernel for little work, the ring for many weights. */
static cupylora_status cupylora_i_plan_fused(cupylora_i_build* w, const cupylora_delta* d,
                                             const cupylora_i_work* work, int ring) {
  const int tiles = cupylora_i_rank_tiles(work->max_rank);
  int64_t shared, blocks, clusters[4], stages = 0, threads = CUPYLORA_CLUSTER_THREADS;
  cupylora_i_shape shape;
  if (ring) {
    threads = CUPYLORA_RING_THREADS;
    CUPYLORA_I_TRY(cupylora_i_find(w, "lora_ring", d->dtype, "%d_%d", tiles, (int)work->tile_rows));
    CUPYLORA_I_TRY(cupylora_i_ring_clusters(w, work, clusters));
    shape = cupylora_i_ring_shape(work, clusters);
    stages = cupylora_i_ring_room(work, shape.cluster, &shared);
  } else {
    CUPYLORA_I_TRY(cupylora_i_find(w, "lora_cluster", d->dtype, "%d_1", tiles));
    CUPYLORA_I_TRY(cupylora_i_resident(w, CUPYLORA_CLUSTER_THREADS, 0, &blocks));
    shape = cupylora_i_cluster_shape(work, blocks);
    shared = cupylora_i_cluster_sums(work, shape.cluster) + shape.cta_columns * work->max_rank * 2;
    CUPYLORA_I_TRY(cupylora_i_find(w, "lora_cluster", d->dtype, "%d_%d", tiles,
                                   cupylora_i_cluster_stages(work, &shape)));
  }
  (void)cupylora_i_slices(w, d, shape.cluster * shape.cta_columns);
  CUPYLORA_I_SET(w, clusters, shape.clusters);
  CUPYLORA_I_SET(w, cta_columns, shape.cta_columns);
  CUPYLORA_I_SET(w, stages, stages);
  CUPYLORA_I_SET(w, chain_floats, cupylora_i_chain_floats(work));
  CUPYLORA_I_SET(w, sum_ranks, tiles * CUPYLORA_RANK_TILE);
  cupylora_i_add(w, shape.clusters * shape.cluster, threads, shared, shape.cluster, 1);
  return cupylora_i_done(w);
}

static cupylora_status cupylora_i_plan_float32(cupylora_i_build* w, const cupylora_delta* d,
                                               const cupylora_i_work* work) {
  const int64_t parts = cupylora_i_ceil(work->tile_rows, CUPYLORA_F32_ROWS);
  const int64_t columns = cupylora_i_slices(w, d, CUPYLORA_F32_COLUMNS);
  int64_t blocks;
  CUPYLORA_I_TRY(cupylora_i_find(w, "lora_f32", -1, "shrink"));
  CUPYLORA_I_TRY(cupylora_i_resident(w, CUPYLORA_PAIR_THREADS, 0, &blocks));
  cupylora_i_add(w, cupylora_i_min(work->tile_capacity * d->num_slices, blocks),
                 CUPYLORA_PAIR_THREADS, 0, 0, 0);
  CUPYLORA_I_SET(w, parts, parts);
  CUPYLORA_I_TRY(cupylora_i_find(w, "lora_f32", -1, "expand"));
  CUPYLORA_I_TRY(cupylora_i_resident(w, CUPYLORA_PAIR_THREADS, 0, &blocks));
  cupylora_i_add(w, cupylora_i_min(work->tile_capacity * columns * parts, blocks),
                 CUPYLORA_PAIR_THREADS, 0, 0, 0);
  return cupylora_i_done(w);
}

static cupylora_status cupylora_i_plan_half(cupylora_i_build* w, int64_t items, int64_t threads,
                                            int64_t shared) {
  int64_t blocks = 0;
  CUPYLORA_I_TRY(cupylora_i_resident(w, (int)threads, shared, &blocks));
  cupylora_i_add(w, cupylora_i_min(items, blocks), threads, shared, 0, 1);
  return CUPYLORA_OK;
}

/* A shrink's instance and what its launch follows from: rank tiles of a group, rows of a part of a
 * tile, both counted, shared memory for a warp's sums, slots of the ring, shared memory in all. */
typedef struct cupylora_i_shrink {
  int64_t tiles, part, groups, parts, sum_bytes, slots, shared;
} cupylora_i_shrink;

static cupylora_i_shrink cupylora_i_shrink_of(const cupylora_i_work* work, int64_t tiles,
                                              int64_t part) {
  cupylora_i_shrink s = {0, 0, 0, 0, 0, 0, 0};
  s.tiles = tiles, s.groups = cupylora_i_groups(work, tiles);
  s.part = part, s.parts = cupylora_i_ceil(work->tile_rows, part);
  return s;
}

/* The levels of a warp's K tree, in whose place its sums go to the other warps, and its slots. */
static cupylora_i_shrink cupylora_i_stream_shrink(const cupylora_i_work* work,
                                                  const cupylora_i_hidden* h) {
  const int64_t part = cupylora_i_stream_part(h->group_tiles, work->tile_rows);
  const int64_t ranks = h->group_tiles * CUPYLORA_RANK_TILE;
  const int64_t ranges = cupylora_i_k_ranges(work->in_features) / h->splits;
  const int64_t levels = cupylora_i_log2(cupylora_i_max(1, ranges / CUPYLORA_SHRINK_WARPS));
  const int64_t slots = CUPYLORA_SHRINK_SLOTS * (part + ranks) * CUPYLORA_CHUNK_BYTES;
  cupylora_i_shrink s = cupylora_i_shrink_of(work, h->group_tiles, part);
  s.sum_bytes = cupylora_i_max(levels * part * ranks * 4, part * (ranks + 4) * 4);
  s.shared = CUPYLORA_SHRINK_WARPS * (slots + s.sum_bytes);
  return s;
}

/* Of the wide shrinks: rows of a part of a tile, levels of a warp's K tree, the list of chunks. */
static int64_t cupylora_i_wide_part(const cupylora_i_work* work) {
  return work->tile_rows <= CUPYLORA_SHORT_PART ? CUPYLORA_SHORT_PART : CUPYLORA_WIDE_PART;
}

static int64_t cupylora_i_wide_levels(const cupylora_i_work* work, const cupylora_i_hidden* h) {
  return cupylora_i_log2(cupylora_i_k_ranges(work->in_features) / h->splits);
}

static int64_t cupylora_i_chunk_list(const cupylora_i_work* work) {
  const int64_t chunks = cupylora_i_ceil(work->in_features, CUPYLORA_PAIR_CHUNK);
  return cupylora_i_up(chunks * CUPYLORA_CHUNK_ENTRY, 16);
}

/* The slots of all warps, the levels of each one's K tree, the list of chunks. */
static cupylora_i_shrink cupylora_i_wide_shrink(const cupylora_i_work* work,
                                                const cupylora_i_hidden* h) {
  const int many = cupylora_i_groups(work, CUPYLORA_WIDE_TILES) > 1;
  const int64_t tiles = many ? CUPYLORA_MOST_WIDE_TILES : CUPYLORA_WIDE_TILES;
  const int64_t part = cupylora_i_wide_part(work), levels = cupylora_i_wide_levels(work, h);
  const int few = many && part == CUPYLORA_SHORT_PART;
  const int64_t slots = few ? CUPYLORA_FEW_WIDE_SLOTS : CUPYLORA_WIDE_SLOTS;
  cupylora_i_shrink s = cupylora_i_shrink_of(work, tiles, part);
  s.sum_bytes = levels * (tiles * part / (CUPYLORA_WIDE_WARPS * 8)) * CUPYLORA_PRODUCT_BYTES;
  s.shared = slots * (part + tiles * CUPYLORA_RANK_TILE) * CUPYLORA_CHUNK_BYTES;
  s.shared += CUPYLORA_WIDE_WARPS * s.sum_bytes + cupylora_i_chunk_list(work);
  return s;
}

/* The levels of each warp's K tree, the list of chunks, and the slots that the rest has room for.
 */
static cupylora_i_shrink cupylora_i_group_shrink(const cupylora_i_build* w,
                                                 const cupylora_i_work* work,
                                                 const cupylora_i_hidden* h) {
  const int64_t part = cupylora_i_wide_part(work), levels = cupylora_i_wide_levels(work, h);
  const int64_t ranks = CUPYLORA_GROUP_TILES * CUPYLORA_RANK_TILE;
  const int64_t slot = (part + ranks) * CUPYLORA_CHUNK_BYTES;
  const int64_t room = w->c->shared_block - CUPYLORA_RESERVED_BYTES;
  cupylora_i_shrink s = cupylora_i_shrink_of(work, CUPYLORA_GROUP_TILES, part);
  int64_t rest = CUPYLORA_GROUP_ALIGN + cupylora_i_chunk_list(work);
  s.sum_bytes = levels * (part / 8) * CUPYLORA_PRODUCT_BYTES;
  rest += CUPYLORA_GROUP_WARPS * s.sum_bytes;
  s.slots = cupylora_i_min(CUPYLORA_GROUP_SLOTS, cupylora_i_max(0, room - rest) / slot);
  s.shared = rest + s.slots * slot;
  return s;
}

static int64_t cupylora_i_shrink_items(const cupylora_i_work* work, const cupylora_i_hidden* h,
                                       const cupylora_i_shrink* s) {
  return work->tile_capacity * s->parts * s->groups * h->splits;
}

static int cupylora_i_shrink_fits(const cupylora_i_build* w, const cupylora_i_work* work,
                                  const cupylora_i_hidden* h, const cupylora_i_shrink* s) {
  return s->shared <= w->c->shared_block - CUPYLORA_RESERVED_BYTES &&
         cupylora_i_shrink_items(work, h, s) < CUPYLORA_PAIR_ITEM_LIMIT;
}

/* Whether the wide shrink's warpgroup form serves where the wide one does. */
static int cupylora_i_is_group(const cupylora_i_build* w, const cupylora_i_work* work,
                               const cupylora_i_shrink* s) {
  return w->c->capability / 10 == 9 && cupylora_i_groups(work, CUPYLORA_WIDE_TILES) > 1 &&
         s->slots >= CUPYLORA_FEWEST_GROUP_SLOTS;
}

/* The shrink of large batches, the wide one if it can, or the other. */
static cupylora_status cupylora_i_plan_shrink(cupylora_i_build* w, const cupylora_delta* d,
                                              const cupylora_i_work* work,
                                              const cupylora_i_hidden* h) {
  const int64_t least = cupylora_i_min(CUPYLORA_PART_ROWS, work->tile_rows);
  const char* program = "lora_shrink";
  int64_t threads = CUPYLORA_PAIR_THREADS;
  cupylora_i_shrink s = cupylora_i_shrink_of(work, h->group_tiles, least);
  if (work->rows >= CUPYLORA_STREAM_ROWS) {
    const cupylora_i_shrink wide = cupylora_i_wide_shrink(work, h);
    const cupylora_i_shrink stream = cupylora_i_stream_shrink(work, h);
    const cupylora_i_shrink group = cupylora_i_group_shrink(w, work, h);
    const int is_wide = work->tile_rows >= CUPYLORA_SHORT_PART && cupylora_i_is_wide(work);
    if (is_wide && cupylora_i_is_group(w, work, &group) &&
        cupylora_i_shrink_fits(w, work, h, &group)) {
      program = "lora_shrink_group", s = group, threads = CUPYLORA_GROUP_THREADS;
    } else if (is_wide && cupylora_i_shrink_fits(w, work, h, &wide)) {
      program = "lora_shrink_wide", s = wide, threads = CUPYLORA_WIDE_THREADS;
    } else if (cupylora_i_shrink_fits(w, work, h, &stream)) {
      program = "lora_shrink_stream", s = stream;
    }
  }
  CUPYLORA_I_SET(w, parts, s.parts);
  CUPYLORA_I_SET(w, rank_groups, s.groups);
  CUPYLORA_I_SET(w, sum_bytes, s.sum_bytes);
  CUPYLORA_I_SET(w, slots, s.slots);
  CUPYLORA_I_TRY(cupylora_i_find(w, program, d->dtype, "%d_%d", (int)s.tiles, (int)s.part));
  return cupylora_i_plan_half(w, cupylora_i_shrink_items(work, h, &s), threads, s.shared);
}

/* Shared memory of the expand that keeps B in registers; 0 where it does not serve. */
static int64_t cupylora_i_panel_bytes(const cupylora_i_build* w, const cupylora_i_work* work,
                                      const cupylora_i_hidden* h) {
  const int64_t ranks = cupylora_i_rank_tiles(work->max_rank) * CUPYLORA_RANK_TILE;
  const int64_t hidden = (h->splits + 1) * work->tile_rows * ranks * 4;
  const int64_t room = w->c->shared_block - CUPYLORA_PANEL_RESERVED;
  if (work->tile_rows < CUPYLORA_PANEL_ROWS || work->rows * work->width < CUPYLORA_PANEL_ELEMENTS ||
      hidden + CUPYLORA_PANEL_Y_BYTES > room) {
    return 0;
  }
  return hidden + CUPYLORA_PANEL_Y_BYTES;
}

/* Runs of tiles for each panel: as many as fill the resident blocks, or some times as many, where
 * an eighth of the device would have nothing to do. */
static int64_t cupylora_i_panel_parts(int64_t panels, int64_t resident) {
  int64_t parts = 0, rounds;
  for (rounds = 1; rounds <= CUPYLORA_PANEL_ROUNDS; ++rounds) {
    parts = rounds * resident / panels;
    if (8 * parts * panels >= 7 * rounds * resident) break;
  }
  return parts;
}

/* A block has a panel of columns and one of its `parts` runs of tiles. */
static cupylora_status cupylora_i_plan_panels(cupylora_i_build* w, const cupylora_delta* d,
                                              const cupylora_i_work* work, int64_t shared) {
  const int64_t panels = cupylora_i_slices(w, d, CUPYLORA_PANEL_COLUMNS);
  const int64_t cuts = cupylora_i_max(1, work->tile_rows / CUPYLORA_PANEL_PART);
  int64_t blocks = 0, parts;
  CUPYLORA_I_TRY(cupylora_i_find(w, "lora_expand_panel", d->dtype, "%d",
                                 cupylora_i_rank_tiles(work->max_rank)));
  CUPYLORA_I_TRY(cupylora_i_resident(w, CUPYLORA_PAIR_THREADS, shared, &blocks));
  parts = cupylora_i_min(cupylora_i_panel_parts(panels, blocks), work->tile_capacity * cuts);
  parts = cupylora_i_max(1, parts);
  CUPYLORA_I_SET(w, parts, parts);
  CUPYLORA_I_SET(w, block_columns, CUPYLORA_PANEL_COLUMNS);
  cupylora_i_add(w, panels * parts, CUPYLORA_PAIR_THREADS, shared, 0, 1);
  return CUPYLORA_OK;
}

static cupylora_status cupylora_i_plan_expand(cupylora_i_build* w, const cupylora_delta* d,
                                              const cupylora_i_work* work,
                                              const cupylora_i_hidden* h) {
  const int steps = cupylora_i_rank_tiles(d->max_rank);
  const int direct = d->max_rank <= CUPYLORA_DIRECT_RANK;
  const int64_t part = cupylora_i_min(CUPYLORA_PART_ROWS, work->tile_rows);
  int64_t columns = CUPYLORA_RUN_COLUMNS / (direct ? steps : 1);
  int64_t items = work->tile_capacity * cupylora_i_slices(w, d, columns), slots;
  CUPYLORA_I_SET(w, parts, 1);
  CUPYLORA_I_SET(w, slots, 0);
  CUPYLORA_I_SET(w, block_columns, columns);
  CUPYLORA_I_SET(w, tile_rows, work->tile_rows);
  if (work->rows >= CUPYLORA_STREAM_ROWS && items < CUPYLORA_PAIR_ITEM_LIMIT &&
      d->max_rank <= CUPYLORA_STREAM_RANK && h->splits <= CUPYLORA_STREAM_SPLITS) {
    const int64_t slot = CUPYLORA_Y_BYTES + CUPYLORA_EXPAND_B_BYTES;
    const int64_t panel = cupylora_i_panel_bytes(w, work, h);
    if (direct) {
      CUPYLORA_I_TRY(cupylora_i_find(w, "lora_expand_direct", d->dtype, "%d", steps));
      return cupylora_i_plan_half(w, cupylora_i_ceil(items, CUPYLORA_PAIR_WARPS),
                                  CUPYLORA_PAIR_THREADS, 0);
    }
    if (panel > 0) return cupylora_i_plan_panels(w, d, work, panel);
    slots = cupylora_i_ring_slots(slot, CUPYLORA_EXPAND_SLOTS, w->c->shared_block, w->c->shared_sm);
    CUPYLORA_I_SET(w, slots, slots);
    CUPYLORA_I_SET(w, b_bytes, CUPYLORA_EXPAND_B_BYTES);
    CUPYLORA_I_TRY(cupylora_i_find(w, "lora_expand_stream", d->dtype, "%d", steps));
    return cupylora_i_plan_half(w, items, CUPYLORA_STREAM_THREADS, slots * slot);
  }
  columns = cupylora_i_block_columns(work);
  items = work->tile_capacity * cupylora_i_slices(w, d, columns) * (work->tile_rows / part);
  CUPYLORA_I_SET(w, parts, work->tile_rows / part);
  CUPYLORA_I_SET(w, block_columns, columns);
  CUPYLORA_I_TRY(cupylora_i_find(w, "lora_expand", d->dtype, "%d", (int)part));
  return cupylora_i_plan_half(w, cupylora_i_ceil(items, CUPYLORA_PAIR_WARPS), CUPYLORA_PAIR_THREADS,
                              0);
}

/* Two nodes: shrink into the workspace, then expand. */
static cupylora_status cupylora_i_plan_pair(cupylora_i_build* w, const cupylora_delta* d,
                                            const cupylora_i_work* work,
                                            const cupylora_i_hidden* h) {
  CUPYLORA_I_TRY(cupylora_i_plan_shrink(w, d, work, h));
  CUPYLORA_I_TRY(cupylora_i_plan_expand(w, d, work, h));
  return cupylora_i_done(w);
}

static cupylora_i_work cupylora_i_work_of(const cupylora_batch* b, const cupylora_delta* d) {
  cupylora_i_work work;
  int i;
  memset(&work, 0, sizeof work);
  work.rows = cupylora_i_rows(b), work.experts = b->experts;
  work.active = cupylora_i_min(b->max_loras, cupylora_i_max(1, b->tokens));
  if (b->max_active > 0) work.active = cupylora_i_min(work.active, b->max_active);
  work.in_features = d->in_features, work.max_rank = d->max_rank;
  work.tile_rows = cupylora_tile_rows(b), work.tile_capacity = cupylora_i_tiles(b);
  work.num_slices = d->num_slices;
  for (i = 0; i < d->num_slices; ++i) work.widths[i] = d->slices[i].out_features;
  cupylora_i_expect(&work);
  return work;
}

cupylora_status cupylora_plan_delta(const cupylora* opened, const cupylora_batch* batch,
                                    const cupylora_delta* delta, cupylora_op* op,
                                    cupylora_error* error) {
  const int dtype = delta == NULL ? 0 : (int)delta->dtype;
  const int float32 = dtype == CUPYLORA_FLOAT32;
  cupylora_i_build build, *w = &build;
  cupylora_i_work work;
  cupylora_i_hidden h;
  int choice;
  CUPYLORA_I_TRY(cupylora_i_begin(w, opened, batch, delta, op, CUPYLORA_I_FOR_DELTA, dtype, error));
  CUPYLORA_I_TRY(cupylora_i_check_delta(batch, delta, op->itemsize, error));
  cupylora_i_align(op, delta);
  work = cupylora_i_work_of(batch, delta);
  choice = cupylora_i_choose(&work, (int)delta->kernel, opened->capability / 10 == 9, float32);
  CUPYLORA_I_NEED(
      choice != 0,
      "this kernel cannot serve %s, tiles of %d rows and max_rank %d on %s; leave it to "
      "CUPYLORA_AUTO",
      cupylora_i_dtypes[dtype], (int)work.tile_rows, delta->max_rank, opened->arch);
  op->fused = choice != CUPYLORA_PAIR;
  if (work.rows == 0) return cupylora_i_done(w);
  h = cupylora_i_hidden_of(&work, float32);
  CUPYLORA_I_GIVE(w, x_vector, CUPYLORA_I_X_FLAG, 0);
  CUPYLORA_I_GIVE(w, y_vector, CUPYLORA_I_Y_FLAG, 0);
  CUPYLORA_I_GIVE(w, y_access, CUPYLORA_I_Y_FLAG, 0);
  CUPYLORA_I_GIVE(w, h, CUPYLORA_I_WORKSPACE, 0);
  CUPYLORA_I_SET(w, ldx, delta->in_features);
  CUPYLORA_I_SET(w, ldy, delta->y_width);
  CUPYLORA_I_SET(w, x_pitch, delta->in_features * (int64_t)op->itemsize);
  CUPYLORA_I_SET(w, in_features, delta->in_features);
  CUPYLORA_I_SET(w, max_rank, delta->max_rank);
  CUPYLORA_I_SET(w, num_slices, delta->num_slices);
  CUPYLORA_I_SET(w, x_by, delta->x_rows);
  CUPYLORA_I_SET(w, y_by, delta->y_rows);
  CUPYLORA_I_SET(w, plan_settled, delta->plan_settled);
  CUPYLORA_I_SET(w, split_stride, h.stride);
  CUPYLORA_I_SET(w, splits, h.splits);
  CUPYLORA_I_SET(w, rank_pitch, h.pitch);
  if (op->fused) return cupylora_i_plan_fused(w, delta, &work, choice == CUPYLORA_RING);
  op->workspace_bytes = (uint64_t)h.bytes;
  return float32 ? cupylora_i_plan_float32(w, delta, &work)
                 : cupylora_i_plan_pair(w, delta, &work, &h);
}

/* The same rows for 16 bytes at a time, and by element: addresses decide between the two. */
static cupylora_status cupylora_i_plan_rows(cupylora_i_build* w, const char* name, int dtype,
                                            int64_t rows, int64_t width, int64_t ahead) {
  int way;
  for (way = 0; rows > 0 && way < 2; ++way) {
    const cupylora_i_items items =
        cupylora_i_row_items(rows, width, w->op->itemsize, way == 0 ? ahead : 1);
    if (items.count > UINT32_MAX) {
      return cupylora_i_fail(w->error, CUPYLORA_BAD_ARGUMENT, 0,
                             "%d rows of %d columns are more than the kernels count", (int)rows,
                             (int)width);
    }
    CUPYLORA_I_SET(w, blocks, items.blocks);
    CUPYLORA_I_SET(w, num_items, items.count);
    CUPYLORA_I_SET(w, per_warp, items.per_warp);
    CUPYLORA_I_TRY(cupylora_i_find(w, way == 0 ? "rows" : "rows_unaligned", -1, "%s_%s_%s", name,
                                   w->op->with_bias ? "bias" : "bare", cupylora_i_dtypes[dtype]));
    cupylora_i_add(w, items.grid, items.threads, 0, 0, 1);
  }
  return cupylora_i_done(w);
}

cupylora_status cupylora_plan_activation(const cupylora* opened, const cupylora_batch* batch,
                                         const cupylora_activation* activation, cupylora_op* op,
                                         cupylora_error* error) {
  const int dtype = activation == NULL ? 0 : (int)activation->dtype;
  cupylora_i_build build, *w = &build;
  int32_t alpha, limit;
  CUPYLORA_I_TRY(
      cupylora_i_begin(w, opened, batch, activation, op, CUPYLORA_I_FOR_ROWS, dtype, error));
  CUPYLORA_I_RANGE(activation->kind, 0, 3);
  CUPYLORA_I_RANGE(activation->layout, 0, 2);
  CUPYLORA_I_RANGE(activation->gated, activation->kind == CUPYLORA_SWIGLU_OAI, 1);
  CUPYLORA_I_RANGE(activation->hidden, 1, INT32_MAX / 2);
  CUPYLORA_I_RANGE(activation->rows, 1, 2);
  CUPYLORA_I_RANGE(activation->with_bias, 0, 1);
  CUPYLORA_I_NEED(isfinite(activation->alpha) && isfinite(activation->limit),
                  "alpha or limit is not finite");
  op->with_bias = activation->with_bias;
  op->x_vector = activation->hidden * (int64_t)op->itemsize % 16 == 0;
  memcpy(&alpha, &activation->alpha, 4), memcpy(&limit, &activation->limit, 4);
  CUPYLORA_I_SET(w, hidden, activation->hidden);
  CUPYLORA_I_SET(w, kind, activation->kind);
  CUPYLORA_I_SET(w, gated, activation->gated);
  CUPYLORA_I_SET(w, layout, activation->layout);
  CUPYLORA_I_SET(w, alpha, alpha);
  CUPYLORA_I_SET(w, limit, limit);
  CUPYLORA_I_SET(w, by_pair, activation->rows == CUPYLORA_BY_PAIR);
  return cupylora_i_plan_rows(w, "activation", dtype, cupylora_i_rows(batch), activation->hidden,
                              CUPYLORA_ACTIVATION_AHEAD);
}

cupylora_status cupylora_plan_finalize(const cupylora* opened, const cupylora_batch* batch,
                                       const cupylora_finalize* finalize, cupylora_op* op,
                                       cupylora_error* error) {
  const int dtype = finalize == NULL ? 0 : (int)finalize->dtype;
  cupylora_i_build build, *w = &build;
  CUPYLORA_I_TRY(
      cupylora_i_begin(w, opened, batch, finalize, op, CUPYLORA_I_FOR_SUM, dtype, error));
  CUPYLORA_I_RANGE(finalize->hidden, 1, INT32_MAX);
  CUPYLORA_I_RANGE(finalize->y_rows, 1, 2);
  CUPYLORA_I_RANGE(finalize->with_bias, 0, 1);
  op->with_bias = finalize->with_bias;
  op->x_vector = finalize->hidden * (int64_t)op->itemsize % 16 == 0;
  CUPYLORA_I_GIVE(w, y, CUPYLORA_I_A, 0);
  CUPYLORA_I_GIVE(w, weights, CUPYLORA_I_B, 0);
  CUPYLORA_I_SET(w, hidden, finalize->hidden);
  CUPYLORA_I_SET(w, by_pair, finalize->y_rows == CUPYLORA_BY_PAIR);
  return cupylora_i_plan_rows(w, "finalize", dtype, batch->tokens, finalize->hidden, 1);
}
