"""A small runtime with a dense group and an expert block per step, on either backend, and the same
step computed on copies without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from backend_util import Array, random_adapter, random_weights, rounded
from test_layers import QKV, SILU, model_of

from cupylora.adapters.factors import Adapter
from cupylora.adapters.slots import adapter_bytes
from cupylora.backend import ArrayBackend
from cupylora.dtypes import resolve_dtype
from cupylora.graphs.manager import GraphOptions, Step
from cupylora.layers.dense import DenseLora, dense_needs
from cupylora.layers.moe import MoeLora, moe_needs
from cupylora.layers.plan import BatchPlan
from cupylora.layers.workspace import Workspace
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits, ModelShape

DTYPE = "bfloat16"
MODEL: ModelShape = model_of()
MAX_RANK = 24
WIDTH = sum(module.out_features for module in QKV)


def adapter(seed: int, **options: Any) -> Adapter:
    """Rank and scale follow from the seed."""
    return random_adapter(MODEL, (3, 8, 16, 24)[seed % 4], seed, **options)


def room(adapters: int) -> int:
    """Arena bytes for so many adapters of any rank."""
    return adapters * adapter_bytes(random_adapter(MODEL, MAX_RANK, 0), 2)


@dataclass
class Inputs:
    """A batch's rows on the host."""

    x: Array
    y: Array
    ids: Array
    weights: Array
    slots: Array

    @classmethod
    def random(cls, tokens: int, slots: Array, seed: int = 0) -> Inputs:
        rng = np.random.default_rng([seed, tokens])
        ids = np.argsort(rng.random((tokens, SILU.experts)), axis=1)[:, : SILU.top_k]
        return cls(
            rounded(rng.standard_normal((tokens, SILU.hidden)), DTYPE),
            rounded(rng.standard_normal((tokens, WIDTH)), DTYPE),
            np.ascontiguousarray(ids, np.int32),
            rng.dirichlet(np.ones(SILU.top_k), max(tokens, 1))[:tokens].astype(np.float32),
            np.asarray(slots, np.int32),
        )


class Harness:
    """A runtime whose step adds deltas to ``y`` and writes the expert block's output to ``out``."""

    def __init__(
        self,
        backend: ArrayBackend,
        *,
        max_loras: int = 4,
        max_tokens: int = 24,
        graphs: GraphOptions | None = None,
        arena_adapters: int | None = None,
        host_cache_bytes: int | None = None,
    ) -> None:
        limits = LoraLimits(max_loras, MAX_RANK)
        self.backend = backend
        self.runtime = LoraRuntime(
            MODEL,
            limits,
            dtype=DTYPE,
            max_tokens=max_tokens,
            arena_bytes=room(max_loras + 2 if arena_adapters is None else arena_adapters),
            backend=backend,
            graphs=graphs,
            host_cache_bytes=host_cache_bytes,
        )
        sizes = {"max_tokens": max_tokens, "max_rank": MAX_RANK, "dtype": resolve_dtype(DTYPE)}
        needs = [dense_needs(backend, QKV, **sizes), moe_needs(backend, SILU, **sizes)]
        workspace = Workspace(backend, needs)
        self.dense = DenseLora.of_table(self.runtime.table, 0, [m.name for m in QKV], workspace)
        self.block = MoeLora.of_table(self.runtime.table, 0, workspace)
        self.base = random_weights(SILU, DTYPE).on(backend)
        plans = {"max_tokens": max_tokens, "max_loras": max_loras}
        self.dense_plan = BatchPlan(backend, **plans)
        self.plan = BatchPlan(backend, **plans, experts=SILU.experts, top_k=SILU.top_k)
        add = self.runtime.add_buffer
        self.buffers = {
            "x": add("x", (SILU.hidden,), DTYPE),
            "y": add("y", (WIDTH,), DTYPE),
            "ids": add("ids", (SILU.top_k,), np.int32, pad=-1),
            "weights": add("weights", (SILU.top_k,), np.float32),
            "out": add("out", (SILU.hidden,), DTYPE),
        }
        self.calls: list[tuple[int, int]] = []
        self.runtime.set_step(self.step_function)

    def step_function(self, step: Step) -> None:
        self.calls.append((step.num_tokens, step.active))
        slots = step.token_to_slot
        self.dense_plan.update(slots, active=step.active)
        self.dense.add(step["x"], step["y"], self.dense_plan)
        self.block.forward(
            step["x"],
            step["ids"],
            step["weights"],
            slots,
            self.base,
            self.plan,
            active=step.active,
            out=step["out"],
        )

    def write(self, inputs: Inputs) -> None:
        """The batch's rows into the buffers; all others keep what they hold."""
        with self.on_stream():
            for name in ("x", "y", "ids", "weights"):
                rows = getattr(inputs, name)
                target = self.buffers[name][: len(rows)]
                self.backend.copy(target, self.backend.asarray(rows))

    def on_stream(self) -> Any:
        return self.runtime.on_stream()

    def read(self, name: str, tokens: int | None = None) -> Array:
        with self.on_stream():
            self.backend.synchronize()
            return self.backend.to_host(self.buffers[name][:tokens])

    def run(self, inputs: Inputs) -> tuple[Array, Array]:
        """One step: y and out of the batch's rows."""
        self.write(inputs)
        self.runtime.step(inputs.slots)
        self.runtime.synchronize()
        return self.read("y", len(inputs.slots)), self.read("out", len(inputs.slots))

    def expected(self, inputs: Inputs) -> tuple[Array, Array]:
        """The same from the layers alone, on copies, with nothing known of the batch."""
        put = self.backend.asarray
        with self.on_stream():
            x, y, slots = put(inputs.x), put(inputs.y), put(inputs.slots)
            self.dense_plan.update(slots)
            self.dense.add(x, y, self.dense_plan)
            ids, weights = put(inputs.ids), put(inputs.weights)
            out = self.block.forward(x, ids, weights, slots, self.base, self.plan)
            self.backend.synchronize()
            return self.backend.to_host(y), self.backend.to_host(out)

    def check(self, inputs: Inputs) -> None:
        """A step gives the same bits as the layers on copies."""
        expected = self.expected(inputs)
        for got, want in zip(self.run(inputs), expected, strict=True):
            assert got.tobytes() == want.tobytes()
