"""lora_delta against the float64 oracle, and what it must leave alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_util import (
    BOUNDS,
    CASE_11_RANKS,
    Factors,
    HostMemory,
    ModuleWeights,
    RoutingCase,
    assert_close,
    bits_of,
    build_entries,
    comparable_rows,
    expert_order,
    fragile_values,
    hostile_routings,
    make_case,
    pack_by_pieces,
    pair_deltas,
    random_case,
    random_module,
    random_values,
    routing_cases,
)

from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.reference._memory import matrix_at, shrink_factor_at
from cupylora.reference.build_segments import build_segments
from cupylora.reference.lora_delta import lora_delta
from cupylora.reference.oracle import lora_delta_oracle
from cupylora.reference.route import route
from cupylora.worklists import PACKED, SLOT_ENTRY, STATUS_BAD_RANK, LoraSlice, Routing

DTYPES = tuple(BOUNDS)


def _route(case: RoutingCase, row_order: str = "token_major") -> Routing:
    return route(case.topk_ids, case.token_to_slot, row_order=row_order, **case.sizes)  # type: ignore[arg-type]


def _run(
    case: RoutingCase,
    routing: Routing,
    x: np.ndarray,
    y: np.ndarray,
    modules: list[ModuleWeights],
    *,
    slices: list[LoraSlice] | None = None,
    tile_rows: int = 8,
    packed: bool = False,
    shift: int = 0,
    max_rank: int = 512,
    **options: Any,
) -> None:
    memory = HostMemory(shift)
    entries = build_entries(modules, memory.upload, packed=packed)
    segments = build_segments(
        routing, case.token_to_slot, max_loras=case.max_loras, tile_rows=tile_rows
    )
    slices = slices or [LoraSlice(modules[0].out_features)]
    sizes = {"in_features": modules[0].in_features, "max_rank": max_rank}
    lora_delta(x, y, segments, routing, entries, slices, **sizes, **options)


def _check(
    case: RoutingCase,
    module: ModuleWeights,
    dtype: str,
    *,
    preset: bool,
    seed: int = 0,
    **options: Any,
) -> None:
    """One slice, x by token and y by pair, on y0 = 0 or y0 of the delta's size."""
    rng = np.random.default_rng(seed)
    x = random_values(rng, (len(case.topk_ids), module.in_features), dtype)
    delta = pair_deltas(case, x, module)
    y0 = comparable_rows(rng, delta, dtype) if preset else np.zeros(delta.shape, x.dtype)
    y = y0.copy()
    _run(case, _route(case), x, y, [module], **options)
    assert_close(y.astype(np.float64) - y0.astype(np.float64), delta, BOUNDS[dtype])
    idle = ~delta.any(axis=1)
    assert (bits_of(y)[idle] == bits_of(y0)[idle]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", [False, True], ids=["y0=0", "y0~delta"])
@pytest.mark.parametrize("packed", [False, True], ids=["row_major", "packed"])
def test_mixed_ranks_and_base_rows(dtype: str, preset: bool, packed: bool) -> None:
    ranks = CASE_11_RANKS
    slots = [*range(len(ranks)), -1] * 4
    rng = np.random.default_rng(1)
    case = make_case("ranks", rng.integers(0, 2, (len(slots), 1)), slots, 2, len(ranks))
    module = random_module(rng, ranks, 200, 72, 2, dtype)
    _check(case, module, dtype, preset=preset, packed=packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width_in", "width_out"), [(100, 101), (1, 3424), (64, 3696), (130, 96)])
@pytest.mark.parametrize("packed", [False, True], ids=["row_major", "packed"])
def test_odd_widths_and_unaligned_factors(
    dtype: str, width_in: int, width_out: int, packed: bool
) -> None:
    case = random_case(2, 24, 2, 3, 2)
    module = random_module(np.random.default_rng(3), [5, 12], width_in, width_out, 3, dtype)
    shift = resolve_dtype(dtype).itemsize
    _check(case, module, dtype, preset=True, packed=packed, shift=shift, max_rank=12)


@pytest.mark.parametrize("case", hostile_routings(), ids=lambda case: case.name)
def test_hostile_routings(case: RoutingCase) -> None:
    experts = case.start_expert + case.num_experts
    ranks = [(3, 8, 1)[slot % 3] for slot in range(case.max_loras)]
    module = random_module(np.random.default_rng(4), ranks, 40, 24, experts, "bfloat16")
    _check(case, module, "bfloat16", preset=True)


@settings(max_examples=60, deadline=None)
@given(
    routing_cases(),
    st.sampled_from(["token_major", "k_major"]),
    st.sampled_from(["token", "pair", "row"]),
    st.sampled_from(["pair", "row"]),
    st.sampled_from(["", "a", "b", "ab"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_layout_of_x_and_y(
    case: RoutingCase,
    row_order: str,
    x_rows: str,
    y_rows: str,
    share: str,
    foreign: bool,
    seed: int,
) -> None:
    """Foreign orders, k-major pairs, shared factors, x and y by token, pair or row."""
    rng = np.random.default_rng(seed)
    ranks = [(4, 0, 9, 2)[slot] for slot in range(case.max_loras)]
    experts = case.start_expert + case.num_experts
    module = random_module(rng, ranks, 24, 16, experts, "float32", share=share)
    routing = _route(case, row_order)
    if foreign:
        routing = expert_order(routing, seed)
    x = random_values(rng, (len(case.topk_ids), 24), "float32")
    delta = pair_deltas(case, x, module, row_order)
    valid = int(routing.expert_first_token_offset[-1])
    pair_of_row = routing.row_to_pair[:valid]
    tokens, top_k = case.topk_ids.shape
    pairs = np.arange(tokens * top_k)
    given = x
    if x_rows != "token":
        given = x[pairs % max(1, tokens) if row_order == "k_major" else pairs // top_k]
    if x_rows == "row":
        # What lies in ghost rows must not be read into anything.
        by_row = np.full_like(given, np.nan)
        by_row[:valid] = given[pair_of_row]
        given = by_row
    expected = delta
    if y_rows == "row":
        expected = np.zeros_like(delta)
        expected[:valid] = delta[pair_of_row]
    y = np.zeros(delta.shape, np.float32)
    _run(case, routing, given, y, [module], x_rows=x_rows, y_rows=y_rows)
    assert_close(y, expected, BOUNDS["float32"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_different_width_share_x(dtype: str) -> None:
    """q, k and v of different widths, slots that lack one, columns that belong to nobody."""
    case = make_case("dense", np.zeros((30, 1)), np.arange(30) % 4 - 1, 1, 3)
    rng = np.random.default_rng(5)
    modules = [
        random_module(rng, ranks, 96, width, 1, dtype)
        for ranks, width in (((8, 3, 16), 64), ((8, 0, 2), 24), ((5, 3, 0), 32))
    ]
    slices = [LoraSlice(64), LoraSlice(24, 70), LoraSlice(32, 100)]
    x = random_values(rng, (30, 96), dtype)
    y = np.full((30, 135), 0.5, x.dtype)
    expected = np.zeros((30, 135))
    for part, module in zip(slices, modules, strict=True):
        expected[:, part.y_column :][:, : part.out_features] = pair_deltas(case, x, module)
    y0 = y.astype(np.float64)
    _run(case, _route(case), x, y, modules, slices=slices)
    # y0 of 0.5 is of the delta's size; a row lacking some slices has less to be measured against.
    assert_close(y.astype(np.float64) - y0, expected, BOUNDS[dtype] * 1.25)
    assert (y[:, 64:70] == 0.5).all()
    assert (y[:, 132:] == 0.5).all()
    assert (y[expected == 0] == 0.5).all()


def test_interleaved_gate_and_up() -> None:
    case = random_case(6, 20, 2, 3, 2)
    rng = np.random.default_rng(7)
    gate, up = (random_module(rng, [4, 6], 32, 24, 3, "float32") for _ in range(2))
    x = random_values(rng, (20, 32), "float32")
    y = np.zeros((40, 48), np.float32)
    slices = [LoraSlice(24, 0, 2), LoraSlice(24, 1, 2)]
    _run(case, _route(case), x, y, [gate, up], slices=slices)
    assert_close(y[:, 0::2], pair_deltas(case, x, gate), BOUNDS["float32"])
    assert_close(y[:, 1::2], pair_deltas(case, x, up), BOUNDS["float32"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_no_adapter_keep_every_bit(dtype: str) -> None:
    """-0.0, NaN payloads, subnormals: in base rows, foreign pairs, slots without the module."""
    case = random_case(8, 60, 2, 4, 3, base_share=0.4, foreign_share=0.3)
    rng = np.random.default_rng(9)
    module = random_module(rng, [8, 0, 4], 48, 21, 4, dtype)
    x = random_values(rng, (60, 48), dtype)
    delta = pair_deltas(case, x, module)
    idle = ~delta.any(axis=1)
    fragile = fragile_values(delta.shape, dtype)
    y = np.zeros(delta.shape, x.dtype)
    y[idle] = fragile[idle]
    _run(case, _route(case), x, y, [module])
    assert 60 < idle.sum() < 120
    assert (bits_of(y)[idle] == bits_of(fragile)[idle]).all()
    assert_close(y[~idle], delta[~idle], BOUNDS[dtype])


def test_shrink_beyond_the_range_of_float16() -> None:
    """x = 8, A = 4, K = 4096: 131,072 in the shrink, twice what float16 holds."""
    k, out, scale = 4096, 64, 0.5
    a = np.full((1, 2, k), 4, np.float16)
    b = np.full((1, out, 2), 1e-4, np.float16)
    module = ModuleWeights(k, out, (Factors(a, b, scale),))
    case = make_case("", [[0], [0]], [0, -1], 1, 1)
    x, y = np.full((2, k), 8, np.float16), np.zeros((2, out), np.float16)
    _run(case, _route(case), x, y, [module])
    expected = np.zeros((2, out))
    expected[0] = scale * 2 * 131_072 * float(np.float16(1e-4))
    assert_close(y, expected, BOUNDS["float16"])
    assert expected[0, 0] == pytest.approx(13.1, rel=0.01)


def test_overflow_of_the_output_is_infinite_without_a_warning() -> None:
    module = ModuleWeights(
        4, 4, (Factors(np.ones((1, 1, 4), np.float16), np.ones((1, 4, 1), np.float16), 4.5),)
    )
    case = make_case("", [[0]], [0], 1, 1)
    y = np.zeros((1, 4), np.float16)
    _run(case, _route(case), np.full((1, 4), 6e4, np.float16), y, [module])
    assert np.isposinf(y).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_y_is_rounded_once(dtype: str) -> None:
    """y + delta in float32, one rounding: not the delta rounded, then added."""
    case = make_case("", [[0]] * 16, [0] * 16, 1, 1)
    rng = np.random.default_rng(10)
    module = random_module(rng, [4], 8, 16, 1, dtype)
    x = random_values(rng, (16, 8), dtype)
    y = random_values(rng, (16, 16), dtype)
    expected = y.astype(np.float64) + pair_deltas(case, x, module)
    _run(case, _route(case), x, y, [module])
    unit = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}[dtype]
    slack = 1e-6 * np.abs(expected).max()
    assert (np.abs(y - expected) <= unit * 2 ** np.ceil(np.log2(np.abs(expected))) + slack).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_bits_alone_among_others_and_again(dtype: str) -> None:
    """One long row, K 8192: alone, with 64 rows of the same and of other slots, and repeated."""
    rng = np.random.default_rng(11)
    module = random_module(rng, [32, 7], 8192, 48, 1, dtype)
    x = random_values(rng, (65, 8192), dtype)
    y0 = random_values(rng, (65, 48), dtype)
    together = make_case("", np.zeros((65, 1)), [0] * 30 + [1, -1] * 17 + [0], 1, 2)
    y = y0.copy()
    _run(together, _route(together), x, y, [module], packed=True)
    for row in (0, 29, 30, 64):
        alone = make_case("", [[0]], [int(together.token_to_slot[row])], 1, 2)
        for _ in range(10):
            one = y0[row : row + 1].copy()
            _run(alone, _route(alone), x[row : row + 1], one, [module])
            assert (bits_of(one) == bits_of(y[row : row + 1])).all()


def test_more_tokens_than_a_grid_dimension_holds() -> None:
    case = make_case("", np.zeros((70_000, 1)), np.arange(70_000) % 3 - 1, 1, 2)
    module = random_module(np.random.default_rng(14), [1, 1], 16, 16, 1, "bfloat16")
    _check(case, module, "bfloat16", preset=True, tile_rows=32)


def test_tile_height_does_not_matter() -> None:
    case = random_case(12, 300, 2, 3, 2)
    rng = np.random.default_rng(13)
    module = random_module(rng, [8, 3], 64, 40, 3, "bfloat16")
    x = random_values(rng, (300, 64), "bfloat16")
    results = []
    for tile_rows in (8, 16, 32):
        y = np.zeros((600, 40), x.dtype)
        _run(case, _route(case), x, y, [module], tile_rows=tile_rows)
        results.append(bits_of(y))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width_in", [1, 31, 64, 100, 192, 200])
@pytest.mark.parametrize("rank", [1, 8, 13])
def test_packed_blocks_are_read_as_the_layout_says(dtype: str, width_in: int, rank: int) -> None:
    a = random_values(np.random.default_rng(0), (rank, width_in), dtype)
    memory = HostMemory(shift=a.itemsize)
    address = memory.upload(pack_by_pieces(a))
    got = shrink_factor_at(address, rank, width_in, PACKED, a.dtype)
    assert (bits_of(np.ascontiguousarray(got)) == bits_of(a)).all()


def test_matrix_at_writes_through_with_a_leading_dimension() -> None:
    memory = np.arange(12, dtype=np.float32)
    view = matrix_at(memory.ctypes.data + 4, 2, 3, 5, memory.dtype)
    assert view.tolist() == [[1, 2, 3], [6, 7, 8]]
    view[1] = 0
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 9, 10, 11]
    assert matrix_at(0, 0, 3, 3, memory.dtype).shape == (0, 3)


def test_oracle_of_one_delta_by_hand() -> None:
    a, b = np.array([[1.0, 2.0]]), np.array([[3.0], [-1.0]])
    assert lora_delta_oracle(np.array([[10.0, 1.0]]), a, b, 0.5).tolist() == [[18.0, -6.0]]


@pytest.fixture
def setting() -> dict[str, Any]:
    """Arguments of a sound call over 3 tokens, 2 choices and 2 slots of rank 8."""
    case = make_case("", [[0, 1], [1, 0], [0, 1]], [0, 1, -1], 2, 2)
    routing = _route(case)
    memory = HostMemory()
    module = random_module(np.random.default_rng(0), [8, 8], 16, 12, 2, "float32")
    return {
        "x": np.ones((3, 16), np.float32),
        "y": np.zeros((6, 12), np.float32),
        "segments": build_segments(routing, case.token_to_slot, max_loras=2),
        "routing": routing,
        "entries": build_entries([module], memory.upload),
        "slices": [LoraSlice(12)],
        "in_features": 16,
        "max_rank": 8,
        "memory": memory,
    }


def _call(setting: dict[str, Any], **changes: Any) -> None:
    lora_delta(**{name: v for name, v in (setting | changes).items() if name != "memory"})


def test_bad_arguments_are_named(setting: dict[str, Any]) -> None:
    y = setting["y"]
    frozen = y.copy()
    frozen.flags.writeable = False
    for changes, message in (
        ({"x": np.ones((3, 15), np.float32)}, r"x has shape \(3, 15\); \[3, 16\]"),
        ({"x_rows": "pair"}, r"x has shape \(3, 16\); \[6, 16\]"),
        ({"y": y.astype(np.float16)}, "y has dtype float16; float32"),
        ({"y": frozen}, "y is read-only"),
        ({"y": y.T.copy().T}, "y .* not C-contiguous"),
        ({"y_rows": "token"}, "y_rows is 'token'"),
        ({"slices": []}, "slices is empty"),
        ({"slices": [LoraSlice(13)]}, r"slices\[0\] ends at column 12; y has 12"),
        ({"slices": [LoraSlice(6), LoraSlice(6, 5)]}, r"slices\[1\] shares columns"),
        ({"entries": setting["entries"][:, :, :40]}, r"entries has shape \(1, 2, 40\)"),
        ({"slices": [LoraSlice(6), LoraSlice(6, 6)]}, r"entries has shape .*\[2, \*, 48\]"),
        ({"entries": setting["entries"][:, :1].copy()}, "built for 2 slots; entries have 1"),
        ({"max_rank": 7}, r"rank 8 at entries \[slice, slot\] \[0, 0\].*max_rank=7"),
        ({"max_rank": 513}, "max_rank is 513; 1 to 512"),
    ):
        with pytest.raises(ArgumentError, match=message):
            _call(setting, **changes)
    assert not y.any()


def test_bad_entry_is_named_before_y_is_touched(setting: dict[str, Any]) -> None:
    for field, value, message in (
        ("b_ptr", 0, r"\[0, 1\] has a null factor address"),
        ("a_layout", 2, r"\[0, 1\] has an a_layout other than"),
    ):
        entries = setting["entries"].copy()
        entries.view(SLOT_ENTRY)[field][0, 1] = value
        with pytest.raises(ArgumentError, match=message):
            _call(setting, entries=entries)
    assert not setting["y"].any()


def test_rank_out_of_range_is_flagged_where_a_status_word_is_given(setting: dict[str, Any]) -> None:
    entries, status = setting["entries"].copy(), np.zeros(1, np.int32)
    _call(setting, status=status)
    assert status[0] == 0
    assert setting["y"][:4].any(axis=1).all()
    setting["y"][:] = 0
    entries.view(SLOT_ENTRY)["rank"][0, 1] = -3
    _call(setting, entries=entries, status=status)
    assert status[0] == STATUS_BAD_RANK
    assert setting["y"].any(axis=1).tolist() == [True, True, False, False, False, False]


def test_tiles_outside_the_routing_are_refused(setting: dict[str, Any]) -> None:
    for column, value, part in itertools.zip_longest((0, 2), (6, 2), ("row range", "expert")):
        segments = setting["segments"]
        tiles = segments.tiles.copy()
        tiles[0, column] = value
        with pytest.raises(ArgumentError, match=rf"segments\.tiles\[0\] .* its {part} does not"):
            _call(setting, segments=replace(segments, tiles=tiles))
