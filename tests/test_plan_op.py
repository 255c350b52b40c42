"""plan: its twin against the two ops it stands for, its kernels against the twin, exactly."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_util import to_device, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_util import RoutingCase, hostile_routings, make_case, random_case, routing_cases

from cupylora import ops, reference
from cupylora.errors import ArgumentError, CapacityError
from cupylora.ops._plan_choice import Large, PlanSizes, Small, _magic, choose_plan
from cupylora.worklists import (
    MAX_ROWS,
    STATUS_BAD_SLOT,
    STATUS_CAPACITY,
    TILE_ROWS,
    Routing,
    Segments,
    segment_capacity,
    tile_capacity,
)

ORDERS = ("token_major", "k_major")
SHARED = {"H200": 227 * 1024, "A100": 163 * 1024, "RTX": 99 * 1024}
"""Shared memory that a block may have."""

Plan = tuple[Routing, Segments]


def drawn_case(kind: str, tokens: int, top_k: int, experts: int, loras: int) -> RoutingCase:
    """A routing of one hostile or ordinary kind, over the second ``experts`` global ids."""
    rng = np.random.default_rng([tokens, top_k, experts, loras])
    slots = rng.integers(0, loras, tokens)
    slots[rng.random(tokens) < 0.1] = -1
    ids = rng.integers(0, experts, (tokens, top_k))
    if kind == "distinct":
        start = rng.integers(0, experts, (tokens, 1))
        ids = (start + np.arange(top_k) * max(1, experts // top_k)) % experts
    elif kind == "foreign":
        ids = rng.integers(-experts, 2 * experts, (tokens, top_k))
    elif kind == "one expert":
        ids[:] = experts - 1
    elif kind == "one group":
        ids[:], slots[:] = experts - 1, loras - 1
    elif kind == "all base":
        slots[:] = -1
    name = f"{kind} T={tokens} k={top_k} E={experts} L={loras}"
    return make_case(name, ids + experts, slots, experts, loras, experts)


def twin(case: RoutingCase, **options: Any) -> Plan:
    return reference.plan(case.topk_ids, case.token_to_slot, **case.sizes, **options)


def composed(case: RoutingCase, tile_rows: int, **options: Any) -> Plan:
    args = (case.topk_ids, case.token_to_slot)
    routing = reference.route(*args, **case.sizes, **options)  # type: ignore[arg-type]
    room = segment_capacity(routing.num_rows, case.num_experts, case.max_loras)
    return routing, reference.build_segments(
        routing,
        case.token_to_slot,
        max_loras=case.max_loras,
        tile_rows=tile_rows,
        max_segments=room,
    )


def assert_same_plan(actual: Plan, expected: Plan, beyond: int | None = None) -> None:
    """Equal lists up to their counts; behind those, int32 elements are ``beyond`` if given."""
    (rows, cut), (rows_wanted, cut_wanted) = actual, expected
    count, tiles = int(cut_wanted.count[0]), int(cut_wanted.tile_count[0])
    held = {"start": count + 1, "expert": count, "slot": count, "tiles": tiles}
    for got_list, wanted_list in ((rows, rows_wanted), (cut, cut_wanted)):
        for field in (f.name for f in dataclasses.fields(wanted_list)):
            got, wanted = getattr(got_list, field), getattr(wanted_list, field)
            if not isinstance(wanted, np.ndarray):
                assert got == wanted, field
                continue
            got = to_host(got)
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), field
            end = held.get(field, len(wanted))
            np.testing.assert_array_equal(got[:end], wanted[:end], err_msg=field)
            if beyond is not None:
                assert (got[end:] == beyond).all(), field


@given(routing_cases(), st.sampled_from(ORDERS), st.sampled_from(TILE_ROWS))
@settings(deadline=None)
def test_twin_equals_the_two_ops(case: RoutingCase, row_order: str, tile_rows: int) -> None:
    expected = composed(case, tile_rows, row_order=row_order)
    assert_same_plan(twin(case, tile_rows=tile_rows, row_order=row_order), expected)


@pytest.mark.parametrize("case", hostile_routings(), ids=lambda case: case.name)
def test_twin_on_hostile_routings(case: RoutingCase) -> None:
    assert_same_plan(twin(case), composed(case, 8))


def held_slots(case: RoutingCase) -> int:
    """Different slots of its tokens."""
    slots = case.token_to_slot
    return len(np.unique(slots[(slots >= 0) & (slots < case.max_loras)]))


def spread(case: RoutingCase, max_loras: int) -> RoutingCase:
    """The same batch in a table of more slots: its first ones, its last ones, and far between."""
    places = np.linspace(0, max_loras - 1, case.max_loras).astype(np.int32)
    slots = case.token_to_slot
    moved = np.where(slots < 0, slots, places[np.maximum(slots, 0)])
    return replace(case, token_to_slot=moved, max_loras=max_loras)


@given(routing_cases(), st.sampled_from(ORDERS), st.integers(0, 3))
@settings(deadline=None)
def test_twin_makes_the_same_lists_of_a_known_number_of_slots(
    case: RoutingCase, row_order: str, more: int
) -> None:
    made = twin(case, row_order=row_order, max_active=held_slots(case) + more)
    assert_same_plan(made, twin(case, row_order=row_order))


def first_slots(case: RoutingCase, max_active: int) -> RoutingCase:
    """What counts of a batch that has more slots."""
    held = np.unique(case.token_to_slot[case.token_to_slot >= 0])[:max_active]
    safe = np.where(np.isin(case.token_to_slot, held), case.token_to_slot, -1)
    return replace(case, token_to_slot=safe.astype(np.int32))


@pytest.mark.parametrize("max_active", [0, 1, 3])
def test_more_slots_than_said_are_refused_or_flagged(max_active: int) -> None:
    case = random_case(4, 30, 2, 5, 9)
    out = _filled(case, 8, "token_major")
    with pytest.raises(CapacityError, match=rf"8 different slots; max_active says {max_active} "):
        twin(case, max_active=max_active, out=out)
    assert (out[0].row_to_pair == 7).all()
    status, was = np.zeros(1, np.int32), case.token_to_slot.copy()
    made = twin(case, max_active=max_active, status=status)
    assert_same_plan(made, twin(first_slots(case, max_active)))
    assert status[0] == STATUS_CAPACITY
    np.testing.assert_array_equal(case.token_to_slot, was)
    with pytest.raises(ArgumentError, match="max_active is -1"):
        twin(case, max_active=-1)


def _filled(case: RoutingCase, tile_rows: int, row_order: str, room: int | None = None) -> Plan:
    """Lists of a case's sizes, of more segments than needed if ``room`` says so, full of sevens."""
    tokens, top_k = case.topk_ids.shape
    rows = tokens * top_k
    room = room or segment_capacity(rows, case.num_experts, case.max_loras)
    sizes = (rows, rows, room + 1, room, room, 1, 1)
    arrays = [np.full(size, 7, np.int32) for size in sizes]
    offsets = np.full(case.num_experts + 1, 7, np.int64)
    tiles = np.full((tile_capacity(rows, room, tile_rows), 16), 7, np.int32)
    return (
        Routing(
            *arrays[:2],
            offsets,
            tokens,
            top_k,
            case.num_experts,
            case.start_expert,
            row_order,  # type: ignore[arg-type]
        ),
        Segments(*arrays[2:6], tiles, arrays[6], tile_rows, case.max_loras),
    )


