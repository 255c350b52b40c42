"""Shrink and expand of every tile, added into y in place, on the device (lora/).

In: x, the tiles of ``build_segments`` and the slot entries of the modules that share x. Out: y. Two
launches with a float workspace between them; both read their work list from device memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupylora import reference
from cupylora.checks import (
    FLOATS,
    INT32_MAX,
    check_array,
    check_choice,
    check_int,
    check_routing,
    check_segments,
    check_slices,
    check_slot_entries,
    check_slots_fit,
)
from cupylora.dtypes import FLOAT32, dtype_name, resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.ops._device import (
    address,
    check_aligned,
    device_op,
    enqueue,
    resident_blocks,
    route_arguments,
    status_pointer,
    vector_aligned,
)
from cupylora.ops._device import workspace as scratch
from cupylora.reference._rows import RowIndex
from cupylora.shapes import MAX_RANK
from cupylora.worklists import Array, LoraSlice, Routing, Segments

__all__ = ["MAX_SLICES", "LoraSlice", "lora_delta", "lora_workspace_bytes"]

MAX_SLICES = 8
"""Modules that one call may take."""

_ROW_INDEX = {"token": 0, "pair": 1, "row": 2}
_BLOCK_LIMIT = 2**32
_SPLIT = 512
_SPLIT_LIMIT = 16384
_THREADS = 128
_WARPS = 4
_COLUMNS = 64
_MOST_GROUPS = 4
_TARGET_GROUPS = 6144
_RANK_TILE = 16
_PART_ROWS = 16
_F32_COLUMNS = 128
_ROWS = ("i32", "ptr", "i32", "i32", "i32", "ptr", "ptr", "ptr", "i32", "i32", "i32")
_SHRINK = ("ptr", "i64", *_ROWS, *("i32",) * 5, "i64", "i32", "ptr", "ptr")
_EXPAND = (
    *("ptr", "i32", "i64", "i32", "ptr", "i64"),
    *(*_ROWS, "i32", "bytes136", "i32", "i32", "i32", "ptr"),
)
_SHRINK_F32 = ("ptr", "i64", *_ROWS, "i32", "i32", "ptr", "ptr")
_EXPAND_F32 = ("ptr", "ptr", "i64", *_ROWS, "i32", "bytes136", "ptr")


@dataclass(frozen=True)
class _Plan:
    """What is fixed for a call by its sizes alone, never by the batch's content.

    rank_tiles: 16-rank tiles of a slice; group_tiles: those (of any slices) that a shrink CTA takes
    together; splits: K splits kept apart in the workspace, 1 where one CTA adds them all.
    """

    rows: int
    slices: int
    max_rank: int
    rank_tiles: int
    group_tiles: int
    splits: int

    @property
    def rank_pitch(self) -> int:
        return self.rank_tiles * _RANK_TILE

    @property
    def rank_groups(self) -> int:
        return -(-self.slices * self.rank_tiles // self.group_tiles)

    @property
    def split_stride(self) -> int:
        return self.rows * self.slices * self.rank_pitch

    @property
    def workspace_bytes(self) -> int:
        return max(1, self.splits * self.split_stride) * 4


def _plan(rows: int, slices: int, in_features: int, max_rank: int, dtype: np.dtype[Any]) -> _Plan:
    rank_tiles = -(-max_rank // _RANK_TILE)
    together = slices * rank_tiles
    group_tiles = 1 if together == 1 else 2 if together == 2 else 4
    splits = 1
    if dtype != FLOAT32:
        possible = -(-in_features // _SPLIT)
        # Splitting K over CTAs fills the device when there is little work; the sum is the same.
        if rows * possible * -(-together // group_tiles) <= _SPLIT_LIMIT:
            splits = possible
    return _Plan(rows, slices, max_rank, rank_tiles, group_tiles, splits)


def lora_workspace_bytes(
    num_rows: int, slices: int, in_features: int, max_rank: int, dtype: Any
) -> int:
    """Bytes of the workspace that ``lora_delta`` takes for any R up to ``num_rows`` rows."""
    num_rows = check_int("num_rows", num_rows, 0)
    slices = check_int("slices", slices, 1, MAX_SLICES)
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    dtype = resolve_dtype(dtype)

    def plan(rows: int) -> _Plan:
        return _plan(rows, slices, in_features, max_rank, dtype)

    # A batch that is split over K keeps its splits apart, so the largest of those can need more.
    largest = plan(num_rows)
    splits = -(-in_features // _SPLIT)
    split_rows = min(num_rows, _SPLIT_LIMIT // (splits * largest.rank_groups))
    return max(largest.workspace_bytes, plan(split_rows).workspace_bytes)


@device_op(reference.lora_delta)
def lora_delta(
    x: Array,
    y: Array,
    segments: Segments,
    routing: Routing,
    entries: Array,
    slices: Sequence[LoraSlice],
    *,
    in_features: int,
    max_rank: int,
    x_rows: RowIndex = "token",
    y_rows: RowIndex = "pair",
    workspace: Any = None,
    status: Array | None = None,
) -> None:
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    check_choice("x_rows", x_rows, ("token", "pair", "row"))
    check_choice("y_rows", y_rows, ("pair", "row"))
    check_routing(routing, on_device=True)
    check_segments(segments, on_device=True)
    length = routing.num_tokens if x_rows == "token" else routing.num_rows
    check_array("x", x, dtype=FLOATS, shape=(length, in_features), on_device=True)
    check_array("y", y, dtype=x.dtype, shape=(routing.num_rows, None), on_device=True)
    check_slices(slices, y.shape[1])
    if len(slices) > MAX_SLICES:
        raise ArgumentError(f"slices has {len(slices)} entries; at most {MAX_SLICES} fit one call")
    _, max_loras = check_slot_entries("entries", entries, modules=len(slices), on_device=True)
    check_slots_fit(segments, max_loras)
    check_aligned("entries", entries)
    check_aligned("segments.tiles", segments.tiles)
    if max_rank * in_features * x.dtype.itemsize > _BLOCK_LIMIT:
        raise ArgumentError(
            f"max_rank {max_rank} times in_features {in_features} makes a factor of over "
            f"{_BLOCK_LIMIT} bytes, more than the kernels address"
        )
    plan = _plan(routing.num_rows, len(slices), in_features, max_rank, x.dtype)
    h = scratch(workspace, plan.workspace_bytes, "lora_workspace_bytes")
    if routing.num_rows == 0:
        return
    lists = (
        address(routing.row_to_pair),
        *route_arguments_tail(routing),
        address(segments.tiles),
        address(segments.tile_count),
        address(entries),
        len(slices),
        max_loras,
        routing.start_expert,
    )
    call = _Call(x, y, h, lists, plan, segments, _ROW_INDEX[x_rows], _ROW_INDEX[y_rows])
    flag = status_pointer(status)
    if x.dtype == FLOAT32:
        call.float32(slices, in_features, flag)
    else:
        call.shrink(in_features, flag)
        call.expand(slices, flag)


def route_arguments_tail(routing: Routing) -> tuple[int, int, int]:
    """(top_k, num_tokens, k_major): the order in which the LoRA kernels take them."""
    tokens, top_k, k_major = route_arguments(routing)
    return top_k, tokens, k_major


@dataclass(frozen=True)
class _Call:
    x: Array
    y: Array
    h: Array
    lists: tuple[int, ...]
    plan: _Plan
    segments: Segments
    x_by: int
    y_by: int

    @property
    def tiles(self) -> int:
        return int(self.segments.tiles.shape[0])

    def shrink(self, in_features: int, status: int) -> None:
        plan = self.plan
        items = self.tiles * plan.rank_groups * plan.splits
        program = f"lora_shrink_{dtype_name(self.x.dtype)}"
        kernel = f"{plan.group_tiles}_{self.segments.tile_rows}"
        args = (
            address(self.x),
            in_features,
            self.x_by,
            *self.lists,
            in_features,
            plan.max_rank,
            plan.rank_tiles,
            plan.rank_pitch,
            plan.splits,
            plan.split_stride,
            int(vector_aligned(self.x)),
            address(self.h),
            status,
        )
        grid = (min(items, resident_blocks(program, kernel, _THREADS)),)
        enqueue(program, kernel, _SHRINK, grid, _THREADS, args, dependent=True)

    def expand(self, slices: Sequence[LoraSlice], status: int) -> None:
        plan = self.plan
        columns = _block_columns(plan.rows, slices)
        packed, blocks = _pack_slices(slices, columns)
        part_rows = min(_PART_ROWS, self.segments.tile_rows)
        parts = self.segments.tile_rows // part_rows
        program, kernel = f"lora_expand_{dtype_name(self.y.dtype)}", str(part_rows)
        args = (
            address(self.h),
            plan.splits,
            plan.split_stride,
            plan.rank_pitch,
            address(self.y),
            self.y.shape[1],
            self.y_by,
            *self.lists,
            plan.max_rank,
            packed,
            columns,
            parts,
            int(_vector_columns(self.y, slices)),
            status,
        )
        items = -(-self.tiles * blocks * parts // _WARPS)
        grid = (min(items, resident_blocks(program, kernel, _THREADS)),)
        enqueue(program, kernel, _EXPAND, grid, _THREADS, args, dependent=True)

    def float32(self, slices: Sequence[LoraSlice], in_features: int, status: int) -> None:
        plan, program = self.plan, "lora_f32"
        args = (
            address(self.x),
            in_features,
            self.x_by,
            *self.lists,
            in_features,
            plan.max_rank,
            address(self.h),
            status,
        )
        grid = (min(self.tiles * plan.slices, resident_blocks(program, "shrink", _THREADS)),)
        enqueue(program, "shrink", _SHRINK_F32, grid, _THREADS, args)
        packed, blocks = _pack_slices(slices, _F32_COLUMNS)
        expand_args = (
            address(self.h),
            address(self.y),
            self.y.shape[1],
            self.y_by,
            *self.lists,
            plan.max_rank,
            packed,
            status,
        )
        grid = (min(self.tiles * blocks, resident_blocks(program, "expand", _THREADS)),)
        enqueue(program, "expand", _EXPAND_F32, grid, _THREADS, expand_args)


def _block_columns(rows: int, slices: Sequence[LoraSlice]) -> int:
    """Columns that a warp takes at a time, reading h once for all of them: as many as leave every
    warp of a large device something to do."""
    groups = rows * sum(-(-part.out_features // _COLUMNS) for part in slices)
    return _COLUMNS * max(1, min(_MOST_GROUPS, groups // _TARGET_GROUPS))


def _pack_slices(slices: Sequence[LoraSlice], block_columns: int) -> tuple[bytes, int]:
    """SliceColumns of lora/slot_entry.cuh, and the column blocks of all slices together."""
    padding = [0] * (MAX_SLICES - len(slices))
    starts = [0]
    for part in slices:
        starts.append(starts[-1] + -(-part.out_features // block_columns))
    values = [
        *(part.out_features for part in slices),
        *padding,
        *(part.y_column for part in slices),
        *padding,
        *(part.y_stride for part in slices),
        *padding,
        *starts,
        *padding,
    ]
    return struct.pack(f"{3 * MAX_SLICES + MAX_SLICES + 1}i4x", *values), starts[-1]


def _vector_columns(y: Array, slices: Sequence[LoraSlice]) -> bool:
    return vector_aligned(y) and all(
        part.y_stride == 1 and part.y_column * y.dtype.itemsize % 16 == 0 for part in slices
    )
