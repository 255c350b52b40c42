"""Spans of time in which Python collects no garbage, also where several threads ask for them.

A finalizer that runs in the middle of a capture would void it; and collections while a large file's
headers become objects, none of them garbage, take as long as everything else that is done there.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]


class _Spans:
    """How many there are now, and whether Python collected before the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open, self._collected = 0, False

    def begin(self) -> None:
        with self._lock:
            if not self._open:
                self._collected = gc.isenabled()
                gc.disable()
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open and self._collected:
                gc.enable()


_SPANS = _Spans()


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, nothing is collected; again as before once the last one that is inside has left."""
    _SPANS.begin()
    try:
        yield
    finally:
        _SPANS.end()