def test_out_is_written_and_may_have_more_room() -> None:
    case = random_case(1, 12, 2, 3, 2)
    for room in (None, 24):
        out = _filled(case, 16, "k_major", room)
        made = twin(case, tile_rows=16, row_order="k_major", out=out)
        assert made[0].row_to_pair is out[0].row_to_pair
        assert made[1].tiles is out[1].tiles
        expected = twin(case, tile_rows=16, row_order="k_major")
        if room is None:
            assert_same_plan(out, expected, beyond=7)
        np.testing.assert_array_equal(out[1].count, expected[1].count)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    case = random_case(2, 12, 2, 3, 2)
    small = _filled(case, 8, "token_major", 8)
    with pytest.raises(CapacityError, match=r"out.expert has room for 8 segments; 9 can come up"):
        twin(case, out=small)
    good = _filled(case, 8, "token_major")
    for out, message in (
        ([1, 2], r"out is a list; a tuple \(Routing, Segments\) is needed"),
        ((good[1], good[0]), r"out\[0\] is a Segments; a Routing is needed"),
        ((good[0], replace(good[1], tile_rows=16)), r"out\.tile_rows is 16; 8 is needed"),
        ((replace(good[0], start_expert=3), good[1]), r"out\.start_expert is 3; 0 is needed"),
    ):
        with pytest.raises(ArgumentError, match=message):
            twin(case, out=out)
    with pytest.raises(ArgumentError, match="fused is 'yes'"):
        twin(case, fused="yes")
    assert (good[0].row_to_pair == 7).all()
    assert (good[1].tiles == 7).all()


