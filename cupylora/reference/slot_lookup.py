"""Slot of each token -> what that slot holds, module by module.

In: ``token_to_slot`` and rows of the slot table. Out: a TokenLora for ``pointer_expand``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.checks import (
    INT32,
    check_array,
    check_choice,
    check_int,
    check_slot_entries,
    check_status,
)
from cupylora.errors import ArgumentError
from cupylora.outputs import token_lora_output
from cupylora.reference._output import checked_ranks, checked_slots, output_array
from cupylora.shapes import MAX_RANK
from cupylora.worklists import (
    PACKED,
    ROW_MAJOR,
    SLOT_ENTRY,
    STATUS_BAD_LAYOUT,
    Array,
    TokenLora,
)

__all__ = ["slot_lookup"]

_LAYOUTS = {ROW_MAJOR: "row-major", PACKED: "packed"}

_FIELDS: tuple[tuple[str, str], ...] = (
    ("a_ptr", "a_ptr"),
    ("b_ptr", "b_ptr"),
    ("a_stride", "a_expert_stride"),
    ("b_stride", "b_expert_stride"),
    ("scale", "scale"),
)


def slot_lookup(
    token_to_slot: Array,
    table: Array,
    *,
    max_rank: int = MAX_RANK,
    a_layout: int = ROW_MAJOR,
    out: TokenLora | None = None,
    status: Array | None = None,
) -> TokenLora:
    """Rank, addresses, strides and scale of every token's slot, [M, T] each.

    token_to_slot: int32 [T]; negative for no adapter.
    table: uint8 [M, max_loras, 48], the bytes of M rows of SLOT_ENTRY records.
    a_layout: the layout of A that whoever reads the addresses understands: ROW_MAJOR for
    ``grouped_gemm`` and other general GEMMs.
    A token of no adapter, or whose slot has rank 0 for the module, gets zeros throughout.

    Raises ArgumentError for a slot >= max_loras, and for a rank below 0 or above ``max_rank`` or an
    A in another layout in an entry that a token uses; with ``status`` (int32 [1]) each sets its bit
    instead and counts as no adapter.
    """
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    check_choice("a_layout", a_layout, (ROW_MAJOR, PACKED))
    modules, max_loras = check_slot_entries("table", table, on_device=False)
    check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(None,), on_device=False)
    check_status(status, on_device=False)
    result = token_lora_output(output_array, out, modules, len(token_to_slot))
    slots = checked_slots(token_to_slot, max_loras, status)
    entries: npt.NDArray[Any] = table.view(SLOT_ENTRY)[..., 0]
    found = entries[:, np.maximum(slots, 0)]
    ranks = np.where(slots < 0, 0, found["rank"])
    ranks = checked_ranks(ranks, max_rank, status, "[module, token]")
    result.rank[:] = _readable(ranks, found["a_layout"], a_layout, status)
    for field, entry_field in _FIELDS:
        values = getattr(result, field)
        values[:] = np.where(result.rank > 0, found[entry_field], values.dtype.type(0))
    return result


def _readable(
    ranks: npt.NDArray[np.int32],
    layouts: npt.NDArray[np.int32],
    needed: int,
    status: Array | None,
) -> npt.NDArray[np.int32]:
    bad = (ranks > 0) & (layouts != needed)
    if not bad.any():
        return ranks
    if status is None:
        module, token = (int(i) for i in np.argwhere(bad)[0])
        raise ArgumentError(
            f"the entry of module {module}, token {token} holds A "
            f"{_LAYOUTS.get(int(layouts[module, token]), 'in an unknown layout')}, but its reader "
            f"needs it {_LAYOUTS[needed]}; make the table with "
            f"SlotTable(..., a_layout={'PACKED' if needed == PACKED else 'ROW_MAJOR'})"
        )
    status[0] |= STATUS_BAD_LAYOUT
    return np.where(bad, 0, ranks).astype(np.int32)
