"""Room for a list of GEMM problems: allocated, or the caller's once checked."""

from __future__ import annotations

import numpy as np

from cupylora.checks import check_gemm_problems
from cupylora.errors import ArgumentError
from cupylora.worklists import GemmProblems

__all__ = ["problems_output"]


def problems_output(name: str, out: GemmProblems | None, room: int) -> GemmProblems:
    """``out``, which must have room for exactly ``room`` problems, or zeros of that room."""
    if out is None:
        m, n, k = (np.zeros(room, np.int32) for _ in range(3))
        a, b, d = (np.zeros(room, np.uint64) for _ in range(3))
        lda, ldb, ldd = (np.zeros(room, np.int64) for _ in range(3))
        alpha, count = np.zeros(room, np.float32), np.zeros(1, np.int32)
        return GemmProblems(m, n, k, a, b, d, lda, ldb, ldd, alpha, count)
    got = check_gemm_problems(out, on_device=False, name=name)
    if got != room:
        raise ArgumentError(f"{name} has room for {got} problems; {room} is needed")
    return out
