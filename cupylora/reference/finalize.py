"""Down projection's rows -> one output row a token: the weighted sum over its experts.

In: y by row or pair, the router's weights and the Routing. Out: [T, H].
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from cupylora.checks import FLOATS, check_array, check_choice
from cupylora.reference._numeric import ieee_arithmetic, narrow, widen
from cupylora.reference._output import output_array
from cupylora.reference._rows import valid_rows
from cupylora.worklists import Array, Routing

__all__ = ["finalize"]


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
    result = output_array("out", out, (tokens, hidden), y.dtype)

    index = rows.index(y_rows)
    choice = rows.pair // max(1, tokens) if routing.row_order == "k_major" else rows.pair % top_k
    with ieee_arithmetic():
        total = np.zeros((tokens, hidden), np.float32) if residual is None else widen(residual)
        for j in range(top_k):
            mine = np.flatnonzero(choice == j)
            token = rows.token[mine]
            values = widen(y[index[mine]])
            if bias is not None:
                values += widen(bias[rows.expert[mine]])
            total[token] += weights[token, j][:, None] * values
        result[:] = narrow(total, y.dtype)
    return result
