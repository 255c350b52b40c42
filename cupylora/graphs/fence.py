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
    """Numbers steps from 1 as they are enqueued.

    Once ``submit`` gave n, step n - ``depth`` and all before it are over: what those read may be
    written for step n + 1, with nothing asked of the device.
    """

    def __init__(self, depth: int = 0) -> None:
        self.enqueued, self.depth = 0, depth

    @abstractmethod
    def submit(self) -> int:
        """The work of one more step was enqueued: its number."""

    @abstractmethod
    def finished(self) -> int:
        """The last step that is over, and all before it. Never waits."""

    @abstractmethod
    def wait(self, step: int) -> None:
        """Until ``step`` is over, or all that there are where it was not submitted."""


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

        super().__init__(depth)
        self._stream = as_stream("stream", stream)
        self._free = [cupy.cuda.Event(disable_timing=True) for _ in range(depth)]
        self._running: deque[Any] = deque()
        self._lock = threading.RLock()

    def submit(self) -> int:
        """Record an event; waits where all are taken, until the older half of the steps is over."""
        with self._lock:
            if not self._free:
                self._free_older_half()
            self._free[-1].record(self._stream)
            self._running.append(self._free.pop())
            self.enqueued += 1
            return self.enqueued

    def _free_older_half(self) -> None:
        """Half of them by one wait: an event that passed long ago costs as much to ask as a launch,
        too much for each step."""
        running = self._running
        count = (len(running) + 1) // 2
        _wait(running[count - 1])
        for _ in range(count):
            self._free.append(running.popleft())

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
            ahead = min(step, self.enqueued) - self.finished()
            event = self._running[ahead - 1] if ahead > 0 else None
        if event is not None:
            _wait(event)


def _wait(event: Any) -> None:
    with driver.outside_captures():
        event.synchronize()
