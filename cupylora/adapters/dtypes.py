"""Element types that factors may have, and a fast test of their values.

``assembly`` and ``units`` ask it about what a file holds, ``slots`` about what a conversion made of
it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupylora.checks import FLOAT32_MAX
from cupylora.errors import ArgumentError

__all__ = ["FACTOR_DTYPES", "factor_dtype", "kept_by_float32", "not_finite"]

_EXPONENTS: dict[np.dtype[Any], np.uint16 | np.uint32] = {
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
    np.dtype(np.float32): np.uint32(0x7F800000),
}
"""The exponent's bits: all set in infinities and NaNs, and in nothing else."""

FACTOR_DTYPES = frozenset(_EXPONENTS)
"""What the elements of a factor may be: float16, bfloat16 or float32."""


def factor_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """``dtype`` as NumPy's object. Raises ArgumentError if factors cannot have it."""
    result = np.dtype(dtype)
    if result not in _EXPONENTS:
        known = ", ".join(str(item) for item in _EXPONENTS)
        raise ArgumentError(f"dtype is {result}; one of {known} is needed")
    return result


def not_finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Mask of the infinities and NaNs in contiguous bfloat16, float16 or float32 ``values``, which
    may be CuPy's.

    Raises ArgumentError for another dtype. (On bits: np.isfinite is many times slower in bfloat16.)
    """
    exponent = _EXPONENTS[factor_dtype(values.dtype)]
    mask: npt.NDArray[np.bool_] = (values.view(exponent.dtype) & exponent) == exponent
    return mask


def kept_by_float32(scale: float) -> bool:
    """Whether float32 holds ``scale``: it is finite there, and not lost to 0."""
    return abs(scale) <= FLOAT32_MAX and (scale == 0 or np.float32(scale) != 0)
