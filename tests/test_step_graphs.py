"""Steps through graphs: replay gives the bits of an eager step on the same rows, whatever was
captured, and nothing outside the batch's rows changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS
from runtime_util import Harness, Inputs, adapter

from cupylora.backend import ArrayBackend, NumpyBackend, open_backend
from cupylora.errors import ArgumentError, CapacityError, GraphError
from cupylora.graphs.buckets import BatchKey, Dispatcher, DispatchOptions
from cupylora.graphs.buffers import StepBuffers
from cupylora.graphs.capture import DirectRecorder, Recorder, Recording
from cupylora.graphs.manager import GraphOptions, Step, StepGraphs

BUCKETS = (1, 2, 8, 16)
SPECIALIZED = DispatchOptions(BUCKETS, specialize_active_loras=True)
OPTIONS = {
    "specialised": GraphOptions(dispatch=SPECIALIZED),
    "with and without": GraphOptions(dispatch=DispatchOptions(BUCKETS)),
    "one case": GraphOptions(dispatch=DispatchOptions(BUCKETS, specialize_lora=False)),
    "lazy": GraphOptions(dispatch=SPECIALIZED, lazy=True),
    "eager": GraphOptions(enabled=False),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


def harness(backend: ArrayBackend, options: GraphOptions, **sizes: Any) -> Harness:
    """Slots 0 to 3 hold adapters; captured where that is done ahead."""
    made = Harness(backend, graphs=options, **sizes)
    for seed in range(4):
        made.runtime.load(f"a{seed}", adapter(seed))
    if options.enabled and not options.lazy:
        made.runtime.capture()
    return made


# --- replay against eager ----------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_has_the_bits_of_the_layers_alone(
    backend: ArrayBackend, options: GraphOptions
) -> None:
    made, rng = harness(backend, options), np.random.default_rng(5)
    for seed in range(40):
        tokens = int(rng.integers(1, 22))
        used = rng.permutation(4)[: rng.integers(0, 5)]
        pool = np.append(used, -1) if len(used) == 0 or rng.random() < 0.6 else used
        made.check(Inputs.random(tokens, rng.choice(pool, tokens), seed))
    counts = made.runtime.counts()
    if not options.enabled:
        assert (counts.hits, counts.eager) == ({}, {"graphs are off": 40})
    else:
        assert sum(counts.hits.values()) > 10
        assert counts.eager["more tokens than any bucket"] > 3


@pytest.mark.parametrize("captured_with", [0, 1])
def test_captured_with_few_adapters_and_replayed_with_others(
    backend: ArrayBackend, captured_with: int
) -> None:
    """Three, one, all, none, and all with base rows, in a graph captured when few were loaded."""
    made = Harness(backend, graphs=OPTIONS["with and without"])
    for seed in range(captured_with):
        made.runtime.load(f"a{seed}", adapter(seed))
    made.runtime.capture()
    for seed in range(4):
        made.runtime.load(f"a{seed}", adapter(seed + 4))
    for slots in ([0, 1, 2], [3], [0, 1, 2, 3], [-1], [0, 1, 2, 3, -1]):
        made.check(Inputs.random(8, np.resize(slots, 8), len(slots)))
    assert made.runtime.counts().eager == {}


def test_base_batches_after_adapters_in_the_same_graph(backend: ArrayBackend) -> None:
    """Bits of a runtime that never loaded an adapter."""
    options = OPTIONS["one case"]
    made, untouched = harness(backend, options), Harness(backend, graphs=options)
    untouched.runtime.capture()
    base = Inputs.random(8, np.full(8, -1), 1)
    made.run(Inputs.random(8, np.arange(8) % 4, 2))
    for got, want in zip(made.run(base), untouched.run(base), strict=True):
        assert got.tobytes() == want.tobytes()


def test_rows_beyond_the_batch_keep_their_bits(backend: ArrayBackend) -> None:
    made = harness(backend, OPTIONS["specialised"])
    made.run(Inputs.random(16, np.zeros(16), 3))
    before = {name: made.read(name) for name in ("y", "x")}
    made.run(Inputs.random(5, np.zeros(5), 4))
    assert made.runtime.counts().padding == 3
    for name, was in before.items():
        assert made.read(name)[5:].tobytes() == was[5:].tobytes()
    assert made.read("ids", 8)[5:].tolist() == [[-1] * 3] * 3
    slots = made.runtime.buffers.views(8)["token_to_slot"]
    with made.on_stream():
        assert made.backend.to_host(slots).tolist() == [0] * 5 + [-1] * 3


def test_a_batch_without_adapters_is_told_so(backend: ArrayBackend) -> None:
    made = harness(backend, OPTIONS["specialised"])
    assert {active for _, active in made.calls} == {0, 1, 2, 4, 5}
    made.calls.clear()
    made.run(Inputs.random(20, np.full(20, -1), 0))  # larger than every bucket
    made.run(Inputs.random(20, np.resize([3, 1, -1], 20), 0))
    assert made.calls == [(20, 0), (20, 3)]
    names = made.runtime.recording(BatchKey(8)).kernel_names()
    assert not [name for name in names if "lora" in name]
    if backend.on_device:
        full = made.runtime.recording(BatchKey(8, num_active_loras=5)).kernel_names()
        assert [name for name in full if "lora" in name]


# --- capture -----------------------------------------------------------------------------------


def test_capture_reports_every_key_most_work_first(backend: ArrayBackend) -> None:
    made = Harness(backend, graphs=OPTIONS["specialised"])
    told: list[tuple[BatchKey, int]] = []
    graphs = made.runtime.capture(progress=lambda graph, left: told.append((graph.key, left)))
    keys = Dispatcher(4, SPECIALIZED).all_keys()
    assert tuple(graph.key for graph in graphs) == keys
    assert told == [(key, len(keys) - i - 1) for i, key in enumerate(keys)]
    assert made.runtime.captured == graphs
    assert made.runtime.capture() == ()
    if backend.on_device:
        assert all(graph.nodes > 0 and graph.seconds > 0 for graph in graphs)


def test_lazy_graphs_are_captured_by_the_first_batch_of_their_key(backend: ArrayBackend) -> None:
    made = harness(backend, OPTIONS["lazy"])
    batch = Inputs.random(5, np.arange(5) % 2, 0)
    assert made.runtime.captured == ()
    made.check(batch)
    assert [graph.key for graph in made.runtime.captured] == [BatchKey(8, None, False, 2)]
    made.check(batch)
    counts = made.runtime.counts()
    assert counts.eager == {"captured by it": 1}
    assert counts.hits == {BatchKey(8, None, False, 2): 1}
    assert made.runtime.captured[0].replays == 1


def test_nothing_grows_while_there_are_graphs(backend: ArrayBackend) -> None:
    made = harness(backend, OPTIONS["specialised"])
    made.check(Inputs.random(5, np.zeros(5), 0))
    with pytest.raises(GraphError, match=r"buffer 'more' cannot be made .* release_graphs\(\)"):
        made.runtime.add_buffer("more", (4,), "float32")
    with pytest.raises(GraphError, match=r"former step function exist; release_graphs\(\) first"):
        made.runtime.set_step(print)
    made.runtime.release_graphs()
    assert made.runtime.captured == ()
    made.runtime.add_buffer("more", (4,), "float32")
    made.check(Inputs.random(5, np.zeros(5), 1))
    assert made.runtime.counts().eager == {"no graph": 1}
    made.runtime.capture()
    made.check(Inputs.random(5, np.zeros(5), 2))


class BrokenError(RuntimeError):
    """What a host's step function may raise."""


