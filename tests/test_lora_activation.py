"""lora_activation on either backend: the float64 oracle, and ``activation`` without a delta."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS, DTYPES
from chain_util import (
    Lists,
    Place,
    activation_answer,
    first_modules,
    make_lists,
    no_values,
    place_of,
    random_inputs,
    to_rows,
    unit_in_last_place,
)
from gpu_util import to_device
from problem_util import (
    BOUNDS,
    CASE_11_RANKS,
    ModuleWeights,
    RoutingCase,
    assert_close,
    bits_of,
    expert_order,
    hostile_routings,
    make_case,
    random_case,
    random_module,
    random_values,
)

from cupylora import ops, reference
from cupylora.errors import ArgumentError, CapacityError
from cupylora.shapes import MoeShape
from cupylora.worklists import SLOT_ENTRY, STATUS_BAD_RANK, STATUS_BAD_SLOT, TILE_ROWS

BLOCK = MoeShape(64, 40, 4, 2)
FORMS = {
    "silu": BLOCK,
    "gelu, up first": replace(BLOCK, activation="gelu", gate_up_layout="up_first"),
    "clamped, interleaved": replace(
        BLOCK, activation="swiglu_oai", gate_up_layout="interleaved", limit=1.0
    ),
    "relu2, interleaved": replace(BLOCK, activation="relu2", gate_up_layout="interleaved"),
    "plain relu2": replace(BLOCK, activation="relu2", gated=False),
    "plain gelu": replace(BLOCK, activation="gelu", gated=False),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def activate(
    x: np.ndarray,
    y: np.ndarray,
    moe: MoeShape,
    lists: Lists,
    place: Place,
    *,
    bias: np.ndarray | None = None,
    max_rank: int = 512,
    **options: Any,
) -> np.ndarray:
    y_here = place.put(y)
    result = ops.lora_activation(
        place.put(x),
        y_here,
        lists.segments,
        lists.routing,
        lists.entries,
        in_features=moe.hidden,
        max_rank=max_rank,
        bias=place.put(bias),
        **form_of(moe),
        **options,
    )
    np.testing.assert_array_equal(bits_of(place.get(y_here)), bits_of(y))
    return place.get(result)


def form_of(moe: MoeShape) -> dict[str, Any]:
    return {
        "kind": moe.activation,
        "gated": moe.gated,
        "layout": moe.gate_up_layout,
        "alpha": moe.alpha,
        "limit": moe.limit,
    }


def plain(
    y: np.ndarray, moe: MoeShape, lists: Lists, place: Place, bias: np.ndarray | None = None
) -> np.ndarray:
    """What ``activation`` makes of y, by pair."""
    options = {**form_of(moe), "routing": lists.routing, "bias": place.put(bias)}
    return place.get(ops.activation(place.put(y), **options))


def check(
    backend: str,
    case: RoutingCase,
    moe: MoeShape,
    modules: list[ModuleWeights],
    dtype: str,
    *,
    place: Place | None = None,
    bias: bool = False,
    row_order: str = "token_major",
    **options: Any,
) -> None:
    """Against the oracle, and against ``activation`` where there is no delta."""
    rng = np.random.default_rng(1)
    place = place or place_of(backend)
    x, y = random_inputs(rng, case, moe, dtype)
    values = random_values(rng, (case.num_experts, moe.first_width), dtype) if bias else None
    lists = make_lists(case, modules, place, row_order=row_order, **options)
    got = activate(x, y, moe, lists, place, bias=values)
    expected = activation_answer(case, x, y, modules, moe, bias=values, row_order=row_order)
    assert_close(got, expected, BOUNDS[dtype])
    idle = no_delta(case, modules, row_order)
    bare = plain(y, moe, lists, place, values)
    np.testing.assert_array_equal(bits_of(got[idle]), bits_of(bare[idle]))


def no_delta(case: RoutingCase, modules: list[ModuleWeights], row_order: str) -> np.ndarray:
    """Pairs whose slot touches none of the modules."""
    idle = np.ones(case.topk_ids.size, bool)
    for _, slot, pair, _ in case.local_pairs(row_order):
        idle[pair] = slot < 0 or all(module.slots[slot] is None for module in modules)
    return idle


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(backend: str, form: str, bias: bool, dtype: str) -> None:
    """Mixed ranks, slots without gate, without up and without both, foreign experts."""
    moe = FORMS[form]
    case = random_case(1, 50, 2, 4, 5, base_share=0.3, foreign_share=0.2, start_expert=2)
    ranks = [(16, 3, 0, 8, 0), (16, 5, 24, 0, 0)]
    modules = first_modules(np.random.default_rng(2), moe, ranks, 6, dtype)
    check(backend, case, moe, modules, dtype, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", hostile_routings(), ids=lambda case: case.name)
def test_hostile_routings(backend: str, case: RoutingCase, dtype: str) -> None:
    ranks = [(8, 3, 16)[slot % 3] for slot in range(case.max_loras)]
    experts = case.num_experts + case.start_expert
    modules = first_modules(np.random.default_rng(3), BLOCK, ranks, experts, dtype)
    check(backend, case, BLOCK, modules, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_rows", TILE_ROWS)
def test_all_ranks_together(backend: str, tile_rows: int, dtype: str) -> None:
    moe = replace(BLOCK, hidden=320, intermediate=136)
    case = random_case(4, 150, 2, 4, len(CASE_11_RANKS))
    modules = first_modules(np.random.default_rng(4), moe, CASE_11_RANKS, 4, dtype)
    check(backend, case, moe, modules, dtype, tile_rows=tile_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["gate_first", "interleaved"])
@pytest.mark.parametrize("width", [1, 3, 36, 101, 264])
def test_awkward_widths(backend: str, width: int, layout: str, dtype: str) -> None:
    moe = replace(BLOCK, hidden=100, intermediate=width, gate_up_layout=layout)
    case = random_case(5, 40, 2, 2, 4)
    modules = first_modules(np.random.default_rng(5), moe, (16, 5, 1, 24), 2, dtype)
    for tile_rows, packed in ((8, True), (32, False)):
        check(backend, case, moe, modules, dtype, bias=True, tile_rows=tile_rows, packed=packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("factor_shift", [0, 4])
def test_shifted_pointers(backend: str, factor_shift: int, shift: int, dtype: str) -> None:
    case = random_case(6, 30, 2, 2, 3)
    modules = first_modules(np.random.default_rng(6), BLOCK, (16, 64, 6), 2, dtype)
    place = place_of(backend, shift=shift, factor_shift=factor_shift)
    check(backend, case, BLOCK, modules, dtype, place=place, bias=True)


@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
@pytest.mark.parametrize("foreign", [False, True])
def test_row_maps_agree(backend: str, row_order: str, foreign: bool) -> None:
    """By pair and by row, in our order and in one sorted by expert alone: the same bits."""
    rng, place = np.random.default_rng(7), place_of(backend)
    case = random_case(7, 60, 3, 6, 4, foreign_share=0.2)
    moe = replace(BLOCK, experts=6, top_k=3)
    modules = first_modules(rng, moe, (8, 16, 3, 20), 6, "bfloat16")
    routing = reference.route(case.topk_ids, case.token_to_slot, row_order=row_order, **case.sizes)  # type: ignore[call-overload]
    if foreign:
        routing = expert_order(routing, 1)
    lists = make_lists(case, modules, place, routing=routing)
    x, y = random_inputs(rng, case, moe, "bfloat16")
    by_pair = activate(x, y, moe, lists, place)
    expected = activation_answer(case, x, y, modules, moe, row_order=row_order)
    assert_close(by_pair, expected, BOUNDS["bfloat16"])
    valid = int(routing.expert_first_token_offset[-1])
    permuted = reference.permute_rows(x, routing)
    by_row = activate(permuted, to_rows(y, routing), moe, lists, place, x_rows="row", rows="row")
    np.testing.assert_array_equal(
        bits_of(by_row[:valid]), bits_of(by_pair[routing.row_to_pair[:valid]])
    )
    assert not by_row[valid:].any()


def test_ghosts_and_foreign_pairs_stay_as_they_were(backend: str) -> None:
    case = random_case(8, 30, 2, 4, 2, base_share=0.4, foreign_share=0.4)
    rng, place = np.random.default_rng(8), place_of(backend)
    modules = first_modules(rng, BLOCK, (8, 4), 4, "bfloat16")
    lists = make_lists(case, modules, place)
    x, y = random_inputs(rng, case, BLOCK, "bfloat16")
    foreign = np.ones(60, bool)
    foreign[[pair for _, _, pair, _ in case.local_pairs("token_major")]] = False
    y[foreign] = np.nan
    out = place.put(no_values((60, BLOCK.intermediate), "bfloat16"))
    got = activate(x, y, BLOCK, lists, place, out=out)
    assert np.isnan(got[foreign].astype(np.float32)).all()
    assert np.isfinite(got[~foreign].astype(np.float32)).all()
    assert 10 < foreign.sum() < 50


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_is_rounded_but_the_result(backend: str, dtype: str) -> None:
    """Sums that y's type cannot hold reach the activation: half a unit of the result is all."""
    moe = replace(BLOCK, activation="silu")
    case = make_case("", np.zeros((40, 2)), np.zeros(40), 4, 1)
    rng, place = np.random.default_rng(9), place_of(backend)
    modules = first_modules(rng, moe, (8,), 4, dtype)
    lists = make_lists(case, modules, place)
    x, y = random_inputs(rng, case, moe, dtype)
    expected = activation_answer(case, x, y, modules, moe)
    got = activate(x, y, moe, lists, place).astype(np.float64)
    slack = {"bfloat16": 1e-4, "float16": 2e-5}[dtype] * (np.abs(expected) + 1)
    assert (np.abs(got - expected) <= unit_in_last_place(expected, dtype) + slack).all()
    # The two steps, which round y, do not keep this.
    for module, columns in zip(modules, (slice(0, 40), slice(40, 80)), strict=True):
        delta = (x.astype(np.float64) @ module.slots[0].a[0].astype(np.float64).T) @ module.slots[
            0
        ].b[0].astype(np.float64).T
        y[:, columns] = (y[:, columns] + module.slots[0].scale * np.repeat(delta, 2, 0)).astype(
            y.dtype
        )
    steps = plain(y, moe, lists, place).astype(np.float64)
    assert (np.abs(steps - expected) > unit_in_last_place(expected, dtype) + slack).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [16, 40])
