"""What befalls a runtime at bad moments: interrupts, threads that cannot start, calls from inside a
step, and its end. Nothing hangs, nothing is lost, nobody is served by a stranger's weights."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from manual_fence import ManualFence
from test_caching import CONTRACTS, SUPPORT, TINY, Gate, cached, content, runtime_of, store_of

from cupylora.adapters import caching, leases
from cupylora.adapters.leases import SlotLeases
from cupylora.adapters.peft import read_adapter
from cupylora.errors import GraphError
from cupylora.graphs.manager import Step
from cupylora.runtime import LoraRuntime

NONE = np.array([-1], np.int32)
FIRST = np.array([0], np.int32)
SECONDS = 20


def started(call: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """A thread that makes the call, and what came of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def outcome(call: Callable[[], object]) -> Any:
    """What the call returned or raised, in time."""
    thread, found = started(call)
    thread.join(SECONDS)
    assert not thread.is_alive()
    return found[0]


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


class Interrupting:
    """An acquired lock or a made object is the caller's; the interrupt comes right behind it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        self._call(*arguments)
        raise KeyboardInterrupt


def waiting_load(runtime: LoraRuntime) -> tuple[threading.Event, Any]:
    """A load in the background that is about to be placed, once the event says so."""
    reached, go_on = threading.Event(), threading.Event()

    def progress(what: str) -> None:
        if what == "placing":
            reached.set()
            assert go_on.wait(SECONDS)

    coming = runtime.load_async("b", SUPPORT, progress=progress)
    assert reached.wait(SECONDS)
    return go_on, coming


@pytest.mark.parametrize("what", ["close", "ensure"])
def test_a_step_that_ends_or_loads_while_another_thread_does_is_refused(what: str) -> None:
    """It would wait for a load that waits for the step."""
    runtime = runtime_of()
    runtime.load("a", CONTRACTS)
    runtime.unload("a")
    go_on, coming = waiting_load(runtime)

    def meddling(_: Step) -> None:
        go_on.set()
        runtime.close() if what == "close" else runtime.ensure(["a"])

    runtime.set_step(meddling)
    error = outcome(lambda: runtime.step(NONE))
    assert isinstance(error, GraphError)
    assert str(error) == f"{what} was called from inside a step or a capture"
    assert coming.result(SECONDS) in (0, 1)
    runtime.load_async("c", CONTRACTS).result(SECONDS)  # it was not closed
    runtime.close()


def test_a_closed_runtime_takes_no_step_function_and_says_why_it_steps_no_more() -> None:
    runtime = runtime_of()
    runtime.set_step(lambda _: None)
    runtime.close()
    for call in (
        lambda: runtime.set_step(lambda _: None),
        lambda: runtime.step(NONE),
        runtime.capture,
    ):
        with pytest.raises(GraphError, match="the runtime is closed"):
            call()
    runtime.close()


def test_a_runtime_that_loaded_in_the_background_ends_with_its_last_reference() -> None:
    runtime = runtime_of()
    runtime.load_async("a", CONTRACTS).result(SECONDS)
    store_of(runtime).wait()
    ended = threading.Event()
    weakref.finalize(runtime.table, ended.set)
    del runtime
    gc.collect()
    assert ended.wait(SECONDS)


def test_graphs_go_at_the_end_also_where_a_copy_to_the_host_cache_failed() -> None:
    runtime = runtime_of()
    runtime.set_step(lambda _: None)
    runtime.capture()
    gate = Gate(store_of(runtime))
    gate.error = MemoryError()
    gate.open.set()
    runtime.load("a", CONTRACTS)
    with pytest.raises(MemoryError):
        runtime.close()
    assert runtime.captured == ()
    with pytest.raises(GraphError, match="closed"):
        runtime.step(NONE)


class NoThread:
    """An executor in whose place the system gives no thread: what it was given stays queued."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def submit(self, *_: Any) -> Any:
        raise RuntimeError("can't start new thread")


