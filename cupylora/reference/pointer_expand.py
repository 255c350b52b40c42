"""What each token's slot holds -> rank and factor addresses of every sorted row.

In: a Routing and a TokenLora. Out: a RowLora for ``build_problems``.
"""

from __future__ import annotations

import numpy as np

from cupylora.checks import check_token_lora
from cupylora.outputs import row_lora_output
from cupylora.reference._output import output_array
from cupylora.reference._rows import valid_rows
from cupylora.worklists import Routing, RowLora, TokenLora

__all__ = ["pointer_expand"]


def pointer_expand(routing: Routing, tokens: TokenLora, *, out: RowLora | None = None) -> RowLora:
    """Per row its token and local expert, and per module [M, R] its rank, A, B and scale.

    A factor's address is the slot's base + (local expert + start_expert) · stride; stride 0 is a
    factor that all experts share. Rows of no adapter get rank 0, null addresses and scale 0; ghost
    rows also token -1 and expert -1. Every element is written, none left as it was.

    Raises ArgumentError naming an array that does not fit the routing.
    """
    rows = valid_rows(routing)
    modules = check_token_lora(tokens, routing.num_tokens, on_device=False)
    count = len(rows)
    result = row_lora_output(output_array, out, modules, routing.num_rows)
    result.token[:count], result.token[count:] = rows.token, -1
    result.expert[:count], result.expert[count:] = rows.expert, -1
    result.rank[:, :count], result.rank[:, count:] = tokens.rank[:, rows.token], 0
    has_lora = result.rank[:, :count] > 0
    expert = rows.expert + routing.start_expert
    for pointer, base, stride in (
        (result.a_ptr, tokens.a_ptr, tokens.a_stride),
        (result.b_ptr, tokens.b_ptr, tokens.b_stride),
    ):
        offset = (stride[:, rows.token] * expert).view(np.uint64)
        address = base[:, rows.token] + offset
        pointer[:, :count] = np.where(has_lora, address, np.uint64(0))
        pointer[:, count:] = 0
    result.scale[:, :count] = np.where(has_lora, tokens.scale[:, rows.token], np.float32(0))
    result.scale[:, count:] = 0
    return result
