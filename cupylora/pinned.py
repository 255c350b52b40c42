"""Pinned host memory for the host cache: given out by size, and kept for the next of that size.

Pinning takes long (some GB a second) and so does giving it back, so memory that an adapter leaves
serves the next one of its size class. What nobody has goes back to the system where memory in use
and kept together would pass the limit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.checks import check_int
from cupylora.errors import CapacityError
from cupylora.size_class import size_class

__all__ = ["PinnedBuffers"]

_SMALLEST = 4096


class PinnedBuffers:
    """Buffers of memory that ``make`` pins; ``limit``: bytes in use and kept together, as far as
    what is in use allows.

    make: size in bytes → an object with that memory (``numpy.frombuffer`` reads it), which frees it
    when it goes; raises CapacityError. May be called from any thread.
    """

    def __init__(self, make: Callable[[int], Any], limit: int) -> None:
        self._make, self._limit = make, check_int("limit", limit, 0)
        self._kept: dict[int, list[Any]] = {}
        self._used = self._idle = 0
        # Arrays may be collected in the middle of a call here, in the same thread.
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        """Of buffers that somebody has."""
        return self._used

    @property
    def idle_bytes(self) -> int:
        """Kept for later ones."""
        return self._idle

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A buffer of ``nbytes``, its content undefined; given back when the array, and all views
        of it, are gone. Raises CapacityError where ``make`` does."""
        size = size_class(max(1, check_int("nbytes", nbytes, 0)), _SMALLEST)
        memory = self._reused(size)
        if memory is None:
            memory = self._made(size)
        buffer = np.frombuffer(memory, np.uint8, nbytes)
        with self._lock:
            self._used += size
        weakref.finalize(buffer, self._give_back, memory, size).atexit = False
        return buffer

    def _reused(self, size: int) -> Any:
        with self._lock:
            if not self._kept.get(size):
                return None
            self._idle -= size
            return self._kept[size].pop()

    def _made(self, size: int) -> Any:
        with self._lock:
            if self._used + self._idle + size > self._limit:
                self._drop()
        try:
            return self._make(size)
        except CapacityError:
            with self._lock:
                if not self._idle:
                    raise
                self._drop()
            return self._make(size)

    def _drop(self) -> None:
        self._kept.clear()
        self._idle = 0

    def _give_back(self, memory: Any, size: int) -> None:
        with self._lock:
            self._used -= size
            if self._used + self._idle + size <= self._limit:
                self._kept.setdefault(size, []).append(memory)
                self._idle += size
