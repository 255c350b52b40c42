"""Reproducible test data and synthetic weights: the same values on every backend.

In: an array to fill. Out: the array, every element a hash of its index and the seed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupylora.checks import FLOATS, check_array, check_number
from cupylora.errors import ArgumentError
from cupylora.worklists import Array

__all__ = ["fill_uniform"]

_CHUNK = 1 << 18
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def fill_uniform(out: Array, seed: int, scale: float) -> Array:
    """Fill ``out`` with uniform values in [-scale, scale) and return it.

    out: bfloat16, float16 or float32, any shape. Element i (C order) is the 24 upper bits of a
    64-bit hash of i + seed · 0x9E3779B97F4A7C15, as a float32 in [-1, 1), times float32(scale),
    rounded once to out's dtype.

    Raises ArgumentError for an ``out`` of another dtype, not contiguous or read-only, and for a
    ``seed`` that is not an integer.
    """
    check_array("out", out, dtype=FLOATS, writable=True, on_device=False)
    if not isinstance(seed, int | np.integer):
        raise ArgumentError(f"seed is {seed!r}; an integer is needed")
    scale = check_number("scale", scale)
    flat = out.reshape(-1)
    start = np.uint64((int(seed) * _STEP) & _MASK)
    for first in range(0, flat.size, _CHUNK):
        last = min(first + _CHUNK, flat.size)
        bits = _hash(np.arange(first, last, dtype=np.uint64) + start) >> np.uint64(40)
        unit = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        flat[first:last] = (unit * np.float32(scale)).astype(out.dtype)
    return out


def _hash(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Sebastiano Vigna's splitmix64 finaliser, modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
