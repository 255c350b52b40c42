"""Dense and MoE layers, and stacks of them, against the float64 oracle on either backend."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backend_util import (
    BACKENDS,
    DTYPES,
    Array,
    HostWeights,
    dense_layer,
    make_table,
    moe_layer,
    random_adapter,
    random_weights,
    rounded,
)
from problem_util import BOUNDS, assert_close, comparable_rows, fragile_values

from cupylora.adapters.factors import Adapter
from cupylora.backend import ArrayBackend, StageClock, open_backend
from cupylora.cli._check import LAYER_BOUNDS, boundary_tokens, check_stack, step_outputs
from cupylora.cli._oracle import (
    GivenOutputs,
    WeightOutputs,
    dense_deltas,
    lookup,
    moe_outputs,
)
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError, CapacityError
from cupylora.layers.batch import make_batch, mixed_slots
from cupylora.layers.dense import DenseLora, dense_needs
from cupylora.layers.moe import STAGES, MoeLora, moe_needs
from cupylora.layers.plan import BatchPlan
from cupylora.layers.stack import STACK_STAGES, LayerStack, base_weight_bytes
from cupylora.layers.workspace import Workspace, lora_needs
from cupylora.ops import activation, expert_problems, finalize, grouped_gemm, permute_rows
from cupylora.ops.lora_delta import lora_workspace_bytes
from cupylora.ops.route import route
from cupylora.reference.oracle import BaseExperts, moe_layer_oracle
from cupylora.shapes import PRESETS, ModelShape, ModuleShape, MoeShape
from cupylora.worklists import Routing

QKV = (ModuleShape("q_proj", 40, 96), ModuleShape("k_proj", 40, 32), ModuleShape("v_proj", 40, 33))
SILU = MoeShape(40, 24, 8, 3)
BLOCKS = {
    "halves": SILU,
    "up first, gelu": replace(SILU, activation="gelu", gate_up_layout="up_first"),
    "gpt-oss": replace(
        SILU, activation="swiglu_oai", gate_up_layout="interleaved", expert_bias=True, limit=1.0
    ),
    "plain relu2": replace(SILU, activation="relu2", gated=False),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


def model_of(moe: MoeShape = SILU, layers: int = 1) -> ModelShape:
    return ModelShape("test", layers, 40, (QKV,), moe)


def adapters_of(model: ModelShape) -> dict[int, Adapter]:
    """Slots 0, 1 and 3; ranks differ, modules are missing, an A is shared; slot 2 is empty."""
    return {
        0: random_adapter(model, 3, 1),
        1: random_adapter(model, 16, 2, without=("k_proj", "gate_proj")),
        3: random_adapter(model, 24, 3, without=("q_proj", "down_proj"), shared=("up_proj",)),
    }


def lora_of(model: ModelShape, dtype: str, layer: int = 0) -> Any:
    adapters = adapters_of(model)
    empty = Adapter("empty", {})
    return lookup([adapters.get(slot, empty) for slot in range(4)], layer, resolve_dtype(dtype))


@dataclass(frozen=True)
class Batch:
    """Host inputs of one layer."""

    x: Array
    ids: Array
    weights: Array
    slots: Array

    def on(self, backend: ArrayBackend) -> tuple[Any, Any, Any, Any]:
        return tuple(map(backend.asarray, (self.x, self.ids, self.weights, self.slots)))  # type: ignore[return-value]


def make_inputs(tokens: int, dtype: str, moe: MoeShape = SILU, seed: int = 0) -> Batch:
    rng = np.random.default_rng([seed, tokens])
    ids = np.argsort(rng.random((tokens, moe.experts)), axis=1)[:, : moe.top_k]
    return Batch(
        rounded(rng.standard_normal((tokens, moe.hidden)), dtype),
        np.ascontiguousarray(ids, np.int32),
        rng.dirichlet(np.ones(moe.top_k), tokens).astype(np.float32),
        rng.integers(-1, 4, tokens, dtype=np.int32),
    )


def bits(array: Array) -> Array:
    return array.view(np.uint8)


# --- dense -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("y0", ["zero", "like the delta"])
def test_dense_fused_and_apart(backend: ArrayBackend, dtype: str, y0: str) -> None:
    model = model_of()
    lora, plan = dense_layer(backend, make_table(backend, model, adapters_of(model), dtype), QKV)
    batch = make_inputs(50, dtype)
    x, _, _, slots = batch.on(backend)
    delta = dense_deltas(batch.x, batch.slots, QKV, lora_of(model, dtype))
    before = rounded(np.zeros(delta.shape), dtype)
    if y0 != "zero":
        before = comparable_rows(np.random.default_rng(1), delta, dtype)
    plan.update(slots)

    fused = backend.asarray(before)
    lora.add(x, fused, plan)
    got = backend.to_host(fused)
    assert_close(got.astype(np.float64) - before, delta, BOUNDS[dtype])
    bare = batch.slots < 0
    assert bare.any()
    assert (bits(got[bare]) == bits(before[bare])).all()

    edges = np.cumsum([0, *(m.out_features for m in QKV)])
    apart = [backend.asarray(before[:, a:b]) for a, b in itertools.pairwise(edges)]
    lora.add(x, apart, plan)
    joined = np.concatenate([backend.to_host(y) for y in apart], axis=1)
    assert (bits(np.ascontiguousarray(joined)) == bits(got)).all()


def test_dense_columns_elsewhere(backend: ArrayBackend) -> None:
    """v, gap, q, k: each module finds its own columns, the gap keeps its bits."""
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "float32")
    lora, plan = dense_layer(backend, table, QKV, columns=[40, 136, 0])
    batch = make_inputs(20, "float32")
    x, _, _, slots = batch.on(backend)
    before = np.tile(fragile_values((1, 180), "float32"), (20, 1))
    before[:, :33] = before[:, 40:168] = 0
    y = backend.asarray(before)
    plan.update(slots)
    lora.add(x, y, plan)
    got = backend.to_host(y)
    q, k, v = np.split(
        dense_deltas(batch.x, batch.slots, QKV, lora_of(model, "float32")), [96, 128], 1
    )
    assert_close(got[:, 40:168], np.concatenate([q, k], axis=1), BOUNDS["float32"])
    assert_close(got[:, :33], v, BOUNDS["float32"])
    for gap in (slice(33, 40), slice(168, 180)):
        assert got[:, gap].tobytes() == before[:, gap].tobytes()


def test_dense_without_adapters_keeps_every_bit(backend: ArrayBackend) -> None:
    model = model_of()
    table = make_table(backend, model, {}, "bfloat16")
    lora, plan = dense_layer(backend, table, QKV)
    before = fragile_values((30, 161), "bfloat16")
    x, y = backend.asarray(make_inputs(30, "bfloat16").x), backend.asarray(before)
    for slots in (np.full(30, -1, np.int32), np.arange(30, dtype=np.int32) % 4):
        plan.update(backend.asarray(slots))
        lora.add(x, y, plan)
        assert backend.to_host(y).tobytes() == before.tobytes()


def test_dense_follows_the_slot_table(backend: ArrayBackend) -> None:
    """A layer made before a load sees it; after eviction nothing is left."""
    model = model_of()
    adapter = adapters_of(model)[0]
    table = make_table(backend, model, {0: adapter}, "float32")
    lora, plan = dense_layer(backend, table, QKV)
    x = backend.asarray(make_inputs(5, "float32").x)
    plan.update(backend.asarray(np.zeros(5, np.int32)))

    def output() -> Array:
        y = backend.zeros((5, 161), np.float32)
        lora.add(x, y, plan)
        return backend.to_host(y)

    loaded = output()
    table.evict(0)
    assert not output().any()
    table.load(0, adapter)
    assert (output() == loaded).all()
    assert loaded.any()


def test_dense_refusals(backend: ArrayBackend) -> None:
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "float32")
    lora, plan = dense_layer(backend, table, QKV)
    x, y = backend.zeros((6, 40), np.float32), backend.zeros((6, 161), np.float32)
    with pytest.raises(ArgumentError, match="call update first"):
        lora.add(x, y, plan)
    plan.update(backend.zeros(6, np.int32))
    for bad_x, bad_y, message in (
        (backend.zeros((5, 40), np.float32), y, "x has shape"),
        (backend.zeros((6, 40), np.float16), y, "x has dtype"),
        (x, backend.zeros((6, 160), np.float32), "y has 160 columns"),
        (x, [y], "y has 1 arrays"),
        (x, [backend.zeros((6, n), np.float32) for n in (96, 32, 34)], r"y\[2\] has shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            lora.add(bad_x, bad_y, plan)
    assert not backend.to_host(y).any()
    _, moe_plan = moe_layer(backend, table)
    moe_plan.update(backend.zeros(6, np.int32), backend.zeros((6, 3), np.int32))
    with pytest.raises(ArgumentError, match="a dense layer needs one of a single expert"):
        lora.add(x, y, moe_plan)
    with pytest.raises(ArgumentError, match="shares columns"):
        dense_layer(backend, table, QKV, columns=[0, 95, 200])
    for columns, message in (
        ([0, 96.5, 128], r"columns\[1\] is 96.5"),
        ([0, 2**45, 128], rf"columns\[1\] is {2**45}"),
        ([0, -1, 128], r"columns\[1\] is -1"),
        ([0, True, 128], r"columns\[1\] is True"),
        ([0, 96], "columns has 2 entries"),
        (5, "columns is a int"),
    ):
        with pytest.raises(ArgumentError, match=message):
            dense_layer(backend, table, QKV, columns=columns)  # type: ignore[arg-type]


def test_what_is_no_output_is_refused(backend: ArrayBackend) -> None:
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "float32")
    lora, plan = dense_layer(backend, table, QKV)
    x = backend.zeros((6, 40), np.float32)
    plan.update(backend.zeros(6, np.int32))
    for y in (None, 5, "y", {}, (a for a in ())):
        with pytest.raises(ArgumentError, match="y is a "):
            lora.add(x, y, plan)  # type: ignore[arg-type]
    for y in ([None] * 3, [x, 5, x], [1.0, 2.0, 3.0]):
        with pytest.raises(ArgumentError, match=r"y\[0\]"):
            lora.add(x, y, plan)


def test_dense_layers_that_cannot_be(backend: ArrayBackend) -> None:
    # Its v_proj and o_proj are neighbours of equal in_features.
    model = PRESETS["tiny-moe"].with_layers(1)
    table = make_table(backend, model, {}, "float32")
    sizes: dict[str, Any] = {"max_tokens": 4, "max_rank": 8, "dtype": "float32"}
    qkv = model.dense_groups[0]
    room = Workspace(backend, [dense_needs(backend, qkv, **sizes)])
    for layer in (0.5, True, None, -1, 1):
        with pytest.raises(ArgumentError, match="layer"):
            DenseLora.of_table(table, layer, ["q_proj"], room)  # type: ignore[arg-type]
    for names, message in (
        (["v_proj", "o_proj"], "v_proj, o_proj of tiny-moe are not dense modules that share"),
        (["up_proj"], "up_proj of tiny-moe are not dense"),
        ([], "not neighbours"),
        ("q_proj", "names is a str"),
        (["q_proj", 5], "no module 5"),
    ):
        with pytest.raises(ArgumentError, match=message):
            DenseLora.of_table(table, 0, names, room)
    DenseLora.of_table(table, 0, ["k_proj", "v_proj"], room)
    entries, made = table.entries_of(0, ["q_proj"]), {"max_rank": 8, "dtype": "float32"}
    with pytest.raises(ArgumentError, match="workspace is a NoneType"):
        DenseLora(qkv[:1], entries, None, **made)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="workspace is a NoneType"):
        MoeLora(SILU, table.entries_of(0, ["gate_proj"]), None, **made)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="table is a NoneType"):
        DenseLora.of_table(None, 0, ["q_proj"], room)  # type: ignore[arg-type]
    for modules, message in (
        ([], "modules has 0 entries"),
        (["q_proj"], r"modules\[0\] is a str"),
        (None, "modules is a NoneType"),
        ([*qkv, ModuleShape("o_proj", 32, 64)], "share one in_features"),
        (model.modules[4:5], "must be dense"),
    ):
        with pytest.raises(ArgumentError, match=message):
            dense_needs(backend, modules, **sizes)  # type: ignore[arg-type]
    for change in ({"max_tokens": 1.5}, {"max_tokens": -1}, {"max_rank": 0}, {"max_rank": 513}):
        name = next(iter(change))
        with pytest.raises(ArgumentError, match=f"{name} is"):
            dense_needs(backend, qkv, **(sizes | change))
        with pytest.raises(ArgumentError, match=f"{name} is"):
            moe_needs(backend, SILU, **(sizes | change))


# --- plan --------------------------------------------------------------------------------------


def test_plan_sizes() -> None:
    backend = open_backend("numpy")
    for options, message in (
        ({"max_loras": 4097}, "max_loras is 4097; 1 to 4096"),
        ({"max_tokens": 1 << 20, "top_k": 1 << 12}, r"max_tokens \* top_k is"),
        ({"max_tokens": 1.0}, "max_tokens is 1.0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            BatchPlan(backend, **({"max_tokens": 4, "max_loras": 2} | options))
    BatchPlan(backend, max_tokens=1, max_loras=4096)


def adoptable(slots: list[int]) -> tuple[Routing, Array]:
    """Another stack's rows: all of expert 0 of two, tokens in reverse order."""
    order = np.arange(len(slots), dtype=np.int32)[::-1].copy()
    offsets = np.array([0, len(slots), len(slots)], np.int64)
    return (
        Routing(order, np.argsort(order).astype(np.int32), offsets, len(slots), 1, 2),
        np.array(slots, np.int32),
    )


