"""Reproducible test data and synthetic weights, on the device (util/fill.cu)."""

from __future__ import annotations

import numpy as np

from cupylora import reference
from cupylora.checks import FLOATS, check_array, check_number
from cupylora.errors import ArgumentError
from cupylora.ops._device import address, blocks_for, device_op, enqueue, kernel_dtype
from cupylora.worklists import Array

__all__ = ["fill_uniform"]

_THREADS = 256
_MOST_BLOCKS = 4096
_TYPES = ("ptr", "u64", "u64", "f32")


@device_op(reference.fill_uniform)
def fill_uniform(out: Array, seed: int, scale: float) -> Array:
    check_array("out", out, dtype=FLOATS, on_device=True)
    if not isinstance(seed, int | np.integer):
        raise ArgumentError(f"seed is {seed!r}; an integer is needed")
    scale = check_number("scale", scale)
    grid = (min(blocks_for(out.size, _THREADS), _MOST_BLOCKS),)
    args = (address(out), out.size, int(seed) % 2**64, scale)
    enqueue("fill", kernel_dtype(out), _TYPES, grid, _THREADS, args)
    return out
