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
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.device_factors import (
    FactorArrays,
    borrow_factors,
    check_arrays,
    find_not_finite,
    unpack_arrays,
)
from cupylora.adapters.factors import Adapter
from cupylora.adapters.packed import (
    BLOCK_ALIGNMENT,
    AdapterLayout,
    PackedAdapter,
    block_bytes,
    lay_out,
    layout_of,
    misfit,
    modules_of,
)
from cupylora.checks import check_choice, check_int, check_type
from cupylora.dtypes import resolve_dtype
from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError, RoomError
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.text import counted, shown
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

        Raises RoomError, with the bytes needed and free, if no gap holds it.
        """
        need = block_bytes(check_int("size", size, 1))
        fitting = [gap for gap in self._gaps if gap[1] >= need]
        if not fitting:
            largest = max((length for _, length in self._gaps), default=0)
            raise RoomError(
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
        _zero(self.buffer[end : offset + self._blocks[offset]])

    def fill(self, offsets: Sequence[int], sizes: Sequence[int], data: npt.NDArray[Any]) -> None:
        """Fill blocks whole: the next ``sizes[i]`` bytes of ``data`` go to the block at
        ``offsets[i]``. Blocks that stand side by side are one copy."""
        for offset, start, size in self._runs(offsets, sizes):
            _put(self.buffer[offset : offset + size], data[start : start + size])

    def read(
        self, offsets: Sequence[int], sizes: Sequence[int], data: npt.NDArray[np.uint8]
    ) -> None:
        """The other way round: ``data`` (host memory) becomes what the blocks hold."""
        for offset, start, size in self._runs(offsets, sizes):
            _get(self.buffer[offset : offset + size], data[start : start + size])

    def clear(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        for offset, _, size in self._runs(offsets, sizes):
            _zero(self.buffer[offset : offset + size])

    def _runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
        """Blocks that stand side by side as one: where in the arena, where among them, bytes."""
        runs: list[list[int]] = []
        at = 0
        for offset, size in zip(offsets, sizes, strict=True):
            self._require_block(offset)
            if runs and runs[-1][0] + runs[-1][2] == offset:
                runs[-1][2] += size
            else:
                runs.append([offset, at, size])
            at += size
        return runs

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


def _zero(target: Array) -> None:
    """Clear bytes, with no kernel: CuPy would compile one at its first use."""
    if isinstance(target, np.ndarray):
        target[...] = 0
    elif target.size:
        target.data.memset_async(0, target.nbytes)


def _get(source: Array, target: npt.NDArray[Any]) -> None:
    """Copy an array of either module to host bytes."""
    if isinstance(source, np.ndarray):
        target[...] = source
    else:
        source.get(out=target)


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


class _Room:
    """Blocks that nobody serves from yet. If whoever has it drops it, as where an interrupt came
    at a bad moment, the blocks go to ``dropped``, and are free at the table's next store."""

    def __init__(self, dropped: deque[list[int]]) -> None:
        self.offsets: list[int] = []
        self._finalizer = weakref.finalize(self, dropped.append, self.offsets)
        self._finalizer.atexit = False

    def take(self) -> list[int]:
        """The blocks, which are the caller's from now on."""
        self._finalizer.detach()
        return self.offsets