def test_a_failed_capture_leaves_the_runtime_usable(backend: ArrayBackend) -> None:
    made = Harness(backend, graphs=OPTIONS["specialised"])
    made.runtime.load("a0", adapter(0))
    work, failing = made.step_function, [(8, 2)]

    def sometimes(step: Step) -> None:
        work(step)
        if (step.num_tokens, step.active) in failing:
            raise BrokenError("no")

    made.runtime.set_step(sometimes)
    with pytest.raises(BrokenError):
        made.runtime.capture()
    captured = [graph.key for graph in made.runtime.captured]
    assert BatchKey(8, num_active_loras=2) not in captured
    assert BatchKey(16, num_active_loras=5) in captured
    for tokens in (5, 12, 1):
        made.check(Inputs.random(tokens, np.zeros(tokens), tokens))
    failing.clear()
    assert BatchKey(8, num_active_loras=2) in [graph.key for graph in made.runtime.capture()]
    made.check(Inputs.random(5, np.resize([0, -1], 5), 9))


def test_a_capture_that_fails_halfway_is_named(backend: ArrayBackend) -> None:
    """The step function runs well eagerly and fails when it is recorded."""
    made = Harness(backend, graphs=OPTIONS["specialised"])
    work, seen = made.step_function, []

    def second_time(step: Step) -> None:
        work(step)
        if seen.append((step.num_tokens, step.active)) or seen.count(seen[-1]) > 1:
            if backend.on_device:
                made.backend.xp.empty(1 << 26)  # an allocation inside the capture
            raise BrokenError("again")

    made.runtime.set_step(second_time)
    if backend.on_device:
        with pytest.raises(GraphError, match=r"bytes were asked of CuPy while .*num_tokens=16"):
            made.runtime.capture()
    else:
        made.runtime.capture()  # nothing is recorded by calling
    made.runtime.release_graphs()
    made.runtime.set_step(work)
    made.runtime.load("a0", adapter(0))
    made.runtime.capture()
    made.check(Inputs.random(5, np.zeros(5), 0))


