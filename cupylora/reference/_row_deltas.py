"""The deltas of a work list as float32 rows, for ops that go on with them before any rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.checks import (
    FLOATS,
    INT32_MAX,
    check_array,
    check_choice,
    check_int,
    check_segments,
    check_slot_entries,
    check_slots_fit,
    check_status,
)
from cupylora.reference._numeric import widen
from cupylora.reference._rows import RowIndex, ValidRows
from cupylora.reference.lora_delta import _checked_entries, _delta, _merge_tiles
from cupylora.shapes import MAX_RANK
from cupylora.worklists import SLOT_ENTRY, Array, Routing, Segments

__all__ = ["row_deltas"]

Delta = tuple[int, slice, npt.NDArray[np.float32]]
"""(module, valid rows, delta [rows, out_features])."""


def row_deltas(
    x: Array,
    segments: Segments,
    routing: Routing,
    rows: ValidRows,
    entries: Array,
    modules: int,
    out_features: int,
    *,
    in_features: Any,
    max_rank: Any,
    x_rows: RowIndex,
    status: Array | None,
) -> Iterator[Delta]:
    """``scale · (x Aᵀ) Bᵀ`` of every run of rows and module that has one, checked before the first.

    Arguments as ``lora_delta``'s; the ``modules`` are of one width, and entries' rows in order.
    Raises ArgumentError as ``lora_delta`` does.
    """
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    check_choice("x_rows", x_rows, ("token", "pair", "row"))
    check_status(status, on_device=False)
    check_segments(segments, on_device=False)
    length = routing.num_tokens if x_rows == "token" else routing.num_rows
    check_array("x", x, dtype=FLOATS, shape=(length, in_features), on_device=False)
    _, max_loras = check_slot_entries("entries", entries, modules=modules, on_device=False)
    check_slots_fit(segments, max_loras)
    runs = _merge_tiles(segments, len(rows), routing.num_experts, max_loras)
    table = entries.view(SLOT_ENTRY)[..., 0]
    ranks = _checked_entries(table, runs, max_rank, status)
    index = rows.index(x_rows)

    def deltas() -> Iterator[Delta]:
        for run in runs:
            part = slice(run.first, run.stop)
            inputs = widen(x[index[part]])
            expert = run.expert + routing.start_expert
            for module in np.flatnonzero(ranks[:, run.slot]).tolist():
                entry = table[module, run.slot]
                yield module, part, _delta(inputs, entry, expert, out_features, x.dtype)

    return deltas()
