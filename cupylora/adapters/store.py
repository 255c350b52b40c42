"""Packed adapters in host memory, by name: what a load copies from, instead of reading files again.

    put(name, directory or Adapter) --> read, check, pack --> one buffer per distinct content
    expect(name, directory, blocks) --> receive, later: the same from blocks on the device
    get(name) --> the buffer; read again from its directory if it had to go

Up to ``budget_bytes``: where a new adapter needs room, those unused longest go that can be read
again; one that was given from memory stays until it is dropped, since nothing else has it. Two
names of equal content share a buffer: found by a digest of samples, then compared whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupylora.adapters.factors import Adapter
from cupylora.adapters.packed import AdapterLayout, PackedAdapter, pack_adapter
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import BlockReader, SlotTable
from cupylora.checks import check_int, check_type
from cupylora.errors import ArgumentError, CapacityError
from cupylora.host_memory import HostMemory
from cupylora.text import byte_size, quoted, shown

__all__ = ["AdapterStore", "Arrival", "StoreCounts"]

_SAMPLES = 64
_SAMPLE_BYTES = 256

_COMPARED = 4 << 20
"""Bytes that are brought from the device at a time, to be compared."""

Say = Callable[[str], object]
"""Told what is being done: "reading", "packing"."""

_Read = Callable[[int, HostMemory], None]
"""Fills memory with content from a byte on."""


@dataclass(frozen=True)
class StoreCounts:
    """hits: gets that found the buffer; reads: of directories; evictions: buffers that went;
    unkept: expected ones for which there was no memory, so that they are read again when needed."""

    hits: int = 0
    reads: int = 0
    evictions: int = 0
    unkept: int = 0


@dataclass
class _Entry:
    """One name. path: where it can be read again; packed: None while it is not in memory; digest:
    of its content, if it is; settled: set once it came or will not, where it was expected."""

    path: Path | None
    packed: PackedAdapter | None
    digest: bytes
    settled: threading.Event | None = None

    @property
    def is_coming(self) -> bool:
        """Whether it is expected."""
        return self.settled is not None and not self.settled.is_set()


class Arrival:
    """An adapter on its way into a store, for ``AdapterStore.receive``; it keeps its blocks. Nobody
    waits for one that was dropped."""

    def __init__(self, name: str, path: Path, reader: BlockReader) -> None:
        settled = threading.Event()
        self.name, self.reader = name, reader
        self.entry = _Entry(path, None, b"", settled)
        self._finalizer = weakref.finalize(self, settled.set)
        self._finalizer.atexit = False

    @property
    def layout(self) -> AdapterLayout:
        """As it is known to the store: under its name there."""
        return replace(self.reader.layout, name=self.name)

    def close(self) -> None:
        """It came, or will not."""
        self.reader.close()
        self._finalizer()


class AdapterStore:
    """A host cache of ``budget_bytes`` for adapters of ``table``'s model, limits and dtype.

    allocate: host memory of so many bytes; pinned memory makes copies fast. Calls may come from any
    thread; two that read or pack wait for one another.
    """

    def __init__(
        self,
        table: SlotTable,
        *,
        budget_bytes: int,
        allocate: Callable[[int], HostMemory] = HostMemory.new,
    ) -> None:
        check_type("table", table, SlotTable)
        self.budget_bytes = check_int("budget_bytes", budget_bytes, 0)
        self._table = table
        self._allocate = allocate
        self._entries: dict[str, _Entry] = {}
        self._cached: dict[str, _Entry] = {}  # those in memory, used longest ago first
        self._counts = StoreCounts()
        self._lock, self._packing = threading.Lock(), threading.RLock()

    @property
    def names(self) -> tuple[str, ...]:
        """All that are known, those kept longest ago first."""
        with self._lock:
            return tuple(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of distinct buffers."""
        with self._lock:
            return self._held()

    @property
    def counts(self) -> StoreCounts:
        """What has happened since the start."""
        with self._lock:
            return self._counts

    def sizes(self) -> Mapping[str, int]:
        """Bytes in memory of each name, 0 where it would be read again; shared buffers in full."""
        with self._lock:
            return {n: e.packed.nbytes if e.packed else 0 for n, e in self._entries.items()}

    def put(
        self, name: str, adapter: Adapter | str | Path, say: Say = lambda _: None
    ) -> PackedAdapter:
        """Keep ``adapter``, or the one in a directory, as ``name``, in place of what had it.

        Raises as ``read_adapter`` and ``pack_adapter`` do, CapacityError if it does not fit the
        budget beside what cannot go; the store is as before then.
        """
        path = None if isinstance(adapter, Adapter) else _path(adapter)
        with self._packing:
            return self.keep(name, self._pack(name, path or adapter, say), path)

    def keep(self, name: str, packed: PackedAdapter, path: str | Path | None) -> PackedAdapter:
        """``put`` of what is packed already; path: where it can be read again, None: nowhere.

        Raises CapacityError as ``put`` does.
        """
        check_type("packed", packed, PackedAdapter)
        path = None if path is None else _path(path)
        with self._lock:
            return self._keep(name, packed, path)

    def expect(self, name: str, path: str | Path, reader: BlockReader) -> Arrival:
        """``name`` is what the blocks hold, in place of what had it; to be received from there, and
        until then ``find`` and ``get`` wait for it. path: where it can be read again.

        Raises CapacityError as ``put`` does.
        """
        arrival = Arrival(name, _path(path), reader)
        with self._lock:
            self._leaving(arrival.layout, None, beside=name)
            self._forget(name)
            self._entries[name] = arrival.entry
        return arrival

    def receive(self, arrival: Arrival) -> None:
        """Copy what was expected, on the current stream, unless the name is another's by now.

        Where memory lacks, it will be read again when it is needed.
        """
        try:
            if self._is_expected(arrival):
                self._receive(arrival)
        except CapacityError:
            with self._lock:
                self._counts = replace(self._counts, unkept=self._counts.unkept + 1)
        finally:
            arrival.close()

    def wait(self) -> None:
        """Until all that is expected came, or will not."""
        with self._lock:
            coming = [entry.settled for entry in self._entries.values()]
        for settled in coming:
            if settled is not None:
                settled.wait()

    def get(self, name: str, say: Say = lambda _: None) -> PackedAdapter:
        """The adapter ``name``, read again if its buffer went.

        Raises ArgumentError for a name that is not known, and as ``put`` does where it is read.
        """
        found = self.find(name)
        if isinstance(found, PackedAdapter):
            return found
        with self._packing:
            found = self.find(name)  # another thread may have read it meanwhile
            if isinstance(found, PackedAdapter):
                return found
            with self._lock:
                entry = self._entries.get(name)
            packed = self._pack(name, found, say)
            with self._lock:
                if self._entries.get(name) is entry:  # else it was replaced or dropped
                    packed = self._keep(name, packed, found)
        return packed

    def find(self, name: str) -> PackedAdapter | Path:
        """The adapter ``name``, or where it can be read again if its buffer went.

        Waits for one that is expected. Raises ArgumentError for a name that is not known.
        """
        while True:
            with self._lock:
                entry = self._known(name)
                if not entry.is_coming:
                    return self._found(name, entry)
            if entry.settled is not None:
                entry.settled.wait()

    def _found(self, name: str, entry: _Entry) -> PackedAdapter | Path:
        if entry.packed is not None:
            self._cached[name] = self._cached.pop(name)  # used last
            self._counts = replace(self._counts, hits=self._counts.hits + 1)
            return _named(entry.packed, name)
        if entry.path is None:  # what cannot be read again is never let go
            raise ArgumentError(f"adapter {shown(name)} is not in memory")
        return entry.path

    @contextlib.contextmanager
    def restoring(self, name: str) -> Iterator[None]:
        """If what is inside fails, ``name`` is again what it was before."""
        with self._lock:
            before = self._entries.get(name)
        try:
            yield
        except BaseException:
            with self._lock:
                if self._entries.get(name) is not before:
                    self._forget(name)
                    if before is not None:
                        self._restore(name, before)
            raise

    def drop(self, name: str) -> None:
        """Forget ``name``. Raises ArgumentError if it is not known."""
        with self._lock:
            self._known(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._entries.pop(name, None)
        self._cached.pop(name, None)

    def _restore(self, name: str, entry: _Entry) -> None:
        """Put back what was taken out: it had room then."""
        if entry.packed is not None:
            self._make_room(entry.packed.layout, entry.packed.buffer, beside=name)
            self._cached[name] = entry
        self._entries[name] = entry

    def _keep(self, name: str, packed: PackedAdapter, path: Path | None) -> PackedAdapter:
        digest = _digest(packed.layout, packed.buffer.tobytes)
        packed = self._shared(_named(packed, name), digest)
        self._make_room(packed.layout, packed.buffer, beside=name)
        self._forget(name)
        self._entries[name] = self._cached[name] = _Entry(path, packed, digest)
        return packed

    def _is_expected(self, arrival: Arrival) -> bool:
        with self._lock:
            return self._entries.get(arrival.name) is arrival.entry

    def _receive(self, arrival: Arrival) -> None:
        """Share the buffer of what is there already, else copy to memory that was made free."""
        name, layout, read = arrival.name, arrival.layout, arrival.reader.read
        digest = _digest(layout, partial(_bytes_of, read))
        buffer = self._buffer_of_equal(layout, digest, read)
        if buffer is None:
            with self._lock:
                self._make_room(layout, None, beside=name)
            buffer = self._allocate(layout.nbytes)
            read(0, buffer)
        with self._lock:
            if self._entries.get(name) is arrival.entry:
                self._make_room(layout, buffer, beside=name)
                arrival.entry.packed = PackedAdapter(layout, buffer)
                arrival.entry.digest = digest
                self._cached[name] = arrival.entry

    def _buffer_of_equal(self, layout: AdapterLayout, digest: bytes, read: _Read) -> Any:
        """The buffer of an adapter in memory of the content that ``read`` gives; None: none has
        it."""
        with self._lock:
            found = [entry.packed for entry in self._cached.values() if entry.digest == digest]
        buffers = {id(one.buffer): one for one in found if one is not None}
        for one in buffers.values():
            if one.layout.same_blocks(layout) and _reads_as(read, one.buffer):
                return one.buffer
        return None

    def _known(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(map(shown, sorted(self._entries))) or "none"
            raise ArgumentError(
                f"adapter {shown(name)} is not in the host cache, which has: {known}; load it by "
                "its path, or put it there"
            )
        return entry

    def _pack(self, name: str, adapter: Adapter | str | Path, say: Say) -> PackedAdapter:
        table = self._table
        if not isinstance(adapter, Adapter):
            say("reading")
            adapter = read_adapter(adapter, table.model, name=name, limits=table.limits)
            with self._lock:
                self._counts = replace(self._counts, reads=self._counts.reads + 1)
        say("packing")
        return pack_adapter(
            replace(adapter, name=name),
            table.model,
            table.limits,
            table.dtype,
            table.a_layout,
            self._allocate,
        )

    def _shared(self, packed: PackedAdapter, digest: bytes) -> PackedAdapter:
        """The same with the buffer of an adapter of equal content, if there is one."""
        for entry in self._cached.values():
            other = entry.packed
            if other is not None and entry.digest == digest and packed.same_content(other):
                return replace(packed, buffer=other.buffer)
        return packed

    def _make_room(self, layout: AdapterLayout, buffer: HostMemory | None, beside: str) -> None:
        """Let go of what ``_leaving`` says."""
        gone = self._leaving(layout, buffer, beside)
        for name in gone:
            self._cached.pop(name).packed = None
        self._counts = replace(self._counts, evictions=self._counts.evictions + len(gone))

    def _leaving(self, layout: AdapterLayout, buffer: HostMemory | None, beside: str) -> list[str]:
        """Who goes so that an adapter fits, those used longest ago; buffer: None for a new one;
        beside: the name that it is to have.

        Raises CapacityError where that is not enough.
        """
        users = self._users(without=beside)
        users.setdefault(id(buffer), []).append(layout.nbytes)
        needed, gone = sum(sizes[0] for sizes in users.values()), list[str]()
        for name, entry in self._cached.items():
            if needed <= self.budget_bytes:
                break
            if name == beside or entry.path is None or entry.packed is None:
                continue
            sharing = users[id(entry.packed.buffer)]
            sharing.pop()
            gone.append(name)
            needed -= 0 if sharing else entry.packed.nbytes
        if needed > self.budget_bytes:
            raise CapacityError(
                f"adapter {shown(layout.name)} has {byte_size(layout.nbytes)}; with what "
                f"cannot be read again that is {needed} bytes, and the host cache has "
                f"{self.budget_bytes}; drop adapters or make it larger"
            )
        return gone

    def _users(self, without: str | None = None) -> dict[int, list[int]]:
        """By ``id`` of each buffer, its size for each name that has it."""
        users: dict[int, list[int]] = {}
        for name, entry in self._cached.items():
            if entry.packed is not None and name != without:
                users.setdefault(id(entry.packed.buffer), []).append(entry.packed.nbytes)
        return users

    def _held(self) -> int:
        return sum(sizes[0] for sizes in self._users().values())


def _path(path: Any) -> Path:
    """``path`` as it is found from any working directory. Raises ArgumentError for another type."""
    if not isinstance(path, str | Path):
        raise ArgumentError(f"adapter is {quoted(path)}; an Adapter or a path is needed")
    return Path(path).absolute()


def _named(packed: PackedAdapter, name: str) -> PackedAdapter:
    return replace(packed, layout=replace(packed.layout, name=name))


def _digest(layout: AdapterLayout, sample: Callable[[int, int], bytes]) -> bytes:
    """Of the table rows and of samples (start, bytes) of the content: equal for equal content."""
    found = hashlib.blake2b(layout.records.tobytes(), digest_size=16)
    found.update(str((layout.dtype, layout.a_layout, layout.sizes)).encode())
    step = max(_SAMPLE_BYTES, layout.nbytes // _SAMPLES)
    for start in range(0, layout.nbytes, step):
        found.update(sample(start, min(_SAMPLE_BYTES, layout.nbytes - start)))
    return found.digest()


def _bytes_of(read: _Read, start: int, size: int) -> bytes:
    memory = HostMemory.new(size)
    read(start, memory)
    return memory.tobytes()


def _reads_as(read: _Read, buffer: HostMemory) -> bool:
    """Whether ``read`` gives what ``buffer`` holds; stops at the first difference."""
    room = np.empty(min(_COMPARED, buffer.nbytes), np.uint8)
    for start in range(0, buffer.nbytes, _COMPARED):
        part = room[: buffer.nbytes - start]
        read(start, HostMemory.of(part))
        if not buffer.holds(start, part):
            return False
    return True
