"""Steps far ahead of a device whose copies are made as late as may be: each finds its own batch."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_device import LateBackend, LateEvent, LateStream

from cupylora.compiler import driver
from cupylora.errors import GraphError
from cupylora.graphs import fence, staging
from cupylora.graphs.buckets import BatchKey, DispatchOptions
from cupylora.graphs.buffers import SLOTS, StepBuffers
from cupylora.graphs.capture import DirectRecorder, Recording
from cupylora.graphs.fence import CudaFence
from cupylora.graphs.manager import GraphOptions, Step, StepGraphs

DEPTH = 4
SLOTS_OF_RUNTIME = 8


class LateRecording(Recording):
    """Its work is enqueued by each launch. launches_left: until the driver refuses."""

    def __init__(self, stream: LateStream, work: list[Callable[[], object]]) -> None:
        self._stream, self._work, self.launches_left = stream, work, 1 << 30

    def launch(self) -> None:
        self.launches_left -= 1
        if self.launches_left < 0:
            raise GraphError("the driver refuses")
        for work in self._work:
            self._stream.enqueue(work)

    def kernel_names(self) -> tuple[str, ...]:
        return ()

    def write_dot(self, path: Path) -> None:
        raise NotImplementedError

    def destroy(self) -> None:
        """Nothing."""


class LateRecorder(DirectRecorder):
    calls_work = True

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream

    def record(self, work: Callable[[], object], what: str) -> Recording:
        self.stream.capturing = made = []
        try:
            work()
        finally:
            self.stream.capturing = None
        return LateRecording(self.stream, made)


class Steps:
    """Graphs of 1 and 8 tokens over buffers, one with padding. seen: what each step's kernel found
    in all rows: slots, and whether a row of ``ids`` was set to its padding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, padded: bool = True) -> None:
        cupy: Any = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(Event=LateEvent)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        for module in (fence, staging):
            monkeypatch.setattr(module, "as_stream", lambda _, stream: stream)
        monkeypatch.setattr(driver, "outside_captures", contextlib.nullcontext)
        monkeypatch.setattr(staging, "load_kernel", lambda *name: self.loaded.append(name))
        monkeypatch.setattr(staging, "enqueue", self._pad)
        self.loaded: list[Any] = []
        self.stream = LateStream()
        self.backend = LateBackend(self.stream)
        self.buffers = StepBuffers(self.backend, 12)
        self.ids = self.buffers.add("ids", (), np.int32, pad=-1 if padded else None)
        self.ids[:] = 7
        self.fence = CudaFence(self.stream, DEPTH)
        self.graphs = StepGraphs(
            self.function,
            self.buffers,
            max_loras=SLOTS_OF_RUNTIME,
            options=GraphOptions(dispatch=DispatchOptions((1, 8), specialize_lora=False)),
            recorder=LateRecorder(self.stream),
            fence=self.fence,
        )
        self.seen: list[tuple[list[int], list[bool]]] = []
        self.pads = 0
        LateEvent.asked = 0

    def _pad(self, *launch: Any) -> None:
        """In the place of the kernel."""
        (_, rows, _), batch = launch[5], self.buffers.batch
        self.pads += 1
        self.stream.enqueue(lambda: self.buffers.pad(int(batch[0]), rows))

    def function(self, step: Step) -> None:
        rows, slots = step.num_tokens, self.buffers.whole(SLOTS)

        def work() -> None:
            self.seen.append((slots[:rows].tolist(), (self.ids[:rows] == -1).tolist()))
            self.ids[:] = 7

        self.stream.enqueue(work)

    def capture(self) -> None:
        self.graphs.capture()
        step(self, [])  # waits for the last warm-up
        self.seen.clear()
        self.pads = self.stream.synchronised = 0

    def check(self, batches: list[list[int]], first: int = 0) -> None:
        """All that was stepped since, in order."""
        self.stream.synchronize()
        for (slots, padded), batch in zip(self.seen[first:], batches, strict=True):
            lacking = len(slots) - len(batch)
            assert slots == [*batch, *[-1] * lacking]
            assert padded == [False] * len(batch) + [True] * lacking


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def some(rng: np.random.Generator, most: int) -> list[int]:
    return rng.integers(-1, SLOTS_OF_RUNTIME, rng.integers(1, most + 1)).tolist()


def step(steps: Steps, batch: list[int]) -> BatchKey | None:
    return steps.graphs.step(np.array(batch, np.int32)).key


