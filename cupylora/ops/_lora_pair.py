"""The two-node pair: shrink (h = x Aᵀ into a workspace), then expand (y += scale · h Bᵀ).

The portable path: every architecture, rank, width and alignment. In: checked :class:`LoraInputs`.
Out: launches of lora/shrink.cu and lora/expand.cu; for large batches of lora/shrink_group.cu,
lora/shrink_wide.cu or lora/shrink_stream.cu, and of lora/expand_direct.cu, lora/expand_panel.cu,
lora/expand_stream.cu or lora/expand.cu; for float32 of lora/delta_f32.cu. All forms give a row the
same bits. Other ops take the first half alone (``shrink_into``) and read h by its
:class:`HiddenLayout`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupylora.checks import INT32_MAX, check_int
from cupylora.dtypes import FLOAT32, dtype_name, resolve_dtype
from cupylora.ops._device import (
    address,
    enqueue,
    is_hopper,
    resident_blocks,
    vector_aligned,
)
from cupylora.ops._device import workspace as scratch
from cupylora.ops._lora_call import (
    LISTS,
    MAX_SLICES,
    ROW_INDEX,
    SLICE_COLUMNS,
    LoraInputs,
    pack_slices,
    vector_columns,
)
from cupylora.ops._lora_choice import k_ranges
from cupylora.reference._rows import RowIndex
from cupylora.shapes import MAX_RANK
from cupylora.worklists import Array, LoraSlice

__all__ = [
    "HiddenLayout",
    "expand_from",
    "hidden_layout",
    "lora_workspace_bytes",
    "run_pair",
    "shrink_into",
]

_STREAM_ROWS = 512
"""Rows from which on the kernels are bound by the memory's rate, not by latency."""

_DIRECT_RANK, _STREAM_RANK = 32, 64
"""Up to which the expands of large batches hold B in registers, and have an instance at all."""

_STREAM_SPLITS = 4
_STREAM_ITEMS = 272
"""K is split over CTAs while a call has fewer shrink items than about a large device holds at a
time."""

_STREAM_RANGES = 2
"""Ranges of K that such a split keeps at least."""

_ITEMS = 512
_MOST_SPLITS = 16
_SPLIT_ROWS = _STREAM_ITEMS * 32
"""Bound of rows · splits · rank groups where K is split."""

_RANK_TILE = 16
_ITEM_LIMIT = 2**31
_THREADS = 128
_WARPS = 4
_PART_ROWS = 16

_SHRINK_WARPS, _SHRINK_SLOTS = 4, 2
_PART_TOKENS, _LEAST_PART = 64, 16
"""Of the stream shrink, as in lora/shrink_stream.cu: warps of a CTA, slots of a warp; most rows of
a part of a tile, times its rank tiles from two on, and least."""

_CHUNK_BYTES = 128

_WIDE_RANK, _WIDE_ROWS = 33, 16384
"""Ranks and rows from which on the wide shrink takes a tile's ranks together. Below, reading A
again for every few rows costs less than its barriers do, and K would have to be split, which it is
too slow for; from there on ``hidden_layout`` never splits it."""

_WIDE_WARPS, _WIDE_THREADS = 8, 256
_WIDE_TILES, _MOST_WIDE_TILES = 4, 8
_WIDE_PART, _SHORT_PART = 64, 32
_WIDE_SLOTS, _FEW_WIDE_SLOTS = 4, 3
"""Of the wide shrink, as in lora/shrink_wide.cu: rank tiles of a group, rows of a part, slots, and
those where groups are large and parts short."""

_GROUP_TILES, _GROUP_WARPS, _GROUP_THREADS = 8, 8, 512
_FEWEST_GROUP_SLOTS, _GROUP_SLOTS = 4, 16
_GROUP_ALIGN = 1024
"""Of the wide shrink by warpgroup products, as in lora/shrink_group.cu: rank tiles of a group,
warps that multiply, slots, and what a slot's address is a multiple of. It takes the place of the
other, on Hopper, where more than four rank tiles fill more than one of its two warpgroups."""

_PRODUCT_BYTES = 512
_CHUNK, _CHUNK_ENTRY = 64, 2
_MOST_CHUNKS = 4096
"""Bytes of a product's sums; features of a chunk of K, bytes of its place in the wide shrink's
list, and most chunks there."""

