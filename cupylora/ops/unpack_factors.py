"""Bytes of an adapter's file into blocks of the arena, on the device (adapters/unpack.cu).

In: part of a file and FACTOR_PIECE records. Out: elements in their places, in the arena's dtype.
"""

from __future__ import annotations

import numpy as np

from cupylora import reference
from cupylora.dtypes import dtype_name, resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.ops._device import address, blocks_for, check_aligned, device_op, enqueue
from cupylora.reference.unpack_factors import check_unpack
from cupylora.worklists import Array

__all__ = ["unpack_factors"]

_THREADS = 256
_BLOCK_ELEMENTS = 4096
"""kThreads and kBlockElements of adapters/unpack.cu."""

_SOURCE_ALIGNMENT = 2
_TYPES = ("ptr",) * 4


@device_op(reference.unpack_factors, writes=("target", "fault"))
def unpack_factors(
    source: Array,
    pieces: Array,
    target: Array,
    *,
    dtype: np.dtype[np.generic],
    most_elements: int,
    fault: Array,
) -> None:
    most_elements = check_unpack(source, pieces, target, most_elements, fault, on_device=True)
    for name, array in (("pieces", pieces), ("target", target)):
        check_aligned(name, array)
    if address(source) % _SOURCE_ALIGNMENT:
        raise ArgumentError("source starts on an odd byte; pass an aligned copy")
    if len(pieces) == 0 or most_elements == 0:
        return
    grid = (blocks_for(most_elements, _BLOCK_ELEMENTS), len(pieces))
    args = tuple(map(address, (source, pieces, target, fault)))
    enqueue("unpack", dtype_name(resolve_dtype(dtype)), _TYPES, grid, _THREADS, args)
