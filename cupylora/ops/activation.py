"""First projection's output -> input of the down projection, on the device (moe/rows.cu)."""

from __future__ import annotations

from typing import Literal

from cupylora import reference
from cupylora.checks import FLOATS, check_array, check_choice, check_number, check_routing
from cupylora.errors import ArgumentError
from cupylora.ops._device import address, blocks_for, device_op, enqueue, kernel_dtype, output
from cupylora.shapes import ActivationKind, GateUpLayout
from cupylora.worklists import Array, Routing

__all__ = ["activation"]

_KINDS = ("silu", "gelu", "relu2", "swiglu_oai")
_LAYOUTS = ("gate_first", "up_first", "interleaved")
_THREADS = 256
_TYPES = ("ptr", *("i32",) * 5, "f32", "f32", "ptr", "ptr", "ptr", "i32", "i32", "ptr")


@device_op(reference.activation)
def activation(
    x: Array,
    *,
    kind: ActivationKind,
    gated: bool,
    layout: GateUpLayout = "gate_first",
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: Array | None = None,
    routing: Routing | None = None,
    rows: Literal["pair", "row"] = "pair",
    out: Array | None = None,
) -> Array:
    check_choice("kind", kind, _KINDS)
    check_choice("layout", layout, _LAYOUTS)
    check_choice("rows", rows, ("pair", "row"))
    alpha, limit = check_number("alpha", alpha), check_number("limit", limit)
    if kind == "swiglu_oai" and not gated:
        raise ArgumentError("kind 'swiglu_oai' is a gated activation; gated=True is needed")
    if routing is not None:
        check_routing(routing, on_device=True)
    length = None if routing is None else routing.num_rows
    check_array("x", x, dtype=FLOATS, shape=(length, None), on_device=True)
    count, width = x.shape
    if gated and width % 2:
        raise ArgumentError(f"x has {width} columns; gate and up need an even number")
    if bias is not None:
        if routing is None:
            raise ArgumentError("bias is given without routing, which tells each row's expert")
        shape = (routing.num_experts, width)
        check_array("bias", bias, dtype=x.dtype, shape=shape, on_device=True)
    hidden = width // 2 if gated else width
    result = output("out", out, (count, hidden), x.dtype, zero=True)
    args = (
        address(x),
        count,
        hidden,
        _KINDS.index(kind),
        int(gated),
        _LAYOUTS.index(layout),
        alpha,
        limit,
        address(bias),
        0 if routing is None else address(routing.row_to_pair),
        0 if routing is None else address(routing.expert_first_token_offset),
        0 if routing is None else routing.num_experts,
        int(rows == "pair"),
        address(result),
    )
    if result.size:
        grid = (count, blocks_for(hidden, 4 * _THREADS))
        enqueue("rows", f"activation_{kernel_dtype(x)}", _TYPES, grid, _THREADS, args)
    return result
