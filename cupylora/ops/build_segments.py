"""Sorted rows -> segments and row tiles, on the device (route/segments.cu).

In: a Routing (ours or another stack's) and ``token_to_slot``. Out: Segments, the work list of
``lora_delta``. One launch up to 1024 rows, two above.
"""

from __future__ import annotations

from cupylora import reference
from cupylora.checks import (
    INT32,
    check_array,
    check_int,
    check_max_loras,
    check_routing,
    check_tile_rows,
)
from cupylora.ops._device import (
    address,
    blocks_for,
    check_aligned,
    device_op,
    enqueue,
    output,
    route_arguments,
    status_pointer,
)
from cupylora.ops._device import workspace as scratch
from cupylora.outputs import segments_output
from cupylora.worklists import Array, Routing, Segments, tile_capacity

__all__ = ["build_segments", "segments_workspace_bytes"]

_THREADS = 1024
_SUMMARY_BYTES = 16
_ROWS = ("ptr", "ptr", "ptr", "i32", "i32", "i32", "i32", "i32", "i32", "ptr")
_COUNTS = (*_ROWS, "ptr")
_FILL = (*_ROWS, "i32", "i32", "ptr", "ptr", "ptr", "ptr", "ptr", "ptr", "ptr")


@device_op(reference.build_segments)
def build_segments(
    routing: Routing,
    token_to_slot: Array,
    *,
    max_loras: int,
    tile_rows: int = 8,
    max_segments: int | None = None,
    out: Segments | None = None,
    workspace: Array | None = None,
    status: Array | None = None,
) -> Segments:
    max_loras = check_max_loras(max_loras)
    tile_rows = check_tile_rows(tile_rows)
    check_routing(routing, on_device=True)
    tokens, rows = routing.num_tokens, routing.num_rows
    check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(tokens,), on_device=True)
    room = max(1, rows) if max_segments is None else check_int("max_segments", max_segments, 1)
    tile_room = tile_capacity(rows, room, tile_rows)
    result = segments_output(output, out, room, tile_room, tile_rows=tile_rows, max_loras=max_loras)

    check_aligned("out.tiles", result.tiles)
    blocks = blocks_for(rows, _THREADS)
    summaries = None
    if blocks > 1:
        size = segments_workspace_bytes(rows)
        summaries = scratch(workspace, size, "segments_workspace_bytes")
    status_word = status_pointer(status)
    head = (
        address(routing.row_to_pair),
        address(routing.expert_first_token_offset),
        address(token_to_slot),
        *route_arguments(routing),
        routing.num_experts,
        max_loras,
        tile_rows,
        address(summaries),
    )
    if blocks > 1:
        enqueue("segments", "segment_counts", _COUNTS, (blocks,), _THREADS, (*head, status_word))
    lists = (result.start, result.expert, result.slot, result.count, result.tiles)
    tail = (room, tile_room, *map(address, lists), address(result.tile_count), status_word)
    enqueue("segments", "segment_fill", _FILL, (blocks,), _THREADS, (*head, *tail))
    return result


def segments_workspace_bytes(num_rows: int) -> int:
    """Bytes of the workspace that ``build_segments`` takes for any R up to ``num_rows`` rows."""
    return blocks_for(num_rows, _THREADS) * _SUMMARY_BYTES
