"""Float32 arithmetic of the reference: widening, one rounding, and a batch-independent product."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ieee_arithmetic", "matmul_rows", "narrow", "widen"]

Float32 = npt.NDArray[np.float32]


def ieee_arithmetic() -> np.errstate:
    """Context in which overflow gives infinity, and inf - inf NaN, in silence as on a device."""
    return np.errstate(over="ignore", invalid="ignore", under="ignore")


def widen(values: npt.NDArray[Any]) -> Float32:
    """``values`` of any supported type as float32 (exact)."""
    return values.astype(np.float32)


def narrow(values: Float32, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``values`` rounded once to ``dtype``."""
    return values.astype(dtype)


def matmul_rows(x: Float32, w: Float32) -> Float32:
    """``x[m, k] · w[n, k]ᵀ`` in float32.

    BLAS picks its order of summation by the sizes of a product, and by a row's place in it, so each
    row is a product of its own: its bits do not depend on what rows are beside it.
    """
    product: Float32 = np.matmul(x[:, np.newaxis, :], w.T)[:, 0, :]
    return product
