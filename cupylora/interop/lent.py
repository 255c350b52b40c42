"""Streams that somebody else may destroy: used while they are lent to us, never touched after.

A stream of CuPy's own lives as long as its object, and the default streams live always. Any other,
given by its number or by an object whose library destroys it when it likes, is there for the length
of a call or of a block (``use_stream``, ``LoraRuntime.on_stream``). Afterwards its handle may name
nothing, which the driver answers with a crash; so whoever will have to know how far its work has
come holds a :class:`Claim`, for which every block leaves an event behind when it ends.

In: CuPy's streams. Out: blocks, and claims.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

from cupylora.compiler import driver
from cupylora.interop.events import take_event

__all__ = ["Claim", "block_of", "is_lent"]

_DEFAULT_STREAMS = (0, 1, 2)
_PROTOCOL = 0
"""Version of ``__cuda_stream__``."""

# Collecting garbage in here may end a claim, in the same thread.
_lock = threading.RLock()


def is_lent(stream: Any) -> bool:
    """Whether a stream that CuPy has may be destroyed while its object lives."""
    if int(stream.ptr) in _DEFAULT_STREAMS:
        return False
    import cupy

    # CuPy's own mark of streams that it made from other objects. Without it, nothing is known.
    other: Any = getattr(stream, "_foreign_stream_ref", stream)
    return other is not None or not isinstance(stream, cupy.cuda.Stream)


class _Lent:
    """What is known of a lent stream: the blocks under way on it, and the event behind the last.

    ended: counts the blocks that left an event.
    """

    def __init__(self, handle: int) -> None:
        self.handle, self.ended = handle, 0
        self.claims: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._event: Any = None
        self._blocks, self._asked = 0, False

    def begin(self) -> None:
        """A block begins."""
        with _lock:
            self._blocks += 1

    def end(self, stream: Any) -> None:
        """A block ends, the stream still there."""
        with _lock:
            try:
                if self.claims:
                    self._mark(stream)
            finally:
                self._blocks -= 1

    def _mark(self, stream: Any) -> None:
        """Record an event; in a capture, which it would join, there is none."""
        with driver.outside_captures():
            if driver.is_capturing(self.handle):
                self._event = None
                return
            if self._event is None or self._asked:
                self._event, self._asked = take_event(_current_device()), False
            self._event.record(stream)
            self.ended += 1

    def passed(self) -> Any:
        """The event behind all blocks; None while one is under way, or where none is known."""
        with _lock:
            if self._blocks:
                return None
            self._asked = True
            return self._event


_known: weakref.WeakValueDictionary[int, _Lent] = weakref.WeakValueDictionary()
"""By handle, kept by blocks and claims."""


def _lent(stream: Any) -> _Lent:
    handle = int(stream.ptr)
    with _lock:
        found = _known.get(handle)
        if found is None:
            found = _known[handle] = _Lent(handle)
        return found


class Claim:
    """Tells how far the work on a stream of CuPy's has come, without touching one that may be gone.

    To others it is that stream (``__cuda_stream__``).
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._lent = _lent(stream) if is_lent(stream) else None
        if self._lent is not None:
            with _lock:
                self._begun = self._lent.ended
                self._lent.claims.add(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        return _PROTOCOL, int(self.stream.ptr)

    def is_at_hand(self) -> bool:
        """Whether the stream is certainly there: ours, or the current one of a caller's block."""
        if self._lent is None:
            return True
        import cupy

        return int(cupy.cuda.get_current_stream().ptr) == self._lent.handle

    def passed(self) -> Any:
        """An event behind what blocks enqueued on a lent stream, for those who come after them.

        None where there is none: of our own streams, while a block is under way, and where work was
        enqueued otherwise than in blocks.
        """
        if self._lent is None or self._lent.ended == self._begun:
            return None
        return self._lent.passed()


class _Block:
    """A lent stream is the current one inside. May be entered again inside, and by any thread."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._lent = stream, _lent(stream)

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._lent.begin()

    def __exit__(self, *raised: object) -> None:
        try:
            self._lent.end(self._stream)
        finally:
            self._stream.__exit__(*raised)


def block_of(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, CuPy's ``stream`` is the current one; for as many blocks as are wanted."""
    block: contextlib.AbstractContextManager[Any] = _Block(stream) if is_lent(stream) else stream
    return block


def _current_device() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())
