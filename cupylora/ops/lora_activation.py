"""Deltas of gate and up fused with the activation, on the device (lora/expand_activation.cu).

Two launches: the shrink of the two-node pair, then one kernel that reads h and the base outputs and
writes the activated rows, those of no adapter included.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

from cupylora import reference
from cupylora.activations import activation_form
from cupylora.checks import check_array, check_choice
from cupylora.dtypes import FLOAT32
from cupylora.ops._device import (
    address,
    device_op,
    enqueue,
    kernel_dtype,
    output,
    resident_blocks,
)
from cupylora.ops._device import workspace as scratch
from cupylora.ops._lora_call import lora_inputs
from cupylora.ops._lora_pair import hidden_layout, shrink_into
from cupylora.ops._row_items import WARP, all_vectors, row_blocks
from cupylora.reference._rows import RowIndex
from cupylora.shapes import ActivationKind, GateUpLayout
from cupylora.worklists import Array, Routing, Segments

__all__ = ["lora_activation"]

_ARGS = struct.Struct("Qq12Q12i2f")
"""ExpandActivationArgs of lora/expand_activation.cu."""
_TYPES = (f"bytes{_ARGS.size}",)
_COLUMNS = 64
_F32_COLUMNS = 128
_THREADS = 128
_FEW_ITEMS = 1024
"""Up to so many items a block is one warp, so that every SM of a large device has some."""


@device_op(reference.lora_activation)
def lora_activation(
    x: Array,
    y: Array,
    segments: Segments,
    routing: Routing,
    entries: Array,
    *,
    in_features: int,
    max_rank: int,
    kind: ActivationKind,
    gated: bool,
    layout: GateUpLayout = "gate_first",
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: Array | None = None,
    x_rows: RowIndex = "token",
    rows: Literal["pair", "row"] = "pair",
    out: Array | None = None,
    workspace: Any = None,
    status: Array | None = None,
    plan_settled: bool = False,
) -> Array:
    form = activation_form(kind, gated, layout, alpha, limit)
    check_choice("rows", rows, ("pair", "row"))
    inputs = lora_inputs(
        x,
        segments,
        routing,
        entries,
        2 if form.gated else 1,
        in_features=in_features,
        max_rank=max_rank,
        x_rows=x_rows,
        status=status,
        plan_settled=plan_settled,
    )
    check_array("y", y, dtype=x.dtype, shape=(routing.num_rows, None), on_device=True)
    width = y.shape[1]
    hidden = form.hidden("y", width)
    if bias is not None:
        shape = (routing.num_experts, width)
        check_array("bias", bias, dtype=y.dtype, shape=shape, on_device=True)
    result = output("out", out, (routing.num_rows, hidden), y.dtype, zero=True)
    hidden_at = hidden_layout(
        routing.num_rows,
        inputs.slices,
        inputs.in_features,
        inputs.max_rank,
        x.dtype,
        experts=routing.num_experts,
    )
    h = scratch(workspace, hidden_at.nbytes, "lora_workspace_bytes")
    if result.size == 0:
        return result
    shrink_into(inputs, address(h), hidden_at)
    vector = all_vectors(y, result, bias)
    kernel, columns, part_rows = _kernel(y, segments.tile_rows, vector)
    parts = segments.tile_rows // part_rows
    packed = _ARGS.pack(
        address(h),
        hidden_at.split_stride,
        address(y),
        address(routing.row_to_pair),
        address(segments.tiles),
        address(segments.tile_count),
        address(entries),
        address(segments.start),
        address(segments.expert),
        address(segments.slot),
        address(segments.count),
        address(bias),
        address(result),
        inputs.status,
        hidden_at.splits,
        hidden_at.rank_pitch,
        int(rows == "pair"),
        routing.num_rows,
        inputs.max_loras,
        routing.start_expert,
        inputs.max_rank,
        parts,
        hidden,
        *form.codes,
        form.alpha,
        form.limit,
    )
    program = f"lora_activation_{kernel_dtype(y)}"
    items = inputs.tiles * -(-hidden // columns) * parts
    items += -(-routing.num_rows // WARP) * row_blocks(hidden, y.dtype.itemsize)
    threads = WARP if items <= _FEW_ITEMS else _THREADS
    blocks = min(-(-items * WARP // threads), resident_blocks(program, kernel, threads))
    enqueue(program, kernel, _TYPES, (blocks,), threads, (packed,), dependent=True)
    return result


def _kernel(y: Array, tile_rows: int, vector: bool) -> tuple[str, int, int]:
    """(kernel, columns and rows of a tile item) of the program for y's dtype."""
    if y.dtype == FLOAT32:
        return "vector" if vector else "element", _F32_COLUMNS, tile_rows
    if not vector:
        return "element", _COLUMNS, 8
    return ("8", _COLUMNS, 8) if tile_rows == 8 else ("16", _COLUMNS, 16)
