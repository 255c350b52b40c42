"""Adapters that come, change and go under live graphs: a step serves what was loaded when it was
enqueued, and never another tenant's weights."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS, make_table
from manual_fence import ManualFence
from runtime_util import MAX_RANK, MODEL, Harness, Inputs, adapter

from cupylora.adapters.factors import Adapter
from cupylora.backend import ArrayBackend, NumpyBackend, open_backend
from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError, GraphError
from cupylora.graphs.buckets import DispatchOptions
from cupylora.graphs.manager import GraphOptions, Step
from cupylora.resources import data_dir
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits, load_model

OPTIONS = GraphOptions(dispatch=DispatchOptions((1, 4, 8, 16), specialize_active_loras=True))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


def harness(backend: ArrayBackend, *names: str, **sizes: Any) -> Harness:
    """Captured first, loaded then: adapter ``a3`` has seed 3."""
    made = Harness(backend, graphs=OPTIONS, **sizes)
    made.runtime.capture()
    for name in names:
        made.runtime.load(name, adapter(int(name[1:])))
    return made


def scaled(original: Adapter, factor: float) -> Adapter:
    factors = {
        key: replace(value, scale=value.scale * factor) for key, value in original.factors.items()
    }
    return Adapter(original.name, factors)


def batch(made: Harness, *names: str | None, tokens: int = 8, seed: int = 0) -> Inputs:
    slots = made.runtime.slots_of(names)
    return Inputs.random(tokens, np.resize(slots, tokens), seed)


def test_a_load_is_seen_by_the_next_step(backend: ArrayBackend) -> None:
    made = harness(backend, "a0")
    base = made.run(batch(made, None))
    first = made.run(batch(made, "a0"))
    assert first[0].tobytes() != base[0].tobytes()
    made.runtime.load("b", adapter(5))
    made.check(batch(made, "a0", "b", None))
    assert made.run(batch(made, "a0"))[0].tobytes() == first[0].tobytes()
    assert made.runtime.counts().eager == {}


def test_a_new_version_serves_under_the_same_name(backend: ArrayBackend) -> None:
    made = harness(backend, "a0", "a1")
    before = made.runtime.slots_of(["a0"])[0]
    old = made.run(batch(made, "a0"))
    made.runtime.load("a0", adapter(6))
    after = made.runtime.slots_of(["a0"])[0]
    assert after != before
    with pytest.raises(ArgumentError, match=rf"no adapter serves from slot {before}"):
        made.runtime.step(np.full(4, before, np.int32))
    new = made.run(batch(made, "a0"))
    assert new[0].tobytes() != old[0].tobytes()
    made.check(batch(made, "a0", "a1"))
    made.runtime.load("a0", adapter(0))
    assert made.run(batch(made, "a0"))[0].tobytes() == old[0].tobytes()


def test_scale_one_then_zero_then_a_half(backend: ArrayBackend) -> None:
    made = harness(backend, "a0")
    inputs = batch(made, None)
    base = made.run(inputs)[0].astype(np.float64)
    deltas = []
    for factor in (1.0, 0.0, 0.5):
        made.runtime.load("a0", scaled(adapter(0), factor))
        inputs = batch(made, "a0")
        made.check(inputs)
        deltas.append(made.run(inputs)[0].astype(np.float64) - base)
    assert np.abs(deltas[0]).max() > 0.1
    assert not deltas[1].any()
    assert np.allclose(deltas[2], deltas[0] / 2, atol=0.05)


def test_a_slot_used_again_by_an_adapter_of_fewer_modules(backend: ArrayBackend) -> None:
    made = harness(backend, "a1", max_loras=1)
    made.run(batch(made, "a1"))
    made.runtime.unload("a1")
    without = ("k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    assert made.runtime.load("q only", adapter(2, without=without)) == 0
    inputs = batch(made, "q only")
    y, out = made.run(inputs)
    assert y[:, 96:].tobytes() == inputs.y[:, 96:].tobytes()  # k and v
    assert y[:, :96].tobytes() != inputs.y[:, :96].tobytes()
    assert out.tobytes() == made.run(replace(inputs, slots=np.full(8, -1, np.int32)))[1].tobytes()


def test_three_adapters_wanted_and_two_slots(backend: ArrayBackend) -> None:
    made = harness(backend, "a0", "a1", max_loras=2)
    with pytest.raises(CapacityError, match=r"3 adapters wanted .* 2 slots: a0, a1, a2"):
        made.runtime.slots_of(["a0", "a1", "a2"])
    made.check(batch(made, "a0", "a1", None))  # base rows need no slot
    with pytest.raises(CapacityError, match=r"no slot for adapter 'a2'.* a0, a1 must stay"):
        made.runtime.load("a2", adapter(2), keep=["a0", "a1"])
    made.check(batch(made, "a0", "a1"))
    made.runtime.load("a2", adapter(2), keep=["a0"])
    assert set(made.runtime.loaded) == {"a0", "a2"}
    with pytest.raises(ArgumentError, match=r"adapter 'a1' is not loaded; loaded are: a0, a2"):
        made.runtime.slots_of(["a1"])
    made.check(batch(made, "a0", "a2"))


def test_the_adapter_unused_longest_goes_and_pinned_ones_stay(backend: ArrayBackend) -> None:
    made = harness(backend, "a0", "a1", "a2", max_loras=3)
    made.runtime.load("a0", adapter(0), pin=True)  # into the place of the oldest, a1 or a2
    for name in tuple(made.runtime.loaded):
        made.run(batch(made, name))
    made.runtime.load("b", adapter(4))
    made.runtime.load("c", adapter(5))
    assert set(made.runtime.loaded) == {"a0", "b", "c"}
    made.runtime.load("a0", adapter(7))
    made.runtime.load("d", adapter(6))
    assert "a0" in made.runtime.loaded


def test_a_load_that_fails_changes_nothing(backend: ArrayBackend) -> None:
    made = harness(backend, "a0", "a1", max_loras=2, arena_adapters=2)
    inputs = batch(made, "a0", "a1", None)
    before = made.run(inputs)
    bad = adapter(2)
    bad.factors[0, "v_proj"].b[0, 0, 0] = np.inf
    for load, error in [
        (lambda: made.runtime.load("a0", bad), AdapterFormatError),
        (lambda: made.runtime.load("new", bad, keep=["a0"]), AdapterFormatError),
        (lambda: made.runtime.load("a0", data_dir() / "nowhere"), AdapterFormatError),
        (lambda: made.runtime.load(7, bad), ArgumentError),  # type: ignore[arg-type]
    ]:
        with pytest.raises(error):
            load()
        assert set(made.runtime.loaded) == {"a0", "a1"}
        for got, want in zip(made.run(inputs), before, strict=True):
            assert got.tobytes() == want.tobytes()


def test_room_of_adapters_that_left_is_used_again(backend: ArrayBackend) -> None:
    made = harness(backend, max_loras=4, arena_adapters=3)
    for number in range(12):
        made.runtime.load(f"n{number}", adapter(3))  # the largest
        if number >= 2:
            made.runtime.unload(f"n{number - 2}")
        made.run(batch(made, *made.runtime.loaded))
    assert set(made.runtime.loaded) == {"n10", "n11"}
    made.check(batch(made, "n10", "n11"))


def test_steps_know_the_generation_of_every_slot(backend: ArrayBackend) -> None:
    made = harness(backend, "a0", "a1")
    inputs = batch(made, "a0", "a1")
    made.write(inputs)
    first = made.runtime.step(inputs.slots)
    made.runtime.load("b", adapter(5))
    made.runtime.unload("a1")
    slots = made.runtime.slots_of(["a0", "b"])
    second = made.runtime.step(np.resize(slots, 8))
    assert (first.number, second.number) == (1, 2)
    assert first.generations.tolist() == [1, 2, 0, 0]
    assert second.generations.tolist() == [1, 0, 3, 0]
    assert second.key == first.key
    made.runtime.synchronize(first.number)
    made.runtime.synchronize()


def test_a_step_that_fails_halfway_still_holds_its_slots(backend: ArrayBackend) -> None:
    made = harness(backend, "a0")
    work = made.step_function

    def failing(step: Step) -> None:
        work(step)
        raise KeyError("host")

    made.runtime.release_graphs()
    made.runtime.set_step(failing)
    inputs = batch(made, "a0")
    made.write(inputs)
    with pytest.raises(KeyError):
        made.runtime.step(inputs.slots)
    made.runtime.unload("a0")
    waited: list[int] = []
    wait = made.runtime.leases.fence.wait
    made.runtime.leases.fence.wait = lambda step: (waited.append(step), wait(step))[1]  # type: ignore[method-assign]
    for seed in range(4):
        made.runtime.load(f"n{seed}", adapter(seed))
    assert 1 in waited  # slot 0 was written only after the step that failed


# --- order in time -----------------------------------------------------------------------------


def late(made: Harness) -> ManualFence:
    fence = ManualFence()
    made.runtime._fence = made.runtime.leases.fence = fence
    return fence


class _Copies(contextlib.nullcontext):
    """A copy stream of the runtime's own, which counts what is waited for on the host."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def record(self) -> _Copies:
        return self


