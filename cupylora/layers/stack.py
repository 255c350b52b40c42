"""A model's layers with LoRA on every projection, chained: what one step of inference does to them.

A layer is: deltas of the dense groups (q/k/v, o; in a model without experts gate/up and down too)
onto given base outputs, no attention; then, if the model has experts, the MoE block with its
residual, ``x + moe(x)``, the next layer's x. In: a SlotTable with adapters in
it and StackInputs. Out: the last layer's x. Base expert weights are seeded random numbers; without
them (``lora_only``) the projections' base outputs are seeded random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cupylora.adapters.slots import SlotTable
from cupylora.backend import ArrayBackend, Lap, total_bytes
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError, CapacityError
from cupylora.layers.batch import StackInputs
from cupylora.layers.dense import DenseLora, dense_needs
from cupylora.layers.moe import STAGES, MoeLora, MoeWeights, moe_needs
from cupylora.layers.plan import BatchPlan
from cupylora.layers.workspace import Needs, Workspace
from cupylora.ops.fill_uniform import fill_uniform
from cupylora.shapes import ModelShape, MoeShape
from cupylora.text import counted
from cupylora.worklists import Array

__all__ = [
    "STACK_STAGES",
    "LayerStack",
    "base_weight_bytes",
    "require_base_room",
    "require_room",
]

STACK_STAGES = (STAGES[0], "dense deltas", *STAGES[1:])
"""What ``step`` tells its ``lap``, in order."""

_X = "stack x"
_GIVEN_SCALE = 0.5
_LAYER_SEEDS = 16
_SEED_STEP = 7_000_003


def base_weight_bytes(model: ModelShape, dtype: Any) -> int:
    """Bytes of the base expert weights of all of ``model``'s layers."""
    moe = model.moe
    if moe is None:
        return 0
    elements = sum(math.prod(shape) for shape in _weight_shapes(moe).values())
    return model.layers * elements * resolve_dtype(dtype).itemsize


def require_room(backend: ArrayBackend, needed: int, what: str, remedy: str) -> None:
    """Raise CapacityError, with the bytes needed and available, if ``needed`` cannot be had."""
    available = backend.free_bytes()
    if needed > available:
        raise CapacityError(
            f"{what} need {needed} bytes ({needed / 2**30:.1f} GiB), but {available} bytes "
            f"({available / 2**30:.1f} GiB) are available on the {backend.name} backend; {remedy}"
        )


def require_base_room(model: ModelShape, dtype: Any, backend: ArrayBackend) -> None:
    """Raise CapacityError if the base expert weights do not fit the memory there is."""
    require_room(
        backend,
        base_weight_bytes(model, dtype),
        f"the base expert weights of {counted(model.layers, 'layer')} of {model.name}",
        "use --lora-only (lora_only=True: no base expert weights) or fewer layers",
    )


