"""Down projection's rows -> one output row a token: the weighted sum over its experts.

In: y by row or pair, the router's weights and the Routing. Out: [T, H].
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cupylora.checks import FLOATS, check_array, check_choice
from cupylora.reference._numeric import ieee_arithmetic, narrow, widen
from cupylora.reference._output import output_array
from cupylora.reference._rows import ValidRows, valid_rows
from cupylora.worklists import Array, Routing

__all__ = ["check_sum", "finalize", "weighted_sum"]

Float32 = npt.NDArray[np.float32]


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
    """``out[t] = residual[t] + Σ_j weights[t, j] · (y[row of (t, j)] + bias[expert])``.

    y: [R, H], bfloat16, float16 or float32, by ``y_rows``.
    weights: float32 [T, k], whatever the routing's row order.
    bias: [E, H] by local expert; residual: [T, H], which may be ``out``; all of y's dtype.
    The sum is float32, begins with the residual (or 0), follows j and is rounded once. A choice
    whose expert is not ours is skipped; a token with no choice of ours becomes 0 or its residual.

    Raises ArgumentError naming an array that does not fit.
    """
    rows = valid_rows(routing)
    check_choice("y_rows", y_rows, ("pair", "row"))
    result = check_sum(y, weights, routing, bias, residual, out)
    with ieee_arithmetic():
        values = widen(y[rows.index(y_rows)])
        if bias is not None:
            values += widen(bias)[rows.expert]
        result[:] = narrow(weighted_sum(values, weights, routing, rows, residual), y.dtype)
    return result


def check_sum(
    y: Array,
    weights: Array,
    routing: Routing,
    bias: Array | None,
    residual: Array | None,
    out: Array | None,
) -> npt.NDArray[Any]:
    """Check the operands of a weighted sum; returns ``out`` or a new array."""
    check_array("y", y, dtype=FLOATS, shape=(routing.num_rows, None), on_device=False)
    hidden, tokens, top_k = y.shape[1], routing.num_tokens, routing.top_k
    check_array(
        "weights", weights, dtype=np.dtype(np.float32), shape=(tokens, top_k), on_device=False
    )
    if bias is not None:
        shape = (routing.num_experts, hidden)
        check_array("bias", bias, dtype=y.dtype, shape=shape, on_device=False)
    if residual is not None:
        check_array("residual", residual, dtype=y.dtype, shape=(tokens, hidden), on_device=False)
    return output_array("out", out, (tokens, hidden), y.dtype)


def weighted_sum(
    values: Float32, weights: Array, routing: Routing, rows: ValidRows, residual: Array | None
) -> Float32:
    """Sum over each token's choices, in order, of weight times ``values`` [valid rows, H]."""
    tokens, top_k = routing.num_tokens, routing.top_k
    choice = rows.pair // max(1, tokens) if routing.row_order == "k_major" else rows.pair % top_k
    shape = (tokens, values.shape[1])
    total = np.zeros(shape, np.float32) if residual is None else widen(residual)
    for j in range(top_k):
        mine = np.flatnonzero(choice == j)
        token = rows.token[mine]
        total[token] += weights[token, j][:, None] * values[mine]
    return total