@pytest.mark.parametrize("how", ["adopt", "update"])
def test_a_failed_plan_is_empty_until_it_is_updated(how: str) -> None:
    """Never the new rows with the old segments, nor lists half written over."""
    backend = open_backend("numpy")
    plan = BatchPlan(backend, max_tokens=6, max_loras=2, experts=2, any_order=True)
    plan.adopt(*adoptable([0, 0, 1, 1]))
    assert int(plan.segments.count[0]) == 2
    bad = np.array([0, 1, 0, 2], np.int32)
    calls = {
        "adopt": lambda: plan.adopt(adoptable([0, 1, 0, 2])[0], bad),
        "update": lambda: plan.update(bad, np.zeros((4, 1), np.int32)),
    }
    with pytest.raises(ArgumentError, match=r"token_to_slot\[3\] is 2"):
        calls[how]()
    for name in ("routing", "segments", "num_tokens", "num_rows"):
        with pytest.raises(ArgumentError, match="failed; call update first"):
            getattr(plan, name)
    plan.adopt(*adoptable([0, 1, 0, 1]))
    assert int(plan.segments.count[0]) == 4


def test_arguments_refused_at_once_leave_a_plan_as_it_was() -> None:
    backend = open_backend("numpy")
    plan = BatchPlan(backend, max_tokens=6, max_loras=2, experts=2, any_order=True)
    routing, slots = adoptable([0, 0, 1, 1])
    plan.adopt(routing, slots)
    for call in (
        lambda: plan.adopt(routing, slots[:3]),
        lambda: plan.adopt(None, slots),  # type: ignore[arg-type]
        lambda: plan.update(slots),
        lambda: plan.update(slots.astype(np.int64), np.zeros((4, 1), np.int32)),
        lambda: plan.update(slots, np.zeros((3, 1), np.int32)),
    ):
        with pytest.raises(ArgumentError):
            call()
        assert plan.routing is routing
        assert int(plan.segments.count[0]) == 2


