"""An adapter as the device keeps it, in one piece of host memory.

``pack_adapter`` does once what a load has to do on the CPU: check, convert, find values that are
not finite, bring A into the kernels' order. What is left is copying. In: an :class:`Adapter`. Out:
a :class:`PackedAdapter`, which ``store`` keeps and ``SlotTable.store`` copies to the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.factors import Adapter, LoraFactors
from cupylora.adapters.packing import pack_a
from cupylora.errors import AdapterFormatError
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.worklists import PACKED, SLOT_ENTRY

__all__ = [
    "BLOCK_ALIGNMENT",
    "PackedAdapter",
    "block_bytes",
    "cast",
    "factor_stride",
    "pack_adapter",
]

BLOCK_ALIGNMENT = 256
"""Bytes: every block starts at a multiple of it, and no block is smaller."""

_CLASS_BITS = 4

HostBytes = npt.NDArray[np.uint8]


def block_bytes(size: int) -> int:
    """Size class of a block of ``size`` bytes: a multiple of 256, at most 1/16 more beyond 4 KiB.

    Classes make blocks of about equal size interchangeable, so that loading and evicting adapters
    of mixed ranks does not leave gaps that fit nothing.
    """
    step = max(BLOCK_ALIGNMENT, 1 << max(0, (size - 1).bit_length() - 1 - _CLASS_BITS))
    return -(-size // step) * step


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """Blocks, one after the other, and the table rows that will point at them.

    buffer: uint8 on the host; each block filled up with zeros to its size class. sizes: of the
    blocks. records: SLOT_ENTRY, one a row of a slot table, whose a_ptr and b_ptr are numbers of
    blocks (where rank is not 0). dtype, a_layout: those of the table that it is for.
    """

    name: str
    buffer: HostBytes
    sizes: tuple[int, ...]
    records: npt.NDArray[np.void]
    max_rank: int
    dtype: np.dtype[Any]
    a_layout: int
    source: str = "memory"

    @property
    def nbytes(self) -> int:
        """Of the buffer, and of the arena once it is stored."""
        return int(self.buffer.nbytes)

    def same_content(self, other: PackedAdapter) -> bool:
        """Whether both give the same bytes to the device, whatever they are called."""
        return (
            (self.dtype, self.a_layout, self.sizes) == (other.dtype, other.a_layout, other.sizes)
            and self.records.tobytes() == other.records.tobytes()
            and np.array_equal(self.buffer, other.buffer)
        )


def pack_adapter(
    adapter: Adapter,
    model: ModelShape,
    limits: LoraLimits,
    dtype: np.dtype[Any],
    a_layout: int,
    allocate: Callable[[int], HostBytes],
) -> PackedAdapter:
    """Pack ``adapter`` for a table of these; ``allocate`` gives host memory of so many bytes.

    Raises as ``Adapter.check`` does, and AdapterFormatError for a value that is not finite in
    ``dtype``.
    """
    adapter.check(model, limits)
    numbers = {module.name: i for i, module in enumerate(model.modules)}
    blocks: dict[tuple[str, int], int] = {}
    arrays: list[tuple[str, npt.NDArray[Any], str]] = []
    records = np.zeros(model.layers * len(numbers), SLOT_ENTRY)
    for (layer, module), factors in adapter.factors.items():
        where = f"adapter {adapter.name}, layer {layer}, {module}"
        for role, array in (("a", factors.a), ("b", factors.b)):
            if (role, id(array)) not in blocks:
                blocks[role, id(array)] = len(arrays)
                arrays.append((role, array, f"{where}: {role.upper()}"))
        records[layer * len(numbers) + numbers[module]] = _record(
            factors, blocks["a", id(factors.a)], blocks["b", id(factors.b)], dtype, a_layout
        )
    sizes = tuple(block_bytes(array.size * dtype.itemsize) for _, array, _ in arrays)
    buffer = allocate(sum(sizes))
    at = 0
    for (role, array, where), size in zip(arrays, sizes, strict=True):
        values = cast(array, dtype, where)
        if role == "a" and a_layout == PACKED:
            values = pack_a(values)
        data = values.reshape(-1).view(np.uint8)
        buffer[at : at + data.size] = data
        buffer[at + data.size : at + size] = 0
        at += size
    return PackedAdapter(
        adapter.name, buffer, sizes, records, adapter.max_rank, dtype, a_layout, adapter.source
    )


def _record(
    factors: LoraFactors, a_block: int, b_block: int, dtype: np.dtype[Any], a_layout: int
) -> tuple[Any, ...]:
    a_stride, b_stride = (factor_stride(x, dtype) for x in (factors.a, factors.b))
    return a_block, b_block, a_stride, b_stride, factors.rank, factors.scale, a_layout, 0


def factor_stride(array: Any, dtype: np.dtype[Any]) -> int:
    """Bytes from one expert to the next; 0 where all experts share the factor."""
    return int(array[0].size) * dtype.itemsize if len(array) > 1 else 0


def cast(array: npt.NDArray[Any], dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """``array`` as ``dtype``; AdapterFormatError if a value is or becomes not finite."""
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array).astype(dtype, copy=False)
    if not_finite(values).any():
        raise AdapterFormatError(
            f"{where} holds a value that is not finite as {dtype}; use a table of wider range "
            f"(bfloat16 or float32) or repair the adapter"
        )
    return values
