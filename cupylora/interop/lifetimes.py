"""Memory of others that enqueued work still uses: kept until that work is over.

In: an owner (a DLPack tensor, or an array), wrapped in a :class:`Lease` that our view of its memory
holds. When the view goes, an event is recorded behind the work that was enqueued with it; the owner
goes once the event has passed, which is looked at whenever another array is taken or a backend
synchronises. Nothing waits.

The producer's own allocator may hand memory out again the moment the owner goes, on a stream that
does not wait for ours: without this, what we still read would be overwritten.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from typing import Any

from cupylora.compiler import driver

__all__ = ["Lease", "release_finished"]

_held: deque[tuple[Any, Lease]] = deque()
"""Events (None: to be recorded outside a capture) and what goes when they have passed."""


class Lease:
    """Keeps ``owner`` until work enqueued on CuPy's ``stream`` of ``device`` so far is over."""

    __slots__ = ("_device", "_owner", "_stream")

    def __init__(self, owner: object, stream: Any, device: int) -> None:
        self._owner, self._stream, self._device = owner, stream, device

    def __del__(self) -> None:
        if self._owner is None or sys.is_finalizing():
            return
        kept = Lease(self._owner, self._stream, self._device)
        self._owner = None
        # Whatever goes wrong in the middle of someone's del statement: the owner stays held.
        _held.append((None, kept))
        with contextlib.suppress(Exception):
            release_finished()

    def passed(self) -> Any:
        """An event behind the stream's work, or None inside a capture: it would join the graph."""
        import cupy

        if driver.is_capturing(int(self._stream.ptr)):
            return None
        with cupy.cuda.Device(self._device):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
        return event

    def drop(self) -> None:
        """The owner goes now."""
        self._owner = None


def release_finished() -> None:
    """Let go of what no enqueued work uses any more. Never waits; safe from any thread."""
    if _held:
        with driver.outside_captures():
            _release_finished()


def _release_finished() -> None:
    for _ in range(len(_held)):
        try:
            event, kept = _held.popleft()
        except IndexError:  # another thread looks at them
            return
        done = False
        try:
            if event is None:
                event = kept.passed()
            done = event is not None and bool(event.done)
        finally:
            if done:
                kept.drop()
            else:
                _held.append((event, kept))
