"""How DLPack lays a tensor out in memory, and the numbers it has for devices and types.

Shared by ``dlpack``, which reads capsules, and ``export``, which makes them; and what every form of
an array comes down to, :class:`Memory`.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import numpy as np

from cupylora.dtypes import BFLOAT16

__all__ = [
    "COPIED",
    "CPU",
    "CUDA",
    "CUDA_HOST",
    "CUDA_MANAGED",
    "DTYPES",
    "LEGACY",
    "LEGACY_FIELDS",
    "READ_ONLY",
    "TENSOR_FIELDS",
    "VERSION",
    "VERSIONED",
    "VERSIONED_HEAD",
    "Deleter",
    "Memory",
    "python_function",
]

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Kinds of memory: host, a CUDA device's, pinned host, managed."""

VERSION = (1, 0)
LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
"""Names of capsules."""

READ_ONLY, COPIED = 1, 2
"""Flags of a versioned capsule."""

# Data, device type and number, ndim, type (code, bits, lanes), shape, strides, byte offset.
_TENSOR = "QiiiBBHQQQ"
TENSOR_FIELDS = struct.Struct(f"@{_TENSOR}")
LEGACY_FIELDS = struct.Struct(f"@{_TENSOR}QQ")
"""The tensor, manager_ctx, deleter."""
VERSIONED_HEAD = struct.Struct("@IIQQQ")
"""Major, minor, manager_ctx, deleter, flags; the tensor follows."""

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
DTYPES: dict[tuple[int, int, int], np.dtype[Any]] = {
    **{(_INT, 8 * size, 1): np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{(_UINT, 8 * size, 1): np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{(_FLOAT, 8 * size, 1): np.dtype(f"f{size}") for size in (2, 4, 8)},
    (_BFLOAT, 16, 1): BFLOAT16,
    (_BOOL, 8, 1): np.dtype(np.bool_),
}
"""By type code, bits and lanes."""


class Memory(NamedTuple):
    """Where an array lies. strides: in bytes; None: C order. owner: keeps it; None: the caller."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None
    read_only: bool
    owner: object


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def python_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python's C interface."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
