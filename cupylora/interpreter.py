"""Settings of the whole interpreter for a span of time, also where several threads ask for them.

``no_collection``: a finalizer that runs in the middle of a capture would void it; and collections
while a large file's headers become objects, none of them garbage, take as long as all else that is
done there. ``short_turns``: a thread that works in Python for long, where another one only makes
short calls of a driver, between which it waits for its turn.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["no_collection", "short_turns"]

_TURN_SECONDS = 50e-6
"""Python's own 5 ms are several steps of a small batch."""


class _Spans:
    """A setting that holds while any of those who asked for it is inside. change: makes it, and
    returns what takes it back."""

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._restore: Callable[[], None] = _nothing

    @contextmanager
    def span(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._restore = self._change()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._restore()


def _stop_collecting() -> Callable[[], None]:
    restore = gc.enable if gc.isenabled() else _nothing
    gc.disable()
    return restore


def _shorten_turns() -> Callable[[], None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_SECONDS))
    return lambda: sys.setswitchinterval(before)


def _nothing() -> None:
    pass


no_collection = _Spans(_stop_collecting).span
"""A context: nothing is collected inside; again as before once the last one inside has left."""

short_turns = _Spans(_shorten_turns).span
"""A context: threads that wait for the interpreter get it soon."""
