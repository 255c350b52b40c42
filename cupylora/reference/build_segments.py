"""Sorted rows -> runs of one (expert, slot) and the row tiles that ``lora_delta`` works off.

In: a Routing (ours or another stack's) and ``token_to_slot``. Out: Segments.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupylora.checks import (
    INT32,
    check_array,
    check_int,
    check_max_loras,
    check_status,
    check_tile_rows,
)
from cupylora.errors import CapacityError
from cupylora.outputs import segments_output
from cupylora.reference._output import checked_slots, output_array
from cupylora.reference._rows import valid_rows
from cupylora.worklists import Array, Routing, Segments, tile_capacity

__all__ = ["build_segments"]


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
    """Cut the valid rows into maximal runs of one (expert, slot), those of an adapter into tiles.

    token_to_slot: int32 [T], the slots the routing's tokens have.
    tile_rows: rows of a full tile, a one of 8, 16 and 32.
    max_segments: room of the list, by default one per row, which any order fits; rows sorted by
    ``route`` need no more than ``segment_capacity``.
    workspace: scratch for the device (see the op's ``*_workspace_bytes``); unused here.
    out: a Segments of that room to write into; what lies past the counts is left as it was.

    Raises CapacityError for more segments than ``max_segments``, ArgumentError for a slot >=
    max_loras; with ``status`` (int32 [1]) the latter sets STATUS_BAD_SLOT instead and the token
    counts as one of no adapter.
    """
    max_loras = check_max_loras(max_loras)
    tile_rows = check_tile_rows(tile_rows)
    rows = valid_rows(routing)
    check_array(
        "token_to_slot", token_to_slot, dtype=INT32, shape=(routing.num_tokens,), on_device=False
    )
    check_status(status, on_device=False)
    room = max(1, routing.num_rows) if max_segments is None else max_segments
    room = check_int("max_segments", room, 1)
    tile_room = tile_capacity(routing.num_rows, room, tile_rows)
    result = segments_output(
        output_array, out, room, tile_room, tile_rows=tile_rows, max_loras=max_loras
    )

    slots = checked_slots(token_to_slot, max_loras, status)[rows.token]
    starts = _run_starts(rows.expert, slots)
    if len(starts) > room:
        raise CapacityError(
            f"the rows form {len(starts)} segments, but there is room for {room}; raise "
            "max_segments (one per row fits any order)"
        )
    count = len(starts)
    result.count[0] = count
    result.start[:count] = starts
    result.start[count] = len(rows)
    result.expert[:count] = rows.expert[starts]
    result.slot[:count] = slots[starts]
    tiles = _tiles(result, count)
    result.tiles[: len(tiles)] = tiles
    result.tile_count[0] = len(tiles)
    return result


def _run_starts(
    experts: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    first = np.ones(len(experts), dtype=bool)
    first[1:] = (experts[1:] != experts[:-1]) | (slots[1:] != slots[:-1])
    return np.flatnonzero(first)


def _tiles(segments: Segments, count: int) -> npt.NDArray[np.int32]:
    """Tiles [n, 4] of the ``count`` segments: (first row, rows, expert, slot) in row order."""
    mine = np.flatnonzero(segments.slot[:count] >= 0)
    start, stop = segments.start[mine].astype(np.int64), segments.start[mine + 1].astype(np.int64)
    per_segment = -(-(stop - start) // segments.tile_rows)
    owner = np.repeat(np.arange(len(mine)), per_segment)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(per_segment) - per_segment, per_segment)
    first = start[owner] + place * segments.tile_rows
    rows = np.minimum(stop[owner] - first, segments.tile_rows)
    columns = (first, rows, segments.expert[mine][owner], segments.slot[mine][owner])
    return np.stack(columns, axis=1).astype(np.int32)
