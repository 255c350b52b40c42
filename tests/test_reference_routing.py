"""route and build_segments against plain Python sorting, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_util import (
    RoutingCase,
    brute_route,
    brute_rows,
    brute_segments,
    expert_order,
    hostile_routings,
    make_case,
    random_case,
    routing_cases,
)

from cupylora.errors import ArgumentError, CapacityError
from cupylora.reference.build_segments import build_segments
from cupylora.reference.route import route
from cupylora.worklists import (
    STATUS_BAD_SLOT,
    STATUS_CAPACITY,
    TILE_INTS,
    TILE_PAIRS,
    Routing,
    Segments,
    segment_capacity,
    tile_capacity,
)

ORDERS = ("token_major", "k_major")


def _route(case: RoutingCase, **options: object) -> Routing:
    return route(case.topk_ids, case.token_to_slot, **case.sizes, **options)  # type: ignore[arg-type]


def _check_route(case: RoutingCase, row_order: str) -> Routing:
    routing = _route(case, row_order=row_order)
    row_to_pair, pair_to_row, offsets = brute_route(case, row_order)
    assert routing.row_to_pair.tolist() == row_to_pair
    assert routing.pair_to_row.tolist() == pair_to_row
    assert routing.expert_first_token_offset.tolist() == offsets
    assert routing.row_to_pair.dtype == routing.pair_to_row.dtype == np.int32
    assert routing.expert_first_token_offset.dtype == np.int64
    return routing


def _check_segments(case: RoutingCase, routing: Routing, tile_rows: int, **options: int) -> None:
    segments = build_segments(
        routing, case.token_to_slot, max_loras=case.max_loras, tile_rows=tile_rows, **options
    )
    rows = brute_rows(case, routing.row_to_pair.tolist(), routing.row_order)
    expected, tiles = brute_segments(rows, tile_rows)
    count, tile_count = int(segments.count[0]), int(segments.tile_count[0])
    starts = [first for first, *_ in expected] + [len(rows)]
    assert count == len(expected)
    assert segments.start[: count + 1].tolist() == starts
    assert segments.expert[:count].tolist() == [expert for _, _, expert, _ in expected]
    assert segments.slot[:count].tolist() == [slot for *_, slot in expected]
    assert tile_count == len(tiles)
    records = segments.tiles[:tile_count].tolist()
    assert [tuple(record[:4]) for record in records] == tiles
    pairs = routing.row_to_pair.tolist()
    for (first, count, *_), record in zip(tiles, records, strict=True):
        held = pairs[first : first + min(count, TILE_PAIRS)]
        assert record[4:] == [*held, *[-1] * (TILE_PAIRS - len(held)), 0, 0, 0, 0]


@pytest.mark.parametrize("row_order", ORDERS)
@pytest.mark.parametrize("case", hostile_routings(), ids=lambda case: case.name)
def test_hostile_routings(case: RoutingCase, row_order: str) -> None:
    routing = _check_route(case, row_order)
    room = segment_capacity(routing.num_rows, case.num_experts, case.max_loras)
    for tile_rows in (8, 32):
        _check_segments(case, routing, tile_rows, max_segments=room)
        _check_segments(case, expert_order(routing, 5), tile_rows)


@settings(max_examples=120, deadline=None)
@given(
    routing_cases(), st.sampled_from(ORDERS), st.sampled_from([8, 16, 32, 64]), st.integers(0, 9)
)
def test_drawn_routings(case: RoutingCase, row_order: str, tile_rows: int, seed: int) -> None:
    routing = _check_route(case, row_order)
    room = segment_capacity(routing.num_rows, case.num_experts, case.max_loras)
    _check_segments(case, routing, tile_rows, max_segments=room)
    _check_segments(case, expert_order(routing, seed), tile_rows)


def test_the_named_examples_by_hand() -> None:
    twice = _route(make_case("", [[5, 5]], [1], 8, 2))
    assert twice.row_to_pair.tolist() == [0, 1]
    assert twice.expert_first_token_offset.tolist() == [0, 0, 0, 0, 0, 0, 2, 2, 2]
    partly = _route(make_case("", [[-1, 3], [2, -1]], [0, 1], 4, 2))
    assert partly.row_to_pair.tolist() == [2, 1, -1, -1]
    assert partly.pair_to_row.tolist() == [-1, 1, 0, -1]
    assert partly.expert_first_token_offset.tolist() == [0, 0, 0, 1, 2]
    k_major = _route(make_case("", [[-1, 3], [2, -1]], [0, 1], 4, 2), row_order="k_major")
    assert k_major.row_to_pair.tolist() == [1, 2, -1, -1]


@pytest.mark.parametrize(
    ("lengths", "tiles"),
    [([1, 200], 1 + 25), ([0, 129], 17), ([1] * 63 + [400], 63 + 50)],
    ids=["1+200", "0+129", "63x1+400"],
)
def test_tiles_of_uneven_segments(lengths: list[int], tiles: int) -> None:
    slots = np.repeat(np.arange(len(lengths)), lengths)
    case = make_case("", np.zeros((len(slots), 1)), slots, 1, len(lengths))
    segments = build_segments(_route(case), case.token_to_slot, max_loras=case.max_loras)
    assert segments.tile_count[0] == tiles
    used = segments.tiles[:tiles]
    assert used[:, 1].sum() == sum(lengths)
    assert used[:, 1].min() >= 1
    assert used[:, 1].max() <= 8


def test_many_tokens_on_few_experts() -> None:
    case = random_case(0, 70_000, 2, 3, 2)
    routing = _route(case)
    pairs = routing.row_to_pair
    expert = case.topk_ids.reshape(-1)[pairs]
    slot = np.maximum(case.token_to_slot, -1)[pairs // 2]
    order = np.lexsort((pairs, slot, expert))
    assert (order == np.arange(len(pairs))).all()
    assert (routing.pair_to_row[pairs] == np.arange(len(pairs))).all()


@pytest.mark.parametrize("fill", [77, -5])
def test_out_is_written_whole_and_returned(fill: int) -> None:
    case = make_case("", [[-1, 3], [2, -1]], [0, 1], 4, 2)
    fresh = _route(case)
    out = replace(
        fresh,
        row_to_pair=np.full_like(fresh.row_to_pair, fill),
        pair_to_row=np.full_like(fresh.pair_to_row, fill),
        expert_first_token_offset=np.full_like(fresh.expert_first_token_offset, fill),
    )
    result = _route(case, out=out)
    assert result.row_to_pair is out.row_to_pair
    for field in ("row_to_pair", "pair_to_row", "expert_first_token_offset"):
        assert getattr(out, field).tolist() == getattr(fresh, field).tolist()
    with pytest.raises(ArgumentError, match=r"out\.row_order is 'token_major'; 'k_major'"):
        _route(case, out=out, row_order="k_major")


def test_segments_out_is_used() -> None:
    case = make_case("", [[0], [0], [1]], [0, 0, -1], 2, 2)
    room, tiles = 3, tile_capacity(3, 3, 8)
    sizes = (room + 1, room, room, 1)
    start, expert, slot, count = (np.full(size, 9, np.int32) for size in sizes)
    out = Segments(
        start,
        expert,
        slot,
        count,
        np.full((tiles, TILE_INTS), 9, np.int32),
        np.full(1, 9, np.int32),
        8,
        2,
    )
    result = build_segments(_route(case), case.token_to_slot, max_loras=2, out=out)
    assert result.start is start
    assert start.tolist() == [0, 2, 3, 9]
    assert out.tile_count.tolist() == [1]
    assert out.tiles[0].tolist() == [0, 2, 0, 0, 0, 1, *[-1] * 6, 0, 0, 0, 0]


def test_slot_out_of_range_is_refused_or_flagged() -> None:
    case = make_case("", [[0], [1], [0]], [0, 2, 1], 2, 2)
    safe = replace(case, token_to_slot=np.array([0, -1, 1], np.int32))
    with pytest.raises(ArgumentError, match=r"token_to_slot\[1\] is 2; there are 2 slots"):
        _route(case)
    status = np.zeros(1, np.int32)
    routing = _route(case, status=status)
    assert status[0] == STATUS_BAD_SLOT
    assert routing.row_to_pair.tolist() == _route(safe).row_to_pair.tolist()
    with pytest.raises(ArgumentError, match=r"token_to_slot\[1\] is 2"):
        build_segments(routing, case.token_to_slot, max_loras=2)
    status[0] = 0
    segments = build_segments(routing, case.token_to_slot, max_loras=2, status=status)
    assert status[0] == STATUS_BAD_SLOT
    assert segments.slot[: segments.count[0]].tolist() == [0, 1, -1]
    clean = np.zeros(1, np.int32)
    _route(safe, status=clean)
    assert clean[0] == 0


def test_too_many_segments_name_both_numbers() -> None:
    case = make_case("", [[0]] * 4, [0, 1, 0, 1], 1, 2)
    foreign = replace(_route(case), row_to_pair=np.arange(4, dtype=np.int32))
    with pytest.raises(CapacityError, match="form 4 segments, but there is room for 3"):
        build_segments(foreign, case.token_to_slot, max_loras=2, max_segments=3)


def test_a_list_without_room_is_closed_where_it_is_cut() -> None:
    case = make_case("", [[0]] * 5, [0, 1, 0, 1, 1], 1, 2)
    foreign = replace(_route(case), row_to_pair=np.arange(5, dtype=np.int32))
    status = np.zeros(1, np.int32)
    options: dict[str, Any] = {"max_loras": 2, "max_segments": 2, "status": status}
    segments = build_segments(foreign, case.token_to_slot, **options)
    assert status[0] == STATUS_CAPACITY
    assert segments.count.tolist() == [2]
    assert segments.start.tolist() == [0, 1, 2]
    assert segments.tiles[: segments.tile_count[0], :2].tolist() == [[0, 1], [1, 1]]


def test_bad_arguments_are_named() -> None:
    case = make_case("", [[0, 1]], [0], 2, 1)
    routing = _route(case)
    with pytest.raises(ArgumentError, match="topk_ids has dtype int64"):
        route(case.topk_ids.astype(np.int64), case.token_to_slot, **case.sizes)
    with pytest.raises(ArgumentError, match=r"token_to_slot has shape \(3,\); \[1\]"):
        route(case.topk_ids, np.zeros(3, np.int32), **case.sizes)
    with pytest.raises(ArgumentError, match=r"topk_ids .* not C-contiguous"):
        route(np.zeros((2, 3), np.int32).T, np.zeros(3, np.int32), **case.sizes)
    with pytest.raises(ArgumentError, match="num_experts is 2049; 1 to 2048"):
        route(case.topk_ids, case.token_to_slot, num_experts=2049, max_loras=1)
    with pytest.raises(ArgumentError, match="row_order is 'rows'"):
        _route(case, row_order="rows")
    for tile_rows in (4, 12, 128):
        with pytest.raises(ArgumentError, match="tile_rows"):
            build_segments(routing, case.token_to_slot, max_loras=1, tile_rows=tile_rows)
    falling = replace(routing, expert_first_token_offset=np.array([0, 2, 1]))
    with pytest.raises(ArgumentError, match=r"expert_first_token_offset .* falls in between"):
        build_segments(falling, case.token_to_slot, max_loras=1)
    outside = replace(routing, row_to_pair=np.array([0, 2], np.int32))
    with pytest.raises(ArgumentError, match=r"row_to_pair\[1\] is 2"):
        build_segments(outside, case.token_to_slot, max_loras=1)
