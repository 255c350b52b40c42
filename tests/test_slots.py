"""Arena and slot table: what a slot's entries point at is its adapter, whole, and nobody else's."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import adapter_files as files
import ml_dtypes
import numpy as np
import pytest
from adapter_files import write
from fixtures_util import DATA, DEMO, FIXTURES, load_fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora.adapters import arena as arena_module
from cupylora.adapters.factors import Adapter, LoraFactors, synthetic_adapter
from cupylora.adapters.loading import load_adapter
from cupylora.adapters.packing import unpack_a
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import Arena, SlotTable, adapter_bytes, block_bytes
from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError
from cupylora.shapes import PRESETS, LoraLimits, ModelShape
from cupylora.worklists import PACKED, ROW_MAJOR, SLOT_ENTRY, SLOT_ENTRY_BYTES

BF16 = np.dtype(ml_dtypes.bfloat16)
TINY = PRESETS["tiny-moe"]
TOY = files.model()


def table(
    model: ModelShape = TINY,
    dtype: Any = np.float32,
    capacity: int = 4 << 20,
    max_loras: int = 3,
    max_rank: int = 64,
    a_layout: int = PACKED,
) -> SlotTable:
    """A table whose arena is full of NaN (0xFF bytes) at first."""
    arena = Arena(capacity)
    arena.buffer[:] = 0xFF
    return SlotTable(model, LoraLimits(max_loras, max_rank), dtype, arena=arena, a_layout=a_layout)


def entry(slots: SlotTable, layer: int, module: str, slot: int) -> np.void:
    view = slots.entries_of(layer, [module])
    assert view.shape == (1, slots.limits.max_loras, SLOT_ENTRY_BYTES)
    return view.view(SLOT_ENTRY)[0, slot, 0]


def fetch(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = (ctypes.c_uint8 * size).from_address(int(address))
    return np.frombuffer(bytes(raw), dtype=dtype).reshape(shape)


def stored(slots: SlotTable, layer: int, module: str, slot: int) -> LoraFactors | None:
    """Factors as a kernel would find them: expert by expert, from the entry's addresses."""
    record = entry(slots, layer, module, slot)
    if not record["rank"]:
        assert not record["a_ptr"]
        assert not record["b_ptr"]
        return None
    shape = slots.model.modules[slots.model.module_index(module)]
    rank, dtype = int(record["rank"]), slots.dtype
    assert record["a_layout"] == slots.a_layout
    experts = range(shape.experts)
    a_at = [int(record["a_ptr"]) + e * int(record["a_expert_stride"]) for e in experts]
    b_at = [int(record["b_ptr"]) + e * int(record["b_expert_stride"]) for e in experts]
    a = [fetch(at, (rank, shape.in_features), dtype) for at in a_at]
    if slots.a_layout == PACKED:
        a = [unpack_a(block) for block in a]
    b = [fetch(at, (shape.out_features, rank), dtype) for at in b_at]
    return LoraFactors(np.stack(a), np.stack(b), float(record["scale"]))


def assert_serves(slots: SlotTable, slot: int, adapter: Adapter | None) -> None:
    """Every entry of ``slot`` leads to ``adapter``'s factors; None: all entries are zero."""
    for layer in range(slots.model.layers):
        for module in slots.model.modules:
            found = stored(slots, layer, module.name, slot)
            expected = adapter.factors.get((layer, module.name)) if adapter else None
            if expected is None:
                assert found is None
                continue
            assert found is not None
            for got, want in ((found.a, expected.a), (found.b, expected.b)):
                want = np.broadcast_to(want.astype(slots.dtype), got.shape)
                np.testing.assert_array_equal(got, want)
            assert found.scale == np.float32(expected.scale)
    if adapter is None:
        assert not slots.entries[:, slot].any()


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=str)
@pytest.mark.parametrize("a_layout", [PACKED, ROW_MAJOR])
def test_every_fixture_reaches_its_slot(name: str, dtype: Any, a_layout: int) -> None:
    """Exactly, since the values are exact in bfloat16 (in float16 but for the rounding of B)."""
    fixture = load_fixture(name)
    slots = table(fixture.model.shape, dtype, a_layout=a_layout)
    adapter = load_adapter(fixture.path, slots, 1)
    assert_serves(slots, 1, adapter)
    assert_serves(slots, 0, None)
    info = slots.slots[1]
    assert info is not None
    assert (info.name, info.max_rank) == (name, adapter.max_rank)
    assert (
        info.arena_bytes == slots.arena.used_bytes == adapter_bytes(adapter, slots.dtype.itemsize)
    )


