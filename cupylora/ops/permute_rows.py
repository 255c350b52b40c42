"""Tokens' inputs into row order, on the device (moe/rows.cu). In: x [T, H]. Out: [R, H]."""

from __future__ import annotations

from cupylora import reference
from cupylora.checks import FLOATS, check_array, check_routing
from cupylora.ops._device import (
    address,
    device_op,
    enqueue,
    kernel_dtype,
    output,
    route_arguments,
)
from cupylora.ops._row_items import all_vectors, row_items
from cupylora.worklists import Array, Routing

__all__ = ["permute_rows"]

_ITEMS_AHEAD = 4
"""kPermuteAhead of moe/rows.cu."""

_TYPES = ("ptr", "ptr", "ptr", *("i32",) * 5, "u32", "u32", "u32", "ptr")


@device_op(reference.permute_rows)
def permute_rows(x: Array, routing: Routing, *, out: Array | None = None) -> Array:
    check_routing(routing, on_device=True)
    check_array("x", x, dtype=FLOATS, shape=(routing.num_tokens, None), on_device=True)
    width = x.shape[1]
    result = output("out", out, (routing.num_rows, width), x.dtype)
    if result.size == 0:
        return result
    vector = all_vectors(x, result)
    ahead = _ITEMS_AHEAD if vector else 1
    items = row_items(routing.num_rows, width, x.dtype.itemsize, ahead=ahead)
    args = (
        address(x),
        address(routing.row_to_pair),
        address(routing.expert_first_token_offset),
        routing.num_experts,
        *route_arguments(routing),
        width,
        items.blocks,
        items.count,
        items.per_warp,
        address(result),
    )
    program = "rows" if vector else "rows_unaligned"
    kernel = f"permute_{kernel_dtype(x)}"
    enqueue(program, kernel, _TYPES, items.grid, items.threads, args, dependent=True)
    return result
