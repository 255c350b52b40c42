"""slot_lookup, pointer_expand, build_problems and expert_problems, exactly."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_util import RoutingCase, brute_rows, make_case, random_case, routing_cases

from cupylora.errors import ArgumentError, CapacityError
from cupylora.reference.build_problems import build_problems
from cupylora.reference.expert_problems import expert_problems
from cupylora.reference.pointer_expand import pointer_expand
from cupylora.reference.route import route
from cupylora.reference.slot_lookup import slot_lookup
from cupylora.worklists import (
    SLOT_ENTRY,
    STATUS_BAD_RANK,
    STATUS_BAD_SLOT,
    GemmProblems,
    LoraProblems,
    Routing,
    RowLora,
    TokenLora,
)

MAX_RANK = 64
SIZES = {"x_ptr": 10_000, "h_ptr": 2_000_000, "y_ptr": 30_000_000, "itemsize": 2}
SIZES |= {"in_features": 100, "out_features": 36, "max_rank": MAX_RANK}


def _table(seed: int, modules: int, max_loras: int, *, shared: bool = False) -> np.ndarray:
    """Records with made-up addresses; some have rank 0 (and yet something in the other fields)."""
    rng = np.random.default_rng(seed)
    table = np.zeros((modules, max_loras), SLOT_ENTRY)
    table["a_ptr"] = rng.integers(2**40, 2**48, table.shape)
    table["b_ptr"] = rng.integers(2**40, 2**48, table.shape)
    table["a_expert_stride"] = 0 if shared else rng.integers(1, 2**34, table.shape)
    table["b_expert_stride"] = rng.integers(1, 2**34, table.shape)
    table["rank"] = rng.integers(0, 4, table.shape) * 7
    table["scale"] = rng.random(table.shape) + 1.5
    return table


def _bytes(table: np.ndarray) -> np.ndarray:
    return table.view(np.uint8).reshape(*table.shape, SLOT_ENTRY.itemsize)


def _expand(
    case: RoutingCase, table: np.ndarray, row_order: str = "token_major"
) -> tuple[Routing, TokenLora, RowLora]:
    routing = route(case.topk_ids, case.token_to_slot, row_order=row_order, **case.sizes)  # type: ignore[arg-type]
    tokens = slot_lookup(case.token_to_slot, _bytes(table), max_rank=MAX_RANK)
    return routing, tokens, pointer_expand(routing, tokens)


def _check_rows(case: RoutingCase, table: np.ndarray, routing: Routing, rows: RowLora) -> None:
    """Every field of every row against the table, in Python integers."""
    valid = brute_rows(case, routing.row_to_pair.tolist(), routing.row_order)
    ghosts = case.topk_ids.size - len(valid)
    assert rows.token.tolist() == [token for *_, token in valid] + [-1] * ghosts
    assert rows.expert.tolist() == [expert for expert, *_ in valid] + [-1] * ghosts
    for module in range(len(table)):
        expected = []
        for expert, slot, _ in valid:
            entry = table[module, slot]
            if slot < 0 or entry["rank"] == 0:
                expected.append((0, 0, 0, 0.0))
                continue
            step = expert + case.start_expert
            a = int(entry["a_ptr"]) + step * int(entry["a_expert_stride"])
            b = int(entry["b_ptr"]) + step * int(entry["b_expert_stride"])
            expected.append((int(entry["rank"]), a, b, float(entry["scale"])))
        expected += [(0, 0, 0, 0.0)] * ghosts
        columns = (rows.rank, rows.a_ptr, rows.b_ptr, rows.scale)
        got = list(zip(*(column[module].tolist() for column in columns), strict=True))
        assert got == expected


def test_lookup_gives_zeros_to_tokens_without_an_adapter() -> None:
    table = _table(0, 2, 3)
    table["rank"] = [[4, 0, 8], [16, 2, 0]]
    tokens = slot_lookup(np.array([2, -1, 1, -9], np.int32), _bytes(table), max_rank=MAX_RANK)
    assert tokens.rank.tolist() == [[8, 0, 0, 0], [0, 0, 2, 0]]
    for field, source in (("a_ptr", "a_ptr"), ("b_stride", "b_expert_stride"), ("scale", "scale")):
        values = getattr(tokens, field)
        assert values[0].tolist() == [table[source][0, 2], 0, 0, 0]
        assert values[1].tolist() == [0, 0, table[source][1, 1], 0]


@pytest.mark.parametrize("rank", [-1, MAX_RANK + 1])
def test_lookup_refuses_or_flags_a_rank_out_of_range(rank: int) -> None:
    table = _table(0, 2, 3)
    table["rank"] = 4
    table["rank"][1, 2] = rank
    slots = np.array([0, 2], np.int32)
    with pytest.raises(ArgumentError, match=rf"rank {rank} at \[module, token\] \[1, 1\].*=64"):
        slot_lookup(slots, _bytes(table), max_rank=MAX_RANK)
    status = np.zeros(1, np.int32)
    tokens = slot_lookup(slots, _bytes(table), max_rank=MAX_RANK, status=status)
    assert status[0] == STATUS_BAD_RANK
    assert tokens.rank.tolist() == [[4, 4], [4, 0]]
    assert tokens.a_ptr[1, 1] == 0
    unused = slot_lookup(slots[:1], _bytes(table), max_rank=MAX_RANK)
    assert unused.rank.tolist() == [[4], [4]]


def test_lookup_refuses_or_flags_a_slot_out_of_range() -> None:
    table, slots = _table(0, 1, 3), np.array([0, 3], np.int32)
    with pytest.raises(ArgumentError, match=r"token_to_slot\[1\] is 3; there are 3 slots"):
        slot_lookup(slots, _bytes(table), max_rank=MAX_RANK)
    status = np.full(1, STATUS_BAD_RANK, np.int32)
    tokens = slot_lookup(slots, _bytes(table), max_rank=MAX_RANK, status=status)
    assert status[0] == STATUS_BAD_RANK | STATUS_BAD_SLOT
    assert tokens.rank[0, 1] == 0


@settings(max_examples=80, deadline=None)
@given(routing_cases(), st.sampled_from(["token_major", "k_major"]), st.integers(0, 99))
def test_expansion_of_drawn_routings(case: RoutingCase, row_order: str, seed: int) -> None:
    table = _table(seed, 3, case.max_loras, shared=seed % 2 == 0)
    routing, _, rows = _expand(case, table, row_order)
    _check_rows(case, table, routing, rows)


@pytest.mark.parametrize("experts", [1025, 1536])
def test_expansion_over_many_experts_with_an_offset(experts: int) -> None:
    case = random_case(1, 60, 6, experts, 4, foreign_share=0.1, start_expert=500)
    case.topk_ids[7, 2] = 500 + 1024
    table = _table(2, 2, 4)
    routing, _, rows = _expand(case, table)
    _check_rows(case, table, routing, rows)


def test_shared_factor_has_one_address_for_all_experts() -> None:
    case = make_case("", [[0], [3], [7]], [1, 1, 1], 8, 2)
    table = _table(3, 1, 2, shared=True)
    table["rank"] = 8
    _, _, rows = _expand(case, table)
    assert rows.a_ptr[0].tolist() == [int(table["a_ptr"][0, 1])] * 3
    assert len(set(rows.b_ptr[0].tolist())) == 3


def test_ghost_and_base_rows_overwrite_what_was_there() -> None:
    case = make_case("", [[0, -1], [1, 9], [0, 1]], [0, -1, 1], 2, 2)
    table = _table(4, 2, 2)
    table["rank"] = 8
    routing, tokens, fresh = _expand(case, table)
    stale = RowLora(*(np.full_like(getattr(fresh, field.name), 77) for field in fields(RowLora)))
    assert pointer_expand(routing, tokens, out=stale).token is stale.token
    for field in fields(RowLora):
        assert (getattr(stale, field.name) == getattr(fresh, field.name)).all()
    _check_rows(case, table, routing, stale)
    assert stale.token[-2:].tolist() == [-1, -1]


def _brute_runs(
    rows: RowLora, module: int, valid: int, *, aggregate: bool
) -> list[tuple[int, int, tuple[int, int, int, float]]]:
    """(first row, rows, (rank, a, b, scale)) of each problem."""
    total = valid if aggregate else len(rows.token)
    runs: list[tuple[int, int, tuple[int, int, int, float]]] = []
    keys: list[object] = []
    for row in range(total):
        shared = (
            int(rows.rank[module, row]),
            int(rows.a_ptr[module, row]),
            int(rows.b_ptr[module, row]),
            float(rows.scale[module, row]),
        )
        key = (int(rows.expert[row]), shared)
        if aggregate and keys and keys[-1] == key:
            first, count, _ = runs[-1]
            runs[-1] = (first, count + 1, shared)
        else:
            runs.append((row, int(row < valid), shared))
            keys.append(key)
    return runs


def _problem(problems: GemmProblems, p: int) -> dict[str, float]:
    return {
        f.name: getattr(problems, f.name)[p].item() for f in fields(problems) if f.name != "count"
    }


def _check_problems(
    rows: RowLora, routing: Routing, module: int, *, aggregate: bool, slices: int | None
) -> LoraProblems:
    got = build_problems(
        rows, routing, module, aggregate=aggregate, splitk_slices=slices, ldx=104, ldy=72, **SIZES
    )
    valid = int(routing.expert_first_token_offset[-1])
    runs = _brute_runs(rows, module, valid, aggregate=aggregate)
    assert got.shrink.count.tolist() == got.expand.count.tolist() == [len(runs)]
    for p, (first, count, (rank, a, b, scale)) in enumerate(runs):
        here = count > 0
        x = SIZES["x_ptr"] + first * 104 * 2 if here else 0
        h = SIZES["h_ptr"] + first * MAX_RANK * 2 if here else 0
        y = SIZES["y_ptr"] + first * 72 * 2 if here else 0
        assert _problem(got.shrink, p) == {
            "m": count,
            "n": rank,
            "k": 100 * here,
            "a": x,
            "b": a,
            "d": h,
            "lda": 104,
            "ldb": 100,
            "ldd": MAX_RANK,
            "alpha": 1,
        }
        assert _problem(got.expand, p) == {
            "m": count,
            "n": 36 * here,
            "k": rank,
            "a": h,
            "b": b,
            "d": y,
            "lda": MAX_RANK,
            "ldb": rank,
            "ldd": 72,
            "alpha": scale,
        }
    if slices is None:
        assert got.splitk_offsets is None
    else:
        bounds = [first for first, *_ in runs] + [valid if aggregate else routing.num_rows]
        offsets = got.splitk_offsets
        assert offsets is not None
        assert offsets.dtype == np.int64
        assert offsets[: len(bounds)].tolist() == [b * MAX_RANK * slices for b in bounds]
    return got


@settings(max_examples=80, deadline=None)
@given(routing_cases(), st.booleans(), st.sampled_from([None, 1, 4]), st.integers(0, 99))
def test_problems_of_drawn_routings(
    case: RoutingCase, aggregate: bool, slices: int | None, seed: int
) -> None:
    routing, _, rows = _expand(case, _table(seed, 2, case.max_loras))
    _check_problems(rows, routing, seed % 2, aggregate=aggregate, slices=slices)


def test_base_rows_between_adapters_split_the_runs() -> None:
    case = make_case("", np.zeros((5, 1)), [0, 0, -1, -1, 0], 1, 1)
    table = _table(0, 1, 1)
    table["rank"] = 8
    routing, tokens, _ = _expand(case, table)
    in_batch_order = replace(routing, row_to_pair=np.arange(5, dtype=np.int32))
    rows = pointer_expand(in_batch_order, tokens)
    got = _check_problems(rows, in_batch_order, 0, aggregate=True, slices=2)
    assert got.shrink.m[:3].tolist() == [2, 2, 1]
    assert got.shrink.n[:3].tolist() == [8, 0, 8]
    assert got.expand.k[:3].tolist() == [8, 0, 8]
    assert got.expand.b[1] == got.shrink.b[1] == 0


def test_offsets_beyond_32_bits() -> None:
    case = make_case("", np.zeros((9, 1)), [0] * 9, 1, 1)
    table = _table(0, 1, 1)
    table["rank"] = 8
    routing, _, rows = _expand(case, table)
    got = build_problems(rows, routing, 0, aggregate=False, splitk_slices=2**30, ldx=2**31, **SIZES)
    assert got.splitk_offsets is not None
    assert got.splitk_offsets[9] == 9 * MAX_RANK * 2**30
    assert got.shrink.a[8] == SIZES["x_ptr"] + 8 * 2**31 * 2


def test_h_may_have_another_item_size() -> None:
    case = make_case("", np.zeros((3, 1)), [0, -1, 0], 1, 1)
    routing, _, rows = _expand(case, _table(5, 1, 1))
    got = build_problems(rows, routing, 0, aggregate=False, h_itemsize=4, **SIZES)
    assert np.diff(got.shrink.d).tolist() == [MAX_RANK * 4] * 2
    assert got.expand.a.tolist() == got.shrink.d.tolist()


@pytest.mark.parametrize("rank", [-1, MAX_RANK + 1])
@pytest.mark.parametrize("aggregate", [True, False])
def test_problem_rank_out_of_range(rank: int, aggregate: bool) -> None:
    case = make_case("", np.zeros((4, 1)), [-1, 0, 0, 1], 1, 2)
    table = _table(0, 1, 2)
    table["rank"] = 8
    routing, _, rows = _expand(case, table)
    rows.rank[0, 1:3] = rank
    with pytest.raises(ArgumentError, match=rf"rank {rank} at module 0, row \[1\].*max_rank=64"):
        build_problems(rows, routing, 0, aggregate=aggregate, **SIZES)
    status = np.zeros(1, np.int32)
    got = build_problems(rows, routing, 0, aggregate=aggregate, status=status, **SIZES)
    assert status[0] == STATUS_BAD_RANK
    count = int(got.shrink.count[0])
    assert got.shrink.m[:count].tolist() == ([3, 1] if aggregate else [1, 1, 1, 1])
    assert got.shrink.n[:count].tolist() == ([0, 8] if aggregate else [0, 0, 0, 8])
    assert got.expand.b[:1].tolist() == [0]


def test_problem_room_and_out() -> None:
    case = make_case("", np.zeros((3, 1)), [0, 1, -1], 1, 2)
    table = _table(0, 1, 2)
    table["rank"] = 8
    routing, _, rows = _expand(case, table)
    with pytest.raises(CapacityError, match="form 3 problems, but there is room for 2"):
        build_problems(rows, routing, 0, max_problems=2, **SIZES)
    out = build_problems(rows, routing, 0, max_problems=5, splitk_slices=2, **SIZES)
    for problems in (out.shrink, out.expand):
        for field in fields(problems):
            getattr(problems, field.name)[:] = 55
    again = build_problems(rows, routing, 0, max_problems=5, splitk_slices=2, out=out, **SIZES)
    assert again.shrink.m is out.shrink.m
    assert out.shrink.m.tolist() == [1, 1, 1, 55, 55]
    with pytest.raises(ArgumentError, match="out has its splitk_offsets"):
        build_problems(rows, routing, 0, max_problems=5, out=out, **SIZES)
    with pytest.raises(ArgumentError, match=r"out\.shrink\.m has shape \(5,\); \[3\]"):
        build_problems(rows, routing, 0, splitk_slices=2, out=out, **SIZES)


def test_nothing_routed_makes_no_problem() -> None:
    case = make_case("", np.full((3, 2), -1), [0, 0, 0], 2, 1)
    routing, _, rows = _expand(case, _table(0, 1, 1))
    got = build_problems(rows, routing, 0, splitk_slices=3, **SIZES)
    assert got.shrink.count.tolist() == [0]
    assert got.splitk_offsets is not None
    assert got.splitk_offsets[0] == 0
    each = build_problems(rows, routing, 0, aggregate=False, **SIZES)
    assert each.expand.count.tolist() == [6]
    assert not each.expand.m.any()


@settings(max_examples=40, deadline=None)
@given(routing_cases())
def test_expert_problems(case: RoutingCase) -> None:
    routing = route(case.topk_ids, case.token_to_slot, **case.sizes)
    got = expert_problems(
        routing,
        x_ptr=1000,
        w_ptr=5_000_000,
        y_ptr=90_000_000,
        itemsize=2,
        in_features=12,
        out_features=20,
        ldy=24,
    )
    assert got.count.tolist() == [case.num_experts]
    offsets = routing.expert_first_token_offset.tolist()
    for e in range(case.num_experts):
        assert _problem(got, e) == {
            "m": offsets[e + 1] - offsets[e],
            "n": 20,
            "k": 12,
            "alpha": 1,
            "a": 1000 + offsets[e] * 24,
            "b": 5_000_000 + e * 480,
            "d": 90_000_000 + offsets[e] * 48,
            "lda": 12,
            "ldb": 12,
            "ldd": 24,
        }