def test_no_stale_byte_in_a_block() -> None:
    """Case 12: the arena is NaN; whatever an adapter's blocks hold, padding included, is not."""
    slots = table(TINY, BF16)
    slots.load(0, synthetic_adapter(TINY, 5, 1, BF16))
    slots.load(1, synthetic_adapter(TINY, 8, 2, BF16))
    slots.evict(0)
    slots.load(0, synthetic_adapter(TINY, 3, 3, BF16, modules=["down_proj"]))
    slots.evict(1)
    for layer in range(TINY.layers):
        record = entry(slots, layer, "down_proj", 0)
        for key, features in (("a_ptr", 48), ("b_ptr", 64)):
            size = block_bytes(8 * 3 * features * 2)
            held = fetch(record[key], (size // 2,), BF16)
            assert np.isfinite(held.astype(np.float32)).all()


def test_blocks_are_zero_beyond_the_factor() -> None:
    arena = Arena(4096)
    arena.buffer[:] = 0xFF
    offset = arena.alloc(300)
    arena.write(offset, np.full(300, 7, np.uint8), 512)
    assert (arena.buffer[offset : offset + 300] == 7).all()
    assert not arena.buffer[offset + 300 : offset + 512].any()
    assert (arena.buffer[offset + 512 :] == 0xFF).all()


def test_fewer_modules_leave_no_old_entries() -> None:
    """Case 24: q, k, v, o, then q only."""
    slots = table()
    slots.load(2, synthetic_adapter(TINY, 4, modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    only_q = synthetic_adapter(TINY, 2, 1, modules=["q_proj"])
    slots.load(2, only_q)
    assert_serves(slots, 2, only_q)
    slots.evict(2)
    assert_serves(slots, 2, None)
    assert slots.arena.used_bytes == 0


def test_missing_experts_of_a_reused_slot_are_zero(tmp_path: Path) -> None:
    """Case 7: the former tenant had expert 5."""
    toy = files.model(experts=8)
    experts = files.expert_factors(toy.moe, 4)
    slots = table(toy)
    load_adapter(write(tmp_path / "all", files.per_expert(experts, 0)), slots, 0)
    slots.evict(0)
    load_adapter(write(tmp_path / "two", files.per_expert(experts, 0, only=(0, 3))), slots, 0)
    for module in experts:
        found = stored(slots, 0, module, 0)
        assert found is not None
        assert not found.a[5].any()
        assert not found.b[5].any()
        np.testing.assert_array_equal(found.b[3], experts[module].b[3])


def test_equal_factors_in_every_form_give_equal_device_bytes(tmp_path: Path) -> None:
    """Case 6."""
    experts = files.expert_factors(TOY.moe, 4)
    forms = {
        "per_expert": files.per_expert(experts, 1),
        "3d": files.three_dimensional(experts, 1),
        "stacked": files.stacked(TOY.moe, experts, 1),
        "swapped": files.stacked(TOY.moe, experts, 1, swapped=True),
        "lists": files.in_lists(TOY.moe, experts, 1, only=(0, 1, 2, 3)),
        "kohya": files.kohya_named(files.per_expert(experts, 1)),
        "by_expert": files.packed_by_expert(files.stacked(TOY.moe, experts, 1), 4),
    }
    marks = {"by_expert": {"lora_B_layout": "grouped_by_expert"}}
    arenas, entries = [], []
    for name, tensors in forms.items():
        slots = table(TOY, BF16)
        config = {"peft_version": "0.21.2", **marks.get(name, {})}
        load_adapter(write(tmp_path / name, tensors, **config), slots, 0)
        records = slots.entries.copy().view(SLOT_ENTRY)
        for key in ("a_ptr", "b_ptr"):
            records[key][records[key] != 0] -= np.uint64(slots.arena.address)
        arenas.append(slots.arena.buffer)
        entries.append(records.view(np.uint8))
    for arena, records in zip(arenas[1:], entries[1:], strict=True):
        np.testing.assert_array_equal(arena, arenas[0])
        np.testing.assert_array_equal(records, entries[0])


def test_shared_factors_are_stored_once() -> None:
    shared = synthetic_adapter(TINY, 8, shared_a=True)
    apart = synthetic_adapter(TINY, 8)
    slots = table()
    slots.load(0, shared)
    assert_serves(slots, 0, shared)
    gate, up = entry(slots, 1, "gate_proj", 0), entry(slots, 1, "up_proj", 0)
    assert gate["a_ptr"] == up["a_ptr"]
    assert gate["b_ptr"] != up["b_ptr"]
    saved = adapter_bytes(apart, 4) - slots.arena.used_bytes
    assert saved == TINY.layers * block_bytes(8 * 8 * 64 * 4)


def test_factor_shared_over_experts_has_stride_zero() -> None:
    """Case 8."""
    rng = np.random.default_rng(0)
    a, b = files.random(rng, 1, 4, 64), files.random(rng, 8, 48, 4)
    adapter = Adapter("one-a", {(0, "up_proj"): LoraFactors(a, b, 0.5)})
    slots = table()
    slots.load(0, adapter)
    record = entry(slots, 0, "up_proj", 0)
    assert (record["a_expert_stride"], record["b_expert_stride"]) == (0, 48 * 4 * 4)
    assert_serves(slots, 0, adapter)


def test_a_failed_load_changes_nothing(tmp_path: Path) -> None:
    """Cases 9, 10 and 11: the old version keeps serving."""
    old = synthetic_adapter(TINY, 4, 1)
    slots = table(capacity=450_000, max_rank=16)
    slots.load(0, old)
    before, bytes_used, info = slots.entries.copy(), slots.arena.used_bytes, slots.slots
    folder = tmp_path / "broken"
    shutil.copytree(DATA / "demo" / DEMO[0], folder)
    weights = folder / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    weights.write_bytes(content[:1000])
    with pytest.raises(AdapterFormatError, match="header should be"):
        load_adapter(folder, slots, 0)
    content[-2:] = b"\x80\x7f"
    weights.write_bytes(content)
    with pytest.raises(AdapterFormatError, match="not finite"):
        load_adapter(folder, slots, 0)
    with pytest.raises(CapacityError, match="rank 17 exceeds max_rank 16"):
        slots.load(0, synthetic_adapter(TINY, 17))
    with pytest.raises(CapacityError, match=r"bytes needed, \d+ free"):
        slots.load(0, synthetic_adapter(TINY, 16))
    with pytest.raises(AdapterFormatError, match="layers"):
        slots.load(0, synthetic_adapter(TINY.with_layers(3), 4))
    with pytest.raises(AdapterFormatError, match="has shape"):
        slots.load(0, Adapter("x", {(0, "q_proj"): LoraFactors(np.ones((1, 2, 9)), old_b(), 1)}))
    with pytest.raises(ArgumentError, match="slot is 3"):
        slots.load(3, old)
    np.testing.assert_array_equal(slots.entries, before)
    assert (slots.arena.used_bytes, slots.slots) == (bytes_used, info)
    assert_serves(slots, 0, old)


NO_SLOTS = [True, False, 1.5, 0.0, None, "0", np.array([0]), np.bool_(True), -1, 3]


@pytest.mark.parametrize("slot", NO_SLOTS, ids=repr)
def test_what_is_no_slot_changes_nothing(slot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = table()
    old = synthetic_adapter(TINY, 4, 1)
    slots.load(0, old)
    before, used, info = slots.entries.copy(), slots.arena.used_bytes, slots.slots
    monkeypatch.setattr("cupylora.adapters.loading.read_adapter", None)
    for call in (
        lambda: slots.load(slot, synthetic_adapter(TINY, 2)),
        lambda: slots.evict(slot),
        lambda: load_adapter("anywhere", slots, slot),
    ):
        with pytest.raises(ArgumentError, match="slot is"):
            call()
    np.testing.assert_array_equal(slots.entries, before)
    assert (slots.arena.used_bytes, slots.slots) == (used, info)
    slots.load(np.int64(2), old)
    assert_serves(slots, 2, old)


def dense_factors() -> LoraFactors:
    return LoraFactors(np.ones((1, 2, 64), np.float32), np.ones((1, 64, 2), np.float32), 0.5)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (5, "adapter is a int; an Adapter is needed"),
        (None, "adapter is a NoneType"),
        (Adapter("odd", {("0", "q_proj"): dense_factors()}), "is no key"),  # type: ignore[dict-item]
        (Adapter("odd", {(0.0, "q_proj"): dense_factors()}), "is no key"),  # type: ignore[dict-item]
        (Adapter("odd", {(True, "q_proj"): dense_factors()}), "is no key"),
        (Adapter("odd", {(-1, "q_proj"): dense_factors()}), "2 layers"),
        (Adapter("odd", {(2, "q_proj"): dense_factors()}), "2 layers"),
        (Adapter("odd", {(0, 7): dense_factors()}), "is no key"),  # type: ignore[dict-item]
        (Adapter("odd", {"q_proj": dense_factors()}), "is no key"),  # type: ignore[dict-item]
        (Adapter("odd", {(0, "q_proj"): (1, 2)}), "LoraFactors"),  # type: ignore[dict-item]
    ],
)
def test_odd_adapters_change_nothing(adapter: Any, message: str) -> None:
    slots = table()
    slots.load(0, synthetic_adapter(TINY, 4, 1))
    before, used, info = slots.entries.copy(), slots.arena.used_bytes, slots.slots
    with pytest.raises((ArgumentError, AdapterFormatError), match=message):
        slots.load(0, adapter)
    np.testing.assert_array_equal(slots.entries, before)
    assert (slots.arena.used_bytes, slots.slots) == (used, info)


@pytest.mark.parametrize("step", ["take", "write", "_put", "_check_layout", "_switch"])
@pytest.mark.parametrize("at", [0, 5])
def test_a_load_that_fails_at_any_step_changes_nothing(
    step: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MemoryError at the first call of a step, or at a later one; then the same load succeeds."""
    slots = table()
    old, new = synthetic_adapter(TINY, 4, 1), synthetic_adapter(TINY, 6, 2)
    slots.load(0, old)
    before, used, info = slots.entries.copy(), slots.arena.used_bytes, slots.slots
    owner = next(o for o in (slots.arena, slots, arena_module) if hasattr(o, step))
    once = owner is slots or step == "take"
    calls = iter(range(100))
    real = getattr(owner, step)

    def fails(*arguments: Any) -> Any:
        if next(calls) == (0 if once else at):
            raise MemoryError(step)
        return real(*arguments)

    monkeypatch.setattr(owner, step, fails)
    with pytest.raises(MemoryError, match=step):
        slots.load(0, new)
    np.testing.assert_array_equal(slots.entries, before)
    assert (slots.arena.used_bytes, slots.slots) == (used, info)
    assert_serves(slots, 0, old)
    monkeypatch.undo()
    slots.load(0, new)
    assert_serves(slots, 0, new)
    assert slots.arena.used_bytes == adapter_bytes(new, 4)


def old_b() -> np.ndarray:
    return np.ones((1, 64, 2), np.float32)


def test_overflow_of_the_tables_type_is_refused() -> None:
    """float32 values beyond float16: naming the factor, with nothing left allocated."""
    slots = table(dtype=np.float16)
    b = np.full((1, 64, 2), 1e5, np.float32)
    adapter = Adapter("big", {(1, "q_proj"): LoraFactors(np.ones((1, 2, 64), np.float32), b, 1)})
    with pytest.raises(AdapterFormatError, match=r"layer 1, q_proj: B .* not finite as float16"):
        slots.load(0, adapter)
    assert slots.arena.used_bytes == 0
    assert not slots.entries.any()


def test_generations_never_repeat() -> None:
    slots = table()
    seen = []
    for slot in (0, 1, 0):
        slots.load(slot, synthetic_adapter(TINY, 2, slot))
        seen.append(int(entry(slots, 0, "q_proj", slot)["generation"]))
        slots.evict(slot)
    assert len(set(seen)) == 3
    assert slots.slots == (None, None, None)


def test_entries_of_views_neighbours() -> None:
    slots = table()
    slots.load(0, synthetic_adapter(TINY, 2))
    view = slots.entries_of(1, ["q_proj", "k_proj", "v_proj"])
    assert np.shares_memory(view, slots.entries)
    assert view.flags.c_contiguous
    first = slots.row(1, 0)
    np.testing.assert_array_equal(view, slots.entries[first : first + 3])
    for names in (["q_proj", "v_proj"], ["k_proj", "q_proj"], []):
        with pytest.raises(ArgumentError, match="neighbours"):
            slots.entries_of(0, names)
    with pytest.raises(ArgumentError, match="layer 2"):
        slots.entries_of(2, ["q_proj"])
    with pytest.raises(ArgumentError, match="no module"):
        slots.entries_of(0, ["qkv_proj"])


def test_tables_of_other_types_are_refused() -> None:
    with pytest.raises(ArgumentError, match="float64"):
        table(dtype=np.float64)
    with pytest.raises(ArgumentError, match="a_layout is 2"):
        table(a_layout=2)
    for dtype in ("junk", None, 5):
        with pytest.raises(ArgumentError, match="dtype is"):
            table(dtype=dtype)
    for change, message in (
        ({"model": "tiny-moe"}, "model is a str"),
        ({"limits": 4}, "limits is a int"),
        ({"arena": None}, "an Arena is needed"),
        ({"xp": files}, "of different array modules"),
    ):
        options: dict[str, Any] = {"model": TINY, "limits": LoraLimits(), "arena": Arena(256)}
        with pytest.raises(ArgumentError, match=message):
            SlotTable(dtype=np.float32, **(options | change))
    for row in ((0.0, 0), (True, 0), (0, 1.0), (0, True), (-1, 0), (0, -1), (0, 7)):
        with pytest.raises(ArgumentError, match=r"layer|module"):
            table().row(*row)


# Arena


@pytest.mark.parametrize("size", [1, 255, 256, 257, 4096, 4097, 100_000, 1 << 30])
def test_size_classes(size: int) -> None:
    got = block_bytes(size)
    assert got >= size
    assert got % 256 == 0
    assert got - size < max(256, size / 16 + 256)
    assert block_bytes(got) == got


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 9000), st.integers(-8, -1)), max_size=60))
def test_arena_blocks_never_overlap(steps: list[int]) -> None:
    """Positive: allocate so many bytes; negative: free one of the blocks."""
    arena = Arena(40_000)
    live: dict[int, int] = {}
    for step in steps:
        if step > 0:
            try:
                offset = arena.alloc(step)
            except CapacityError:
                assert arena.free_bytes < block_bytes(step) + sum(live.values())
                continue
            assert offset % 256 == 0
            assert all(offset + block_bytes(step) <= o or o + s <= offset for o, s in live.items())
            live[offset] = block_bytes(step)
        elif live:
            offset = sorted(live)[step % len(live)]
            arena.free(offset)
            del live[offset]
        assert arena.used_bytes == sum(live.values())
        assert arena.free_bytes == arena.capacity - arena.used_bytes
    for offset in live:
        arena.free(offset)
    assert arena.alloc(arena.capacity * 15 // 16) == 0, "freed neighbours merged"


def test_arena_errors() -> None:
    arena = Arena(1024)
    assert arena.address % 256 == 0
    arena.alloc(700)
    with pytest.raises(CapacityError, match="512 bytes needed, 256 free"):
        arena.alloc(257)
    with pytest.raises(ArgumentError, match="offset 256"):
        arena.free(256)
    with pytest.raises(ArgumentError, match="size is 0"):
        arena.alloc(0)
    for capacity in (10, "x", 1e6, True, None):
        with pytest.raises(ArgumentError, match="capacity_bytes is"):
            Arena(capacity)  # type: ignore[arg-type]
    for capacity in (1 << 50, 1 << 63, 1 << 80):
        with pytest.raises(CapacityError, match=f"an arena of {capacity + 256} bytes cannot"):
            Arena(capacity)
    with pytest.raises(ArgumentError, match=r"size is 1\.5"):
        arena.alloc(1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="data has 769 bytes; the block at 0 has 768"):
        arena.write(0, np.ones(769, np.uint8), 768)


# Adapters in memory


def test_synthetic_adapter() -> None:
    adapter = synthetic_adapter(TINY, 12, 7, BF16)
    assert adapter.ranks == (12,)
    assert adapter.factors.keys() == {(i, m.name) for i in range(2) for m in TINY.modules}
    assert len({f.a.tobytes() for f in adapter.factors.values()}) == len(adapter.factors)
    gate = adapter.factors[0, "gate_proj"]
    assert gate.scale != 1
    assert len({expert.tobytes() for expert in gate.a}) == 8
    again, other = synthetic_adapter(TINY, 12, 7, BF16), synthetic_adapter(TINY, 12, 8, BF16)
    np.testing.assert_array_equal(again.factors[1, "o_proj"].b, adapter.factors[1, "o_proj"].b)
    assert not np.array_equal(other.factors[1, "o_proj"].b, adapter.factors[1, "o_proj"].b)
    x = np.random.default_rng(0).standard_normal((500, 64))
    a, b = (values[2].astype(np.float64) for values in (gate.a, gate.b))
    assert 0.3 < (gate.scale * x @ a.T @ b.T).std() < 0.6
    with pytest.raises(ArgumentError, match="rank is 0"):
        synthetic_adapter(TINY, 0)


def test_with_layers_cuts() -> None:
    adapter = read_adapter(DATA / "demo" / DEMO[0], TINY)
    cut = adapter.with_layers(1)
    assert {layer for layer, _ in cut.factors} == {0}
    cut.check(TINY.with_layers(1), LoraLimits())


@pytest.mark.parametrize(
    ("a", "b", "scale"),
    [
        (np.ones((1, 2, 3)), np.ones((1, 4, 3)), 1.0),
        (np.ones((2, 3)), np.ones((1, 4, 2)), 1.0),
        (np.ones((1, 0, 3)), np.ones((1, 4, 0)), 1.0),
        (np.ones((1, 2, 3)), np.ones((1, 4, 2)), np.inf),
        (np.ones((1, 2, 3)), np.ones((1, 4, 2)), 1e39),
        (np.ones((1, 2, 3)), np.ones((1, 4, 2)), 1e-46),
        (np.ones((1, 2, 3)), np.ones((1, 4, 2)), 10**400),
    ],
)
def test_factors_that_do_not_belong_together(a: np.ndarray, b: np.ndarray, scale: float) -> None:
    with pytest.raises(ArgumentError):
        LoraFactors(a, b, scale)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": [[[1.0]]]}, "a is a list"),
        ({"b": np.ones((1, 4, 2), np.complex64)}, "b has dtype complex64"),
        ({"a": np.ones((1, 2, 3), np.int32)}, "a has dtype int32"),
        ({"scale": "1"}, "scale is '1'"),
        ({"scale": None}, "scale is None"),
        ({"scale": True}, "scale is True"),
        ({"scale": 1j}, "scale is 1j"),
    ],
)
def test_what_are_no_factors(change: dict[str, Any], words: str) -> None:
    good = {"a": np.ones((1, 2, 3), BF16), "b": np.ones((1, 4, 2), np.float32), "scale": 1.5}
    assert LoraFactors(**good).rank == 2  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=words):
        LoraFactors(**{**good, **change})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [np.float16(1), np.float32(1), np.int8(1), 1, 1.0])
def test_scales_of_other_types(scale: Any) -> None:
    factors = LoraFactors(np.ones((1, 2, 3)), np.ones((1, 4, 2)), scale)
    assert factors.scale == 1
    assert type(factors.scale) is float


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("a", None), "Adapter.factors is a NoneType"),
        (("a", []), "Adapter.factors is a list"),
        ((None, {}), "Adapter.name is None"),
        (("a", {}, 3), "Adapter.source is 3"),
    ],
)
def test_fields_of_adapters(fields: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Adapter(*fields)


def test_what_is_no_synthetic_adapter() -> None:
    for rank in (1.5, True, "4", None):
        with pytest.raises(ArgumentError, match="rank is"):
            synthetic_adapter(TINY, rank)  # type: ignore[arg-type]
    for seed in (-1, 0.5, None):
        with pytest.raises(ArgumentError, match="seed is"):
            synthetic_adapter(TINY, 4, seed)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dtype is"):
        synthetic_adapter(TINY, 4, dtype=np.int32)
    for layers in (0, 0.5, True):
        with pytest.raises(ArgumentError, match="layers is"):
            synthetic_adapter(TINY, 4).with_layers(layers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key", [(0.5, "q_proj"), (True, "q_proj"), (0, 1), "q_proj", (0,)], ids=str
)
def test_keys_of_adapters(key: Any) -> None:
    adapter = Adapter("odd", {key: synthetic_adapter(TINY, 4).factors[0, "q_proj"]})
    with pytest.raises(ArgumentError, match=r"odd: .* is no key"):
        adapter.check(TINY, LoraLimits())
    with pytest.raises(ArgumentError, match=r"odd: .* is no key"):
        adapter.with_layers(1)


def test_a_small_synthetic_adapter_takes_little_memory() -> None:
    small = synthetic_adapter(TINY, 1, modules=["q_proj", "k_proj"])
    held = {
        id(base): base.nbytes
        for factors in small.factors.values()
        for array in (factors.a, factors.b)
        for base in [array if array.base is None else array.base]
    }
    assert sum(held.values()) == 4 * small.parameters
    large = synthetic_adapter(PRESETS["tiny-moe"], 1024)
    assert large.parameters > 4 << 20
    gate = large.factors[1, "gate_proj"]
    assert len({expert.tobytes() for expert in gate.a}) == 8
    assert gate.b.base is large.factors[0, "q_proj"].b.base


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=str)
def test_device_arena_holds_the_same_bytes(dtype: Any) -> None:
    """CuPy against NumPy: same offsets, same blocks, same entries but for the arenas' addresses."""
    import cupy

    host = table(TINY, dtype)
    arena = Arena(4 << 20, cupy)
    arena.buffer[:] = 0xFF
    device = SlotTable(TINY, host.limits, dtype, xp=cupy, arena=arena)
    for slots in (host, device):
        for slot, name in enumerate(DEMO[:3]):
            load_adapter(DATA / "demo" / name, slots, slot)
        slots.evict(1)
        slots.load(1, synthetic_adapter(TINY, 5, 1, modules=["o_proj"]))
    np.testing.assert_array_equal(arena.buffer.get(), host.arena.buffer)
    found = device.entries.get().view(SLOT_ENTRY)
    for key in ("a_ptr", "b_ptr"):
        moved = np.uint64(device.arena.address - host.arena.address & (1 << 64) - 1)
        found[key][found[key] != 0] -= moved
    np.testing.assert_array_equal(found.view(np.uint8), host.entries)
    view = device.entries_of(0, ["gate_proj", "up_proj"])
    assert view.flags.c_contiguous
