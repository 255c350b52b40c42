"""Shrink and expand of every tile, added into y in place, on the device (lora/).

In: x, the tiles of ``build_segments`` and the slot entries of the modules that share x. Out: y.
Checks, then the kernel that ``_lora_choice`` names; all of them give a row the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupylora import reference
from cupylora.checks import check_array, check_choice, check_int, check_slices
from cupylora.dtypes import FLOAT32
from cupylora.errors import ArgumentError
from cupylora.ops._device import device_op, is_hopper
from cupylora.ops._lora_call import MAX_SLICES, LoraInputs, lora_inputs
from cupylora.ops._lora_choice import Choice, KernelName, Workload, choose
from cupylora.ops._lora_fused import run_fused
from cupylora.ops._lora_pair import lora_workspace_bytes, run_pair
from cupylora.reference._rows import RowIndex
from cupylora.worklists import Array, LoraSlice, Routing, Segments

__all__ = ["MAX_SLICES", "LoraSlice", "lora_delta", "lora_workspace_bytes"]


@device_op(reference.lora_delta, writes=("y",))
def lora_delta(
    x: Array,
    y: Array,
    segments: Segments,
    routing: Routing,
    entries: Array,
    slices: Sequence[LoraSlice],
    *,
    in_features: int,
    max_rank: int,
    x_rows: RowIndex = "token",
    y_rows: RowIndex = "pair",
    workspace: Any = None,
    status: Array | None = None,
    kernel: Choice = "auto",
    max_active: int | None = None,
    plan_settled: bool = False,
) -> None:
    check_choice("y_rows", y_rows, ("pair", "row"))
    check_choice("kernel", kernel, ("auto", "pair", "cluster", "ring"))
    if max_active is not None:
        max_active = check_int("max_active", max_active, 0)
    inputs = lora_inputs(
        x,
        segments,
        routing,
        entries,
        len(slices),
        in_features=in_features,
        max_rank=max_rank,
        x_rows=x_rows,
        status=status,
        plan_settled=plan_settled,
    )
    check_array("y", y, dtype=x.dtype, shape=(routing.num_rows, None), on_device=True)
    check_slices(slices, y.shape[1])
    work = _workload(inputs, slices, max_active)
    chosen = _choose(x, work, kernel)
    if chosen == "pair":
        run_pair(inputs, y, slices, y_rows, workspace)
    elif work.rows > 0:
        run_fused(inputs, y, slices, y_rows, chosen, work)


def _choose(x: Array, work: Workload, kernel: Choice) -> KernelName:
    if x.dtype != FLOAT32:
        return choose(work, kernel=kernel, hopper=is_hopper())
    if kernel not in ("auto", "pair"):
        raise ArgumentError(
            f"kernel is {kernel!r}, which has no float32 form; use 'pair' or 'auto'"
        )
    return "pair"


def _workload(inputs: LoraInputs, slices: Sequence[LoraSlice], max_active: int | None) -> Workload:
    routing, segments = inputs.routing, inputs.segments
    active = min(inputs.max_loras, max(1, routing.num_tokens))
    return Workload(
        rows=routing.num_rows,
        experts=routing.num_experts,
        active=active if max_active is None else max(1, min(active, max_active)),
        in_features=inputs.in_features,
        widths=tuple(part.out_features for part in slices),
        max_rank=inputs.max_rank,
        tile_rows=segments.tile_rows,
        tile_capacity=inputs.tiles,
    )