def test_rows_do_not_depend_on_their_batch(backend: str, rank: int, dtype: str) -> None:
    """Alone, among 64 and among many, in tiles of any height."""
    tokens = 2600 if backend == "cuda" else 150
    moe = replace(BLOCK, hidden=2048, intermediate=72, experts=1, top_k=1)
    rng, place = np.random.default_rng(10), place_of(backend)
    modules = first_modules(rng, moe, (rank, 8), 1, dtype)
    case = make_case("", np.zeros((tokens, 1)), rng.integers(-1, 2, tokens), 1, 2)
    case.token_to_slot[:2] = 0, -1
    x, y = random_inputs(rng, case, moe, dtype)
    first = None
    for count, tile_rows in ((2, 8), (65, 8), (65, 32), (tokens, 16), (tokens, 32)):
        part = replace(
            case, topk_ids=case.topk_ids[:count], token_to_slot=case.token_to_slot[:count]
        )
        lists = make_lists(part, modules, place, tile_rows=tile_rows)
        got = activate(x[:count], y[:count], moe, lists, place, max_rank=rank)[:2]
        first = got if first is None else first
        np.testing.assert_array_equal(bits_of(got), bits_of(first))


def test_shared_factors(backend: str) -> None:
    case = random_case(11, 50, 2, 5, 3, start_expert=2)
    moe = replace(BLOCK, experts=5)
    for share in ("a", "b", "ab"):
        modules = first_modules(
            np.random.default_rng(11), moe, (8, 16, 4), 7, "bfloat16", share=share
        )
        check(backend, case, moe, modules, "bfloat16")


