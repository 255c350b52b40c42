"""An adapter as the device keeps it: which blocks there are, and what points at them.

``layout_of`` says it of an :class:`Adapter`; ``importing`` says it of a file that is not read yet.
``pack_adapter`` does once what a load has to do on the CPU: check, convert, find values that are
not finite, bring A into the kernels' order. What is left is copying: a :class:`PackedAdapter` is
what ``store`` keeps and ``SlotTable.store`` copies to the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.factors import Adapter
from cupylora.adapters.packing import pack_a
from cupylora.errors import AdapterFormatError
from cupylora.host_memory import HostBytes, HostMemory
from cupylora.shapes import MAX_RANK, LoraLimits, ModelShape
from cupylora.size_class import size_class
from cupylora.worklists import PACKED, SLOT_ENTRY

__all__ = [
    "BLOCK_ALIGNMENT",
    "AdapterLayout",
    "Block",
    "PackedAdapter",
    "block_bytes",
    "lay_out",
    "layout_of",
    "misfit",
    "modules_of",
    "pack_adapter",
    "stride_of",
    "table_row",
]

BLOCK_ALIGNMENT = 256
"""Bytes: every block starts at a multiple of it, and no block is smaller."""


def block_bytes(size: int) -> int:
    """Size class of a block of ``size`` bytes: a multiple of 256, at most 1/16 more beyond 4 KiB.

    Loading and evicting adapters of mixed ranks does not leave gaps that fit nothing then.
    """
    return size_class(size, BLOCK_ALIGNMENT)


@dataclass(frozen=True, eq=False)
class AdapterLayout:
    """An adapter's blocks, and the table rows that will point at them.

    sizes: of the blocks, size classes in bytes. records: SLOT_ENTRY, one a row of a slot table,
    whose a_ptr and b_ptr are numbers of blocks (where rank is not 0). dtype, a_layout: those of the
    table that it is for.
    """

    name: str
    sizes: tuple[int, ...]
    records: npt.NDArray[np.void]
    max_rank: int
    dtype: np.dtype[Any]
    a_layout: int
    source: str

    @property
    def nbytes(self) -> int:
        """Of all blocks: what the arena gives."""
        return sum(self.sizes)

    def same_blocks(self, other: AdapterLayout) -> bool:
        """Whether both have the same blocks and rows, whatever they are called."""
        return (self.dtype, self.a_layout, self.sizes) == (
            other.dtype,
            other.a_layout,
            other.sizes,
        ) and self.records.tobytes() == other.records.tobytes()


Modules = tuple[tuple[str, int, int, int], ...]
"""Name, in, out and experts of each module of a layer."""


def modules_of(model: ModelShape) -> Modules:
    """As a layout is checked against."""
    return tuple((m.name, m.in_features, m.out_features, m.experts) for m in model.modules)


def misfit(layout: AdapterLayout, modules: Modules) -> str | None:
    """Why a layout cannot be of a model of these modules, a layer's after the other's; None if it
    can: then no kernel reads beyond a block."""
    records, itemsize = layout.records, layout.dtype.itemsize
    used = records["rank"] != 0
    rank = records["rank"][used].astype(np.int64)
    if not 0 <= layout.max_rank <= MAX_RANK or (rank < 1).any() or (rank > layout.max_rank).any():
        return "an entry's rank is out of range"
    shapes = np.array([module[1:] for module in modules], np.int64)
    shapes = shapes[np.flatnonzero(used) % len(modules)]
    room = np.array(layout.sizes, np.int64)
    for side, width in (("a", shapes[:, 0]), ("b", shapes[:, 1])):
        stride = records[f"{side}_expert_stride"][used]
        need = rank * width * itemsize
        experts = np.where(stride == 0, 1, shapes[:, 2])
        blocks = room[records[f"{side}_ptr"][used].astype(np.intp)]
        if ((stride != 0) & (stride != need)).any() or (need * experts > blocks).any():
            return "an entry's factor is larger than its block"
    layouts_differ = (records["a_layout"][used] != layout.a_layout).any()
    if layouts_differ or not np.isfinite(records["scale"]).all():
        return "an entry's scale or layout is none that is packed"
    return None


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter in host memory.

    buffer: the blocks of ``layout`` one after the other, each filled up with zeros to its size
    class.
    """

    layout: AdapterLayout
    buffer: HostMemory

    @property
    def nbytes(self) -> int:
        """Of the buffer, and of the arena once it is stored."""
        return self.buffer.nbytes

    def same_content(self, other: PackedAdapter) -> bool:
        """Whether both give the same bytes to the device, whatever they are called."""
        return self.layout.same_blocks(other.layout) and self.buffer.equals(other.buffer)