def test_the_first_capture_fails_and_buffers_may_still_be_added() -> None:
    class Failing(DirectRecorder):
        def record(self, work: Callable[[], object], what: str) -> Recording:
            raise GraphError(f"capture of {what} failed")

    graphs = budgeted(Failing())
    with pytest.raises(GraphError, match=r"capture of BatchKey\(num_tokens=16.* failed"):
        graphs.capture()
    graphs.buffers.add("more", (1,), np.int32)
    assert graphs.step(np.zeros(3, np.int32)).key is None


class Calling(DirectRecorder):
    """Calls the work, as a capture does. recording: whether it is being called so."""

    calls_work = True

    def __init__(self) -> None:
        self.recording = False

    def record(self, work: Callable[[], object], what: str) -> Recording:
        self.recording = True
        try:
            work()
        finally:
            self.recording = False
        return super().record(work, what)


@pytest.mark.parametrize("lacking", [(), (0,)], ids=["all shared", "case 0 needs its own"])
def test_keys_of_one_size_share_an_eager_call_where_that_will_do(lacking: tuple[int, ...]) -> None:
    recorder, prepared, calls = Calling(), set(), []

    def function(step: Step) -> None:
        calls.append((step.num_tokens, step.active, recorder.recording))
        key = step.num_tokens, step.active in lacking
        if recorder.recording and key not in prepared:
            raise GraphError("a module is not loaded")
        prepared.add(key)

    graphs = budgeted(recorder)
    graphs._function = function
    assert [graph.key.num_active_loras for graph in graphs.capture()] == [3, 0] * 4
    eager = [call[:2] for call in calls if not call[2]]
    wanted = [(n, 3) for n in (16, 8, 2, 1)]
    assert sorted(eager) == sorted([*wanted, *((n, 0) for n, _ in wanted if lacking)])
    graphs.release()
    calls.clear()
    graphs.capture([BatchKey(8)])
    assert calls == [(8, 0, False), (8, 0, True)]


def test_what_cannot_be_recorded_after_an_eager_call_either_is_raised() -> None:
    class Refusing(Calling):
        def record(self, work: Callable[[], object], what: str) -> Recording:
            made = super().record(work, what)
            if "num_active_loras=0" in what:
                raise GraphError(f"capture of {what} failed")
            return made

    graphs = budgeted(Refusing())
    with pytest.raises(GraphError, match=r"capture of BatchKey\(num_tokens=16.*=0\) failed"):
        graphs.capture()
    assert [graph.key for graph in graphs.graphs] == [BatchKey(16, num_active_loras=3)]
    assert graphs.step(np.zeros(9, np.int32)).key == BatchKey(16, num_active_loras=3)


