"""Copies to the host cache behind the back of loads: an adapter serves before, what is copied is
what was loaded whatever happens to its slot, and a copy that fails takes nothing but itself."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS
from fixtures_util import DATA

from cupylora.adapters.importing import Importer
from cupylora.adapters.packed import pack_adapter
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.store import AdapterStore
from cupylora.backend import ArrayBackend, NumpyBackend, open_backend
from cupylora.errors import CapacityError, RoomError
from cupylora.host_memory import HostMemory
from cupylora.pinned import PinnedPool
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits, load_model

TINY = load_model("tiny-moe")
DEMO = DATA / "demo"
CONTRACTS, SUPPORT, LEGAL = (
    DEMO / name for name in ("contracts-r8", "support-rslora-r4", "legal-stacked-r6")
)
SIZE = 100_352
"""Bytes of contracts-r8."""


class Pooled(NumpyBackend):
    """Keeps the host cache in a pool, as a GPU's backend does."""

    def host_pool(self, limit: int) -> Callable[[int], HostMemory]:
        return PinnedPool(bytearray, limit, chunk_bytes=1 << 16).take


class Gate:
    """Memory for a store that comes when a test says so, or not."""

    def __init__(self, store: AdapterStore) -> None:
        self.asked, self.open = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._allocate = store._allocate
        store._allocate = self

    def __call__(self, nbytes: int) -> HostMemory:
        self.asked.set()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        return self._allocate(nbytes)


def runtime_of(
    cache: int = 1 << 20, arena: int = 1 << 20, backend: ArrayBackend | None = None
) -> LoraRuntime:
    """On NumPy, it loads as one on a GPU does."""
    made = LoraRuntime(
        TINY,
        LoraLimits(3, 16),
        dtype="bfloat16",
        max_tokens=8,
        arena_bytes=arena,
        backend=backend or Pooled(),
        host_cache_bytes=cache,
    )
    if made._importer is None:
        made._importer = Importer(made.backend)
    return made


@pytest.fixture
def gated() -> Iterator[tuple[LoraRuntime, Gate]]:
    """A runtime whose copies to the cache wait for the gate."""
    runtime = runtime_of()
    gate = Gate(store_of(runtime))
    yield runtime, gate
    gate.open.set()
    runtime._cache_writer.finish()  # type: ignore[union-attr]


def store_of(runtime: LoraRuntime) -> AdapterStore:
    assert runtime.store is not None
    return runtime.store


def pool_of(runtime: LoraRuntime) -> PinnedPool:
    pool = store_of(runtime)._allocate.__self__  # type: ignore[attr-defined]
    assert isinstance(pool, PinnedPool)
    return pool


def content(runtime: LoraRuntime, path: Path) -> bytes:
    table = runtime.table
    adapter = read_adapter(path, TINY)
    return pack_adapter(adapter, TINY, table.limits, table.dtype, table.a_layout).buffer.tobytes()


def cached(runtime: LoraRuntime, name: str) -> bytes:
    return store_of(runtime).get(name).buffer.tobytes()


def test_an_adapter_serves_before_it_is_cached(gated: tuple[LoraRuntime, Gate]) -> None:
    runtime, gate = gated
    said: list[str] = []
    runtime.load("a", CONTRACTS, progress=said.append)
    assert gate.asked.wait(20)
    assert said == ["reading", "placing"]
    assert set(runtime.loaded) == {"a"}
    assert store_of(runtime).sizes() == {"a": 0}
    runtime.load("b", SUPPORT)  # nor does another load wait
    assert set(runtime.loaded) == {"a", "b"}
    gate.open.set()
    store_of(runtime).wait()
    assert store_of(runtime).sizes()["a"] == SIZE
    assert cached(runtime, "a") == content(runtime, CONTRACTS)
    assert cached(runtime, "b") == content(runtime, SUPPORT)


def test_who_looks_for_an_adapter_that_is_expected_waits(gated: tuple[LoraRuntime, Gate]) -> None:
    runtime, gate = gated
    runtime.load("a", CONTRACTS)
    runtime.unload("a")
    said: list[str] = []
    thread = threading.Thread(target=lambda: runtime.load("a", progress=said.append))
    thread.start()
    assert gate.asked.wait(20)
    assert not said
    gate.open.set()
    thread.join(20)
    assert said == ["copying", "placing"]  # not from the files again
    assert store_of(runtime).counts.hits == 1


