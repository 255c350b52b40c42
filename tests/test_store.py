"""The host cache, loads in the background and from arrays: the same bytes on the device as a plain
load, one buffer for equal content, and nothing lost that cannot be read again."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS
from fixtures_util import DATA
from runtime_util import DTYPE, MAX_RANK, MODEL, Harness, Inputs, adapter, room

from cupylora.adapters.device_factors import FactorArrays
from cupylora.adapters.factors import Adapter, synthetic_adapter
from cupylora.adapters.importing import Importer
from cupylora.adapters.loading import load_adapter
from cupylora.adapters.packed import pack_adapter
from cupylora.adapters.safetensors_file import WeightFiles
from cupylora.adapters.slots import Arena, SlotTable
from cupylora.adapters.store import AdapterStore, StoreCounts
from cupylora.backend import ArrayBackend, NumpyBackend, open_backend
from cupylora.dtypes import resolve_dtype
from cupylora.errors import (
    AdapterFormatError,
    ArgumentError,
    CapacityError,
    CupyloraError,
    GraphError,
    RoomError,
)
from cupylora.graphs.buckets import DispatchOptions
from cupylora.graphs.manager import GraphOptions
from cupylora.host_memory import HostMemory
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits, load_model
from cupylora.worklists import PACKED, ROW_MAJOR, SLOT_ENTRY

TINY = load_model("tiny-moe")
DEMO = DATA / "demo"
GRAPHS = GraphOptions(dispatch=DispatchOptions((8, 16)))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


def ones(nbytes: int) -> HostMemory:
    """Memory that shows what nobody wrote, in two parts."""
    made = np.ones(nbytes, np.uint8)
    return HostMemory([made[: nbytes // 3], made[nbytes // 3 :]])


def tiny_table(**options: Any) -> SlotTable:
    limits = LoraLimits(3, 16)
    return SlotTable(TINY, limits, "bfloat16", arena=Arena(2 << 20), **options)


def tiny_store(budget: int = 1 << 30) -> AdapterStore:
    return AdapterStore(tiny_table(), budget_bytes=budget)


def tiny(seed: int, rank: int = 8, **options: Any) -> Adapter:
    return synthetic_adapter(TINY, rank, seed, **options)


def serving(backend: ArrayBackend, cache: int | None = 1 << 28, **sizes: Any) -> Harness:
    made = Harness(backend, graphs=GRAPHS, host_cache_bytes=cache, **sizes)
    made.runtime.capture()
    return made


def inputs_of(made: Harness, *names: str | None) -> Inputs:
    return Inputs.random(8, np.resize(made.runtime.slots_of(names), 8), 0)


def content(table: SlotTable, slot: int) -> list[Any]:
    """Everything a slot's entries say and point at, wherever it lies."""
    entries = np.ascontiguousarray(table.entries[:, slot]).view(SLOT_ENTRY).reshape(-1)
    found = []
    for entry in entries:
        row = [entry[field].item() for field in SLOT_ENTRY.names if "ptr" not in field]
        found.append(row[:-1])  # but not the generation
        for pointer in ("a_ptr", "b_ptr"):
            at = int(entry[pointer]) - table.arena.address
            found.append(table.arena.buffer[at : at + 64].tobytes() if entry["rank"] else b"")
    return found


# --- packed form -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [PACKED, ROW_MAJOR])
@pytest.mark.parametrize("kind", ["all", "shared", "some", "none"])
def test_a_packed_adapter_is_stored_as_a_plain_one(layout: int, kind: str) -> None:
    given = {
        "all": tiny(1),
        "shared": tiny(2, shared_a=True),
        "some": tiny(3, modules=["q_proj", "up_proj"]),
        "none": Adapter("none", {}),
    }[kind]
    plain, packed = tiny_table(a_layout=layout), tiny_table(a_layout=layout)
    form = pack_adapter(given, TINY, packed.limits, packed.dtype, layout, ones)
    plain.load(1, given)
    packed.place(1, packed.store(form))
    assert packed.slots[1] == plain.slots[1]
    assert packed.arena.used_bytes == plain.arena.used_bytes == form.nbytes
    # Blocks were allocated in the same order, so that all bytes agree, padding included.
    used = plain.arena.used_bytes
    assert packed.arena.buffer[:used].tobytes() == plain.arena.buffer[:used].tobytes()
    assert content(packed, 1) == content(plain, 1)
    packed.evict(1)
    assert packed.arena.used_bytes == 0


