"""How DLPack lays a tensor out in memory, and the numbers it has for devices and types.

Shared by ``dlpack``, which reads capsules, and ``export``, which makes them; and what every form of
an array comes down to, :class:`Memory`, and whose a type is.
"""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any, NamedTuple

import numpy as np

from cupylora.dtypes import BFLOAT16
from cupylora.errors import ArgumentError
from cupylora.text import quoted

__all__ = [
    "COPIED",
    "CPU",
    "CUDA",
    "CUDA_HOST",
    "CUDA_MANAGED",
    "DTYPES",
    "LEGACY",
    "LEGACY_FIELDS",
    "MOST_DIMENSIONS",
    "READ_ONLY",
    "TENSOR_FIELDS",
    "VERSION",
    "VERSIONED",
    "VERSIONED_HEAD",
    "Deleter",
    "Memory",
    "c_strides",
    "check_memory",
    "home_of",
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


MOST_DIMENSIONS = 32
"""More than any argument has, and no more than NumPy and CuPy take."""

_ADDRESSES = 1 << 64
_LARGEST = (1 << 63) - 1


class Memory(NamedTuple):
    """Where an array lies. strides: in bytes; None: C order. owner: keeps it; None: the caller."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None
    read_only: bool
    owner: object


def home_of(kind: type) -> str:
    """The library that a type is of."""
    module = getattr(kind, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def check_memory(name: str, memory: Memory) -> None:
    """Raise ArgumentError, naming the argument, for what no machine has in its memory: too many
    dimensions, or sizes and strides that lead beyond all addresses."""
    shape, itemsize = memory.shape, memory.dtype.itemsize
    if len(shape) > MOST_DIMENSIONS:
        raise ArgumentError(f"{name} has {len(shape)} dimensions; at most {MOST_DIMENSIONS} can be")
    strides = c_strides(shape, itemsize) if memory.strides is None else memory.strides
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    first = memory.pointer + sum(step for step in reach if step < 0)
    last = memory.pointer + sum(step for step in reach if step > 0) + itemsize
    # Products count extents of 0 as 1, as NumPy's own check does.
    total = math.prod(max(1, extent) for extent in shape) * itemsize
    fits = 0 <= memory.pointer < _ADDRESSES and total <= _LARGEST
    fits = fits and all(abs(stride) <= _LARGEST for stride in strides)
    if not fits or (0 not in shape and not 0 <= first <= last <= _ADDRESSES):
        raise ArgumentError(
            f"{name} of shape {quoted(shape)} and strides {quoted(strides)} at address "
            f"{memory.pointer:#x} leads beyond all addresses; describe the memory that there is"
        )


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next of each axis, in C order."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def python_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python's C interface."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
