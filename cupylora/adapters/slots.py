"""Where adapters live: one arena of bytes, and the table that kernels look a slot up in.

``SlotTable.load`` takes an :class:`Adapter` (row-major), writes each distinct factor as one
block into the :class:`Arena` (A packed, or row-major where its readers need that; B row-major) and
then the slot's entries. The ops read ``entries_of``. The same code serves NumPy and CuPy: ``xp`` is
the array module, and only ``_put`` knows how bytes reach its arrays (on CuPy's current stream,
blocks before entries).

Invariants: entries of a slot point at complete blocks of its own adapter or are zero (rank 0, null
pointers); a block's every byte is written, the padding up to its size class with zeros, so no
former tenant shows; a failed load changes nothing: all that can fail comes before the switch of the
entries, and gives back what it took.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.device_factors import FactorArrays, borrow_factors, check_arrays
from cupylora.adapters.factors import Adapter
from cupylora.adapters.packed import (
    BLOCK_ALIGNMENT,
    PackedAdapter,
    block_bytes,
    cast,
    factor_stride,
)
from cupylora.adapters.packing import pack_a
from cupylora.checks import check_choice, check_int, check_type
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError, CapacityError
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.text import counted
from cupylora.worklists import PACKED, ROW_MAJOR, SLOT_ENTRY, SLOT_ENTRY_BYTES

__all__ = [
    "BLOCK_ALIGNMENT",
    "Arena",
    "SlotInfo",
    "SlotTable",
    "StoredAdapter",
    "adapter_bytes",
    "block_bytes",
]

Array = Any
"""An array of the table's ``xp``."""


class Arena:
    """One buffer of ``capacity_bytes``, given out in blocks of size classes.

    ``buffer`` is uint8 of the array module ``xp``, its start a multiple of 256; what it holds at
    first is undefined. Free neighbours merge; a request takes the smallest gap that holds it.
    Raises ArgumentError for less than one block, CapacityError where there is no memory for it.
    """

    def __init__(self, capacity_bytes: int, xp: Any = np) -> None:
        capacity_bytes = check_int("capacity_bytes", capacity_bytes, BLOCK_ALIGNMENT)
        self.capacity = capacity_bytes // BLOCK_ALIGNMENT * BLOCK_ALIGNMENT
        self.xp = xp
        shape = (self.capacity + BLOCK_ALIGNMENT,)
        buffer = _new(xp.empty, shape, "an arena", "use a smaller capacity_bytes")
        skip = -_address(buffer) % BLOCK_ALIGNMENT
        self.buffer: Array = buffer[skip : skip + self.capacity]
        self.address = _address(self.buffer)
        self._gaps: list[tuple[int, int]] = [(0, self.capacity)]
        self._blocks: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks given out, size classes included."""
        return sum(self._blocks.values())

    @property
    def free_bytes(self) -> int:
        """Bytes not given out, in however many gaps."""
        return self.capacity - self.used_bytes

    def alloc(self, size: int) -> int:
        """Offset of a new block for ``size`` bytes; its content is undefined until written.

        Raises CapacityError, with the bytes needed and free, if no gap holds it.
        """
        need = block_bytes(check_int("size", size, 1))
        fitting = [gap for gap in self._gaps if gap[1] >= need]
        if not fitting:
            largest = max((length for _, length in self._gaps), default=0)
            raise CapacityError(
                f"arena of {self.capacity} bytes: {need} bytes needed, {self.free_bytes} free "
                f"(largest gap {largest}); unload or evict an adapter, or make the arena larger"
            )
        offset, length = min(fitting, key=lambda gap: (gap[1], gap[0]))
        at = self._gaps.index((offset, length))
        self._gaps[at : at + 1] = [(offset + need, length - need)] if length > need else []
        self._blocks[offset] = need
        return offset

    def free(self, offset: int) -> None:
        """Give a block back. Raises ArgumentError if no block starts there."""
        self._require_block(offset)
        start, length = offset, self._blocks.pop(offset)
        at = bisect(self._gaps, (start, length))
        if at < len(self._gaps) and self._gaps[at][0] == start + length:
            length += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == start:
            at -= 1
            before = self._gaps.pop(at)
            start, length = before[0], length + before[1]
        self._gaps.insert(at, (start, length))

    def write(self, offset: int, data: npt.NDArray[Any]) -> None:
        """Fill the block at ``offset`` with ``data``'s bytes, and the rest of it with zeros.

        Raises ArgumentError if no block starts there, or it is smaller than ``data``.
        """
        self._require_block(offset)
        end = offset + data.nbytes
        if data.nbytes > self._blocks[offset]:
            raise ArgumentError(
                f"data has {data.nbytes} bytes; the block at {offset} has {self._blocks[offset]}"
            )
        _put(self.buffer[offset:end], np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        self.buffer[end : offset + self._blocks[offset]] = 0

    def copy(self, offset: int, array: Array) -> None:
        """Fill the block at ``offset`` with the bytes of a C-contiguous array of the arena's own
        array module, and the rest of it with zeros."""
        self._require_block(offset)
        end = offset + int(array.nbytes)
        self.buffer[offset:end] = array.reshape(-1).view(np.uint8)
        self.buffer[end : offset + self._blocks[offset]] = 0

    def fill(self, offsets: Sequence[int], sizes: Sequence[int], data: npt.NDArray[Any]) -> None:
        """Fill blocks whole: the next ``sizes[i]`` bytes of ``data`` go to the block at
        ``offsets[i]``. Blocks that stand side by side are one copy."""
        runs: list[list[int]] = []  # where in the arena, where in data, bytes
        at = 0
        for offset, size in zip(offsets, sizes, strict=True):
            self._require_block(offset)
            if runs and runs[-1][0] + runs[-1][2] == offset:
                runs[-1][2] += size
            else:
                runs.append([offset, at, size])
            at += size
        for offset, start, size in runs:
            _put(self.buffer[offset : offset + size], data[start : start + size])

    def _require_block(self, offset: int) -> None:
        if check_int("offset", offset, 0) not in self._blocks:
            raise ArgumentError(f"offset {offset} is not the start of a block in use")


def _new(make: Callable[..., Array], shape: tuple[int, ...], what: str, remedy: str) -> Array:
    """A uint8 array by ``make``; CapacityError where there is no memory for it."""
    try:
        return make(shape, dtype=np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:  # the last two: not addressable
        raise CapacityError(
            f"{what} of {math.prod(shape)} bytes cannot be allocated: {error}; {remedy}"
        ) from error


def _address(array: Array) -> int:
    """Address of an array's first byte, in host or device memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _put(target: Array, source: npt.NDArray[Any]) -> None:
    """Copy host bytes into an array of either module."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.set(source)


def adapter_bytes(adapter: Adapter, itemsize: int) -> int:
    """Arena bytes that ``adapter`` takes at ``itemsize`` bytes an element; shared factors once."""
    sizes = {
        (role, id(array)): block_bytes(array.size * itemsize)
        for factors in adapter.factors.values()
        for role, array in (("a", factors.a), ("b", factors.b))
    }
    return sum(sizes.values())


@dataclass(frozen=True)
class SlotInfo:
    """What one slot holds. ``generation`` numbers the table's loads, so that no two are alike."""

    name: str
    generation: int
    max_rank: int
    arena_bytes: int


