"""The kernels against their NumPy twins (integers exactly) and the float64 oracle (values)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_util import DeviceMemory, assert_same_lists, shifted_copy, to_device, to_host
from hypothesis import given, settings
from problem_util import (
    BOUNDS,
    CASE_11_RANKS,
    Factors,
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
    pair_deltas,
    random_case,
    random_module,
    random_values,
    routing_cases,
)

from cupylora import ops, reference
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.ops.lora_delta import lora_workspace_bytes
from cupylora.worklists import (
    SLOT_ENTRY,
    STATUS_BAD_RANK,
    STATUS_BAD_SLOT,
    STATUS_CAPACITY,
    GemmProblems,
    LoraSlice,
    Routing,
    segment_capacity,
)

pytestmark = pytest.mark.gpu

DTYPES = tuple(BOUNDS)
LARGE = [
    random_case(1, 4096, 8, 128, 16, base_share=0.1),
    random_case(2, 700, 8, 256, 64, foreign_share=0.3, start_expert=256),
    random_case(3, 5000, 1, 1, 3),
    random_case(4, 600, 8, 2048, 5),
    make_case("one expert, one slot", np.zeros((9000, 1)), np.zeros(9000), 1, 1),
    make_case("70,000 tokens", np.arange(70_000)[:, None] % 3, np.arange(70_000) % 4 - 1, 3, 3),
]
ROUTINGS = hostile_routings() + LARGE


def _ids(cases: list[RoutingCase]) -> list[str]:
    return [case.name for case in cases]


def _route(case: RoutingCase, row_order: str = "token_major") -> Routing:
    args = (case.topk_ids, case.token_to_slot)
    return reference.route(*args, row_order=row_order, **case.sizes)  # type: ignore[arg-type]


def _device_route(case: RoutingCase, row_order: str = "token_major", **options: Any) -> Any:
    args = (to_device(case.topk_ids), to_device(case.token_to_slot))
    return ops.route(*args, row_order=row_order, **case.sizes, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
@pytest.mark.parametrize("case", ROUTINGS, ids=_ids(ROUTINGS))
def test_route_equals_twin(case: RoutingCase, row_order: str) -> None:
    assert_same_lists(_device_route(case, row_order), _route(case, row_order))


@given(routing_cases())
@settings(max_examples=40, deadline=None)
def test_route_and_segments_equal_twins_on_drawn_routings(case: RoutingCase) -> None:
    expected = _route(case)
    actual = _device_route(case)
    assert_same_lists(actual, expected)
    _compare_segments(case, expected, actual, 8)


def _compare_segments(case: RoutingCase, expected: Routing, actual: Any, tile_rows: int) -> None:
    sizes: dict[str, int] = {"max_loras": case.max_loras, "tile_rows": tile_rows}
    want = reference.build_segments(expected, case.token_to_slot, **sizes)
    got = ops.build_segments(actual, to_device(case.token_to_slot), **sizes)
    count, tiles = int(want.count[0]), int(want.tile_count[0])
    counts = {"start": count + 1, "expert": count, "slot": count, "tiles": tiles}
    assert_same_lists(got, want, counts)


@pytest.mark.parametrize("tile_rows", [8, 16, 32, 64])
@pytest.mark.parametrize("case", ROUTINGS, ids=_ids(ROUTINGS))
def test_segments_equal_twin(case: RoutingCase, tile_rows: int) -> None:
    routing = _route(case)
    _compare_segments(case, routing, to_device(routing), tile_rows)


@pytest.mark.parametrize("case", ROUTINGS, ids=_ids(ROUTINGS))
def test_segments_of_a_foreign_order_equal_twin(case: RoutingCase) -> None:
    routing = expert_order(_route(case), 5)
    _compare_segments(case, routing, to_device(routing), 8)


def test_route_writes_into_what_it_is_given_and_repeats_itself() -> None:
    case = LARGE[0]
    first = _device_route(case)
    rows = to_host(first.row_to_pair)
    first.row_to_pair[...] = 7
    again = _device_route(case, out=first)
    assert again.row_to_pair is first.row_to_pair
    np.testing.assert_array_equal(to_host(again.row_to_pair), rows)


@pytest.mark.parametrize("tokens", [6, 1000])
def test_slot_out_of_range_is_reported_and_runs_as_base(tokens: int) -> None:
    case = random_case(8, tokens, 8, 16, 4)
    slots = case.token_to_slot.copy()
    slots[3] = 4
    status = ops.DeviceStatus()
    bad = replace(case, token_to_slot=slots)
    actual = _device_route(bad, status=status)
    expected = slots.copy()
    expected[3] = -1
    assert_same_lists(actual, _route(replace(case, token_to_slot=expected)))
    import cupy

    cupy.cuda.get_current_stream().synchronize()
    with pytest.raises(ArgumentError, match="token_to_slot"):
        status.check()
    status.check()
    word = cupy.zeros(1, np.int32)
    segments = ops.build_segments(actual, to_device(slots), max_loras=4, status=word)
    assert int(word[0]) == STATUS_BAD_SLOT
    want = reference.build_segments(to_host(actual), expected, max_loras=4)
    assert int(segments.tile_count[0]) == int(want.tile_count[0])


def _table(rng: np.random.Generator, modules: int, max_loras: int) -> np.ndarray:
    table = np.zeros((modules, max_loras), SLOT_ENTRY)
    for name in ("a_ptr", "b_ptr"):
        table[name] = rng.integers(1, 2**48, table.shape).astype(np.uint64)
    for name in ("a_expert_stride", "b_expert_stride"):
        table[name] = rng.integers(0, 2**33, table.shape) * (rng.random(table.shape) < 0.8)
    table["rank"] = rng.integers(0, 9, table.shape)
    table["scale"] = rng.random(table.shape).astype(np.float32)
    return table.view(np.uint8).reshape(modules, max_loras, -1)


POINTERS = [
    *hostile_routings(),
    random_case(5, 300, 4, 1025, 6, foreign_share=0.2, start_expert=100),
    random_case(6, 4096, 8, 128, 16),
]


@pytest.mark.parametrize("case", POINTERS, ids=_ids(POINTERS))
def test_pointers_and_problems_equal_twins(case: RoutingCase) -> None:
    table = _table(np.random.default_rng(3), 3, case.max_loras)
    routing = _route(case)
    tokens = reference.slot_lookup(case.token_to_slot, table)
    device_tokens = ops.slot_lookup(to_device(case.token_to_slot), to_device(table))
    assert_same_lists(device_tokens, tokens)

    rows = reference.pointer_expand(routing, tokens)
    device_rows = ops.pointer_expand(to_device(routing), device_tokens)
    assert_same_lists(device_rows, rows)

    sizes: dict[str, Any] = {"x_ptr": 1 << 40, "h_ptr": 1 << 41, "y_ptr": 1 << 42, "itemsize": 2}
    sizes |= {"in_features": 100, "out_features": 72, "max_rank": 8, "h_itemsize": 4}
    for aggregate, splitk in itertools.product((True, False), (None, 3)):
        options = {**sizes, "aggregate": aggregate, "splitk_slices": splitk}
        want = reference.build_problems(rows, routing, 1, **options)
        got = ops.build_problems(device_rows, to_device(routing), 1, **options)
        count = int(want.shrink.count[0])
        fields = (*"mnkabd", "lda", "ldb", "ldd", "alpha")
        counts = dict.fromkeys(fields, count) | {"splitk_offsets": count + 1}
        assert_same_lists(got, want, counts)
        assert (got.splitk_offsets is None) == (splitk is None)

    experts = {k: sizes[k] for k in ("x_ptr", "y_ptr", "itemsize", "in_features", "out_features")}
    base = reference.expert_problems(routing, w_ptr=1 << 43, **experts)
    assert_same_lists(ops.expert_problems(to_device(routing), w_ptr=1 << 43, **experts), base)


def test_stale_rows_are_overwritten_with_zeros() -> None:
    case = make_case("ghosts", [[-1, 1], [9, 9], [0, 1]], [0, 1, -1], 2, 2)
    table = _table(np.random.default_rng(1), 2, 2)
    routing, tokens = _route(case), reference.slot_lookup(case.token_to_slot, table)
    out = ops.pointer_expand(to_device(routing), to_device(tokens))
    for field in ("token", "expert", "rank", "a_ptr", "b_ptr", "scale"):
        getattr(out, field)[...] = 77
    ops.pointer_expand(to_device(routing), to_device(tokens), out=out)
    assert_same_lists(out, reference.pointer_expand(routing, tokens))


@pytest.mark.parametrize("rank", [-1, 9, 2**31 - 1])
@pytest.mark.parametrize("aggregate", [True, False])
def test_rank_out_of_range_becomes_rank_zero_and_is_reported(rank: int, aggregate: bool) -> None:
    import cupy

    case = random_case(9, 40, 2, 4, 3)
    table = _table(np.random.default_rng(2), 1, 3)
    tokens = reference.slot_lookup(case.token_to_slot, table)
    routing = _route(case)
    rows = reference.pointer_expand(routing, tokens)
    rows.rank[0, 5:9] = rank
    status, word = np.zeros(1, np.int32), cupy.zeros(1, np.int32)
    sizes: dict[str, Any] = {"x_ptr": 0, "h_ptr": 0, "y_ptr": 0, "itemsize": 2, "max_rank": 8}
    sizes |= {"in_features": 16, "out_features": 16, "aggregate": aggregate}
    want = reference.build_problems(rows, routing, 0, status=status, **sizes)
    got = ops.build_problems(to_device(rows), to_device(routing), 0, status=word, **sizes)
    assert int(word[0]) == int(status[0]) == STATUS_BAD_RANK
    count = int(want.shrink.count[0])
    for problems, expected in ((got.shrink, want.shrink), (got.expand, want.expand)):
        assert_same_lists(
            problems, expected, dict.fromkeys((*"mnkabd", "lda", "ldb", "ldd", "alpha"), count)
        )


def _gemm_problems(
    sizes: list[tuple[int, int, int]], dtype: str, out_dtype: str, shift: int, rng: Any
) -> tuple[Any, DeviceMemory, list[tuple[np.ndarray, np.ndarray, np.ndarray, float]]]:
    memory, data = DeviceMemory(shift), []
    count = len(sizes)
    arrays = {f: np.zeros(count, np.int32) for f in "mnk"}
    arrays |= {f: np.zeros(count, np.uint64) for f in "abd"}
    arrays |= {f: np.zeros(count, np.int64) for f in ("lda", "ldb", "ldd")}
    alpha = np.linspace(0.5, 1.5, count, dtype=np.float32)
    for p, (m, n, k) in enumerate(sizes):
        a = random_values(rng, (m, k), dtype)
        b = random_values(rng, (n, k), dtype, max(1, k) ** -0.5)
        d = random_values(rng, (m, n), out_dtype)
        arrays["a"][p], arrays["b"][p] = memory.upload(a), memory.upload(b)
        arrays["d"][p] = memory.upload(d)
        for field, value in zip("mnk", (m, n, k), strict=True):
            arrays[field][p] = value
        arrays["lda"][p], arrays["ldb"][p], arrays["ldd"][p] = k, k, n
        data.append((a, b, d, float(alpha[p])))
    problems = GemmProblems(**arrays, alpha=alpha, count=np.array([count], np.int32))
    return to_device(problems), memory, data


def _read_back(problems: Any, p: int, shape: tuple[int, int], dtype: str) -> np.ndarray:
    import cupy

    resolved = resolve_dtype(dtype)
    host = np.empty(shape, resolved)
    if host.size:
        pointer = int(problems.d[p])
        cupy.cuda.runtime.memcpy(host.ctypes.data, pointer, host.nbytes, 2)
    return host


GEMM_SIZES = [
    (1, 16, 64),
    (130, 257, 100),
    (0, 64, 64),
    (17, 128, 2048),
    (5, 0, 32),
    (3, 40, 0),
    (64, 96, 1),
    (300, 130, 768),
    (8, 101, 72),
]


@pytest.mark.parametrize("max_m", [None, 16, 256])
@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm(dtype: str, shift: int, beta: int, max_m: int | None) -> None:
    rng = np.random.default_rng(10)
    problems, _memory, data = _gemm_problems(GEMM_SIZES, dtype, dtype, shift, rng)
    ops.grouped_gemm(problems, dtype=dtype, beta=beta, max_m=max_m)
    for p, (a, b, d, alpha) in enumerate(data):
        got = _read_back(problems, p, d.shape, dtype)
        if a.shape[1] == 0:
            np.testing.assert_array_equal(got, d if beta else np.zeros_like(d))
            continue
        product = alpha * (a.astype(np.float64) @ b.astype(np.float64).T)
        if beta:
            # Judged against the sum: y's own rounding is all that a large D adds.
            product = product + d.astype(np.float64)
        assert_close(got, product, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_grouped_gemm_into_float32(dtype: str) -> None:
    rng = np.random.default_rng(11)
    sizes = [(33, 70, 512), (1, 16, 4096)]
    problems, _memory, data = _gemm_problems(sizes, dtype, "float32", 0, rng)
    ops.grouped_gemm(problems, dtype=dtype, out_dtype="float32")
    for p, (a, b, d, alpha) in enumerate(data):
        product = alpha * (a.astype(np.float64) @ b.astype(np.float64).T)
        assert_close(_read_back(problems, p, d.shape, "float32"), product, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm_row_does_not_depend_on_its_problem(dtype: str) -> None:
    rng = np.random.default_rng(12)
    a, b = random_values(rng, (200, 2000), dtype), random_values(rng, (192, 2000), dtype)
    results = []
    for rows, max_m in ((200, None), (64, 64), (9, 16), (1, 16)):
        memory = DeviceMemory()
        d = np.zeros((rows, 192), resolve_dtype(dtype))
        one = np.ones(1, np.int64)
        problems = to_device(
            GemmProblems(
                *(np.array([v], np.int32) for v in (rows, 192, 2000)),
                *(np.array([memory.upload(v)], np.uint64) for v in (a[:rows], b, d)),
                one * 2000,
                one * 2000,
                one * 192,
                np.ones(1, np.float32),
                np.ones(1, np.int32),
            )
        )
        ops.grouped_gemm(problems, dtype=dtype, max_m=max_m)
        results.append(_read_back(problems, 0, d.shape, dtype))
    for result in results[1:]:
        np.testing.assert_array_equal(bits_of(result), bits_of(results[0][: len(result)]))


def _delta(
    case: RoutingCase,
    x: np.ndarray,
    y: np.ndarray,
    modules: list[ModuleWeights],
    *,
    routing: Routing | None = None,
    slices: list[LoraSlice] | None = None,
    tile_rows: int = 8,
    packed: bool = True,
    shift: int = 0,
    x_shift: int = 0,
    max_rank: int = 512,
    **options: Any,
) -> np.ndarray:
    memory = DeviceMemory(shift)
    entries = to_device(build_entries(modules, memory.upload, packed=packed))
    routing = to_device(_route(case) if routing is None else routing)
    segments = ops.build_segments(
        routing, to_device(case.token_to_slot), max_loras=case.max_loras, tile_rows=tile_rows
    )
    out = shifted_copy(y, x_shift)
    ops.lora_delta(
        shifted_copy(x, x_shift),
        out,
        segments,
        routing,
        entries,
        slices or [LoraSlice(modules[0].out_features)],
        in_features=modules[0].in_features,
        max_rank=max_rank,
        **options,
    )
    return np.asarray(out.get())


def _check_delta(case: RoutingCase, module: ModuleWeights, dtype: str, **options: Any) -> None:
    rng = np.random.default_rng(20)
    x = random_values(rng, (len(case.topk_ids), module.in_features), dtype)
    delta = pair_deltas(case, x, module)
    zero = np.zeros(delta.shape, resolve_dtype(dtype))
    assert_close(_delta(case, x, zero, [module], **options), delta, BOUNDS[dtype])
    y0 = comparable_rows(rng, delta, dtype)
    y = _delta(case, x, y0, [module], **options)
    assert_close(y.astype(np.float64) - y0.astype(np.float64), delta, BOUNDS[dtype])


@pytest.mark.parametrize("tile_rows", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_of_all_ranks_together(dtype: str, tile_rows: int) -> None:
    rng = np.random.default_rng(13)
    case = random_case(13, 150, 2, 4, len(CASE_11_RANKS))
    module = random_module(rng, CASE_11_RANKS, 320, 256, 4, dtype)
    _check_delta(case, module, dtype, tile_rows=tile_rows)


@pytest.mark.parametrize("max_rank", [16, 17, 32, 33, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_for_every_size_class_of_max_rank(dtype: str, max_rank: int) -> None:
    rng = np.random.default_rng(14)
    ranks = (max_rank, max_rank - 1, 4, 0, 8)
    case = random_case(14, 60, 2, 3, len(ranks))
    module = random_module(rng, ranks, 256, 192, 3, dtype)
    for tile_rows in (8, 32):
        _check_delta(case, module, dtype, max_rank=max_rank, tile_rows=tile_rows)


@pytest.mark.parametrize("case", hostile_routings(), ids=_ids(hostile_routings()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_on_hostile_routings(dtype: str, case: RoutingCase) -> None:
    experts = case.num_experts + case.start_expert
    rng = np.random.default_rng(15)
    ranks = [(8, 3, 16)[slot % 3] for slot in range(case.max_loras)]
    _check_delta(case, random_module(rng, ranks, 64, 40, experts, dtype), dtype)


@pytest.mark.parametrize("in_features", [1, 100, 1024, 1032, 2050])
@pytest.mark.parametrize("out_features", [3424, 101])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_delta_of_awkward_widths(
    dtype: str, in_features: int, out_features: int, packed: bool
) -> None:
    rng = np.random.default_rng(16)
    case = random_case(16, 40, 2, 2, 4)
    module = random_module(rng, (16, 5, 1, 24), in_features, out_features, 2, dtype)
    _check_delta(case, module, dtype, packed=packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("x_shift", [0, 1])
def test_delta_of_shifted_pointers(dtype: str, shift: int, x_shift: int) -> None:
    rng = np.random.default_rng(17)
    case = random_case(17, 30, 2, 2, 3)
    module = random_module(rng, (16, 64, 6), 512, 264, 2, dtype)
    size = resolve_dtype(dtype).itemsize
    _check_delta(case, module, dtype, shift=shift * size, x_shift=x_shift)


@pytest.mark.parametrize("share", ["a", "b", "ab"])
def test_delta_of_shared_factors(share: str) -> None:
    case = random_case(18, 50, 2, 5, 3, start_expert=2)
    module = random_module(
        np.random.default_rng(18), (8, 16, 4), 128, 72, 7, "bfloat16", share=share
    )
    _check_delta(case, module, "bfloat16")


def test_packed_and_row_major_give_the_same_bits() -> None:
    rng = np.random.default_rng(19)
    case = random_case(19, 90, 2, 3, 3)
    module = random_module(rng, (16, 40, 5), 1096, 128, 3, "bfloat16")
    x = random_values(rng, (90, 1096), "bfloat16")
    y = random_values(rng, (180, 128), "bfloat16")
    both = [_delta(case, x, y, [module], packed=packed) for packed in (True, False)]
    np.testing.assert_array_equal(bits_of(both[0]), bits_of(both[1]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_different_widths(dtype: str, interleaved: bool) -> None:
    rng = np.random.default_rng(21)
    case = random_case(21, 70, 1, 1, 4)
    widths = (136, 136) if interleaved else (512, 72, 100)
    modules = [random_module(rng, (16, 0, 5, 40), 256, width, 1, dtype) for width in widths]
    slices, columns, at = [], [], 3 if not interleaved else 0
    for index, width in enumerate(widths):
        slices.append(LoraSlice(width, index, 2) if interleaved else LoraSlice(width, at))
        columns.append(slice(index, None, 2) if interleaved else slice(at, at + width))
        at += width + 5
    x = random_values(rng, (70, 256), dtype)
    total = 2 * widths[0] if interleaved else at
    y0 = np.zeros((70, total), resolve_dtype(dtype))
    y = _delta(case, x, y0, modules, slices=slices)
    for module, where in zip(modules, columns, strict=True):
        assert_close(y[:, where], pair_deltas(case, x, module), BOUNDS[dtype])
        y[:, where] = 0
    np.testing.assert_array_equal(bits_of(y), bits_of(y0))


@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
@pytest.mark.parametrize("foreign", [False, True])
def test_row_maps_agree(row_order: str, foreign: bool) -> None:
    rng = np.random.default_rng(22)
    case = random_case(22, 60, 3, 6, 4, foreign_share=0.2)
    module = random_module(rng, (8, 16, 3, 20), 128, 80, 6, "bfloat16")
    routing = _route(case, row_order)
    routing = expert_order(routing, 1) if foreign else routing
    x = random_values(rng, (60, 128), "bfloat16")
    rows = int(routing.expert_first_token_offset[-1])
    pairs = routing.row_to_pair[:rows]
    y0 = random_values(rng, (180, 80), "bfloat16")
    by_pair = _delta(case, x, y0, [module], routing=routing)
    y_rows = y0.copy()
    y_rows[:rows] = y0[pairs]
    permuted = reference.permute_rows(x, routing)
    by_row = _delta(case, permuted, y_rows, [module], routing=routing, x_rows="row", y_rows="row")
    np.testing.assert_array_equal(bits_of(by_row[:rows]), bits_of(by_pair[pairs]))
    x_pairs = np.zeros((180, 128), x.dtype)
    x_pairs[pairs] = permuted[:rows]
    from_pairs = _delta(case, x_pairs, y0, [module], routing=routing, x_rows="pair")
    np.testing.assert_array_equal(bits_of(from_pairs), bits_of(by_pair))
    expected = pair_deltas(case, x, module, row_order)
    zero = np.zeros_like(y0)
    assert_close(_delta(case, x, zero, [module], routing=routing), expected, BOUNDS["bfloat16"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_no_adapter_keep_every_bit(dtype: str) -> None:
    rng = np.random.default_rng(23)
    case = random_case(23, 50, 2, 4, 3, base_share=0.5)
    ranks = (8, 0, 16)
    module = random_module(rng, ranks, 192, 136, 4, dtype)
    x = random_values(rng, (50, 192), dtype)
    y0 = fragile_values((100, 136), dtype)
    y = _delta(case, x, y0, [module])
    slots = np.repeat(case.token_to_slot, 2)
    untouched = (slots < 0) | (slots == 1)
    assert untouched.any()
    assert not untouched.all()
    np.testing.assert_array_equal(bits_of(y[untouched]), bits_of(y0[untouched]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rank", [16, 32, 64])
def test_rows_do_not_depend_on_their_batch(dtype: str, rank: int) -> None:
    """Alone (K split over CTAs), among 64 and among thousands (one CTA adds all of K)."""
    rng = np.random.default_rng(25)
    tokens, width = 2600, 8192
    module = random_module(rng, (rank, 8), width, 96, 1, dtype)
    x = random_values(rng, (tokens, width), dtype)
    y = random_values(rng, (tokens, 96), dtype)
    slots = rng.integers(-1, 2, tokens).astype(np.int32)
    slots[0] = 0
    alone = None
    for count, tile_rows in ((1, 8), (65, 8), (65, 32), (tokens, 16), (tokens, 32)):
        case = make_case("batch", np.zeros((count, 1)), slots[:count], 1, 2)
        result = _delta(case, x[:count], y[:count], [module], tile_rows=tile_rows, max_rank=rank)
        alone = result[0] if alone is None else alone
        np.testing.assert_array_equal(bits_of(result[0]), bits_of(alone))


def test_a_thousand_runs_give_the_same_bits() -> None:
    import cupy

    rng = np.random.default_rng(26)
    case = random_case(26, 24, 1, 1, 4)
    module = random_module(rng, (32, 8, 16, 5), 8192, 256, 1, "bfloat16")
    memory = DeviceMemory()
    entries = to_device(build_entries([module], memory.upload, packed=True))
    x = to_device(random_values(rng, (24, 8192), "bfloat16"))
    start = to_device(random_values(rng, (24, 256), "bfloat16").view(np.uint16))
    routing = to_device(_route(case))
    segments = ops.build_segments(routing, to_device(case.token_to_slot), max_loras=4)
    workspace = cupy.empty(lora_workspace_bytes(24, 1, 8192, 32, x.dtype), np.uint8)
    first = None
    different = cupy.zeros((), np.int64)
    for _ in range(1000):
        y = start.copy()
        ops.lora_delta(
            x,
            y.view(x.dtype),
            segments,
            routing,
            entries,
            [LoraSlice(256)],
            in_features=8192,
            max_rank=32,
            workspace=workspace,
        )
        first = y if first is None else first
        different += (y != first).sum()
    assert int(different) == 0
    assert (first != start).any()


def test_fp16_shrink_beyond_its_range() -> None:
    case = make_case("one row", [[0]], [0], 1, 1)
    a = np.full((1, 8, 4096), 4, np.float16)
    b = np.full((1, 64, 8), 1e-4, np.float16)
    module = ModuleWeights(4096, 64, (Factors(a, b, 0.75),))
    x = np.full((1, 4096), 8, np.float16)
    y = _delta(case, x, np.zeros((1, 64), np.float16), [module])
    assert np.isfinite(y).all()
    assert_close(y, pair_deltas(case, x, module), BOUNDS["float16"])


@pytest.mark.parametrize("rank", [-3, 17, 2**30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entry_rank_out_of_range_leaves_y_alone(dtype: str, rank: int) -> None:
    import cupy

    rng = np.random.default_rng(27)
    case = random_case(27, 20, 1, 1, 2)
    module = random_module(rng, (8, 16), 128, 64, 1, dtype)
    memory = DeviceMemory()
    host = build_entries([module], memory.upload, packed=True)
    host.view(SLOT_ENTRY)["rank"][0, 1] = rank
    x, y = random_values(rng, (20, 128), dtype), random_values(rng, (20, 64), dtype)
    out, word = to_device(y), cupy.zeros(1, np.int32)
    routing = to_device(_route(case))
    segments = ops.build_segments(routing, to_device(case.token_to_slot), max_loras=2)
    ops.lora_delta(
        to_device(x),
        out,
        segments,
        routing,
        to_device(host),
        [LoraSlice(64)],
        in_features=128,
        max_rank=16,
        status=word,
    )
    mine = case.token_to_slot == 1
    np.testing.assert_array_equal(bits_of(out.get()[mine]), bits_of(y[mine]))
    assert int(word[0]) == STATUS_BAD_RANK


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31() -> None:
    """y of 70,000 x 32,768 elements: the last rows lie 4.6 GB in."""
    import cupy

    rng = np.random.default_rng(28)
    tokens, out_features = 70_000, 32_768
    slots = np.full(tokens, -1, np.int32)
    slots[[5, tokens - 1]] = 0
    case = make_case("far rows", np.zeros((tokens, 1)), slots, 1, 1)
    module = random_module(rng, (16,), 64, out_features, 1, "bfloat16")
    memory = DeviceMemory()
    entries = to_device(build_entries([module], memory.upload, packed=True))
    x = random_values(rng, (tokens, 64), "bfloat16")
    y = cupy.zeros((tokens, out_features), np.uint16).view(resolve_dtype("bfloat16"))
    routing = _device_route(case)
    segments = ops.build_segments(routing, to_device(slots), max_loras=1)
    ops.lora_delta(
        to_device(x),
        y,
        segments,
        routing,
        entries,
        [LoraSlice(out_features)],
        in_features=64,
        max_rank=16,
    )
    for row in (5, tokens - 1):
        want = pair_deltas(make_case("row", [[0]], [0], 1, 1), x[row : row + 1], module)
        assert_close(y[row : row + 1].get(), want, BOUNDS["bfloat16"])
        y[row] = 0
    assert not bool(y.view(np.uint16).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
def test_row_ops_match_their_twins(dtype: str, row_order: str) -> None:
    rng = np.random.default_rng(29)
    case = random_case(29, 37, 3, 6, 3, foreign_share=0.3, start_expert=2)
    routing = _route(case, row_order)
    device = to_device(routing)
    for width in (104, 101):
        x = random_values(rng, (37, width), dtype)
        permuted = ops.permute_rows(to_device(x), device).get()
        np.testing.assert_array_equal(
            bits_of(permuted), bits_of(reference.permute_rows(x, routing))
        )
        weights = rng.random((37, 3)).astype(np.float32)
        y = random_values(rng, (111, width), dtype)
        bias = random_values(rng, (6, width), dtype)
        for rows, b, residual in itertools.product(("pair", "row"), (None, bias), (None, x)):
            options: dict[str, Any] = {"y_rows": rows}
            want = reference.finalize(y, weights, routing, bias=b, residual=residual, **options)
            args = (to_device(y), to_device(weights), device)
            got = ops.finalize(*args, bias=to_device(b), residual=to_device(residual), **options)
            np.testing.assert_allclose(
                got.get().astype(np.float64), want.astype(np.float64), rtol=8e-3, atol=1e-5
            )


ACTIVATIONS = [
    (kind, gated, layout)
    for kind in ("silu", "gelu", "relu2", "swiglu_oai")
    for gated in (True, False)
    for layout in ("gate_first", "up_first", "interleaved")
    if (gated or layout == "gate_first") and (gated or kind != "swiglu_oai")
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "gated", "layout"), ACTIVATIONS)
def test_activations_match_their_twin(dtype: str, kind: str, gated: bool, layout: str) -> None:
    rng = np.random.default_rng(30)
    case = random_case(30, 20, 2, 5, 2, foreign_share=0.3)
    routing = _route(case)
    x = random_values(rng, (40, 2 * 68), dtype, 3.0)
    bias = random_values(rng, (5, 2 * 68), dtype)
    for b, rows in itertools.product((None, bias), ("pair", "row", None)):
        if rows is None and b is not None:
            continue
        options: dict[str, Any] = {"kind": kind, "gated": gated, "layout": layout}
        options |= {"rows": rows or "pair"}
        want = reference.activation(x, bias=b, routing=routing if rows else None, **options)
        got = ops.activation(
            to_device(x),
            bias=to_device(b),
            routing=to_device(routing) if rows else None,
            **options,
        )
        np.testing.assert_allclose(
            got.get().astype(np.float64),
            want.astype(np.float64),
            rtol={"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}[dtype],
            atol=1e-6,
        )


REAL = [
    ("qwen3-30b-a3b gate", 2048, 768, 128, 8, 32, 16, 16),
    ("qwen3-30b-a3b down", 768, 2048, 128, 8, 128, 16, 64),
    ("mixtral-8x7b down", 14336, 4096, 8, 2, 32, 4, 16),
    ("gpt-oss-20b gate", 2880, 2880, 32, 4, 32, 4, 16),
    ("deepseek-v3 gate", 7168, 2048, 64, 8, 32, 3, 16),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", REAL, ids=[shape[0] for shape in REAL])
def test_delta_on_real_shapes(shape: tuple[str, int, int, int, int, int, int, int]) -> None:
    _, width, out_features, experts, top_k, tokens, loras, rank = shape
    rng = np.random.default_rng(31)
    case = random_case(31, tokens, top_k, experts, loras, base_share=0.1)
    module = random_module(rng, [rank] * loras, width, out_features, experts, "bfloat16")
    x = random_values(rng, (tokens, width), "bfloat16")
    y = _delta(
        case,
        x,
        np.zeros((tokens * top_k, out_features), resolve_dtype("bfloat16")),
        [module],
        max_rank=rank,
    )
    assert_close(y, pair_deltas(case, x, module), BOUNDS["bfloat16"])


def test_segment_capacity_holds_for_sorted_rows() -> None:
    case = random_case(32, 500, 8, 16, 3)
    room = segment_capacity(4000, 16, 3)
    routing = _device_route(case)
    got = ops.build_segments(routing, to_device(case.token_to_slot), max_loras=3, max_segments=room)
    want = reference.build_segments(_route(case), case.token_to_slot, max_loras=3)
    assert int(got.count[0]) == int(want.count[0])
    assert int(got.tile_count[0]) == int(want.tile_count[0])


@pytest.mark.parametrize("tokens", [40, 700])
def test_segments_without_room_are_cut_as_the_twin_cuts_them(tokens: int) -> None:
    import cupy

    case = random_case(33, tokens, 4, 6, 3)
    routing = expert_order(_route(case), 5)
    for room in (1, 17, 3 * tokens // 2):
        options: dict[str, Any] = {"max_loras": 3, "max_segments": room}
        status, word = np.zeros(1, np.int32), cupy.zeros(1, np.int32)
        want = reference.build_segments(routing, case.token_to_slot, **options, status=status)
        slots = to_device(case.token_to_slot)
        got = ops.build_segments(to_device(routing), slots, **options, status=word)
        assert int(word[0]) == int(status[0]) == STATUS_CAPACITY
        tiles = int(want.tile_count[0])
        counts = {"start": room + 1, "expert": room, "slot": room, "tiles": tiles}
        assert_same_lists(got, want, counts)
