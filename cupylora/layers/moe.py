"""LoRA on a routed-expert block: gate and up, activation, down, weighted sum.

Either step by step on a host's own base outputs (``add_first``, ``activate``, ``add_down``,
``finalize``; or ``activate_with_delta`` and ``finalize_with_delta``, which take two of the steps at
once), or whole with base expert weights (``forward``), whose GEMMs go through the same grouped
kernel. In: x, router output, a BatchPlan of the block's experts. Out: [T, H].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from cupylora.adapters.slots import SlotTable
from cupylora.backend import ArrayBackend, Lap
from cupylora.checks import (
    INT32,
    INT64,
    UINT64,
    check_array,
    check_choice,
    check_int,
    check_slot_entries,
    check_type,
)
from cupylora.dtypes import FLOAT32, resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.interop.convert import borrow
from cupylora.layers._checks import ArrayChecks, check_plan, check_sizes
from cupylora.layers.plan import BatchPlan
from cupylora.layers.workspace import Needs, Workspace, lora_needs
from cupylora.ops.activation import activation
from cupylora.ops.expert_problems import expert_problems
from cupylora.ops.finalize import finalize
from cupylora.ops.grouped_gemm import grouped_gemm
from cupylora.ops.lora_activation import lora_activation
from cupylora.ops.lora_delta import lora_delta
from cupylora.ops.lora_finalize import lora_finalize
from cupylora.ops.permute_rows import permute_rows
from cupylora.shapes import MAX_RANK, MoeShape
from cupylora.worklists import Array, ArrayBundle, GemmProblems, LoraSlice

__all__ = ["STAGES", "MoeLora", "MoeWeights", "moe_needs"]

RowsBy = Literal["pair", "row"]

STAGES = (
    "route",
    "MoE first base",
    "MoE first delta",
    "activation",
    "down base",
    "down delta",
    "finalize",
)
"""What ``forward`` tells its ``lap``, in order."""

# x by row, needed up to the first GEMM, and the down projection's output share one buffer.
_FIRST, _HIDDEN, _MODEL_WIDE, _TILES = "moe first", "moe hidden", "moe rows", "moe tiles"


@dataclass(frozen=True)
class MoeWeights(ArrayBundle):
    """Base weights of the local experts, C-contiguous.

    gate_up: [E, first_width, H], its rows in the model's gate_up_layout (up alone if not gated).
    down: [E, H, I]. Biases [E, first_width] and [E, H] where the model has them.
    """

    gate_up: Array
    down: Array
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


def moe_needs(
    backend: ArrayBackend,
    moe: MoeShape,
    *,
    max_tokens: int,
    max_rank: int,
    dtype: Any,
    base: bool = True,
    outputs: bool = True,
) -> Needs:
    """Workspace of one MoeLora for up to ``max_tokens`` tokens.

    base: for ``forward``, with base weights. outputs: room for the first projection's and down's
    outputs, which ``forward`` needs and a host with arrays of its own does not.
    """
    check_type("moe", moe, MoeShape)
    check_type("backend", backend, ArrayBackend)
    check_sizes(max_tokens, max_rank)
    dtype = resolve_dtype(dtype)
    rows = max_tokens * moe.top_k
    slices = len(moe.modules) - 1
    first = lora_needs(backend, rows, slices, moe.hidden, max_rank, dtype)
    down = lora_needs(backend, rows, 1, moe.intermediate, max_rank, dtype)
    needs = {name: (max(size, down[name][0]), kind) for name, (size, kind) in first.items()}
    needs[_HIDDEN] = (rows * moe.intermediate, dtype)
    if outputs or base:
        needs[_FIRST] = (rows * moe.first_width, dtype)
        needs[_MODEL_WIDE] = (rows * moe.hidden, dtype)
    if base:
        needs |= {_problem(f): (moe.experts, kind) for f, kind in _PROBLEM_DTYPES.items()}
        needs[_problem("count")] = (1, INT32)
        if backend.on_device:
            needs[_TILES] = (moe.experts + 1, INT32)
    return needs


@dataclass(frozen=True)
class _Block:
    """Checked operands of a whole block, all of them arrays of ours."""

    x: Array
    base: MoeWeights
    topk_weights: Array
    residual: Array | None
    out: Array | None


def _problem(field: str) -> str:
    return f"moe problems {field}"


_PROBLEM_DTYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("m", "n", "k"), INT32),
    **dict.fromkeys(("a", "b", "d"), UINT64),
    **dict.fromkeys(("lda", "ldb", "ldd"), INT64),
    "alpha": FLOAT32,
}


def _first_slices(moe: MoeShape) -> tuple[LoraSlice, ...]:
    """Where gate's and up's columns lie in the first projection's output."""
    wide = moe.intermediate
    if not moe.gated:
        return (LoraSlice(wide),)
    if moe.gate_up_layout == "interleaved":
        return (LoraSlice(wide, 0, 2), LoraSlice(wide, 1, 2))
    if moe.gate_up_layout == "up_first":
        return (LoraSlice(wide, wide), LoraSlice(wide, 0))
    return (LoraSlice(wide, 0), LoraSlice(wide, wide))


