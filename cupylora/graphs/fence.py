"""How far the steps have come: what may be written again, and what work in flight still reads.

In: one call when a step's work is enqueued. Out: numbers of steps, and whether they are over. A
slot's last step is its lease: weights are replaced only once that step is over.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from cupylora.compiler import driver
from cupylora.interop.streams import as_stream

__all__ = ["CudaFence", "DirectFence", "StepFence"]


class StepFence(ABC):
    """Numbers steps from 1 as they are enqueued."""

    def __init__(self) -> None:
        self.enqueued = 0

    @abstractmethod
    def submit(self) -> int:
        """The work of one more step was enqueued: its number."""

    @abstractmethod
    def finished(self) -> int:
        """The last step that is over, and all before it. Never waits."""

    @abstractmethod
    def wait(self, step: int) -> None:
        """Until ``step`` is over."""


class DirectFence(StepFence):
    """For NumPy: a step is over when its call returns."""

    def submit(self) -> int:
        """Count it."""
        self.enqueued += 1
        return self.enqueued

    def finished(self) -> int:
        """All."""
        return self.enqueued

    def wait(self, step: int) -> None:
        """Nothing to wait for."""


class CudaFence(StepFence):
    """An event behind each step on ``stream``, in any form; at most ``depth`` steps are under way.

    A load asks and waits from its own thread while another one steps, and perhaps a third one
    captures: what is asked here voids no capture. The stream is touched by ``submit`` alone.
    """

    def __init__(self, stream: Any, depth: int = 64) -> None:
        import cupy

        super().__init__()
        self._stream = as_stream("stream", stream)
        self._free = [cupy.cuda.Event(disable_timing=True) for _ in range(depth)]
        self._running: deque[Any] = deque()
        self._lock = threading.RLock()

    def submit(self) -> int:
        """Record an event; the oldest step's, once that is over, where all are taken."""
        with self._lock:
            if self._free:
                event = self._free.pop()
            else:
                event = self._running.popleft()
                _wait(event)
            event.record(self._stream)
            self._running.append(event)
            self.enqueued += 1
            return self.enqueued

    def finished(self) -> int:
        """Asks the events in order."""
        with self._lock:
            running = self._running
            if running:
                with driver.outside_captures():
                    while running and running[0].done:
                        self._free.append(running.popleft())
            return self.enqueued - len(running)

    def wait(self, step: int) -> None:
        """Waits for that step's event, or for a later step if the event was taken for one since."""
        with self._lock:
            ahead = step - self.finished()
            event = self._running[ahead - 1] if ahead > 0 else None
        if event is not None:
            _wait(event)


def _wait(event: Any) -> None:
    with driver.outside_captures():
        event.synchronize()