@dataclass
class StoredAdapter:
    """What ``SlotTable.store`` made: an adapter's blocks, and the rows that will point at them.

    offsets: None once it was placed or discarded.
    """

    info: SlotInfo
    records: npt.NDArray[np.void]
    offsets: list[int] | None

    def take(self) -> list[int]:
        """The blocks, once. Raises ArgumentError where they were taken before."""
        if self.offsets is None:
            raise ArgumentError(f"adapter {self.info.name} was placed or discarded before")
        taken, self.offsets = self.offsets, None
        return taken


class SlotTable:
    """Device places for ``limits.max_loras`` adapters of ``model``.

    entries: uint8 [layers · modules, max_loras, 48] of ``xp``, SLOT_ENTRY records; row
    ``layer · modules + module``. Factors are stored as ``dtype``.
    a_layout: PACKED is what the LoRA kernels read fastest; ROW_MAJOR suits general GEMMs too, which
    take addresses from ``slot_lookup``. The layers read both.
    Raises ArgumentError for what does not fit, CapacityError where there is no memory for entries.
    """

    def __init__(
        self,
        model: ModelShape,
        limits: LoraLimits,
        dtype: npt.DTypeLike,
        *,
        xp: Any = np,
        arena: Arena,
        a_layout: int = PACKED,
    ) -> None:
        for name, value, kind in (
            ("model", model, ModelShape),
            ("limits", limits, LoraLimits),
            ("arena", arena, Arena),
        ):
            check_type(name, value, kind)
        if arena.xp is not xp:
            raise ArgumentError("arena and the table are of different array modules; give both one")
        self.model, self.limits, self.arena, self.xp = model, limits, arena, xp
        self.dtype = resolve_dtype(dtype)
        check_choice("a_layout", a_layout, (PACKED, ROW_MAJOR))
        self.a_layout = a_layout
        self._modules = {module.name: i for i, module in enumerate(model.modules)}
        rows = model.layers * len(self._modules)
        shape = (rows, limits.max_loras, SLOT_ENTRY_BYTES)
        self.entries: Array = _new(xp.zeros, shape, "a slot table", "use a smaller max_loras")
        self._info: list[SlotInfo | None] = [None] * limits.max_loras
        self._offsets: list[list[int]] = [[] for _ in range(limits.max_loras)]
        self._loads = 0

    @property
    def slots(self) -> tuple[SlotInfo | None, ...]:
        """What each slot holds; None: empty."""
        return tuple(self._info)

    def row(self, layer: int, module: int) -> int:
        """Row of ``entries`` of a layer's module, given by its index in ``model.modules``."""
        layer, module = check_int("layer", layer, 0), check_int("module", module, 0)
        if layer >= self.model.layers or module >= len(self._modules):
            raise ArgumentError(
                f"layer {layer}, module {module}: model {self.model.name} has "
                f"{counted(self.model.layers, 'layer')} of {counted(len(self._modules), 'module')}"
            )
        return layer * len(self._modules) + module

    def entries_of(self, layer: int, modules: Sequence[str]) -> Array:
        """View [len(modules), max_loras, 48] of the entries of modules that stand side by side.

        Raises ArgumentError for unknown modules, or modules not adjacent and in the model's order.
        """
        names = tuple(modules)
        indices = [self.model.module_index(name) for name in names]
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            raise ArgumentError(
                f"modules {', '.join(names)} are not neighbours in {', '.join(self._modules)}"
            )
        first = self.row(layer, indices[0])
        return self.entries[first : first + len(indices)]

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put ``adapter`` into ``slot``, replacing what is there.

        Everything is checked first and written to free room; the entries switch last, and only then
        is the former tenant's room freed. Raises (with the slot as it was) ArgumentError for a
        slot or an adapter that is none, AdapterFormatError or CapacityError as ``Adapter.check``
        does, AdapterFormatError for a value that overflows the table's dtype, CapacityError if the
        arena lacks room.
        """
        slot = self.check_slot(slot)
        self.place(slot, self.store(adapter))

    def store(self, adapter: Adapter | PackedAdapter) -> StoredAdapter:
        """Write ``adapter`` to free room; no slot has it yet. For ``place``, or ``discard``.

        All of a load that can fail. Raises as ``load`` does, having given back what it took. A
        packed adapter's memory is read until the copies enqueued here are over.
        """
        if isinstance(adapter, PackedAdapter):
            return self._store_packed(adapter)
        check_type("adapter", adapter, Adapter)
        adapter.check(self.model, self.limits)
        offsets: dict[tuple[str, int], int] = {}
        try:
            for key, factors in adapter.factors.items():
                where = f"adapter {adapter.name}, layer {key[0]}, {key[1]}"
                self._store(offsets, "a", factors.a, f"{where}: A")
                self._store(offsets, "b", factors.b, f"{where}: B")
            self._loads += 1
            records = self._records(adapter, offsets, self._loads)
        except BaseException:
            self._free(offsets.values())
            raise
        taken = adapter_bytes(adapter, self.dtype.itemsize)
        info = SlotInfo(adapter.name, self._loads, adapter.max_rank, taken)
        return StoredAdapter(info, records, list(offsets.values()))

    def _store_packed(self, packed: PackedAdapter) -> StoredAdapter:
        """Copy the blocks, in as few pieces as they stand side by side in the arena."""
        self._check_packed(packed)
        offsets: list[int] = []
        try:
            for size in packed.sizes:
                offset = self.arena.alloc(size)
                offsets.append(offset)
            self.arena.fill(offsets, packed.sizes, packed.buffer)
        except BaseException:
            self._free(offsets)
            raise
        self._loads += 1
        records = packed.records.copy()
        used = records["rank"] != 0
        starts = np.array(offsets, np.uint64) + np.uint64(self.arena.address)
        for pointer in ("a_ptr", "b_ptr"):
            records[pointer][used] = starts[packed.records[pointer][used].astype(np.intp)]
        records["generation"][used] = self._loads
        info = SlotInfo(packed.name, self._loads, packed.max_rank, packed.nbytes)
        return StoredAdapter(info, records, offsets)

    def store_arrays(
        self, name: str, factors: Mapping[tuple[int, str], FactorArrays]
    ) -> StoredAdapter:
        """``store`` of arrays that are on this backend already, as a training loop has them.

        factors: by (layer, module name), arrays of any library. They are copied there, never
        through the host, and A stays row-major, which the LoRA kernels read too, somewhat slower.
        Raises ArgumentError for keys and arrays that do not fit, AdapterFormatError for values that
        are not finite, CapacityError for a rank beyond the limits or where the arena lacks room.
        """
        check_type("name", name, str)
        on_device = self.xp is not np
        factors = borrow_factors(name, factors, on_device=on_device)
        check_arrays(name, factors, self.model, self.limits, self.dtype, on_device=on_device)
        records = np.zeros(len(self.entries), SLOT_ENTRY)
        offsets: dict[int, int] = {}
        generation, total = self._loads + 1, 0
        try:
            for (layer, module), value in factors.items():
                for array in (value.a, value.b):
                    if id(array) not in offsets:
                        offsets[id(array)] = self.arena.alloc(array.nbytes)
                        self.arena.copy(offsets[id(array)], array)
                        total += block_bytes(array.nbytes)
                records[self.row(layer, self._modules[module])] = (
                    self.arena.address + offsets[id(value.a)],
                    self.arena.address + offsets[id(value.b)],
                    factor_stride(value.a, self.dtype),
                    factor_stride(value.b, self.dtype),
                    value.a.shape[1],
                    value.scale,
                    ROW_MAJOR,
                    generation,
                )
        except BaseException:
            self._free(offsets.values())
            raise
        self._loads = generation
        rank = max((int(value.a.shape[1]) for value in factors.values()), default=0)
        info = SlotInfo(name, generation, rank, total)
        return StoredAdapter(info, records, list(offsets.values()))

    def _check_packed(self, packed: PackedAdapter) -> None:
        for field, got, needed in (
            ("dtype", packed.dtype, self.dtype),
            ("a_layout", packed.a_layout, self.a_layout),
            ("table rows", len(packed.records), len(self.entries)),
        ):
            if got != needed:
                raise ArgumentError(
                    f"packed adapter {packed.name} has {field} {got}, the table {needed}; pack it "
                    "for this table"
                )
        if packed.max_rank > self.limits.max_rank:
            raise CapacityError(
                f"packed adapter {packed.name} has rank {packed.max_rank}, which exceeds max_rank "
                f"{self.limits.max_rank}"
            )

    def place(self, slot: int, stored: StoredAdapter) -> None:
        """Switch ``slot`` to a stored adapter, once; then free the former tenant's room."""
        slot = self.check_slot(slot)
        check_type("stored", stored, StoredAdapter)
        former, offsets = self._offsets[slot], stored.take()
        # Interrupted between here and the end, the slot owns both rooms: entries may point to
        # either.
        self._offsets[slot] = [*former, *offsets]
        try:
            self._switch(slot, stored.records)
        except Exception:  # nothing was written
            self._offsets[slot] = former
            self._free(offsets)
            raise
        self._info[slot], self._offsets[slot] = stored.info, offsets
        self._free(former)

    def discard(self, stored: StoredAdapter) -> None:
        """Give the room of a stored adapter back that was not placed."""
        check_type("stored", stored, StoredAdapter)
        self._free(stored.take())

    def evict(self, slot: int) -> None:
        """Empty ``slot``: its entries become zero, then its room is free. No matter if it was."""
        slot = self.check_slot(slot)
        self._switch(slot, np.zeros(len(self.entries), SLOT_ENTRY))
        former, self._offsets[slot], self._info[slot] = self._offsets[slot], [], None
        self._free(former)

    def check_slot(self, slot: int) -> int:
        """``slot`` as an int. Raises ArgumentError unless it is one of the table's."""
        return check_int("slot", slot, 0, self.limits.max_loras - 1)

    def _store(
        self, offsets: dict[tuple[str, int], int], role: str, array: npt.NDArray[Any], where: str
    ) -> None:
        """Write one factor's block, unless this adapter's same array already has one."""
        key = (role, id(array))
        if key in offsets:
            return
        values = cast(array, self.dtype, where)
        offset = self.arena.alloc(values.nbytes)
        offsets[key] = offset
        packed = role == "a" and self.a_layout == PACKED
        self.arena.write(offset, pack_a(values) if packed else values)

    def _records(
        self, adapter: Adapter, offsets: dict[tuple[str, int], int], generation: int
    ) -> npt.NDArray[np.void]:
        """The slot's entries, one a row of the table; zeros where the adapter has no factors."""
        records = np.zeros(len(self.entries), SLOT_ENTRY)
        for (layer, module), factors in adapter.factors.items():
            records[self.row(layer, self._modules[module])] = (
                self.arena.address + offsets["a", id(factors.a)],
                self.arena.address + offsets["b", id(factors.b)],
                factor_stride(factors.a, self.dtype),
                factor_stride(factors.b, self.dtype),
                factors.rank,
                factors.scale,
                self.a_layout,
                generation,
            )
        return records

    def _switch(self, slot: int, records: npt.NDArray[np.void]) -> None:
        """Write the slot's entries: one strided copy on the current stream."""
        column = records.view(np.uint8).reshape(-1, SLOT_ENTRY_BYTES)
        self.entries[:, slot] = self.xp.asarray(column)

    def _free(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.arena.free(offset)