def test_a_runtime_ends_without_the_stream_that_its_host_took_back() -> None:
    made = harness(open_backend("numpy"), "a0")
    runtime = made.runtime
    made.run(batch(made, "a0"))
    runtime.recorder.stream = None  # what is asked of it from here on fails
    runtime.recorder.active = None  # type: ignore[assignment, method-assign]
    runtime.synchronize()
    runtime.close()
    runtime._copies = copies = _Copies()
    runtime.load("a1", adapter(1))
    assert copies.waits > 1, "nothing orders steps behind the copies but the host"


def test_a_load_between_lookup_and_step_is_noticed(backend: ArrayBackend) -> None:
    made = harness(backend, "a0", "a1", max_loras=2)
    made.run(batch(made, "a1"))
    seen, slots = made.runtime.generations, made.runtime.slots_of(["a0"])
    tokens = np.resize(slots, 8)
    made.runtime.step(tokens, as_of=seen)
    made.run(batch(made, "a1"))
    made.runtime.load("b", adapter(6))  # into the place of a0
    with pytest.raises(ArgumentError, match=r"slot 0 holds another load than when it was looked"):
        made.runtime.step(tokens, as_of=seen)
    with pytest.raises(ArgumentError, match=r"adapter 'a0' is not loaded"):
        made.runtime.step_names(["a0"], np.array([8], np.int32))
    assert made.runtime.step_names(["b", None], np.array([2, 1], np.int32)).groups == 2
    with pytest.raises(ArgumentError, match=r"as_of has shape"):
        made.runtime.step(tokens, as_of=np.zeros(9, np.int64))
    with pytest.raises(ValueError, match="read-only"):
        made.runtime.generations[0] = 7