@pytest.mark.parametrize("captured", [True, False])
def test_steps_far_ahead_find_their_own_batches(captured: bool, steps: Steps) -> None:
    """Of all sizes, replayed and eager by turns; nobody waits for the stream, and an event is asked
    once in several steps."""
    if captured:
        steps.capture()
    rng, count = np.random.default_rng(0), 20 * DEPTH
    batches = [some(rng, 12) for _ in range(count)]
    keys = [step(steps, batch) for batch in batches]
    assert {key.num_tokens if key else None for key in keys} == (
        {1, 8, None} if captured else {None}
    )
    assert steps.stream.synchronised == 0
    assert LateEvent.asked == (count - DEPTH) // (DEPTH // 2)
    assert steps.fence.enqueued == count
    steps.check(batches)
    assert steps.pads == 0, "kernels of graphs alone, since eager steps have no padding"


@pytest.mark.parametrize("how", ["launch", "copy", "interrupted", "unnumbered"])
def test_a_failure_between_copy_and_launch_reaches_no_other_step(
    how: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not a number came to stand for the step that failed."""
    steps.capture()
    rng = np.random.default_rng(1)
    before, after = ([some(rng, 8) for _ in range(2 * DEPTH + 1)] for _ in range(2))
    for batch in before:
        step(steps, batch)
    with monkeypatch.context() as patch:
        if how == "copy":
            steps.backend.refuse = True
        else:
            key = BatchKey(8, num_active_loras=SLOTS_OF_RUNTIME + 1)
            patch.setattr(steps.graphs.recording(key), "launches_left", 0)
        if how in ("interrupted", "unnumbered"):
            what = KeyboardInterrupt if how == "interrupted" else GraphError
            patch.setattr(steps.fence, "submit", _raises(what))
        with pytest.raises((GraphError, KeyboardInterrupt)):
            step(steps, [7] * 5)
        steps.backend.refuse = False
    for batch in after:
        step(steps, batch)
    assert steps.stream.synchronised == (how in ("interrupted", "unnumbered"))
    steps.check(before + after)


def _raises(error: type[BaseException]) -> Callable[[], int]:
    def submit() -> int:
        raise error

    return submit


def test_warm_ups_have_no_number_and_are_waited_for(steps: Steps) -> None:
    """Else a step right behind a capture would write where the last one's copy reads."""
    steps.graphs.capture()
    batches = [[1, 2, 3], [4]]
    first = len(steps.seen) + 1
    assert steps.stream.synchronised == 1, "the second of two before the first's place was written"
    for batch in batches:
        step(steps, batch)
    assert steps.stream.synchronised == 2
    steps.stream.synchronize()
    assert [slots for slots, _ in steps.seen[:2]] == [[-1] * 8, [-1]]
    assert steps.seen[1][1] == [True], "a warm-up on padding alone, also of one row"
    steps.check(batches, first)


def test_a_graph_launched_by_hand_works_on_the_batch_sent_last(steps: Steps) -> None:
    steps.capture()
    step(steps, [3, 1, 2])
    steps.graphs.recording(BatchKey(8, num_active_loras=SLOTS_OF_RUNTIME + 1)).launch()
    steps.check([[3, 1, 2]] * 2)


@pytest.mark.parametrize("padded", [True, False])
def test_padding_takes_a_kernel_only_where_there_is_some(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, padded=padded)
    steps.graphs.capture([BatchKey(1, num_active_loras=9)])
    assert steps.pads == padded, "of the warm-up on padding alone"
    steps.graphs.capture([BatchKey(8, num_active_loras=9)])
    assert steps.pads == 3 * padded
    assert steps.loaded == [("step", "pad_rows")] * padded


def test_a_lazy_capture_finds_the_kernel_that_its_batch_did_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    steps.graphs.options = GraphOptions(dispatch=steps.graphs.options.dispatch, lazy=True)
    assert step(steps, [1] * 8) is None
    assert steps.loaded == [("step", "pad_rows")]
    assert step(steps, [2] * 3) == BatchKey(8, num_active_loras=9)
    steps.check([[1] * 8, [2] * 3])


def test_threads_by_turns_find_their_own_batches(steps: Steps) -> None:
    steps.capture()
    count, stepped = 300, []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(count):
            batch = some(rng, 8)
            with steps.graphs._lock:
                step(steps, batch)
                stepped.append(batch)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stepped) == 2 * count
    steps.check(stepped)
