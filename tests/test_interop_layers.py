"""Layers and the runtime on other libraries' host arrays: the same bits, in place, given back."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from backend_util import random_adapter
from dlpack_producer import Producer
from runtime_util import DTYPE, MAX_RANK, MODEL, Harness, Inputs
from test_layers import QKV, SILU, adoptable
from test_store import arrays_of

from cupylora.adapters.device_factors import borrow_factors
from cupylora.backend import open_backend
from cupylora.checks import INT32
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError, GraphError
from cupylora.graphs.buckets import count_active_loras
from cupylora.layers.dense import DenseLora, dense_needs
from cupylora.layers.moe import MoeLora, MoeWeights
from cupylora.layers.plan import BatchPlan
from cupylora.layers.workspace import Workspace
from cupylora.ops import requests_to_tokens
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits
from cupylora.worklists import SLOT_ENTRY_BYTES

SLOTS = [0, -1, 1, 0, 2]


class Foreign:
    """Wraps arrays as another library's; ``all_back`` says whether every capsule was given back."""

    def __init__(self) -> None:
        self.made: list[Producer] = []

    def __call__(self, array: np.ndarray, **options: Any) -> Producer:
        self.made.append(Producer(array, **options))
        return self.made[-1]

    def all_back(self) -> bool:
        gc.collect()
        exported = [len(producer._kept) for producer in self.made]
        return all(exported) and exported == [producer.deleted for producer in self.made]


@pytest.fixture
def foreign() -> Foreign:
    return Foreign()


@pytest.fixture
def harness() -> Harness:
    made = Harness(open_backend("numpy"))
    for seed in range(3):
        made.runtime.load(f"a{seed}", random_adapter(MODEL, 8, seed))
    return made


def _inputs() -> Inputs:
    return Inputs.random(len(SLOTS), np.array(SLOTS, np.int32), seed=3)


def test_a_dense_layer_adds_to_foreign_outputs_in_place(harness: Harness, foreign: Foreign) -> None:
    inputs, plan, dense = _inputs(), harness.dense_plan, harness.dense
    plan.update(inputs.slots)
    expected = inputs.y.copy()
    dense.add(inputs.x, expected, plan)

    fused = inputs.y.copy()
    parts = [np.ascontiguousarray(part) for part in _split(inputs.y)]
    plan.update(foreign(inputs.slots))
    dense.add(foreign(inputs.x), foreign(fused), plan)
    dense.add(foreign(inputs.x), [foreign(part) for part in parts], plan)
    assert fused.tobytes() == expected.tobytes()
    assert np.concatenate(parts, axis=1).tobytes() == expected.tobytes()
    assert foreign.all_back()


def _split(y: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([module.out_features for module in QKV])
    return np.split(y, ends[:-1], axis=1)


def test_a_moe_block_takes_and_fills_foreign_arrays(harness: Harness, foreign: Foreign) -> None:
    """Whole and step by step, base weights included."""
    inputs, block, plan = _inputs(), harness.block, harness.plan
    lists = (inputs.x, inputs.ids, inputs.weights, inputs.slots)
    expected = block.forward(*lists, harness.base, plan).copy()
    base = MoeWeights(foreign(harness.base.gate_up), foreign(harness.base.down))
    room = np.empty_like(expected)
    target = foreign(room)
    assert block.forward(*map(foreign, lists), base, plan, out=target) is target
    assert room.tobytes() == expected.tobytes()
    room[:] = 0
    again = block.apply(foreign(inputs.x), foreign(inputs.weights), base, plan, out=target)
    assert again is target
    assert room.tobytes() == expected.tobytes()
    assert foreign.all_back()


def _steps(
    block: MoeLora, plan: BatchPlan, wrap: Callable[[np.ndarray], Any], fused: bool
) -> list[np.ndarray]:
    """Both halves of a block on given base outputs, results in arrays given as ``out``."""
    rng = np.random.default_rng(5)
    rows, kind = plan.num_rows, resolve_dtype(DTYPE)
    first = rng.standard_normal((rows, SILU.first_width)).astype(kind)
    down = rng.standard_normal((rows, SILU.hidden)).astype(kind)
    weights = np.full((plan.num_tokens, SILU.top_k), 0.5, np.float32)
    x, residual = (rng.standard_normal((plan.num_tokens, SILU.hidden)).astype(kind) for _ in "ab")
    hidden, out = np.empty((rows, SILU.intermediate), kind), np.empty_like(x)
    hidden_out, summed = wrap(hidden), wrap(out)
    if fused:
        assert block.activate_with_delta(wrap(x), wrap(first), plan, out=hidden_out) is hidden_out
        given = (wrap(hidden), wrap(down), wrap(weights), plan)
        done = block.finalize_with_delta(*given, residual=wrap(residual), out=summed)
    else:
        block.add_first(wrap(x), wrap(first), plan)
        assert block.activate(wrap(first), plan, out=hidden_out) is hidden_out
        block.add_down(wrap(hidden), wrap(down), plan)
        done = block.finalize(wrap(down), wrap(weights), plan, residual=wrap(residual), out=summed)
    assert done is summed
    return [first, down, hidden, out]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("active", [None, 0])
def test_steps_of_a_block(
    fused: bool, active: int | None, harness: Harness, foreign: Foreign
) -> None:
    inputs = _inputs()
    slots = inputs.slots if active is None else np.full_like(inputs.slots, -1)
    harness.plan.update(slots, inputs.ids, active=active)
    expected = _steps(harness.block, harness.plan, lambda array: array, fused)
    harness.plan.update(foreign(slots), foreign(inputs.ids), active=active)
    got = _steps(harness.block, harness.plan, foreign, fused)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]
    assert foreign.all_back()


