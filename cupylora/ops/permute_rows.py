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
    vector_aligned,
)
from cupylora.worklists import Array, Routing

__all__ = ["permute_rows"]

_TYPES = ("ptr", "ptr", "ptr", "i32", "i32", "i32", "i32", "i32", "i32", "ptr")
_THREADS = 256


@device_op(reference.permute_rows)
def permute_rows(x: Array, routing: Routing, *, out: Array | None = None) -> Array:
    check_routing(routing, on_device=True)
    check_array("x", x, dtype=FLOATS, shape=(routing.num_tokens, None), on_device=True)
    result = output("out", out, (routing.num_rows, x.shape[1]), x.dtype)
    args = (
        address(x),
        address(routing.row_to_pair),
        address(routing.expert_first_token_offset),
        routing.num_experts,
        *route_arguments(routing),
        x.shape[1],
        int(vector_aligned(x) and vector_aligned(result)),
        address(result),
    )
    if result.size:
        kernel = f"permute_{kernel_dtype(x)}"
        enqueue("rows", kernel, _TYPES, (routing.num_rows,), _THREADS, args)
    return result
