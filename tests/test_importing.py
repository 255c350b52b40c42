"""Files straight into the arena: byte for byte what reading and packing on the host gives, in every
form; refusals are the host's own; a load that fails gives back what it took.

The work runs on NumPy here (the twin of ``unpack_factors``) and on a GPU where there is one;
``test_emulated_unpack`` runs the kernel without one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import adapter_files as files
import ml_dtypes
import numpy as np
import pytest
from backend_util import BACKENDS
from fixtures_util import DATA, FIXTURES, load_fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora import ops
from cupylora.adapters import import_plan, importing, safetensors_file
from cupylora.adapters.importing import Importer
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import Arena, SlotTable, StoredAdapter
from cupylora.adapters.store import AdapterStore
from cupylora.backend import ArrayBackend, open_backend
from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits, ModelShape, load_model
from cupylora.worklists import FACTOR_PIECE, FACTOR_PIECE_BYTES, PACKED, ROW_MAJOR

TINY = load_model("tiny-moe")
TOY = files.model()
CONTRACTS = DATA / "demo" / "contracts-r8"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


def table_of(backend: ArrayBackend, model: ModelShape, **options: Any) -> SlotTable:
    arena = Arena(options.pop("room", 4 << 20), backend.xp)
    limits = LoraLimits(2, options.pop("max_rank", 64))
    dtype = options.pop("dtype", "bfloat16")
    made = SlotTable(model, limits, dtype, xp=backend.xp, arena=arena, **options)
    made.arena.buffer[:] = 0xA5  # what nobody writes shows
    return made


def blocks(backend: ArrayBackend, table: SlotTable, stored: StoredAdapter) -> list[bytes]:
    assert stored.blocks is not None
    host = backend.to_host(table.arena.buffer)
    offsets, sizes = stored.blocks.offsets, stored.layout.sizes
    return [host[at : at + size].tobytes() for at, size in zip(offsets, sizes, strict=True)]


def check_same(
    backend: ArrayBackend, path: Path, model: ModelShape, *, staging: int = 1 << 18, **options: Any
) -> None:
    """Both ways into tables of their own; the import's must not have fallen back."""
    by_host, by_import = (table_of(backend, model, **options) for _ in range(2))
    wanted = by_host.store(read_adapter(path, model, name="x"))
    said: list[str] = []
    importer = Importer(backend, staging_bytes=staging)
    got = importer.store(path, by_import, name="x", say=said.append)
    assert said == ["reading"]
    assert blocks(backend, by_import, got) == blocks(backend, by_host, wanted)
    assert got.layout.sizes == wanted.layout.sizes
    assert got.layout.records.tobytes() == wanted.layout.records.tobytes()
    assert (got.info, got.layout.source) == (wanted.info, wanted.layout.source)
    by_import.place(1, got)
    by_import.evict(1)
    assert by_import.arena.used_bytes == 0


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_peft_wrote(name: str, dtype: str, backend: ArrayBackend) -> None:
    fixture = load_fixture(name)
    layout = ROW_MAJOR if dtype == "float16" else PACKED
    check_same(backend, fixture.path, fixture.model.shape, dtype=dtype, a_layout=layout)


def forms(moe: Any, rank: int, seed: int) -> dict[str, files.Tensors]:
    experts = files.expert_factors(moe, rank, seed)
    some = files.per_expert(experts, 1, only=(3, 1))
    stacked = files.stacked(moe, experts, 0)
    return {
        "by name": files.per_expert(experts, 0),
        "some experts": some,
        "three-dimensional": files.three_dimensional(experts, 1),
        "stacked": stacked,
        "swapped": files.stacked(moe, experts, 1, swapped=True),
        "in lists": files.in_lists(moe, experts, 0, (0, 2)),
        "dense": files.dense(rank, TOY.modules[0], "layers.0.self_attn.q_proj", seed=seed),
    }


FORMS = tuple(forms(TOY.moe, 2, 0))


