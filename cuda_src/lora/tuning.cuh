// What the fused LoRA kernels can be built with other than they ship: the values here are the
// shipped ones, and tools/tune_kernels.py alone overrides them, to time the others beside them. No
// value changes a result.
#pragma once

// Ring: bytes of weights in a stage, for instances of up to two rank tiles and of four; bytes of a
// row of x or y in it; CTAs an SM, by rank tiles times 8-row groups: one, two, and an instance of
// four rank tiles and one group.
#ifndef RING_WEIGHT_BYTES
#define RING_WEIGHT_BYTES 8192
#endif
#ifndef RING_WEIGHT_BYTES_4
#define RING_WEIGHT_BYTES_4 16384
#endif
#ifndef RING_ROW_BYTES
#define RING_ROW_BYTES 512
#endif
#ifndef RING_BLOCKS_1
#define RING_BLOCKS_1 4
#endif
#ifndef RING_BLOCKS_2
#define RING_BLOCKS_2 3
#endif
#ifndef RING_BLOCKS_4
#define RING_BLOCKS_4 2
#endif

// Ring: 0: a stage holds a fixed number of chunks or columns, by rank tiles. 1: as many as its
// bytes hold, by the adapter's own rank and the tile's own rows; its chunks run on across K ranges.
#ifndef RING_FILL
#define RING_FILL 0
#endif

// Ring: 1: y is read and written in 16-byte pieces where it lies so.
#ifndef RING_WIDE_Y
#define RING_WIDE_Y 0
#endif

// Ring: 1: rows of x and y come by cp.async of the whole copying warp, 512 bytes an instruction,
// instead of by a bulk copy a row, which takes the warp longer to issue.
#ifndef RING_ROWS
#define RING_ROWS 0
#endif

// Ring, weights brought into the L2 ahead of their stages: 1: the rest of the first item, while the
// kernel ahead is still running; 2: every next item's too.
#ifndef RING_PREFETCH
#define RING_PREFETCH 0
#endif

// 1: line by line, by all lanes of the copying warp, instead of by a bulk instruction, behind which
// the copies that follow may wait.
#ifndef RING_PREFETCH_LINES
#define RING_PREFETCH_LINES 0
#endif

// Ring, instances of more than 8 rows: 1: y is first to leave the L2, so that x and weights, which
// are read again, stay there.
#ifndef RING_STREAM_Y
#define RING_STREAM_Y 0
#endif

// Ring, ranks above 16: 1: lanes of different g load the rank steps of B in different order, so
// that they meet different banks.
#ifndef RING_TURN_RANKS
#define RING_TURN_RANKS 0
#endif

// Cluster kernel: 1: of an adapter of fewer rank tiles than the instance has room for, the others
// are passed over instead of loaded as zeros and multiplied.
#ifndef CLUSTER_OWN_TILES
#define CLUSTER_OWN_TILES 0
#endif

// Both: 1: the slot entries and the first tile's record are brought into the L2 while the tile
// count is read, instead of one after the other. 2: and the entries are the last to leave it.
#ifndef LISTS_PREFETCH
#define LISTS_PREFETCH 0
#endif
