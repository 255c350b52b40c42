"""The numerical check of ``cupylora run``: a stack's outputs against a float64 oracle.

Every layer is run on its actual input and judged on sampled tokens: up to 64 at random, and those
of the first and last row of every segment. What is judged, and by which bound:

* dense groups, tokens whose adapter has one of the group's modules: the deltas alone (y = 0 before)
  and y with base outputs in it, by the bound of one op, which rounds once;
* all other tokens: their y keeps its bits;
* the MoE block without its residual: the bound of a whole layer, in which the base GEMMs, the
  deltas, the activation and the sum each round once;
* the layer's output, residual added: the same bound, relative to that output;
* what the timed steps left: bit for bit what the layers give when run again, one by one.

An error is the Frobenius norm of the difference over that of what is expected; a single row may
have four times the bound. In: a LayerStack with its batch, and the adapter in each slot. Out:
Findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.factors import Adapter
from cupylora.cli._oracle import (
    BaseOutputs,
    GivenOutputs,
    WeightOutputs,
    dense_deltas,
    lookup,
    moe_outputs,
)
from cupylora.dtypes import dtype_name
from cupylora.layers.batch import StackBatch
from cupylora.layers.stack import LayerStack
from cupylora.shapes import ModuleShape

__all__ = [
    "LAYER_BOUNDS",
    "OP_BOUNDS",
    "SAMPLED",
    "Finding",
    "boundary_tokens",
    "check_stack",
    "step_outputs",
]

OP_BOUNDS = {"bfloat16": 3e-3, "float16": 5e-4, "float32": 1e-5}
"""Relative error allowed where one op rounds once."""

LAYER_BOUNDS = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-5}
"""Relative error allowed on a whole MoE block, which rounds six times in a row."""

WORST_ROW = 4
SAMPLED = 64

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Finding:
    """One comparison. error, worst_row: relative; 0 is exact, inf where nothing was expected.

    rows: those compared; where there were none, nothing is shown by having passed.
    """

    what: str
    layer: int
    rows: int
    error: float
    worst_row: float
    bound: float

    @property
    def row_bound(self) -> float:
        """What a single row may have."""
        return WORST_ROW * self.bound

    @property
    def passed(self) -> bool:
        """Whether both errors keep their bounds; NaN does not."""
        return self.error <= self.bound and self.worst_row <= self.row_bound


def step_outputs(stack: LayerStack, batch: StackBatch, x: Any) -> Array:
    """All that a step changes, on the host: x [T, H] and the dense groups' y, side by side."""
    return np.concatenate([stack.backend.to_host(y) for y in (x, *batch.dense_y)], axis=1)


def check_stack(
    stack: LayerStack,
    batch: StackBatch,
    adapters: Sequence[Adapter],
    stepped: Array | None = None,
    layer_done: Callable[[], None] = lambda: None,
) -> list[Finding]:
    """Run every layer of ``stack`` on ``batch`` (whose values are made anew) and judge it.

    stepped: ``step_outputs`` of a ``stack.step`` of this batch.
    """
    return _Checker(stack, batch, adapters).run(stepped, layer_done)


