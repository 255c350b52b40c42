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
from cupylora.reference._rows import ValidRows, valid_rows
from cupylora.worklists import (
    STATUS_CAPACITY,
    TILE_INTS,
    TILE_PAIRS,
    Array,
    Routing,
    Segments,
    tile_capacity,
)

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
    tile_rows: rows of a full tile, one of 8, 16, 32 and 64.
    max_segments: room of the list, by default one per row, which any order fits; rows sorted by
    ``route`` need no more than ``segment_capacity``.
    workspace: scratch for the device (see the op's ``*_workspace_bytes``); unused here.
    out: a Segments of that room to write into; what lies past the counts is left as it was.

    Raises ArgumentError for a slot >= max_loras and CapacityError for more segments than
    ``max_segments``. With ``status`` (int32 [1]) the first sets STATUS_BAD_SLOT instead and the
    token counts as one of no adapter; the second sets STATUS_CAPACITY, and both lists end where
    their room does (the last segment where the next one would have begun).
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
        if status is None:
            raise CapacityError(
                f"the rows form {len(starts)} segments, but there is room for {room}; raise "
                "max_segments (one per row fits any order)"
            )
        status[0] |= STATUS_CAPACITY
    bounds = np.append(starts, len(rows))
    count = min(len(starts), room)
    result.count[0] = count
    result.start[: count + 1] = bounds[: count + 1]
    result.expert[:count] = rows.expert[starts[:count]]
    result.slot[:count] = slots[starts[:count]]
    tiles = _tiles(rows, slots, bounds, tile_rows)[:tile_room]
    result.tiles[: len(tiles)] = tiles
    result.tile_count[0] = len(tiles)
    return result


def _run_starts(
    experts: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    first = np.ones(len(experts), dtype=bool)
    first[1:] = (experts[1:] != experts[:-1]) | (slots[1:] != slots[:-1])
    return np.flatnonzero(first)


def _tiles(
    rows: ValidRows,
    slots: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    tile_rows: int,
) -> npt.NDArray[np.int32]:
    """Records [n, TILE_INTS] of the segments' tiles; ``bounds``: their first rows, and the end."""
    start, stop = bounds[:-1], bounds[1:]
    mine = slots[start] >= 0
    start, stop = start[mine], stop[mine]
    per_segment = -(-(stop - start) // tile_rows)
    owner = np.repeat(np.arange(len(start)), per_segment)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(per_segment) - per_segment, per_segment)
    first = start[owner] + place * tile_rows
    held = np.minimum(stop[owner] - first, tile_rows)
    records = np.zeros((len(first), TILE_INTS), np.int32)
    records[:, :4] = np.stack((first, held, rows.expert[first], slots[first]), axis=1)
    offsets = np.arange(TILE_PAIRS)
    row = np.minimum(first[:, None] + offsets, max(0, len(rows) - 1))
    pairs = rows.pair[row] if len(rows) else row
    records[:, 4 : 4 + TILE_PAIRS] = np.where(offsets < held[:, None], pairs, -1)
    return records