def test_blocks_that_stand_apart_are_copied_apart() -> None:
    table, given = tiny_table(), tiny(1)
    form = pack_adapter(given, TINY, table.limits, table.dtype, PACKED, ones)
    holes = [table.arena.alloc(size) for size in form.layout.sizes for _ in range(2)]
    for hole in holes[::2]:
        table.arena.free(hole)
    table.place(0, table.store(form))
    plain = tiny_table()
    plain.load(0, given)
    assert content(table, 0) == content(plain, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "float16"}, ArgumentError, r"has dtype float16, the table bfloat16; pack it"),
        ({"layout": ROW_MAJOR}, ArgumentError, r"has a_layout 0, the table 1"),
        ({"rank": 16, "max_rank": 8}, CapacityError, r"rank 16, which exceeds max_rank 8"),
        ({"layers": 1}, ArgumentError, r"has table rows 7, the table 14"),
    ],
)
def test_what_was_packed_for_another_table_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = TINY.with_layers(change.get("layers", 2))
    given = synthetic_adapter(model, change.get("rank", 8), 1)
    dtype = resolve_dtype(change.get("dtype", "bfloat16"))
    layout = change.get("layout", PACKED)
    form = pack_adapter(given, model, LoraLimits(3, 16), dtype, layout, ones)
    limits = LoraLimits(3, change.get("max_rank", 16))
    table = SlotTable(TINY, limits, "bfloat16", arena=Arena(1 << 20))
    with pytest.raises(error, match=message):
        table.store(form)
    assert table.arena.used_bytes == 0


def test_an_arena_without_room_gives_back_what_was_taken() -> None:
    table = SlotTable(TINY, LoraLimits(3, 16), "bfloat16", arena=Arena(60_000))
    form = tiny_store().put("a", tiny(1))
    with pytest.raises(CapacityError):
        table.store(form)
    assert table.arena.used_bytes == 0


# --- store -------------------------------------------------------------------------------------


def test_a_directory_is_read_once() -> None:
    store, said = tiny_store(), []
    first = store.put("contracts", DEMO / "contracts-r8", said.append)
    assert store.get("contracts", said.append).buffer is first.buffer
    assert said == ["reading", "packing"]
    assert store.counts == StoreCounts(hits=1, reads=1, evictions=0)
    assert store.names == ("contracts",)
    assert store.sizes() == {"contracts": first.nbytes}


def test_equal_content_is_kept_once_whatever_it_is_called(tmp_path: Path) -> None:
    store = tiny_store()
    copy = shutil.copytree(DEMO / "contracts-r8", tmp_path / "copy")
    one, two = store.put("one", DEMO / "contracts-r8"), store.put("two", copy)
    assert one.buffer is two.buffer
    assert (one.layout.name, two.layout.name) == ("one", "two")
    assert store.nbytes == one.nbytes
    other = store.put("three", tiny(1))
    near = tiny(1)
    last = near.factors[1, "down_proj"].b
    last[7, 63, 7] += 1  # one value in the last block
    almost = store.put("four", near)
    assert almost.buffer is not other.buffer
    assert store.nbytes == one.nbytes + 2 * other.nbytes
    store.drop("one")
    assert store.get("two").buffer is one.buffer


