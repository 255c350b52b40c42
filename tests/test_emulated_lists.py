"""Work lists on the emulated device: routes, segments, plans, pointers and problems as the twins
make them, to the last integer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulator.device import Device, Schedule
from gpu_util import assert_same_lists
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problem_util import (
    RoutingCase,
    expert_order,
    hostile_routings,
    make_case,
    random_case,
    routing_cases,
)
from test_plan_op import assert_same_plan, first_slots, held_slots, spread, twin

from cupylora import ops, reference
from cupylora.ops import _plan_choice
from cupylora.worklists import (
    SLOT_ENTRY,
    STATUS_BAD_RANK,
    STATUS_BAD_SLOT,
    STATUS_CAPACITY,
    Routing,
)

pytestmark = pytest.mark.emulated

PROGRAMS = ("sort", "segments", "plan", "plan_large", "pointers")
ORDERS = ("token_major", "k_major")
SORTED = [
    random_case(1, 300, 8, 128, 16, base_share=0.1),
    random_case(2, 400, 6, 64, 9, foreign_share=0.3, start_expert=64),
    make_case("one expert, one slot", np.zeros((2100, 1)), np.zeros(2100), 1, 1),
]
ROUTINGS = hostile_routings() + SORTED


def _route(case: RoutingCase, row_order: str = "token_major") -> Routing:
    args = (case.topk_ids, case.token_to_slot)
    return reference.route(*args, row_order=row_order, **case.sizes)  # type: ignore[arg-type]


def _schedule(device: Device, case: RoutingCase, row_order: str) -> None:
    device.schedule = Schedule(len(case.topk_ids) + ORDERS.index(row_order), pause=1_000)


@pytest.mark.parametrize("row_order", ORDERS)
@pytest.mark.parametrize("case", ROUTINGS, ids=lambda case: case.name)
def test_routes_and_segments(case: RoutingCase, row_order: str, emulated: Device) -> None:
    _schedule(emulated, case, row_order)
    want = _route(case, row_order)
    slots = emulated.array(case.token_to_slot)
    got = ops.route(emulated.array(case.topk_ids), slots, row_order=row_order, **case.sizes)  # type: ignore[arg-type]
    assert_same_lists(got, want)
    tile_rows = 8 if row_order == "token_major" else 32
    _check_segments(emulated, case, want, tile_rows)
    _check_segments(emulated, case, expert_order(want, 5), tile_rows)


def _check_segments(device: Device, case: RoutingCase, routing: Routing, tile_rows: int) -> None:
    sizes: dict[str, int] = {"max_loras": case.max_loras, "tile_rows": tile_rows}
    want = reference.build_segments(routing, case.token_to_slot, **sizes)
    slots = device.array(case.token_to_slot)
    got = ops.build_segments(device.upload(routing), slots, **sizes)
    count, tiles = int(want.count[0]), int(want.tile_count[0])
    counts = {"start": count + 1, "expert": count, "slot": count, "tiles": tiles}
    assert_same_lists(got, want, counts)


LARGE = random_case(3, 700, 8, 40, 8, foreign_share=0.2, start_expert=7)


@pytest.mark.parametrize("row_order", ORDERS)
@pytest.mark.parametrize("case", [*ROUTINGS, LARGE], ids=lambda case: case.name)
def test_plans(case: RoutingCase, row_order: str, emulated: Device) -> None:
    _schedule(emulated, case, row_order)
    options: dict[str, Any] = {"row_order": row_order, "tile_rows": 16}
    args = (emulated.array(case.topk_ids), emulated.array(case.token_to_slot))
    got = ops.plan(*args, **case.sizes, **options)
    assert_same_plan(got, twin(case, **options))


# (tokens, choices, experts, slots), each served by another kernel.
PLAN_SIZES = {
    "plan/rank_8": (16, 8, 128, 4),
    "plan/rank_4": (26, 8, 256, 64),
    "plan/table_8_1": (30, 8, 8, 4),
    "plan/table_8_2": (60, 8, 8, 4),
    "plan/table_8_4": (70, 8, 512, 4),
    "plan/table_16_2": (70, 8, 20, 3),
    "plan/table_16_4": (130, 8, 256, 4),
    "plan/table_32_2": (130, 8, 20, 3),
    "plan/table_32_4": (300, 8, 128, 20),
    "plan_large/count_8_4": (130, 8, 256, 64),
    "plan_large/count_16_4": (530, 8, 20, 3),
}


@pytest.mark.parametrize("kernel", PLAN_SIZES)
def test_every_way_to_a_plan(kernel: str, emulated: Device) -> None:
    tokens, top_k, experts, loras = PLAN_SIZES[kernel]
    case = random_case(9, tokens, top_k, experts, loras, base_share=0.1, foreign_share=0.1)
    for seed in range(2):
        emulated.schedule = Schedule(seed, pause=2_000 * seed)
        args = (emulated.array(case.topk_ids), emulated.array(case.token_to_slot))
        got = ops.plan(*args, **case.sizes)  # type: ignore[arg-type]
        assert kernel in emulated.launched
        assert_same_plan(got, twin(case))


# (tokens, choices, experts, slots that come up, slots), each served by another kernel that numbers.
NUMBERED_SIZES = {
    "plan/table_8_1": (30, 8, 64, 1, 64),
    "plan/table_8_2": (60, 8, 8, 4, 1000),
    "plan/table_8_4": (70, 8, 512, 4, 64),
    "plan/table_16_2": (70, 8, 20, 3, 1024),
    "plan/table_16_4": (130, 8, 256, 4, 33),
    "plan/table_32_2": (130, 8, 20, 3, 640),
    "plan/table_32_4": (300, 8, 256, 8, 64),
    "plan_large/count_8_4": (150, 8, 1024, 15, 64),
    "plan_large/count_16_4": (530, 8, 20, 3, 1000),
}


@pytest.mark.parametrize("row_order", ORDERS)
@pytest.mark.parametrize("kernel", NUMBERED_SIZES)
def test_every_way_to_a_plan_numbers_few_of_many_slots(
    kernel: str, row_order: str, emulated: Device
) -> None:
    tokens, top_k, experts, few, loras = NUMBERED_SIZES[kernel]
    case = random_case(9, tokens, top_k, experts, few, base_share=0.1, foreign_share=0.1)
    case = spread(case, loras)
    args = (emulated.array(case.topk_ids), emulated.array(case.token_to_slot))
    for seed, max_active in enumerate((few, few + 1, few // 2)):
        emulated.schedule = Schedule(seed, pause=1_000 * seed)
        status = emulated.status()
        options: dict[str, Any] = {"row_order": row_order, "max_active": max_active}
        got = ops.plan(*args, **case.sizes, **options, status=status)
        assert kernel in emulated.launched
        assert_same_plan(got, twin(first_slots(case, max_active), row_order=row_order))
        assert int(status.host[0]) == (0 if max_active >= few else STATUS_CAPACITY)


@pytest.fixture(params=["table", "large"])
def numbering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that number slots serve every batch, of however few pairs."""
    monkeypatch.setattr(_plan_choice, "_RANK_ALWAYS", 0)
    monkeypatch.setattr(_plan_choice, "_RANK_MOST", 0)
    monkeypatch.setattr(_plan_choice, "_NUMBER_COST", -(1 << 30))
    if request.param == "large":
        monkeypatch.setattr(_plan_choice, "_TABLES", ())
    _plan_choice.choose_plan.cache_clear()
    yield
    _plan_choice.choose_plan.cache_clear()


