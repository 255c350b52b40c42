"""lora_finalize on either backend: the float64 oracle, and ``finalize`` without a delta."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS, DTYPES
from chain_util import (
    Lists,
    Place,
    finalize_answer,
    make_lists,
    no_values,
    place_of,
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
from cupylora.errors import ArgumentError
from cupylora.worklists import SLOT_ENTRY, STATUS_BAD_RANK


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def operands(
    rng: np.random.Generator, case: RoutingCase, module: ModuleWeights, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x and y by pair, and the router's weights."""
    rows = case.topk_ids.size
    return (
        random_values(rng, (rows, module.in_features), dtype),
        random_values(rng, (rows, module.out_features), dtype),
        rng.random(case.topk_ids.shape, np.float32),
    )


def run(
    x: np.ndarray,
    y: np.ndarray,
    weights: np.ndarray,
    lists: Lists,
    place: Place,
    *,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    max_rank: int = 512,
    **options: Any,
) -> np.ndarray:
    y_here = place.put(y)
    result = ops.lora_finalize(
        place.put(x),
        y_here,
        place.put(weights),
        lists.segments,
        lists.routing,
        lists.entries,
        in_features=x.shape[1],
        max_rank=max_rank,
        bias=place.put(bias),
        residual=place.put(residual),
        **options,
    )
    np.testing.assert_array_equal(bits_of(place.get(y_here)), bits_of(y))
    return place.get(result)


def plain(
    y: np.ndarray, weights: np.ndarray, lists: Lists, place: Place, **arrays: Any
) -> np.ndarray:
    """What ``finalize`` makes of y by pair."""
    here = {name: place.put(value) for name, value in arrays.items()}
    return place.get(ops.finalize(place.put(y), place.put(weights), lists.routing, **here))


