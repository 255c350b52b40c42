"""Pinned host memory for the host cache, pinned in chunks and given out in pieces of them.

Pinning takes long (a few GB a second) and so does giving it back, so a chunk stays: what an adapter
leaves serves the next ones, whatever their size, since memory may come in several parts. A chunk
goes back to the system only where all chunks would be beyond the limit.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupylora.checks import check_int
from cupylora.gaps import Gaps
from cupylora.host_memory import HostBytes, HostMemory

__all__ = ["PinnedPool"]

CHUNK_BYTES = 64 << 20
"""Copies of this size run at a link's full rate."""

GRANULE = 4096
"""Bytes: parts start and end at multiples of it."""


@dataclass(frozen=True, eq=False)
class _Chunk:
    """memory: as ``make`` gave it; base: its place in the pool's numbering."""

    memory: Any
    base: int
    size: int


class PinnedPool:
    """Memory that ``make`` pins; ``limit``: bytes of all chunks, as far as what is in use allows.

    make: size in bytes → an object with that memory (``numpy.frombuffer`` reads it), which frees it
    when it goes; raises CapacityError. May be called from any thread.
    """

    def __init__(
        self, make: Callable[[int], Any], limit: int, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._make, self._limit = make, _rounded(check_int("limit", limit, 0))
        self._chunk_bytes = _rounded(check_int("chunk_bytes", chunk_bytes, 1))
        self._chunks: dict[int, _Chunk] = {}  # by base, which no two ever have in common
        self._held = self._next = 0
        self._gaps = Gaps()
        # Arrays may be collected anywhere, also in the middle of a call here, so what they leave
        # waits here for the next call.
        self._left: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Of all chunks."""
        with self._lock:
            self._collect()
            return self._held

    @property
    def used_bytes(self) -> int:
        """Of what somebody has."""
        with self._lock:
            self._collect()
            return self._held - self._gaps.total

    def take(self, nbytes: int) -> HostMemory:
        """Memory of ``nbytes``, its content undefined; given back when its parts, and all views of
        them, are gone. Raises CapacityError where ``make`` does."""
        need = _rounded(check_int("nbytes", nbytes, 0))
        with self._lock:
            self._collect()
            taken: list[tuple[int, int]] = []
            parts: list[HostBytes] = []
            try:
                while need:
                    taken.append(self._cut(need))
                    need -= taken[-1][1]
                for start, size in taken:
                    parts.append(self._part(start, size, min(size, nbytes)))
                    nbytes -= size
            except BaseException:
                self._left.extend(taken[len(parts) :])  # the others go with their arrays
                raise
        return HostMemory(parts)

    def _cut(self, need: int) -> tuple[int, int]:
        """A span for all of ``need``, else for as much as there is in one place."""
        span = self._gaps.smallest(need) or self._gaps.largest
        if not span[1]:
            span = self._new_chunk(need)
        size = min(need, span[1])
        return self._gaps.cut(span, size), size

    def _new_chunk(self, need: int) -> tuple[int, int]:
        """Where nothing is free: a chunk, or what the limit leaves; beyond it, what lacks."""
        left = self._limit - self._held
        size = min(self._chunk_bytes, left if left > 0 else need)
        chunk = _Chunk(self._make(size), self._next, size)
        self._next += size + GRANULE  # so that gaps of two chunks never merge
        self._chunks[chunk.base] = chunk
        self._held += size
        self._gaps.give(chunk.base, size)
        return chunk.base, size

    def _part(self, start: int, size: int, nbytes: int) -> HostBytes:
        chunk = self._chunk_of(start)
        part = np.frombuffer(chunk.memory, np.uint8, nbytes, start - chunk.base)
        weakref.finalize(part, self._left.append, (start, size)).atexit = False
        return part

    def _chunk_of(self, place: int) -> _Chunk:
        bases = list(self._chunks)  # in order: a new one is beyond all others
        return self._chunks[bases[bisect(bases, place) - 1]]

    def _collect(self) -> None:
        """Make free what arrays left; let chunks go that are beyond the limit."""
        while self._left:
            self._gaps.give(*self._left.popleft())
        if self._held <= self._limit:
            return
        for base, size in [span for span in self._gaps if span[0] in self._chunks]:
            if size == self._chunks[base].size and self._held > self._limit:
                self._gaps.cut((base, size), size)
                self._held -= size
                del self._chunks[base]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRANULE) * GRANULE