def _check_numbered(device: Device, case: RoutingCase, row_order: str, max_active: int) -> None:
    args = (device.array(case.topk_ids), device.array(case.token_to_slot))
    options: dict[str, Any] = {"row_order": row_order, "max_active": max_active}
    status = device.status()
    got = ops.plan(*args, **case.sizes, **options, status=status)
    assert_same_plan(got, twin(first_slots(case, max_active), row_order=row_order))
    beyond = case.topk_ids.size > 0 and held_slots(case) > max_active
    assert int(status.host[0]) == (STATUS_CAPACITY if beyond else 0)
    device.forget()


@pytest.mark.usefixtures("numbering")
@pytest.mark.parametrize("row_order", ORDERS)
@pytest.mark.parametrize("case", [*ROUTINGS, LARGE], ids=lambda case: case.name)
def test_plans_of_few_of_many_slots(case: RoutingCase, row_order: str, emulated: Device) -> None:
    _schedule(emulated, case, row_order)
    case = spread(case, 500)
    for more in (0, 1, -1):
        _check_numbered(emulated, case, row_order, max(0, held_slots(case) + more))


@pytest.mark.usefixtures("numbering")
@given(routing_cases(), st.sampled_from(ORDERS), st.integers(0, 4), st.integers(2, 1024))
@settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_plans_of_drawn_slots(
    emulated: Device, case: RoutingCase, row_order: str, max_active: int, slots: int
) -> None:
    if slots > case.max_loras:
        case = spread(case, slots)
    emulated.schedule = Schedule(slots)
    _check_numbered(emulated, case, row_order, max_active)


