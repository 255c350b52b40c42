"""Float64 answers for chosen rows, straight from each adapter's factor matrices.

Nothing here goes through routing, segments, problems or slot tables, so that a fault in one of them
cannot hide: a token's choices are taken one by one from ``topk_ids``. In: inputs, plain factors and
base weights. Out: float64 rows to compare a backend's with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.shapes import MoeShape

__all__ = [
    "BaseExperts",
    "LoraFactors",
    "LoraLookup",
    "activation_oracle",
    "lora_delta_oracle",
    "moe_layer_oracle",
]

Array = Any
Float64 = npt.NDArray[np.float64]
LoraFactors = tuple[Array, Array, float]
"""(A [r, in], B [out, r], scale) of one (slot, module, expert)."""
LoraLookup = Callable[[int, str, int], LoraFactors | None]
"""(slot, module name, global expert) -> its factors, or None where the slot does not touch it."""


@dataclass(frozen=True)
class BaseExperts:
    """Base weights of the local experts, each indexable by local expert ([E, ...] or the like).

    gate_up: [E, first width, H], columns of the output laid out as the model's gate_up_layout says.
    down: [E, H, I]. Biases, where the model has them: [E, first width] and [E, H].
    """

    gate_up: Array
    down: Array
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


def lora_delta_oracle(x_rows: Array, a: Array, b: Array, scale: float) -> Float64:
    """``scale · (x Aᵀ) Bᵀ`` [n, out] in float64, of x_rows [n, in], a [r, in] and b [out, r]."""
    return float(scale) * ((_wide(x_rows) @ _wide(a).T) @ _wide(b).T)


def moe_layer_oracle(
    x_tokens: Array,
    topk_ids: Array,
    weights: Array,
    slots: Array,
    moe: MoeShape,
    base: BaseExperts | None,
    lora: LoraLookup,
    start_expert: int = 0,
) -> Float64:
    """A whole MoE block's output [n, H] for n tokens, in float64.

    x_tokens: [n, H]; topk_ids: int [n, k], global expert ids; weights: [n, k]; slots: int [n],
    negative for no adapter. ``moe.experts`` experts from ``start_expert`` on are local; choices of
    other experts contribute nothing. base None: base experts of zero weight.
    """
    x, routed = _wide(x_tokens), _wide(weights)
    ids, slots = np.asarray(topk_ids), np.asarray(slots)
    total = np.zeros((len(x), moe.hidden))
    local = (ids >= start_expert) & (ids < start_expert + moe.experts)
    for expert in np.unique(ids[local]).tolist():
        layer = _Expert(moe, base, lora, expert, expert - start_expert)
        for token, choice in np.argwhere(ids == expert).tolist():
            total[token] += routed[token, choice] * layer.output(x[token], int(slots[token]))
    return total


class _Expert:
    """One expert's float64 weights, widened once for all tokens that chose it."""

    def __init__(
        self, moe: MoeShape, base: BaseExperts | None, lora: LoraLookup, expert: int, local: int
    ) -> None:
        self.moe, self.lora, self.expert = moe, lora, expert
        self.first = np.zeros((moe.first_width, moe.hidden))
        self.down = np.zeros((moe.hidden, moe.intermediate))
        self.first_bias, self.down_bias = np.zeros(moe.first_width), np.zeros(moe.hidden)
        if base is not None:
            self.first, self.down = _wide(base.gate_up[local]), _wide(base.down[local])
            if base.gate_up_bias is not None:
                self.first_bias = _wide(base.gate_up_bias[local])
            if base.down_bias is not None:
                self.down_bias = _wide(base.down_bias[local])

    def output(self, x: Float64, slot: int) -> Float64:
        moe = self.moe
        first = self.first @ x + self.first_bias
        up = _up_columns(moe)
        if not moe.gated:
            hidden = activation_oracle(None, first + self._delta(slot, "up_proj", x), moe)
        else:
            gate = np.delete(first, up) + self._delta(slot, "gate_proj", x)
            hidden = activation_oracle(gate, first[up] + self._delta(slot, "up_proj", x), moe)
        return self.down @ hidden + self.down_bias + self._delta(slot, "down_proj", hidden)

    def _delta(self, slot: int, module: str, x: Float64) -> Float64 | float:
        factors = self.lora(slot, module, self.expert) if slot >= 0 else None
        return 0.0 if factors is None else lora_delta_oracle(x[None], *factors)[0]


def _up_columns(moe: MoeShape) -> npt.NDArray[np.int64]:
    """Columns of the first projection that belong to up; the others are gate's."""
    columns = np.arange(moe.intermediate)
    if not moe.gated or moe.gate_up_layout == "up_first":
        return columns
    return columns + moe.intermediate if moe.gate_up_layout == "gate_first" else 2 * columns + 1


def activation_oracle(gate: Float64 | None, up: Float64, moe: MoeShape) -> Float64:
    """The block's activation in float64, elementwise; gate is None for one that is not gated."""
    if gate is None:
        return _act(up, moe)
    if moe.activation != "swiglu_oai":
        return _act(gate, moe) * up
    gate, up = np.minimum(gate, moe.limit), np.clip(up, -moe.limit, moe.limit)
    return gate * _sigmoid(moe.alpha * gate) * (up + 1)


def _act(x: Float64, moe: MoeShape) -> Float64:
    if moe.activation == "silu":
        return x * _sigmoid(x)
    if moe.activation == "relu2":
        return np.maximum(x, 0) ** 2
    tails = np.array([math.erfc(-v / math.sqrt(2)) for v in x.reshape(-1).tolist()])
    result: Float64 = 0.5 * x * tails.reshape(x.shape)
    return result


def _sigmoid(x: Float64) -> Float64:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _wide(values: Array) -> Float64:
    return np.asarray(values).astype(np.float64)