_PANEL_ROWS, _PANEL_ELEMENTS = 64, 1 << 25
"""Rows of a tile, and elements of y, from which on an expand keeps B in registers over the tiles
that share it: with fewer rows to a B, or less to do for a CTA, the ring's copies are faster."""

_PANEL_COLUMNS = 256
_PANEL_Y_BYTES = 16384
_PANEL_PART = 16
_PANEL_RESERVED = 4096
_PANEL_ROUNDS = 4
"""Of the panel expand: columns of a panel, bytes of y under way, rows at which tiles are cut and
what a block's shared memory holds besides, as in lora/expand_panel.cu; most rounds of blocks."""

_FEWEST_SLOTS = 3
_RESERVED = 1024
"""Of a block's shared memory: the driver's, and what kernels declare."""

_EXPAND_SLOTS = 4
_Y_BYTES, _B_BYTES = 16384, 16384
_RUN_COLUMNS = 128
_STREAM_THREADS = 192

_COLUMNS = 64
_MOST_GROUPS = 4
_TARGET_GROUPS = 6144
_F32_COLUMNS = 128
_F32_ROWS = 32

_SHRINK_ARGS = struct.Struct("@QqQQQQQqQ17i4x")
_EXPAND_ARGS = struct.Struct("@QqQqQQQQQ16i")
_SHRINK = (f"bytes{_SHRINK_ARGS.size}",)
_EXPAND = (f"bytes{_EXPAND_ARGS.size + 136}",)
_SHRINK_F32 = ("ptr", "i64", "i32", *LISTS, "i32", "i32", "ptr", "ptr")
_EXPAND_F32 = ("ptr", "ptr", "i64", "i32", *LISTS, "i32", SLICE_COLUMNS, "i32", "ptr")