def test_bad_slot_is_reported(backend: ArrayBackend) -> None:
    """At once on the host; from the device by the next call, and the rows ran as base rows."""
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "float32")
    lora, plan = dense_layer(backend, table, QKV)
    slots = backend.asarray(np.array([0, 4], np.int32))
    if not backend.on_device:
        with pytest.raises(ArgumentError, match=r"token_to_slot\[1\] is 4"):
            plan.update(slots)
        return
    plan.update(slots)
    backend.synchronize()
    x, y = backend.zeros((2, 40), np.float32), backend.zeros((2, 161), np.float32)
    with pytest.raises(ArgumentError, match="slot >= max_loras"):
        lora.add(x, y, plan)
    lora.add(x, y, plan)


# --- MoE ---------------------------------------------------------------------------------------


def block_oracle(
    batch: Batch, weights: HostWeights, model: ModelShape, dtype: str, **options: Any
) -> Array:
    assert model.moe is not None
    base = BaseExperts(weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    return moe_layer_oracle(
        batch.x,
        batch.ids,
        batch.weights,
        batch.slots,
        model.moe,
        base,
        lora_of(model, dtype),
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_moe_forward(backend: ArrayBackend, name: str, dtype: str) -> None:
    moe = BLOCKS[name]
    model = model_of(moe)
    lora, plan = moe_layer(backend, make_table(backend, model, adapters_of(model), dtype))
    batch, weights = make_inputs(40, dtype), random_weights(moe, dtype)
    x, ids, topk_weights, slots = batch.on(backend)
    base = weights.on(backend)
    expected = block_oracle(batch, weights, model, dtype)

    stages: list[str] = []
    y = lora.forward(x, ids, topk_weights, slots, base, plan, lap=stages.append)
    assert_close(backend.to_host(y), expected, LAYER_BOUNDS[dtype])
    assert stages == list(STAGES)

    # The residual is added before the one rounding, and out may be x itself.
    lora.forward(x, ids, topk_weights, slots, base, plan, residual=x, out=x)
    assert_close(backend.to_host(x), expected + batch.x.astype(np.float64), LAYER_BOUNDS[dtype])


def test_moe_experts_in_two_parts(backend: ArrayBackend) -> None:
    """Experts 0-4 and 5-7 apart, as two ranks hold them: each as the oracle says."""
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "float32")
    batch, weights = make_inputs(30, "float32"), random_weights(SILU, "float32")
    x, ids, topk_weights, slots = batch.on(backend)
    for first, last in ((0, 5), (5, 8)):
        lora, plan = moe_layer(backend, table, experts=last - first, start_expert=first)
        got = lora.forward(x, ids, topk_weights, slots, weights.on(backend, first, last), plan)
        part = HostWeights(weights.gate_up[first:last], weights.down[first:last])
        local = model_of(replace(SILU, experts=last - first))
        base = BaseExperts(part.gate_up, part.down)
        expected = moe_layer_oracle(
            batch.x,
            batch.ids,
            batch.weights,
            batch.slots,
            local.moe,  # type: ignore[arg-type]
            base,
            lora_of(model, "float32"),
            first,
        )
        assert_close(backend.to_host(got), expected, LAYER_BOUNDS["float32"])


def host_steps(
    backend: ArrayBackend, lora: MoeLora, plan: BatchPlan, x: Any, weights: Any, rows: Any, y: Any
) -> tuple[Array, Array]:
    """The block on given base outputs; the first projection's result and the sum."""
    first, down = map(backend.asarray, y)
    lora.add_first(x, first, plan, y_rows=rows)
    hidden = lora.activate(first, plan, rows=rows)
    lora.add_down(hidden, down, plan, x_rows=rows, y_rows=rows)
    result = lora.finalize(down, weights, plan, rows=rows)
    return backend.to_host(first), backend.to_host(result)


def given_outputs(moe: MoeShape, tokens: int, dtype: str) -> tuple[Array, Array]:
    """Base outputs [T, k, width] by token and choice."""
    rng = np.random.default_rng(5)
    shapes = ((tokens, moe.top_k, moe.first_width), (tokens, moe.top_k, moe.hidden))
    return tuple(rounded(rng.standard_normal(shape), dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["halves", "gpt-oss", "plain relu2"])
def test_moe_on_the_hosts_outputs(backend: ArrayBackend, name: str, dtype: str) -> None:
    moe = replace(BLOCKS[name], expert_bias=False)
    model = model_of(moe)
    lora, plan = moe_layer(backend, make_table(backend, model, adapters_of(model), dtype))
    batch, given = make_inputs(40, dtype), given_outputs(moe, 40, dtype)
    x, ids, weights, slots = batch.on(backend)
    plan.update(slots, ids)
    flat = [y.reshape(-1, y.shape[2]) for y in given]
    first, got = host_steps(backend, lora, plan, x, weights, "pair", flat)
    expected = moe_outputs(
        batch.x,
        batch.ids,
        batch.weights,
        batch.slots,
        moe,
        GivenOutputs(*given),
        lora_of(model, dtype),
    )
    assert_close(got, expected, LAYER_BOUNDS[dtype])
    bare = np.repeat(batch.slots < 0, moe.top_k)
    assert (bits(first[bare]) == bits(flat[0][bare])).all()


def by_pair(given: tuple[Array, Array], row_order: str) -> list[Array]:
    """Base outputs in pair order."""
    axes = (1, 0, 2) if row_order == "k_major" else (0, 1, 2)
    return [np.ascontiguousarray(y.transpose(axes)).reshape(-1, y.shape[2]) for y in given]


@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
def test_moe_row_orders_agree_bit_for_bit(backend: ArrayBackend, row_order: str) -> None:
    """By pair, by row, and in another stack's order sorted by expert alone."""
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "bfloat16")
    lora, plain = moe_layer(backend, table)
    _, plan = moe_layer(backend, table, row_order=row_order, any_order=True)
    batch, given = make_inputs(40, "bfloat16"), given_outputs(SILU, 40, "bfloat16")
    x, ids, weights, slots = batch.on(backend)
    plain.update(slots, ids)
    _, expected = host_steps(
        backend, lora, plain, x, weights, "pair", by_pair(given, "token_major")
    )

    pairs = by_pair(given, row_order)
    plan.update(slots, ids)
    _, got = host_steps(backend, lora, plan, x, weights, "pair", pairs)
    assert (bits(got) == bits(expected)).all()
    order = backend.to_host(plan.routing.row_to_pair)
    _, got = host_steps(backend, lora, plan, x, weights, "row", [y[order] for y in pairs])
    assert (bits(got) == bits(expected)).all()

    routing, order = foreign_routing(backend, batch.ids, row_order)
    plan.adopt(routing, slots)
    segments = int(backend.to_host(plan.segments.count)[0])
    assert segments > 8 * 4, "the order is not one that breaks segments up"
    for rows, y in (("pair", pairs), ("row", [y[order] for y in pairs])):
        _, got = host_steps(backend, lora, plan, x, weights, rows, y)
        assert (bits(got) == bits(expected)).all()


def foreign_routing(backend: ArrayBackend, ids: Array, row_order: str) -> tuple[Routing, Array]:
    """Pairs sorted by expert, and within one in falling order, whatever their slots."""
    experts = (ids.T if row_order == "k_major" else ids).reshape(-1)
    order = np.lexsort((-np.arange(experts.size), experts)).astype(np.int32)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(experts, minlength=8))])
    arrays = map(backend.asarray, (order, inverse, offsets.astype(np.int64)))
    return Routing(*arrays, *ids.shape, 8, row_order=row_order), order  # type: ignore[arg-type]