def test_arguments_are_named_as_the_caller_knows_them(harness: Harness, foreign: Foreign) -> None:
    inputs, block, plan = _inputs(), harness.block, harness.plan
    harness.dense_plan.update(inputs.slots)
    parts = [np.ascontiguousarray(part) for part in _split(inputs.y)]
    fixed = [foreign(parts[0]), foreign(parts[1], flags=1), foreign(parts[2])]
    before = [part.tobytes() for part in parts]
    with pytest.raises(ArgumentError, match=r"y\[1\] is exported as read-only"):
        harness.dense.add(inputs.x, fixed, harness.dense_plan)
    base = MoeWeights(harness.base.gate_up, foreign(harness.base.down, device=(2, 0)))
    lists = (inputs.x, inputs.ids, inputs.weights, inputs.slots)
    with pytest.raises(ArgumentError, match=r"base\.down is on CUDA device 0; copy it to the host"):
        block.forward(*lists, base, plan)
    with pytest.raises(ArgumentError, match=r"topk_weights has dtype bfloat16"):
        block.forward(inputs.x, inputs.ids, foreign(inputs.x), inputs.slots, harness.base, plan)
    with pytest.raises(ArgumentError, match="y is a dict; an array, or a list or tuple"):
        harness.dense.add(inputs.x, {}, harness.dense_plan)  # type: ignore[arg-type]
    assert [part.tobytes() for part in parts] == before


def test_what_a_layer_keeps_it_keeps_alive(foreign: Foreign) -> None:
    here = open_backend("numpy")
    entries = foreign(np.zeros((len(QKV), 4, SLOT_ENTRY_BYTES), np.uint8))
    sizes: dict[str, Any] = {"max_rank": 8, "dtype": resolve_dtype(DTYPE)}
    room = Workspace(here, [dense_needs(here, QKV, max_tokens=4, **sizes)])
    layer: DenseLora | None = DenseLora(QKV, entries, room, **sizes)
    assert entries.deleted == 0
    layer = None
    assert foreign.all_back()

    plan = BatchPlan(here, max_tokens=6, max_loras=2, experts=2, any_order=True)
    routing, slots = adoptable([0, 0, 1, 1])
    theirs = dataclasses.replace(routing, row_to_pair=foreign(routing.row_to_pair))
    plan.adopt(theirs, foreign(slots))
    assert plan.routing.row_to_pair.ctypes.data == routing.row_to_pair.ctypes.data
    assert foreign.made[1].deleted == 0, "the plan holds the order"
    assert foreign.made[2].deleted == 1, "slots were read and are done with"
    plan.update(slots, np.zeros((4, 1), np.int32))
    assert foreign.all_back()
    del layer


# --- runtime -------------------------------------------------------------------------------------


def test_steps_take_foreign_slots(harness: Harness, foreign: Foreign) -> None:
    inputs, runtime = _inputs(), harness.runtime
    expected = harness.run(inputs)
    harness.write(inputs)
    runtime.step(foreign(inputs.slots), as_of=foreign(np.array(runtime.generations)))
    got = harness.read("y", len(SLOTS)), harness.read("out", len(SLOTS))
    assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]
    lengths = np.array([2, 3], np.int32)
    made = runtime.step_requests(foreign(np.array([0, -1], np.int32)), foreign(lengths))
    assert made.num_tokens == 5
    assert runtime.step_names(["a0", None], foreign(lengths)).groups == 2
    with pytest.raises(ArgumentError, match="lengths has dtype int64"):
        runtime.step_requests(foreign(inputs.slots[:2]), foreign(lengths.astype(np.int64)))
    assert count_active_loras(foreign(inputs.slots)) == 4
    assert foreign.all_back()


def test_requests_become_tokens_of_foreign_arrays(foreign: Foreign) -> None:
    kinds, lengths, slots = (foreign(np.array(v, INT32)) for v in ([0, 1], [3, 0], [2, -1]))
    out = foreign(np.zeros(4, INT32))
    assert requests_to_tokens(kinds, lengths, slots, 4, 3, out=out) is out
    assert out.array.tolist() == [2, 2, 2, -1]
    assert foreign.all_back()


