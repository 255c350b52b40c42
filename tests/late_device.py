"""A stand-in for a device whose work is done as late as may be: when something waits for it.

Its memory is the host's. What reads host memory behind the host's back, such as a copy, finds there
what is there by then. In: a :class:`LateStream`, and events and copies on it. Out: how often it was
waited for.
"""

from __future__ import annotations

import ctypes
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cupylora.backend import NumpyBackend

__all__ = ["LateBackend", "LateEvent", "LateStream", "RefusedError"]

Work = Callable[[], object]


class RefusedError(Exception):
    """What the driver says."""


class LateStream:
    """capturing: where work goes instead. synchronised: how often all of it was waited for."""

    ptr = 7

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()
        self.enqueued = self.over = self.synchronised = 0
        self.capturing: list[Work] | None = None

    def enqueue(self, work: Work) -> None:
        if self.capturing is not None:
            self.capturing.append(work)
            return
        self._queue.append(work)
        self.enqueued += 1

    def run_until(self, mark: int) -> None:
        while self.over < mark:
            self._queue.popleft()()
            self.over += 1

    def synchronize(self) -> None:
        self.synchronised += 1
        self.run_until(self.enqueued)

    def __enter__(self) -> None:
        """Nothing: who enqueues names the stream."""

    def __exit__(self, *_: object) -> None:
        """Nothing."""


class LateEvent:
    """asked: how often any event was asked or waited for."""

    asked = 0

    def __init__(self, disable_timing: bool = False) -> None:
        self._stream: LateStream | None = None
        self._mark = 0

    def record(self, stream: LateStream) -> None:
        self._stream, self._mark = stream, stream.enqueued

    @property
    def done(self) -> bool:
        LateEvent.asked += 1
        return self._stream is None or self._stream.over >= self._mark

    def synchronize(self) -> None:
        LateEvent.asked += 1
        if self._stream is not None:
            self._stream.run_until(self._mark)


class LateBackend(NumpyBackend):
    """What staging asks of a device. stream: None: copies are made at once. refuse: copies fail."""

    name = "cuda"

    def __init__(self, stream: LateStream | None = None) -> None:
        self.stream, self.refuse = stream, False
        runtime = types.SimpleNamespace(
            memcpyAsync=self._copy, memcpyHostToDevice=1, CUDARuntimeError=RefusedError
        )
        cuda = types.SimpleNamespace(runtime=runtime)
        self.xp = types.SimpleNamespace(cuda=cuda, zeros=np.zeros, empty=np.empty)

    def _copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (1, LateStream.ptr)
        if self.refuse:
            raise RefusedError("no")

        def work() -> Any:
            return ctypes.memmove(target, source, size)

        if self.stream is None:
            work()
        else:
            self.stream.enqueue(work)
