"""What the ops hand to each other: plain bundles of arrays, NumPy or device alike.

``route`` makes a :class:`Routing`; ``build_segments`` cuts it into a :class:`Segments` work list;
``plan`` makes both at once. ``slot_lookup`` and ``pointer_expand`` make :class:`TokenLora` and
:class:`RowLora`; ``build_problems`` turns those into :class:`LoraProblems`. Arrays have the size of
the largest possible list; how much of one is valid is a count that lives beside it (on the device
for device arrays), so the host never reads anything back.

Letters: T tokens, k top-k, R = T·k rows, E local experts, S segment capacity, M modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = [
    "FACTOR_PIECE",
    "FACTOR_PIECE_BYTES",
    "MAX_ROWS",
    "PACKED",
    "ROW_MAJOR",
    "SLOT_ENTRY",
    "SLOT_ENTRY_BYTES",
    "STATUS_BAD_LAYOUT",
    "STATUS_BAD_RANK",
    "STATUS_BAD_SLOT",
    "STATUS_CAPACITY",
    "TILE_CHOICES",
    "TILE_INTS",
    "TILE_PAIRS",
    "TILE_ROWS",
    "ArrayBundle",
    "GemmProblems",
    "LoraProblems",
    "LoraSlice",
    "Routing",
    "RowLora",
    "RowOrder",
    "Segments",
    "TokenLora",
    "choose_tile_rows",
    "segment_capacity",
    "tile_capacity",
]

Array = Any
"""A NumPy or CuPy array; as an argument of an op or layer, an array of any library."""

RowOrder = Literal["token_major", "k_major"]
"""How a pair (token t, choice j) is numbered: t·k + j, or j·T + t."""

ROW_MAJOR, PACKED = 0, 1
"""Layouts of A in a slot entry: [rank, in] rows, or swizzled K-chunks (see adapters.packing)."""

SLOT_ENTRY = np.dtype(
    [
        ("a_ptr", "<u8"),
        ("b_ptr", "<u8"),
        ("a_expert_stride", "<i8"),
        ("b_expert_stride", "<i8"),
        ("rank", "<i4"),
        ("scale", "<f4"),
        ("a_layout", "<i4"),
        ("generation", "<i4"),
    ]
)
"""One (layer·module, slot) of the slot table. Addresses and strides in bytes; stride 0: one factor
for all experts; rank 0: the slot does not touch this module. CUDA side: lora/slot_entry.cuh."""

SLOT_ENTRY_BYTES = SLOT_ENTRY.itemsize

FACTOR_PIECE = np.dtype(
    [
        ("source", "<u8"),
        ("first", "<u8"),
        ("target", "<u8", 2),
        ("count", "<i4"),
        ("source_type", "<i4"),
        ("extent", "<i4", 3),
        ("axis", "<i4", 3),
        ("expert", "<i4"),
        ("rows", "<i4"),
        ("columns", "<i4"),
        ("split", "<i4"),
        ("interleaved", "<i4"),
        ("packed", "<i4"),
        ("ratio", "<f8"),
    ]
)
"""Part of a file's tensor on its way into blocks of the arena (``unpack_factors``).

Elements ``first`` to ``first + count`` (C order) of a tensor of shape ``extent`` lie at byte
``source``; ``source_type`` 0: bfloat16, 1: float16, 2: float32. ``axis`` says of each of its
dimensions whether it counts experts (0, from ``expert`` on), rows (1) or columns (2) of the result.
A block has ``rows`` x ``columns`` of each expert, and ``packed`` its layout. Rows from ``split`` on
go to the block at byte ``target[1]``, those before to ``target[0]``; where ``interleaved``, odd
rows and even rows do. Elements are multiplied by ``ratio`` in float64 and rounded to float32 where
it is not 1. CUDA side: adapters/unpack.cu."""

FACTOR_PIECE_BYTES = FACTOR_PIECE.itemsize

MAX_ROWS = 2**31 - 2048
"""Most rows R = T·k of a batch: row numbers, and those a block looks ahead, fit 32 bits."""

TILE_ROWS = (8, 16, 32, 64)
"""Rows that a tile may hold: small tiles for decode, large ones to read weights less often."""

TILE_CHOICES = (
    (33, 512, 2048, 64, 64),
    (33, 512, 512, 16, 32),
    (1, 32, 2048, 24, 32),
    (1, 32, 1024, 8, 16),
)
"""Least and most max_rank, least rows, least rows a group -> rows of a tile; the first that holds
counts, and where none does a tile has 8."""

TILE_INTS, TILE_PAIRS = 16, 8
"""int32 fields of a tile's record, and how many of them name the pairs of its first rows."""

STATUS_BAD_SLOT, STATUS_BAD_RANK, STATUS_BAD_LAYOUT, STATUS_CAPACITY = 1, 1 << 8, 1 << 16, 1 << 24
"""Bits of the error-flag word that device work sets, one a byte: a slot >= max_loras, a rank out of
range, A in another layout than the caller can read, a list longer than the room given for it or
more adapters in a batch than its plan was told."""


