"""How work on rows is cut for the device: a warp's item is 32 pieces of 16 bytes of one row.

In: the sizes of a call. Out: items and launch shapes for the kernels of moe/, whose blocks may have
any number of warps: few rows are spread over many small blocks, many rows fill large ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupylora.ops._device import vector_aligned
from cupylora.worklists import Array

__all__ = ["WARP", "RowItems", "all_vectors", "row_blocks", "row_items"]

WARP = 32

_PIECE_BYTES = 16
_LARGE_THREADS, _SMALL_THREADS = 256, 64
_FEW_WARPS = 1024
"""Up to so many warps blocks are small, so that every SM of a large device has some."""
_RESIDENT_WARPS = 4096
"""Warps that a large device holds at a time."""


@dataclass(frozen=True)
class RowItems:
    """Items of a launch: ``blocks`` a row, ``count`` in all, ``per_warp`` neighbouring ones for
    each warp; and the launch's grid and threads."""

    blocks: int
    count: int
    per_warp: int
    grid: tuple[int]
    threads: int


def row_blocks(width: int, itemsize: int) -> int:
    """Blocks of 32 pieces that cover a row of ``width`` elements."""
    return -(-width * itemsize // (WARP * _PIECE_BYTES))


def row_items(rows: int, width: int, itemsize: int, *, ahead: int = 1) -> RowItems:
    """Items of ``rows`` rows; a warp takes up to ``ahead`` where there are enough for all."""
    blocks = row_blocks(width, itemsize)
    count = rows * blocks
    per_warp = max(1, min(ahead, count // _RESIDENT_WARPS))
    warps = -(-count // per_warp)
    threads = _SMALL_THREADS if warps <= _FEW_WARPS else _LARGE_THREADS
    return RowItems(blocks, count, per_warp, (-(-warps * WARP // threads),), threads)


def all_vectors(*arrays: Array | None) -> bool:
    """Whether rows of all these 2-D arrays start on 16-byte boundaries and are whole pieces."""
    return all(array is None or vector_aligned(array) for array in arrays)