class _Checker:
    def __init__(self, stack: LayerStack, batch: StackBatch, adapters: Sequence[Adapter]) -> None:
        self.stack, self.batch, self.adapters = stack, batch, adapters
        self.host = stack.backend.to_host
        self.sample = _sample(batch)
        name = dtype_name(stack.dtype)
        self.op_bound, self.layer_bound = OP_BOUNDS[name], LAYER_BOUNDS[name]
        self.findings: list[Finding] = []

    def run(self, stepped: Array | None, layer_done: Callable[[], None]) -> list[Finding]:
        stack, batch = self.stack, self.batch
        batch.reset()
        stack.begin(batch)
        x = batch.x
        out, alone = (stack.backend.empty(x.shape, stack.dtype) for _ in range(2))
        for layer in range(stack.model.layers):
            for group in range(len(stack.model.dense_groups)):
                self._dense(layer, group)
            if stack.moe:
                self._moe(layer, x, out, alone)
                x = out
            layer_done()
        if stepped is not None:
            self._add_dense_again()
            again = step_outputs(stack, batch, x)
            self._exact("same step again", stack.model.layers - 1, again, stepped)
        return self.findings

    def _add_dense_again(self) -> None:
        """The dense deltas of all layers, as a step adds them up."""
        for group in range(len(self.stack.model.dense_groups)):
            self.batch.reset_y(group)
            for layer in range(self.stack.model.layers):
                self.stack.add_dense(layer, group, self.batch)

    def _dense(self, layer: int, group: int) -> None:
        batch, modules = self.batch, self.stack.model.dense_groups[group]
        name = "+".join(m.name.removesuffix("_proj") for m in modules)
        y = batch.dense_y[group]
        slots, served = batch.slots, self._served(layer, modules)
        tokens = _tokens(self.sample, boundary_tokens(slots[:, None] * 0, slots))
        tokens = tokens[served[tokens]]
        x = self.host(batch.dense_x[group])[tokens]
        delta = dense_deltas(x, slots[tokens], modules, self._lora(layer))

        self.stack.backend.clear(y)
        self.stack.add_dense(layer, group, batch)
        self._close(f"{name} delta", layer, self.host(y)[tokens], delta, self.op_bound)

        batch.reset_y(group)
        before = self.host(y)
        self.stack.add_dense(layer, group, batch)
        after = self.host(y)
        expected = before[tokens].astype(np.float64) + delta
        self._close(f"{name} y", layer, after[tokens], expected, self.op_bound)
        self._exact(f"{name} base rows", layer, after[~served], before[~served])

    def _served(self, layer: int, modules: Sequence[ModuleShape]) -> npt.NDArray[np.bool_]:
        """Whether each token's adapter has factors of one of ``modules``."""
        has = [
            any((layer, module.name) in adapter.factors for module in modules)
            for adapter in self.adapters
        ]
        served: npt.NDArray[np.bool_] = np.array([*has, False])[self.batch.slots]  # -1: the last
        return served

    def _moe(self, layer: int, x: Any, out: Any, alone: Any) -> None:
        stack, batch = self.stack, self.batch
        moe = stack.model.moe
        if moe is None:
            return
        ids, weights, slots = batch.ids[layer], batch.weights[layer], batch.slots
        tokens = _tokens(self.sample, boundary_tokens(ids, slots))
        inputs = self.host(x)[tokens]
        stack.moe_block(layer, batch, x, residual=None, out=alone)
        expected = moe_outputs(
            inputs,
            ids[tokens],
            weights[tokens],
            slots[tokens],
            moe,
            self._base(layer, tokens),
            self._lora(layer),
        )
        self._close("MoE block", layer, self.host(alone)[tokens], expected, self.layer_bound)
        stack.moe_block(layer, batch, x, residual=x, out=out)
        expected += inputs.astype(np.float64)
        self._close("x + MoE", layer, self.host(out)[tokens], expected, self.layer_bound)

    def _base(self, layer: int, tokens: npt.NDArray[np.int64]) -> BaseOutputs:
        stack, host = self.stack, self.host
        if stack.lora_only:
            top_k = self.batch.ids.shape[2]

            def rows(given: Any) -> Array:
                parts = [host(given[t * top_k : (t + 1) * top_k]) for t in tokens.tolist()]
                return np.stack(parts) if parts else np.zeros((0, top_k, given.shape[1]))

            return GivenOutputs(rows(stack.given_first(layer)), rows(stack.given_down(layer)))
        base = stack.base[layer]
        biases = (base.gate_up_bias, base.down_bias)
        return WeightOutputs(
            lambda expert: host(base.gate_up[expert]),
            lambda expert: host(base.down[expert]),
            *(None if bias is None else host(bias) for bias in biases),
        )

    def _lora(self, layer: int) -> Any:
        return lookup(self.adapters, layer, self.stack.dtype)

    def _close(self, what: str, layer: int, got: Array, expected: Array, bound: float) -> None:
        error, worst = _errors(got.astype(np.float64), expected)
        self.findings.append(Finding(what, layer, len(got), error, worst, bound))

    def _exact(self, what: str, layer: int, got: Array, expected: Array) -> None:
        same = got.tobytes() == expected.tobytes()
        error = 0.0 if same else np.inf
        self.findings.append(Finding(what, layer, len(got), error, error, 0.0))


def boundary_tokens(ids: Array, slots: Array) -> npt.NDArray[np.int64]:
    """Tokens of the first and last row of every (expert, slot), in order of (token, choice)."""
    token = np.repeat(np.arange(len(slots), dtype=np.int64), ids.shape[1])
    keys = np.stack([ids.reshape(-1), np.repeat(slots, ids.shape[1])], axis=1)
    _, first = np.unique(keys, axis=0, return_index=True)
    _, last = np.unique(keys[::-1], axis=0, return_index=True)
    return np.unique(np.concatenate([token[first], token[::-1][last]]))


def _sample(batch: StackBatch) -> npt.NDArray[np.int64]:
    tokens = batch.num_tokens
    rng = np.random.default_rng([batch.seed, 2])
    return rng.choice(tokens, size=min(SAMPLED, tokens), replace=False).astype(np.int64)


def _tokens(*parts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.unique(np.concatenate(parts))


def _errors(got: Array, expected: Array) -> tuple[float, float]:
    """Error of the whole and of the worst row, each relative to what is expected."""
    errors, norms = (np.linalg.norm(v, axis=1) for v in (got - expected, expected))
    with np.errstate(divide="ignore", invalid="ignore"):
        per_row = np.where(errors == 0, 0.0, errors / norms)
        whole = np.linalg.norm(errors) / np.linalg.norm(norms)
    if not np.linalg.norm(errors):
        return 0.0, 0.0
    return float(whole), float(per_row.max())