def test_moe_forward_in_a_foreign_order(backend: ArrayBackend) -> None:
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "float32")
    lora, plan = moe_layer(backend, table, any_order=True)
    batch, weights = make_inputs(40, "float32"), random_weights(SILU, "float32")
    x, ids, topk_weights, slots = batch.on(backend)
    base = weights.on(backend)
    expected = backend.to_host(lora.forward(x, ids, topk_weights, slots, base, plan))
    plan.adopt(foreign_routing(backend, batch.ids, "token_major")[0], slots)
    got = backend.to_host(lora.apply(x, topk_weights, base, plan))
    assert (bits(got) == bits(expected)).all()


@pytest.mark.parametrize("case", ["base rows", "empty slots"])
@pytest.mark.parametrize("name", ["halves", "gpt-oss"])
def test_moe_without_adapters_is_the_base_result(
    backend: ArrayBackend, name: str, case: str
) -> None:
    """Bit for bit what the base ops alone give."""
    moe, dtype = BLOCKS[name], resolve_dtype("bfloat16")
    model = model_of(moe)
    loaded = adapters_of(model) if case == "base rows" else {}
    lora, plan = moe_layer(backend, make_table(backend, model, loaded, "bfloat16"))
    batch = make_inputs(40, "bfloat16")
    slots = np.full(40, -1, np.int32) if case == "base rows" else batch.slots.clip(0)
    x, ids, topk_weights, slots = replace(batch, slots=slots).on(backend)
    base = random_weights(moe, "bfloat16").on(backend)
    got = lora.forward(x, ids, topk_weights, slots, base, plan)

    def gemm(rows: Any, weights: Any) -> Any:
        y = backend.zeros((120, weights.shape[1]), dtype)
        problems = expert_problems(
            plan.routing,
            x_ptr=backend.address(rows),
            w_ptr=backend.address(weights),
            y_ptr=backend.address(y),
            itemsize=2,
            in_features=weights.shape[2],
            out_features=weights.shape[1],
        )
        grouped_gemm(problems, dtype="bfloat16")
        return y

    hidden = activation(
        gemm(permute_rows(x, plan.routing), base.gate_up),
        kind=moe.activation,
        gated=True,
        layout=moe.gate_up_layout,
        limit=moe.limit,
        bias=base.gate_up_bias,
        routing=plan.routing,
        rows="row",
    )
    down = gemm(hidden, base.down)
    expected = finalize(down, topk_weights, plan.routing, y_rows="row", bias=base.down_bias)
    assert (bits(backend.to_host(got)) == bits(backend.to_host(expected))).all()


