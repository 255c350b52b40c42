"""From files straight into the arena: the device converts, unstacks and packs.

    open_adapter --> plan_import: blocks, and which bytes become which elements of them
    file bytes --> pinned staging --> device staging --> ops.unpack_factors --> blocks of the arena

The host only reads, in a few threads: one copies from the page cache at a fraction of what the link
to the device takes, and storage answers several requests faster than one. Blocks are not published
before all of it is over, and a value that is not finite, which the device tells by one word at the
end, refuses the adapter; the host's own way of reading then says which. Both ways give the same
bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora import ops
from cupylora.adapters.arena import Blocks
from cupylora.adapters.import_plan import (
    Chunk,
    ImportPlan,
    chunks_of,
    most_pieces,
    plan_import,
)
from cupylora.adapters.peft import open_adapter, read_adapter
from cupylora.adapters.safetensors_file import WeightFiles
from cupylora.adapters.slots import SlotTable, StoredAdapter
from cupylora.backend import ArrayBackend
from cupylora.checks import check_int, check_type
from cupylora.interpreter import no_collection, short_turns
from cupylora.reference.unpack_factors import PIECE_ELEMENTS
from cupylora.worklists import FACTOR_PIECE_BYTES

__all__ = ["Importer"]

STAGING_BYTES = 16 << 20
"""Of a file at a time."""

READERS = 4
"""Parts of a file that are read at a time."""

STAGING_DEPTH = READERS + 2
"""Parts of a file that may be under way: those that are read, one copied, one unpacked."""

_ALIGNMENT = 16

Say = Callable[[str], object]


class _FaultError(Exception):
    """The device met a value that cannot be applied."""


class Importer:
    """Brings adapters' files into arenas of ``backend``, through staging of its own.

    staging_bytes: of a file (at least 256 KiB) that travel together; six times as much is taken
    in pinned host memory and on the device at the first import, and kept.
    """

    def __init__(self, backend: ArrayBackend, *, staging_bytes: int = STAGING_BYTES) -> None:
        self._backend = backend
        self._bytes = check_int("staging_bytes", staging_bytes, 4 * PIECE_ELEMENTS)
        self._rooms: list[_Staging] = []
        self._lock = threading.Lock()

    def store(
        self, path: str | Path, table: SlotTable, *, name: str, say: Say = lambda _: None
    ) -> StoredAdapter:
        """What ``table.store(read_adapter(path, ...))`` gives.

        Work goes to the current stream and is over on return. May be called from any thread, for
        tables of their own. Raises as those two do, ArgumentError for a ``name`` that is none.
        """
        check_type("name", name, str)
        say("reading")
        with contextlib.ExitStack() as files:
            with no_collection(), short_turns():
                opened = files.enter_context(open_adapter(path, table.model))
                plan = plan_import(table, name, opened)
            try:
                return table.store_layout(plan.layout, self._writer(opened.weights, plan, table))
            except _FaultError:
                pass  # which value it is, the host finds
        say("packing")
        return table.store(read_adapter(path, table.model, name=name, limits=table.limits))

    def _writer(
        self, weights: WeightFiles, plan: ImportPlan, table: SlotTable
    ) -> Callable[[Blocks], None]:
        def write(blocks: Blocks) -> None:
            table.arena.clear(blocks)
            pieces = plan.pieces.copy()
            offsets = blocks.offsets.astype(np.uint64)
            pieces["target"] = offsets[plan.pieces["target"].astype(np.intp)]
            fault = self._backend.zeros(1, np.int32)
            parts = self._read(weights, chunks_of(plan, self._bytes))
            with self._lock, contextlib.closing(parts):  # the staging is one for all
                for chunk, staging in parts:
                    self._send(plan, chunk, pieces[chunk.pieces], staging, table, fault)
            if self._backend.to_host(fault)[0]:
                raise _FaultError

        return write

    def _read(
        self, weights: WeightFiles, chunks: Iterator[Chunk]
    ) -> Generator[tuple[Chunk, _Staging]]:
        """Parts of files in staging, in order, while others are read. Each staging may be filled
        again as soon as the next part is asked for."""
        free, ahead = deque(self._staging()), deque[tuple[Chunk, _Staging, Future[None]]]()
        with ThreadPoolExecutor(READERS, thread_name_prefix="cupylora-read") as readers:
            while True:
                for chunk in itertools.islice(chunks, READERS - len(ahead)):
                    staging = free.popleft()
                    free.append(staging)
                    staging.wait(self._backend)  # here: a reader has no device
                    target = staging.host[: chunk.end - chunk.begin]
                    done = readers.submit(weights.read_into, chunk.file, chunk.begin, target)
                    ahead.append((chunk, staging, done))
                if not ahead:
                    return
                chunk, staging, done = ahead.popleft()
                done.result()
                yield chunk, staging

    def _staging(self) -> list[_Staging]:
        while len(self._rooms) < STAGING_DEPTH:
            self._rooms.append(_Staging.new(self._backend, self._bytes))
        return self._rooms

    def _send(
        self,
        plan: ImportPlan,
        chunk: Chunk,
        pieces: npt.NDArray[np.void],
        staging: _Staging,
        table: SlotTable,
        fault: Any,
    ) -> None:
        """Enqueue the copy of what was read, and what becomes of it."""
        pieces["source"] = plan.begin[chunk.pieces] - chunk.begin
        size = chunk.end - chunk.begin
        at = -(-size // _ALIGNMENT) * _ALIGNMENT
        end = at + pieces.nbytes
        staging.host[at:end] = pieces.view(np.uint8)
        self._backend.upload(staging.device[:end], staging.host[:end])
        ops.unpack_factors(
            staging.device[:at],
            staging.device[at:end].reshape(-1, FACTOR_PIECE_BYTES),
            table.arena.buffer,
            dtype=table.dtype,
            most_elements=int(pieces["count"].max()),
            fault=fault,
        )
        staging.used = self._backend.mark()


@dataclass
class _Staging:
    """A part of a file and its records, in host memory and on the device. used: the last work that
    reads them."""

    host: npt.NDArray[np.uint8]
    device: Any
    used: Any = None

    @classmethod
    def new(cls, backend: ArrayBackend, nbytes: int) -> _Staging:
        room = nbytes + _ALIGNMENT + most_pieces(nbytes) * FACTOR_PIECE_BYTES
        return cls(backend.host_buffer(room), backend.empty(room, np.uint8))

    def wait(self, backend: ArrayBackend) -> None:
        """Until it may be written again."""
        if self.used is not None:
            backend.wait_for(self.used)