def test_what_can_be_read_again_goes_first_and_comes_back() -> None:
    size = tiny_store().put("x", tiny(0)).nbytes
    store = tiny_store(budget=3 * size)
    store.put("memory", tiny(1))
    for name in ("contracts-r8", "support-rslora-r4"):
        store.put(name, DEMO / name)
    store.get("contracts-r8")
    bytes_before = store.get("support-rslora-r4").buffer.tobytes()
    store.put("more", tiny(2))  # contracts is the one unused longest
    assert store.sizes()["contracts-r8"] == 0
    assert store.sizes()["support-rslora-r4"] > 0
    assert store.counts.evictions == 1
    assert store.get("contracts-r8").nbytes == size  # read again; support goes
    assert store.sizes()["support-rslora-r4"] == 0
    assert store.nbytes <= 3 * size
    store.drop("more")
    assert store.get("support-rslora-r4").buffer.tobytes() == bytes_before
    assert store.counts.reads == 4


def test_what_cannot_be_read_again_is_not_let_go() -> None:
    size = tiny_store().put("x", tiny(0)).nbytes
    store = tiny_store(budget=2 * size)
    for seed in (1, 2):
        store.put(f"memory {seed}", tiny(seed))
    with pytest.raises(CapacityError, match=r"adapter more has .* cannot be read again .* drop"):
        store.put("more", tiny(3))
    assert store.names == ("memory 1", "memory 2")
    store.put("memory 1", tiny(4))  # in its own place
    store.drop("memory 2")
    store.put("more", tiny(3))


def test_names_that_are_not_there() -> None:
    store = tiny_store()
    store.put("a", tiny(1))
    for call in (store.get, store.drop):
        with pytest.raises(ArgumentError, match=r"b is not in the host cache, which has: a"):
            call("b")
    broken = tiny(2)
    broken.factors[0, "q_proj"].a[0, 0, 0] = np.nan
    with pytest.raises(AdapterFormatError, match=r"layer 0, q_proj: A holds a value"):
        store.put("a", broken)
    with pytest.raises(AdapterFormatError):
        store.put("a", DEMO / "nowhere")
    assert any(store.get("a").buffer.tobytes())


# --- through the runtime -----------------------------------------------------------------------


def test_a_load_from_the_cache_serves_the_same(backend: ArrayBackend) -> None:
    made, plain = serving(backend), serving(backend, cache=None)
    for harness in (made, plain):
        harness.runtime.load("a", adapter(2))
    expected = plain.run(inputs_of(plain, "a", None))
    for _ in range(2):
        for got, want in zip(made.run(inputs_of(made, "a", None)), expected, strict=True):
            assert got.tobytes() == want.tobytes()
        made.runtime.unload("a")
        made.runtime.load("a")
    assert made.runtime.store is not None
    assert made.runtime.store.counts.hits == 2
    with pytest.raises(ArgumentError, match=r"adapter is left out for 'a', but there is no host c"):
        plain.runtime.load("a")


def test_what_a_batch_needs_is_brought_in(backend: ArrayBackend) -> None:
    made = serving(backend, max_loras=2)
    assert made.runtime.store is not None
    for seed in range(5):
        made.runtime.store.put(f"a{seed}", adapter(seed))
    rng = np.random.default_rng(0)
    for _ in range(20):
        names = [f"a{n}" for n in rng.permutation(5)[:2]]
        slots = made.runtime.ensure([*names, None])
        made.check(Inputs.random(8, np.resize(slots, 8), 1))
        assert set(names) <= set(made.runtime.loaded)
    with pytest.raises(CapacityError, match=r"3 adapters wanted in one batch, .* 2 slots"):
        made.runtime.ensure(["a0", "a1", "a2"])
    with pytest.raises(ArgumentError, match=r"adapter x is not in the host cache"):
        made.runtime.ensure(["x"])


