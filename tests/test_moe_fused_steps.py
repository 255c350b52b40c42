"""MoeLora's fused steps on a host's own base outputs: the float64 oracle, and the plain steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS, DTYPES, make_table, moe_layer, random_weights
from problem_util import assert_close
from test_layers import (
    BLOCKS,
    adapters_of,
    bits,
    by_pair,
    given_outputs,
    lora_of,
    make_inputs,
    model_of,
)

from cupylora.backend import ArrayBackend, open_backend
from cupylora.cli._check import LAYER_BOUNDS
from cupylora.cli._oracle import GivenOutputs, moe_outputs
from cupylora.errors import ArgumentError


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
@pytest.mark.parametrize("name", ["halves", "up first, gelu", "gpt-oss", "plain relu2"])
def test_against_the_oracle(backend: ArrayBackend, name: str, row_order: str, dtype: str) -> None:
    moe = replace(BLOCKS[name], expert_bias=False)
    model = model_of(moe)
    table = make_table(backend, model, adapters_of(model), dtype)
    lora, plan = moe_layer(backend, table, row_order=row_order)
    batch, given = make_inputs(40, dtype), given_outputs(moe, 40, dtype)
    x, ids, weights, slots = batch.on(backend)
    plan.update(slots, ids)
    first, down = (backend.asarray(y) for y in by_pair(given, row_order))
    before = backend.to_host(first), backend.to_host(down)
    hidden = lora.activate_with_delta(x, first, plan)
    got = lora.finalize_with_delta(hidden, down, weights, plan, residual=x)
    expected = moe_outputs(
        batch.x,
        batch.ids,
        batch.weights,
        batch.slots,
        moe,
        GivenOutputs(*given),
        lora_of(model, dtype),
    )
    expected = expected + batch.x.astype(np.float64)
    assert_close(backend.to_host(got), expected, LAYER_BOUNDS[dtype])
    for array, was in zip((first, down), before, strict=True):
        assert (bits(backend.to_host(array)) == bits(was)).all()


@pytest.mark.parametrize("case", ["base rows", "empty slots"])
@pytest.mark.parametrize("rows", ["pair", "row"])
def test_without_adapters_the_bits_of_the_plain_steps(
    backend: ArrayBackend, rows: Any, case: str
) -> None:
    moe = BLOCKS["gpt-oss"]
    model = model_of(moe)
    loaded = adapters_of(model) if case == "base rows" else {}
    lora, plan = moe_layer(backend, make_table(backend, model, loaded, "bfloat16"))
    batch = make_inputs(40, "bfloat16")
    slots = np.full(40, -1, np.int32) if case == "base rows" else batch.slots.clip(0)
    x, ids, weights, slots_here = replace(batch, slots=slots).on(backend)
    plan.update(slots_here, ids)
    given = by_pair(given_outputs(moe, 40, "bfloat16"), "token_major")
    first, down = (backend.asarray(y) for y in given)
    base = random_weights(moe, "bfloat16").on(backend)
    biases = base.gate_up_bias, base.down_bias
    hidden = backend.to_host(lora.activate(first, plan, rows=rows, bias=biases[0]))
    expected = lora.finalize(down, weights, plan, rows=rows, bias=biases[1])
    fused = lora.activate_with_delta(x, first, plan, rows=rows, bias=biases[0])
    assert (bits(backend.to_host(fused)) == bits(hidden)).all()
    got = lora.finalize_with_delta(
        fused, down, weights, plan, x_rows=rows, rows=rows, bias=biases[1]
    )
    assert (bits(backend.to_host(got)) == bits(backend.to_host(expected))).all()


def test_what_does_not_fit_is_named() -> None:
    here = open_backend("numpy")
    model = model_of()
    lora, plan = moe_layer(here, make_table(here, model, adapters_of(model), "bfloat16"))
    batch = make_inputs(4, "bfloat16")
    x, ids, weights, slots = batch.on(here)
    with pytest.raises(ArgumentError, match="call update first"):
        lora.activate_with_delta(x, x, plan)
    plan.update(slots, ids)
    first, down = lora.outputs(plan)
    for call, message in (
        (lambda: lora.activate_with_delta(x[:3], first, plan), "x has shape"),
        (lambda: lora.activate_with_delta(x, down, plan), "y has shape"),
        (lambda: lora.activate_with_delta(x, first, plan, x_rows="r"), "x_rows is 'r'"),  # type: ignore[arg-type]
        (lambda: lora.activate_with_delta(x, first, plan, bias=first), "bias has shape"),
        (lambda: lora.finalize_with_delta(x, down, weights, plan), "x has shape"),
        (
            lambda: lora.finalize_with_delta(first[:, :24].copy(), down, slots, plan),
            "topk_weights has",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