def test_no_tokens(backend: ArrayBackend) -> None:
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "bfloat16")
    lora, plan = moe_layer(backend, table)
    batch = make_inputs(0, "bfloat16")
    x, ids, weights, slots = batch.on(backend)
    base = random_weights(SILU, "bfloat16").on(backend)
    assert lora.forward(x, ids, weights, slots, base, plan).shape == (0, 40)
    dense, dense_plan = dense_layer(backend, table, QKV)
    dense_plan.update(slots)
    dense.add(x, backend.empty((0, 161), resolve_dtype("bfloat16")), dense_plan)


def test_plan_and_workspace_serve_every_batch_size(backend: ArrayBackend) -> None:
    """Sizes in any order give what a fresh layer gives, in the same memory."""
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "bfloat16")
    lora, plan = moe_layer(backend, table, max_tokens=64)
    base = random_weights(SILU, "bfloat16").on(backend)
    seen = set()
    for tokens in (40, 1, 64, 7, 0, 40):
        x, ids, weights, slots = make_inputs(tokens, "bfloat16").on(backend)
        got = lora.forward(x, ids, weights, slots, base, plan)
        fresh, fresh_plan = moe_layer(backend, table, max_tokens=max(1, tokens))
        expected = fresh.forward(x, ids, weights, slots, base, fresh_plan)
        assert (bits(backend.to_host(got)) == bits(backend.to_host(expected))).all()
        if tokens:
            arrays = (plan.routing.row_to_pair, plan.segments.tiles, *lora.outputs(plan))
            seen.add(tuple(map(backend.address, arrays)))
    assert len(seen) == 1


