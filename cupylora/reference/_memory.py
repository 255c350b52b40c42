"""Matrices at host addresses: what slot entries and GEMM problems point at, as NumPy views.

In: an address and a matrix's sizes. Out: a view of that memory (written through), or for a packed
factor a row-major copy. Nothing here can tell whether the memory still lives; the caller owns it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.packing import unpack_a
from cupylora.worklists import PACKED

__all__ = ["matrix_at", "shrink_factor_at"]

Array = npt.NDArray[Any]


class _Span:
    """Carries ``__array_interface__``: NumPy's own way to look at memory by address."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def matrix_at(
    address: int, rows: int, columns: int, leading: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Writable view [rows, columns] of ``dtype`` at ``address``, ``leading`` elements between rows.

    The address need only be aligned to an element. An empty matrix touches no memory.
    """
    if rows == 0 or columns == 0:
        return np.empty((rows, columns), dtype)
    size = dtype.itemsize
    span = _Span(
        {
            "version": 3,
            "shape": (rows, columns),
            "typestr": f"<u{size}",
            "strides": (leading * size, size),
            "data": (address, False),
        }
    )
    return np.asarray(span).view(dtype)


def shrink_factor_at(
    address: int, rank: int, in_features: int, layout: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """A [rank, in_features] of one expert at ``address``, ROW_MAJOR or PACKED."""
    block = matrix_at(address, rank, in_features, in_features, dtype)
    return unpack_a(block) if layout == PACKED else block