def test_loads_in_the_background(backend: ArrayBackend) -> None:
    made, said = serving(backend), []
    made.runtime.load("a0", adapter(0), pin=True)
    inputs = inputs_of(made, "a0", None)
    expected = made.run(inputs)
    futures = [
        made.runtime.load_async(f"b{seed}", adapter(seed), progress=said.append)
        for seed in range(1, 4)
    ]
    for got, want in zip(made.run(inputs), expected, strict=True):
        assert got.tobytes() == want.tobytes()
    assert sorted(future.result() for future in futures) == [1, 2, 3]
    assert said == ["packing", "copying", "placing"] * 3
    made.check(inputs_of(made, "b1", "b2", "b3"))
    bad = replace(adapter(1), factors={(9, "q_proj"): adapter(1).factors[0, "q_proj"]})
    assert isinstance(made.runtime.load_async("bad", bad).exception(), AdapterFormatError)
    with pytest.raises(ArgumentError, match=r"'' is no adapter's name"):
        made.runtime.load_async("", adapter(1))
    made.runtime.close()
    with pytest.raises(GraphError, match="the runtime is closed"):
        made.runtime.load_async("c", adapter(1))


def test_a_load_that_has_not_begun_can_be_cancelled(backend: ArrayBackend) -> None:
    made = serving(backend)
    begun, go = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        begun.set()
        go.wait(10)

    first = made.runtime.load_async("a", adapter(0), progress=hold)
    assert begun.wait(10)
    second = made.runtime.load_async("b", adapter(1))
    assert second.cancel()
    go.set()
    assert first.result() == 0
    with pytest.raises(CancelledError):
        second.result()
    assert set(made.runtime.loaded) == {"a"}


def arrays_of(backend: ArrayBackend, given: Adapter) -> dict[tuple[int, str], FactorArrays]:
    dtype = resolve_dtype(DTYPE)
    put = {
        id(x): backend.asarray(np.ascontiguousarray(x).astype(dtype))
        for f in given.factors.values()
        for x in (f.a, f.b)
    }
    return {
        key: FactorArrays(put[id(f.a)], put[id(f.b)], f.scale) for key, f in given.factors.items()
    }


@pytest.mark.parametrize("shared", [(), ("up_proj", "q_proj")])
def test_arrays_on_the_device_are_loaded(backend: ArrayBackend, shared: tuple[str, ...]) -> None:
    """As the same factors are from host memory, to the byte."""
    made, plain = serving(backend), serving(backend)
    given = adapter(3, shared=shared)
    arrays = arrays_of(backend, given)
    made.runtime.load_arrays("a", arrays)
    plain.runtime.load("a", given)
    tables = (made.runtime.table, plain.runtime.table)
    infos = [table.slots[0] for table in tables]
    assert None not in infos
    assert infos[0].arena_bytes == infos[1].arena_bytes  # type: ignore[union-attr]
    held = [backend.to_host(t.arena.buffer[: t.arena.used_bytes]).tobytes() for t in tables]
    assert held[0] == held[1]
    for value in arrays.values():  # the caller's own again
        backend.clear(value.b)
    expected = plain.run(inputs_of(plain, "a", None))
    for got, want in zip(made.run(inputs_of(made, "a", None)), expected, strict=True):
        assert got.tobytes() == want.tobytes()
    made.runtime.load_arrays("a", arrays_of(backend, adapter(5)))  # a new version
    made.check(inputs_of(made, "a"))
    made.runtime.unload("a")


