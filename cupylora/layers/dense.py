"""LoRA on dense modules that share an input (q, k and v; or o alone).

In: x, the host's own base outputs and a dense BatchPlan. Out: the base outputs plus each token's
delta, in place. What makes the base outputs is the host's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupylora.adapters.slots import SlotTable
from cupylora.backend import ArrayBackend
from cupylora.checks import check_int, check_slices, check_slot_entries, check_type
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.interop.convert import borrow
from cupylora.interop.kinds import is_foreign
from cupylora.layers._checks import (
    ArrayChecks,
    check_items,
    check_plan,
    check_sizes,
)
from cupylora.layers.plan import BatchPlan
from cupylora.layers.workspace import Needs, Workspace, lora_needs
from cupylora.ops.lora_delta import MAX_SLICES, lora_delta
from cupylora.shapes import MAX_RANK, ModelShape, ModuleShape
from cupylora.worklists import Array, LoraSlice

__all__ = ["DenseLora", "dense_needs"]

_MAX_COLUMNS = 2**31 - 1
"""Columns of y are numbered in int32."""


def dense_needs(
    backend: ArrayBackend,
    modules: Sequence[ModuleShape],
    *,
    max_tokens: int,
    max_rank: int,
    dtype: Any,
) -> Needs:
    """Workspace of one DenseLora of ``modules`` for up to ``max_tokens`` tokens.

    Raises ArgumentError for what a DenseLora refuses too.
    """
    modules = _check_modules(modules)
    check_type("backend", backend, ArrayBackend)
    check_sizes(max_tokens, max_rank)
    in_features, dtype = modules[0].in_features, resolve_dtype(dtype)
    # A y of its own makes a module a call of its own, which may be split over K up to more rows.
    needs: dict[str, tuple[int, np.dtype[Any]]] = {}
    for slices in (1, len(modules)):
        for name, (size, kind) in lora_needs(
            backend, max_tokens, slices, in_features, max_rank, dtype
        ).items():
            needs[name] = (max(size, needs.get(name, (0, kind))[0]), kind)
    return needs


def _check_modules(modules: Sequence[ModuleShape]) -> tuple[ModuleShape, ...]:
    """1 to MAX_SLICES dense modules of one in_features."""
    found = tuple(check_items("modules", modules))
    if not 1 <= len(found) <= MAX_SLICES:
        raise ArgumentError(f"modules has {len(found)} entries; use 1 to {MAX_SLICES}")
    for index, module in enumerate(found):
        check_type(f"modules[{index}]", module, ModuleShape)
    if len({m.in_features for m in found}) != 1 or {m.experts for m in found} != {1}:
        raise ArgumentError("modules must be dense and share one in_features")
    return found


def _check_columns(
    modules: Sequence[ModuleShape], columns: Sequence[int] | None
) -> tuple[LoraSlice, ...]:
    """Where each module's columns lie in a fused y."""
    widths = [m.out_features for m in modules]
    if columns is None:
        columns = np.cumsum([0, *widths[:-1]]).tolist()
    starts = check_items("columns", columns)
    if len(starts) != len(widths):
        raise ArgumentError(f"columns has {len(starts)} entries; one per module is needed")
    return tuple(
        LoraSlice(width, check_int(f"columns[{index}]", start, 0, _MAX_COLUMNS - width))
        for index, (width, start) in enumerate(zip(widths, starts, strict=True))
    )


