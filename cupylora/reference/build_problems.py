"""Rows with their factor addresses -> shrink and expand GEMM problems of one LoRA module.

In: a RowLora and its Routing. Out: LoraProblems for ``grouped_gemm`` or a host's own grouped GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cupylora.checks import INT32_MAX, check_int, check_row_lora, check_status
from cupylora.errors import CapacityError
from cupylora.outputs import lora_problems_output
from cupylora.reference._output import checked_ranks, output_array
from cupylora.reference._rows import valid_rows
from cupylora.shapes import MAX_RANK
from cupylora.worklists import Array, GemmProblems, LoraProblems, Routing, RowLora

__all__ = ["build_problems"]


def build_problems(
    rows: RowLora,
    routing: Routing,
    module: int,
    *,
    x_ptr: int,
    h_ptr: int,
    y_ptr: int,
    itemsize: int,
    h_itemsize: int | None = None,
    in_features: int,
    out_features: int,
    max_rank: int,
    ldx: int | None = None,
    ldy: int | None = None,
    aggregate: bool = True,
    splitk_slices: int | None = None,
    max_problems: int | None = None,
    out: LoraProblems | None = None,
    status: Array | None = None,
) -> LoraProblems:
    """Problems of ``module``: shrink h = x Aᵀ [m, rank] and expand y = scale · h Bᵀ [m, out].

    x_ptr, h_ptr, y_ptr: addresses of row 0 of the permuted x [R, ldx], of h [R, max_rank] and of
    the permuted y [R, ldy]; ldx and ldy, in elements, default to in_features and out_features.
    itemsize: bytes of an element of x and y; h_itemsize: of h, by default the same.
    aggregate: one problem for each maximal run of valid rows that share expert, A, B, rank and
    scale; else one a row for all R rows, in which a ghost row has m = 0 and null addresses.
    splitk_slices: when given, splitk_offsets[p] = first row of p · max_rank · splitk_slices, closed
    by the entry after the last problem; else splitk_offsets is None.
    max_problems: room of the lists, by default one per row. What lies past the count in ``out`` is
    left as it was.

    Rows of rank 0 make problems with n = 0 (shrink) and k = 0 (expand) and a null B. Raises
    CapacityError for more problems than ``max_problems``, ArgumentError for a rank below 0 or above
    ``max_rank``; with ``status`` (int32 [1]) the latter sets STATUS_BAD_RANK instead and the row
    counts as rank 0.
    """
    valid = len(valid_rows(routing))
    modules = check_row_lora(rows, routing.num_rows, on_device=False)
    module = check_int("module", module, 0, modules - 1)
    check_status(status, on_device=False)
    layout = _Layout(
        x_ptr=check_int("x_ptr", x_ptr, 0),
        h_ptr=check_int("h_ptr", h_ptr, 0),
        y_ptr=check_int("y_ptr", y_ptr, 0),
        itemsize=check_int("itemsize", itemsize, 1),
        h_itemsize=check_int("h_itemsize", itemsize if h_itemsize is None else h_itemsize, 1),
        in_features=check_int("in_features", in_features, 1, INT32_MAX),
        out_features=check_int("out_features", out_features, 1, INT32_MAX),
        max_rank=check_int("max_rank", max_rank, 1, MAX_RANK),
        ldx=check_int("ldx", in_features if ldx is None else ldx, in_features),
        ldy=check_int("ldy", out_features if ldy is None else ldy, out_features),
    )
    if splitk_slices is not None:
        splitk_slices = check_int("splitk_slices", splitk_slices, 1)
    room = max(1, routing.num_rows) if max_problems is None else max_problems
    room = check_int("max_problems", room, 1)
    result = lora_problems_output(output_array, out, room, split=splitk_slices is not None)

    runs = _runs(rows, module, valid, max_rank, aggregate=aggregate, status=status)
    if len(runs) > room:
        raise CapacityError(
            f"the rows form {len(runs)} problems, but there is room for {room}; raise "
            "max_problems (one per row fits any order)"
        )
    _write_shrink(result.shrink, runs, layout)
    _write_expand(result.expand, runs, layout)
    if splitk_slices is not None and result.splitk_offsets is not None:
        bounds = np.append(runs.first, runs.covered)
        result.splitk_offsets[: len(bounds)] = bounds * (max_rank * splitk_slices)
    return result


@dataclass(frozen=True)
class _Layout:
    x_ptr: int
    h_ptr: int
    y_ptr: int
    itemsize: int
    h_itemsize: int
    in_features: int
    out_features: int
    max_rank: int
    ldx: int
    ldy: int

    def x(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return _address(self.x_ptr, row, self.ldx * self.itemsize)

    def h(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return _address(self.h_ptr, row, self.max_rank * self.h_itemsize)

    def y(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return _address(self.y_ptr, row, self.ldy * self.itemsize)


def _address(base: int, row: npt.NDArray[np.int64], row_bytes: int) -> npt.NDArray[np.uint64]:
    return np.uint64(base) + row.astype(np.uint64) * np.uint64(row_bytes)


@dataclass(frozen=True)
class _Runs:
    """Rows that make one problem: first row, number of rows (0: a ghost), and what they share."""

    first: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int32]
    a_ptr: npt.NDArray[np.uint64]
    b_ptr: npt.NDArray[np.uint64]
    scale: npt.NDArray[np.float32]
    covered: int

    def __len__(self) -> int:
        return len(self.first)

    @property
    def ghost(self) -> npt.NDArray[np.bool_]:
        return np.equal(self.rows, 0)


def _runs(
    rows: RowLora,
    module: int,
    valid: int,
    max_rank: int,
    *,
    aggregate: bool,
    status: Array | None,
) -> _Runs:
    covered = valid if aggregate else len(rows.token)
    ranks = checked_ranks(rows.rank[module, :valid], max_rank, status, f"module {module}, row")
    rank = np.zeros(covered, np.int32)
    rank[:valid] = ranks
    # Rows without a rank are alike whatever else they carry, so that base rows join one run.
    a_ptr, b_ptr, scale = (
        np.where(rank > 0, values[module, :covered], values.dtype.type(0))
        for values in (rows.a_ptr, rows.b_ptr, rows.scale)
    )
    if aggregate:
        keys = (rows.expert[:valid], rank, a_ptr, b_ptr, scale.view(np.uint32))
        changes = np.zeros(max(0, valid - 1), dtype=bool)
        for key in keys:
            changes |= key[1:] != key[:-1]
        first = np.flatnonzero(np.concatenate(([valid > 0], changes)))
        sizes = np.diff(np.append(first, valid))
    else:
        first = np.arange(covered)
        sizes = (first < valid).astype(np.int64)
    return _Runs(first, sizes, rank[first], a_ptr[first], b_ptr[first], scale[first], covered)


def _write_shrink(problems: GemmProblems, runs: _Runs, layout: _Layout) -> None:
    count = len(runs)
    problems.count[0] = count
    problems.m[:count] = runs.rows
    problems.n[:count] = runs.rank
    problems.k[:count] = np.where(runs.ghost, 0, layout.in_features)
    problems.a[:count] = np.where(runs.ghost, np.uint64(0), layout.x(runs.first))
    problems.b[:count] = runs.a_ptr
    problems.d[:count] = np.where(runs.ghost, np.uint64(0), layout.h(runs.first))
    problems.lda[:count] = layout.ldx
    problems.ldb[:count] = layout.in_features
    problems.ldd[:count] = layout.max_rank
    problems.alpha[:count] = 1


def _write_expand(problems: GemmProblems, runs: _Runs, layout: _Layout) -> None:
    count = len(runs)
    problems.count[0] = count
    problems.m[:count] = runs.rows
    problems.n[:count] = np.where(runs.ghost, 0, layout.out_features)
    problems.k[:count] = runs.rank
    problems.a[:count] = np.where(runs.ghost, np.uint64(0), layout.h(runs.first))
    problems.b[:count] = runs.b_ptr
    problems.d[:count] = np.where(runs.ghost, np.uint64(0), layout.y(runs.first))
    problems.lda[:count] = layout.max_rank
    problems.ldb[:count] = runs.rank
    problems.ldd[:count] = layout.ldy
    problems.alpha[:count] = runs.scale
