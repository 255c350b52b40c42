"""Tests of layers on either backend: the backends, and adapters in a slot table there.

``BACKENDS`` parametrises a fixture (``params=BACKENDS``, then ``open_backend(request.param)``); the
cuda one is marked ``gpu``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cupylora.adapters.factors import Adapter, LoraFactors
from cupylora.adapters.slots import Arena, SlotTable, adapter_bytes
from cupylora.backend import ArrayBackend
from cupylora.dtypes import resolve_dtype
from cupylora.layers.dense import DenseLora, dense_needs
from cupylora.layers.moe import MoeLora, MoeWeights, moe_needs
from cupylora.layers.plan import BatchPlan
from cupylora.layers.workspace import Workspace
from cupylora.shapes import LoraLimits, ModelShape, ModuleShape, MoeShape
from cupylora.worklists import PACKED

BACKENDS = ["numpy", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = ("bfloat16", "float16", "float32")
Array = np.ndarray[Any, np.dtype[Any]]


@contextlib.contextmanager
def jax_on(kind: str) -> Iterator[Any]:
    """JAX, its new arrays on the first device of a kind: "cpu" or "gpu"; skips the test without."""
    jax = pytest.importorskip("jax", reason="needs JAX")
    try:
        device = jax.devices(kind)[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no {kind} here: {error}")
    with jax.default_device(device):
        yield jax


def rounded(values: Array, dtype: str) -> Array:
    return np.ascontiguousarray(values).astype(resolve_dtype(dtype))


def random_adapter(
    model: ModelShape,
    rank: int,
    seed: int,
    *,
    without: Collection[str] = (),
    shared: Collection[str] = (),
) -> Adapter:
    """Factors of every module but those of ``without``; scale 1.5 · rank / rank is never 1.

    Modules in ``shared`` have one A for all experts.
    """
    rng = np.random.default_rng([seed, rank])
    factors = {}
    for layer in range(model.layers):
        for module in model.modules:
            if module.name in without:
                continue
            experts = 1 if module.name in shared else module.experts
            a = rng.standard_normal((experts, rank, module.in_features)) / module.in_features**0.5
            b = rng.standard_normal((module.experts, module.out_features, rank)) * rank**-0.5
            factors[layer, module.name] = LoraFactors(
                a.astype(np.float32), b.astype(np.float32), 0.75 + 0.25 * seed
            )
    return Adapter(f"adapter-{seed}", factors)


def make_table(
    backend: ArrayBackend,
    model: ModelShape,
    adapters: Mapping[int, Adapter],
    dtype: str,
    *,
    max_loras: int = 4,
    max_rank: int = 24,
    a_layout: int = PACKED,
) -> SlotTable:
    """``adapters`` by slot, in an arena just large enough."""
    itemsize = resolve_dtype(dtype).itemsize
    room = sum(adapter_bytes(adapter, itemsize) for adapter in adapters.values())
    table = SlotTable(
        model,
        LoraLimits(max_loras, max_rank),
        dtype,
        xp=backend.xp,
        arena=Arena(room + 256, backend.xp),
        a_layout=a_layout,
    )
    for slot, adapter in adapters.items():
        table.load(slot, adapter)
    return table


def dense_layer(
    backend: ArrayBackend,
    table: SlotTable,
    modules: Iterable[ModuleShape],
    *,
    layer: int = 0,
    max_tokens: int = 64,
    columns: list[int] | None = None,
) -> tuple[DenseLora, BatchPlan]:
    """A DenseLora with a workspace and a plan of its own."""
    modules, limits = tuple(modules), table.limits
    sizes = {"max_rank": limits.max_rank, "dtype": table.dtype}
    needs = dense_needs(backend, modules, max_tokens=max_tokens, **sizes)
    names = [m.name for m in modules]
    lora = DenseLora.of_table(table, layer, names, Workspace(backend, [needs]), columns=columns)
    plan = BatchPlan(backend, max_tokens=max_tokens, max_loras=limits.max_loras)
    return lora, plan


def moe_layer(
    backend: ArrayBackend,
    table: SlotTable,
    *,
    layer: int = 0,
    max_tokens: int = 64,
    experts: int | None = None,
    **plan_options: Any,
) -> tuple[MoeLora, BatchPlan]:
    """A MoeLora of the table's model with a workspace and a plan of its own."""
    moe, limits = table.model.moe, table.limits
    assert moe is not None
    sizes = {"max_rank": limits.max_rank, "dtype": table.dtype}
    needs = moe_needs(backend, moe, max_tokens=max_tokens, **sizes)
    lora = MoeLora.of_table(table, layer, Workspace(backend, [needs]))
    plan = BatchPlan(
        backend,
        max_tokens=max_tokens,
        max_loras=limits.max_loras,
        experts=moe.experts if experts is None else experts,
        top_k=moe.top_k,
        **plan_options,
    )
    return lora, plan


@dataclass(frozen=True)
class HostWeights:
    """Base expert weights on the host, already rounded."""

    gate_up: Array
    down: Array
    gate_up_bias: Array | None = None
    down_bias: Array | None = None

    def on(self, backend: ArrayBackend, first: int = 0, last: int | None = None) -> MoeWeights:
        """The weights of experts first to last on a backend."""
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return MoeWeights(
            *(None if part is None else backend.asarray(part[first:last]) for part in parts)
        )


def random_weights(moe: MoeShape, dtype: str, seed: int = 0) -> HostWeights:
    rng = np.random.default_rng([seed, 99])

    def values(*shape: int, fan_in: int) -> Array:
        return rounded(rng.standard_normal(shape) / fan_in**0.5, dtype)

    e, wide = moe.experts, moe.first_width
    gate_up = values(e, wide, moe.hidden, fan_in=moe.hidden)
    down = values(e, moe.hidden, moe.intermediate, fan_in=moe.intermediate)
    if not moe.expert_bias:
        return HostWeights(gate_up, down)
    biases = values(e, wide, fan_in=4), values(e, moe.hidden, fan_in=4)
    return HostWeights(gate_up, down, *biases)