def check(
    backend: str,
    case: RoutingCase,
    module: ModuleWeights,
    dtype: str,
    *,
    place: Place | None = None,
    extras: bool = False,
    row_order: str = "token_major",
    **options: Any,
) -> None:
    """Against the oracle, and against ``finalize`` for tokens without a delta. extras: with bias
    and residual."""
    rng = np.random.default_rng(1)
    place = place or place_of(backend)
    x, y, weights = operands(rng, case, module, dtype)
    arrays: dict[str, Any] = {}
    if extras:
        shape = (case.num_experts, module.out_features)
        arrays["bias"] = random_values(rng, shape, dtype)
        arrays["residual"] = random_values(rng, (len(weights), shape[1]), dtype)
    lists = make_lists(case, [module], place, row_order=row_order, **options)
    got = run(x, y, weights, lists, place, **arrays)
    expected = finalize_answer(case, x, y, weights, module, row_order=row_order, **arrays)
    assert_close(got, expected, BOUNDS[dtype])
    slots = np.maximum(case.token_to_slot, -1)
    idle = np.array([s < 0 or module.slots[s] is None for s in slots], bool)
    bare = plain(y, weights, lists, place, **arrays)
    np.testing.assert_array_equal(bits_of(got[idle]), bits_of(bare[idle]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", [False, True], ids=["", "bias and residual"])
@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
def test_mixed_ranks(backend: str, row_order: str, extras: bool, dtype: str) -> None:
    case = random_case(1, 50, 3, 6, 5, base_share=0.3, foreign_share=0.2, start_expert=2)
    module = random_module(np.random.default_rng(2), (16, 3, 0, 64, 24), 72, 200, 8, dtype)
    check(backend, case, module, dtype, extras=extras, row_order=row_order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", hostile_routings(), ids=lambda case: case.name)
def test_hostile_routings(backend: str, case: RoutingCase, dtype: str) -> None:
    ranks = [(8, 3, 16)[slot % 3] for slot in range(case.max_loras)]
    experts = case.num_experts + case.start_expert
    module = random_module(np.random.default_rng(3), ranks, 64, 40, experts, dtype)
    check(backend, case, module, dtype, extras=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_together(backend: str, dtype: str) -> None:
    case = random_case(4, 120, 2, 4, len(CASE_11_RANKS))
    module = random_module(np.random.default_rng(4), CASE_11_RANKS, 320, 136, 4, dtype)
    check(backend, case, module, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [4, 8, 16, 32, 48, 128, 256, 264])
def test_every_way_to_share_columns(backend: str, rank: int, dtype: str) -> None:
    case = random_case(5, 20, 2, 2, 2)
    module = random_module(np.random.default_rng(5), (rank, 1), 64, 200, 2, dtype)
    check(backend, case, module, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 63, 65, 101, 640])
def test_awkward_widths(backend: str, width: int, dtype: str) -> None:
    case = random_case(6, 40, 2, 2, 4)
    module = random_module(np.random.default_rng(6), (16, 5, 1, 24), 100, width, 2, dtype)
    for packed in (True, False):
        check(backend, case, module, dtype, extras=True, packed=packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("factor_shift", [0, 4])
def test_shifted_pointers(backend: str, factor_shift: int, shift: int, dtype: str) -> None:
    case = random_case(7, 30, 2, 2, 3)
    module = random_module(np.random.default_rng(7), (16, 64, 6), 64, 72, 2, dtype)
    place = place_of(backend, shift=shift, factor_shift=factor_shift)
    check(backend, case, module, dtype, place=place, extras=True)


@pytest.mark.parametrize("top_k", [1, 7, 8, 9, 16, 40])
def test_any_number_of_choices(backend: str, top_k: int) -> None:
    """More choices than warps, and tokens that choose an expert more than once."""
    rng = np.random.default_rng(8)
    ids = rng.integers(-1, 12, (20, top_k))
    case = make_case("", ids, rng.integers(-1, 3, 20), 12, 3)
    module = random_module(rng, (16, 0, 5), 64, 200, 12, "bfloat16")
    check(backend, case, module, "bfloat16", extras=True)


@pytest.mark.parametrize("foreign", [False, True])
def test_row_maps_agree(backend: str, foreign: bool) -> None:
    """x and y by pair and by row, in our order and in one sorted by expert alone."""
    rng, place = np.random.default_rng(9), place_of(backend)
    case = random_case(9, 60, 3, 6, 4, foreign_share=0.2)
    module = random_module(rng, (8, 16, 3, 20), 64, 80, 6, "bfloat16")
    routing = reference.route(case.topk_ids, case.token_to_slot, **case.sizes)
    routing = expert_order(routing, 1) if foreign else routing
    lists = make_lists(case, [module], place, routing=routing)
    x, y, weights = operands(rng, case, module, "bfloat16")
    expected = run(x, y, weights, lists, place)
    for x_rows, y_rows in itertools.product(("pair", "row"), repeat=2):
        inputs = [
            to_rows(values, routing, 0) if by == "row" else values
            for values, by in ((x, x_rows), (y, y_rows))
        ]
        got = run(*inputs, weights, lists, place, x_rows=x_rows, y_rows=y_rows)
        np.testing.assert_array_equal(bits_of(got), bits_of(expected))


def test_out_may_be_the_residual(backend: str) -> None:
    rng, place = np.random.default_rng(10), place_of(backend)
    case = random_case(10, 30, 2, 4, 2, foreign_share=0.3)
    module = random_module(rng, (8, 4), 64, 136, 4, "bfloat16")
    lists = make_lists(case, [module], place)
    x, y, weights = operands(rng, case, module, "bfloat16")
    residual = random_values(rng, (30, 136), "bfloat16")
    expected = run(x, y, weights, lists, place, residual=residual)
    both = place.put(residual)
    got = ops.lora_finalize(
        place.put(x),
        place.put(y),
        place.put(weights),
        lists.segments,
        lists.routing,
        lists.entries,
        in_features=64,
        max_rank=8,
        residual=both,
        out=both,
    )
    assert got is both
    np.testing.assert_array_equal(bits_of(place.get(both)), bits_of(expected))


def test_foreign_choices_are_not_read(backend: str) -> None:
    rng, place = np.random.default_rng(11), place_of(backend)
    case = random_case(11, 30, 2, 4, 2, foreign_share=0.5)
    module = random_module(rng, (8, 4), 64, 40, 4, "bfloat16")
    lists = make_lists(case, [module], place)
    x, y, weights = operands(rng, case, module, "bfloat16")
    foreign = np.ones(60, bool)
    foreign[[pair for _, _, pair, _ in case.local_pairs("token_major")]] = False
    x[foreign], y[foreign] = np.nan, np.nan
    out = place.put(no_values((30, 40), "bfloat16"))
    got = run(x, y, weights, lists, place, out=out).astype(np.float64)
    assert np.isfinite(got).all()
    assert not got[foreign.reshape(30, 2).all(axis=1)].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_is_rounded_but_the_sum(backend: str, dtype: str) -> None:
    case = random_case(12, 60, 4, 4, 1, base_share=0)
    rng, place = np.random.default_rng(12), place_of(backend)
    module = random_module(rng, (8,), 64, 128, 4, dtype)
    lists = make_lists(case, [module], place)
    x, y, weights = operands(rng, case, module, dtype)
    expected = finalize_answer(case, x, y, weights, module)
    got = run(x, y, weights, lists, place).astype(np.float64)
    slack = 1e-5 * (np.abs(expected) + 1)
    assert (np.abs(got - expected) <= unit_in_last_place(expected, dtype) + slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [16, 20, 64])
def test_tokens_do_not_depend_on_their_batch(backend: str, rank: int, dtype: str) -> None:
    tokens = 1500 if backend == "cuda" else 100
    rng, place = np.random.default_rng(13), place_of(backend)
    module = random_module(rng, (rank, 8), 2048, 200, 4, dtype)
    case = random_case(13, tokens, 2, 4, 2)
    case.token_to_slot[:2] = 0, -1
    x, y, weights = operands(rng, case, module, dtype)
    first = None
    for count, tile_rows in ((2, 8), (65, 8), (65, 32), (tokens, 16), (tokens, 32)):
        part = replace(
            case, topk_ids=case.topk_ids[:count], token_to_slot=case.token_to_slot[:count]
        )
        lists = make_lists(part, [module], place, tile_rows=tile_rows)
        inputs = (x[: 2 * count], y[: 2 * count], weights[:count])
        got = run(*inputs, lists, place, max_rank=rank)[:2]
        first = got if first is None else first
        np.testing.assert_array_equal(bits_of(got), bits_of(first))


def test_shared_factors(backend: str) -> None:
    case = random_case(14, 50, 2, 5, 3, start_expert=2)
    for share in ("a", "b", "ab"):
        rng = np.random.default_rng(14)
        module = random_module(rng, (8, 16, 4), 64, 72, 7, "bfloat16", share=share)
        check(backend, case, module, "bfloat16")


def test_no_tokens(backend: str) -> None:
    case = make_case("", np.zeros((0, 2)), [], 4, 2)
    module = random_module(np.random.default_rng(0), (8, 8), 16, 8, 4, "bfloat16")
    check(backend, case, module, "bfloat16", extras=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_out_of_range_is_flagged_and_runs_as_zero(backend: str, dtype: str) -> None:
    case = random_case(15, 40, 2, 4, 3)
    rng, place = np.random.default_rng(15), place_of(backend)
    module = random_module(rng, (8, 8, 8), 64, 72, 4, dtype)
    lists = make_lists(case, [module], place)
    table = place.get(lists.entries).copy()
    table.view(SLOT_ENTRY)["rank"][0, 1] = -1
    lists.entries = to_device(table) if place.on_device else table
    word = place.put(np.zeros(1, np.int32))
    x, y, weights = operands(rng, case, module, dtype)
    got = run(x, y, weights, lists, place, status=word)
    assert int(place.get(word)[0]) == STATUS_BAD_RANK
    idle = (case.token_to_slot < 0) | (case.token_to_slot == 1)
    bare = plain(y, weights, lists, place)
    np.testing.assert_array_equal(bits_of(got[idle]), bits_of(bare[idle]))
    assert (bits_of(got[~idle]) != bits_of(bare[~idle])).any()


@pytest.mark.gpu
def test_runs_give_the_same_bits_and_ride_on_what_came_before() -> None:
    """Back to back with changing inputs in the same buffers: nothing stale is read early."""
    import cupy

    rng, place = np.random.default_rng(16), place_of("cuda")
    case = random_case(16, 64, 4, 8, 4)
    module = random_module(rng, (16, 8, 4, 32), 512, 640, 8, "bfloat16")
    lists = make_lists(case, [module], place)
    inputs = [operands(rng, case, module, "bfloat16") for _ in range(4)]
    kind = inputs[0][0].dtype
    here = [
        (to_device(x.view(np.uint16)), to_device(y.view(np.uint16)), to_device(w))
        for x, y, w in inputs
    ]
    x, y, weights = (cupy.empty_like(v) for v in here[0])
    out = cupy.zeros((64, 640), np.uint16)
    scratch = cupy.empty(ops.lora_workspace_bytes(256, 1, 512, 32, kind), np.uint8)
    results: list[Any] = []
    for turn in range(200):
        x[...], y[...], weights[...] = here[turn % 4]
        ops.lora_finalize(
            x.view(kind),
            y.view(kind),
            weights,
            lists.segments,
            lists.routing,
            lists.entries,
            in_features=512,
            max_rank=32,
            out=out.view(kind),
            workspace=scratch,
        )
        results.append(out.copy())
    for turn in range(4):
        expected = finalize_answer(case, *inputs[turn], module)
        assert_close(results[turn].get().view(kind), expected, BOUNDS["bfloat16"])
        assert all(bool((r == results[turn]).all()) for r in results[turn::4])


REAL = [
    ("qwen3-30b-a3b", 768, 2048, 128, 8, 32, 16, 16),
    ("qwen3-30b-a3b, one token", 768, 2048, 128, 8, 1, 1, 64),
    ("deepseek-v3", 2048, 7168, 64, 8, 16, 3, 16),
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", REAL, ids=[shape[0] for shape in REAL])
def test_real_shapes(shape: tuple[str, int, int, int, int, int, int, int]) -> None:
    _, width, hidden, experts, top_k, tokens, loras, rank = shape
    case = random_case(17, tokens, top_k, experts, loras, base_share=0.1)
    rng = np.random.default_rng(17)
    module = random_module(rng, [rank] * loras, width, hidden, experts, "bfloat16", share="a")
    check("cuda", case, module, "bfloat16", extras=True)


def arguments() -> dict[str, Any]:
    """A sound call of the twin over 3 tokens, 2 choices and 2 slots of rank 8."""
    case = make_case("", [[0, 1], [1, 0], [0, 1]], [0, 1, -1], 2, 2)
    place = place_of("numpy")
    module = random_module(np.random.default_rng(0), [8, 8], 16, 12, 2, "float32")
    lists = make_lists(case, [module], place)
    return {
        "x": np.ones((6, 16), np.float32),
        "y": np.ones((6, 12), np.float32),
        "weights": np.ones((3, 2), np.float32),
        "segments": lists.segments,
        "routing": lists.routing,
        "entries": lists.entries,
        "in_features": 16,
        "max_rank": 8,
        "kept": place,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones((3, 16), np.float32)}, r"x has shape \(3, 16\); \[6, 16\]"),
        ({"y": np.ones((5, 12), np.float32)}, r"y has shape \(5, 12\); \[6, \*\]"),
        ({"y": np.ones((6, 12), np.float16)}, "y has dtype float16; float32"),
        ({"weights": np.ones((3, 2))}, "weights has dtype float64; float32"),
        ({"x_rows": "token"}, "x_rows is 'token'"),
        ({"y_rows": "token"}, "y_rows is 'token'"),
        ({"max_rank": 7}, r"rank 8 at entries \[slice, slot\] \[0, 0\].*max_rank=7"),
        ({"bias": np.ones((2, 11), np.float32)}, r"bias has shape \(2, 11\); \[2, 12\]"),
        ({"residual": np.ones((2, 12), np.float32)}, r"residual has shape \(2, 12\); \[3, 12\]"),
        ({"out": np.ones((3, 11), np.float32)}, r"out has shape \(3, 11\); \[3, 12\]"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    call = arguments() | changes
    call.setdefault("out", np.full((3, 12), 7, np.float32))
    out = call["out"]
    call.pop("kept")
    with pytest.raises(ArgumentError, match=message):
        ops.lora_finalize(**call)
    assert (out == out.flat[0]).all()
