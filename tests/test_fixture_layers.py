"""Adapters that peft wrote, served together by the layers, against peft's own outputs.

Every adapter of a model sits in a slot; one batch holds the model's tokens once per adapter and
once with none, in mixed order. Each part must come out as peft gave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - registers bfloat16, which fixture files hold
import numpy as np
import pytest
from backend_util import BACKENDS, Array, HostWeights, dense_layer, make_table, moe_layer, rounded
from fixtures_util import (
    FIXTURES,
    LAYER,
    MODELS,
    Fixture,
    ModelData,
    load_fixture,
    load_model_data,
    moe_block,
    projection,
)

from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import SlotTable
from cupylora.backend import ArrayBackend, open_backend

EXACT = 2e-5
"""Error of float32 relative to the adapter's contribution."""
ROUNDED = {"bfloat16": 6e-3, "float16": 1e-3}
"""Error relative to the output; peft's own bfloat16 run is as far away again."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


@dataclass(frozen=True)
class Mixed:
    """A model's adapters in their slots, and a shuffled batch; part n is of adapter n, the last one
    of none."""

    model: ModelData
    fixtures: list[Fixture]
    table: SlotTable
    token: Array
    part: Array

    @property
    def slots(self) -> Array:
        return np.where(self.part < len(self.fixtures), self.part, -1).astype(np.int32)

    def of_part(self, values: Array, part: int) -> Array:
        """One part's rows in the model's token order."""
        mine = np.flatnonzero(self.part == part)
        return values[mine[np.argsort(self.token[mine])]]


def mixed(backend: ArrayBackend, name: str, dtype: str) -> Mixed:
    model = load_model_data(name)
    fixtures = [f for f in map(load_fixture, FIXTURES) if f.model.shape.name == name]
    assert len(fixtures) >= 3
    adapters = {slot: read_adapter(f.path, model.shape) for slot, f in enumerate(fixtures)}
    table = make_table(
        backend, model.shape, adapters, dtype, max_loras=len(fixtures) + 1, max_rank=16
    )
    tokens, parts = len(model.x), len(fixtures) + 1
    order = np.random.default_rng(4).permutation(tokens * parts)
    return Mixed(model, fixtures, table, order % tokens, order // tokens)


def check(batch: Mixed, got: Array, key: str, base: Array, dtype: str) -> None:
    for part, fixture in enumerate(batch.fixtures):
        mine = batch.of_part(got, part).astype(np.float64)
        expected = fixture.expected.get(key, base).astype(np.float64)
        error = np.linalg.norm(mine - expected)
        if dtype != "float32":
            assert error <= ROUNDED[dtype] * np.linalg.norm(expected), (fixture.name, key)
        elif key in fixture.expected:
            contribution = np.linalg.norm(expected - base)
            assert contribution > 0.05 * np.linalg.norm(base)
            assert error <= EXACT * contribution, (fixture.name, key)
        else:
            assert error <= EXACT * np.linalg.norm(base), (fixture.name, key)
        if dtype == "bfloat16" and f"{key}.bfloat16" in fixture.expected:
            theirs = fixture.expected[f"{key}.bfloat16"].astype(np.float64)
            error = np.linalg.norm(mine - theirs)
            assert error <= 2 * ROUNDED[dtype] * np.linalg.norm(theirs), (fixture.name, key)
    bare = batch.of_part(got, len(batch.fixtures)).astype(np.float64)
    bound = ROUNDED.get(dtype, EXACT)
    assert np.linalg.norm(bare - base) <= bound * np.linalg.norm(base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_moe_block_as_peft(backend: ArrayBackend, name: str, dtype: str) -> None:
    batch = mixed(backend, name, dtype)
    model, tokens = batch.model, len(batch.token)
    lora, plan = moe_layer(backend, batch.table, layer=LAYER, max_tokens=tokens)
    keys = ("experts.first", "experts.second", "experts.first_bias", "experts.second_bias")
    values = (model.weights.get(key) for key in keys)
    weights = HostWeights(*(None if v is None else rounded(v, dtype) for v in values))  # type: ignore[arg-type]
    got = lora.forward(
        backend.asarray(rounded(model.x[batch.token], dtype)),
        backend.asarray(model.topk_ids[batch.token]),
        backend.asarray(model.topk_weights[batch.token]),
        backend.asarray(batch.slots),
        weights.on(backend),
        plan,
    )
    check(batch, backend.to_host(got), "moe", moe_block(model, lambda _: None), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_projections_as_peft(backend: ArrayBackend, name: str, dtype: str) -> None:
    """q, k and v fused, and o; on base outputs that the host computed."""
    batch = mixed(backend, name, dtype)
    model, tokens = batch.model, len(batch.token)
    for group in model.shape.dense_groups:
        lora, plan = dense_layer(backend, batch.table, group, layer=LAYER, max_tokens=tokens)
        bases = [projection(model, m.name, lambda _: None) for m in group]
        x = backend.asarray(rounded(model.input_of(group[0].name)[batch.token], dtype))
        y = backend.asarray(rounded(np.concatenate(bases, axis=1)[batch.token], dtype))
        plan.update(backend.asarray(batch.slots))
        lora.add(x, y, plan)
        got, start = backend.to_host(y), 0
        for module, base in zip(group, bases, strict=True):
            columns = got[:, start : start + module.out_features]
            check(batch, columns, module.name, base, dtype)
            start += module.out_features