def test_a_key_of_requests_is_captured_and_served(backend: ArrayBackend) -> None:
    made = harness(backend, OPTIONS["specialised"])
    decode = BatchKey(8, num_reqs=8, uniform=True, num_active_loras=2)
    seen: list[Any] = []
    work = made.step_function

    def watched(step: Step) -> None:
        seen.append((step.num_reqs, step.uniform))
        work(step)

    made.runtime.release_graphs()
    made.runtime.set_step(watched)
    made.runtime.capture([decode])
    assert set(seen) == {(8, True)}
    inputs = Inputs.random(8, np.resize([0, 1], 8), 0)
    expected = made.expected(inputs)[0]
    made.write(inputs)
    assert made.runtime.step(inputs.slots, num_reqs=8, uniform=True).key == decode
    assert made.read("y", 8).tobytes() == expected.tobytes()
    assert made.runtime.step(inputs.slots).key is None
    with pytest.raises(ArgumentError, match=r"is not of the token buckets"):
        made.runtime.capture([BatchKey(3)])


# --- memory budget, with recordings that say what they take ------------------------------------


class Sized(Recording):
    nbytes = 100

    def __init__(self, work: Callable[[], object], gone: list[Recording]) -> None:
        self._work, self._gone = work, gone

    def launch(self) -> None:
        assert self not in self._gone
        self._work()

    def kernel_names(self) -> tuple[str, ...]:
        return ()

    def write_dot(self, path: Path) -> None:
        raise NotImplementedError

    def destroy(self) -> None:
        assert self not in self._gone
        self._gone.append(self)


class SizedRecorder(DirectRecorder):
    def __init__(self) -> None:
        self.gone: list[Recording] = []

    def record(self, work: Callable[[], object], what: str) -> Recording:
        return Sized(work, self.gone)


def budgeted(recorder: Recorder, **options: Any) -> StepGraphs:
    """Four buckets, cases 0 and 3."""
    return StepGraphs(
        lambda step: None,
        StepBuffers(NumpyBackend(), 16),
        max_loras=2,
        options=GraphOptions(dispatch=DispatchOptions(BUCKETS), **options),
        recorder=recorder,
    )


def test_what_exceeds_the_budget_is_not_captured() -> None:
    recorder = SizedRecorder()
    graphs = budgeted(recorder, memory_budget=350)
    made = graphs.capture()
    assert [graph.key.num_tokens for graph in made] == [16, 16, 8]
    assert (graphs.nbytes, len(recorder.gone)) == (300, 1)
    assert graphs.step(np.zeros(1, np.int32)).key == BatchKey(8, num_active_loras=3)
    assert graphs.step(np.full(9, -1, np.int32)).key == BatchKey(16)
    graphs.release()
    assert (graphs.nbytes, len(recorder.gone)) == (0, 4)


def test_a_graph_makes_room_for_a_key_that_is_asked_for_oftener() -> None:
    recorder = SizedRecorder()
    graphs = budgeted(recorder, memory_budget=200, lazy=True, over_budget="drop")
    one, two, eight = (np.zeros(n, np.int32) for n in (1, 2, 8))
    for batch in (one, one, one, two, two):
        graphs.step(batch)
    assert [(g.key.num_tokens, g.replays) for g in graphs.graphs] == [(1, 2), (2, 1)]
    for _ in range(17):
        assert graphs.step(eight).key is None
    assert [g.key.num_tokens for g in graphs.graphs] == [1, 2]
    graphs.step(eight)
    assert [g.key.num_tokens for g in graphs.graphs] == [1, 8]
    assert graphs.nbytes == 200
    assert graphs.step(one).key == BatchKey(1, num_active_loras=3)
    assert graphs.step(eight).key == BatchKey(8, num_active_loras=3)


def test_keys_that_take_turns_are_not_captured_each_time() -> None:
    recorder = SizedRecorder()
    graphs = budgeted(recorder, memory_budget=100, lazy=True, over_budget="drop")
    for _ in range(100):
        graphs.step(np.zeros(1, np.int32))
        graphs.step(np.zeros(8, np.int32))
    assert len(recorder.gone) < 5


def test_a_graph_larger_than_the_budget_is_tried_once() -> None:
    recorder = SizedRecorder()
    graphs = budgeted(recorder, memory_budget=99, lazy=True, over_budget="drop")
    for _ in range(40):
        assert graphs.step(np.zeros(1, np.int32)).key is None
    assert len(recorder.gone) == 1
    assert graphs.counts().eager == {"no graph": 40}
    assert list(graphs.failures.values()) == ["it takes 100 bytes, more than the budget"]
    graphs.buffers.add("more", (1,), np.int32)  # nothing was captured