@dataclass(eq=False)
class StoredAdapter:
    """What ``SlotTable.store`` made: an adapter's blocks, and the rows that will point at them.

    layout: what it was made of. One that is dropped is discarded by the table's next store.
    """

    layout: AdapterLayout
    info: SlotInfo
    records: npt.NDArray[np.void]
    _room: _Room | None

    @property
    def offsets(self) -> list[int] | None:
        """Where its blocks are in the arena; None once it was placed or discarded."""
        return None if self._room is None else self._room.offsets

    def take(self) -> list[int]:
        """The blocks, once. Raises ArgumentError where they were taken before."""
        if self._room is None:
            raise ArgumentError(f"adapter {self.info.name} was placed or discarded before")
        room, self._room = self._room, None
        return room.take()


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
        self._dropped: deque[list[int]] = deque()

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
        arena = self.arena
        if isinstance(adapter, PackedAdapter):
            layout, buffer = adapter.layout, adapter.buffer
            return self.store_layout(layout, lambda at: arena.fill(at, layout.sizes, buffer))
        check_type("adapter", adapter, Adapter)
        layout, blocks = layout_of(adapter, self.model, self.limits, self.dtype, self.a_layout)

        def write(offsets: Sequence[int]) -> None:
            for offset, block in zip(offsets, blocks, strict=True):
                arena.write(offset, block.values(self.dtype, self.a_layout))

        return self.store_layout(layout, write)

    def store_layout(
        self, layout: AdapterLayout, write: Callable[[Sequence[int]], None]
    ) -> StoredAdapter:
        """``store`` of what ``write`` puts into the layout's blocks, given their offsets in the
        arena. Raises ArgumentError for a layout of another table, CapacityError as ``load`` does,
        and what ``write`` raises."""
        self._check_layout(layout)
        while self._dropped:
            self._free(self._dropped.popleft())
        room = _Room(self._dropped)
        offsets = room.offsets
        try:
            for size in layout.sizes:
                offsets.append(self.arena.alloc(size))
            write(offsets)
        except BaseException:
            self._free(room.take())
            raise
        self._loads += 1
        records = layout.records.copy()
        used = records["rank"] != 0
        starts = np.array(offsets, np.uint64) + np.uint64(self.arena.address)
        for pointer in ("a_ptr", "b_ptr"):
            records[pointer][used] = starts[layout.records[pointer][used].astype(np.intp)]
        records["generation"][used] = self._loads
        info = SlotInfo(layout.name, self._loads, layout.max_rank, layout.nbytes)
        return StoredAdapter(layout, info, records, room)

    def store_arrays(
        self, name: str, factors: Mapping[tuple[int, str], FactorArrays]
    ) -> StoredAdapter:
        """``store`` of arrays that are on this backend already, as a training loop has them.

        factors: by (layer, module name), arrays of any library. They never pass through the host.
        Raises ArgumentError for keys and arrays that do not fit, AdapterFormatError for values that
        are not finite, CapacityError for a rank beyond the limits or where the arena lacks room.
        """
        check_type("name", name, str)
        on_device = self.xp is not np
        factors = borrow_factors(name, factors, on_device=on_device)
        check_arrays(name, factors, self.model, self.limits, self.dtype, on_device=on_device)
        layout, blocks = lay_out(
            name, factors, self.model, self.dtype, self.a_layout, "device arrays"
        )
        arrays = [block.array for block in blocks]
        packed = [block.is_packed(self.a_layout) for block in blocks]

        def write(offsets: Sequence[int]) -> None:
            self.arena.clear(offsets, layout.sizes)
            target = self.arena.buffer
            try:
                unpack_arrays(arrays, offsets, target, packed=packed, xp=self.xp)
            except AdapterFormatError:
                find_not_finite(name, factors)
                raise

        return self.store_layout(layout, write)

    def _check_layout(self, layout: AdapterLayout) -> None:
        for field, got, needed in (
            ("dtype", layout.dtype, self.dtype),
            ("a_layout", layout.a_layout, self.a_layout),
            ("table rows", len(layout.records), len(self.entries)),
        ):
            if got != needed:
                raise ArgumentError(
                    f"packed adapter {layout.name} has {field} {got}, the table {needed}; pack it "
                    "for this table"
                )
        wrong = misfit(layout, modules_of(self.model))
        if wrong:
            raise ArgumentError(
                f"packed adapter {shown(layout.name)} is not of model {shown(self.model.name)} "
                f"({wrong}); pack it for this model"
            )
        if layout.max_rank > self.limits.max_rank:
            raise CapacityError(
                f"packed adapter {layout.name} has rank {layout.max_rank}, which exceeds max_rank "
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

    def read_back(
        self, stored: StoredAdapter, allocate: Callable[[int], npt.NDArray[np.uint8]]
    ) -> PackedAdapter:
        """The host's copy of a stored adapter that was not placed; ``allocate`` gives memory of so
        many bytes. Raises ArgumentError if it was placed or discarded."""
        check_type("stored", stored, StoredAdapter)
        if stored.offsets is None:
            raise ArgumentError(f"adapter {stored.info.name} was placed or discarded before")
        buffer = allocate(stored.layout.nbytes)
        self.arena.read(stored.offsets, stored.layout.sizes, buffer)
        return PackedAdapter(stored.layout, buffer)

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

    def _switch(self, slot: int, records: npt.NDArray[np.void]) -> None:
        """Write the slot's entries: one strided copy on the current stream."""
        column = records.view(np.uint8).reshape(-1, SLOT_ENTRY_BYTES)
        self.entries[:, slot] = self.xp.asarray(column)

    def _free(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.arena.free(offset)