def test_arrays_that_do_not_fit_are_refused(backend: ArrayBackend) -> None:
    made = serving(backend)
    good = arrays_of(backend, adapter(2))
    key, value = next(iter(good.items()))
    nan = backend.asarray(np.full(value.b.shape, np.nan, resolve_dtype(DTYPE)))
    wide = backend.zeros((1, MAX_RANK + 1, value.a.shape[2]), resolve_dtype(DTYPE))
    tall = backend.zeros((1, value.b.shape[1], MAX_RANK + 1), resolve_dtype(DTYPE))
    cases: list[tuple[Any, type[Exception], str]] = [
        ({(0, "nope"): value}, ArgumentError, r"is no \(layer, module\) of model"),
        ({(7, key[1]): value}, ArgumentError, r"is no \(layer, module\) of model"),
        ({"q_proj": value}, ArgumentError, r"is no \(layer, module\) of model"),
        ({key: (value.a, value.b)}, ArgumentError, r"a FactorArrays is needed"),
        ({key: replace(value, a=value.b)}, ArgumentError, r": a has shape"),
        ({key: replace(value, b=value.a)}, ArgumentError, r": b has shape"),
        ({key: replace(value, b=nan)}, AdapterFormatError, r": b holds a value that is not fin"),
        ({key: FactorArrays(wide, tall, 1.0)}, CapacityError, r"rank 25 exceeds max_rank 24"),
        ([key], ArgumentError, r"factors is a list; a mapping is needed"),
    ]
    for factors, error, message in cases:
        with pytest.raises(error, match=message):
            made.runtime.load_arrays("a", factors)
    for scale in (np.inf, "1", True, 1e300):
        with pytest.raises(ArgumentError, match=r"scale"):
            FactorArrays(value.a, value.b, scale)  # type: ignore[arg-type]
    assert made.runtime.loaded == {}
    assert made.runtime.table.arena.used_bytes == 0


def test_bytes_stay_constant_over_many_loads() -> None:
    """1,000 loads and unloads of mixed ranks, from the cache: nothing grows, nothing is stuck."""
    made = serving(NumpyBackend(), max_loras=3)
    runtime = made.runtime
    assert runtime.store is not None
    for seed in range(8):
        runtime.store.put(f"a{seed}", adapter(seed))
    held, rng = runtime.store.nbytes, np.random.default_rng(0)
    for _ in range(1000):
        name = f"a{rng.integers(8)}"
        if name in runtime.loaded and rng.random() < 0.4:
            runtime.unload(name)
        else:
            runtime.load(name)
    assert runtime.store.nbytes == held
    for name in tuple(runtime.loaded):
        runtime.unload(name)
    runtime._evict_free()
    assert runtime.table.arena.used_bytes == 0
    assert runtime.table.arena.gaps == ((0, runtime.table.arena.capacity),)


def test_an_arena_of_mixed_ranks_keeps_room_over_ten_thousand_loads() -> None:
    """Four slots, room for six of the largest: never too fragmented for the next."""
    table = SlotTable(MODEL, LoraLimits(4, MAX_RANK), DTYPE, arena=Arena(room(6)))
    store = AdapterStore(table, budget_bytes=1 << 30)
    forms = [store.put(f"a{seed}", adapter(seed)) for seed in range(8)]
    rng = np.random.default_rng(1)
    for _ in range(10_000):
        table.place(int(rng.integers(4)), table.store(forms[rng.integers(8)]))
    for slot in range(4):
        table.evict(slot)
    assert table.arena.used_bytes == 0


class Lazy(Mapping[Any, Any]):
    """Makes its values anew at every look."""

    def __init__(self, made: Callable[[Any], Any], keys: Sequence[Any]) -> None:
        self._made, self._keys = made, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __getitem__(self, key: Any) -> Any:
        return self._made(key)


def test_a_mapping_that_makes_its_values_anew(backend: ArrayBackend) -> None:
    """Identity of arrays tells which are shared; those of two looks must not be mixed up."""
    made = serving(backend)
    given = adapter(3)
    arrays = Lazy(lambda key: arrays_of(backend, given)[key], list(given.factors))
    made.runtime.load_arrays("a", arrays)
    made.runtime.load("b", given)
    inputs = inputs_of(made, "a", None)
    first = made.run(inputs)
    for got, want in zip(first, made.run(inputs_of(made, "b", None)), strict=True):
        assert got.tobytes() == want.tobytes()
    lazy = Adapter("lazy", Lazy(lambda key: adapter(3).factors[key], list(given.factors)))
    stored = [made.runtime.table.store(form) for form in (lazy, given)]
    assert stored[0].layout.records.tobytes() == stored[1].layout.records.tobytes()


# --- failures leave what was ---------------------------------------------------------------------