def test_moe_refusals(backend: ArrayBackend) -> None:
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "float32")
    lora, plan = moe_layer(backend, table, max_tokens=8)
    weights = random_weights(SILU, "float32")
    base = weights.on(backend)
    x, ids, topk, slots = make_inputs(8, "float32").on(backend)
    out = backend.zeros((8, 40), np.float32)

    def forward(**changes: Any) -> None:
        arguments = {
            "x": x,
            "topk_ids": ids,
            "topk_weights": topk,
            "token_to_slot": slots,
            "base": base,
            "plan": plan,
        }
        lora.forward(**{**arguments, **changes}, out=out)

    few = moe_layer(backend, table, experts=5)[1]
    for changes, message in (
        ({"x": x[:7]}, "x has shape"),
        ({"topk_ids": backend.zeros((8, 2), np.int32)}, "topk_ids has shape"),
        ({"topk_weights": backend.zeros((8, 3), np.float64)}, "topk_weights has dtype float64"),
        ({"base": weights.on(backend, 0, 7)}, "base.gate_up has shape"),
        ({"base": None}, "a MoeWeights is needed"),
        ({"residual": backend.zeros((8, 41), np.float32)}, "residual has shape"),
        ({"plan": few}, "base.gate_up has shape"),
        ({"plan": moe_layer(backend, table, experts=8, start_expert=1)[1]}, "experts 1 to 8"),
        ({"plan": None}, "a BatchPlan is needed"),
    ):
        with pytest.raises(ArgumentError, match=message):
            forward(**changes)
    with pytest.raises(ArgumentError, match="call update first"):
        _ = plan.routing
    assert not backend.to_host(out).any()
    with pytest.raises(CapacityError, match="has 9 tokens; this plan has room for 8"):
        plan.update(backend.zeros(9, np.int32), backend.zeros((9, 3), np.int32))
    with pytest.raises(ArgumentError, match="topk_ids is missing"):
        plan.update(slots)
    with pytest.raises(ArgumentError, match="make it with any_order"):
        plan.adopt(foreign_routing(backend, backend.to_host(ids), "token_major")[0], slots)
    forward()
    assert backend.to_host(out).any()