def test_slot_out_of_range_is_refused_or_flagged() -> None:
    case = make_case("", [[0], [5], [0]], [0, 2, 1], 2, 2)
    with pytest.raises(ArgumentError, match=r"token_to_slot\[1\] is 2"):
        twin(case)
    status = np.zeros(1, np.int32)
    safe = replace(case, token_to_slot=np.array([0, -1, 1], np.int32))
    assert_same_plan(twin(case, status=status), twin(safe))
    assert status[0] == STATUS_BAD_SLOT


def _sizes(tokens: int, top_k: int, experts: int, loras: int, k_major: bool = False) -> PlanSizes:
    return PlanSizes(tokens, top_k, experts, loras, 0, k_major, 8)


def _fits(chosen: Small | Large, sizes: PlanSizes, shared: int) -> bool:
    """The limits that the kernels' comments state."""
    if isinstance(chosen, Large):
        per_block = 32 * int(chosen.count_kernel.split("_")[1]) * 4
        counted = sizes.pairs <= chosen.blocks * per_block and chosen.block_pairs == per_block
        placed = chosen.place_grid * chosen.threads >= sizes.pairs and per_block % 512 == 0
        return counted and placed and max(chosen.count_smem, chosen.place_smem + 1024) <= shared
    kind, *numbers = chosen.kernel.split("_")
    if kind == "rank":
        parts = int(numbers[0])
        enough = chosen.threads >= max(sizes.pairs * parts, 256)
        return enough and chosen.grid == 1 and sizes.pairs * parts <= 1024
    columns, rounds = map(int, numbers)
    shares = chosen.grid * 256 >= sizes.pairs and chosen.grid & (chosen.grid - 1) == 0
    holds = columns * rounds * 32 >= sizes.pairs and chosen.threads >= columns * 32
    keys = sizes.num_experts * chosen.digits
    # plan_table's own arrays where they are largest: 4096 pairs of 2 bytes, 256 heads of 8, totals
    # of 32 warps of 12, marks of 1024 slots, 256 numbers of 2.
    own = 4096 * 2 + 256 * 8 + 32 * 12 + 1024 + 256 * 2
    return shares and holds and (keys + 1) * columns <= chosen.smem <= shared - own


def _numbers(chosen: Small | Large, sizes: PlanSizes, max_active: int | None) -> bool:
    """The limits within which slots are numbered."""
    if max_active is None or (isinstance(chosen, Small) and not chosen.kernel.startswith("table")):
        return False
    few = chosen.digits == max_active + 1 <= min(sizes.max_loras, 257)
    return few and sizes.max_loras <= 1024