def runtime_of(cache: int | None, arena: int = 1 << 20, slots: int = 4) -> LoraRuntime:
    limits = LoraLimits(slots, 16)
    return LoraRuntime(
        TINY,
        limits,
        dtype="bfloat16",
        max_tokens=8,
        arena_bytes=arena,
        backend="numpy",
        host_cache_bytes=cache,
    )


SIZE = 100_352
"""Bytes of contracts-r8."""


@pytest.mark.parametrize("imports", [False, True])
def test_a_load_that_fails_leaves_the_cache_as_it_was(imports: bool) -> None:
    runtime = runtime_of(1 << 20, arena=110_000)
    if imports:
        runtime._importer = Importer(runtime.backend)
    runtime.load("a", DEMO / "contracts-r8")
    other = DEMO / "legal-stacked-r6"
    with pytest.raises(RoomError):
        runtime.load("a", other)
    with pytest.raises(RoomError):
        runtime.load("new", other)
    store = runtime.store
    assert store is not None
    assert store.names == ("a",)
    runtime.unload("a")
    runtime.load("a")
    assert runtime.table.slots[runtime.loaded["a"]].max_rank == 8  # type: ignore[union-attr]


def test_ensure_makes_room_of_adapters_that_the_batch_does_not_need() -> None:
    runtime = runtime_of(1 << 20, arena=2 * SIZE)
    runtime.load("a", DEMO / "contracts-r8")
    runtime.load("b", DEMO / "contracts-r8")
    assert runtime.store is not None
    runtime.store.put("c", DEMO / "support-rslora-r4")
    with pytest.raises(RoomError):  # a load by itself unloads nobody for room
        runtime.load("c")
    runtime.pin("a")
    assert runtime.ensure(["c", None, "a"]).tolist() == [2, -1, 0]
    assert set(runtime.loaded) == {"a", "c"}
    runtime.store.put("d", tiny(1, 16))
    with pytest.raises(RoomError):
        runtime.ensure(["d", "c"])
    assert set(runtime.loaded) == {"a", "c"}


def test_a_rank_beyond_the_limits_unloads_nobody() -> None:
    runtime = runtime_of(1 << 20, arena=2 * SIZE)
    runtime.load("a", DEMO / "contracts-r8")
    with pytest.raises(CapacityError, match="max_rank 16"):
        runtime.store.put("wide", tiny(1, 32))  # type: ignore[union-attr]
    assert set(runtime.loaded) == {"a"}


@pytest.mark.parametrize("cache", [None, 1 << 20])
@pytest.mark.parametrize("call", ["load", "ensure", "load_arrays", "close"])
def test_progress_that_loads_is_refused_and_blocks_nobody(call: str, cache: int | None) -> None:
    runtime = runtime_of(cache)
    if call == "ensure" and cache is None:
        pytest.skip("there is nothing to load from")
    nested = {
        "load": lambda: runtime.load("q", DEMO / "contracts-r8"),
        "ensure": lambda: runtime.ensure(["q"]),
        "load_arrays": lambda: runtime.load_arrays("q", {}),
        "close": runtime.close,
    }
    with pytest.raises(GraphError, match="from inside a load"):
        runtime.load("p", DEMO / "contracts-r8", progress=lambda _: nested[call]())
    assert runtime.loaded == {}
    runtime.load("other", DEMO / "contracts-r8")


def test_closing() -> None:
    runtime = runtime_of(1 << 20)
    runtime.close()
    with pytest.raises(GraphError, match="is closed"):
        runtime.load_async("a", DEMO / "contracts-r8")
    runtime = runtime_of(1 << 20)
    future = runtime.load_async("a", DEMO / "contracts-r8")
    told: list[BaseException] = []

    def close_it(_: Any) -> None:
        try:
            runtime.close()
        except GraphError as error:
            told.append(error)

    hold = threading.Event()
    second = runtime.load_async("b", tiny(1), progress=lambda _: hold.wait(10) and None)
    second.add_done_callback(close_it)
    hold.set()
    assert (future.result(), second.result()) == (0, 1)
    runtime.close()
    assert ["close was called by a load" in str(error) for error in told] == [True]


