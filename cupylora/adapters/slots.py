"""Where adapters live: blocks in an arena, and the table that kernels look a slot up in.

``SlotTable.load`` takes an :class:`Adapter` (row-major), writes each distinct factor as one
block into the :class:`Arena` (A packed, or row-major where its readers need that; B row-major) and
then the slot's entries. The ops read ``entries_of``. The same code serves NumPy and CuPy: ``xp`` is
the array module; with CuPy, work goes to the current stream, blocks before entries.

Invariants: entries of a slot point at complete blocks of its own adapter or are zero (rank 0, null
pointers); a block's every byte is written, the padding up to its size class with zeros, so no
former tenant shows; a failed load changes nothing: all that can fail comes before the switch of the
entries, and gives back what it took.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.arena import Arena, Array, Blocks, new_bytes, put_column
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
from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError
from cupylora.host_memory import HostMemory
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.text import counted, shown
from cupylora.worklists import PACKED, ROW_MAJOR, SLOT_ENTRY, SLOT_ENTRY_BYTES

__all__ = [
    "BLOCK_ALIGNMENT",
    "Arena",
    "BlockReader",
    "SlotInfo",
    "SlotTable",
    "StoredAdapter",
    "adapter_bytes",
    "block_bytes",
]


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
    at a bad moment, its runs go to ``dropped``, and are free at the table's next store."""

    def __init__(self, dropped: deque[list[int]], arena: Arena, sizes: Sequence[int]) -> None:
        self._runs: list[int] = []
        self._finalizer = weakref.finalize(self, dropped.append, self._runs)
        self._finalizer.atexit = False
        self.blocks = arena.take(sizes)
        self._runs += [run.offset for run in self.blocks.runs]

    def take(self) -> list[int]:
        """The runs' offsets, which are the caller's from now on."""
        self._finalizer.detach()
        return self._runs


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
    def blocks(self) -> Blocks | None:
        """Where its blocks are in the arena; None once it was placed or discarded."""
        return None if self._room is None else self._room.blocks

    def take(self) -> list[int]:
        """The blocks' runs, once. Raises ArgumentError where they were taken before."""
        if self._room is None:
            raise ArgumentError(f"adapter {self.info.name} was placed or discarded before")
        room, self._room = self._room, None
        return room.take()


_Done = Callable[[Sequence[int]], None]


class BlockReader:
    """Reads the blocks of an adapter, which stay what they are until ``close`` (or until this is
    dropped), also where its slot goes to another one meanwhile. May be used from any thread."""

    def __init__(self, layout: AdapterLayout, blocks: Blocks, arena: Arena, done: _Done) -> None:
        self.layout = layout
        self._blocks, self._arena = blocks, arena
        self._finalizer = weakref.finalize(self, done, [run.offset for run in blocks.runs])
        self._finalizer.atexit = False

    def read(self, start: int, memory: HostMemory) -> None:
        """``memory`` becomes what the blocks, one behind the other, hold from byte ``start`` on."""
        self._arena.read(self._blocks, start, memory)

    def close(self) -> None:
        """The blocks may go."""
        self._finalizer()


