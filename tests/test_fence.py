"""Steps under way, told by events that are used again."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from cupylora.graphs import fence
from cupylora.graphs.fence import CudaFence


class Event:
    """Passed once a test says that its step is over, or somebody waited."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.recorded = self.over = 0
        self.waits = 0

    def record(self, stream: Any) -> None:
        assert stream == "stream"
        self.recorded += 1

    @property
    def done(self) -> bool:
        return self.over >= self.recorded

    def synchronize(self) -> None:
        self.waits += not self.done
        self.over = self.recorded


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> CudaFence:
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(Event=Event)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(fence, "as_stream", lambda _, stream: stream)
    return CudaFence("stream", depth=3)


def test_steps_are_numbered_and_finish_in_order(made: CudaFence) -> None:
    events = list(made._free)
    assert [made.submit() for _ in range(3)] == [1, 2, 3]
    assert made.finished() == 0
    running = list(made._running)
    running[1].over = 1
    assert made.finished() == 0, "the first is still under way"
    running[0].over = 1
    assert made.finished() == 2
    made.wait(3)
    assert (made.finished(), running[2].waits) == (3, 1)
    assert {id(event) for event in made._free} == {id(event) for event in events}


def test_a_step_too_many_waits_for_the_oldest_and_takes_its_event(made: CudaFence) -> None:
    for _ in range(3):
        made.submit()
    oldest, second, third = made._running
    assert made.submit() == 4
    assert (oldest.waits, oldest.recorded) == (1, 2)
    assert list(made._running) == [second, third, oldest]
    assert made.finished() == 1
    made.wait(1)
    assert (second.waits, third.waits) == (0, 0), "it is over"
    made.wait(2)
    assert (second.waits, third.waits) == (1, 0)
    made.wait(4)
    assert oldest.waits == 2
    second.over = third.over = 1
    assert made.finished() == 4
