"""Rows of the down projection -> weighted sum of every token, on the device (moe/rows.cu)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from cupylora import reference
from cupylora.checks import FLOATS, check_array, check_choice, check_routing
from cupylora.ops._device import (
    address,
    blocks_for,
    device_op,
    enqueue,
    kernel_dtype,
    output,
    route_arguments,
)
from cupylora.worklists import Array, Routing

__all__ = ["finalize"]

_THREADS = 256
_TYPES = ("ptr", "ptr", "ptr", "ptr", *("i32",) * 6, "ptr", "ptr", "ptr")


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
        address(result),
    )
    if result.size:
        grid = (tokens, blocks_for(hidden, 4 * _THREADS))
        kernel = f"finalize_{kernel_dtype(y)}"
        enqueue("rows", kernel, _TYPES, grid, _THREADS, args, smem=2 * top_k * 4)
    return result
