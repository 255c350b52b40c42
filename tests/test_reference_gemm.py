"""grouped_gemm against float64, its edges, and the problems of build_problems through it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from problem_util import (
    BOUNDS,
    HostMemory,
    assert_close,
    bits_of,
    build_entries,
    comparable_rows,
    fragile_values,
    pair_deltas,
    random_case,
    random_module,
    random_values,
)

from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.reference._numeric import matmul_rows
from cupylora.reference.build_problems import build_problems
from cupylora.reference.expert_problems import expert_problems
from cupylora.reference.grouped_gemm import grouped_gemm
from cupylora.reference.permute_rows import permute_rows
from cupylora.reference.pointer_expand import pointer_expand
from cupylora.reference.route import route
from cupylora.reference.slot_lookup import slot_lookup
from cupylora.worklists import GemmProblems

DTYPES = tuple(BOUNDS)
# The whole-pipeline test rounds h too; its error adds to that of y.
ROUNDED_H = np.sqrt(2)


def _problems(*problems: tuple[Any, ...]) -> GemmProblems:
    """From tuples (m, n, k, a, b, d, lda, ldb, ldd, alpha), with addresses."""
    types = [np.int32] * 3 + [np.uint64] * 3 + [np.int64] * 3 + [np.float32]
    columns = [np.array(c, t) for c, t in zip(zip(*problems, strict=True), types, strict=True)]
    return GemmProblems(*columns, np.array([len(problems)], np.int32))


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def _shifted(array: np.ndarray) -> np.ndarray:
    """The same values one element beyond an aligned address."""
    room = np.zeros(array.size + 1, array.dtype)
    room[1:] = array.reshape(-1)
    return room[1:].reshape(array.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [0, 1])
def test_against_float64(dtype: str, beta: int) -> None:
    rng = np.random.default_rng(0)
    # One column is too few to average the rounding of y over, and y0 makes y larger than delta.
    narrow = 16 if beta else 1
    shapes = [(1, 101, 100), (40, 24, 1), (33, 16, 256), (7, narrow, 8192), (65, 48, 64)]
    alphas = [0.75, 1.5, -2.0, 1.0, 0.3125]
    operands, deltas, tuples = [], [], []
    for (m, n, k), alpha in zip(shapes, alphas, strict=True):
        a = _shifted(random_values(rng, (m, k + 3), dtype))
        b = random_values(rng, (n, k + 1), dtype, k**-0.5)
        wide_a, wide_b = a[:, :k].astype(np.float64), b[:, :k].astype(np.float64)
        delta = alpha * wide_a @ wide_b.T
        d = np.full((m, n + 2), 7, resolve_dtype(dtype))
        if beta:
            d[:, :n] = comparable_rows(rng, delta, dtype)
        else:
            d[:, :n] = np.nan
        operands.append((a, b, d, d.copy()))
        deltas.append(delta)
        sizes = (k + 3, k + 1, n + 2)
        tuples.append((m, n, k, _address(a), _address(b), _address(d), *sizes, alpha))
    grouped_gemm(_problems(*tuples), dtype=dtype, beta=beta, max_m=65)
    for (_, _, d, before), delta in zip(operands, deltas, strict=True):
        n = delta.shape[1]
        y0 = before[:, :n].astype(np.float64) if beta else 0.0
        assert_close(d[:, :n] - y0, delta, BOUNDS[dtype])
        assert (d[:, n:] == 7).all()


def test_out_dtype_float32_is_not_rounded_to_the_input_type() -> None:
    rng = np.random.default_rng(1)
    a, b = random_values(rng, (9, 64), "bfloat16"), random_values(rng, (8, 64), "bfloat16")
    d = np.zeros((9, 8), np.float32)
    problem = (9, 8, 64, _address(a), _address(b), _address(d), 64, 64, 8, 1.0)
    grouped_gemm(_problems(problem), dtype="bfloat16", out_dtype="float32")
    assert_close(d, a.astype(np.float64) @ b.astype(np.float64).T, BOUNDS["float32"])


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_sum_zeroes_or_leaves_d(dtype: str, beta: int) -> None:
    d = fragile_values((6, 5), dtype).copy()
    before = bits_of(d).copy()
    problems = _problems(
        (3, 4, 0, 0, 0, _address(d), 8, 0, 5, 2.0),  # k = 0: rows 0-2, columns 0-3
        (2, 0, 8, 8, 8, _address(d[3:]), 8, 8, 5, 2.0),
        (0, 5, 8, 0, 0, 0, 8, 8, 5, 2.0),
    )
    grouped_gemm(problems, dtype=dtype, beta=beta)
    expected = before.copy()
    if beta == 0:
        expected[:3, :4] = 0
    assert (bits_of(d) == expected).all()


def test_adding_to_d_rounds_once() -> None:
    """alpha · sum + D is one float32 operation: what alpha · sum alone would lose is kept."""
    a, b = np.array([[1 + 2.0**-12]], np.float32), np.array([[1.0]], np.float32)
    d = np.array([[-1.0]], np.float32)
    problem = (1, 1, 1, _address(a), _address(b), _address(d), 1, 1, 1, 1 + 2.0**-12)
    grouped_gemm(_problems(problem), dtype="float32", beta=1)
    assert d[0, 0] == 2.0**-11 + 2.0**-24
    d[:] = 7
    grouped_gemm(_problems(problem), dtype="float32", beta=0)
    assert d[0, 0] == 1 + 2.0**-11


def test_problems_beyond_the_count_are_not_run() -> None:
    problems = _problems((1, 1, 1, 8, 8, 8, 1, 1, 1, 1.0))
    problems.count[0] = 0
    grouped_gemm(problems, dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": -1}, r"problems\.m\[1\] is -1"),
        ({"b": 0}, r"problems\.b\[1\] is 0; an address is needed \(problem 1: m=2, n=3, k=4\)"),
        ({"d": 0}, r"problems\.d\[1\] is 0"),
        ({"lda": 3}, r"problems\.lda\[1\] is 3; at least k"),
        ({"ldd": 2}, r"problems\.ldd\[1\] is 2; at least n"),
    ],
)
def test_bad_problem_is_named_before_anything_runs(change: dict[str, int], message: str) -> None:
    a, b = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    d = np.full((2, 2, 3), 9, np.float32)
    base = (2, 3, 4, _address(a), _address(b))
    problems = _problems(
        (*base, _address(d[0]), 4, 4, 3, 1.0), (*base, _address(d[1]), 4, 4, 3, 1.0)
    )
    for field, value in change.items():
        getattr(problems, field)[1] = value
    with pytest.raises(ArgumentError, match=message):
        grouped_gemm(problems, dtype="float32")
    assert (d == 9).all()


def test_bad_options_are_named() -> None:
    problems = _problems((0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0))
    with pytest.raises(ArgumentError, match="dtype is 'float64'; use one of bfloat16"):
        grouped_gemm(problems, dtype="float64")
    with pytest.raises(ArgumentError, match="beta is 2"):
        grouped_gemm(problems, dtype="float32", beta=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
def test_lora_through_pointers_and_problems(dtype: str, aggregate: bool, row_order: str) -> None:
    """lookup -> expansion -> problems -> shrink -> expand, base and ghost rows among them."""
    case = random_case(3, 40, 3, 5, 3, foreign_share=0.2, start_expert=2)
    rng = np.random.default_rng(4)
    max_rank, width_in, width_out = 24, 72, 40
    module = random_module(rng, [5, 24, 0], width_in, width_out, 7, dtype, share="a")
    memory = HostMemory()
    entries = build_entries([module], memory.upload)
    routing = route(case.topk_ids, case.token_to_slot, row_order=row_order, **case.sizes)  # type: ignore[arg-type]
    tokens = slot_lookup(case.token_to_slot, entries, max_rank=max_rank)
    rows = pointer_expand(routing, tokens)
    x = random_values(rng, (40, width_in), dtype)
    valid = int(routing.expert_first_token_offset[-1])
    delta = pair_deltas(case, x, module, row_order)[routing.row_to_pair[:valid]]
    permuted = permute_rows(x, routing)
    h = np.full((routing.num_rows, max_rank), np.nan, resolve_dtype(dtype))
    y = np.ones((routing.num_rows, width_out), resolve_dtype(dtype))
    y[:valid] = comparable_rows(rng, delta, dtype)
    before = y.copy()
    problems = build_problems(
        rows,
        routing,
        0,
        x_ptr=_address(permuted),
        h_ptr=_address(h),
        y_ptr=_address(y),
        itemsize=h.itemsize,
        in_features=width_in,
        out_features=width_out,
        max_rank=max_rank,
        aggregate=aggregate,
    )
    grouped_gemm(problems.shrink, dtype=dtype)
    grouped_gemm(problems.expand, dtype=dtype, beta=1)
    change = y.astype(np.float64) - before.astype(np.float64)
    assert_close(change[:valid], delta, BOUNDS[dtype] * ROUNDED_H)
    idle = ~np.concatenate([delta.any(axis=1), np.zeros(len(y) - valid, bool)])
    assert idle.any()
    assert (bits_of(y)[idle] == bits_of(before)[idle]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_experts(dtype: str) -> None:
    case = random_case(5, 30, 2, 6, 2, foreign_share=0.2, start_expert=3)
    rng = np.random.default_rng(6)
    routing = route(case.topk_ids, case.token_to_slot, **case.sizes)
    x = random_values(rng, (30, 48), dtype)
    w = random_values(rng, (6, 20, 48), dtype, 48**-0.5)
    permuted = permute_rows(x, routing)
    y = np.full((routing.num_rows, 20), 3, w.dtype)
    problems = expert_problems(
        routing,
        x_ptr=_address(permuted),
        w_ptr=_address(w),
        y_ptr=_address(y),
        itemsize=w.itemsize,
        in_features=48,
        out_features=20,
    )
    grouped_gemm(problems, dtype=dtype)
    pairs = sorted(case.local_pairs("token_major"))
    wide = w.astype(np.float64)
    expected = np.stack([wide[e] @ x[token].astype(np.float64) for e, _, _, token in pairs])
    assert_close(y[: len(pairs)], expected, BOUNDS[dtype])
    assert (y[len(pairs) :] == 3).all()


def test_permute_rows_zeroes_ghosts() -> None:
    case = random_case(7, 9, 3, 4, 2, foreign_share=0.5)
    routing = route(case.topk_ids, case.token_to_slot, **case.sizes)
    x = random_values(np.random.default_rng(0), (9, 5), "bfloat16")
    out = np.full((27, 5), 8, x.dtype)
    assert permute_rows(x, routing, out=out) is out
    for row, pair in enumerate(routing.row_to_pair.tolist()):
        expected = x[pair // 3] if pair >= 0 else np.zeros(5)
        assert (out[row] == expected).all()
    with pytest.raises(ArgumentError, match=r"x has shape \(8, 5\); \[9, \*\]"):
        permute_rows(x[:8], routing)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    rng = np.random.default_rng(8)
    a, b = random_values(rng, (65, 2048), "bfloat16"), random_values(rng, (40, 2048), "bfloat16")
    together, alone = np.zeros((65, 40), np.float32), np.zeros((65, 40), np.float32)
    sizes = (2048, 2048, 40, 1.0)
    whole = (65, 40, 2048, _address(a), _address(b), _address(together), *sizes)
    grouped_gemm(_problems(whole), dtype="bfloat16", out_dtype="float32")
    rows = [
        (1, 40, 2048, _address(a[r:]), _address(b), _address(alone[r:]), *sizes) for r in range(65)
    ]
    grouped_gemm(_problems(*rows), dtype="bfloat16", out_dtype="float32")
    assert (bits_of(together) == bits_of(alone)).all()


@pytest.mark.parametrize(
    ("k", "n"), [(1, 1), (8, 128), (63, 37), (128, 8), (128, 128), (1000, 100)]
)
def test_a_rows_product_depends_neither_on_its_place_nor_on_other_rows(k: int, n: int) -> None:
    rng = np.random.default_rng(k)
    x, w = rng.standard_normal((300, k), np.float32), rng.standard_normal((n, k), np.float32)
    whole = matmul_rows(x, w)
    np.testing.assert_allclose(whole, x.astype(float) @ w.astype(float).T, rtol=0, atol=1e-3)
    for count in (1, 7, 32, 33, 299):
        rows = rng.permutation(300)[:count]
        assert matmul_rows(x[rows], w).tobytes() == whole[rows].tobytes()
    assert matmul_rows(x[:0], w).shape == (0, n)