class ArrayBundle:
    """Base of dataclasses, frozen, whose fields are arrays (of any library) and plain values."""


@dataclass(frozen=True)
class Routing(ArrayBundle):
    """Rows sorted by (expert, slot, pair), or another stack's order given in the same form.

    row_to_pair: int32 [R], -1 for ghost rows (those from ``expert_first_token_offset[E]`` on).
    pair_to_row: int32 [R], -1 for a pair whose expert is not ours.
    expert_first_token_offset: int64 [E+1], first row of each local expert; the last entry is the
    number of valid rows.
    """

    row_to_pair: Array
    pair_to_row: Array
    expert_first_token_offset: Array
    num_tokens: int
    top_k: int
    num_experts: int
    start_expert: int = 0
    row_order: RowOrder = "token_major"

    @property
    def num_rows(self) -> int:
        """R = T·k."""
        return self.num_tokens * self.top_k


@dataclass(frozen=True)
class Segments(ArrayBundle):
    """Maximal runs of rows with one (expert, slot), and the row tiles of those with an adapter.

    start: int32 [S+1], first row of each segment, closed by the row behind the last one.
    expert, slot: int32 [S]; slot -1 is a run of base rows (it has no tiles).
    count: int32 [1] on the arrays' device.
    tiles: int32 [tile_capacity, TILE_INTS], in row order: first row, rows, local expert, slot, the
    pairs of the first TILE_PAIRS rows (-1 past the tile's rows), zeros. A segment of m rows has
    ceil(m / tile_rows) of them. On the device a record is 64 bytes on a 16-byte boundary.
    tile_count: int32 [1].
    max_loras: slots are below it; a table that is looked up by them has at least so many.
    """

    start: Array
    expert: Array
    slot: Array
    count: Array
    tiles: Array
    tile_count: Array
    tile_rows: int
    max_loras: int


@dataclass(frozen=True)
class TokenLora(ArrayBundle):
    """Per module and token, what the token's slot holds: all arrays [M, T].

    rank int32 (0: none), a_ptr and b_ptr uint64 (expert 0), a_stride and b_stride int64 (bytes from
    one expert to the next, 0 when shared), scale float32. A token of no adapter has zeros
    throughout.
    """

    rank: Array
    a_ptr: Array
    b_ptr: Array
    a_stride: Array
    b_stride: Array
    scale: Array


@dataclass(frozen=True)
class RowLora(ArrayBundle):
    """Per row: source token int32 [R] and local expert int32 [R] (-1 both for ghosts), and per
    module rank int32, a_ptr and b_ptr uint64, scale float32, each [M, R] (zeros for ghost and base
    rows).
    """

    token: Array
    expert: Array
    rank: Array
    a_ptr: Array
    b_ptr: Array
    scale: Array


@dataclass(frozen=True)
class GemmProblems(ArrayBundle):
    """``D[m, n] = beta·D + alpha · A[m, k] · B[n, k]ᵀ`` for each of up to P problems.

    m, n, k int32 [P]; a, b, d uint64 [P] addresses; lda, ldb, ldd int64 [P] elements between rows;
    alpha float32 [P]; count int32 [1], the number of valid problems.
    """

    m: Array
    n: Array
    k: Array
    a: Array
    b: Array
    d: Array
    lda: Array
    ldb: Array
    ldd: Array
    alpha: Array
    count: Array


@dataclass(frozen=True)
class LoraProblems(ArrayBundle):
    """Shrink and expand problems of one LoRA module, and optional split-K offsets int64 [P+1]."""

    shrink: GemmProblems
    expand: GemmProblems
    splitk_offsets: Array | None = None


@dataclass(frozen=True)
class LoraSlice:
    """One module of an operation whose modules share x: where its delta goes in y.

    Output feature n of ``out_features`` is added to column ``y_column + n * y_stride``; a stride
    of 2 serves gate and up projections whose columns interleave.
    """

    out_features: int
    y_column: int = 0
    y_stride: int = 1


def segment_capacity(num_rows: int, num_experts: int, max_loras: int) -> int:
    """Most segments a *sorted* list of ``num_rows`` rows can have (base rows are a group too)."""
    return max(1, min(num_rows, num_experts * (max_loras + 1)))


def tile_capacity(num_rows: int, segments: int, tile_rows: int) -> int:
    """Most row tiles: every segment may end in a partial one."""
    return max(1, min(num_rows, segments + num_rows // tile_rows))


def choose_tile_rows(
    num_rows: int, num_experts: int, *, max_active: int = 1, max_rank: int = 16
) -> int:
    """Rows a tile should hold for R rows over E experts, by sizes known at capture time.

    max_active: most adapters that a batch holds; R / (E · max_active) rows are what a tile's
    weights can expect to serve. Small tiles waste the least and spread best; where weights are
    large beside the rows, large tiles read them less often.
    """
    shared = num_rows / (num_experts * max(1, max_active))
    for low, high, least_rows, least_shared, tile_rows in TILE_CHOICES:
        if low <= max_rank <= high and num_rows >= least_rows and shared >= least_shared:
            return tile_rows
    return TILE_ROWS[0]