@dataclass(frozen=True)
class HiddenLayout:
    """Where h lies: float32 [splits, rows, slices, rank_pitch], by sorted row.

    It follows from sizes alone, never from the batch's content. h of a row is the sum of its splits
    (a power of two of them) as a binary tree, neighbours first; ranks from the adapter's own on are
    not written.
    """

    rows: int
    slices: int
    rank_pitch: int
    splits: int

    @property
    def split_stride(self) -> int:
        """Elements from one split to the next."""
        return self.rows * self.slices * self.rank_pitch

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace; at least 4."""
        return max(1, self.splits * self.split_stride) * 4


def hidden_layout(
    rows: int,
    slices: int,
    in_features: int,
    max_rank: int,
    dtype: np.dtype[Any],
    *,
    experts: int = 1,
) -> HiddenLayout:
    """The layout for R ``rows`` of a call over ``slices`` modules.

    experts: those that the rows fall on, which make more and smaller row tiles; a hint.
    """
    if dtype == FLOAT32:
        return HiddenLayout(rows, slices, max_rank, 1)
    groups = _rank_groups(slices, max_rank)
    pitch = -(-max_rank // _RANK_TILE) * _RANK_TILE
    ranges = k_ranges(in_features)
    if rows >= _STREAM_ROWS:
        part = _stream_part(_group_tiles(slices, max_rank), _PART_TOKENS)
        tiles = -(-rows // part) + min(rows, experts) // 2  # an expert's last tile is a partial one
        most = min(_STREAM_SPLITS, ranges // _STREAM_RANGES, _STREAM_ITEMS // (tiles * groups))
    else:
        tiles = max(1, -(-rows // 8), min(rows, experts))
        most = min(ranges, _ITEMS // (tiles * groups))
    return HiddenLayout(rows, slices, pitch, 1 << (max(1, most).bit_length() - 1))


def _group_tiles(slices: int, max_rank: int) -> int:
    """16-rank tiles, of any slices, that a shrink CTA takes together."""
    together = slices * -(-max_rank // _RANK_TILE)
    return 1 if together == 1 else 2 if together == 2 else 4


def _stream_part(tiles: int, tile_rows: int) -> int:
    """Rows of a part of a tile, in the stream shrink of so many rank tiles."""
    return max(_LEAST_PART, min(tile_rows, _PART_TOKENS // max(2, tiles)))


def _rank_groups(slices: int, max_rank: int) -> int:
    return _tile_groups(slices, max_rank, _group_tiles(slices, max_rank))


def _tile_groups(slices: int, max_rank: int, tiles: int) -> int:
    """Groups of so many rank tiles, of all slices."""
    return -(-slices * -(-max_rank // _RANK_TILE) // tiles)


def _is_wide(rows: int, in_features: int, max_rank: int) -> bool:
    """Whether the wide shrink serves, where there is shared memory for it."""
    chunks = -(-in_features // _CHUNK)
    return max_rank >= _WIDE_RANK and rows >= _WIDE_ROWS and chunks <= _MOST_CHUNKS


def lora_workspace_bytes(
    num_rows: int, slices: int, in_features: int, max_rank: int, dtype: Any
) -> int:
    """Bytes of the workspace that ``lora_delta`` takes for any R up to ``num_rows`` rows."""
    num_rows = check_int("num_rows", num_rows, 0)
    slices = check_int("slices", slices, 1, MAX_SLICES)
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    dtype = resolve_dtype(dtype)
    whole = hidden_layout(num_rows, slices, in_features, max_rank, dtype)
    if dtype == FLOAT32:
        return whole.nbytes
    # A smaller batch keeps more splits of K apart, and so may need more.
    split = min(_MOST_SPLITS * num_rows, _SPLIT_ROWS // _rank_groups(slices, max_rank))
    return max(1, max(num_rows, split) * slices * whole.rank_pitch) * 4


def run_pair(
    inputs: LoraInputs, y: Array, slices: Sequence[LoraSlice], y_rows: RowIndex, workspace: Any
) -> None:
    """Shrink and expand; ``workspace`` is a uint8 device array, or None for one of its own."""
    layout = hidden_layout(
        inputs.routing.num_rows,
        inputs.slices,
        inputs.in_features,
        inputs.max_rank,
        inputs.x.dtype,
        experts=inputs.routing.num_experts,
    )
    h = scratch(workspace, layout.nbytes, "lora_workspace_bytes")
    if layout.rows == 0:
        return
    shrink_into(inputs, address(h), layout)
    expand_from(inputs, address(h), layout, y, slices, y_rows)


def shrink_into(inputs: LoraInputs, h: int, layout: HiddenLayout) -> None:
    """Enqueue h[split, row, slice, rank] for every row of every tile, at device address ``h``."""
    if inputs.x.dtype == FLOAT32:
        _shrink_f32(inputs, h)
        return
    form = _shrink_form(inputs, layout, dtype_name(inputs.x.dtype))
    args = _pack_shrink(inputs, h, layout, form)
    resident = resident_blocks(form.program, form.kernel, form.threads, form.smem)
    grid = (min(inputs.tiles * form.parts * form.groups * layout.splits, resident),)
    launch = (grid, form.threads, (args,), form.smem)
    enqueue(form.program, form.kernel, _SHRINK, *launch, dependent=True)


@dataclass(frozen=True)
class _ShrinkForm:
    """A shrink kernel and its launch: parts of a tile's rows, groups of rank tiles, shared memory
    for a warp's sums, slots of the ring, shared memory in all."""

    program: str
    kernel: str
    parts: int
    groups: int
    sum_bytes: int = 0
    slots: int = 0
    smem: int = 0
    threads: int = _THREADS