@dataclass(frozen=True, eq=False)
class Block:
    """What one block holds: a factor as the adapter has it. where: for messages."""

    role: str
    array: Any
    where: str

    def is_packed(self, a_layout: int) -> bool:
        """Whether its rows become K-chunks in a table of this layout."""
        return self.role == "a" and a_layout == PACKED

    def values(self, dtype: np.dtype[Any], a_layout: int) -> HostBytes:
        """The bytes of a host array in a table of these; AdapterFormatError if a value is or
        becomes not finite."""
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(self.array).astype(dtype, copy=False)
        if not_finite(values).any():
            raise AdapterFormatError(
                f"{self.where} holds a value that is not finite as {dtype}; use a table of wider "
                "range (bfloat16 or float32) or repair the adapter"
            )
        if self.is_packed(a_layout):
            values = pack_a(values)
        return values.reshape(-1).view(np.uint8)


def layout_of(
    adapter: Adapter, model: ModelShape, limits: LoraLimits, dtype: np.dtype[Any], a_layout: int
) -> tuple[AdapterLayout, list[Block]]:
    """The layout of ``adapter`` in a table of these, and what is to go into each block. Raises as
    ``Adapter.check``."""
    adapter.check(model, limits)
    return lay_out(adapter.name, adapter.factors, model, dtype, a_layout, adapter.source)


def lay_out(
    name: str,
    factors: Mapping[tuple[int, str], Any],
    model: ModelShape,
    dtype: np.dtype[Any],
    a_layout: int,
    source: str,
) -> tuple[AdapterLayout, list[Block]]:
    """``layout_of`` of factors (LoraFactors or FactorArrays) that were checked against ``model``.

    An array that several modules have in the same role is one block.
    """
    numbers = {module.name: i for i, module in enumerate(model.modules)}
    known: dict[tuple[str, int], int] = {}
    blocks: list[Block] = []
    records = np.zeros(model.layers * len(numbers), SLOT_ENTRY)
    max_rank = 0
    for (layer, module), value in factors.items():
        where = f"adapter {name}, layer {layer}, {module}"
        for role, array in (("a", value.a), ("b", value.b)):
            if (role, id(array)) not in known:
                known[role, id(array)] = len(blocks)
                blocks.append(Block(role, array, f"{where}: {role.upper()}"))
        rank = int(value.a.shape[1])
        max_rank = max(max_rank, rank)
        places = known["a", id(value.a)], known["b", id(value.b)]
        strides = stride_of(value.a.shape, dtype), stride_of(value.b.shape, dtype)
        records[layer * len(numbers) + numbers[module]] = table_row(
            *places, strides, rank, value.scale, a_layout
        )
    sizes = tuple(block_bytes(int(block.array.size) * dtype.itemsize) for block in blocks)
    return AdapterLayout(name, sizes, records, max_rank, dtype, a_layout, source), blocks


def pack_adapter(
    adapter: Adapter,
    model: ModelShape,
    limits: LoraLimits,
    dtype: np.dtype[Any],
    a_layout: int,
    allocate: Callable[[int], HostMemory] = HostMemory.new,
) -> PackedAdapter:
    """Pack ``adapter`` for a table of these; ``allocate`` gives host memory of so many bytes.

    Raises as ``Adapter.check`` does, and AdapterFormatError for a value that is not finite in
    ``dtype``.
    """
    layout, blocks = layout_of(adapter, model, limits, dtype, a_layout)
    buffer = allocate(layout.nbytes)
    at = 0
    for block, size in zip(blocks, layout.sizes, strict=True):
        data = block.values(dtype, a_layout)
        buffer.write(at, data)
        buffer.clear(at + data.size, size - data.size)
        at += size
    return PackedAdapter(layout, buffer)


def table_row(
    a_block: int, b_block: int, strides: tuple[int, int], rank: int, scale: float, a_layout: int
) -> tuple[Any, ...]:
    """A row of ``AdapterLayout.records``; strides: of A and of B."""
    return a_block, b_block, *strides, rank, scale, a_layout, 0


def stride_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes from one expert to the next of a factor [experts, ...]; 0 where all share it."""
    experts, rows, columns = shape
    return rows * columns * dtype.itemsize if experts > 1 else 0
