"""Shrink and expand of every tile, added into y in place: LoRA itself.

In: x, the tiles of ``build_segments`` and the slot entries of the modules that share x. Out: y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cupylora.checks import (
    FLOATS,
    INT32_MAX,
    check_array,
    check_choice,
    check_int,
    check_segments,
    check_slices,
    check_slot_entries,
    check_slots_fit,
    check_status,
)
from cupylora.errors import ArgumentError
from cupylora.reference._memory import matrix_at, shrink_factor_at
from cupylora.reference._numeric import ieee_arithmetic, matmul_rows, narrow, widen
from cupylora.reference._output import checked_ranks
from cupylora.reference._rows import RowIndex, valid_rows
from cupylora.shapes import MAX_RANK
from cupylora.worklists import (
    PACKED,
    ROW_MAJOR,
    SLOT_ENTRY,
    Array,
    LoraSlice,
    Routing,
    Segments,
)

__all__ = ["LoraSlice", "lora_delta"]


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
    kernel: Literal["auto", "pair", "cluster", "ring"] = "auto",
    max_active: int | None = None,
    plan_settled: bool = False,
) -> None:
    """``y[row, columns of slice] += scale · (x[row] Aᵀ) Bᵀ`` for every row of every tile.

    x: [T or R, in_features] by ``x_rows`` ("token", or "pair" or "row"), bfloat16, float16 or
    float32; the factors have its dtype.
    y: [R, width] of x's dtype, by ``y_rows`` ("pair" or "row"), updated in place. Rows in no tile,
    and rows whose slot has rank 0 for a slice, keep their bits there.
    entries: uint8 [len(slices), max_loras, 48], row i the slot-table row of slice i; A row-major or
    packed. A factor lies at its base + (local expert + start_expert) · stride.
    workspace: for the device; the reference has no use for it, nor for the next three.
    kernel: "pair" (two launches; any device, dtype and alignment), "cluster" or "ring" asks for one
    of the kernels, which all give the same bits; "auto" chooses by sizes.
    max_active: most distinct adapters that the batch can hold, if known: it guides the choice of
    the kernel and the size of the launch, and a wrong value costs time only.
    plan_settled: ``segments`` and ``routing`` were complete on the device before the work directly
    ahead in the stream began, so that the kernel may read them while that still runs. False where
    that work is a kernel which lets this one start before it has itself waited for what made them:
    lists that change while they are read can hang a kernel.

    The product is float32 throughout and y is rounded once. Raises ArgumentError, before y is
    touched, naming an argument that does not fit or an entry in use whose rank is below 0 or above
    ``max_rank``; with ``status`` (int32 [1]) the latter sets STATUS_BAD_RANK instead and the entry
    counts as rank 0.
    """
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    check_choice("x_rows", x_rows, ("token", "pair", "row"))
    check_choice("y_rows", y_rows, ("pair", "row"))
    check_choice("kernel", kernel, ("auto", "pair", "cluster", "ring"))
    if max_active is not None:
        check_int("max_active", max_active, 0)
    check_status(status, on_device=False)
    check_segments(segments, on_device=False)
    rows = valid_rows(routing)
    length = routing.num_tokens if x_rows == "token" else routing.num_rows
    check_array("x", x, dtype=FLOATS, shape=(length, in_features), on_device=False)
    shape = (routing.num_rows, None)
    check_array("y", y, dtype=x.dtype, shape=shape, writable=True, on_device=False)
    check_slices(slices, y.shape[1])
    _, max_loras = check_slot_entries("entries", entries, modules=len(slices), on_device=False)
    check_slots_fit(segments, max_loras)
    runs = _merge_tiles(segments, len(rows), routing.num_experts, max_loras)

    table = entries.view(SLOT_ENTRY)[..., 0]
    ranks = _checked_entries(table, runs, max_rank, status)
    x_index, y_index = rows.index(x_rows), rows.index(y_rows)
    with ieee_arithmetic():
        for run in runs:
            inputs = widen(x[x_index[run.first : run.stop]])
            expert = run.expert + routing.start_expert
            for part, entry, rank in zip(
                slices, table[:, run.slot], ranks[:, run.slot], strict=True
            ):
                if rank > 0:
                    delta = _delta(inputs, entry, expert, part.out_features, x.dtype)
                    target = y[:, part.y_column :: part.y_stride][:, : part.out_features]
                    _add(target, y_index[run.first : run.stop], delta)


@dataclass(frozen=True)
class _Run:
    """Adjacent tiles of one segment, as one range of rows."""

    first: int
    stop: int
    expert: int
    slot: int


def _merge_tiles(segments: Segments, num_rows: int, num_experts: int, max_loras: int) -> list[_Run]:
    count = check_int("segments.tile_count[0]", segments.tile_count[0], 0, len(segments.tiles))
    tiles = segments.tiles[:count].astype(np.int64)
    first, rows, expert, slot = tiles[:, :4].T
    for name, bad in (
        ("row range", (first < 0) | (rows < 0) | (first + rows > num_rows)),
        ("expert", (expert < 0) | (expert >= num_experts)),
        ("slot", (slot < 0) | (slot >= max_loras)),
    ):
        if bad.any():
            tile = int(np.argmax(bad))
            raise ArgumentError(
                f"segments.tiles[{tile}] is {tiles[tile, :4].tolist()}: its {name} does not fit "
                f"{num_rows} rows, {num_experts} experts and {max_loras} slots"
            )
    if count == 0:
        return []
    joins = (first[1:] == (first + rows)[:-1]) & (tiles[1:, 2:4] == tiles[:-1, 2:4]).all(axis=1)
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    ends = np.append(starts[1:], count) - 1
    return [
        _Run(int(first[s]), int(first[e] + rows[e]), int(expert[s]), int(slot[s]))
        for s, e in zip(starts, ends, strict=True)
    ]


def _checked_entries(
    table: npt.NDArray[Any], runs: Sequence[_Run], max_rank: int, status: Array | None
) -> npt.NDArray[np.int32]:
    """Ranks [slices, max_loras] of the slots that ``runs`` use, 0 for the others."""
    used = np.zeros(table.shape[1], dtype=bool)
    used[[run.slot for run in runs]] = True
    ranks = checked_ranks(
        np.where(used, table["rank"], 0), max_rank, status, "entries [slice, slot]"
    )
    null = (table["a_ptr"] == 0) | (table["b_ptr"] == 0)
    unknown = ~np.isin(table["a_layout"], (ROW_MAJOR, PACKED))
    for bad, what in (
        (null, "a null factor address"),
        (unknown, f"an a_layout other than ROW_MAJOR ({ROW_MAJOR}) and PACKED ({PACKED})"),
    ):
        if (bad & (ranks > 0)).any():
            place = [int(i) for i in np.argwhere(bad & (ranks > 0))[0]]
            raise ArgumentError(f"entries [slice, slot] {place} has {what} at rank above 0")
    return ranks


def _delta(
    x: npt.NDArray[np.float32],
    entry: Any,
    expert: int,
    out_features: int,
    dtype: np.dtype[Any],
) -> npt.NDArray[np.float32]:
    rank = int(entry["rank"])
    a_ptr = int(entry["a_ptr"]) + expert * int(entry["a_expert_stride"])
    b_ptr = int(entry["b_ptr"]) + expert * int(entry["b_expert_stride"])
    a = shrink_factor_at(a_ptr, rank, x.shape[1], int(entry["a_layout"]), dtype)
    b = matrix_at(b_ptr, out_features, rank, rank, dtype)
    delta = matmul_rows(matmul_rows(x, widen(a)), widen(b))
    delta *= entry["scale"]
    return delta


def _add(y: npt.NDArray[Any], index: npt.NDArray[np.int64], delta: npt.NDArray[np.float32]) -> None:
    y[index] = narrow(widen(y[index]) + delta, y.dtype)
