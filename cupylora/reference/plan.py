"""Router output -> everything that the LoRA of a layer reads of a batch, in one call.

In: ``topk_ids`` and ``token_to_slot``. Out: the Routing of ``route`` and its Segments, as
``build_segments`` makes them.
"""

from __future__ import annotations

from cupylora.checks import (
    INT32,
    check_array,
    check_choice,
    check_int,
    check_max_loras,
    check_tile_rows,
)
from cupylora.outputs import plan_parts, plan_segments_output
from cupylora.reference._output import output_array
from cupylora.reference.build_segments import build_segments
from cupylora.reference.route import route
from cupylora.shapes import MAX_EXPERTS
from cupylora.worklists import Array, Routing, RowOrder, Segments

__all__ = ["plan"]


def plan(
    topk_ids: Array,
    token_to_slot: Array,
    *,
    num_experts: int,
    max_loras: int,
    tile_rows: int = 8,
    start_expert: int = 0,
    row_order: RowOrder = "token_major",
    out: tuple[Routing, Segments] | None = None,
    workspace: Array | None = None,
    status: Array | None = None,
    fused: bool | None = None,
) -> tuple[Routing, Segments]:
    """``route`` and ``build_segments`` of its rows: the same lists, on the device in less time.

    topk_ids: int32 [T, k] global expert ids. token_to_slot: int32 [T]. tile_rows: one of TILE_ROWS.
    out: a Routing and a Segments of these sizes to write into, with room for at least
    ``segment_capacity`` segments; what lies past the counts is left as it was.
    workspace: scratch for the device (see ``plan_workspace_bytes``); unused here.
    fused: which way the device takes: one of its own (True), that of the two ops (False), or the
    faster one that the sizes allow (None); unused here.

    Raises ArgumentError for a slot >= max_loras; with ``status`` (int32 [1]) it sets
    STATUS_BAD_SLOT instead and the token counts as one of no adapter. Raises CapacityError for an
    ``out`` without room.
    """
    check_choice("fused", fused, (None, True, False))
    num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    max_loras = check_max_loras(max_loras)
    tile_rows = check_tile_rows(tile_rows)
    check_array("topk_ids", topk_ids, dtype=INT32, shape=(None, None), on_device=False)
    routing_out, segments_out = plan_parts(out)
    segments = plan_segments_output(
        output_array,
        segments_out,
        topk_ids.size,
        num_experts,
        tile_rows=tile_rows,
        max_loras=max_loras,
    )
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
