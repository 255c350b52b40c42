"""Router output -> rows sorted by (expert, slot, pair): the order that all later work follows.

In: ``topk_ids`` and ``token_to_slot``. Out: a Routing, read by ``build_segments``,
``pointer_expand``, ``permute_rows``, ``expert_problems``, ``activation`` and ``finalize``.
"""

from __future__ import annotations

import numpy as np

from cupylora.checks import (
    INT32,
    INT32_MAX,
    check_array,
    check_choice,
    check_int,
    check_max_loras,
    check_status,
)
from cupylora.outputs import routing_output
from cupylora.reference._output import checked_slots, output_array
from cupylora.shapes import MAX_EXPERTS
from cupylora.worklists import MAX_ROWS, Array, Routing, RowOrder

__all__ = ["route"]


def route(
    topk_ids: Array,
    token_to_slot: Array,
    *,
    num_experts: int,
    max_loras: int,
    start_expert: int = 0,
    row_order: RowOrder = "token_major",
    out: Routing | None = None,
    workspace: Array | None = None,
    status: Array | None = None,
) -> Routing:
    """Sort the pairs whose expert is ours by (local expert, slot, pair); base rows (-1) come first.

    topk_ids: int32 [T, k], global expert ids; one outside start_expert ... start_expert +
    num_experts - 1 is not ours and gets no row. The same expert twice in a token gives two rows.
    token_to_slot: int32 [T]; negative for no adapter.
    row_order: how the pair (token t, choice j) is numbered, t·k + j or (k_major) j·T + t; topk_ids
    is [T, k] in both.
    workspace: scratch for the device (see the op's ``*_workspace_bytes``); unused here.
    out: a Routing of the same sizes to write into.

    Raises ArgumentError for a slot >= max_loras; with ``status`` (int32 [1]) it sets
    STATUS_BAD_SLOT instead and the token counts as one of no adapter.
    """
    num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    max_loras = check_max_loras(max_loras)
    start_expert = check_int("start_expert", start_expert, 0, INT32_MAX)
    check_choice("row_order", row_order, ("token_major", "k_major"))
    check_array("topk_ids", topk_ids, dtype=INT32, shape=(None, None), on_device=False)
    tokens, top_k = topk_ids.shape
    check_int("topk_ids.shape[1]", top_k, 1)
    check_int("topk_ids.size", tokens * top_k, 0, MAX_ROWS)
    check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(tokens,), on_device=False)
    check_status(status, on_device=False)
    result = routing_output(
        output_array,
        out,
        num_tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        start_expert=start_expert,
        row_order=row_order,
    )
    slots = np.repeat(checked_slots(token_to_slot, max_loras, status)[:, None], top_k, axis=1)
    experts = topk_ids.astype(np.int64) - start_expert
    if row_order == "k_major":
        experts, slots = experts.T, slots.T
    experts, slots = experts.reshape(-1), slots.reshape(-1)
    ours = np.flatnonzero((experts >= 0) & (experts < num_experts))
    key = experts[ours] * (max_loras + 1) + slots[ours]
    rows = ours[np.argsort(key, kind="stable")]

    result.row_to_pair[: len(rows)] = rows
    result.row_to_pair[len(rows) :] = -1
    result.pair_to_row[:] = -1
    result.pair_to_row[rows] = np.arange(len(rows))
    result.expert_first_token_offset[0] = 0
    np.cumsum(
        np.bincount(experts[ours], minlength=num_experts), out=result.expert_first_token_offset[1:]
    )
    return result