def _runtime(**options: Any) -> LoraRuntime:
    limits = LoraLimits(4, MAX_RANK)
    return LoraRuntime(
        MODEL, limits, dtype=DTYPE, max_tokens=8, arena_bytes=1 << 20, backend="numpy", **options
    )


def test_a_hosts_own_array_may_be_a_buffer(foreign: Foreign) -> None:
    runtime = _runtime()
    x = np.full((8, 4), 7, np.float32)
    ids = np.zeros((2, 8, 3), np.int32)
    given = foreign(x)
    assert runtime.add_buffer("x", (4,), np.float32, array=given) is given
    runtime.add_buffer("ids", (3,), np.int32, layers=2, pad=-1, array=foreign(ids))
    seen: list[Sequence[int]] = []

    def step(made: Any) -> None:
        seen.append([made["x"].ctypes.data, made["ids"].shape[1]])
        made["x"][:] += 1

    runtime.set_step(step)
    runtime.capture()
    x[:] = 7
    runtime.step(np.array([-1, -1, -1], np.int32))
    assert seen[-1] == [x.ctypes.data, 4], "the bucket of three tokens"
    assert x[:, 0].tolist() == [8, 8, 8, 8, 7, 7, 7, 7]
    assert ids[0, :, 0].tolist()[3] == -1, "padding is written there too"
    assert given.deleted == 0, "steps use it as long as the runtime is there"
    runtime.close()
    del runtime
    assert foreign.all_back()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((8, 5), np.float32), r"array has shape \(8, 5\); \[8, 4\] is needed"),
        (np.zeros((8, 4), np.int32), "array has dtype int32; float32 is needed"),
        (np.zeros((4, 8), np.float32).T, "array of shape .* is not C-contiguous"),
        (Producer(np.zeros((8, 4), np.float32), flags=1), "array is exported as read-only"),
        (Producer(np.zeros((8, 4), np.float32), device=(2, 0)), "array is on CUDA device 0"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(array: Any, message: str) -> None:
    runtime = _runtime()
    with pytest.raises(ArgumentError, match=message):
        runtime.add_buffer("x", (4,), np.float32, array=array)
    runtime.add_buffer("x", (4,), np.float32)


def test_foreign_factors_serve_like_ours(harness: Harness, foreign: Foreign) -> None:
    given = random_adapter(MODEL, 8, 7, shared=("gate_proj",))
    native = arrays_of(harness.backend, given)
    wrapped: dict[int, Any] = {}

    def once(array: np.ndarray) -> Any:
        if id(array) not in wrapped:
            wrapped[id(array)] = foreign(array)
        return wrapped[id(array)]

    def run() -> list[bytes]:
        slots = harness.runtime.slots_of(["a0", None, "a1", "a0", "a2"])
        return [a.tobytes() for a in harness.run(dataclasses.replace(_inputs(), slots=slots))]

    theirs = {
        key: dataclasses.replace(value, a=once(value.a), b=once(value.b))
        for key, value in native.items()
    }
    room, bits = [], []
    for factors in (native, theirs):
        slot = harness.runtime.load_arrays("a0", factors)
        info = harness.runtime.table.slots[slot]
        assert info is not None
        room.append(info.arena_bytes)
        bits.append(run())
    assert bits[0] == bits[1]
    assert room[0] == room[1], "arrays that modules share are one copy"
    assert foreign.all_back()
    key = next(iter(theirs))
    broken = dict(theirs) | {
        key: dataclasses.replace(theirs[key], b=foreign(native[key].b, device=(2, 0)))
    }
    with pytest.raises(ArgumentError, match="b is on CUDA device 0; copy it to the host"):
        harness.runtime.load_arrays("a0", broken)


def test_factors_that_are_made_anew_at_every_look_are_not_mixed_up(harness: Harness) -> None:
    """What told one array from another may be gone, and its place taken, by the next look."""
    native = arrays_of(harness.backend, random_adapter(MODEL, 8, 7))

    class Anew(dict[Any, Any]):
        def items(self) -> Any:
            for key, value in native.items():
                yield key, dataclasses.replace(value, a=Producer(value.a), b=Producer(value.b))

    borrowed = borrow_factors("a", Anew(native), on_device=False)
    for key, value in native.items():
        for role in ("a", "b"):
            got, want = (getattr(side, role).ctypes.data for side in (borrowed[key], value))
            assert got == want


def test_streams_are_for_devices() -> None:
    with pytest.raises(ArgumentError, match="a stream was given, but the numpy backend has none"):
        _runtime(stream=7)


def test_a_graph_refuses_buffers_of_any_library(foreign: Foreign) -> None:
    runtime = _runtime()
    runtime.set_step(lambda _: None)
    runtime.capture()
    with pytest.raises(GraphError, match="buffer 'x' cannot be made"):
        runtime.add_buffer("x", (4,), np.float32, array=foreign(np.zeros((8, 4), np.float32)))
    assert foreign.made[0].asked == []