def test_closing_waits_for_a_load_of_another_thread() -> None:
    runtime, order = runtime_of(None), []
    begun, go = threading.Event(), threading.Event()

    def hold(stage: str) -> None:
        begun.set()
        go.wait(10)

    def load() -> None:
        runtime.load("a", tiny(1), progress=hold)
        order.append("load")

    thread = threading.Thread(target=load)
    thread.start()
    assert begun.wait(10)
    closing = threading.Thread(target=lambda: (runtime.close(), order.append("close")))
    closing.start()
    go.set()
    thread.join(10)
    closing.join(10)
    assert order[0] == "load"


def test_what_is_no_adapter_is_refused_at_once() -> None:
    for cache in (None, 1 << 20):
        runtime = runtime_of(cache)
        for wrong in (123, b"/x", {}):
            with pytest.raises(ArgumentError, match="an Adapter or a path is needed"):
                runtime.load("a", wrong)  # type: ignore[arg-type]
            with pytest.raises(ArgumentError, match="an Adapter or a path is needed"):
                runtime.load_async("a", wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="an Adapter or a path is needed"):
        tiny_store().put("a", 123)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["put", "drop"])
def test_a_get_that_reads_gives_way_to_put_and_drop(change: str) -> None:
    store = tiny_store(SIZE)
    store.put("x", DEMO / "contracts-r8")
    store.put("y", DEMO / "legal-stacked-r6")  # x is to be read again
    reading, go = threading.Event(), threading.Event()

    def hold(stage: str) -> None:
        if stage == "packing":
            reading.set()
            go.wait(10)

    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(store.get("x", hold)))
    thread.start()
    assert reading.wait(10)
    if change == "drop":
        store.drop("x")
    else:
        form = tiny_store().put("x", DEMO / "support-rslora-r4")
        store.keep("x", form, DEMO / "support-rslora-r4")
    go.set()
    thread.join(10)
    assert got[0].layout.max_rank == 8
    assert ("x" in store.names) == (change == "put")
    if change == "put":
        assert store.get("x").layout.max_rank == 4


def test_a_relative_path_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO / "contracts-r8", tmp_path / "here/one")
    shutil.copytree(DEMO / "support-rslora-r4", tmp_path / "there/one")
    store = tiny_store(SIZE)
    monkeypatch.chdir(tmp_path / "here")
    store.put("x", "one")
    store.put("y", DEMO / "legal-stacked-r6")
    monkeypatch.chdir(tmp_path / "there")
    assert store.get("x").layout.max_rank == 8


def test_many_names_do_not_make_the_store_slow() -> None:
    store = tiny_store(3 * SIZE)
    form = store.put("first", DEMO / "contracts-r8")
    for number in range(3000):
        store.keep(f"user{number}", form, DEMO / "contracts-r8")
    other = tiny_store().put("x", DEMO / "legal-stacked-r6")
    start = time.process_time()
    for number in range(20):
        store.keep(f"new{number}", other, DEMO / "legal-stacked-r6")
    assert time.process_time() - start < 2
    assert store.nbytes == form.nbytes + other.nbytes


def test_names_of_adapters_cannot_reach_a_terminal() -> None:
    runtime = runtime_of(None)
    runtime.load("\x1b[31m", tiny(1))
    for names in (["x"], ["\x1b[31m", *"abcd"]):
        with pytest.raises(CupyloraError) as caught:
            runtime.slots_of(names)
        assert str(caught.value).isprintable()


def test_a_rank_beyond_the_limits_is_refused_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightFiles, "read", lambda _: pytest.fail("read"))
    limits = LoraLimits(2, 4)
    table = SlotTable(TINY, limits, "bfloat16", arena=Arena(1 << 20))
    with pytest.raises(CapacityError, match="rank 8 exceeds max_rank 4"):
        load_adapter(DEMO / "contracts-r8", table, 0)
