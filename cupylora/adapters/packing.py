"""The operand layout of A in the arena: K-chunks, ready swizzled for the shrink kernel.

In: row-major A [..., rank, in], as an adapter file holds it. Out: the same bytes in another order,
which ``slots`` writes into the arena and the kernels (and ``unpack_a``, for the reference) read.

A block is one expert's A. It is cut along K into chunks of 128 bytes a row (64 elements of a
2-byte type, 32 of float32). All rows of one chunk stand together, so one bulk copy moves a chunk;
within row i the chunk's eight 16-byte pieces are stored at ``piece ^ (i & 7)``, so that the matrix
loads of eight consecutive rows fall into eight different groups of shared-memory banks. What is
left of K after the last full chunk is stored as rank rows of the remaining width, contiguous and
not swizzled. A block's size is that of the row-major form.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.errors import ArgumentError

__all__ = ["CHUNK_BYTES", "chunk_elements", "pack_a", "unpack_a"]

CHUNK_BYTES = 128
_PIECES = 8
_PIECE = np.dtype(np.complex128)  # any 16-byte type: pieces are moved, never computed with

Array = npt.NDArray[Any]


def chunk_elements(itemsize: int) -> int:
    """Elements of K in one full chunk: 64 for 2-byte types, 32 for float32."""
    if itemsize not in (2, 4):
        raise ArgumentError(f"itemsize is {itemsize}; packed factors have 2 or 4 bytes an element")
    return CHUNK_BYTES // itemsize


def pack_a(a: Array) -> Array:
    """Packed form of ``a`` [..., rank, in] (2- or 4-byte dtype): same shape, dtype and size.

    Read the result as bytes: its element [i, k] is not A's element [i, k]. Every [rank, in] block
    is packed on its own. Raises ArgumentError for fewer than two dimensions or another item size.
    """
    blocks, full = _blocks(a, "a")
    count, rank, features = blocks.shape
    packed = np.empty((count, rank * features), dtype=a.dtype)
    source = _piece_order(rank, full * a.itemsize // CHUNK_BYTES)
    if source.size:
        rows = blocks[:, :, :full].reshape(count, rank * full).view(_PIECE)
        for block, target in zip(rows, packed, strict=True):  # one at a time stays in cache
            np.take(block, source, out=target[: rank * full].view(_PIECE), mode="clip")
    packed[:, rank * full :] = blocks[:, :, full:].reshape(count, rank * (features - full))
    return packed.reshape(a.shape)


def unpack_a(packed: Array) -> Array:
    """Row-major A [..., rank, in] from what ``pack_a`` returned (or from a block's bytes given that
    dtype and shape). Raises ArgumentError as ``pack_a`` does."""
    blocks, full = _blocks(packed, "packed")
    count, rank, features = blocks.shape
    flat = blocks.reshape(count, rank * features)
    a = np.empty((count, rank, features), dtype=packed.dtype)
    source = _piece_order(rank, full * packed.itemsize // CHUNK_BYTES)
    if source.size:
        chunks = np.ascontiguousarray(flat[:, : rank * full]).view(_PIECE)
        rows = chunks.take(np.argsort(source), axis=1).view(packed.dtype)
        a[:, :, :full] = rows.reshape(count, rank, full)
    a[:, :, full:] = flat[:, rank * full :].reshape(count, rank, features - full)
    return a.reshape(packed.shape)


def _blocks(array: Array, argument: str) -> tuple[Array, int]:
    """``array`` as contiguous [count, rank, in], and how many of its columns lie in full chunks."""
    if array.ndim < 2 or 0 in array.shape:
        raise ArgumentError(f"{argument} has shape {array.shape}; [..., rank, in] is needed")
    width = chunk_elements(array.itemsize)
    blocks = np.ascontiguousarray(array).reshape(-1, *array.shape[-2:])
    return blocks, array.shape[-1] // width * width


def _piece_order(rank: int, chunks: int) -> npt.NDArray[np.intp]:
    """For each 16-byte place of a packed block, the row-major piece that stands there."""
    chunk, row, place = np.ogrid[:chunks, :rank, :_PIECES]
    piece = place ^ (row & (_PIECES - 1))
    return np.asarray((row * chunks + chunk) * _PIECES + piece).ravel()
