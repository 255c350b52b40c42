"""Memory of others that enqueued work still uses: kept until that work is over.

In: an owner (a DLPack tensor, or an array), wrapped in a :class:`Lease` that our view of its memory
holds. When the view goes, an event is recorded behind the work that was enqueued with it; the owner
goes once the event has passed, which is looked at whenever another array is taken or a backend
synchronises. Nothing waits. Where the stream may be gone before the view (``lent``), the event is
the one that the last block on it left; without one the owner stays until that stream is in use
again.

The producer's own allocator may hand memory out again the moment the owner goes, on a stream that
does not wait for ours: without this, what we still read would be overwritten.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from typing import Any

from cupylora.compiler import driver
from cupylora.interop.events import put_event_back, take_event
from cupylora.interop.lent import Claim

__all__ = ["Lease", "release_finished"]

_held: dict[int, deque[_Kept]] = {}
"""What waits for its stream, by the stream's handle, in the order of work."""


class Lease:
    """Keeps ``owner`` until work enqueued on CuPy's ``stream`` of ``device`` so far is over."""

    __slots__ = ("_claim", "_device", "_owner")

    def __init__(self, owner: object, stream: Any, device: int) -> None:
        self._owner, self._claim, self._device = owner, Claim(stream), device

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        kept = _Kept(self._owner, self._claim, self._device)
        # Whatever goes wrong in the middle of someone's del statement: the owner stays held.
        _held.setdefault(int(self._claim.stream.ptr), deque()).append(kept)
        with contextlib.suppress(Exception), driver.outside_captures():
            kept.mark()
            _release_finished()


class _Kept:
    """An owner without a view, and the event behind the last work that used it."""

    def __init__(self, owner: object, claim: Claim, device: int) -> None:
        self._owner, self._device = owner, device
        self._claim: Claim | None = claim
        self._event: Any = None
        self._shared = False

    def mark(self) -> None:
        """Have an event, once: recorded now, or that of the last block on a lent stream."""
        claim = self._claim
        if claim is None:
            return
        if claim.is_at_hand():
            self._record(claim.stream)
        else:
            self._event = claim.passed()
            self._shared = True
        if self._event is not None:
            self._claim = None

    def _record(self, stream: Any) -> None:
        """Not inside a capture, which the event would join."""
        if not driver.is_capturing(int(stream.ptr)):
            event = take_event(self._device)
            event.record(stream)
            self._event, self._shared = event, False

    def is_free(self) -> bool:
        """Whether the work is over. Never waits."""
        self.mark()
        return self._event is not None and bool(self._event.done)

    def drop(self) -> None:
        """The owner goes."""
        if not self._shared:
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
