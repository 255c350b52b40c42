"""Expert offsets -> one base-weight GEMM problem per expert, on the device (route/pointers.cu)."""

from __future__ import annotations

from cupylora import reference
from cupylora.checks import INT32_MAX, check_int, check_routing
from cupylora.ops._device import (
    address,
    blocks_for,
    device_op,
    enqueue,
    output,
    pack_problems,
)
from cupylora.outputs import problems_output
from cupylora.worklists import GemmProblems, Routing

__all__ = ["expert_problems"]

_THREADS = 256
_TYPES = ("ptr", "i32", "u64", "u64", "u64", "i64", "i64", "i32", "i32", "i32", "bytes80", "ptr")


@device_op(reference.expert_problems)
def expert_problems(
    routing: Routing,
    *,
    x_ptr: int,
    w_ptr: int,
    y_ptr: int,
    itemsize: int,
    in_features: int,
    out_features: int,
    ldx: int | None = None,
    ldy: int | None = None,
    out: GemmProblems | None = None,
) -> GemmProblems:
    check_routing(routing, on_device=True)
    in_features = check_int("in_features", in_features, 1, INT32_MAX)
    out_features = check_int("out_features", out_features, 1, INT32_MAX)
    result = problems_output(output, out, routing.num_experts)
    args = (
        address(routing.expert_first_token_offset),
        routing.num_experts,
        check_int("x_ptr", x_ptr, 0),
        check_int("w_ptr", w_ptr, 0),
        check_int("y_ptr", y_ptr, 0),
        check_int("ldx", in_features if ldx is None else ldx, in_features),
        check_int("ldy", out_features if ldy is None else ldy, out_features),
        check_int("itemsize", itemsize, 1),
        in_features,
        out_features,
        pack_problems(result, count=False),
        address(result.count),
    )
    grid = (blocks_for(routing.num_experts, _THREADS),)
    enqueue("pointers", "expert_problems", _TYPES, grid, _THREADS, args, dependent=True)
    return result
