"""activation, finalize and fill_uniform, and a whole MoE layer against the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from problem_util import (
    BOUNDS,
    WORST_ROW,
    HostMemory,
    ModuleWeights,
    RoutingCase,
    assert_close,
    build_entries,
    make_case,
    random_case,
    random_module,
    random_values,
    relative_errors,
    routing_cases,
)

from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.reference._erf import erfc
from cupylora.reference.activation import activation
from cupylora.reference.build_segments import build_segments
from cupylora.reference.expert_problems import expert_problems
from cupylora.reference.fill_uniform import fill_uniform
from cupylora.reference.finalize import finalize
from cupylora.reference.grouped_gemm import grouped_gemm
from cupylora.reference.lora_delta import lora_delta
from cupylora.reference.oracle import BaseExperts, moe_layer_oracle
from cupylora.reference.permute_rows import permute_rows
from cupylora.reference.route import route
from cupylora.shapes import PRESETS, MoeShape
from cupylora.worklists import LoraSlice, Routing

DTYPES = tuple(BOUNDS)
LAYER_BOUNDS = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-5}
LAYOUTS = ("gate_first", "up_first", "interleaved")


def _act(kind: str, x: float) -> float:
    if kind == "silu":
        return x / (1 + math.exp(-x))
    if kind == "relu2":
        return max(x, 0.0) ** 2
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _gated(kind: str, gate: float, up: float, alpha: float, limit: float) -> float:
    if kind != "swiglu_oai":
        return _act(kind, gate) * up
    gate, up = min(gate, limit), min(max(up, -limit), limit)
    return gate / (1 + math.exp(-alpha * gate)) * (up + 1)


def _columns(layout: str, half: int) -> list[tuple[int, int]]:
    """(gate column, up column) of each feature."""
    return {
        "gate_first": [(i, half + i) for i in range(half)],
        "up_first": [(half + i, i) for i in range(half)],
        "interleaved": [(2 * i, 2 * i + 1) for i in range(half)],
    }[layout]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["silu", "gelu", "relu2", "swiglu_oai"])
def test_gated_activations(kind: str, layout: str, dtype: str) -> None:
    x = random_values(np.random.default_rng(0), (9, 26), dtype, 4)
    got = activation(
        x,
        kind=kind,
        gated=True,
        layout=layout,
        alpha=1.3,
        limit=3.0,  # type: ignore[arg-type]
    )
    expected = [
        [_gated(kind, float(row[g]), float(row[u]), 1.3, 3.0) for g, u in _columns(layout, 13)]
        for row in x
    ]
    assert got.shape == (9, 13)
    assert got.dtype == x.dtype
    assert_close(got, np.array(expected), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "relu2"])
def test_plain_activations(kind: str, dtype: str) -> None:
    x = random_values(np.random.default_rng(1), (9, 13), dtype, 4)
    got = activation(x, kind=kind, gated=False)  # type: ignore[arg-type]
    assert_close(got, np.array([[_act(kind, float(v)) for v in row] for row in x]), BOUNDS[dtype])


def test_activations_at_the_ends() -> None:
    x = np.array([[-200.0, -20.0, 0.0, 20.0, 200.0]], np.float32)
    assert activation(x, kind="silu", gated=False)[0].tolist() == pytest.approx(
        [0, -20 / (1 + math.exp(20)), 0, 20, 200], rel=1e-6
    )
    assert activation(x, kind="gelu", gated=False)[0, 0] == 0
    assert activation(x, kind="gelu", gated=False)[0, 4] == 200
    pair = np.array([[50.0, -50.0], [-200.0, 50.0]], np.float32)
    got = activation(pair, kind="swiglu_oai", gated=True, layout="interleaved")
    assert got[0, 0] == pytest.approx(7 / (1 + math.exp(-1.702 * 7)) * (-7 + 1), rel=1e-6)
    assert got[1, 0] == 0


def test_erfc_agrees_with_the_standard_library() -> None:
    x = np.concatenate([np.linspace(-7, 26, 4001), [0.46875, -0.46875, 4.0, -4.0]])
    expected = np.array([math.erfc(v) for v in x])
    assert (np.abs(erfc(x) - expected) <= 1e-12 * expected).all()


@settings(max_examples=40, deadline=None)
@given(routing_cases())
def test_activation_bias_goes_by_expert_and_spares_foreign_rows(case: RoutingCase) -> None:
    routing = route(case.topk_ids, case.token_to_slot, **case.sizes)
    rng = np.random.default_rng(2)
    size = case.topk_ids.size
    by_pair = random_values(rng, (size, 6), "float32")
    bias = random_values(rng, (case.num_experts, 6), "float32")
    expected = np.full((size, 3), 77.0)
    for expert, _, pair, _ in case.local_pairs("token_major"):
        values = (by_pair[pair].astype(np.float64) + bias[expert]).tolist()
        expected[pair] = [_gated("silu", values[i], values[3 + i], 0, 0) for i in range(3)]
    options: dict[str, Any] = {"kind": "silu", "gated": True, "bias": bias, "routing": routing}
    out = np.full((size, 3), 77, np.float32)
    assert activation(by_pair, rows="pair", out=out, **options) is out
    assert out == pytest.approx(expected, rel=1e-5, abs=1e-6)
    valid = int(routing.expert_first_token_offset[-1])
    by_row = np.full_like(by_pair, np.nan)
    by_row[:valid] = by_pair[routing.row_to_pair[:valid]]
    got = activation(by_row, rows="row", **options)
    assert (got[:valid] == out[routing.row_to_pair[:valid]]).all()
    assert not got[valid:].any()


def test_activation_arguments_are_named() -> None:
    x = np.zeros((2, 6), np.float32)
    with pytest.raises(ArgumentError, match="kind is 'relu'; use one of 'silu'"):
        activation(x, kind="relu", gated=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="swiglu_oai' is a gated"):
        activation(x, kind="swiglu_oai", gated=False)
    with pytest.raises(ArgumentError, match="x has 5 columns"):
        activation(x[:, :5].copy(), kind="silu", gated=True)
    with pytest.raises(ArgumentError, match="bias is given without routing"):
        activation(x, kind="silu", gated=True, bias=np.zeros((1, 6), np.float32))
    with pytest.raises(ArgumentError, match="x has dtype float64; bfloat16 or float16 or float32"):
        activation(x.astype(np.float64), kind="silu", gated=True)


@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
@pytest.mark.parametrize("y_rows", ["pair", "row"])
@settings(max_examples=40, deadline=None)
@given(case=routing_cases())
def test_finalize(case: RoutingCase, row_order: str, y_rows: str) -> None:
    """Foreign choices (NaN here) are skipped; bias goes by expert; the residual always counts."""
    routing = route(case.topk_ids, case.token_to_slot, row_order=row_order, **case.sizes)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    tokens, top_k = case.topk_ids.shape
    y = np.full((tokens * top_k, 5), np.nan, np.float32)
    weights = rng.random((tokens, top_k), np.float32)
    bias = random_values(rng, (case.num_experts, 5), "float32")
    residual = random_values(rng, (tokens, 5), "float32")
    expected = residual.astype(np.float64)
    for token, choice in np.ndindex(tokens, top_k):
        expert = int(case.topk_ids[token, choice]) - case.start_expert
        if 0 <= expert < case.num_experts:
            pair = case.pair(token, choice, row_order)
            place = pair if y_rows == "pair" else int(routing.pair_to_row[pair])
            y[place] = rng.standard_normal(5)
            value = y[place].astype(np.float64) + bias[expert]
            expected[token] += float(weights[token, choice]) * value
    got = finalize(y, weights, routing, y_rows=y_rows, bias=bias, residual=residual)  # type: ignore[arg-type]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
    in_place = residual.copy()
    finalize(y, weights, routing, y_rows=y_rows, bias=bias, residual=in_place, out=in_place)  # type: ignore[arg-type]
    assert (in_place == got).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_finalize_zeroes_tokens_without_a_local_expert(dtype: str) -> None:
    case = make_case("", [[-1, 3], [-1, -1], [5, 5]], [0, 0, 0], 6, 1)
    routing = route(case.topk_ids, case.token_to_slot, **case.sizes)
    y = random_values(np.random.default_rng(4), (6, 8), dtype)
    weights = np.array([[0.5, 0.25], [0.5, 0.5], [0.25, 0.75]], np.float32)
    out = np.full((3, 8), np.nan, y.dtype)
    assert finalize(y, weights, routing, out=out) is out
    wide = y.astype(np.float64)
    assert_close(out[[0, 2]], np.stack([wide[1] / 4, wide[4] / 4 + wide[5] * 3 / 4]), BOUNDS[dtype])
    assert not out[1].any()


def _moe_base(rng: np.random.Generator, moe: MoeShape, dtype: str) -> BaseExperts:
    first = (moe.experts, moe.first_width, moe.hidden)
    down = (moe.experts, moe.hidden, moe.intermediate)
    return BaseExperts(
        random_values(rng, first, dtype, moe.hidden**-0.5),
        random_values(rng, down, dtype, moe.intermediate**-0.5),
        random_values(rng, first[:2], dtype, 0.5) if moe.expert_bias else None,
        random_values(rng, down[:2], dtype, 0.5) if moe.expert_bias else None,
    )


def _slices(moe: MoeShape) -> list[LoraSlice]:
    width = moe.intermediate
    if not moe.gated:
        return [LoraSlice(width)]
    gate, up, stride = {
        "gate_first": (0, width, 1),
        "up_first": (width, 0, 1),
        "interleaved": (0, 1, 2),
    }[moe.gate_up_layout]
    return [LoraSlice(width, gate, stride), LoraSlice(width, up, stride)]


def _gemm(routing: Routing, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.zeros((routing.num_rows, w.shape[1]), w.dtype)
    problems = expert_problems(
        routing,
        x_ptr=x.ctypes.data,
        w_ptr=w.ctypes.data,
        y_ptr=y.ctypes.data,
        itemsize=w.itemsize,
        in_features=w.shape[2],
        out_features=w.shape[1],
    )
    grouped_gemm(problems, dtype=w.dtype)
    return y


def _layer(
    case: RoutingCase,
    x: np.ndarray,
    weights: np.ndarray,
    moe: MoeShape,
    base: BaseExperts,
    modules: list[ModuleWeights],
) -> np.ndarray:
    """A MoE block through the ops, everything laid out by row."""
    routing = route(case.topk_ids, case.token_to_slot, **case.sizes)
    segments = build_segments(routing, case.token_to_slot, max_loras=case.max_loras)
    memory = HostMemory()
    entries = build_entries(modules, memory.upload, packed=True)
    first = _gemm(routing, permute_rows(x, routing), base.gate_up)
    slices = _slices(moe)
    lora_delta(
        x,
        first,
        segments,
        routing,
        entries[:-1],
        slices,
        in_features=moe.hidden,
        max_rank=16,
        y_rows="row",
    )
    hidden = activation(
        first,
        kind=moe.activation,
        gated=moe.gated,
        layout=moe.gate_up_layout,
        alpha=moe.alpha,
        limit=moe.limit,
        bias=base.gate_up_bias,
        routing=routing,
        rows="row",
    )
    y = _gemm(routing, hidden, base.down)
    lora_delta(
        hidden,
        y,
        segments,
        routing,
        entries[-1:],
        [LoraSlice(moe.hidden)],
        in_features=moe.intermediate,
        max_rank=16,
        x_rows="row",
        y_rows="row",
    )
    return finalize(y, weights, routing, y_rows="row", bias=base.down_bias)


TINY = PRESETS["tiny-moe"].moe
assert TINY is not None
SHAPES = {
    "tiny-moe": TINY,
    "up_first": replace(TINY, gate_up_layout="up_first", activation="gelu"),
    "plain": replace(TINY, gated=False, activation="relu2"),
    "gpt-oss": replace(
        TINY, activation="swiglu_oai", gate_up_layout="interleaved", expert_bias=True
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_layer_against_the_oracle(shape: str, dtype: str) -> None:
    moe = SHAPES[shape]
    case = random_case(5, 64, moe.top_k, moe.experts, 4, foreign_share=0.2, start_expert=3)
    rng = np.random.default_rng(6)
    x = random_values(rng, (64, moe.hidden), dtype)
    weights = rng.random((64, moe.top_k), np.float32)
    base = _moe_base(rng, moe, dtype)
    global_experts = case.start_expert + moe.experts
    modules = [
        random_module(
            rng, (8, 16, 3, 0), m.in_features, m.out_features, global_experts, dtype, share=share
        )
        for m, share in zip(moe.modules, ("a", "", "b"), strict=False)
    ]
    names = [m.name for m in moe.modules]

    def lora(slot: int, module: str, expert: int) -> tuple[np.ndarray, np.ndarray, float] | None:
        factors = modules[names.index(module)].slots[slot]
        return None if factors is None else factors.expert(expert)

    chosen = np.array([0, 5, 17, 33, 34, 35, 62, 63])
    expected = moe_layer_oracle(
        x[chosen],
        case.topk_ids[chosen],
        weights[chosen],
        case.token_to_slot[chosen],
        moe,
        base,
        lora,
        case.start_expert,
    )
    got = _layer(case, x, weights, moe, base, modules)
    whole, worst = relative_errors(got[chosen], expected)
    assert whole <= LAYER_BOUNDS[dtype]
    assert worst <= WORST_ROW * LAYER_BOUNDS[dtype]
    # The adapters matter here: without them the answer is another.
    bare = moe_layer_oracle(
        x[chosen],
        case.topk_ids[chosen],
        weights[chosen],
        np.full(len(chosen), -1),
        moe,
        base,
        lora,
        case.start_expert,
    )
    assert relative_errors(bare, expected)[0] > 0.1


def test_oracle_by_hand() -> None:
    """One expert of hidden 2 and intermediate 1, relu2, with an adapter on up and down."""
    moe = MoeShape(2, 1, 1, 1, activation="relu2", gated=False)
    base = BaseExperts(np.array([[[1.0, 2.0]]]), np.array([[[3.0], [4.0]]]), None, [[0.5, 0.0]])
    factors = {
        "up_proj": (np.array([[1.0, 0.0]]), np.array([[2.0]]), 0.5),
        "down_proj": (np.array([[1.0]]), np.array([[0.0], [1.0]]), 2.0),
    }
    x, ids = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), np.array([[7], [7], [6]])
    weights, slots = np.array([[0.5], [0.5], [1.0]]), np.array([0, -1, 0])
    got = moe_layer_oracle(
        x, ids, weights, slots, moe, base, lambda slot, module, expert: factors[module], 7
    )
    # Adapter: up = 3 + 1 -> 16 -> (48.5, 64 + 2·16) / 2; base: up = 3 -> 9 -> (27.5, 36) / 2.
    assert got.tolist() == [[24.25, 48.0], [13.75, 18.0], [0.0, 0.0]]
    no_base = moe_layer_oracle(
        x, ids, weights, slots, moe, None, lambda slot, module, expert: factors[module], 7
    )
    assert no_base.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def _splitmix(z: int) -> int:
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, -3, 2**63 + 5])
def test_fill_uniform_matches_the_definition(dtype: str, seed: int) -> None:
    out = np.empty((5, 1 << 16), resolve_dtype(dtype))
    assert fill_uniform(out, seed, 0.3) is out
    flat = out.reshape(-1)
    for index in (0, 1, 2, 99, (1 << 18) - 1, 1 << 18, flat.size - 1):
        z = _splitmix((index + seed * 0x9E3779B97F4A7C15) % (1 << 64))
        unit = np.float32(z >> 40) * np.float32(2.0**-23) - np.float32(1)
        assert flat[index] == (unit * np.float32(0.3)).astype(out.dtype)


def test_fill_uniform_is_uniform_and_seeded() -> None:
    a, b = np.empty(100_000, np.float32), np.empty(100_000, np.float32)
    fill_uniform(a, 1, 2.0)
    fill_uniform(b, 2, 2.0)
    assert -2 <= a.min() < -1.99
    assert 1.99 < a.max() < 2
    assert abs(a.mean()) < 0.02
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    with pytest.raises(ArgumentError, match=r"seed is 0\.5; an integer"):
        fill_uniform(a, 0.5, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="out has dtype float64"):
        fill_uniform(np.empty(3), 0, 1.0)
