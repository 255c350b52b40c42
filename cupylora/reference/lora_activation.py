"""Deltas of gate and up, and the activation of their sums with the base outputs: one op.

In: x, the first projection's base output y, the work list. Out: the down projection's input [R, I].
"""

from __future__ import annotations

from typing import Any, Literal

from cupylora.activations import activation_form
from cupylora.checks import FLOATS, check_array, check_choice
from cupylora.reference._numeric import ieee_arithmetic, narrow, widen
from cupylora.reference._output import output_array
from cupylora.reference._row_deltas import row_deltas
from cupylora.reference._rows import RowIndex, valid_rows
from cupylora.reference.activation import activated
from cupylora.shapes import ActivationKind, GateUpLayout
from cupylora.worklists import Array, Routing, Segments

__all__ = ["lora_activation"]


def lora_activation(
    x: Array,
    y: Array,
    segments: Segments,
    routing: Routing,
    entries: Array,
    *,
    in_features: int,
    max_rank: int,
    kind: ActivationKind,
    gated: bool,
    layout: GateUpLayout = "gate_first",
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: Array | None = None,
    x_rows: RowIndex = "token",
    rows: Literal["pair", "row"] = "pair",
    out: Array | None = None,
    workspace: Any = None,
    status: Array | None = None,
    plan_settled: bool = False,
) -> Array:
    """``out[row] = act(gate + its delta (+ bias), up + its delta (+ bias))`` for every valid row.

    x: [T or R, in_features] by ``x_rows``, as in ``lora_delta``.
    y: [R, width] of x's dtype, the base outputs of gate and up by ``rows``, read once and left
    alone; width is 2·I when gated, I otherwise.
    entries: uint8 [2, max_loras, 48], slot-table rows of gate and of up; [1, ...], of up, when not
    gated.
    kind, gated, layout, alpha, limit: as in ``activation``. bias: [E, width] of x's dtype, by local
    expert. out: [R, I] of x's dtype, laid out as y; ghost rows and pairs whose expert is not ours
    are left as they were (zeros if it is allocated).
    workspace: ``lora_workspace_bytes`` for as many slices as ``entries`` has, on the device.
    status, plan_settled: as in ``lora_delta``.

    Gate and up stay float32 from the base output through delta and bias to the activation, and the
    result is rounded once: ``lora_delta`` followed by ``activation`` rounds y in between, so the
    last bits of rows with a delta differ. Rows without one have the bits of ``activation``.

    Raises ArgumentError naming an argument that does not fit, before ``out`` is touched.
    """
    form = activation_form(kind, gated, layout, alpha, limit)
    check_choice("rows", rows, ("pair", "row"))
    valid = valid_rows(routing)
    check_array("y", y, dtype=FLOATS, shape=(routing.num_rows, None), on_device=False)
    width = y.shape[1]
    hidden = form.hidden("y", width)
    columns = form.columns(hidden)
    deltas = row_deltas(
        x,
        segments,
        routing,
        valid,
        entries,
        len(columns),
        hidden,
        in_features=in_features,
        max_rank=max_rank,
        x_rows=x_rows,
        status=status,
    )
    check_array("y", y, dtype=x.dtype, on_device=False)
    if bias is not None:
        shape = (routing.num_experts, width)
        check_array("bias", bias, dtype=y.dtype, shape=shape, on_device=False)
    result = output_array("out", out, (len(y), hidden), y.dtype)

    index = valid.index(rows)
    with ieee_arithmetic():
        values = widen(y[index])
        for module, part, delta in deltas:
            values[part, columns[module]] += delta
        if bias is not None:
            values += widen(bias)[valid.expert]
        result[index] = narrow(activated(values, form), y.dtype)
    return result