@pytest.mark.parametrize(
    ("tokens", "loras", "max_active", "kernel", "digits"),
    [
        (16, 64, 1, "rank_8", 65),
        (32, 1, 1, "table_8_1", 2),
        (32, 64, 1, "table_8_1", 2),
        (32, 64, 65, "rank_4", 65),
        (32, 1025, 1, "rank_4", 1026),
        (128, 64, 1, "table_16_2", 2),
        (128, 64, 16, "table_16_2", 17),
        (512, 64, 1, "count_16_4", 2),
        (512, 16, 1, "count_16_4", 2),
        (512, 16, 16, "table_32_4", 17),
        (512, 64, 64, "count_16_4", 65),
        (4096, 64, 1, "count_16_4", 2),
    ],
)
def test_few_slots_are_counted_as_in_a_small_table(
    tokens: int, loras: int, max_active: int, kernel: str, digits: int
) -> None:
    chosen = choose_plan(_sizes(tokens, 8, 128, loras), SHARED["H200"], max_active)
    assert chosen is not None
    name = chosen.kernel if isinstance(chosen, Small) else chosen.count_kernel
    assert (name, chosen.digits) == (kernel, digits)


def test_a_dense_plan_of_many_tokens_does_not_read_all_of_them_in_each_block() -> None:
    chosen = choose_plan(_sizes(100_000, 1, 1, 64), SHARED["H200"], 1)
    assert isinstance(chosen, Large)
    assert chosen.digits == 65


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_chosen_launches_hold_their_sizes(shared: int) -> None:
    kinds = set()
    for tokens in (0, 1, 3, 16, 17, 32, 33, 100, 128, 200, 512, 513, 1024, 4096, 8192, 20000):
        for top_k, experts, loras in (
            (1, 1, 1),
            (1, 1, 4096),
            (8, 8, 4),
            (8, 128, 16),
            (6, 128, 64),
            (8, 256, 16),
            (8, 256, 64),
            (8, 2048, 16),
            (4, 2048, 4096),
        ):
            sizes = _sizes(tokens, top_k, experts, loras)
            chosen = choose_plan(sizes, shared)
            if chosen is None:
                assert sizes.pairs > 256
                continue
            assert _fits(chosen, sizes, shared), (sizes, chosen)
            kinds.add(chosen.kernel if isinstance(chosen, Small) else chosen.count_kernel)
            for max_active in (None, 0, 1, 4, 16, 64, 256, 257, loras):
                numbered = choose_plan(sizes, shared, max_active)
                assert numbered is not None
                assert _fits(numbered, sizes, shared), (sizes, max_active, numbered)
                assert numbered == chosen or _numbers(numbered, sizes, max_active)
                assert numbered.cost <= chosen.cost
                assert numbered.threads % 32 == 0
                assert numbered.threads <= 1024
    assert kinds >= {"rank_8", "rank_4", "table_8_1", "table_8_2", "table_32_4", "count_16_4"}


def test_workspace_serves_every_smaller_batch() -> None:
    for top_k, experts, loras in (
        (1, 1, 16),
        (8, 128, 16),
        (8, 256, 64),
        (8, 64, 250),
        (8, 128, 1000),
        (8, 9, 1),
    ):
        rows = 20000 * top_k
        given = ops.plan_workspace_bytes(rows, experts, loras)
        for tokens in (*range(0, 20000, 97), 20000):
            for shared in SHARED.values():
                for max_active in (None, 0, 3, 40):
                    chosen = choose_plan(_sizes(tokens, top_k, experts, loras), shared, max_active)
                    if isinstance(chosen, Large):
                        assert chosen.workspace_bytes <= given
            assert ops.route_workspace_bytes(tokens * top_k, experts, loras) <= given
    assert ops.plan_workspace_bytes(32768, 2048, 4096) < 1 << 30


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 32))
def test_division_by_a_magic_number_is_exact(divisor: int, value: int) -> None:
    value %= (1 << 32) // divisor
    magic = _magic(divisor)
    assert magic < 1 << 32
    assert (value * magic >> 32 if magic else value) == value // divisor


