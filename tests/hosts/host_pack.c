/* Opens a pack as a C host does and prints what it says: a line of counts, then for each adapter
 * its name and its records at an address. In: a file and an address. Out: 0, or 1 and the text of a
 * refusal. */
#define CUPYLORA_IMPLEMENTATION
#include "cupylora.h"

/* Whether an adapter is found by its name, and by no longer one. */
static int is_found(const cupylora_pack* pack, int32_t adapter) {
  char name[CUPYLORA_NAME_BYTES + 2] = {0};
  memcpy(name, pack->names + adapter * CUPYLORA_NAME_BYTES, CUPYLORA_NAME_BYTES);
  if (cupylora_pack_find(pack, name) != adapter) return 0;
  name[strlen(name)] = 'x';
  return cupylora_pack_find(pack, name) == -1;
}

static void print_adapter(const cupylora_pack* pack, int32_t adapter, uint64_t address) {
  unsigned char record[CUPYLORA_ENTRY_BYTES];
  cupylora_error error;
  int32_t row;
  int i;
  printf("%.64s ", (const char*)pack->names + adapter * CUPYLORA_NAME_BYTES);
  for (row = 0; row < pack->rows; ++row) {
    if (cupylora_table_entry(pack, adapter, row, address, 7, record, &error) != CUPYLORA_OK) {
      printf("refused %s", error.text);
      return;
    }
    for (i = 0; i < CUPYLORA_ENTRY_BYTES; ++i) printf("%02x", record[i]);
  }
  printf("\n");
}

int main(int count, char** words) {
  unsigned char* file = NULL;
  cupylora_pack pack;
  cupylora_error error;
  FILE* stream;
  long bytes;
  int32_t i;
  if (count != 3 || (stream = fopen(words[1], "rb")) == NULL) return 2;
  fseek(stream, 0, SEEK_END);
  bytes = ftell(stream);
  rewind(stream);
  file = (unsigned char*)malloc((size_t)bytes + 1);
  if (file == NULL || fread(file, 1, (size_t)bytes, stream) != (size_t)bytes) return 2;
  fclose(stream);
  if (cupylora_pack_open(file, (uint64_t)bytes, &pack, &error) != CUPYLORA_OK) {
    printf("%s\n", error.text);
    free(file);
    return 1;
  }
  printf("%d %d %d %d %llu %d\n", pack.adapters, pack.rows, pack.max_rank, (int)pack.dtype,
         (unsigned long long)pack.blocks_bytes, cupylora_pack_find(&pack, "legal"));
  for (i = 0; i < pack.adapters; ++i) {
    if (!is_found(&pack, i)) printf("not found: ");
    print_adapter(&pack, i, strtoull(words[2], NULL, 0));
  }
  free(file);
  return 0;
}