def test_others_serve_while_a_load_fails(
    backend: ArrayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = harness(backend, "a3", "a7", max_loras=2, arena_adapters=2)
    store, seen = made.runtime.table.store, []

    def watched(stored: Adapter) -> Any:
        try:
            return store(stored)
        finally:
            seen.append(dict(made.runtime.loaded))

    monkeypatch.setattr(made.runtime.table, "store", watched)
    with pytest.raises(CapacityError, match=r"unload or evict an adapter, or make the arena larg"):
        made.runtime.load("large", adapter(11))
    assert seen == [{"a3": 0, "a7": 1}]
    made.check(batch(made, "a3", "a7"))


def test_a_load_waits_for_room_that_steps_still_read(backend: ArrayBackend) -> None:
    made = harness(backend, "a3", "a7", max_loras=3, arena_adapters=2)
    fence = late(made)
    made.runtime.step(np.full(4, 0, np.int32))
    made.runtime.unload("a3")
    assert made.runtime.load("a11", adapter(11)) == 2
    assert fence.over == 1


def test_a_load_interrupted_once_the_slot_was_written_leaves_it_to_nobody(
    backend: ArrayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = harness(backend, "a0", "a1", max_loras=2)
    made.run(batch(made, "a1"))
    place = made.runtime.table.place

    def interrupted(slot: int, stored: Any) -> None:
        place(slot, stored)
        raise KeyboardInterrupt

    monkeypatch.setattr(made.runtime.table, "place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.runtime.load("b", adapter(6))
    assert made.runtime.loaded == {"a1": 1}
    monkeypatch.undo()
    assert made.runtime.load("c", adapter(5)) == 0
    made.check(batch(made, "c", "a1"))


def test_a_load_interrupted_before_that_changes_nothing(
    backend: ArrayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = harness(backend, "a0", "a1", max_loras=2)
    used = made.runtime.table.arena.used_bytes
    expected = made.run(batch(made, "a0", "a1"))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made.runtime._fence, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.runtime.load("b", adapter(6))
    assert made.runtime.loaded == {"a0": 0, "a1": 1}
    assert made.runtime.table.arena.used_bytes == used
    for got, want in zip(made.run(batch(made, "a0", "a1")), expected, strict=True):
        assert got.tobytes() == want.tobytes()


def test_nothing_is_loaded_or_stepped_from_inside_a_step(backend: ArrayBackend) -> None:
    made = harness(backend, "a0")
    work, refused = made.step_function, []

    def meddling(step: Step) -> None:
        work(step)
        for call in (
            lambda: made.runtime.load("b", adapter(1)),
            lambda: made.runtime.unload("a0"),
            lambda: made.runtime.step(np.zeros(1, np.int32)),
            made.runtime.capture,
            made.runtime.release_graphs,
            lambda: made.runtime.set_step(work),
        ):
            with pytest.raises(GraphError, match=r"was called from inside a step or a capture"):
                call()
            refused.append(call)

    made.runtime.release_graphs()
    made.runtime.set_step(meddling)
    made.check(batch(made, "a0"))
    assert len(refused) == 6
    with pytest.raises(GraphError, match=r"unload was called from inside a step or a capture"):
        made.runtime.capture(progress=lambda *_: made.runtime.unload("a0"))
    assert made.runtime.loaded == {"a0": 0}


def test_arguments_that_make_no_sense_are_refused(backend: ArrayBackend) -> None:
    made = harness(backend, "a0")
    runtime, slots = made.runtime, np.zeros(2, np.int32)
    runtime.release_graphs()
    calls: list[tuple[Any, str]] = [
        (lambda: runtime.load("", adapter(1)), r"'' is no adapter's name"),
        (lambda: runtime.load("b", adapter(1), keep="a0"), r"keep is a str; a list or tuple"),
        (lambda: runtime.load("b", adapter(1), keep=[["a0"]]), r"\['a0'\] is no adapter's name"),
        (lambda: runtime.load("b", adapter(1), pin="no"), r"pin is a str; a bool is needed"),
        (lambda: runtime.unload(["a0"]), r"\['a0'\] is no adapter's name"),
        (lambda: runtime.slots_of(None), r"names is a NoneType; a list or tuple"),
        (lambda: runtime.slots_of([["a0"]]), r"\['a0'\] is no adapter's name"),
        (lambda: runtime.pin("a0", 1), r"pinned is a int"),
        (lambda: runtime.set_step(None), r"function is a NoneType; a function of a Step"),
        (lambda: runtime.capture(5), r"keys is a int; a list or tuple is needed"),
        (lambda: runtime.capture(["x"]), r"key is a str; a BatchKey is needed"),
        (lambda: runtime.capture(progress=5), r"progress is a int; a function is needed"),
        (lambda: runtime.step(slots, num_reqs="x"), r"num_reqs is 'x'"),
        (lambda: runtime.step(slots, num_reqs=-4), r"num_reqs is -4"),
        (lambda: runtime.step(slots, uniform="yes"), r"uniform is a str; a bool is needed"),
        (lambda: runtime.add_buffer("q", 64, "float32"), r"shape is 64; a tuple is needed"),
        (lambda: runtime.add_buffer("q", (64,), "nope"), r"dtype is 'nope', which is none"),
        (lambda: runtime.add_buffer("q", (64,), object), r"one of numbers is needed"),
        (lambda: runtime.add_buffer("q", (64,), None), r"one of numbers is needed"),
        (lambda: runtime.add_buffer("q", (64,), "int32", pad=-1.0), r"pad is -1\.0"),
        (lambda: runtime.add_buffer("q", (64,), "bfloat16", pad=-1), r"pad is -1 for buffer 'q'"),
    ]
    for call, message in calls:
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(CapacityError, match=r"lengths are 6442450941 tokens together; .* for 24"):
        runtime.step_requests(np.zeros(3, np.int32), np.full(3, 2**31 - 1, np.int32))
    assert runtime.loaded == {"a0": 0}


def test_requests_in_a_row(backend: ArrayBackend) -> None:
    made = harness(backend, "a0", "a1")
    slots = made.runtime.slots_of(["a1", None, "a0"])
    lengths = np.array([3, 0, 4], np.int32)
    inputs = Inputs.random(7, np.repeat(slots, lengths), 0)
    expected = made.expected(inputs)[0]
    made.write(inputs)
    step = made.runtime.step_requests(slots, lengths)
    assert (step.num_tokens, step.groups) == (7, 2)
    made.runtime.synchronize()
    assert made.read("y", 7).tobytes() == expected.tobytes()
    for bad, message in [
        (np.array([3, 4], np.int32), r"slots has 3 requests, lengths 2"),
        (np.array([3, -1, 4], np.int32), r"lengths\[1\] is -1"),
        (np.array([3.0, 0, 4]), r"lengths has dtype float64"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            made.runtime.step_requests(slots, bad)


def test_a_directory_is_loaded() -> None:
    runtime = LoraRuntime(
        load_model("tiny-moe"),
        LoraLimits(2, 16),
        dtype="bfloat16",
        max_tokens=8,
        arena_bytes=1 << 20,
        backend="numpy",
        graphs=GraphOptions(enabled=False),
    )
    directory = data_dir() / "demo" / "contracts-r8"
    assert runtime.load("contracts", directory) == 0
    assert runtime.loaded == {"contracts": 0}
    for call in (runtime.capture, runtime.counts, lambda: runtime.step(np.zeros(1, np.int32))):
        with pytest.raises(ArgumentError, match=r"no step function yet; call set_step first"):
            call()


def test_a_table_that_exists_is_taken_over(backend: ArrayBackend) -> None:
    table = make_table(
        backend, MODEL, {0: adapter(0), 2: adapter(2)}, "bfloat16", max_rank=MAX_RANK
    )
    runtime = LoraRuntime.of_table(table, backend, max_tokens=16, graphs=OPTIONS)
    assert runtime.loaded == {"adapter-0": 0, "adapter-2": 2}
    assert runtime.table is table
    runtime.unload("adapter-2")
    assert runtime.load("other", adapter(1)) == 1
    assert runtime.slots_of(["other", "adapter-0", None]).tolist() == [1, 0, -1]
    twice = make_table(backend, MODEL, {1: adapter(0), 3: adapter(0)}, "bfloat16")
    with pytest.raises(ArgumentError, match=r"adapter 'adapter-0' is in slots 1 and 3"):
        LoraRuntime.of_table(twice, backend, max_tokens=16, graphs=OPTIONS)


@pytest.mark.parametrize("steps", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mixed_traffic(backend: ArrayBackend, steps: int) -> None:
    """Steps of any size and mix, loads, new versions and unloads between them; every step has the
    bits of the layers on copies."""
    made, rng = harness(backend), np.random.default_rng(steps)
    kinds: set[str] = set()
    for seed in range(steps):
        names = list(made.runtime.loaded)
        action = rng.random()
        if action < 0.25 or not names:
            made.runtime.load(f"n{rng.integers(7)}", adapter(int(rng.integers(12))))
        elif action < 0.32:
            made.runtime.unload(str(rng.choice(names)))
        names = list(made.runtime.loaded)
        wanted = list(rng.permutation(names)[: rng.integers(0, len(names) + 1)])
        tokens = int(rng.integers(1, 22))
        pool = made.runtime.slots_of(wanted) if wanted else np.array([-1], np.int32)
        if rng.random() < 0.5:
            pool = np.append(pool, np.int32(-1))
        made.check(Inputs.random(tokens, rng.choice(pool, tokens), seed))
        kinds.add("some" if wanted else "none")
    assert kinds == {"some", "none"}
    counts = made.runtime.counts()
    assert sum(counts.hits.values()) + sum(counts.eager.values()) == steps


def test_loads_from_another_thread(backend: ArrayBackend) -> None:
    """One thread steps with an adapter that stays while another loads, replaces and unloads."""
    made = harness(backend, "a0")
    made.runtime.load("a0", adapter(0), pin=True)
    inputs = batch(made, "a0", None)
    expected = made.run(inputs)
    stop, failures = threading.Event(), []

    def churn() -> None:
        rng = np.random.default_rng(0)
        try:
            while not stop.is_set():
                made.runtime.load(f"n{rng.integers(5)}", adapter(int(rng.integers(12))))
                names = [name for name in made.runtime.loaded if name != "a0"]
                if names and rng.random() < 0.3:
                    made.runtime.unload(str(rng.choice(names)))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(60):
            for got, want in zip(made.run(inputs), expected, strict=True):
                assert got.tobytes() == want.tobytes()
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert made.runtime.loaded["a0"] == inputs.slots[0]


def test_two_runtimes_share_nothing(backend: ArrayBackend) -> None:
    one, two = harness(backend, "a0"), harness(backend, "a5")
    for seed in range(4):
        for made, name in ((one, "a0"), (two, "a5")):
            made.check(batch(made, name, None, seed=seed))
    two.runtime.release_graphs()
    one.check(batch(one, "a0", seed=9))


def test_limits_are_those_of_the_table() -> None:
    made = harness(NumpyBackend())
    assert made.runtime.table.limits == LoraLimits(4, MAX_RANK)
    assert made.runtime.table.model == MODEL
    with pytest.raises(CapacityError):
        LoraRuntime(
            MODEL,
            LoraLimits(4, MAX_RANK),
            dtype="bfloat16",
            max_tokens=8,
            arena_bytes=1 << 60,
            backend="numpy",
        )