def test_rows_beyond_the_exact_division_take_the_two_ops() -> None:
    assert choose_plan(_sizes(1 << 16, 2, 8, 4), 227 * 1024) is not None
    assert choose_plan(_sizes(1 << 16, 2, 8, 4, k_major=True), 227 * 1024) is None
    assert choose_plan(_sizes(1 << 17, 1, 8, 4, k_major=True), 227 * 1024) is not None
    assert choose_plan(_sizes(MAX_ROWS, 1, 1, 4), 227 * 1024) is None


# Every kernel instance, sizes at their limits, and sizes that none holds.
SHAPES = [
    (0, 8, 128, 16),
    (1, 1, 1, 1),
    (1, 8, 128, 16),
    (1, 8, 256, 64),
    (8, 8, 128, 16),
    (8, 2, 8, 512),
    (16, 8, 2048, 512),
    (31, 4, 32, 16),
    (31, 8, 2048, 512),
    (32, 8, 128, 16),
    (32, 8, 256, 64),
    (33, 8, 128, 16),
    (33, 1, 1, 16),
    (33, 8, 2048, 16),
    (64, 8, 256, 16),
    (128, 1, 1, 64),
    (129, 1, 1, 512),
    (128, 3, 8, 1),
    (128, 8, 128, 16),
    (128, 8, 256, 64),
    (200, 8, 128, 16),
    (256, 8, 256, 16),
    (256, 7, 32, 64),
    (512, 8, 128, 16),
    (512, 8, 256, 64),
    (513, 1, 1, 16),
    (513, 8, 32, 16),
    (1024, 2, 8, 4),
    (1024, 8, 128, 16),
    (1024, 8, 2048, 1),
    (4096, 1, 1, 16),
    (4096, 8, 128, 16),
    (4096, 8, 256, 64),
    (8192, 8, 32, 16),
    (16384, 8, 8, 1),
    (70_000, 1, 3, 3),
    (70_000, 2, 8, 16),
]
KINDS = ("distinct", "repeated", "foreign", "one expert", "one group", "all base")


def _device_plan(case: RoutingCase, **options: Any) -> Plan:
    args = (to_device(case.topk_ids), to_device(case.token_to_slot))
    return ops.plan(*args, **case.sizes, **options)


def _check_on_device(
    case: RoutingCase,
    tile_rows: int,
    row_order: str,
    fused: bool | None,
    max_active: int | None = None,
) -> None:
    """Three runs into the same lists: each gives the twin's, and nothing behind their counts."""
    options: dict[str, Any] = {"tile_rows": tile_rows, "row_order": row_order}
    expected = twin(case, **options)
    filled = _filled(case, tile_rows, row_order)
    out = to_device(filled[0]), to_device(filled[1])
    for _ in range(3):
        made = _device_plan(case, **options, out=out, fused=fused, max_active=max_active)
        assert made[0].row_to_pair is out[0].row_to_pair
        assert_same_plan(made, expected, beyond=7)
        for array in (made[0].row_to_pair, made[0].pair_to_row, made[1].count, made[1].tile_count):
            array[...] = 7


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_device_equals_twin(shape: tuple[int, int, int, int], kind: str) -> None:
    case = drawn_case(kind, *shape)
    for index, row_order in enumerate(ORDERS):
        for tile_rows in TILE_ROWS if kind == "repeated" else TILE_ROWS[index : index + 1]:
            _check_on_device(case, tile_rows, row_order, None)


FEW = [
    (1, 8, 128, 1),
    (32, 8, 128, 1),
    (32, 8, 128, 8),
    (33, 8, 128, 1),
    (70, 8, 512, 2),
    (128, 8, 128, 1),
    (128, 8, 128, 16),
    (130, 8, 256, 2),
    (300, 8, 20, 5),
    (512, 8, 128, 1),
    (512, 8, 256, 16),
    (1024, 8, 128, 3),
    (4096, 1, 1, 1),
    (4096, 8, 128, 1),
    (6000, 8, 256, 30),
    (8192, 8, 32, 4),
]
"""(tokens, choices, experts, slots that come up)."""


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [64, 1024])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_device_numbers_the_slots_of_a_large_table(
    shape: tuple[int, int, int, int], kind: str, slots: int
) -> None:
    case = spread(drawn_case(kind, *shape), slots)
    for index, row_order in enumerate(ORDERS):
        for max_active in (held_slots(case), held_slots(case) + 2):
            _check_on_device(case, TILE_ROWS[index], row_order, None, max_active)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 600, 5000])
