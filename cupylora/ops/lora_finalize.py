"""Delta of down fused with the weighted sum, on the device (moe/lora_finalize.cu).

Two launches: the shrink of the two-node pair, then one kernel that reads h, B and the base outputs
and writes each token's sum.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

from cupylora import reference
from cupylora.checks import check_array, check_choice
from cupylora.dtypes import FLOAT32
from cupylora.ops._device import (
    address,
    device_op,
    enqueue,
    kernel_dtype,
    output,
    route_arguments,
)
from cupylora.ops._device import workspace as scratch
from cupylora.ops._lora_call import lora_inputs
from cupylora.ops._lora_pair import hidden_layout, shrink_into
from cupylora.worklists import Array, Routing, Segments

__all__ = ["lora_finalize"]

_ARGS = struct.Struct("Qq13Q12i")
"""LoraFinalizeArgs of moe/lora_finalize.cu."""
_TYPES = (f"bytes{_ARGS.size}",)
_THREADS = 256
_COLUMNS = 64
_TARGET_BLOCKS = 768
"""Blocks up to which a block takes 64 columns; beyond, more of them for one look-up."""
_MOST_BLOCKS = 65535


@device_op(reference.lora_finalize)
def lora_finalize(
    x: Array,
    y: Array,
    weights: Array,
    segments: Segments,
    routing: Routing,
    entries: Array,
    *,
    in_features: int,
    max_rank: int,
    x_rows: Literal["pair", "row"] = "pair",
    y_rows: Literal["pair", "row"] = "pair",
    bias: Array | None = None,
    residual: Array | None = None,
    out: Array | None = None,
    workspace: Any = None,
    status: Array | None = None,
    plan_settled: bool = False,
) -> Array:
    check_choice("x_rows", x_rows, ("pair", "row"))
    check_choice("y_rows", y_rows, ("pair", "row"))
    inputs = lora_inputs(
        x,
        segments,
        routing,
        entries,
        1,
        in_features=in_features,
        max_rank=max_rank,
        x_rows=x_rows,
        status=status,
        plan_settled=plan_settled,
    )
    check_array("y", y, dtype=x.dtype, shape=(routing.num_rows, None), on_device=True)
    hidden, tokens = y.shape[1], routing.num_tokens
    check_array("weights", weights, dtype=FLOAT32, shape=(tokens, routing.top_k), on_device=True)
    if bias is not None:
        shape = (routing.num_experts, hidden)
        check_array("bias", bias, dtype=y.dtype, shape=shape, on_device=True)
    if residual is not None:
        check_array("residual", residual, dtype=y.dtype, shape=(tokens, hidden), on_device=True)
    result = output("out", out, (tokens, hidden), y.dtype)
    hidden_at = hidden_layout(
        routing.num_rows,
        1,
        inputs.in_features,
        inputs.max_rank,
        x.dtype,
        experts=routing.num_experts,
    )
    h = scratch(workspace, hidden_at.nbytes, "lora_workspace_bytes")
    if result.size == 0:
        return result
    shrink_into(inputs, address(h), hidden_at)
    columns = _block_columns(tokens, hidden)
    num_tokens, top_k, k_major = route_arguments(routing)
    packed = _ARGS.pack(
        address(h),
        hidden_at.split_stride,
        address(y),
        address(weights),
        address(routing.pair_to_row),
        address(routing.expert_first_token_offset),
        address(entries),
        address(segments.start),
        address(segments.expert),
        address(segments.slot),
        address(segments.count),
        address(bias),
        address(residual),
        address(result),
        inputs.status,
        hidden_at.splits,
        hidden_at.rank_pitch,
        int(y_rows == "pair"),
        num_tokens,
        top_k,
        k_major,
        routing.num_experts,
        hidden,
        inputs.max_loras,
        routing.start_expert,
        inputs.max_rank,
        columns,
    )
    grid = (tokens, -(-hidden // columns))
    enqueue("lora_finalize", kernel_dtype(y), _TYPES, grid, _THREADS, (packed,), dependent=True)
    return result


def _block_columns(tokens: int, hidden: int) -> int:
    """Columns of a block: few where there are few blocks, since each fills an SM a part only."""
    groups = -(-hidden // _COLUMNS)
    least = -(-groups // _MOST_BLOCKS)
    return _COLUMNS * max(least, min(groups, tokens * groups // _TARGET_BLOCKS), 1)