class DenseLora:
    """The deltas of several modules of one x [T, in_features].

    modules: up to MAX_SLICES modules that read this x, so of equal in_features, whatever their
    widths.
    entries: uint8 [len(modules), max_loras, 48], their rows of a slot table, on the workspace's
    backend; looked at anew by each call. What they point at is the caller's to keep; ``of_table``
    does it.
    columns: in a fused y, where each module's columns start; default: one after the other.
    workspace: made with ``dense_needs`` of these modules, and shared with other layers.
    dtype: of x, y and the factors.
    """

    def __init__(
        self,
        modules: Sequence[ModuleShape],
        entries: Array,
        workspace: Workspace,
        *,
        max_rank: int,
        dtype: Any,
        columns: Sequence[int] | None = None,
    ) -> None:
        self.modules = _check_modules(modules)
        check_type("workspace", workspace, Workspace)
        self.max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
        self.dtype = resolve_dtype(dtype)
        self.workspace = workspace
        backend = workspace.backend
        count, on_device = len(self.modules), backend.on_device
        entries = borrow("entries", entries, on_device=on_device)
        _, self.max_loras = check_slot_entries(
            "entries", entries, modules=count, on_device=on_device
        )
        self._fused = _check_columns(self.modules, columns)
        self._width = max(s.y_column + s.out_features for s in self._fused)
        check_slices(self._fused, self._width, "columns")
        self._entries = entries
        self._table: SlotTable | None = None
        self._apart = [
            (entries[i : i + 1], (LoraSlice(m.out_features),)) for i, m in enumerate(self.modules)
        ]
        self._check = ArrayChecks(backend, self.dtype)

    @classmethod
    def of_table(
        cls,
        table: SlotTable,
        layer: int,
        names: Sequence[str],
        workspace: Workspace,
        *,
        columns: Sequence[int] | None = None,
    ) -> DenseLora:
        """The layer of a table's neighbouring modules ``names``; it keeps the table alive.

        Raises ArgumentError if the model says that they do not share an input (v and o, say).
        """
        check_type("table", table, SlotTable)
        model = table.model
        modules = [model.modules[model.module_index(name)] for name in check_items("names", names)]
        if not any(set(modules) <= set(group) for group in model.dense_groups):
            raise ArgumentError(
                f"modules {', '.join(names)} of {model.name} are not dense modules that share an "
                f"input; its groups that do are {_groups(model)}"
            )
        made = cls(
            modules,
            table.entries_of(layer, names),
            workspace,
            max_rank=table.limits.max_rank,
            dtype=table.dtype,
            columns=columns,
        )
        made._table = table
        return made

    @property
    def in_features(self) -> int:
        """Columns of x."""
        return self.modules[0].in_features

    def add(
        self,
        x: Array,
        y: Array | Sequence[Array],
        plan: BatchPlan,
        *,
        plan_settled: bool = False,
    ) -> None:
        """Add each token's delta to the base outputs ``y``; tokens of no adapter keep their bits.

        x: [T, in_features]. y: one array [T, width] that holds every module's columns, or one
        array [T, out_features] per module. plan: a dense one, updated with this batch.
        plan_settled: as in ``lora_delta``.

        Raises ArgumentError naming what does not fit, before anything is enqueued.
        """
        backend = self.workspace.backend
        backend.check_status()
        x = self._check_batch(x, plan)
        if isinstance(y, list | tuple):
            arrays = self._check_apart(y, plan.num_tokens)
            for array, (entries, slices) in zip(arrays, self._apart, strict=True):
                self._add(x, array, entries, slices, plan, plan_settled)
        else:
            fused = self._check_fused(y, plan.num_tokens)
            self._add(x, fused, self._entries, self._fused, plan, plan_settled)

    def _add(
        self,
        x: Array,
        y: Array,
        entries: Array,
        slices: Sequence[LoraSlice],
        plan: BatchPlan,
        plan_settled: bool,
    ) -> None:
        if plan.active == 0:
            return
        lora_delta(
            x,
            y,
            plan.segments,
            plan.routing,
            entries,
            slices,
            in_features=self.in_features,
            max_rank=self.max_rank,
            x_rows="token",
            y_rows="pair",
            workspace=self.workspace.lora(),
            status=self.workspace.backend.status,
            max_active=plan.active,
            plan_settled=plan_settled,
        )

    def _check_batch(self, x: Array, plan: BatchPlan) -> Array:
        check_plan(plan, self.max_loras)
        if plan.experts != 1 or plan.top_k != 1:
            raise ArgumentError(
                f"plan is made for {plan.experts} experts and top-{plan.top_k}; a dense layer "
                "needs one of a single expert"
            )
        return self._check.read("x", x, plan.num_tokens, self.in_features)

    def _check_fused(self, y: Array, tokens: int) -> Array:
        if not is_foreign(y) and not hasattr(y, "dtype"):
            raise ArgumentError(
                f"y is a {type(y).__name__}; an array, or a list or tuple of one per module, is "
                "needed"
            )
        y = self._check.written("y", y, tokens, None)
        if y.shape[1] < self._width:
            raise ArgumentError(
                f"y has {y.shape[1]} columns; the modules' columns end at {self._width}"
            )
        return y

    def _check_apart(self, y: Sequence[Array], tokens: int) -> list[Array]:
        if len(y) != len(self.modules):
            raise ArgumentError(f"y has {len(y)} arrays; one per module, {len(self.modules)}")
        return [
            self._check.written(f"y[{index}]", array, tokens, module.out_features)
            for index, (array, module) in enumerate(zip(y, self.modules, strict=True))
        ]


def _groups(model: ModelShape) -> str:
    return "; ".join(", ".join(m.name for m in group) for group in model.dense_groups)
