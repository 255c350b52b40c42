"""The output of a MoE layer's chain against the same chain in float32, for sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cupylora import reference
from cupylora.backend import ArrayBackend
from cupylora.bench.check import Check, Verdict, delta_rows, judge, rows_of, share
from cupylora.bench.draws import Draw
from cupylora.bench.pools import Pool
from cupylora.shapes import MoeShape
from cupylora.worklists import Array

__all__ = ["StepCheck"]

_TOKENS = 16

Float32 = npt.NDArray[np.float32]


@dataclass
class StepCheck(Check):
    """x [T, H], the base outputs y [R, 2I] and y2 [R, H] before a step, and its output [T, H]."""

    backend: ArrayBackend
    moe: MoeShape
    draw: Draw
    pool: Pool
    x: Array
    y: Array
    y2: Array
    out: Array
    _held: tuple[Float32, Float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tokens = np.linspace(0, len(self.draw.slots) - 1, _TOKENS).astype(np.int64)
        self._tokens = np.unique(tokens)
        top_k = self.draw.experts.shape[1]
        self._pairs = (self._tokens[:, None] * top_k + np.arange(top_k)).reshape(-1)

    def before(self) -> None:
        """Take the base outputs, and spoil the output."""
        self._held = (self._rows(self.y, self._pairs), self._rows(self.y2, self._pairs))
        self.backend.clear(self.out)

    def after(self) -> Verdict:
        """Compare."""
        told = share(len(self._tokens), len(self.draw.slots))
        got = self._rows(self.out, self._tokens)
        return judge([(got, self._expected())], f"{told} tokens of the last set")

    def _expected(self) -> Float32:
        backend, moe = self.backend, self.moe
        first, down = (values.copy() for values in self._held)
        gate, up, last = self.pool.modules
        tokens = self._pairs // self.draw.experts.shape[1]
        blocks = self.draw.slots[tokens].astype(np.int64) * moe.experts
        blocks += self.draw.experts.reshape(-1)[self._pairs]
        x = rows_of(backend, self.x, backend.asarray(tokens))
        for factors, columns in zip((gate, up), _columns(moe), strict=True):
            first[:, columns] += backend.to_host(delta_rows(backend, x, factors, blocks))
        hidden = reference.activation(
            first,
            kind=moe.activation,
            gated=moe.gated,
            layout=moe.gate_up_layout,
            alpha=moe.alpha,
            limit=moe.limit,
        )
        down += backend.to_host(delta_rows(backend, backend.asarray(hidden), last, blocks))
        weights = self.draw.weights[self._tokens]
        rows = down.reshape(*weights.shape, -1)
        return np.asarray((rows * weights[:, :, None]).sum(axis=1))

    def _rows(self, array: Array, rows: npt.NDArray[np.int64]) -> Float32:
        index = self.backend.asarray(rows)
        return self.backend.to_host(rows_of(self.backend, array, index))


def _columns(moe: MoeShape) -> tuple[slice, slice]:
    """Gate's and up's columns."""
    if moe.gate_up_layout == "interleaved":
        return slice(0, None, 2), slice(1, None, 2)
    halves = (slice(0, moe.intermediate), slice(moe.intermediate, None))
    return halves if moe.gate_up_layout == "gate_first" else (halves[1], halves[0])
