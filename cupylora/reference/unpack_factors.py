"""Bytes of an adapter's file into blocks of the arena.

In: part of a file and FACTOR_PIECE records. Out: elements in their places, in the arena's dtype.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.packing import CHUNK_BYTES
from cupylora.checks import INT32, UINT8, check_array, check_int
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.worklists import FACTOR_PIECE, FACTOR_PIECE_BYTES, Array

__all__ = ["MOST_PIECES", "PIECE_ELEMENTS", "SOURCE_TYPES", "check_unpack", "unpack_factors"]

MOST_PIECES = 65_535
"""Records of one call: what the second dimension of a grid can have."""

PIECE_ELEMENTS = 1 << 16
"""Of a record, at most, where a tensor is cut: what a few blocks of threads do."""

SOURCE_TYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32)
)
"""By FACTOR_PIECE's source_type."""

_Index = npt.NDArray[np.int64]


def unpack_factors(
    source: Array,
    pieces: Array,
    target: Array,
    *,
    dtype: np.dtype[np.generic],
    most_elements: int,
    fault: Array,
) -> None:
    """Write every piece's elements, each rounded once to ``dtype``, to its place in ``target``.

    source: uint8 [n]. target: uint8 [m]. pieces: uint8 [P, 96], FACTOR_PIECE records, P <= 65,535;
    they are trusted to lie within both arrays. On the device, target and pieces are aligned to 16
    bytes and source to 2.
    most_elements: of any piece. fault: int32 [1], becomes 1 if an element is not finite in
    ``dtype`` or a ratio takes it below the normal numbers of float32, and is left alone otherwise.
    Elements that no piece has stay as they are.

    Raises ArgumentError for arrays of another form, or a dtype that factors cannot have.
    """
    check_unpack(source, pieces, target, most_elements, fault, on_device=False)
    dtype = resolve_dtype(dtype)
    for piece in pieces.reshape(-1).view(FACTOR_PIECE):
        kind = SOURCE_TYPES[piece["source_type"]]
        begin, count = int(piece["source"]), int(piece["count"])
        values = np.frombuffer(source[begin : begin + count * kind.itemsize].tobytes(), kind)
        with np.errstate(over="ignore", invalid="ignore"):
            if piece["ratio"] != 1:
                values, kept = _scaled(values, float(piece["ratio"]))
                fault[0] |= not kept
            values = values.astype(dtype)
        fault[0] |= not_finite(values).any()
        _scatter(piece, values, target)


def check_unpack(
    source: Array,
    pieces: Array,
    target: Array,
    most_elements: int,
    fault: Array,
    *,
    on_device: bool,
) -> int:
    """The checks of ``unpack_factors``, wherever its arrays are; ``most_elements`` as an int."""
    for name, array in (("source", source), ("target", target)):
        check_array(name, array, dtype=UINT8, shape=(None,), on_device=on_device)
    shape = (None, FACTOR_PIECE_BYTES)
    check_array("pieces", pieces, dtype=UINT8, shape=shape, on_device=on_device)
    check_array("fault", fault, dtype=INT32, shape=(1,), on_device=on_device)
    if len(pieces) > MOST_PIECES:
        raise ArgumentError(f"pieces has {len(pieces)} records; {MOST_PIECES} at most")
    return check_int("most_elements", most_elements, 0)


def _scaled(values: npt.NDArray[Any], ratio: float) -> tuple[npt.NDArray[Any], bool]:
    """``values`` times ``ratio`` in float32, and whether it holds them as normal numbers."""
    product = values.astype(np.float64) * ratio
    lost = (np.abs(product) < np.finfo(np.float32).tiny) & (values != 0)
    return product.astype(np.float32), not (ratio and lost.any())


def _scatter(piece: np.void, values: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
    flat = int(piece["first"]) + np.arange(len(values))
    by_axis: list[_Index] = [flat] * 3
    for axis, at in zip(piece["axis"], np.unravel_index(flat, piece["extent"]), strict=True):
        by_axis[axis] = at
    expert, row, column = by_axis
    second = row % 2 if piece["interleaved"] else (row >= piece["split"]).astype(np.int64)
    row = row // 2 if piece["interleaved"] else row - second * piece["split"]
    block = int(piece["rows"]) * int(piece["columns"])
    element = (expert + piece["expert"]) * block + _element(piece, row, column, values.itemsize)
    for number in (0, 1):
        chosen = second == number
        if chosen.any():
            start = int(piece["target"][number])
            end = start + (int(element[chosen].max()) + 1) * values.itemsize
            target[start:end].view(values.dtype)[element[chosen]] = values[chosen]


def _element(piece: np.void, row: _Index, column: _Index, itemsize: int) -> _Index:
    """Element of a block of one expert, as ``adapters.packing`` lays it out."""
    rows, width = int(piece["rows"]), int(piece["columns"])
    if not piece["packed"]:
        return row * width + column
    chunk, piece_elements = CHUNK_BYTES // itemsize, 16 // itemsize
    full = width // chunk * chunk
    inner = column % chunk
    swizzled = (inner // piece_elements ^ row & 7) * piece_elements + inner % piece_elements
    within = (column // chunk * rows + row) * chunk + swizzled
    return np.where(column < full, within, full * rows + row * (width - full) + column - full)
