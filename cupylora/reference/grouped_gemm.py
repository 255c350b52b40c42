"""A list of GEMM problems, given by address, worked off one after the other.

In: GemmProblems of ``build_problems`` or ``expert_problems``. Out: the D matrices, in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.checks import check_choice, check_gemm_problems, check_int
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.reference._memory import matrix_at
from cupylora.reference._numeric import ieee_arithmetic, matmul_rows, narrow, widen
from cupylora.worklists import Array, GemmProblems

__all__ = ["grouped_gemm"]

Float32 = npt.NDArray[np.float32]


def grouped_gemm(
    problems: GemmProblems,
    *,
    dtype: Any,
    out_dtype: Any = None,
    beta: int = 0,
    max_m: int | None = None,
    tile_start: Array | None = None,
) -> None:
    """``D = beta·D + alpha · A[m, k] · B[n, k]ᵀ`` for the first ``count`` problems, float32 sums.

    dtype: type of A and B, "bfloat16", "float16" or "float32"; out_dtype: of D, by default as they.
    beta: 0 (D is written, never read) or 1 (alpha times the sum, plus D, is one operation, rounded
    to float32 once). Where k = 0, D [m, n] becomes zeros with beta 0 and is left alone with beta 1;
    where m or n = 0 there is no D.
    max_m: the largest m to expect, a hint that the reference does not need.
    tile_start: int32 [P+1] of workspace for the device; the reference has no use for it.
    Addresses are host addresses, aligned to their element at least.

    Raises ArgumentError, before anything is written, naming the problem for a negative size, a
    leading dimension smaller than its row, or a null address that would be used.
    """
    capacity = check_gemm_problems(problems, on_device=False)
    dtype = resolve_dtype(dtype)
    out_dtype = dtype if out_dtype is None else resolve_dtype(out_dtype, "out_dtype")
    check_choice("beta", beta, (0, 1))
    if max_m is not None:
        check_int("max_m", max_m, 0)
    count = check_int("problems.count[0]", problems.count[0], 0, capacity)
    _check_problems(problems, count)
    used = (problems.m[:count] > 0) & (problems.n[:count] > 0)
    if beta:
        used &= problems.k[:count] > 0
    with ieee_arithmetic():
        for problem in np.flatnonzero(used):
            _multiply(problems, int(problem), dtype, out_dtype, beta)


def _multiply(
    problems: GemmProblems, p: int, dtype: np.dtype[Any], out_dtype: np.dtype[Any], beta: int
) -> None:
    m, n, k = int(problems.m[p]), int(problems.n[p]), int(problems.k[p])
    d = matrix_at(int(problems.d[p]), m, n, int(problems.ldd[p]), out_dtype)
    if k == 0:
        d[:] = 0
        return
    a = matrix_at(int(problems.a[p]), m, k, int(problems.lda[p]), dtype)
    b = matrix_at(int(problems.b[p]), n, k, int(problems.ldb[p]), dtype)
    product = matmul_rows(widen(a), widen(b))
    alpha = problems.alpha[p]
    total = _multiply_add(alpha, product, widen(d)) if beta else alpha * product
    d[:] = narrow(total, out_dtype)


def _multiply_add(alpha: np.float32, product: Float32, addend: Float32) -> Float32:
    """``alpha · product + addend`` with the product not rounded, as a fused operation has it."""
    wide = np.float64(alpha) * product.astype(np.float64)
    wide += addend
    return wide.astype(np.float32)


def _check_problems(problems: GemmProblems, count: int) -> None:
    m, n, k = (getattr(problems, size)[:count] for size in "mnk")
    output = (m > 0) & (n > 0)
    product = output & (k > 0)
    for size in "mnk":
        _refuse(getattr(problems, size)[:count] < 0, problems, size, "0 or more")
    for pointer, used in (("a", product), ("b", product), ("d", output)):
        _refuse(used & (getattr(problems, pointer)[:count] == 0), problems, pointer, "an address")
    for leading, used, width, what in (
        ("lda", product, k, "k"),
        ("ldb", product, k, "k"),
        ("ldd", output, n, "n"),
    ):
        short = used & (getattr(problems, leading)[:count] < width)
        _refuse(short, problems, leading, f"at least {what}")


def _refuse(bad: npt.NDArray[np.bool_], problems: GemmProblems, field: str, needed: str) -> None:
    if bad.any():
        p = int(np.argmax(bad))
        raise ArgumentError(
            f"problems.{field}[{p}] is {getattr(problems, field)[p]}; {needed} is needed "
            f"(problem {p}: m={problems.m[p]}, n={problems.n[p]}, k={problems.k[p]})"
        )
