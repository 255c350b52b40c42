"""Layers told how many adapters a batch has: none costs nothing, other numbers change no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_util import (
    BACKENDS,
    Array,
    dense_layer,
    make_table,
    moe_layer,
    random_weights,
    rounded,
)
from problem_util import fragile_values
from test_layers import QKV, SILU, adapters_of, bits, make_inputs, model_of

from cupylora.backend import ArrayBackend, open_backend
from cupylora.errors import ArgumentError, CapacityError
from cupylora.layers import dense, moe
from cupylora.layers.batch import make_batch
from cupylora.layers.plan import BatchPlan
from cupylora.layers.stack import LayerStack

TOKENS = 40


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


@pytest.fixture
def no_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every LoRA op of the layers fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a LoRA op was called")

    for module in (dense, moe):
        monkeypatch.setattr(module, "lora_delta", refuse)
    for name in ("lora_activation", "lora_finalize"):
        monkeypatch.setattr(moe, name, refuse)


def base_slots(backend: ArrayBackend) -> Any:
    return backend.asarray(np.full(TOKENS, -1, np.int32))


def test_a_dense_layer_without_adapters_does_nothing(
    backend: ArrayBackend, no_deltas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    lora, plan = dense_layer(
        backend, make_table(backend, model, adapters_of(model), "bfloat16"), QKV
    )
    before = fragile_values((TOKENS, 161), "bfloat16")
    y = backend.asarray(before)
    monkeypatch.setattr("cupylora.layers.plan.plan", None)  # not made either
    plan.update(base_slots(backend), active=0)
    lora.add(backend.asarray(make_inputs(TOKENS, "bfloat16").x), y, plan)
    assert backend.to_host(y).tobytes() == before.tobytes()


def test_a_batch_without_lists_does_not_show_the_lists_of_the_one_before(
    backend: ArrayBackend,
) -> None:
    plan = BatchPlan(backend, max_tokens=TOKENS, max_loras=4)
    plan.update(backend.asarray(np.zeros(7, np.int32)))
    assert plan.active is None
    plan.update(base_slots(backend), active=0)
    assert (plan.num_tokens, plan.num_rows, plan.active) == (TOKENS, TOKENS, 0)
    for lists in ("segments", "routing"):
        with pytest.raises(ArgumentError, match=r"no adapter \(active is 0\), so no lists were"):
            getattr(plan, lists)
    plan.update(backend.asarray(np.zeros(7, np.int32)), active=1)
    assert (plan.routing.num_tokens, plan.active) == (7, 1)


def test_a_block_without_adapters_is_the_base_result(
    backend: ArrayBackend, no_deltas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    lora, plan = moe_layer(backend, make_table(backend, model, adapters_of(model), "bfloat16"))
    x, ids, weights, _ = make_inputs(TOKENS, "bfloat16").on(backend)
    base = random_weights(SILU, "bfloat16").on(backend)
    got = lora.forward(x, ids, weights, base_slots(backend), base, plan, active=0)
    monkeypatch.undo()
    expected = lora.forward(x, ids, weights, base_slots(backend), base, plan)
    assert (bits(backend.to_host(got)) == bits(backend.to_host(expected))).all()


def test_fused_steps_without_adapters_are_the_plain_ones(
    backend: ArrayBackend, no_deltas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    lora, plan = moe_layer(backend, make_table(backend, model, adapters_of(model), "bfloat16"))
    x, ids, weights, _ = make_inputs(TOKENS, "bfloat16").on(backend)
    rng = np.random.default_rng(3)
    first, down = (
        backend.asarray(rounded(rng.standard_normal((3 * TOKENS, width)), "bfloat16"))
        for width in (SILU.first_width, SILU.hidden)
    )

    def outputs(active: int | None) -> list[Array]:
        plan.update(base_slots(backend), ids, active=active)
        hidden = lora.activate_with_delta(x, first, plan)
        return [
            backend.to_host(hidden),
            backend.to_host(lora.finalize_with_delta(hidden, down, weights, plan)),
        ]

    without = outputs(0)
    monkeypatch.undo()
    for got, expected in zip(without, outputs(None), strict=True):
        assert (bits(got) == bits(expected)).all()


@pytest.mark.parametrize("active", [4, 5, 1000])
def test_how_many_adapters_there_are_changes_no_bit(backend: ArrayBackend, active: int) -> None:
    """Four slots are used."""
    model = model_of()
    table = make_table(backend, model, adapters_of(model), "bfloat16")
    block, block_plan = moe_layer(backend, table)
    lora, plan = dense_layer(backend, table, QKV)
    x, ids, weights, slots = make_inputs(TOKENS, "bfloat16").on(backend)
    base = random_weights(SILU, "bfloat16").on(backend)

    def outputs(number: int | None) -> list[Array]:
        y = backend.zeros((TOKENS, 161), x.dtype)
        plan.update(slots, active=number)
        lora.add(x, y, plan)
        out = block.forward(x, ids, weights, slots, base, block_plan, active=number)
        return [backend.to_host(y), backend.to_host(out)]

    for got, expected in zip(outputs(active), outputs(None), strict=True):
        assert (bits(got) == bits(expected)).all()


def test_more_adapters_than_were_said_are_refused_and_the_plan_is_empty() -> None:
    plan = BatchPlan(open_backend("numpy"), max_tokens=TOKENS, max_loras=4)
    plan.update(np.array([3, -1, 3], np.int32), active=1)
    with pytest.raises(CapacityError, match="3 different slots; max_active says 2"):
        plan.update(np.array([3, -1, 0, 1], np.int32), active=2)
    with pytest.raises(ArgumentError, match="its last update or adopt failed"):
        _ = plan.segments


def test_a_stack_without_adapters(backend: ArrayBackend, no_deltas: None) -> None:
    model = model_of(layers=2)
    table = make_table(backend, model, adapters_of(model), "bfloat16")
    stack = LayerStack(table, backend, max_tokens=TOKENS)
    batch = make_batch(model, backend, np.full(TOKENS, -1, np.int32), dtype="bfloat16")
    before = [backend.to_host(y) for y in batch.dense_y]
    out = backend.to_host(stack.step(batch, active=0)).astype(np.float32)
    assert np.isfinite(out).all()
    for y, was in zip(batch.dense_y, before, strict=True):
        assert backend.to_host(y).tobytes() == was.tobytes()


def test_numbers_that_cannot_be_are_refused_and_the_batch_stays() -> None:
    plan = BatchPlan(open_backend("numpy"), max_tokens=TOKENS, max_loras=4)
    slots = np.array([-1, 2], np.int32)
    plan.update(slots)
    for active, message in [
        (0, r"active is 0, but token_to_slot has rows with an adapter"),
        (-1, r"active is -1"),
        (1.5, r"active"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            plan.update(slots, active=active)  # type: ignore[arg-type]
    assert (plan.num_tokens, plan.active) == (2, None)
    assert plan.segments.expert.shape