class _Readers:
    """Runs of blocks that somebody reads, which are freed when nobody does any more.

    dropped: where they go then. May be called from any thread.
    """

    def __init__(self, dropped: deque[list[int]]) -> None:
        self._dropped = dropped
        self._count: dict[int, int] = {}
        self._late: set[int] = set()
        # Readers may be collected in the middle of a call here, in the same thread.
        self._lock = threading.RLock()

    def begin(self, runs: Iterable[int]) -> None:
        with self._lock:
            for run in runs:
                self._count[run] = self._count.get(run, 0) + 1

    def end(self, runs: Iterable[int]) -> None:
        with self._lock:
            for run in runs:
                self._count[run] -= 1
                if not self._count[run]:
                    del self._count[run]
                    if run in self._late:
                        self._late.remove(run)
                        self._dropped.append([run])

    def unread(self, runs: Iterable[int]) -> list[int]:
        """Those of ``runs``, which are to be freed, that can be now."""
        with self._lock:
            runs = list(runs)
            self._late.update(run for run in runs if run in self._count)
            return [run for run in runs if run not in self._count]


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
        self.entries: Array = new_bytes(xp.zeros, shape, "a slot table", "use a smaller max_loras")
        self._info: list[SlotInfo | None] = [None] * limits.max_loras
        self._offsets: list[list[int]] = [[] for _ in range(limits.max_loras)]
        self._loads = 0
        self._dropped: deque[list[int]] = deque()
        self._readers = _Readers(self._dropped)

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
            return self.store_layout(layout, lambda blocks: arena.fill(blocks, buffer))
        check_type("adapter", adapter, Adapter)
        layout, contents = layout_of(adapter, self.model, self.limits, self.dtype, self.a_layout)

        def write(blocks: Blocks) -> None:
            places = zip(blocks.offsets.tolist(), layout.sizes, contents, strict=True)
            for offset, size, content in places:
                arena.write(offset, content.values(self.dtype, self.a_layout), size)

        return self.store_layout(layout, write)

    def store_layout(self, layout: AdapterLayout, write: Callable[[Blocks], None]) -> StoredAdapter:
        """``store`` of what ``write`` puts into the layout's blocks, given their places in the
        arena. Raises ArgumentError for a layout of another table, CapacityError as ``load`` does,
        and what ``write`` raises."""
        self._check_layout(layout)
        self.collect()
        room = _Room(self._dropped, self.arena, layout.sizes)
        try:
            write(room.blocks)
        except BaseException:
            self._free(room.take())
            raise
        self._loads += 1
        records = layout.records.copy()
        used = records["rank"] != 0
        starts = room.blocks.offsets.astype(np.uint64) + np.uint64(self.arena.address)
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
        layout, contents = lay_out(
            name, factors, self.model, self.dtype, self.a_layout, "device arrays"
        )
        arrays = [content.array for content in contents]
        packed = [content.is_packed(self.a_layout) for content in contents]

        def write(blocks: Blocks) -> None:
            self.arena.clear(blocks)
            target, offsets = self.arena.buffer, blocks.offsets.tolist()
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

    def reader(self, stored: StoredAdapter) -> BlockReader:
        """For what a stored adapter's blocks hold, that was not placed yet. Raises ArgumentError if
        it was placed or discarded."""
        check_type("stored", stored, StoredAdapter)
        blocks = stored.blocks
        if blocks is None:
            raise ArgumentError(f"adapter {stored.info.name} was placed or discarded before")
        self._readers.begin(run.offset for run in blocks.runs)
        return BlockReader(stored.layout, blocks, self.arena, self._readers.end)

    def discard(self, stored: StoredAdapter) -> None:
        """Give the room of a stored adapter back that was not placed."""
        check_type("stored", stored, StoredAdapter)
        self._free(stored.take())

    def evict(self, slot: int) -> None:
        """Empty ``slot``: its entries become zero, then its room is free. No matter if it was."""
        slot = self.check_slot(slot)
        self._switch(slot, np.zeros(len(self.entries), SLOT_ENTRY))
        former, self._offsets[slot], self._info[slot] = self._offsets[slot], [], None
        self._dropped.append(former)
        self.collect()

    def check_slot(self, slot: int) -> int:
        """``slot`` as an int. Raises ArgumentError unless it is one of the table's."""
        return check_int("slot", slot, 0, self.limits.max_loras - 1)

    def _switch(self, slot: int, records: npt.NDArray[np.void]) -> None:
        """Write the slot's entries: one strided copy on the current stream."""
        rows = records.view(np.uint8).reshape(-1, SLOT_ENTRY_BYTES)
        put_column(self.entries, slot, rows, self.xp)

    def collect(self) -> bool:
        """Free what was dropped, and what nobody reads any more; whether there was any."""
        runs = list[int]()
        while self._dropped:
            runs += self._dropped.popleft()
        return self._give_back(runs)

    def _free(self, runs: Iterable[int]) -> None:
        """Give runs of blocks back, those that somebody reads once nobody does."""
        self._give_back(runs)
        self.collect()

    def _give_back(self, runs: Iterable[int]) -> bool:
        unread = self._readers.unread(runs)
        for offset in unread:
            self.arena.free(offset)
        return bool(unread)