@pytest.mark.parametrize("tokens", [6, 300])
def test_a_slot_out_of_range_is_reported_and_counts_as_none(tokens: int, emulated: Device) -> None:
    case = random_case(8, tokens, 8, 16, 4)
    slots, clean = case.token_to_slot.copy(), case.token_to_slot.copy()
    slots[3], clean[3] = 4, -1
    want = reference.route(case.topk_ids, clean, **case.sizes)  # type: ignore[arg-type]
    for op in (ops.route, ops.plan):
        status = emulated.status()
        args = (emulated.array(case.topk_ids), emulated.array(slots))
        got: Any = op(*args, **case.sizes, status=status)  # type: ignore[operator]
        assert int(status.host[0]) == STATUS_BAD_SLOT
        assert_same_lists(got[0] if op is ops.plan else got, want)


def _table(modules: int, max_loras: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    table = np.zeros((modules, max_loras), SLOT_ENTRY)
    for name in ("a_ptr", "b_ptr"):
        table[name] = rng.integers(1, 2**48, table.shape).astype(np.uint64)
    for name in ("a_expert_stride", "b_expert_stride"):
        table[name] = rng.integers(0, 2**33, table.shape) * (rng.random(table.shape) < 0.8)
    table["rank"] = rng.integers(0, 9, table.shape)
    table["scale"] = rng.random(table.shape).astype(np.float32)
    return table.view(np.uint8).reshape(modules, max_loras, -1)


POINTERS = [*hostile_routings(), random_case(5, 100, 4, 1025, 6, foreign_share=0.2, start_expert=9)]


@pytest.mark.parametrize("case", POINTERS, ids=lambda case: case.name)
def test_pointers_and_problems(case: RoutingCase, emulated: Device) -> None:
    table, routing = _table(3, case.max_loras), _route(case)
    emulated.schedule = Schedule(len(case.topk_ids), pause=1_000)
    here = emulated.upload(routing)
    tokens = reference.slot_lookup(case.token_to_slot, table)
    got = ops.slot_lookup(emulated.array(case.token_to_slot), emulated.array(table))
    assert_same_lists(got, tokens)
    rows = reference.pointer_expand(routing, tokens)
    assert_same_lists(ops.pointer_expand(here, got), rows)

    sizes: dict[str, Any] = {"x_ptr": 1 << 40, "h_ptr": 1 << 41, "y_ptr": 1 << 42, "itemsize": 2}
    sizes |= {"in_features": 100, "out_features": 72}
    for aggregate, splitk in itertools.product((True, False), (None, 3)):
        options = {**sizes, "max_rank": 8, "aggregate": aggregate, "splitk_slices": splitk}
        want = reference.build_problems(rows, routing, 1, **options)
        count = int(want.shrink.count[0])
        fields = (*"mnkabd", "lda", "ldb", "ldd", "alpha")
        counts = dict.fromkeys(fields, count) | {"splitk_offsets": count + 1}
        problems = ops.build_problems(emulated.upload(rows), here, 1, **options)
        assert_same_lists(problems, want, counts)

    experts = {k: sizes[k] for k in ("x_ptr", "y_ptr", "itemsize", "in_features", "out_features")}
    base = reference.expert_problems(routing, w_ptr=1 << 43, **experts)
    assert_same_lists(ops.expert_problems(here, w_ptr=1 << 43, **experts), base)


def test_a_rank_out_of_range_is_reported_and_becomes_none(emulated: Device) -> None:
    case = random_case(9, 40, 2, 4, 3)
    routing = _route(case)
    tokens = reference.slot_lookup(case.token_to_slot, _table(1, 3))
    rows = reference.pointer_expand(routing, tokens)
    rows.rank[0, 5:9] = 9
    sizes: dict[str, Any] = {"x_ptr": 0, "h_ptr": 0, "y_ptr": 0, "itemsize": 2, "max_rank": 8}
    sizes |= {"in_features": 16, "out_features": 16}
    status, word = np.zeros(1, np.int32), emulated.status()
    want = reference.build_problems(rows, routing, 0, status=status, **sizes)
    here = emulated.upload(rows), emulated.upload(routing)
    got = ops.build_problems(*here, 0, status=word, **sizes)
    assert int(word.host[0]) == int(status[0]) == STATUS_BAD_RANK
    count = int(want.shrink.count[0])
    fields = dict.fromkeys((*"mnkabd", "lda", "ldb", "ldd", "alpha"), count)
    assert_same_lists(got.shrink, want.shrink, fields)
    assert_same_lists(got.expand, want.expand, fields)
