"""The MoE chain's own kernels: row ops at sizes of real models, the GEMM's epilogue, and the whole
chain of dependent launches against the same chain without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend_util import make_table, moe_layer, random_adapter, random_weights
from gpu_util import DeviceMemory, shifted_copy, to_device, to_host
from problem_util import bits_of, make_case, random_case, random_values

from cupylora import ops, reference
from cupylora.backend import open_backend
from cupylora.dtypes import resolve_dtype
from cupylora.ops import _device, _row_items
from cupylora.shapes import ModelShape, MoeShape
from cupylora.worklists import GemmProblems

pytestmark = pytest.mark.gpu

TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}
SIZES = [(1, 8, 128, 2048), (33, 8, 128, 2880), (600, 8, 128, 1024), (40, 40, 64, 512)]


def _near(got: Any, want: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(
        to_host(got).astype(np.float64),
        want.astype(np.float64),
        rtol=TOLERANCE[dtype],
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "width"), SIZES)
@pytest.mark.parametrize("resident", [8, None])
def test_row_ops_at_real_sizes(
    resident: int | None,
    tokens: int,
    top_k: int,
    experts: int,
    width: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without many items a warp."""
    if resident is not None:
        monkeypatch.setattr(_row_items, "_RESIDENT_WARPS", resident)
    rng = np.random.default_rng(1)
    case = random_case(1, tokens, top_k, experts, 2, foreign_share=0.2, start_expert=5)
    routing = reference.route(case.topk_ids, case.token_to_slot, **case.sizes)
    device = to_device(routing)
    x = random_values(rng, (tokens, width), dtype)
    permuted = ops.permute_rows(to_device(x), device)
    np.testing.assert_array_equal(
        bits_of(to_host(permuted)), bits_of(reference.permute_rows(x, routing))
    )
    y = random_values(rng, (tokens * top_k, width), dtype)
    bias = random_values(rng, (experts, width), dtype)
    weights = rng.random((tokens, top_k), np.float32)
    for b in (None, bias):
        here = to_device(y), None if b is None else to_device(b)
        for layout, rows in (("gate_first", "pair"), ("interleaved", "row"), ("up_first", "pair")):
            options: dict[str, Any] = {"kind": "silu", "gated": True, "layout": layout}
            options |= {"rows": rows}
            got = ops.activation(here[0], bias=here[1], routing=device, **options)
            _near(got, reference.activation(y, bias=b, routing=routing, **options), dtype)
        got = ops.finalize(here[0], to_device(weights), device, bias=here[1], residual=to_device(x))
        want = reference.finalize(y, weights, routing, bias=b, residual=x)
        _near(got, want, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_alignment_does_not_change_a_bit(dtype: str) -> None:
    rng = np.random.default_rng(2)
    case = random_case(2, 50, 4, 16, 2, foreign_share=0.2)
    device = to_device(reference.route(case.topk_ids, case.token_to_slot, **case.sizes))
    y, x = random_values(rng, (200, 272), dtype), random_values(rng, (50, 272), dtype)
    bias = random_values(rng, (16, 272), dtype)
    weights = to_device(rng.random((50, 4), np.float32))
    results = []
    for shift in (0, 1):
        y_here, x_here, b_here = (shifted_copy(v, shift) for v in (y, x, bias))
        results.append(
            [
                ops.permute_rows(x_here, device),
                ops.finalize(y_here, weights, device, bias=b_here, residual=x_here),
                *(
                    ops.activation(
                        y_here, kind=kind, gated=True, layout=layout, bias=b_here, routing=device
                    )
                    for kind in ("silu", "gelu", "relu2", "swiglu_oai")
                    for layout in ("gate_first", "up_first", "interleaved")
                ),
            ]
        )
    for aligned, shifted in zip(*results, strict=True):
        np.testing.assert_array_equal(bits_of(to_host(aligned)), bits_of(to_host(shifted)))


@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_row_added_to_d_does_not_depend_on_its_place(dtype: str, out_dtype: str) -> None:
    """The same row at every place of a problem, beta 1, alpha no power of two: the same bits."""
    rng = np.random.default_rng(3)
    kind = resolve_dtype(dtype if out_dtype == "same" else out_dtype)
    width, k = 136, 72
    a = np.repeat(random_values(rng, (1, k), dtype), 200, 0)
    b = np.repeat(random_values(rng, (1, k), dtype), width, 0)
    d = np.full((200, width), 0.7371, kind)
    first = None
    for rows, max_m in ((200, None), (200, 64), (9, 16), (1, 16)):
        memory = DeviceMemory()
        one = np.ones(1, np.int64)
        problems = to_device(
            GemmProblems(
                *(np.array([v], np.int32) for v in (rows, width, k)),
                *(np.array([memory.upload(v)], np.uint64) for v in (a[:rows], b, d[:rows])),
                one * k,
                one * k,
                one * width,
                np.array([1.2345], np.float32),
                np.ones(1, np.int32),
            )
        )
        ops.grouped_gemm(problems, dtype=dtype, out_dtype=kind, beta=1, max_m=max_m)
        got = np.empty((rows, width), kind)
        import cupy

        cupy.cuda.runtime.memcpy(got.ctypes.data, int(problems.d[0]), got.nbytes, 2)
        first = bits_of(got).flat[0] if first is None else first
        assert (bits_of(got) == first).all()


BLOCKS = {
    "halves": MoeShape(256, 128, 16, 4),
    "gpt-oss": replace(
        MoeShape(256, 128, 16, 4),
        activation="swiglu_oai",
        gate_up_layout="interleaved",
        expert_bias=True,
    ),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [1, 48])
@pytest.mark.parametrize("name", BLOCKS)
def test_dependent_launches_change_nothing(
    name: str, tokens: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks run one after the other on changing inputs in the same buffers, with dependent
    launches and without."""
    import cupy

    moe = BLOCKS[name]
    model = ModelShape("toy", 1, moe.hidden, (), moe)
    here = open_backend("cuda")
    adapters = {slot: random_adapter(model, rank, slot) for slot, rank in enumerate((8, 16, 5))}
    table = make_table(here, model, adapters, "bfloat16")
    lora, plan = moe_layer(here, table)
    base = random_weights(moe, "bfloat16").on(here)
    rng = np.random.default_rng(4)
    batches = []
    for turn in range(3):
        case = random_case(turn, tokens, moe.top_k, moe.experts, 4)
        x = random_values(rng, (tokens, moe.hidden), "bfloat16")
        weights = rng.random((tokens, moe.top_k), np.float32)
        arrays = (x.view(np.uint16), case.topk_ids, weights, case.token_to_slot)
        batches.append([to_device(v) for v in arrays])
    x, ids, weights, slots = (cupy.empty_like(v) for v in batches[0])
    kind = resolve_dtype("bfloat16")
    first, wide = (v.copy() for v in lora_outputs(rng, moe, tokens))

    def block() -> Any:
        if not fused:
            return lora.forward(x.view(kind), ids, weights, slots, base, plan)
        plan.update(slots, ids)
        hidden = lora.activate_with_delta(
            x.view(kind), first.view(kind), plan, bias=base.gate_up_bias
        )
        return lora.finalize_with_delta(
            hidden, wide.view(kind), weights, plan, bias=base.down_bias, residual=x.view(kind)
        )

    def run(turns: int) -> list[Any]:
        results = []
        for turn in range(turns):
            for to, value in zip((x, ids, weights, slots), batches[turn % 3], strict=True):
                to[...] = value
            results.append(block().view(np.uint16).copy())
        return results

    dependent = run(150)
    monkeypatch.setattr(_device, "_has_dependent_launch", lambda _: False)
    plain = run(3)
    for turn, result in enumerate(dependent):
        assert bool((result == plain[turn % 3]).all()), turn


def lora_outputs(rng: np.random.Generator, moe: MoeShape, tokens: int) -> tuple[Any, Any]:
    """Base outputs by pair, as bits."""
    rows = tokens * moe.top_k
    widths = (moe.first_width, moe.hidden)
    first, wide = (random_values(rng, (rows, width), "bfloat16") for width in widths)
    return to_device(first.view(np.uint16)), to_device(wide.view(np.uint16))


def test_expert_lists_of_one_expert_and_of_many() -> None:
    """The search for a row's expert: one expert, empty ones, 2,048 of them."""
    for experts, tokens in ((1, 5), (33, 40), (2048, 300)):
        rng = np.random.default_rng(experts)
        case = make_case("", rng.integers(0, experts, (tokens, 3)), [0] * tokens, experts, 1)
        routing = reference.route(case.topk_ids, case.token_to_slot, **case.sizes)
        y = random_values(rng, (3 * tokens, 32), "float32")
        bias = np.repeat(np.arange(experts, dtype=np.float32)[:, None], 32, 1)
        weights = np.ones((tokens, 3), np.float32)
        device, b = to_device(routing), to_device(bias)
        got = ops.finalize(to_device(y), to_device(weights), device, bias=b)
        _near(got, reference.finalize(y, weights, routing, bias=bias), "float32")
        options: dict[str, Any] = {"kind": "relu2", "gated": False}
        got = ops.activation(to_device(y), bias=b, routing=device, **options)
        want = reference.activation(y, bias=bias, routing=routing, **options)
        _near(got, want, "float32")