class MoeLora:
    """The deltas of a MoE block's projections, and the block around them.

    moe: the block's shape; its ``experts`` are the model's, of which a plan's may be a part.
    entries: uint8 [2 or 3, max_loras, 48]: slot-table rows of gate_proj (if gated), up_proj and
    down_proj, on the workspace's backend; looked at anew by each call. What they point at is the
    caller's to keep; ``of_table`` does it.
    workspace: made with ``moe_needs`` of this shape, and shared with other layers.
    dtype: of activations, weights and factors.

    Rows of x, y and x2 lie by ``rows``: "pair", as the plan's row_order numbers (token, choice), or
    "row", sorted by expert as ``plan.routing`` says. Every method raises ArgumentError naming what
    does not fit before anything is enqueued.
    """

    def __init__(
        self, moe: MoeShape, entries: Array, workspace: Workspace, *, max_rank: int, dtype: Any
    ) -> None:
        check_type("moe", moe, MoeShape)
        check_type("workspace", workspace, Workspace)
        self.moe, self.workspace = moe, workspace
        self.max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
        self.dtype = resolve_dtype(dtype)
        self._backend = workspace.backend
        modules = len(moe.modules)
        entries = borrow("entries", entries, on_device=self._backend.on_device)
        _, self.max_loras = check_slot_entries(
            "entries", entries, modules=modules, on_device=self._backend.on_device
        )
        self._first = (entries[: modules - 1], _first_slices(moe))
        self._table: SlotTable | None = None
        self._down = (entries[modules - 1 :], (LoraSlice(moe.hidden),))
        self._check = ArrayChecks(self._backend, self.dtype)

    @classmethod
    def of_table(cls, table: SlotTable, layer: int, workspace: Workspace) -> MoeLora:
        """The MoE block of one layer of a table's model; it keeps the table alive.

        Raises ArgumentError if the model has no experts.
        """
        check_type("table", table, SlotTable)
        moe = table.model.moe
        if moe is None:
            raise ArgumentError(f"model {table.model.name} has no experts")
        entries = table.entries_of(layer, [m.name for m in moe.modules])
        max_rank = table.limits.max_rank
        made = cls(moe, entries, workspace, max_rank=max_rank, dtype=table.dtype)
        made._table = table
        return made

    def outputs(self, plan: BatchPlan) -> tuple[Array, Array]:
        """Room for a batch's base outputs, [R, first_width] and [R, H], in the workspace.

        For a host that has no arrays of its own; ``forward`` uses the same memory.
        """
        view, rows = self.workspace.view, plan.num_rows
        first = view(_FIRST, (rows, self.moe.first_width))
        return first, view(_MODEL_WIDE, (rows, self.moe.hidden))

    def add_first(
        self,
        x: Array,
        y: Array,
        plan: BatchPlan,
        *,
        x_rows: Literal["token", "pair", "row"] = "token",
        y_rows: RowsBy = "pair",
        plan_settled: bool = False,
    ) -> None:
        """Add gate's and up's deltas to the first projection's output ``y`` [R, first_width].

        x: [T, H] by token, or [R, H]. Rows of no adapter, and ghost rows, keep their bits.
        plan_settled: as in ``lora_delta``.
        """
        self._start(plan)
        check_choice("x_rows", x_rows, ("token", "pair", "row"))
        length = plan.num_tokens if x_rows == "token" else plan.num_rows
        x = self._check.read("x", x, length, self.moe.hidden)
        y = self._check.written("y", y, plan.num_rows, self.moe.first_width)
        self._delta(x, y, plan, self._first, x_rows, y_rows, plan_settled)

    def activate(
        self,
        y: Array,
        plan: BatchPlan,
        *,
        rows: RowsBy = "pair",
        bias: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """The down projection's input [R, I] from the first projection's whole output.

        bias: [E, first_width] of the local experts, added first. out: default: the workspace's own
        array, valid until the next layer runs.
        """
        self._start(plan)
        moe = self.moe
        y = self._check.read("y", y, plan.num_rows, moe.first_width)
        bias = self._check.read_if("bias", bias, plan.experts, moe.first_width)
        result = self._hidden(plan, out)
        activation(
            y,
            kind=moe.activation,
            gated=moe.gated,
            layout=moe.gate_up_layout,
            alpha=moe.alpha,
            limit=moe.limit,
            bias=bias,
            routing=plan.routing,
            rows=rows,
            out=result,
        )
        return result if out is None else out

    def activate_with_delta(
        self,
        x: Array,
        y: Array,
        plan: BatchPlan,
        *,
        x_rows: Literal["token", "pair", "row"] = "token",
        rows: RowsBy = "pair",
        bias: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """``add_first`` and ``activate`` at once: ``y`` [R, first_width] is read once and stays.

        Arguments as theirs. One launch and two passes over y fewer; y plus its delta is not rounded
        before the activation, so that rows with a delta may differ from the two steps in the last
        bit.
        """
        self._start(plan)
        moe = self.moe
        check_choice("x_rows", x_rows, ("token", "pair", "row"))
        length = plan.num_tokens if x_rows == "token" else plan.num_rows
        x = self._check.read("x", x, length, moe.hidden)
        y = self._check.read("y", y, plan.num_rows, moe.first_width)
        bias = self._check.read_if("bias", bias, plan.experts, moe.first_width)
        if plan.active == 0:
            return self.activate(y, plan, rows=rows, bias=bias, out=out)
        result = self._hidden(plan, out)
        lora_activation(
            x,
            y,
            plan.segments,
            plan.routing,
            self._first[0],
            in_features=moe.hidden,
            max_rank=self.max_rank,
            kind=moe.activation,
            gated=moe.gated,
            layout=moe.gate_up_layout,
            alpha=moe.alpha,
            limit=moe.limit,
            bias=bias,
            x_rows=x_rows,
            rows=rows,
            out=result,
            workspace=self.workspace.lora(),
            status=self._backend.status,
        )
        return result if out is None else out

    def _hidden(self, plan: BatchPlan, out: Array | None) -> Array:
        """Where the activated rows [R, I] go: ``out``, or the workspace's own array."""
        shape = (plan.num_rows, self.moe.intermediate)
        result = self.workspace.view(_HIDDEN, shape) if out is None else out
        return self._check.written("out", result, *shape)

    def add_down(
        self,
        x: Array,
        y: Array,
        plan: BatchPlan,
        *,
        x_rows: RowsBy = "pair",
        y_rows: RowsBy = "pair",
        plan_settled: bool = False,
    ) -> None:
        """Add down's delta to its base output ``y`` [R, H]; x: [R, I], as ``activate`` gave it."""
        self._start(plan)
        check_choice("x_rows", x_rows, ("pair", "row"))
        x = self._check.read("x", x, plan.num_rows, self.moe.intermediate)
        y = self._check.written("y", y, plan.num_rows, self.moe.hidden)
        self._delta(x, y, plan, self._down, x_rows, y_rows, plan_settled)

    def finalize(
        self,
        y: Array,
        topk_weights: Array,
        plan: BatchPlan,
        *,
        rows: RowsBy = "pair",
        bias: Array | None = None,
        residual: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """Each token's sum over its experts here, weighted, plus ``residual``: [T, H].

        topk_weights: float32 [T, k]. bias: [E, H] of the local experts, weighted with their rows.
        residual, out: [T, H], may be one array; out is allocated if left out.
        """
        self._start(plan)
        y = self._check.read("y", y, plan.num_rows, self.moe.hidden)
        topk_weights, residual, target = self._check_sum(topk_weights, plan, residual, out)
        bias = self._check.read_if("bias", bias, plan.experts, self.moe.hidden)
        result: Array = finalize(
            y, topk_weights, plan.routing, y_rows=rows, bias=bias, residual=residual, out=target
        )
        return result if out is None else out

    def finalize_with_delta(
        self,
        x: Array,
        y: Array,
        topk_weights: Array,
        plan: BatchPlan,
        *,
        x_rows: RowsBy = "pair",
        rows: RowsBy = "pair",
        bias: Array | None = None,
        residual: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """``add_down`` and ``finalize`` at once: ``y`` [R, H] is read once and stays.

        Arguments as theirs. One launch and two passes over y fewer, but B is read for every (token,
        choice): for decode, where few rows share an adapter's expert. Tokens with a delta may
        differ from the two steps in the last bit.
        """
        self._start(plan)
        moe = self.moe
        check_choice("x_rows", x_rows, ("pair", "row"))
        x = self._check.read("x", x, plan.num_rows, moe.intermediate)
        y = self._check.read("y", y, plan.num_rows, moe.hidden)
        topk_weights, residual, target = self._check_sum(topk_weights, plan, residual, out)
        bias = self._check.read_if("bias", bias, plan.experts, moe.hidden)
        if plan.active == 0:
            return self.finalize(
                y, topk_weights, plan, rows=rows, bias=bias, residual=residual, out=out
            )
        result: Array = lora_finalize(
            x,
            y,
            topk_weights,
            plan.segments,
            plan.routing,
            self._down[0],
            in_features=moe.intermediate,
            max_rank=self.max_rank,
            x_rows=x_rows,
            y_rows=rows,
            bias=bias,
            residual=residual,
            out=target,
            workspace=self.workspace.lora(),
            status=self._backend.status,
        )
        return result if out is None else out

    def forward(
        self,
        x: Array,
        topk_ids: Array,
        topk_weights: Array,
        token_to_slot: Array,
        base: MoeWeights,
        plan: BatchPlan,
        *,
        active: int | None = None,
        residual: Array | None = None,
        out: Array | None = None,
        lap: Lap | None = None,
    ) -> Array:
        """The whole block for a batch: ``plan.update`` with ``active``, then ``apply``."""
        self._check_plan(plan)
        token_to_slot = self._ours("token_to_slot", token_to_slot)
        check_array("token_to_slot", token_to_slot, shape=(None,))
        tokens = int(token_to_slot.shape[0])
        block = self._check_block(x, topk_weights, base, plan, tokens, residual, out)
        plan.update(token_to_slot, topk_ids, active=active)
        if lap is not None:
            lap("route")
        result = self._apply(block, plan, lap)
        return result if out is None else out

    def apply(
        self,
        x: Array,
        topk_weights: Array,
        base: MoeWeights,
        plan: BatchPlan,
        *,
        residual: Array | None = None,
        out: Array | None = None,
        lap: Lap | None = None,
    ) -> Array:
        """The whole block for the batch that ``plan`` holds, in any row order: [T, H].

        x: [T, H]; topk_weights: float32 [T, k]; residual, out: as in ``finalize`` (out may be x).
        lap: told each of STAGES but the first once its work is enqueued. Intermediate results are
        rounded to the layer's dtype: after each GEMM, delta and the activation.
        """
        self._start(plan)
        block = self._check_block(x, topk_weights, base, plan, plan.num_tokens, residual, out)
        result = self._apply(block, plan, lap)
        return result if out is None else out

    def _apply(self, block: _Block, plan: BatchPlan, lap: Lap | None) -> Array:
        x, base = block.x, block.base
        done = lap or (lambda _: None)
        first, wide = self.outputs(plan)
        permute_rows(x, plan.routing, out=wide)
        self._gemm(wide, base.gate_up, first, plan)
        done("MoE first base")
        # Permutation and GEMMs stand between the plan and a delta.
        self.add_first(x, first, plan, y_rows="row", plan_settled=True)
        done("MoE first delta")
        hidden = self.activate(first, plan, rows="row", bias=base.gate_up_bias)
        done("activation")
        self._gemm(hidden, base.down, wide, plan)
        done("down base")
        self.add_down(hidden, wide, plan, x_rows="row", y_rows="row", plan_settled=True)
        done("down delta")
        result = self.finalize(
            wide,
            block.topk_weights,
            plan,
            rows="row",
            bias=base.down_bias,
            residual=block.residual,
            out=block.out,
        )
        done("finalize")
        return result

    def _start(self, plan: BatchPlan) -> None:
        self._backend.check_status()
        self._check_plan(plan)

    def _delta(
        self,
        x: Array,
        y: Array,
        plan: BatchPlan,
        module: tuple[Array, tuple[LoraSlice, ...]],
        x_rows: Literal["token", "pair", "row"],
        y_rows: RowsBy,
        plan_settled: bool,
    ) -> None:
        if plan.active == 0:
            return
        entries, slices = module
        lora_delta(
            x,
            y,
            plan.segments,
            plan.routing,
            entries,
            slices,
            in_features=x.shape[1],
            max_rank=self.max_rank,
            x_rows=x_rows,
            y_rows=y_rows,
            workspace=self.workspace.lora(),
            status=self._backend.status,
            max_active=plan.active,
            plan_settled=plan_settled,
        )

    def _gemm(self, x: Array, weights: Array, y: Array, plan: BatchPlan) -> None:
        """y = x Wᵀ for each expert's rows; x and y by row."""
        address = self._backend.address
        problems = expert_problems(
            plan.routing,
            x_ptr=address(x),
            w_ptr=address(weights),
            y_ptr=address(y),
            itemsize=self.dtype.itemsize,
            in_features=x.shape[1],
            out_features=y.shape[1],
            out=self._problems(plan.experts),
        )
        tiles = None
        if self._backend.on_device:
            tiles = self.workspace.view(_TILES, (plan.experts + 1,))
        # Experts are loaded unevenly: twice the mean is a fair guess of the largest.
        likely = min(plan.num_rows, 2 * -(-plan.num_rows // plan.experts))
        grouped_gemm(problems, dtype=self.dtype, max_m=likely, tile_start=tiles)

    def _problems(self, experts: int) -> GemmProblems:
        view = self.workspace.view
        sizes = {f.name: 1 if f.name == "count" else experts for f in fields(GemmProblems)}
        return GemmProblems(**{f: view(_problem(f), (size,)) for f, size in sizes.items()})

    def _check_plan(self, plan: BatchPlan) -> None:
        check_plan(plan, self.max_loras)
        if plan.top_k != self.moe.top_k or plan.start_expert + plan.experts > self.moe.experts:
            raise ArgumentError(
                f"plan is made for experts {plan.start_expert} to "
                f"{plan.start_expert + plan.experts - 1} and top-{plan.top_k}; the block has "
                f"{self.moe.experts} experts and top-{self.moe.top_k}"
            )

    def _ours(self, name: str, value: Any) -> Any:
        return borrow(name, value, on_device=self._backend.on_device)

    def _check_block(
        self,
        x: Array,
        topk_weights: Array,
        base: MoeWeights,
        plan: BatchPlan,
        tokens: int,
        residual: Array | None,
        out: Array | None,
    ) -> _Block:
        moe, experts, check = self.moe, plan.experts, self._check
        check_type("base", base, MoeWeights)
        base = self._ours("base", base)
        x = check.read("x", x, tokens, moe.hidden)
        check.read("base.gate_up", base.gate_up, experts, moe.first_width, moe.hidden)
        check.read("base.down", base.down, experts, moe.hidden, moe.intermediate)
        check.read_if("base.gate_up_bias", base.gate_up_bias, experts, moe.first_width)
        check.read_if("base.down_bias", base.down_bias, experts, moe.hidden)
        return _Block(x, base, *self._check_sum(topk_weights, plan, residual, out, tokens))

    def _check_sum(
        self,
        topk_weights: Array,
        plan: BatchPlan,
        residual: Array | None,
        out: Array | None,
        tokens: int | None = None,
    ) -> tuple[Array, Array | None, Array | None]:
        """Weights, residual and out to work with."""
        tokens = plan.num_tokens if tokens is None else tokens
        weights = self._check.read(
            "topk_weights", topk_weights, tokens, self.moe.top_k, dtype=FLOAT32
        )
        residual = self._check.read_if("residual", residual, tokens, self.moe.hidden)
        if out is not None:
            out = self._check.written("out", out, tokens, self.moe.hidden)
        return weights, residual, out
