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
from cupylora.interop.streams import put_event_back, take_event

__all__ = ["Lease", "release_finished"]

_held: dict[int, deque[_Kept]] = {}
"""What waits for its stream, by the stream's handle, in the order of work."""


class Lease:
    """Keeps ``owner`` until work enqueued on CuPy's ``stream`` of ``device`` so far is over."""

    __slots__ = ("_device", "_owner", "_stream")

    def __init__(self, owner: object, stream: Any, device: int) -> None:
        self._owner, self._stream, self._device = owner, stream, device

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        kept = _Kept(self._owner, self._stream, self._device)
        # Whatever goes wrong in the middle of someone's del statement: the owner stays held.
        _held.setdefault(int(self._stream.ptr), deque()).append(kept)
        with contextlib.suppress(Exception), driver.outside_captures():
            kept.mark()
            _release_finished()


class _Kept:
    """An owner without a view, and the event behind the last work that used it."""

    def __init__(self, owner: object, stream: Any, device: int) -> None:
        self._owner, self._stream, self._device = owner, stream, device
        self._event: Any = None

    def mark(self) -> None:
        """Record the event, once; not inside a capture, which it would join."""
        if self._event is None and not driver.is_capturing(int(self._stream.ptr)):
            event = take_event(self._device)
            event.record(self._stream)
            self._event = event

    def is_free(self) -> bool:
        """Whether the work is over. Never waits."""
        self.mark()
        return self._event is not None and bool(self._event.done)

    def drop(self) -> None:
        """The owner goes."""
        put_event_back(self._device, self._event)
        self._owner = None


def release_finished() -> None:
    """Let go of what no enqueued work uses any more. Never waits; safe from any thread."""
    if any(_held.values()):
        with driver.outside_captures():
            _release_finished()


def _release_finished() -> None:
    for waiting in tuple(_held.values()):
        while _release_first(waiting):
            pass


def _release_first(waiting: deque[_Kept]) -> bool:
    """Whether the first was free. It is taken out before it is asked: another thread, or what an
    owner's end sets off, may come here meanwhile, and must not take what it has not asked."""
    try:
        kept = waiting.popleft()
    except IndexError:
        return False
    free = False
    try:
        free = kept.is_free()
    finally:
        if free:
            kept.drop()
        else:
            waiting.appendleft(kept)
    return free