def test_workspace_holds_what_was_declared(backend: ArrayBackend) -> None:
    float32 = np.dtype(np.float32)
    workspace = Workspace(backend, [{"a": (10, float32)}, {"a": (6, float32), "b": (0, float32)}])
    assert workspace.nbytes == 40
    assert workspace.view("a", (2, 5)) is workspace.view("a", (2, 5))
    for name, shape in (("a", (11,)), ("b", (1,)), ("c", (1,))):
        with pytest.raises(CapacityError, match=f"buffer '{name}'"):
            workspace.view(name, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("max_rows", "slices", "in_features", "max_rank"),
    [(1, 1, 40, 16), (700, 2, 7168, 64), (3000, 2, 7168, 64), (5000, 3, 2880, 200), (64, 1, 1, 1)],
)
def test_lora_workspace_covers_every_batch_size(
    dtype: str, max_rows: int, slices: int, in_features: int, max_rank: int
) -> None:
    sizes = (slices, in_features, max_rank, resolve_dtype(dtype))
    device: Any = SimpleNamespace(on_device=True)
    most = max(lora_workspace_bytes(rows, *sizes) for rows in range(1, max_rows + 1))
    assert lora_needs(device, max_rows, *sizes) == {"lora": (most, np.dtype(np.uint8))}