def test_room_that_is_read_is_not_given_away() -> None:
    """The next load needs it: it waits for the copy, which has what was there."""
    runtime = runtime_of(arena=SIZE)
    gate = Gate(store_of(runtime))
    runtime.load("a", CONTRACTS)
    assert gate.asked.wait(20)
    runtime.unload("a")
    thread = threading.Thread(target=lambda: runtime.load("b", LEGAL.parent / "support-rslora-r4"))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    gate.open.set()
    thread.join(20)
    assert set(runtime.loaded) == {"b"}
    assert cached(runtime, "a") == content(runtime, CONTRACTS)
    assert cached(runtime, "b") == content(runtime, SUPPORT)


def test_room_that_is_free_just_after_it_was_found_lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = runtime_of(arena=SIZE)
    gate, lacking = Gate(store_of(runtime)), list[bool]()
    runtime.load("a", CONTRACTS)
    runtime.unload("a")
    take = runtime.table.arena.take

    def late(sizes: Any) -> Any:
        try:
            return take(sizes)
        except RoomError:
            lacking.append(True)
            gate.open.set()
            runtime._cache_writer.finish()  # type: ignore[union-attr]
            raise

    monkeypatch.setattr(runtime.table.arena, "take", late)
    runtime.load("b", SUPPORT)
    assert (lacking, set(runtime.loaded)) == ([True], {"b"})


def test_room_that_is_read_is_free_afterwards(gated: tuple[LoraRuntime, Gate]) -> None:
    runtime, gate = gated
    runtime.load("a", CONTRACTS)
    runtime.unload("a")
    runtime._evict_free()
    assert runtime.table.arena.used_bytes == SIZE
    gate.open.set()
    store_of(runtime).wait()
    runtime._evict_free()
    runtime.table.collect()
    assert runtime.table.arena.used_bytes == 0


def test_a_new_version_meanwhile_is_what_is_cached(gated: tuple[LoraRuntime, Gate]) -> None:
    runtime, gate = gated
    for path in (CONTRACTS, SUPPORT, LEGAL):
        runtime.load("a", path)
    gate.open.set()
    assert cached(runtime, "a") == content(runtime, LEGAL)
    runtime._cache_writer.finish()  # type: ignore[union-attr]
    assert store_of(runtime).nbytes == len(content(runtime, LEGAL))


def test_a_name_that_was_dropped_meanwhile_stays_so(gated: tuple[LoraRuntime, Gate]) -> None:
    runtime, gate = gated
    runtime.load("a", CONTRACTS)
    assert gate.asked.wait(20)
    store_of(runtime).drop("a")
    gate.open.set()
    runtime._cache_writer.finish()  # type: ignore[union-attr]
    assert (store_of(runtime).names, store_of(runtime).nbytes) == ((), 0)
    assert pool_of_gate(gate).used_bytes == 0


def pool_of_gate(gate: Gate) -> PinnedPool:
    pool = gate._allocate.__self__  # type: ignore[attr-defined]
    assert isinstance(pool, PinnedPool)
    return pool


def test_where_no_memory_can_be_had_the_adapter_serves_and_is_read_again(
    gated: tuple[LoraRuntime, Gate],
) -> None:
    runtime, gate = gated
    gate.error = CapacityError("no memory")
    gate.open.set()
    runtime.load("a", CONTRACTS)
    store = store_of(runtime)
    store.wait()
    assert (store.counts.unkept, store.names, store.nbytes) == (1, ("a",), 0)
    runtime.unload("a")
    gate.error = None
    said: list[str] = []
    runtime.load("a", progress=said.append)
    assert said == ["reading", "placing"]
    assert cached(runtime, "a") == content(runtime, CONTRACTS)


def test_a_copy_that_fails_halfway_holds_nothing_and_is_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = runtime_of()
    arena, calls = runtime.table.arena, [0]
    read = arena.read

    def fails(*arguments: Any) -> None:
        calls[0] += 1
        if arguments[2].nbytes == SIZE:  # the copy itself, once memory was taken
            raise OSError("the device fell off")
        read(*arguments)

    monkeypatch.setattr(arena, "read", fails)
    runtime.load("a", CONTRACTS)
    store_of(runtime).wait()
    assert calls[0] > 1
    assert store_of(runtime).nbytes == 0
    assert store_of(runtime).find("a") == CONTRACTS.absolute()
    monkeypatch.undo()
    runtime._cache_writer.finish()  # type: ignore[union-attr]
    assert pool_of(runtime).used_bytes == 0
    runtime.unload("a")
    runtime.load("b", SUPPORT)  # the thread goes on
    assert cached(runtime, "b") == content(runtime, SUPPORT)
    with pytest.raises(OSError, match="fell off"):
        runtime.close()
    runtime.close()