class LayerStack:
    """All layers of ``table.model``, for batches of up to ``max_tokens`` tokens.

    table: its adapters, limits and dtype; it may be loaded and evicted between steps.
    backend: where the table's arrays are. seed: of the base weights.
    Raises CapacityError, before allocating, if the base weights do not fit.
    """

    def __init__(
        self,
        table: SlotTable,
        backend: ArrayBackend,
        *,
        max_tokens: int,
        lora_only: bool = False,
        seed: int = 0,
    ) -> None:
        self.model, self.table, self.backend = table.model, table, backend
        self.dtype, self.lora_only, self.seed = resolve_dtype(table.dtype), lora_only, seed
        self.max_tokens = max_tokens
        model, max_loras = self.model, table.limits.max_loras
        if not lora_only:
            require_base_room(model, self.dtype, backend)
        self.workspace = Workspace(backend, self._needs())
        self.dense_plan = BatchPlan(
            backend,
            max_tokens=max_tokens,
            max_loras=max_loras,
            max_rank=table.limits.max_rank,
        )
        layers = range(model.layers)
        self.dense = [tuple(self._dense_layers(layer)) for layer in layers]
        self.moe: list[MoeLora] = []
        self.base: list[MoeWeights] = []
        if model.moe is not None:
            self.moe_plan = BatchPlan(
                backend,
                max_tokens=max_tokens,
                max_loras=max_loras,
                experts=model.moe.experts,
                top_k=model.moe.top_k,
                max_rank=table.limits.max_rank,
            )
            self.moe = [MoeLora.of_table(table, layer, self.workspace) for layer in layers]
            if not lora_only:
                self.base = [self._make_weights(layer, model.moe) for layer in layers]

    @property
    def weight_bytes(self) -> int:
        """Bytes of base expert weights."""
        return total_bytes(
            array for w in self.base for array in (w.gate_up, w.down, w.gate_up_bias, w.down_bias)
        )

    def step(
        self, batch: StackInputs, lap: Lap | None = None, *, active: int | None = None
    ) -> Array:
        """All layers once; returns the last layer's x [T, H], valid until the next step.

        The dense groups' deltas of all layers add up in ``batch.dense_y``; ``batch.x`` is kept.
        lap: told each of STACK_STAGES, once per layer, when its work is enqueued. active: as in
        ``BatchPlan.update``.
        """
        done = lap or (lambda _: None)
        self.begin(batch, active)
        done("route")
        x = batch.x
        for layer in range(self.model.layers):
            for group in range(len(self.dense[layer])):
                self.add_dense(layer, group, batch)
            done("dense deltas")
            if self.moe:
                out = self.workspace.view(_X, batch.x.shape)
                x = self.moe_block(layer, batch, x, residual=x, out=out, active=active, lap=lap)
        return x

    def begin(self, batch: StackInputs, active: int | None = None) -> None:
        """Make the work lists that all dense groups of all layers share."""
        if batch.num_tokens > self.max_tokens or len(batch.topk_ids) != self.model.layers:
            raise ArgumentError(
                f"batch has {counted(batch.num_tokens, 'token')} and routes for "
                f"{counted(len(batch.topk_ids), 'layer')}; the stack takes up to "
                f"{counted(self.max_tokens, 'token')} and has {counted(self.model.layers, 'layer')}"
            )
        self.dense_plan.update(batch.token_to_slot, active=active)

    def add_dense(self, layer: int, group: int, batch: StackInputs) -> None:
        """Add one dense group's deltas to ``batch.dense_y[group]``; ``begin`` comes first."""
        x, y = batch.dense_x[group], batch.dense_y[group]
        self.dense[layer][group].add(x, y, self.dense_plan)

    def moe_block(
        self,
        layer: int,
        batch: StackInputs,
        x: Array,
        *,
        residual: Array | None,
        out: Array,
        active: int | None = None,
        lap: Lap | None = None,
    ) -> Array:
        """One layer's MoE block: its output, plus ``residual`` if there is one, in ``out``."""
        ids, weights = batch.topk_ids[layer], batch.topk_weights[layer]
        moe, plan, slots = self.moe[layer], self.moe_plan, batch.token_to_slot
        if not self.lora_only:
            base = self.base[layer]
            return moe.forward(
                x,
                ids,
                weights,
                slots,
                base,
                plan,
                active=active,
                residual=residual,
                out=out,
                lap=lap,
            )
        done = lap or (lambda _: None)
        plan.update(slots, ids, active=active)
        done("route")
        first = self.given_first(layer)
        done("MoE first base")
        moe.add_first(x, first, plan)
        done("MoE first delta")
        hidden = moe.activate(first, plan)
        done("activation")
        down = self.given_down(layer)
        done("down base")
        moe.add_down(hidden, down, plan)
        done("down delta")
        result = moe.finalize(down, weights, plan, residual=residual, out=out)
        done("finalize")
        return result

    def given_first(self, layer: int) -> Array:
        """The first projection's given base output [R, first_width] by pair, filled anew."""
        first, _ = self.moe[layer].outputs(self.moe_plan)
        filled: Array = fill_uniform(first, self._seed(layer, 4), _GIVEN_SCALE)
        return filled

    def given_down(self, layer: int) -> Array:
        """The down projection's given base output [R, H] by pair, filled anew."""
        _, down = self.moe[layer].outputs(self.moe_plan)
        filled: Array = fill_uniform(down, self._seed(layer, 5), _GIVEN_SCALE)
        return filled

    def _needs(self) -> Iterator[Needs]:
        model = self.model
        max_rank = self.table.limits.max_rank
        for group in model.dense_groups:
            yield dense_needs(
                self.backend,
                group,
                max_tokens=self.max_tokens,
                max_rank=max_rank,
                dtype=self.dtype,
            )
        if model.moe is not None:
            yield {_X: (self.max_tokens * model.hidden, self.dtype)}
            yield moe_needs(
                self.backend,
                model.moe,
                max_tokens=self.max_tokens,
                max_rank=max_rank,
                dtype=self.dtype,
                base=not self.lora_only,
            )

    def _dense_layers(self, layer: int) -> Iterator[DenseLora]:
        for group in self.model.dense_groups:
            names = [m.name for m in group]
            yield DenseLora.of_table(self.table, layer, names, self.workspace)

    def _make_weights(self, layer: int, moe: MoeShape) -> MoeWeights:
        """Uniform weights within ±1/sqrt(in_features), biases as large."""
        arrays = {}
        for index, (name, shape) in enumerate(_weight_shapes(moe).items()):
            fan_in = moe.hidden if name.startswith("gate_up") else moe.intermediate
            array = self.backend.empty(shape, self.dtype)
            arrays[name] = fill_uniform(array, self._seed(layer, index), 1 / math.sqrt(fan_in))
        return MoeWeights(**arrays)

    def _seed(self, layer: int, index: int) -> int:
        return self.seed * _SEED_STEP + (layer + 1) * _LAYER_SEEDS + index


def _weight_shapes(moe: MoeShape) -> dict[str, tuple[int, ...]]:
    """Shapes of MoeWeights' arrays."""
    wide, experts = moe.first_width, moe.experts
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up": (experts, wide, moe.hidden),
        "down": (experts, moe.hidden, moe.intermediate),
    }
    if moe.expert_bias:
        shapes |= {"gate_up_bias": (experts, wide), "down_bias": (experts, moe.hidden)}
    return shapes
