"""Slot of each token -> what that slot holds, on the device (route/pointers.cu).

In: ``token_to_slot`` and rows of the slot table. Out: a TokenLora for ``pointer_expand``.
"""

from __future__ import annotations

from cupylora import reference
from cupylora.checks import INT32, check_array, check_choice, check_int, check_slot_entries
from cupylora.ops._device import (
    address,
    blocks_for,
    check_aligned,
    device_op,
    enqueue,
    output,
    status_pointer,
)
from cupylora.outputs import token_lora_output
from cupylora.shapes import MAX_RANK
from cupylora.worklists import PACKED, ROW_MAJOR, Array, TokenLora

__all__ = ["slot_lookup"]

_THREADS = 256
_TYPES = ("ptr", "i32", "ptr", *("i32",) * 4, *("ptr",) * 6, "ptr")
_FIELDS = ("rank", "a_ptr", "b_ptr", "a_stride", "b_stride", "scale")


@device_op(reference.slot_lookup)
def slot_lookup(
    token_to_slot: Array,
    table: Array,
    *,
    max_rank: int = MAX_RANK,
    a_layout: int = ROW_MAJOR,
    out: TokenLora | None = None,
    status: Array | None = None,
) -> TokenLora:
    max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
    check_choice("a_layout", a_layout, (ROW_MAJOR, PACKED))
    modules, max_loras = check_slot_entries("table", table, on_device=True)
    check_aligned("table", table)
    check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(None,), on_device=True)
    tokens = len(token_to_slot)
    result = token_lora_output(output, out, modules, tokens)
    args = (
        address(token_to_slot),
        tokens,
        address(table),
        modules,
        max_loras,
        max_rank,
        a_layout,
        *(address(getattr(result, f)) for f in _FIELDS),
        status_pointer(status),
    )
    grid = (blocks_for(modules * tokens, _THREADS),)
    enqueue("pointers", "slot_lookup", _TYPES, grid, _THREADS, args)
    return result