def _shrink_form(inputs: LoraInputs, layout: HiddenLayout, dtype: str) -> _ShrinkForm:
    """The shrink of large batches, by the ranks that a tile takes together, or the other."""
    tile_rows = inputs.segments.tile_rows
    if layout.rows >= _STREAM_ROWS:
        room = shared_memory()[0] - _RESERVED
        for form in _large_shrinks(inputs, layout, dtype):
            items = inputs.tiles * form.parts * form.groups * layout.splits
            if form.smem <= room and items < _ITEM_LIMIT:
                return form
    part = min(_PART_ROWS, tile_rows)
    tiles = _group_tiles(layout.slices, inputs.max_rank)
    groups = _rank_groups(layout.slices, inputs.max_rank)
    return _ShrinkForm(f"lora_shrink_{dtype}", f"{tiles}_{part}", tile_rows // part, groups)


def _large_shrinks(inputs: LoraInputs, layout: HiddenLayout, dtype: str) -> Iterator[_ShrinkForm]:
    """Those of large batches, the better one first."""
    tile_rows, rank = inputs.segments.tile_rows, inputs.max_rank
    ranges = k_ranges(inputs.in_features) // layout.splits

    def form_of(name: str, tiles: int, part: int, **launch: int) -> _ShrinkForm:
        parts, groups = -(-tile_rows // part), _tile_groups(layout.slices, rank, tiles)
        program, kernel = f"lora_shrink_{name}_{dtype}", f"{tiles}_{part}"
        return _ShrinkForm(program, kernel, parts, groups, **launch)

    if tile_rows >= _SHORT_PART and _is_wide(layout.rows, inputs.in_features, rank):
        many = _tile_groups(layout.slices, rank, _WIDE_TILES) > 1
        tiles = _MOST_WIDE_TILES if many else _WIDE_TILES
        part = _WIDE_PART if tile_rows > _SHORT_PART else _SHORT_PART
        chunks = -(-inputs.in_features // _CHUNK)
        if many and is_hopper():
            sums, slots, smem = _group_room(part, ranges, chunks)
            if slots >= _FEWEST_GROUP_SLOTS:
                launch = {"sum_bytes": sums, "slots": slots, "smem": smem}
                yield form_of("group", _GROUP_TILES, part, **launch, threads=_GROUP_THREADS)
        sums, smem = _wide_room(tiles, part, ranges, chunks)
        yield form_of("wide", tiles, part, sum_bytes=sums, smem=smem, threads=_WIDE_THREADS)
    tiles = _group_tiles(layout.slices, rank)
    part = _stream_part(tiles, tile_rows)
    sums, smem = _shrink_room(tiles, part, ranges)
    yield form_of("stream", tiles, part, sum_bytes=sums, smem=smem)


def _pack_shrink(inputs: LoraInputs, h: int, layout: HiddenLayout, form: _ShrinkForm) -> bytes:
    """ShrinkArgs of lora/shrink.cuh."""
    row_to_pair, top_k, tokens, k_major, tiles, tile_count, entries, *sizes = inputs.lists
    return _SHRINK_ARGS.pack(
        address(inputs.x),
        inputs.in_features * inputs.x.dtype.itemsize,
        row_to_pair,
        tiles,
        tile_count,
        entries,
        h,
        layout.split_stride,
        inputs.status,
        ROW_INDEX[inputs.x_rows],
        top_k,
        tokens,
        k_major,
        *sizes,
        inputs.in_features,
        inputs.max_rank,
        layout.rank_pitch,
        form.groups,
        layout.splits,
        form.parts,
        form.sum_bytes,
        form.slots,
        int(vector_aligned(inputs.x)),
        int(inputs.plan_settled),
    )


def _shrink_room(tiles: int, rows: int, ranges: int) -> tuple[int, int]:
    """Shared memory of the stream shrink for a warp's sums, and in all: the levels of a warp's K
    tree, in whose place its sums go to the other warps, and each warp's slots."""
    ranks = tiles * _RANK_TILE
    levels = max(1, ranges // _SHRINK_WARPS).bit_length() - 1
    sums = max(levels * rows * ranks * 4, rows * (ranks + 4) * 4)
    slots = _SHRINK_SLOTS * (rows + ranks) * _CHUNK_BYTES
    return sums, _SHRINK_WARPS * (slots + sums)


def _wide_room(tiles: int, rows: int, ranges: int, chunks: int) -> tuple[int, int]:
    """Shared memory of the wide shrink for the levels of a warp's K tree, and in all: the slots,
    each warp's levels, the list of chunks."""
    products = tiles * rows // (_WIDE_WARPS * 8)
    levels = (ranges.bit_length() - 1) * products * _PRODUCT_BYTES
    few = tiles == _MOST_WIDE_TILES and rows == _SHORT_PART
    slots = _FEW_WIDE_SLOTS if few else _WIDE_SLOTS
    slot = (rows + tiles * _RANK_TILE) * _CHUNK_BYTES
    return levels, slots * slot + _WIDE_WARPS * levels + _chunk_list_bytes(chunks)


def _group_room(rows: int, ranges: int, chunks: int) -> tuple[int, int, int]:
    """Of the shrink by warpgroup products: shared memory for the levels of a warp's K tree, slots
    that the rest has room for, and shared memory in all."""
    levels = (ranges.bit_length() - 1) * (rows // 8) * _PRODUCT_BYTES
    slot = (rows + _GROUP_TILES * _RANK_TILE) * _CHUNK_BYTES
    rest = _GROUP_ALIGN + _GROUP_WARPS * levels + _chunk_list_bytes(chunks)
    slots = max(0, min(_GROUP_SLOTS, (shared_memory()[0] - _RESERVED - rest) // slot))
    return levels, slots, rest + slots * slot


def _chunk_list_bytes(chunks: int) -> int:
    """Shared memory of a list of chunks, in whole pieces."""
    return -(-chunks * _CHUNK_ENTRY // 16) * 16


def _ring_slots(slot: int, most: int) -> int:
    """Slots of so many bytes that leave room for two blocks on an SM, or for one where that would
    be too few; ``most`` at most."""
    per_block, per_sm = shared_memory()
    fits = 1
    for blocks in (2, 1):
        room = min(per_block - _RESERVED, per_sm // blocks - 2 * _RESERVED)
        fits = max(1, min(most, room // slot))
        if fits >= _FEWEST_SLOTS:
            break
    return fits


def shared_memory() -> tuple[int, int]:
    """Bytes of shared memory that a block can have, and that an SM has, on the current device."""
    import cupy

    return _shared_memory(cupy.cuda.runtime.getDevice())


@functools.cache
def _shared_memory(device: int) -> tuple[int, int]:
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    return (
        int(attributes["MaxSharedMemoryPerBlockOptin"]),
        int(attributes["MaxSharedMemoryPerMultiprocessor"]),
    )


def expand_from(
    inputs: LoraInputs,
    h: int,
    layout: HiddenLayout,
    y: Array,
    slices: Sequence[LoraSlice],
    y_rows: RowIndex,
) -> None:
    """Enqueue the update of y from the h that ``shrink_into`` left, directly behind it."""
    if y.dtype == FLOAT32:
        _expand_f32(inputs, h, y, slices, y_rows)
        return
    form = _expand_form(inputs, layout, dtype_name(y.dtype), slices)
    packed, blocks = pack_slices(slices, form.columns)
    row_to_pair, top_k, tokens, k_major, tiles, tile_count, entries, *sizes = inputs.lists
    args = _EXPAND_ARGS.pack(
        h,
        layout.split_stride,
        address(y),
        y.shape[1],
        row_to_pair,
        tiles,
        tile_count,
        entries,
        inputs.status,
        ROW_INDEX[y_rows],
        top_k,
        tokens,
        k_major,
        *sizes,
        inputs.max_rank,
        layout.rank_pitch,
        layout.splits,
        form.parts,
        form.columns,
        form.slots,
        form.b_bytes,
        int(vector_columns(y, slices)),
        inputs.segments.tile_rows,
    )
    count = blocks * form.parts
    if not form.panels:
        items = -(-inputs.tiles * count // form.items)
        count = min(items, resident_blocks(form.program, form.kernel, form.threads, form.smem))
    launch = ((count,), form.threads, (args + packed,), form.smem)
    enqueue(form.program, form.kernel, _EXPAND, *launch, dependent=True)


@dataclass(frozen=True)
class _ExpandForm:
    """An expand kernel and its launch: columns of an item, parts of a tile's rows, slots of the
    ring with ``b_bytes`` of B, shared memory, items that a block takes at a time. panels: a block
    has its columns, and one of ``parts`` runs of tiles."""

    program: str
    kernel: str
    columns: int
    parts: int = 1
    slots: int = 0
    b_bytes: int = 0
    smem: int = 0
    threads: int = _THREADS
    items: int = _WARPS
    panels: bool = False


def _expand_form(
    inputs: LoraInputs, layout: HiddenLayout, dtype: str, slices: Sequence[LoraSlice]
) -> _ExpandForm:
    """The expand of large batches, in registers or through shared memory by rank, or the other."""
    steps = _rank_steps(inputs.max_rank)
    direct = inputs.max_rank <= _DIRECT_RANK
    columns = _RUN_COLUMNS // steps if direct else _RUN_COLUMNS
    _, blocks = pack_slices(slices, columns)
    many = layout.rows >= _STREAM_ROWS and inputs.tiles * blocks < _ITEM_LIMIT
    if many and inputs.max_rank <= _STREAM_RANK and layout.splits <= _STREAM_SPLITS:
        if direct:
            return _ExpandForm(f"lora_expand_direct_{dtype}", str(steps), columns)
        panels = _panels(inputs, layout, dtype, slices)
        if panels is not None:
            return panels
        slots = _ring_slots(_Y_BYTES + _B_BYTES, _EXPAND_SLOTS)
        return _ExpandForm(
            f"lora_expand_stream_{dtype}",
            str(steps),
            columns,
            slots=slots,
            b_bytes=_B_BYTES,
            smem=slots * (_Y_BYTES + _B_BYTES),
            threads=_STREAM_THREADS,
            items=1,
        )
    part_rows = min(_PART_ROWS, inputs.segments.tile_rows)
    return _ExpandForm(
        f"lora_expand_{dtype}",
        str(part_rows),
        _block_columns(layout.rows, slices),
        parts=inputs.segments.tile_rows // part_rows,
    )


def _panels(
    inputs: LoraInputs, layout: HiddenLayout, dtype: str, slices: Sequence[LoraSlice]
) -> _ExpandForm | None:
    """The expand that keeps B in registers, where rows enough share it: every panel's tiles are
    dealt out to as many blocks as the device holds."""
    tile_rows = inputs.segments.tile_rows
    elements = layout.rows * sum(part.out_features for part in slices)
    if tile_rows < _PANEL_ROWS or elements < _PANEL_ELEMENTS:
        return None
    steps = _rank_steps(inputs.max_rank)
    _, panels = pack_slices(slices, _PANEL_COLUMNS)
    smem = (layout.splits + 1) * tile_rows * steps * _RANK_TILE * 4 + _PANEL_Y_BYTES
    if smem > shared_memory()[0] - _PANEL_RESERVED:
        return None
    program, kernel = f"lora_expand_panel_{dtype}", str(steps)
    resident = resident_blocks(program, kernel, _THREADS, smem)
    most = inputs.tiles * max(1, tile_rows // _PANEL_PART)
    parts = max(1, min(_panel_parts(panels, resident), most))
    return _ExpandForm(program, kernel, _PANEL_COLUMNS, parts=parts, smem=smem, panels=True)


def _panel_parts(panels: int, resident: int) -> int:
    """Runs of tiles for each panel: as many as fill the resident blocks, or twice, three or four
    times as many blocks, where an eighth of the device would have nothing to do."""
    parts = 0
    for rounds in range(1, _PANEL_ROUNDS + 1):
        parts = rounds * resident // panels
        if 8 * parts * panels >= 7 * rounds * resident:
            break
    return parts


def _rank_steps(max_rank: int) -> int:
    """16-rank steps that an expand of large batches has room for."""
    return 1 if max_rank <= _RANK_TILE else 2 if max_rank <= 2 * _RANK_TILE else 4


def _block_columns(rows: int, slices: Sequence[LoraSlice]) -> int:
    """Columns that a warp takes at a time, reading h once for all of them: as many as leave every
    warp of a large device something to do."""
    groups = rows * sum(-(-part.out_features // _COLUMNS) for part in slices)
    return _COLUMNS * max(1, min(_MOST_GROUPS, groups // _TARGET_GROUPS))


def _shrink_f32(inputs: LoraInputs, h: int) -> None:
    args = (
        address(inputs.x),
        inputs.in_features,
        ROW_INDEX[inputs.x_rows],
        *inputs.lists,
        inputs.in_features,
        inputs.max_rank,
        h,
        inputs.status,
    )
    grid = (min(inputs.tiles * inputs.slices, resident_blocks("lora_f32", "shrink", _THREADS)),)
    enqueue("lora_f32", "shrink", _SHRINK_F32, grid, _THREADS, args)


def _expand_f32(
    inputs: LoraInputs, h: int, y: Array, slices: Sequence[LoraSlice], y_rows: RowIndex
) -> None:
    packed, blocks = pack_slices(slices, _F32_COLUMNS)
    parts = -(-inputs.segments.tile_rows // _F32_ROWS)
    args = (
        h,
        address(y),
        y.shape[1],
        ROW_INDEX[y_rows],
        *inputs.lists,
        inputs.max_rank,
        packed,
        parts,
        inputs.status,
    )
    grid = (min(inputs.tiles * blocks * parts, resident_blocks("lora_f32", "expand", _THREADS)),)
    enqueue("lora_f32", "expand", _EXPAND_F32, grid, _THREADS, args)
