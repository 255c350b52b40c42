"""What each token's slot holds -> rank and factor addresses of every row (route/pointers.cu).

In: a Routing and a TokenLora. Out: a RowLora for ``build_problems``.
"""

from __future__ import annotations

from cupylora import reference
from cupylora.checks import check_routing, check_token_lora
from cupylora.ops._device import (
    address,
    blocks_for,
    device_op,
    enqueue,
    output,
    route_arguments,
)
from cupylora.outputs import row_lora_output
from cupylora.worklists import Routing, RowLora, TokenLora

__all__ = ["pointer_expand"]

_THREADS = 256
_TYPES = ("ptr", "ptr", *("i32",) * 6, *("ptr",) * 6, *("ptr",) * 6)


@device_op(reference.pointer_expand)
def pointer_expand(routing: Routing, tokens: TokenLora, *, out: RowLora | None = None) -> RowLora:
    check_routing(routing, on_device=True)
    modules = check_token_lora(tokens, routing.num_tokens, on_device=True)
    result = row_lora_output(output, out, modules, routing.num_rows)
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
