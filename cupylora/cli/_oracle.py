"""Float64 answers for tokens of a stack's layers, from adapters' factors and base weights alone.

As ``reference.oracle`` it knows nothing of routing, segments or slot tables; it takes the rows of
one (expert, slot) together, since a stack has too many for one at a time, and base outputs that are
given instead of computed. In: host inputs of one layer. Out: float64 [n, ...] for n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cupylora.adapters.factors import Adapter
from cupylora.reference.oracle import LoraLookup, activation_oracle, lora_delta_oracle
from cupylora.shapes import ModuleShape, MoeShape

__all__ = ["BaseOutputs", "GivenOutputs", "WeightOutputs", "dense_deltas", "lookup", "moe_outputs"]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


def lookup(adapters: Sequence[Adapter], layer: int, dtype: np.dtype[Any]) -> LoraLookup:
    """Factors of one layer by (slot, module, expert), rounded to ``dtype`` as a slot table does.

    adapters: the one in each slot.
    """

    def find(slot: int, module: str, expert: int) -> tuple[Array, Array, float] | None:
        factors = adapters[slot].factors.get((layer, module))
        if factors is None:
            return None
        a, b = (f[expert if len(f) > 1 else 0].astype(dtype) for f in (factors.a, factors.b))
        return a, b, float(np.float32(factors.scale))

    return find


def dense_deltas(
    x: Array, slots: Array, modules: Sequence[ModuleShape], lora: LoraLookup
) -> Float64:
    """Deltas [n, sum of widths] of dense modules that share x [n, in]; zeros for slot -1."""
    deltas = np.zeros((len(x), sum(m.out_features for m in modules)))
    start = 0
    for module in modules:
        columns = deltas[:, start : start + module.out_features]
        for slot in np.unique(slots[slots >= 0]).tolist():
            mine = slots == slot
            columns[mine] = _delta(x[mine], slot, module.name, 0, lora)
        start += module.out_features
    return deltas


class BaseOutputs(Protocol):
    """What the base experts give: the outputs that deltas are added to, float64 [rows, width]."""

    def first(self, expert: int, token: Index, choice: Index, x: Float64) -> Float64:
        """First projection's, bias included, for rows (token, choice) of ``expert``."""

    def down(self, expert: int, token: Index, choice: Index, x: Float64) -> Float64:
        """Down projection's."""


@dataclass(frozen=True)
class WeightOutputs:
    """Computed from base weights; each function gives one expert's weight (or bias) on the host."""

    gate_up: Callable[[int], Array]
    down_weight: Callable[[int], Array]
    gate_up_bias: Array | None = None
    down_bias: Array | None = None

    def first(self, expert: int, token: Index, choice: Index, x: Float64) -> Float64:
        """``x Wᵀ + bias``."""
        return _linear(x, self.gate_up(expert), self.gate_up_bias, expert)

    def down(self, expert: int, token: Index, choice: Index, x: Float64) -> Float64:
        """``x Wᵀ + bias``."""
        return _linear(x, self.down_weight(expert), self.down_bias, expert)


@dataclass(frozen=True)
class GivenOutputs:
    """Given, [n, k, width] each."""

    first_rows: Array
    down_rows: Array

    def first(self, expert: int, token: Index, choice: Index, x: Float64) -> Float64:
        """The rows given."""
        return _wide(self.first_rows[token, choice])

    def down(self, expert: int, token: Index, choice: Index, x: Float64) -> Float64:
        """The rows given."""
        return _wide(self.down_rows[token, choice])


def moe_outputs(
    x: Array,
    ids: Array,
    weights: Array,
    slots: Array,
    moe: MoeShape,
    base: BaseOutputs,
    lora: LoraLookup,
) -> Float64:
    """A MoE block's output [n, H] for n tokens: x [n, H], ids and weights [n, k], slots [n]."""
    x64, total = _wide(x), np.zeros((len(x), moe.hidden))
    for expert in np.unique(ids).tolist():
        token, choice = np.nonzero(ids == expert)
        rows, row_slots = x64[token], slots[token]

        def add(
            y: Float64,
            inputs: Float64,
            module: str,
            expert: int = expert,
            row_slots: Array = row_slots,
        ) -> None:
            for slot in np.unique(row_slots[row_slots >= 0]).tolist():
                mine = row_slots == slot
                y[mine] += _delta(inputs[mine], slot, module, expert, lora)

        gate, up = _split(base.first(expert, token, choice, rows), moe)
        add(up, rows, "up_proj")
        if gate is not None:
            add(gate, rows, "gate_proj")
        hidden = activation_oracle(gate, up, moe)
        y = base.down(expert, token, choice, hidden)
        add(y, hidden, "down_proj")
        np.add.at(total, token, _wide(weights)[token, choice][:, None] * y)
    return total


def _delta(x: Array, slot: int, module: str, expert: int, lora: LoraLookup) -> Float64 | float:
    factors = lora(slot, module, expert)
    return 0.0 if factors is None else lora_delta_oracle(x, *factors)


def _linear(x: Float64, weight: Array, bias: Array | None, expert: int) -> Float64:
    y: Float64 = x @ _wide(weight).T
    return y if bias is None else y + _wide(bias[expert])


def _split(first: Float64, moe: MoeShape) -> tuple[Float64 | None, Float64]:
    """(gate, up) columns; gate is None for a block that is not gated."""
    half = moe.intermediate
    if not moe.gated:
        return None, first
    if moe.gate_up_layout == "interleaved":
        return first[:, 0::2], first[:, 1::2]
    left, right = first[:, :half], first[:, half:]
    return (left, right) if moe.gate_up_layout == "gate_first" else (right, left)


def _wide(values: Array) -> Float64:
    return np.asarray(values).astype(np.float64)
