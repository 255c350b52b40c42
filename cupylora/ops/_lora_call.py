"""What every LoRA kernel takes: x, the work list and the slot entries, checked once.

In: the arguments of an op. Out: a :class:`LoraInputs`, from which each kernel's host side takes its
arguments in the order that the kernels share.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupylora.checks import (
    FLOATS,
    INT32_MAX,
    check_array,
    check_choice,
    check_int,
    check_routing,
    check_segments,
    check_slot_entries,
    check_slots_fit,
)
from cupylora.errors import ArgumentError
from cupylora.ops._device import (
    address,
    check_aligned,
    route_arguments,
    status_pointer,
    vector_aligned,
)
from cupylora.reference._rows import RowIndex
from cupylora.shapes import MAX_RANK
from cupylora.worklists import Array, LoraSlice, Routing, Segments

__all__ = [
    "LISTS",
    "MAX_SLICES",
    "ROW_INDEX",
    "SLICE_COLUMNS",
    "LoraInputs",
    "lora_inputs",
    "pack_slices",
    "vector_columns",
]

MAX_SLICES = 8
"""Modules that one call may take."""

ROW_INDEX = {"token": 0, "pair": 1, "row": 2}
"""RowIndex of lora/slot_entry.cuh."""

LISTS = ("ptr", "i32", "i32", "i32", "ptr", "ptr", "ptr", "i32", "i32", "i32")
"""Parameter types of ``LoraInputs.lists``."""

SLICE_COLUMNS = "bytes136"
"""Parameter type of SliceColumns (lora/slot_entry.cuh), which ``pack_slices`` makes."""

_BLOCK_LIMIT = 2**32


@dataclass(frozen=True)
class LoraInputs:
    """Checked operands of one call over ``slices`` modules that share x.

    status: address of the error-flag word or 0. plan_settled: the work list and the row maps were
    complete before the kernel ahead in the stream began.
    """

    x: Array
    segments: Segments
    routing: Routing
    entries: Array
    slices: int
    max_loras: int
    in_features: int
    max_rank: int
    x_rows: RowIndex
    status: int
    plan_settled: bool

    @property
    def tiles(self) -> int:
        """Room of the tile list: the most tiles that the batch can have."""
        return int(self.segments.tiles.shape[0])

    @property
    def lists(self) -> tuple[int, ...]:
        """row_to_pair, top_k, num_tokens, k_major, tiles, tile_count, entries, num_slices,
        max_loras, start_expert."""
        tokens, top_k, k_major = route_arguments(self.routing)
        return (
            address(self.routing.row_to_pair),
            top_k,
            tokens,
            k_major,
            address(self.segments.tiles),
            address(self.segments.tile_count),
            address(self.entries),
            self.slices,
            self.max_loras,
            self.routing.start_expert,
        )


def lora_inputs(
    x: Array,
    segments: Segments,
    routing: Routing,
    entries: Array,
    slices: int,
    *,
    in_features: int,
    max_rank: int,
    x_rows: RowIndex,
    status: Any,
    plan_settled: bool,
) -> LoraInputs:
    """Check what all LoRA ops take; raises ArgumentError naming the argument."""
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    check_choice("x_rows", x_rows, ("token", "pair", "row"))
    check_routing(routing, on_device=True)
    check_segments(segments, on_device=True)
    length = routing.num_tokens if x_rows == "token" else routing.num_rows
    check_array("x", x, dtype=FLOATS, shape=(length, in_features), on_device=True)
    if slices == 0:
        raise ArgumentError("slices is empty; at least one LoraSlice is needed")
    if slices > MAX_SLICES:
        raise ArgumentError(f"slices has {slices} entries; at most {MAX_SLICES} fit one call")
    _, max_loras = check_slot_entries("entries", entries, modules=slices, on_device=True)
    check_slots_fit(segments, max_loras)
    check_aligned("entries", entries)
    check_aligned("segments.tiles", segments.tiles)
    if max_rank * in_features * x.dtype.itemsize > _BLOCK_LIMIT:
        raise ArgumentError(
            f"max_rank {max_rank} times in_features {in_features} makes a factor of over "
            f"{_BLOCK_LIMIT} bytes, more than the kernels address"
        )
    return LoraInputs(
        x,
        segments,
        routing,
        entries,
        slices,
        max_loras,
        in_features,
        max_rank,
        x_rows,
        status_pointer(status),
        bool(plan_settled),
    )


def pack_slices(slices: Sequence[LoraSlice], block_columns: int) -> tuple[bytes, int]:
    """SliceColumns of lora/slot_entry.cuh, and the column blocks of all slices together."""
    return _packed_slices(tuple(slices), block_columns)


@functools.lru_cache(maxsize=4096)
def _packed_slices(slices: tuple[LoraSlice, ...], block_columns: int) -> tuple[bytes, int]:
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


def vector_columns(y: Array, slices: Sequence[LoraSlice]) -> bool:
    """Whether 8 neighbouring columns of every slice, from its first on, are 16 aligned bytes."""
    return vector_aligned(y) and all(
        part.y_stride == 1 and part.y_column * y.dtype.itemsize % 16 == 0 for part in slices
    )
