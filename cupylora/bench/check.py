"""Whether a timed operation computes what it should: sampled rows against a float32 reference.

In: rows of y before and after one launch of the very graphs that are timed. The reference is
computed on the same backend, from the packed factors, by elementwise products and sums alone. An
error is the Frobenius norm of the difference over that of what is expected; limits are those of the
peers' harness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cupylora.adapters.packing import CHUNK_BYTES
from cupylora.backend import ArrayBackend
from cupylora.bench.pools import DTYPE, Factors
from cupylora.errors import CupyloraError
from cupylora.worklists import Array

__all__ = [
    "ERROR_LIMIT",
    "ROW_LIMIT",
    "Check",
    "DeltaCheck",
    "OffReferenceError",
    "Verdict",
    "delta_rows",
    "judge",
    "sample_rows",
    "share",
    "to_float32",
]

ERROR_LIMIT = 1.2e-2
"""Relative error allowed over all compared rows."""

ROW_LIMIT = 4 * ERROR_LIMIT
"""What a single row may have."""

SAMPLED = 64
"""Rows compared of a set; all where there are no more."""

_CHUNK_VALUES = 1 << 26
_PIECES = 8
_WIDTH = CHUNK_BYTES // DTYPE.itemsize
_PIECE_VALUES = _WIDTH // _PIECES

Float32 = npt.NDArray[np.float32]


class OffReferenceError(CupyloraError):
    """An output that is not what it should be: its time is worth nothing."""


@dataclass(frozen=True)
class Verdict:
    """error: over all rows compared. worst_row: the largest of one row. checked: which rows."""

    error: float
    worst_row: float
    checked: str

    def require(self) -> None:
        """Raise OffReferenceError for errors beyond their limits, or that are no numbers."""
        if self.error <= ERROR_LIMIT and self.worst_row <= ROW_LIMIT:
            return
        raise OffReferenceError(
            f"output off the float32 reference: relative error {self.error:.2g} (limit "
            f"{ERROR_LIMIT:g}), worst row {self.worst_row:.2g} (limit {ROW_LIMIT:g}); checked "
            f"{self.checked}"
        )


class Check(ABC):
    """Looks at outputs before and after one launch of each timed graph."""

    @abstractmethod
    def before(self) -> None:
        """Remember what the launches will change."""

    @abstractmethod
    def after(self) -> Verdict:
        """Compare what they left."""


def sample_rows(count: int, seed: int) -> npt.NDArray[np.int64]:
    """All of ``count`` rows, or SAMPLED of them, first and last among them."""
    if count <= SAMPLED:
        return np.arange(count)
    drawn = np.random.default_rng(seed).choice(count - 2, SAMPLED - 2, replace=False) + 1
    return np.sort(np.concatenate([[0], drawn, [count - 1]]))


def share(count: int, every: int) -> str:
    """``"all 8"`` or ``"64 of 400"``."""
    return f"all {every}" if count == every else f"{count} of {every}"


def judge(pairs: Sequence[tuple[Float32, Float32]], checked: str) -> Verdict:
    """Compare (got, expected) arrays [rows, columns] of which rows may differ in length."""
    errors = np.concatenate([np.linalg.norm(got - want, axis=1) for got, want in pairs])
    norms = np.concatenate([np.linalg.norm(want, axis=1) for _, want in pairs])
    if not len(errors):
        return Verdict(0.0, 0.0, "no rows")
    with np.errstate(divide="ignore", invalid="ignore"):
        per_row = np.where(errors == 0, 0.0, errors / norms)
        whole = np.linalg.norm(errors) / np.linalg.norm(norms) if errors.any() else 0.0
    return Verdict(float(whole), float(np.max(per_row)), checked)  # max keeps a NaN


def to_float32(backend: ArrayBackend, values: Array) -> Array:
    """bfloat16 (as such or as its uint16 bits) widened, without arithmetic on bfloat16."""
    xp = backend.xp
    bits = values if values.dtype == np.uint16 else values.view(np.uint16)
    return xp.left_shift(bits.astype(np.uint32), np.uint32(16)).view(np.float32)


def rows_of(backend: ArrayBackend, array: Array, rows: Array) -> Array:
    """Rows [n, columns] of a bfloat16 array as float32."""
    return to_float32(backend, backend.xp.take(array.view(np.uint16), rows, axis=0))


def delta_rows(
    backend: ArrayBackend,
    x: Array,
    factors: Factors,
    blocks: npt.NDArray[np.int64],
    layer: int = 0,
) -> Array:
    """(x Aᵀ) Bᵀ [rows, out] in float32 for rows x [rows, in] float32.

    blocks: of each row, slot · experts + expert.
    """
    xp = backend.xp
    _, slots, experts, rank, wide = factors.a.shape
    out = factors.out_features
    a = factors.a[layer].view(np.uint16).reshape(slots * experts, rank * wide)
    b = factors.b[layer].view(np.uint16).reshape(slots * experts, out * rank)
    order = None if wide < _WIDTH else backend.asarray(_piece_order(rank, wide))
    step = max(1, _CHUNK_VALUES // (rank * max(wide, out)))
    parts = []
    for first in range(0, len(blocks), step):
        chosen = backend.asarray(blocks[first : first + step])
        shrink = _unpacked(backend, xp.take(a, chosen, axis=0), rank, wide, order)
        h = (shrink * x[first : first + step, None, :]).sum(axis=2)
        expand = to_float32(backend, xp.take(b, chosen, axis=0)).reshape(-1, out, rank)
        parts.append((expand * h[:, None, :]).sum(axis=2))
    return xp.concatenate(parts) if parts else xp.zeros((0, out), np.float32)


def _piece_order(rank: int, wide: int) -> npt.NDArray[np.int64]:
    """Where a packed block keeps the 16-byte pieces of its full chunks, row by row."""
    row, chunk, piece = np.ogrid[:rank, : wide // _WIDTH, :_PIECES]
    place = (chunk * rank + row) * _PIECES + (piece ^ (row & (_PIECES - 1)))
    return np.asarray(place).reshape(-1).astype(np.int64)


def _unpacked(
    backend: ArrayBackend, packed: Array, rank: int, wide: int, order: Array | None
) -> Array:
    """[blocks, rank, wide] float32 of packed blocks [blocks, rank · wide] (uint16)."""
    xp, count = backend.xp, packed.shape[0]
    full = wide // _WIDTH * _WIDTH
    parts = []
    if order is not None:
        pieces = packed[:, : rank * full].reshape(count, -1, _PIECE_VALUES)
        parts.append(xp.take(pieces, order, axis=1).reshape(count, rank, full))
    if full < wide:
        parts.append(packed[:, rank * full :].reshape(count, rank, wide - full))
    return to_float32(backend, parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=2))


@dataclass
class DeltaCheck(Check):
    """A delta added in place: rows of one set's y after one launch against y before, plus delta.

    x_rows: of each compared row of y, its row of x. columns: of each module, where its columns
    start in y. blocks: of each compared row, its factors' block.
    """

    backend: ArrayBackend
    x: Array
    y: Array
    modules: Sequence[Factors]
    columns: Sequence[int]
    rows: npt.NDArray[np.int64]
    x_rows: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    layer: int
    _held: Float32 = field(default_factory=lambda: np.zeros((0, 0), np.float32), repr=False)

    def before(self) -> None:
        """Take the rows as they are."""
        self._held = self._rows()

    def compared(self) -> tuple[Float32, Float32]:
        """(got, expected) of the rows."""
        backend = self.backend
        x = rows_of(backend, self.x, backend.asarray(self.x_rows))
        expected = self._held.copy()
        for factors, column in zip(self.modules, self.columns, strict=True):
            delta = delta_rows(backend, x, factors, self.blocks, self.layer)
            expected[:, column : column + factors.out_features] += backend.to_host(delta)
        return self._rows(), expected

    def after(self) -> Verdict:
        """Compare."""
        return judge([self.compared()], f"{share(len(self.rows), int(self.y.shape[0]))} rows")

    def _rows(self) -> Float32:
        rows = self.backend.asarray(self.rows)
        return self.backend.to_host(rows_of(self.backend, self.y, rows))


@dataclass
class AllOf(Check):
    """Several outputs of the same rows, judged as one; ``of``: which outputs, in words."""

    checks: Sequence[DeltaCheck]
    of: str

    def before(self) -> None:
        """Of each."""
        for check in self.checks:
            check.before()

    def after(self) -> Verdict:
        """Compare; the worst of each."""
        verdicts = [check.after() for check in self.checks]
        error = float(np.max([v.error for v in verdicts]))  # max keeps a NaN
        worst = float(np.max([v.worst_row for v in verdicts]))
        return Verdict(error, worst, f"{verdicts[0].checked} of {self.of}")