@pytest.mark.parametrize(
    ("in_features", "widths", "max_rank", "max_tokens"),
    [(2048, (4096, 512, 512), 64, 4096), (4096, (4096, 1024, 1024), 64, 2047)],
)
def test_dense_workspace_covers_modules_called_apart(
    in_features: int, widths: tuple[int, ...], max_rank: int, max_tokens: int
) -> None:
    """A module with a y of its own is split over K up to more rows than all together."""
    sizes = open_backend("numpy")
    sizes.name = "cuda"  # only sizes are asked for
    modules = [ModuleShape(f"m{i}", in_features, width) for i, width in enumerate(widths)]
    dtype = resolve_dtype("bfloat16")
    size, _ = dense_needs(sizes, modules, max_tokens=max_tokens, max_rank=max_rank, dtype=dtype)[
        "lora"
    ]
    for slices in (1, len(modules)):
        for rows in (1, max_tokens // 2, max_tokens):
            assert size >= lora_workspace_bytes(rows, slices, in_features, max_rank, dtype)


def test_adopted_rows_must_be_numbered_as_the_plan_says(backend: ArrayBackend) -> None:
    plan = BatchPlan(backend, max_tokens=2, max_loras=1, experts=2, top_k=2, any_order=True)
    slots = backend.asarray(np.zeros(2, np.int32))
    ids = backend.asarray(np.array([[0, 1], [1, 0]], np.int32))
    routing = route(ids, slots, num_experts=2, max_loras=1, row_order="k_major")
    with pytest.raises(ArgumentError, match="row_order is k_major; this plan's is token_major"):
        plan.adopt(routing, slots)


@pytest.mark.parametrize("wrong", ["numpy", None])
def test_a_backend_is_not_its_name(wrong: Any) -> None:
    for call in (
        lambda: BatchPlan(wrong, max_tokens=2, max_loras=1),
        lambda: Workspace(wrong, []),
        lambda: dense_needs(wrong, [], max_tokens=1, max_rank=1, dtype="float32"),
    ):
        with pytest.raises(ArgumentError, match=r"ArrayBackend is needed|modules has 0"):
            call()


def test_no_memory_is_a_capacity_error(backend: ArrayBackend) -> None:
    with pytest.raises(CapacityError, match=f"needs {2**62} bytes"):
        backend.empty((2**31, 2**29), np.float32)


def test_long_segments_get_larger_tiles(backend: ArrayBackend) -> None:
    """Tiles follow from a batch's sizes, within the room made for the largest batch."""
    plan = BatchPlan(backend, max_tokens=4096, max_loras=2, max_rank=64)
    rows = []
    for tokens in (4096, 8, 4096):
        plan.update(backend.zeros(tokens, np.int32))
        rows.append(plan.segments.tile_rows)
        tiles = int(backend.to_host(plan.segments.tile_count)[0])
        assert tiles == -(-tokens // rows[-1])
    assert rows == [64, 8, 64]


# --- stacks ------------------------------------------------------------------------------------


def make_stack(
    backend: ArrayBackend, moe: MoeShape, dtype: str, **options: Any
) -> tuple[LayerStack, Any, list[Adapter]]:
    model = model_of(moe, layers=3)
    adapters = adapters_of(model)
    table = make_table(backend, model, adapters, dtype)
    stack = LayerStack(table, backend, max_tokens=48, **options)
    slots = mixed_slots(48, 4, 0.25, seed=3)
    batch = make_batch(model, backend, slots, dtype=dtype, seed=3)
    return stack, batch, [adapters.get(slot, Adapter("empty", {})) for slot in range(4)]


@pytest.mark.parametrize("lora_only", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_stack_passes_its_check(
    backend: ArrayBackend, name: str, dtype: str, lora_only: bool
) -> None:
    stack, batch, adapters = make_stack(backend, BLOCKS[name], dtype, lora_only=lora_only)
    clock = StageClock(backend)
    clock.start()
    stepped = step_outputs(stack, batch, stack.step(batch, clock.lap))
    findings = check_stack(stack, batch, adapters, stepped)
    assert [f for f in findings if not f.passed] == []
    assert len(findings) == 3 * 5 + 1
    assert np.isfinite(stepped.astype(np.float64)).all()
    assert tuple(clock.seconds()[0]) == STACK_STAGES
    needed = base_weight_bytes(stack.model, dtype)
    assert stack.weight_bytes == (0 if lora_only else needed)


def test_check_finds_a_wrong_scale(backend: ArrayBackend) -> None:
    """The oracle judges the adapters it is given: with another scale every delta fails."""
    stack, batch, adapters = make_stack(backend, SILU, "bfloat16")
    factors = {
        key: replace(value, scale=value.scale * 1.02) for key, value in adapters[1].factors.items()
    }
    adapters[1] = Adapter("scaled", factors)
    failed = {f.what for f in check_stack(stack, batch, adapters) if not f.passed}
    assert {"q+k+v delta", "MoE block"} <= failed


@pytest.mark.parametrize("column", [0, -1], ids=["x", "dense y"])
def test_check_finds_stale_output(column: int) -> None:
    backend = open_backend("numpy")
    stack, batch, adapters = make_stack(backend, SILU, "float32")
    stepped = step_outputs(stack, batch, stack.step(batch))
    stepped[0, column] = np.nextafter(stepped[0, column], np.float32(9))
    failed = [f.what for f in check_stack(stack, batch, adapters, stepped) if not f.passed]
    assert failed == ["same step again"]


def test_lora_only_takes_no_room_for_weights(backend: ArrayBackend) -> None:
    whole, _, _ = make_stack(backend, SILU, "bfloat16")
    bare, _, _ = make_stack(backend, SILU, "bfloat16", lora_only=True)
    assert bare.workspace.nbytes < whole.workspace.nbytes
    assert bare.base == []


@pytest.mark.gpu
@pytest.mark.parametrize("lora_only", [False, True])
def test_steps_allocate_nothing(lora_only: bool) -> None:
    """Once a batch size has come up, a step takes no memory, not even from CuPy's pool."""
    from cupy.cuda.memory_hook import MemoryHook

    class Count(MemoryHook):  # type: ignore[misc]
        name = "count"
        taken = 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.taken += 1

    stack, batch, _ = make_stack(open_backend("cuda"), SILU, "bfloat16", lora_only=lora_only)
    stack.step(batch)
    with Count() as count:
        stack.step(batch)
    assert count.taken == 0


def test_stack_refuses_other_batches() -> None:
    backend = open_backend("numpy")
    stack, _, _ = make_stack(backend, SILU, "bfloat16")
    other = make_batch(model_of(), backend, np.zeros(4, np.int32), dtype="bfloat16")
    with pytest.raises(ArgumentError, match="has 3 layers"):
        stack.step(other)


def test_stack_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend("numpy")
    monkeypatch.setattr(backend, "free_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"need 138240 bytes .* 1000 bytes .*--lora-only"):
        make_stack(backend, SILU, "bfloat16")


@pytest.mark.parametrize("name", BLOCKS)
def test_oracles_agree(name: str) -> None:
    """Rows taken together give what the reference's oracle gives one by one."""
    moe = BLOCKS[name]
    model = model_of(moe)
    batch, weights = make_inputs(30, "float32"), random_weights(moe, "float32")
    base = WeightOutputs(
        weights.gate_up.__getitem__,
        weights.down.__getitem__,
        weights.gate_up_bias,
        weights.down_bias,
    )
    got = moe_outputs(
        batch.x, batch.ids, batch.weights, batch.slots, moe, base, lora_of(model, "float32")
    )
    expected = block_oracle(batch, weights, model, "float32")
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


def test_boundary_tokens() -> None:
    ids = np.array([[0, 1], [0, 1], [0, 2], [0, 1]], np.int32)
    slots = np.array([0, 0, 0, -1], np.int32)
    assert boundary_tokens(ids, slots).tolist() == [0, 1, 2, 3]
    assert boundary_tokens(ids[:, :1], slots).tolist() == [0, 2, 3]
    assert boundary_tokens(ids[:0], slots[:0]).tolist() == []


def test_mixed_slots() -> None:
    slots = mixed_slots(100, 3, 0.1, seed=0)
    assert np.bincount(slots + 1).tolist() == [10, 30, 30, 30]
    assert (mixed_slots(5, 0, 0.0, seed=0) == -1).all()
    with pytest.raises(ArgumentError, match="base_share"):
        mixed_slots(5, 1, 1.5, seed=0)
