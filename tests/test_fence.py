"""Steps under way, told by events that are used again."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import pytest

from cupylora.compiler import driver
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
    monkeypatch.setattr(driver, "outside_captures", contextlib.nullcontext)
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


def test_a_step_too_many_waits_for_the_older_half_and_takes_its_events(made: CudaFence) -> None:
    for _ in range(3):
        made.submit()
    oldest, second, third = made._running
    assert made.submit() == 4
    assert (oldest.waits, second.waits, third.waits) == (0, 1, 0)
    assert (second.recorded, list(made._running)) == (2, [third, second])
    assert made.submit() == 5
    assert (oldest.recorded, third.waits) == (2, 0), "it was free"
    assert made.finished() == 2
    made.wait(1)
    assert (oldest.waits, second.waits, third.waits) == (0, 1, 0), "it is over"
    made.wait(3)
    assert third.waits == 1
    made.wait(5)
    assert oldest.waits == 1
    second.over = 2
    assert made.finished() == 5


def test_of_steps_in_a_row_so_many_are_under_way(made: CudaFence) -> None:
    """What the ring of batches goes by; and few of them ask an event."""
    events, asked = list(made._free), 0
    for number in range(1, 50):
        waits = sum(event.waits for event in events)
        assert made.submit() == number
        asked += sum(event.waits for event in events) - waits
        assert made.enqueued - len(made._running) >= number - made.depth
    assert asked == (49 - 3 + 1) // 2


def test_an_event_that_cannot_be_recorded_is_not_lost(made: CudaFence) -> None:
    made.submit()
    broken = made._free[-1]
    broken.record = None
    with pytest.raises(TypeError):
        made.submit()
    assert (made.enqueued, len(made._free), len(made._running)) == (1, 2, 1)
    del broken.record
    assert made.submit() == 2


def test_a_wait_that_is_interrupted_leaves_the_steps_under_way(
    made: CudaFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        made.submit()
    with monkeypatch.context() as patch:
        patch.setattr(fence, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.submit()
    assert (made.enqueued, made.finished()) == (3, 0)
    assert made.submit() == 4
