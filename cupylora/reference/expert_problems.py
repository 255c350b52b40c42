"""Offsets of the sorted rows -> one GEMM problem per local expert, for the base expert weights.

In: a Routing. Out: GemmProblems for ``grouped_gemm``: y = x Wᵀ over each expert's rows.
"""

from __future__ import annotations

import numpy as np

from cupylora.checks import INT32_MAX, check_int
from cupylora.outputs import problems_output
from cupylora.reference._output import output_array
from cupylora.reference._rows import valid_rows
from cupylora.worklists import GemmProblems, Routing

__all__ = ["expert_problems"]


def expert_problems(
    routing: Routing,
    *,
    x_ptr: int,
    w_ptr: int,
    y_ptr: int,
    itemsize: int,
    in_features: int,
    out_features: int,
    ldx: int | None = None,
    ldy: int | None = None,
    out: GemmProblems | None = None,
) -> GemmProblems:
    """E problems; problem e takes the rows of local expert e, which may be none (m = 0).

    x_ptr, y_ptr: addresses of row 0 of the permuted x [R, ldx] and y [R, ldy]; ldx and ldy, in
    elements, default to in_features and out_features.
    w_ptr: address of the local experts' weights [E, out_features, in_features].
    itemsize: bytes of an element of all three.

    Raises ArgumentError naming an argument that does not fit.
    """
    valid_rows(routing)
    experts = routing.num_experts
    x_ptr, w_ptr, y_ptr = (
        check_int(name, value, 0)
        for name, value in (("x_ptr", x_ptr), ("w_ptr", w_ptr), ("y_ptr", y_ptr))
    )
    itemsize = check_int("itemsize", itemsize, 1)
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    out_features = check_int("out_features", out_features, 1, INT32_MAX)
    ldx = check_int("ldx", in_features if ldx is None else ldx, in_features)
    ldy = check_int("ldy", out_features if ldy is None else ldy, out_features)
    result = problems_output(output_array, out, experts)
    first = routing.expert_first_token_offset[:-1].astype(np.uint64)
    result.m[:] = np.diff(routing.expert_first_token_offset)
    result.n[:] = out_features
    result.k[:] = in_features
    result.a[:] = np.uint64(x_ptr) + first * np.uint64(ldx * itemsize)
    result.b[:] = np.uint64(w_ptr) + np.arange(experts, dtype=np.uint64) * np.uint64(
        out_features * in_features * itemsize
    )
    result.d[:] = np.uint64(y_ptr) + first * np.uint64(ldy * itemsize)
    result.lda[:] = ldx
    result.ldb[:] = in_features
    result.ldd[:] = ldy
    result.alpha[:] = 1
    result.count[0] = experts
    return result
