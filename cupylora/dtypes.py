"""The three element types of weights and activations, by name and as dtypes.

NumPy has no bfloat16 of its own; ``ml_dtypes.bfloat16`` stands for it everywhere.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupylora.errors import ArgumentError

__all__ = ["BFLOAT16", "DTYPES", "FLOAT16", "FLOAT32", "dtype_name", "resolve_dtype"]

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT16: np.dtype[Any] = np.dtype(np.float16)
FLOAT32: np.dtype[Any] = np.dtype(np.float32)

DTYPES: dict[str, np.dtype[Any]] = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
"""Every supported element type by its name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def resolve_dtype(dtype: Any, name: str = "dtype") -> np.dtype[Any]:
    """The dtype that ``dtype`` (one of the names in DTYPES, or any dtype-like) stands for.

    Raises ArgumentError naming the argument ``name`` for any other type.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    # np.dtype(None) would be float64.
    if dtype is not None:
        try:
            resolved: np.dtype[Any] = np.dtype(dtype)
        except TypeError:
            pass
        else:
            if resolved in DTYPES.values():
                return resolved
    raise ArgumentError(f"{name} is {dtype!r}; use one of {', '.join(DTYPES)}")


def dtype_name(dtype: Any) -> str:
    """Name of a supported dtype: "bfloat16", "float16" or "float32"; else ArgumentError."""
    known = _NAMES.get(dtype) if isinstance(dtype, np.dtype) else None
    return known or _NAMES[resolve_dtype(dtype)]