def test_more_slots_than_said_are_reported_by_every_kernel_that_numbers(tokens: int) -> None:
    import cupy

    case = drawn_case("repeated", tokens, 8, 128, 64)
    word = cupy.zeros(1, np.int32)
    for max_active in (64, 1, 0):
        filled = _filled(case, 8, "token_major")
        out = to_device(filled[0]), to_device(filled[1])
        made = _device_plan(case, status=word, max_active=max_active, out=out)
        assert_same_plan(made, twin(first_slots(case, max_active)), beyond=7)
        assert int(word[0]) == (0 if max_active == 64 else STATUS_CAPACITY)


@pytest.mark.gpu
@pytest.mark.parametrize("row_order", ORDERS)
@pytest.mark.parametrize("case", hostile_routings(), ids=lambda case: case.name)
def test_device_equals_twin_on_hostile_routings(case: RoutingCase, row_order: str) -> None:
    for tile_rows in TILE_ROWS:
        for fused in (True, False):
            _check_on_device(case, tile_rows, row_order, fused)


@pytest.mark.gpu
@given(routing_cases(), st.sampled_from(ORDERS))
@settings(max_examples=60, deadline=None)
def test_device_equals_twin_on_drawn_routings(case: RoutingCase, row_order: str) -> None:
    made = _device_plan(case, row_order=row_order, fused=True)
    assert_same_plan(made, twin(case, row_order=row_order))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 20, 32, 500, 5000])
def test_slot_out_of_range_is_reported_by_every_kernel(tokens: int) -> None:
    import cupy

    case = drawn_case("distinct", tokens, 8, 128, 16)
    slots, safe = case.token_to_slot.copy(), case.token_to_slot.copy()
    slots[tokens - 1], safe[tokens - 1] = 2**31 - 1, -1
    word = cupy.zeros(1, np.int32)
    clean = _device_plan(replace(case, token_to_slot=safe), status=word)
    assert int(word[0]) == 0
    made = _device_plan(replace(case, token_to_slot=slots), status=word)
    assert int(word[0]) == STATUS_BAD_SLOT
    assert_same_plan(made, (to_host(clean[0]), to_host(clean[1])))


@pytest.mark.gpu
def test_fused_asked_for_beyond_its_sizes_is_refused() -> None:
    case = drawn_case("distinct", 40, 8, 2048, 512)
    with pytest.raises(CapacityError, match="more than the fused kernels hold"):
        _device_plan(case, fused=True)
    assert_same_plan(_device_plan(case), twin(case))


@pytest.mark.gpu
def test_plans_back_to_back_in_a_graph_equal_the_twin() -> None:
    """Each may start before the one ahead of it has ended, and all share a workspace."""
    import cupy

    cases = [drawn_case("repeated", t, 8, 128, 16) for t in (3, 3000, 32, 4096, 600, 1, 5000, 128)]
    size = ops.plan_workspace_bytes(8 * 5000, 128, 16)
    memory, stream = cupy.empty(size, np.uint8), cupy.cuda.Stream(non_blocking=True)
    inputs = [(to_device(c.topk_ids), to_device(c.token_to_slot)) for c in cases]
    with stream:
        outs = [_device_plan(case, workspace=memory) for case in cases]
        stream.synchronize()
        stream.begin_capture()
        for case, arrays, out in zip(cases, inputs, outs, strict=True):
            ops.plan(*arrays, **case.sizes, out=out, workspace=memory)
        graph = stream.end_capture()
        for _ in range(3):
            for rows, _cut in outs:
                rows.row_to_pair[...] = 7
            graph.launch(stream)
            stream.synchronize()
            for case, out in zip(cases, outs, strict=True):
                assert_same_plan(out, twin(case))
