"""Token rows -> rows in sorted order, for GEMMs that want their input contiguous per expert.

In: x by token and a Routing. Out: x by row.
"""

from __future__ import annotations

from cupylora.checks import FLOATS, check_array
from cupylora.reference._output import output_array
from cupylora.reference._rows import valid_rows
from cupylora.worklists import Array, Routing

__all__ = ["permute_rows"]


def permute_rows(x: Array, routing: Routing, *, out: Array | None = None) -> Array:
    """``out[r] = x[token of row r]`` [R, H]; ghost rows become zeros.

    x: [T, H], bfloat16, float16 or float32; out has its dtype. Raises ArgumentError naming an array
    that does not fit.
    """
    rows = valid_rows(routing)
    check_array("x", x, dtype=FLOATS, shape=(routing.num_tokens, None), on_device=False)
    result = output_array("out", out, (routing.num_rows, x.shape[1]), x.dtype)
    result[: len(rows)] = x[rows.token]
    result[len(rows) :] = 0
    return result