APART = ("dense", "by name", "some experts", "three-dimensional")
"""Forms with no gate and up in one, so that their layout says nothing."""


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        (form, layout)
        for form in FORMS
        for layout in ("gate_first", "up_first", "interleaved")
        if layout == "gate_first" or form not in APART
    ],
)
@pytest.mark.parametrize("rank", [3, 8])
def test_forms(form: str, layout: Any, rank: int, backend: ArrayBackend, tmp_path: Path) -> None:
    model = files.model(gate_up_layout=layout)
    config = {"r": rank, "peft_version": "0.18.1" if form == "swapped" else "0.21.2"}
    path = files.write(tmp_path / "a", forms(model.moe, rank, 1)[form], **config)
    check_same(backend, path, model)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_mixed_types_and_ranks(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Each tensor of a type of its own, experts of ranks of their own, staging that cuts
    anywhere, K with and without a rest behind the chunks."""
    backend = open_backend("numpy")
    hidden = data.draw(st.sampled_from([12, 64, 130, 192]))
    experts = data.draw(st.integers(1, 4))
    model = files.model(hidden=hidden, intermediate=66, experts=experts, top_k=1)
    shapes = {
        name: data.draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
        for name in ("A", "B")
    }
    tensors, ranks = {}, {}
    for expert in range(experts):
        rank = data.draw(st.integers(1, 9))
        ranks[f".*experts.{expert}.*"] = rank
        made = files.per_expert(files.expert_factors(model.moe, rank, expert), 0)
        tensors |= {n: t for n, t in made.items() if f"experts.{expert}." in n}
    cast = {n: t.astype(shapes["A" if "lora_A" in n else "B"]) for n, t in tensors.items()}
    folder = tmp_path_factory.mktemp("a")
    alphas = {pattern: data.draw(st.sampled_from([1, 3, rank])) for pattern, rank in ranks.items()}
    path = files.write(folder, cast, rank_pattern=ranks, alpha_pattern=alphas)
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    layout = data.draw(st.sampled_from([PACKED, ROW_MAJOR]))
    check_same(backend, path, model, dtype=dtype, a_layout=layout, room=16 << 20)


def test_many_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors cut into many pieces, pieces into many parts of the file."""
    backend = open_backend("numpy")
    monkeypatch.setattr(import_plan, "PIECE_ELEMENTS", 100)
    monkeypatch.setattr(importing, "PIECE_ELEMENTS", 100)
    for name in ("mixtral-stacked-018", "qwen2-moe-per-expert", "gpt-oss-stacked-021"):
        fixture = load_fixture(name)
        check_same(backend, fixture.path, fixture.model.shape, staging=1024)


def test_shards(backend: ArrayBackend, tmp_path: Path) -> None:
    experts = files.expert_factors(TOY.moe, 4)
    first, second = files.per_expert(experts, 0), files.stacked(TOY.moe, experts, 1)
    path = files.write(tmp_path / "a", first | second)
    (path / "adapter_model.safetensors").unlink()
    names = {"one.safetensors": first, "two.safetensors": second}
    for shard, tensors in names.items():
        (path / shard).write_bytes(files.save(tensors))
    index = {name: shard for shard, tensors in names.items() for name in tensors}
    (path / "adapter_model.safetensors.index.json").write_text(
        files.json.dumps({"weight_map": index})
    )
    check_same(backend, path, TOY)


@pytest.mark.parametrize("alphas", [(3, 7), (0, 5), (-4, 1)])
def test_experts_of_different_scales(
    alphas: tuple[int, int], backend: ArrayBackend, tmp_path: Path
) -> None:
    tensors = files.per_expert(files.expert_factors(TOY.moe, 4), 0)
    patterns = {f"experts.{i}.up_proj": alpha for i, alpha in enumerate(alphas)}
    check_same(backend, files.write(tmp_path / "a", tensors, alpha_pattern=patterns), TOY)


def test_scales_too_far_apart_are_refused_as_the_host_does(
    backend: ArrayBackend, tmp_path: Path
) -> None:
    tensors = files.per_expert(files.expert_factors(TOY.moe, 4), 0)
    path = files.write(tmp_path / "a", tensors, alpha_pattern={"experts.1.up_proj": 1e-37})
    small = next(n for n in tensors if "experts.1.up_proj.lora_B" in n)
    tensors[small] = tensors[small] * np.float32(1e-4)
    files.write(tmp_path / "a", tensors, alpha_pattern={"experts.1.up_proj": 1e-37})
    with pytest.raises(AdapterFormatError, match="too far apart"):
        Importer(backend).store(path, table_of(backend, TOY), name="x")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_as_the_host_does(
    value: float, backend: ArrayBackend, tmp_path: Path
) -> None:
    tensors = files.stacked(TOY.moe, files.expert_factors(TOY.moe, 4), 0)
    last = next(reversed(tensors))
    tensors[last] = tensors[last].copy()
    tensors[last][-1, -1] = value
    path = files.write(tmp_path / "a", tensors)
    table = table_of(backend, TOY)
    with pytest.raises(AdapterFormatError) as by_host:
        read_adapter(path, TOY)
    with pytest.raises(AdapterFormatError) as by_import:
        Importer(backend).store(path, table, name="x")
    assert str(by_import.value) == str(by_host.value)
    assert "1 values that are not finite" in str(by_host.value)
    assert table.arena.used_bytes == 0


def test_what_the_tables_type_cannot_hold_is_refused_as_the_host_does(
    backend: ArrayBackend, tmp_path: Path
) -> None:
    tensors = files.dense(4, TOY.modules[0], "layers.0.self_attn.q_proj")
    name = next(iter(tensors))
    tensors[name] = tensors[name] * np.float32(1e5)
    path = files.write(tmp_path / "a", tensors)
    table = table_of(backend, TOY, dtype="float16")
    with pytest.raises(AdapterFormatError, match="not finite as float16"):
        Importer(backend).store(path, table, name="x")
    assert table.arena.used_bytes == 0


@pytest.mark.parametrize("options", [{"max_rank": 4}, {"room": 4096}])
def test_limits(options: dict[str, Any], backend: ArrayBackend) -> None:
    tables = [table_of(backend, TINY, **options) for _ in range(2)]
    with pytest.raises(CapacityError) as by_host:
        tables[0].store(read_adapter(CONTRACTS, TINY, name="x"))
    with pytest.raises(CapacityError) as by_import:
        Importer(backend).store(CONTRACTS, tables[1], name="x")
    assert str(by_import.value) == str(by_host.value)
    assert tables[1].arena.used_bytes == 0


def test_a_file_that_became_shorter(
    backend: ArrayBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = files.stacked(TOY.moe, files.expert_factors(TOY.moe, 4), 0)
    path = files.write(tmp_path / "a", tensors)
    table, importer = table_of(backend, TOY), Importer(backend)
    plan = importing.plan_import

    def plan_and_cut(*args: Any) -> Any:
        file = path / "adapter_model.safetensors"
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 10)
        return plan(*args)

    monkeypatch.setattr(importing, "plan_import", plan_and_cut)
    with pytest.raises(AdapterFormatError, match="became shorter while it was read"):
        importer.store(path, table, name="x")
    assert table.arena.used_bytes == 0
    monkeypatch.undo()
    whole = files.write(tmp_path / "a", tensors)
    importer.store(whole, table, name="x")


def of_many_parts(tmp_path: Path) -> tuple[ModelShape, Path]:
    """24 parts of 256 KiB."""
    model = files.model(hidden=1024, intermediate=64, experts=2)
    rng = np.random.default_rng(0)
    tensors: files.Tensors = {}
    for layer in range(2):
        for name, inputs, outputs in (("up_proj", 1024, 64), ("down_proj", 64, 1024)):
            for expert in range(2):
                path = f"layers.{layer}.mlp.experts.{expert}.{name}"
                a, b = files.random(rng, 64, inputs), files.random(rng, outputs, 64)
                tensors |= files.linear(path, a, b)
    return model, files.write(tmp_path / "a", tensors, r=64)


def test_parts_are_read_several_at_a_time(
    backend: ArrayBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of them into memory that another is still copied from."""
    model, path = of_many_parts(tmp_path)
    reading, most, lock = set[int](), list[int](), threading.Lock()
    together = threading.Barrier(importing.READERS)
    read_into = safetensors_file.WeightFiles.read_into

    def slowly(self: Any, number: int, begin: int, target: Any) -> None:
        place = target.ctypes.data
        with lock:
            assert place not in reading
            reading.add(place)
            most.append(len(reading))
        if len(most) <= importing.READERS:
            together.wait(20)
        read_into(self, number, begin, target)
        with lock:
            reading.remove(place)

    monkeypatch.setattr(safetensors_file.WeightFiles, "read_into", slowly)
    check_same(backend, path, model)
    assert max(most) == importing.READERS
    assert len(most) > 2 * importing.STAGING_DEPTH


@pytest.mark.parametrize("where", ["reading", "sending"])
def test_a_failure_among_many_parts(
    where: str, backend: ArrayBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread reads on when the files are closed; the importer serves the next one."""
    model, path = of_many_parts(tmp_path)
    table, importer = table_of(backend, model), Importer(backend, staging_bytes=1 << 18)
    calls, open_reads = itertools.count(), set[int]()
    read_into = safetensors_file.WeightFiles.read_into

    def fails(*arguments: Any) -> None:
        number = next(calls)
        if where == "reading" and number == 9:
            raise AdapterFormatError("the disk fell off")
        open_reads.add(number)
        read_into(*arguments)
        open_reads.remove(number)

    def refuses(*arguments: Any, **options: Any) -> None:
        if next(calls) >= 9:
            raise AdapterFormatError("the disk fell off")
        unpack(*arguments, **options)

    unpack = ops.unpack_factors
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file.WeightFiles, "read_into", fails)
        if where == "sending":
            patch.setattr(importing.ops, "unpack_factors", refuses)
        with pytest.raises(AdapterFormatError, match="fell off"):
            importer.store(path, table, name="x")
        assert not open_reads
    assert table.arena.used_bytes == 0
    wanted = table_of(backend, model)
    got = blocks(backend, table, importer.store(path, table, name="x"))
    assert got == blocks(backend, wanted, wanted.store(read_adapter(path, model, name="x")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": np.zeros(4, np.int8)}, "source has dtype int8"),
        ({"target": np.zeros((2, 2), np.uint8)}, r"target has shape \(2, 2\)"),
        ({"pieces": np.zeros((1, 95), np.uint8)}, "pieces has shape"),
        ({"pieces": np.zeros((65_536, 96), np.uint8)}, "65535 at most"),
        ({"fault": np.zeros(2, np.int32)}, "fault has shape"),
        ({"most_elements": -1}, "most_elements is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_arguments_of_unpack_factors(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "source": np.zeros(4, np.uint8),
        "pieces": np.zeros((0, FACTOR_PIECE_BYTES), np.uint8),
        "target": np.zeros(4, np.uint8),
        "dtype": "bfloat16",
        "most_elements": 0,
        "fault": np.zeros(1, np.int32),
    }
    ops.unpack_factors(**arguments)
    with pytest.raises(ArgumentError, match=message):
        ops.unpack_factors(**{**arguments, **change})


def test_a_record_has_the_size_that_kernels_know() -> None:
    assert FACTOR_PIECE.itemsize == FACTOR_PIECE_BYTES == 96


@pytest.mark.parametrize("form", ["one more expert", "two prefixes", "mixed types", "mixed ranks"])
@pytest.mark.parametrize("equal", [True, False])
def test_whether_gate_and_up_share_a(form: str, equal: bool, tmp_path: Path) -> None:
    """Told of what is built: an expert that one of both lacks has zeros there."""
    moe = TOY.moe
    rng = np.random.default_rng(0)
    tensors: files.Tensors = {}
    path = "layers.0.mlp.experts.{}.{}"
    a = {e: files.random(rng, 4, moe.hidden) for e in range(2)}
    for expert in range(2):
        for name in ("gate_proj", "up_proj"):
            if form == "one more expert" and (expert, name) == (1, "gate_proj"):
                continue
            own = a[expert]
            if form == "one more expert" and expert == 1 and equal:
                own = np.zeros_like(own)  # of one sign, unlike own * 0
            if not equal and form != "one more expert" and (expert, name) == (1, "up_proj"):
                own = own + 1
            prefix = "model." if form == "two prefixes" and expert and name == "up_proj" else None
            rank = 3 if form == "mixed ranks" and expert else 4
            b = files.random(rng, moe.intermediate, rank)
            made = files.linear(path.format(expert, name), own[:rank], b, prefix or files.PREFIX)
            if form == "mixed types":
                kind = ml_dtypes.bfloat16 if name == "up_proj" else np.float32
                made = {n: t.astype(kind if expert else np.float32) for n, t in made.items()}
            tensors |= made
    ranks = {"experts.1.*": 3} if form == "mixed ranks" else {}
    folder = files.write(tmp_path / "a", tensors, rank_pattern=ranks, alpha_pattern=ranks)
    check_same(open_backend("numpy"), folder, TOY)
    factors = read_adapter(folder, TOY).factors
    assert (factors[0, "gate_proj"].a is factors[0, "up_proj"].a) == equal


def test_threads_share_an_importer(tmp_path: Path) -> None:
    backend = open_backend("numpy")
    importer = Importer(backend, staging_bytes=1 << 18)
    shapes = {"hidden": 1024, "intermediate": 64, "experts": 2}
    model = files.model(**shapes)
    folders, wanted = [], []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        tensors: files.Tensors = {}
        for layer in range(2):
            for expert in range(2):
                name = f"layers.{layer}.mlp.experts.{expert}.up_proj"
                a, b = files.random(rng, 64, 1024), files.random(rng, 64, 64)
                tensors |= files.linear(name, a, b)
        folders.append(files.write(tmp_path / str(seed), tensors, r=64))
        table = table_of(backend, model)
        wanted.append(blocks(backend, table, table.store(read_adapter(folders[-1], model))))
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(6):
            table = table_of(backend, model)
            stored = importer.store(folders[seed], table, name="x")
            if blocks(backend, table, stored) != wanted[seed]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed % 2,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_interrupt_at_a_bad_moment_loses_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of a store and whoever was to have its result."""

    class Late(contextlib.ExitStack):
        def __exit__(self, *details: Any) -> None:
            super().__exit__(*details)
            raise KeyboardInterrupt

    runtime = cached(1 << 20, None)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file, "ExitStack", Late)
        for _ in range(12):
            with pytest.raises(KeyboardInterrupt):
                runtime.load("c", CONTRACTS)
    for name in "abcd"[:2]:
        runtime.load(name, CONTRACTS)
    assert runtime.table.arena.used_bytes == 2 * SIZE


SIZE = 100_352
"""Bytes of contracts-r8."""


# --- in the runtime ----------------------------------------------------------------------------


def cached(room: int, cache: int | None) -> LoraRuntime:
    """A runtime on NumPy that loads as one on a GPU does."""
    limits = LoraLimits(2, 16)
    made = LoraRuntime(
        TINY,
        limits,
        dtype="bfloat16",
        max_tokens=8,
        arena_bytes=room,
        backend="numpy",
        host_cache_bytes=cache,
    )
    made._importer = Importer(made.backend)
    return made


@pytest.mark.parametrize("cache", [None, 1 << 20])
def test_a_runtime_imports(cache: int | None, backend: ArrayBackend) -> None:
    runtime, said = cached(1 << 20, cache), list[str]()
    slot = runtime.load("contracts", CONTRACTS, progress=said.append)
    assert said == ["reading", "placing"]
    by_host = table_of(backend, TINY)
    wanted = by_host.store(read_adapter(CONTRACTS, TINY, name="contracts"))
    info = runtime.table.slots[slot]
    assert info is not None
    assert (info.name, info.arena_bytes) == ("contracts", wanted.info.arena_bytes)
    held = runtime.table.arena.buffer[: info.arena_bytes].tobytes()
    assert held == b"".join(blocks(backend, by_host, wanted))


def test_what_was_imported_comes_from_the_cache_again() -> None:
    runtime = cached(1 << 20, 1 << 20)
    store = runtime.store
    assert store is not None
    runtime.load("one", CONTRACTS)
    plain = AdapterStore(runtime.table, budget_bytes=1 << 20)
    assert store.get("one").same_content(plain.put("one", CONTRACTS))
    runtime.unload("one")
    said: list[str] = []
    runtime.load("one", progress=said.append)
    assert said == ["copying", "placing"]


def test_what_went_from_the_cache_is_imported_again() -> None:
    size = cached(1 << 20, 1 << 20).table.store(read_adapter(CONTRACTS, TINY)).layout.nbytes
    runtime = cached(1 << 20, size)
    other = DATA / "demo" / "support-rslora-r4"
    runtime.load("one", CONTRACTS)
    runtime.load("two", other)
    store = runtime.store
    assert store is not None
    store.wait()
    assert store.sizes()["one"] == 0
    runtime.unload("one")
    said: list[str] = []
    runtime.load("one", progress=said.append)
    assert said == ["reading", "placing"]


def test_a_cache_that_is_too_small_takes_no_room() -> None:
    runtime = cached(1 << 20, 1000)
    with pytest.raises(CapacityError, match="the host cache has 1000"):
        runtime.load("one", CONTRACTS)
    assert runtime.table.arena.used_bytes == 0
    assert runtime.loaded == {}