def test_no_tokens(backend: str) -> None:
    case = make_case("", np.zeros((0, 2)), [], 4, 2)
    modules = first_modules(np.random.default_rng(0), BLOCK, (8, 8), 4, "bfloat16")
    check(backend, case, BLOCK, modules, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_out_of_range_is_flagged_and_runs_as_zero(backend: str, dtype: str) -> None:
    case = random_case(12, 40, 2, 4, 3)
    rng, place = np.random.default_rng(12), place_of(backend)
    modules = first_modules(rng, BLOCK, (8, 8, 8), 4, dtype)
    lists = make_lists(case, modules, place)
    table = place.get(lists.entries).copy()
    table.view(SLOT_ENTRY)["rank"][:, 1] = 600
    lists.entries = to_device(table) if place.on_device else table
    word = place.put(np.zeros(1, np.int32))
    x, y = random_inputs(rng, case, BLOCK, dtype)
    got = activate(x, y, BLOCK, lists, place, status=word)
    assert int(place.get(word)[0]) == STATUS_BAD_RANK
    idle = np.repeat((case.token_to_slot < 0) | (case.token_to_slot == 1), 2)
    bare = plain(y, BLOCK, lists, place)
    np.testing.assert_array_equal(bits_of(got[idle]), bits_of(bare[idle]))
    assert (bits_of(got[~idle]) != bits_of(bare[~idle])).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_of_a_slot_outside_the_table_runs_as_base(dtype: str) -> None:
    case = random_case(13, 20, 2, 4, 3, base_share=0)
    rng, place = np.random.default_rng(13), place_of("cuda")
    modules = first_modules(rng, BLOCK, (8, 8, 8), 4, dtype)
    lists = make_lists(case, modules, place)
    lists.segments.tiles[:, 3] = 3
    word = place.put(np.zeros(1, np.int32))
    x, y = random_inputs(rng, case, BLOCK, dtype)
    got = activate(x, y, BLOCK, lists, place, status=word)
    np.testing.assert_array_equal(bits_of(got), bits_of(plain(y, BLOCK, lists, place)))
    assert int(place.get(word)[0]) == STATUS_BAD_SLOT


@pytest.mark.gpu
def test_runs_give_the_same_bits_and_ride_on_what_came_before() -> None:
    """Back to back with changing inputs in the same buffers: nothing stale is read early."""
    import cupy

    case = random_case(14, 64, 2, 8, 4)
    moe = replace(BLOCK, hidden=512, intermediate=256, experts=8)
    rng, place = np.random.default_rng(14), place_of("cuda")
    modules = first_modules(rng, moe, (16, 8, 4, 32), 8, "bfloat16")
    lists = make_lists(case, modules, place)
    inputs = [random_inputs(rng, case, moe, "bfloat16") for _ in range(4)]
    here = [tuple(to_device(v.view(np.uint16)) for v in pair) for pair in inputs]
    kind = inputs[0][0].dtype
    x, y = (cupy.empty_like(v) for v in here[0])
    out = cupy.zeros((128, 256), np.uint16)
    size = ops.lora_workspace_bytes(128, 2, 512, 32, kind)
    scratch = cupy.empty(size, np.uint8)
    results: list[Any] = []
    for turn in range(200):
        x[...], y[...] = here[turn % 4]
        ops.lora_activation(
            x.view(kind),
            y.view(kind),
            lists.segments,
            lists.routing,
            lists.entries,
            in_features=512,
            max_rank=32,
            out=out.view(kind),
            workspace=scratch,
            **form_of(moe),
        )
        results.append(out.copy())
    for turn in range(4):
        expected = activation_answer(case, *inputs[turn], modules, moe)
        assert_close(results[turn].get().view(kind), expected, BOUNDS["bfloat16"])
        assert all(bool((r == results[turn]).all()) for r in results[turn::4])


REAL = [
    ("qwen3-30b-a3b", MoeShape(2048, 768, 128, 8), 32, 16, 16),
    ("qwen3-30b-a3b, one token", MoeShape(2048, 768, 128, 8), 1, 1, 16),
    (
        "gpt-oss-20b",
        replace(FORMS["clamped, interleaved"], hidden=2880, intermediate=2880, experts=32, top_k=4),
        16,
        4,
        16,
    ),
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", REAL, ids=[shape[0] for shape in REAL])
def test_real_shapes(shape: tuple[str, MoeShape, int, int, int]) -> None:
    _, moe, tokens, loras, rank = shape
    case = random_case(15, tokens, moe.top_k, moe.experts, loras, base_share=0.1)
    rng = np.random.default_rng(15)
    modules = first_modules(rng, moe, [rank] * loras, moe.experts, "bfloat16", share="a")
    check("cuda", case, moe, modules, "bfloat16", bias=True)


def arguments() -> dict[str, Any]:
    """A sound call of the twin over 3 tokens, 2 choices and 2 slots of rank 8."""
    case = make_case("", [[0, 1], [1, 0], [0, 1]], [0, 1, -1], 2, 2)
    place = place_of("numpy")
    modules = [random_module(np.random.default_rng(0), [8, 8], 16, 12, 2, "float32")] * 2
    lists = make_lists(case, modules, place)
    return {
        "x": np.ones((3, 16), np.float32),
        "y": np.ones((6, 24), np.float32),
        "segments": lists.segments,
        "routing": lists.routing,
        "entries": lists.entries,
        "in_features": 16,
        "max_rank": 8,
        "kind": "silu",
        "gated": True,
        "kept": place,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones((3, 15), np.float32)}, r"x has shape \(3, 15\); \[3, 16\]"),
        ({"y": np.ones((6, 23), np.float32)}, "y has 23 columns; gate and up need an even"),
        ({"y": np.ones((5, 24), np.float32)}, r"y has shape \(5, 24\); \[6, \*\]"),
        ({"y": np.ones((6, 24), np.float16)}, "y has dtype float16; float32"),
        ({"kind": "relu"}, "kind is 'relu'"),
        ({"gated": False}, r"entries has shape \(2, 2, 48\); \[1, \*, 48\]"),
        ({"kind": "swiglu_oai", "gated": False}, "is a gated activation"),
        ({"layout": "mixed"}, "layout is 'mixed'"),
        ({"rows": "token"}, "rows is 'token'"),
        ({"x_rows": "column"}, "x_rows is 'column'"),
        ({"max_rank": 7}, r"rank 8 at entries \[slice, slot\] \[0, 0\].*max_rank=7"),
        ({"bias": np.ones((2, 12), np.float32)}, r"bias has shape \(2, 12\); \[2, 24\]"),
        ({"out": np.ones((6, 12), np.float16)}, "out has dtype float16; float32"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    call = arguments() | changes
    call.setdefault("out", np.full((6, 12), 7, np.float32))
    out = call["out"]
    call.pop("kept")
    with pytest.raises(ArgumentError, match=message):
        ops.lora_activation(**call)
    assert (out == out.flat[0]).all()


@pytest.mark.gpu
def test_small_workspace_is_refused() -> None:
    import cupy

    call = arguments()
    place = call.pop("kept")
    assert isinstance(place, Place)
    call |= {n: to_device(call[n]) for n in ("x", "y", "segments", "routing", "entries")}
    with pytest.raises(CapacityError, match="lora_workspace_bytes"):
        ops.lora_activation(**call, workspace=cupy.empty(16, np.uint8))