def test_a_key_given_twice_is_captured_once() -> None:
    recorder = SizedRecorder()
    graphs = budgeted(recorder)
    assert len(graphs.capture([BatchKey(8)] * 5)) == 1
    graphs.release()
    assert len(recorder.gone) == 1


def test_a_key_whose_first_step_failed_is_captured_by_the_next() -> None:
    failing = [True, True, False]

    def function(_: Step) -> None:
        if failing.pop(0):
            raise ValueError("the host's own")

    graphs = StepGraphs(
        function,
        StepBuffers(NumpyBackend(), 8),
        max_loras=2,
        options=GraphOptions(dispatch=DispatchOptions((8,)), lazy=True),
    )
    batch = np.zeros(8, np.int32)
    for _ in range(2):
        with pytest.raises(ValueError, match="own"):
            graphs.step(batch)
    assert graphs.step(batch).key is None
    assert len(graphs.graphs) == 1
    assert graphs.counts().eager == {"captured by it": 1}


def test_a_lazy_capture_that_fails_is_noted_and_not_tried_again() -> None:
    class Failing(DirectRecorder):
        tried = 0

        def record(self, work: Callable[[], object], what: str) -> Recording:
            self.tried += 1
            raise GraphError("the driver says no")

    recorder, steps = Failing(), []
    graphs = StepGraphs(
        steps.append,
        StepBuffers(NumpyBackend(), 16),
        max_loras=2,
        options=GraphOptions(dispatch=DispatchOptions((8,)), lazy=True),
        recorder=recorder,
    )
    for _ in range(3):
        assert graphs.step(np.zeros(5, np.int32)).key is None
    assert (recorder.tried, len(steps)) == (1, 3)
    assert graphs.counts().eager == {"its capture failed": 1, "no graph": 2}
    assert graphs.failures == {BatchKey(8, num_active_loras=3): "the driver says no"}


# --- refusals ----------------------------------------------------------------------------------


def test_batches_that_cannot_be_enqueue_nothing(backend: ArrayBackend) -> None:
    made = harness(backend, OPTIONS["specialised"])
    made.runtime.unload("a2")
    batch = Inputs.random(8, np.zeros(8), 0)
    made.write(batch)
    called = len(made.calls)
    for slots, error, message in [
        ([0, 4], ArgumentError, r"token_to_slot\[1\] is 4; the runtime has slots 0 to 3"),
        ([0, 2], ArgumentError, r"no adapter serves from slot 2; load one first, or use -1"),
        ([0] * 25, CapacityError, r"token_to_slot has 25 tokens; there is room for 24"),
    ]:
        with pytest.raises(error, match=message):
            made.runtime.step(np.array(slots, np.int32))
    assert made.read("y", 8).tobytes() == batch.y.tobytes()
    assert len(made.calls) == called
    assert made.runtime.counts().hits == {}


def test_no_tokens(backend: ArrayBackend) -> None:
    made = harness(backend, OPTIONS["specialised"])
    step = made.runtime.step(np.zeros(0, np.int32))
    assert (step.number, step.key, step.num_tokens) == (0, None, 0)
    assert made.runtime.counts().eager == {"no tokens": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enabled": 1}, r"enabled is a int"),
        ({"dispatch": None}, r"dispatch is a NoneType; a DispatchOptions is needed"),
        ({"lazy": "yes"}, r"lazy is a str"),
        ({"memory_budget": -1}, r"memory_budget is -1"),
        ({"over_budget": "grow"}, r"over_budget"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        GraphOptions(**options)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"token_buckets: 32 is more than the 24 tokens of the"):
        Harness(NumpyBackend(), graphs=GraphOptions(dispatch=DispatchOptions((8, 32))))
    assert Harness(NumpyBackend()).runtime.capture()[0].key.num_tokens == 24
    small = Harness(NumpyBackend(), graphs=replace(OPTIONS["eager"]))
    with pytest.raises(GraphError, match=r"graphs are off"):
        small.runtime.capture()
    with pytest.raises(GraphError, match=r"has no graph"):
        small.runtime.recording(BatchKey(1))
