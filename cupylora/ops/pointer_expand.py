"""What each token's slot holds -> rank and factor addresses of every row (route/pointers.cu).

In: a Routing and a TokenLora. Out: a RowLora for ``build_problems``.
"""

from __future__ import annotations

import numpy as np

from cupylora import reference
from cupylora.checks import check_routing, check_token_lora
from cupylora.errors import ArgumentError
from cupylora.ops._device import (
    address,
    blocks_for,
    device_op,
    enqueue,
    output,
    route_arguments,
)
from cupylora.worklists import Routing, RowLora, TokenLora

__all__ = ["pointer_expand"]

_THREADS = 256
_TYPES = ("ptr", "ptr", *("i32",) * 6, *("ptr",) * 6, *("ptr",) * 6)


@device_op(reference.pointer_expand)
def pointer_expand(routing: Routing, tokens: TokenLora, *, out: RowLora | None = None) -> RowLora:
    check_routing(routing, on_device=True)
    modules = check_token_lora(tokens, routing.num_tokens, on_device=True)
    result = _output(out, modules, routing.num_rows)
    args = (
        address(routing.row_to_pair),
        address(routing.expert_first_token_offset),
        *route_arguments(routing),
        routing.num_experts,
        routing.start_expert,
        modules,
        *map(
            address,
            (
                tokens.rank,
                tokens.a_ptr,
                tokens.b_ptr,
                tokens.a_stride,
                tokens.b_stride,
                tokens.scale,
            ),
        ),
        *map(
            address,
            (result.token, result.expert, result.rank, result.a_ptr, result.b_ptr, result.scale),
        ),
    )
    if routing.num_rows:
        grid = (blocks_for(routing.num_rows, _THREADS),)
        enqueue("pointers", "pointer_expand", _TYPES, grid, _THREADS, args)
    return result


def _output(out: RowLora | None, modules: int, rows: int) -> RowLora:
    if out is not None and not isinstance(out, RowLora):
        raise ArgumentError(f"out is a {type(out).__name__}; a RowLora is needed")
    one, per_module = (rows,), (modules, rows)
    fields = {
        "token": (one, np.int32),
        "expert": (one, np.int32),
        "rank": (per_module, np.int32),
        "a_ptr": (per_module, np.uint64),
        "b_ptr": (per_module, np.uint64),
        "scale": (per_module, np.float32),
    }
    return RowLora(
        **{
            f: output(f"out.{f}", out and getattr(out, f), shape, dtype)
            for f, (shape, dtype) in fields.items()
        }
    )
