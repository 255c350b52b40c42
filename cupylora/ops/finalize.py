"""Rows of the down projection -> weighted sum of every token, on the device (moe/rows.cu)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from cupylora import reference
from cupylora.checks import FLOATS, check_array, check_choice, check_routing
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

__all__ = ["finalize"]

_TYPES = ("ptr", "ptr", "ptr", "ptr", *("i32",) * 6, "ptr", "ptr", "u32", "u32", "ptr")


@device_op(reference.finalize)
def finalize(
    y: Array,
    weights: Array,
    routing: Routing,
    *,
    y_rows: Literal["pair", "row"] = "pair",
    bias: Array | None = None,
    residual: Array | None = None,
    out: Array | None = None,
) -> Array:
    check_routing(routing, on_device=True)
    check_choice("y_rows", y_rows, ("pair", "row"))
    check_array("y", y, dtype=FLOATS, shape=(routing.num_rows, None), on_device=True)
    hidden, tokens, top_k = y.shape[1], routing.num_tokens, routing.top_k
    shape = (tokens, top_k)
    check_array("weights", weights, dtype=np.dtype(np.float32), shape=shape, on_device=True)
    if bias is not None:
        shape = (routing.num_experts, hidden)
        check_array("bias", bias, dtype=y.dtype, shape=shape, on_device=True)
    if residual is not None:
        check_array("residual", residual, dtype=y.dtype, shape=(tokens, hidden), on_device=True)
    result = output("out", out, (tokens, hidden), y.dtype)
    if result.size == 0:
        return result
    items = row_items(tokens, hidden, y.dtype.itemsize)
    args = (
        address(y),
        address(weights),
        address(routing.pair_to_row),
        address(routing.expert_first_token_offset),
        routing.num_experts,
        *route_arguments(routing),
        hidden,
        int(y_rows == "pair"),
        address(bias),
        address(residual),
        items.blocks,
        items.count,
        address(result),
    )
    program = "rows" if all_vectors(y, result, bias, residual) else "rows_unaligned"
    kernel = f"finalize_{'bare' if bias is None else 'bias'}_{kernel_dtype(y)}"
    enqueue(program, kernel, _TYPES, items.grid, items.threads, args, dependent=True)
    return result
