"""Router output -> everything that the LoRA of a layer reads of a batch, in one call.

In: ``topk_ids`` and ``token_to_slot``. Out: the Routing of ``route`` and its Segments, as
``build_segments`` makes them.
"""

from __future__ import annotations

import numpy as np

from cupylora.checks import (
    INT32,
    check_array,
    check_choice,
    check_int,
    check_max_loras,
    check_status,
    check_tile_rows,
)
from cupylora.errors import CapacityError
from cupylora.outputs import plan_parts, plan_segments_output
from cupylora.reference._output import output_array
from cupylora.reference.build_segments import build_segments
from cupylora.reference.route import route
from cupylora.shapes import MAX_EXPERTS
from cupylora.worklists import STATUS_CAPACITY, Array, Routing, RowOrder, Segments

__all__ = ["plan"]


def plan(
    topk_ids: Array,
    token_to_slot: Array,
    *,
    num_experts: int,
    max_loras: int,
    tile_rows: int = 8,
    max_active: int | None = None,
    start_expert: int = 0,
    row_order: RowOrder = "token_major",
    out: tuple[Routing, Segments] | None = None,
    workspace: Array | None = None,
    status: Array | None = None,
    fused: bool | None = None,
) -> tuple[Routing, Segments]:
    """``route`` and ``build_segments`` of its rows: the same lists, on the device in less time.

    topk_ids: int32 [T, k] global expert ids. token_to_slot: int32 [T]. tile_rows: one of TILE_ROWS.
    max_active: most different slots in token_to_slot, if known: the device's time follows it then
    in the place of max_loras. It changes no list.
    out: a Routing and a Segments of these sizes to write into, with room for at least
    ``segment_capacity`` segments; what lies past the counts is left as it was.
    workspace: scratch for the device (see ``plan_workspace_bytes``); unused here.
    fused: which way the device takes: one of its own (True), that of the two ops (False), or the
    faster one that the sizes allow (None); unused here.

    Raises ArgumentError for a slot >= max_loras; with ``status`` (int32 [1]) it sets
    STATUS_BAD_SLOT instead and the token counts as one of no adapter. Raises CapacityError for an
    ``out`` without room, and for more different slots than ``max_active``; with ``status`` the
    latter sets STATUS_CAPACITY instead, and tokens of the last slots count as ones of no adapter.
    The device does so only where it relies on ``max_active``; elsewhere the lists are complete.
    """
    check_choice("fused", fused, (None, True, False))
    num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    max_loras = check_max_loras(max_loras)
    tile_rows = check_tile_rows(tile_rows)
    check_array("topk_ids", topk_ids, dtype=INT32, shape=(None, None), on_device=False)
    if max_active is not None:
        check_int("max_active", max_active, 0)
        tokens = (topk_ids.shape[0],)
        check_array("token_to_slot", token_to_slot, dtype=INT32, shape=tokens, on_device=False)
        check_status(status, on_device=False)
    routing_out, segments_out = plan_parts(out)
    segments = plan_segments_output(
        output_array,
        segments_out,
        topk_ids.size,
        num_experts,
        tile_rows=tile_rows,
        max_loras=max_loras,
    )
    if max_active is not None:
        token_to_slot = _first_slots(token_to_slot, max_loras, max_active, status)
    routing = route(
        topk_ids,
        token_to_slot,
        num_experts=num_experts,
        max_loras=max_loras,
        start_expert=start_expert,
        row_order=row_order,
        out=routing_out,
        status=status,
    )
    build_segments(
        routing,
        token_to_slot,
        max_loras=max_loras,
        tile_rows=tile_rows,
        max_segments=len(segments.expert),
        out=segments,
        status=status,
    )
    return routing, segments


def _first_slots(
    token_to_slot: Array, max_loras: int, max_active: int, status: Array | None
) -> Array:
    """token_to_slot with the first ``max_active`` of the slots that it holds, -1 for the others."""
    exists = (token_to_slot >= 0) & (token_to_slot < max_loras)
    held = np.unique(token_to_slot[exists])
    if len(held) <= max_active:
        return token_to_slot
    if status is None:
        raise CapacityError(
            f"token_to_slot has {len(held)} different slots; max_active says {max_active} at most"
        )
    status[0] |= STATUS_CAPACITY
    return np.where(np.isin(token_to_slot, held[max_active:]), np.int32(-1), token_to_slot)
