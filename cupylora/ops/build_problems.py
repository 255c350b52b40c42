"""Rows with factor addresses -> shrink and expand problems of one module (route/pointers.cu).

In: a RowLora and its Routing. Out: LoraProblems for ``grouped_gemm`` or a host's own grouped GEMM.
"""

from __future__ import annotations

import struct

from cupylora import reference
from cupylora.checks import INT32_MAX, check_int, check_routing, check_row_lora
from cupylora.ops._device import (
    address,
    blocks_for,
    device_op,
    enqueue,
    output,
    pack_problems,
    status_pointer,
)
from cupylora.outputs import lora_problems_output
from cupylora.shapes import MAX_RANK
from cupylora.worklists import Array, LoraProblems, Routing, RowLora

__all__ = ["build_problems"]

_THREADS = 256
_RUN_THREADS = 1024
_LISTS = ("bytes32", "bytes64", "bytes80", "bytes80", "ptr", "ptr", "ptr", "i32")
_ROWS = ("ptr", "i32", "i32", *_LISTS, "ptr")
_RUNS = ("ptr", "i32", *_LISTS, "i32", "ptr")


@device_op(reference.build_problems)
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
    check_routing(routing, on_device=True)
    modules = check_row_lora(rows, routing.num_rows, on_device=True)
    module = check_int("module", module, 0, modules - 1)
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    out_features = check_int("out_features", out_features, 1, INT32_MAX)
    shape = struct.pack(
        "3Q2q5i4x",
        check_int("x_ptr", x_ptr, 0),
        check_int("h_ptr", h_ptr, 0),
        check_int("y_ptr", y_ptr, 0),
        check_int("ldx", in_features if ldx is None else ldx, in_features),
        check_int("ldy", out_features if ldy is None else ldy, out_features),
        check_int("itemsize", itemsize, 1),
        check_int("h_itemsize", itemsize if h_itemsize is None else h_itemsize, 1),
        in_features,
        out_features,
        check_int("max_rank", max_rank, 1, MAX_RANK),
    )
    slices = 0 if splitk_slices is None else check_int("splitk_slices", splitk_slices, 1)
    room = max(1, routing.num_rows)
    if max_problems is not None:
        # How many there are, only the device knows: a shorter list could not be refused in time.
        room = check_int("max_problems", max_problems, room)
    result = lora_problems_output(output, out, room, split=slices > 0)
    arrays = (rows.rank, rows.a_ptr, rows.b_ptr, rows.scale)
    lists = (
        struct.pack("4Q", *(address(array[module]) for array in arrays)),
        shape,
        pack_problems(result.shrink, count=False),
        pack_problems(result.expand, count=False),
        address(result.shrink.count),
        address(result.expand.count),
        address(result.splitk_offsets),
        slices,
    )
    offsets, experts = address(routing.expert_first_token_offset), routing.num_experts
    flag = status_pointer(status)
    if aggregate:
        args = (offsets, experts, *lists, room, flag)
        enqueue("pointers", "problem_runs", _RUNS, (1,), _RUN_THREADS, args)
    else:
        grid = (blocks_for(routing.num_rows + 1, _THREADS),)
        all_rows = (offsets, experts, routing.num_rows, *lists, flag)
        enqueue("pointers", "problem_rows", _ROWS, grid, _THREADS, all_rows)
    return result