def test_a_copy_that_no_thread_makes_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its room, while the error is looked at."""
    runtime = runtime_of()
    with monkeypatch.context() as patch:
        patch.setattr(caching, "ThreadPoolExecutor", NoThread)
        with pytest.raises(RuntimeError, match="new thread") as error:
            runtime.load("a", CONTRACTS)
    assert error.value.__traceback__ is not None
    assert runtime._cache_writer is not None
    runtime._cache_writer._thread = None
    assert set(runtime.loaded) == {"a"}
    assert outcome(lambda: runtime.load("a")) in (0, 1)
    assert cached(runtime, "a") == content(runtime, CONTRACTS)
    runtime.unload("a")
    runtime._cache_writer.finish()
    runtime._evict_free()
    runtime.table.collect()
    assert runtime.table.arena.used_bytes == 0


def test_an_interrupt_behind_the_start_of_a_copy_leaves_it_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = runtime_of()
    writer = runtime._cache_writer
    assert writer is not None
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_submit", Interrupting(writer._submit))
        with pytest.raises(KeyboardInterrupt):
            runtime.load("a", CONTRACTS)
    assert outcome(lambda: cached(runtime, "a")) == content(runtime, CONTRACTS)


def test_an_interrupt_while_a_load_begins_takes_no_lock_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it comes behind: other threads step and load."""
    runtime = runtime_of()
    runtime.set_step(lambda _: None)
    lock = runtime._lock

    class Lock:
        acquire = Interrupting(lock.acquire)
        release = lock.release

    monkeypatch.setattr(runtime, "_lock", Lock())
    runtime._refuse_inside("load")
    monkeypatch.undo()
    assert outcome(lambda: runtime.step(NONE)).number == 1


@pytest.mark.parametrize("behind", ["reserve", "last_step", "publish", "pin"])
def test_an_interrupted_load_takes_no_slot_along(
    behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of()
    runtime.set_step(lambda _: None)
    for name in "abc":
        runtime.load(name, CONTRACTS)
    looked_up = runtime.generations
    with monkeypatch.context() as patch:
        inside = "_forget" if behind == "reserve" else behind
        patch.setattr(runtime.leases, inside, Interrupting(getattr(runtime.leases, inside)))
        with pytest.raises(KeyboardInterrupt):
            runtime.load("d", SUPPORT, pin=True)
    for slot, name in enumerate(runtime.leases.names):
        info = runtime.table.slots[slot]
        assert name is None or (info is not None and info.name == name)
        assert runtime.generations[slot] == (info.generation if name and info else 0)
        if runtime.generations[slot] != looked_up[slot]:
            with pytest.raises(Exception, match=r"another load|no adapter serves"):
                runtime.step(np.array([slot], np.int32), as_of=looked_up)
    for name in "xyz":
        runtime.load(name, SUPPORT)
    assert len(runtime.loaded) == 3


@pytest.mark.parametrize("call", ["_name", "_forget"])
def test_names_and_slots_agree_after_an_interrupt(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SlotLeases(2, ManualFence())
    made.adopt(0, "a")
    before = made.names, made.slot_of("a"), made.serving.tolist(), made._vacant
    monkeypatch.setattr(leases, "slot_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.drop("a") if call == "_forget" else made.adopt(1, "b")
    assert (made.names, made.slot_of("a"), made.serving.tolist(), made._vacant) == before


def test_a_slot_is_not_written_while_a_step_reads_it_that_was_interrupted_behind_its_work() -> None:
    runtime = runtime_of()
    fence = runtime._fence = runtime.leases.fence = ManualFence()
    runtime.load("a", CONTRACTS)
    runtime.set_step(lambda _: None)
    fence.submit = Interrupting(fence.submit)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        runtime.step(FIRST)
    assert runtime.leases.last_step(0) == fence.enqueued == 1
    runtime.unload("a")
    assert 0 not in runtime.leases.free_slots()


@pytest.mark.parametrize("call", ["arena._offsets", "slots.weakref.finalize"])
def test_room_that_was_taken_for_an_interrupted_store_is_free_again(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of()
    adapter = read_adapter(CONTRACTS, TINY)
    with monkeypatch.context() as patch:
        patch.setattr(f"cupylora.adapters.{call}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.table.store(adapter)
    runtime.table.collect()
    assert runtime.table.arena.used_bytes == 0


def test_room_of_an_evicted_slot_is_free_at_the_next_store_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = runtime_of().table
    table.load(0, read_adapter(CONTRACTS, TINY))
    with monkeypatch.context() as patch:
        for freeing in ("collect", "_free"):
            patch.setattr(table, freeing, interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.evict(0)
    assert table.slots[0] is None
    table.evict(0)
    assert table.arena.used_bytes == 0
