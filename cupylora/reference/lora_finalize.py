"""Delta of down and the weighted sum over each token's experts: one op.

In: the down projection's input x and base output y, the router's weights, the work list. Out:
[T, H].
"""

from __future__ import annotations

from typing import Any, Literal

from cupylora.checks import check_array, check_choice
from cupylora.reference._numeric import ieee_arithmetic, narrow, widen
from cupylora.reference._row_deltas import row_deltas
from cupylora.reference._rows import valid_rows
from cupylora.reference.finalize import check_sum, weighted_sum
from cupylora.worklists import Array, Routing, Segments

__all__ = ["lora_finalize"]


def lora_finalize(
    x: Array,
    y: Array,
    weights: Array,
    segments: Segments,
    routing: Routing,
    entries: Array,
    *,
    in_features: int,
    max_rank: int,
    x_rows: Literal["pair", "row"] = "pair",
    y_rows: Literal["pair", "row"] = "pair",
    bias: Array | None = None,
    residual: Array | None = None,
    out: Array | None = None,
    workspace: Any = None,
    status: Array | None = None,
    plan_settled: bool = False,
) -> Array:
    """``out[t] = residual[t] + Σ_j weights[t, j] · (y[row] + its delta + bias[expert])``.

    x: [R, in_features] by ``x_rows``: what the down projection multiplies.
    y: [R, H] of x's dtype, its base output by ``y_rows``, read once and left alone.
    weights, bias, residual, out: as in ``finalize``. entries: uint8 [1, max_loras, 48], the
    slot-table row of down. workspace: ``lora_workspace_bytes`` of one slice, on the device.
    status, plan_settled: as in ``lora_delta``.

    A row stays float32 from its base output through delta and bias into the sum, which is rounded
    once: ``lora_delta`` followed by ``finalize`` rounds y in between, so the last bits of tokens
    with a delta differ. Tokens without one have the bits of ``finalize``.

    On the device every (token, choice) reads its own B, and one node and two passes over y are
    saved. That pays where segments hold one or two rows, as in decode; where more rows share an
    adapter's expert, as in prefill, ``lora_delta`` reads B less often and is the better choice.

    Raises ArgumentError naming an argument that does not fit, before ``out`` is touched.
    """
    rows = valid_rows(routing)
    check_choice("x_rows", x_rows, ("pair", "row"))
    check_choice("y_rows", y_rows, ("pair", "row"))
    check_array("y", y, shape=(routing.num_rows, None), on_device=False)
    deltas = row_deltas(
        x,
        segments,
        routing,
        rows,
        entries,
        1,
        y.shape[1],
        in_features=in_features,
        max_rank=max_rank,
        x_rows=x_rows,
        status=status,
    )
    check_array("y", y, dtype=x.dtype, on_device=False)
    result = check_sum(y, weights, routing, bias, residual, out)
    with ieee_arithmetic():
        values = widen(y[rows.index(y_rows)])
        for _, part, delta in deltas:
            values[part] += delta
        if bias is not None:
            values += widen(bias)[rows.expert]
        result[:] = narrow(weighted_sum(values, weights, routing, rows, residual), y.dtype)
    return result
