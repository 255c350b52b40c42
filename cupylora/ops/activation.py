"""First projection's output -> input of the down projection, on the device (moe/rows.cu)."""

from __future__ import annotations

from typing import Literal

from cupylora import reference
from cupylora.activations import activation_form
from cupylora.checks import FLOATS, check_array, check_choice, check_routing
from cupylora.errors import ArgumentError
from cupylora.ops._device import address, device_op, enqueue, kernel_dtype, output
from cupylora.ops._row_items import all_vectors, row_items
from cupylora.shapes import ActivationKind, GateUpLayout
from cupylora.worklists import Array, Routing

__all__ = ["activation"]

_ITEMS_AHEAD = 2
"""kActivationAhead of moe/rows.cu."""

_TYPES = (
    *("ptr", "i32", "i32", "i32", "i32", "f32", "f32"),
    *("ptr", "ptr", "ptr", "i32", "i32", "u32", "u32", "u32", "ptr"),
)


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
    form = activation_form(kind, gated, layout, alpha, limit)
    check_choice("rows", rows, ("pair", "row"))
    if routing is not None:
        check_routing(routing, on_device=True)
    length = None if routing is None else routing.num_rows
    check_array("x", x, dtype=FLOATS, shape=(length, None), on_device=True)
    count, width = x.shape
    hidden = form.hidden("x", width)
    if bias is not None:
        if routing is None:
            raise ArgumentError("bias is given without routing, which tells each row's expert")
        shape = (routing.num_experts, width)
        check_array("bias", bias, dtype=x.dtype, shape=shape, on_device=True)
    result = output("out", out, (count, hidden), x.dtype, zero=True)
    if result.size == 0:
        return result
    vector = all_vectors(x, result, bias)
    items = row_items(count, hidden, x.dtype.itemsize, ahead=_ITEMS_AHEAD if vector else 1)
    args = (
        address(x),
        hidden,
        *form.codes,
        form.alpha,
        form.limit,
        address(bias),
        0 if routing is None else address(routing.row_to_pair),
        0 if routing is None else address(routing.expert_first_token_offset),
        0 if routing is None else routing.num_experts,
        int(rows == "pair"),
        items.blocks,
        items.count,
        items.per_warp,
        address(result),
    )
    program = "rows" if vector else "rows_unaligned"
    kernel = f"activation_{'bare' if bias is None else 'bias'}_{kernel_dtype(x)}"
    enqueue(program, kernel, _TYPES, items.grid, items.threads, args, dependent=True)
    return result