@pytest.mark.parametrize("before", [None, SUPPORT])
def test_a_load_that_fails_while_it_is_cached_leaves_the_cache_as_it_was(
    before: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of()
    store = store_of(runtime)
    if before:
        runtime.load("a", before)
        store.wait()
    with monkeypatch.context() as patch:
        patch.setattr(runtime.table, "place", lambda *_: (_ for _ in ()).throw(RoomError("no")))
        with pytest.raises(RoomError):
            runtime.load("a", CONTRACTS)
    runtime._cache_writer.finish()  # type: ignore[union-attr]
    assert store.names == (("a",) if before else ())
    if before:
        assert cached(runtime, "a") == content(runtime, before)
    else:
        assert store.nbytes == 0


def test_equal_content_takes_no_memory_and_lets_nobody_go(tmp_path: Path) -> None:
    runtime = runtime_of(cache=SIZE + SIZE // 2)
    store = store_of(runtime)
    runtime.load("a", CONTRACTS)
    store.wait()
    used = pool_of(runtime).used_bytes
    copy = shutil.copytree(CONTRACTS, tmp_path / "copy")
    for name, path in (("b", copy), ("a", copy), ("a", CONTRACTS)):
        runtime.load(name, path)
        store.wait()
        assert (store.nbytes, store.counts.evictions) == (SIZE, 0)
        assert pool_of(runtime).used_bytes == used
    assert store.get("a").buffer is store.get("b").buffer
    assert store.get("b").layout.name == "b"


def test_what_went_makes_room_before_memory_is_taken() -> None:
    """Never more than the budget, rounded for each adapter; nothing is pinned again."""
    runtime = runtime_of(cache=2 * SIZE)
    store, pool = store_of(runtime), pool_of(runtime)
    held = []
    for number in range(12):
        runtime.load(f"a{number % 4}", (CONTRACTS, SUPPORT, LEGAL)[number % 3])
        store.wait()
        assert store.nbytes <= 2 * SIZE
        held.append(pool.held_bytes)
    assert store.counts.evictions > 0
    assert max(held) <= 2 * SIZE * 17 // 16 + 4096


@pytest.mark.parametrize("name", BACKENDS)
def test_bytes_stay_constant_over_a_thousand_loads_from_files(name: str, tmp_path: Path) -> None:
    """Loads, from files and from the cache, which evicts all the time; unloads in between."""
    backend = Pooled() if name == "numpy" else open_backend(name)
    runtime = runtime_of(cache=2 * SIZE + 4096, arena=8 * SIZE, backend=backend)
    store, pool = store_of(runtime), pool_of(runtime)
    paths = [CONTRACTS, SUPPORT, LEGAL]
    rng = np.random.default_rng(0)
    held: set[int] = set()
    for number in range(1000):
        name = f"a{rng.integers(5)}"
        if name in runtime.loaded and rng.random() < 0.4:
            runtime.unload(name)
        elif name in store.names and rng.random() < 0.5:
            runtime.load(name)
        else:
            runtime.load(name, paths[rng.integers(3)])
        store.wait()
        assert store.nbytes <= 2 * SIZE + 4096
        if number >= 100:
            held.add(pool.held_bytes)
    assert len(held) == 1
    for name in tuple(runtime.loaded):
        runtime.unload(name)
    runtime.close()
    runtime._evict_free()
    runtime.table.collect()
    assert runtime.table.arena.gaps == ((0, runtime.table.arena.capacity),)
    for name in store.names:
        store.drop(name)
    assert pool.used_bytes == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_steps_slots_and_cache_agree_while_copies_are_under_way(name: str) -> None:
    """What the cache got is what a load from it gives, for every adapter, in any order."""
    backend = Pooled() if name == "numpy" else open_backend(name)
    runtime = runtime_of(cache=1 << 22, arena=8 * SIZE, backend=backend)
    paths = {"c": CONTRACTS, "s": SUPPORT, "l": LEGAL}
    for round_ in range(3):
        for key, path in paths.items():
            runtime.load(f"{key}{round_}", path)
    for round_ in range(3):
        for key, path in paths.items():
            assert cached(runtime, f"{key}{round_}") == content(runtime, path)
            slot = runtime.ensure([f"{key}{round_}"])[0]
            info = runtime.table.slots[slot]
            assert info is not None
            assert info.name == f"{key}{round_}"
    runtime.close()
