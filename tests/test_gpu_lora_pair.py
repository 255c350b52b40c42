"""The two-node pair: every kernel form gives a row the same bits, and the right ones.

Which form runs follows from the number of rows; the tests move the border to run each on the same
batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_util import DeviceMemory, shifted_copy, to_device
from problem_util import (
    BOUNDS,
    Factors,
    ModuleWeights,
    RoutingCase,
    assert_close,
    bits_of,
    build_entries,
    comparable_rows,
    expert_order,
    fragile_values,
    make_case,
    pair_deltas,
    random_case,
    random_module,
    random_values,
)

from cupylora import ops, reference
from cupylora.dtypes import resolve_dtype
from cupylora.ops import _lora_pair
from cupylora.ops._device import is_hopper
from cupylora.worklists import LoraSlice, Routing

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")
WIDTHS_IN = (8, 63, 64, 200, 768, 2048, 2880, 4096, 7168, 14336)
RANKS = (1, 3, 8, 16, 17, 32, 64, 100, 512)
SMALL, LARGE = 2**31, 0  # borders: everything is a small batch, or a large one
FORMS = ((SMALL, ""), (LARGE, ""), (LARGE, "wide"), (LARGE, "group"))
NEVER = 2**60
TILE_ROWS = (8, 16, 32, 64)


def _route(case: RoutingCase, row_order: str = "token_major") -> Routing:
    args = (case.topk_ids, case.token_to_slot)
    return reference.route(*args, row_order=row_order, **case.sizes)  # type: ignore[arg-type]


class Pair:
    """Runs the pair on one batch after the other with the border of the forms where it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def border(self, rows: int, together: str = "group") -> None:
        """together: large batches take many ranks in the wide shrink, or where they can in that by
        warpgroup products, and B by panels."""
        self._monkeypatch.setattr(_lora_pair, "_STREAM_ROWS", rows)
        self._monkeypatch.setattr(
            _lora_pair, "is_hopper", lambda: together == "group" and is_hopper()
        )
        for name in ("_WIDE_ROWS", "_PANEL_ROWS", "_PANEL_ELEMENTS"):
            self._monkeypatch.setattr(_lora_pair, name, 0 if together else NEVER)

    def __call__(
        self,
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
        y_shift: int = 0,
        max_rank: int = 64,
        **options: Any,
    ) -> np.ndarray:
        """y after the delta; shifts in elements beyond an aligned address."""
        memory = DeviceMemory(shift * x.dtype.itemsize)
        entries = to_device(build_entries(modules, memory.upload, packed=packed))
        routing = to_device(_route(case) if routing is None else routing)
        segments = ops.build_segments(
            routing, to_device(case.token_to_slot), max_loras=case.max_loras, tile_rows=tile_rows
        )
        out = shifted_copy(y, y_shift)
        ops.lora_delta(
            shifted_copy(x, x_shift),
            out,
            segments,
            routing,
            entries,
            slices or [LoraSlice(modules[0].out_features)],
            in_features=modules[0].in_features,
            max_rank=max_rank,
            kernel="pair",
            **options,
        )
        return np.asarray(out.get())


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(monkeypatch)


def _same_in_every_form(
    pair: Pair, case: RoutingCase, x: np.ndarray, y: np.ndarray, *args: Any, **options: Any
) -> np.ndarray:
    """The result, once all forms and tile sizes have agreed on its bits."""
    results = []
    for border, together in FORMS:
        pair.border(border, together)
        results += [pair(case, x, y, *args, tile_rows=rows, **options) for rows in TILE_ROWS]
    for result in results[1:]:
        np.testing.assert_array_equal(bits_of(result), bits_of(results[0]))
    return results[0]


@pytest.mark.parametrize("in_features", WIDTHS_IN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_of_x(dtype: str, in_features: int, pair: Pair) -> None:
    rng = np.random.default_rng(1)
    case = random_case(1, 150, 1, 1, 4)
    module = random_module(rng, (16, 8, 3, 17), in_features, 264, 1, dtype)
    x = random_values(rng, (150, in_features), dtype)
    delta = pair_deltas(case, x, module)
    y0 = comparable_rows(rng, delta, dtype)
    y = _same_in_every_form(pair, case, x, y0, [module], max_rank=17)
    assert_close(y.astype(np.float64) - y0.astype(np.float64), delta, BOUNDS[dtype])
    # However the operands lie, and whichever of them lies badly.
    for border in (SMALL, LARGE):
        pair.border(border)
        for options in ({"shift": 1}, {"x_shift": 1}, {"y_shift": 1}, {"packed": False}):
            other = pair(case, x, y0, [module], tile_rows=32, max_rank=17, **options)
            np.testing.assert_array_equal(bits_of(other), bits_of(y))


@pytest.mark.parametrize("in_features", WIDTHS_IN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_of_x_of_many_ranks(dtype: str, in_features: int, pair: Pair) -> None:
    rng = np.random.default_rng(13)
    case = random_case(13, 150, 1, 1, 4)
    module = random_module(rng, (80, 8, 33, 128), in_features, 72, 1, dtype)
    x = random_values(rng, (150, in_features), dtype)
    y0 = random_values(rng, (150, 72), dtype)
    y = _same_in_every_form(pair, case, x, y0, [module], max_rank=128)
    pair.border(LARGE)
    for options in ({"shift": 1}, {"x_shift": 1}, {"y_shift": 1}, {"packed": False}):
        for rows in (32, 64):
            other = pair(case, x, y0, [module], tile_rows=rows, max_rank=128, **options)
            np.testing.assert_array_equal(bits_of(other), bits_of(y))


@pytest.mark.parametrize("kind", ["any", "finite", "tiny", "cancel"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_all_forms_have_the_same_bits(dtype: str, kind: str, pair: Pair) -> None:
    """Whatever bits x and A have: numbers of all sizes, no numbers, subnormal ones, sums that
    cancel."""
    rng = np.random.default_rng(14)
    case = random_case(14, 200, 1, 1, 2)
    module = random_module(rng, (128, 80), 2048, 136, 1, dtype)
    shapes = [(200, 2048), *(factors.a.shape for factors in module.slots)]
    drawn = [rng.integers(0, 2**16, shape, np.uint16) for shape in shapes]
    if kind != "any":
        top = 0x7E00 if dtype == "bfloat16" else 0x7800
        drawn = [(bits & 0x8000) | (bits & 0x7FFF) % top for bits in drawn]
    if kind == "tiny":
        drawn = [bits & 0x81FF for bits in drawn]
    if kind == "cancel":
        for bits in drawn[1:]:
            bits[..., 1::2] = bits[..., ::2] ^ 0x8000
        drawn[0][:, 1::2] = drawn[0][:, ::2] ^ (rng.integers(0, 3, (200, 1024)) == 0)
    x, *a = (bits.astype(np.uint16).view(resolve_dtype(dtype)) for bits in drawn)
    changed = (replace(f, a=own) for f, own in zip(module.slots, a, strict=True))
    module = replace(module, slots=tuple(changed))
    _same_in_every_form(pair, case, x, np.zeros((200, 136), x.dtype), [module], max_rank=128)


@pytest.mark.parametrize("out_features", [9, 101, 128, 200, 3424])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank(dtype: str, rank: int, out_features: int, pair: Pair) -> None:
    rng = np.random.default_rng(2)
    case = random_case(2, 90, 2, 3, 2)
    module = random_module(rng, (rank, max(1, rank // 2)), 1536, out_features, 3, dtype)
    x = random_values(rng, (90, 1536), dtype)
    delta = pair_deltas(case, x, module)
    zero = np.zeros(delta.shape, x.dtype)
    y = _same_in_every_form(pair, case, x, zero, [module], max_rank=rank)
    assert_close(y, delta, BOUNDS[dtype])
    for max_rank in {64, 512} - {rank}:
        if max_rank > rank:  # an adapter does not depend on what others may have
            pair.border(LARGE)
            other = pair(case, x, zero, [module], tile_rows=64, max_rank=max_rank)
            np.testing.assert_array_equal(bits_of(other), bits_of(y))


@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_batch(dtype: str, rank: int, pair: Pair) -> None:
    """Alone (K split over 16 CTAs), among 64, among 1000 (over 4), among so many (not split) that
    large ranks are taken together."""
    rng = np.random.default_rng(3)
    tokens, width = 17000, 4096
    module = random_module(rng, (rank, 8), width, 96, 1, dtype)
    x = random_values(rng, (tokens, width), dtype)
    y = random_values(rng, (tokens, 96), dtype)
    slots = rng.integers(-1, 2, tokens).astype(np.int32)
    slots[0] = 0
    alone = None
    for count, tile_rows in ((1, 8), (65, 8), (65, 32), (1000, 32), (tokens, 16), (tokens, 64)):
        case = make_case("batch", np.zeros((count, 1)), slots[:count], 1, 2)
        result = pair(case, x[:count], y[:count], [module], tile_rows=tile_rows, max_rank=rank)
        alone = result[0] if alone is None else alone
        np.testing.assert_array_equal(bits_of(result[0]), bits_of(alone))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_different_widths_and_ranks(dtype: str, interleaved: bool, pair: Pair) -> None:
    rng = np.random.default_rng(4)
    case = random_case(4, 170, 1, 1, 4, base_share=0.2)
    widths = (136, 136) if interleaved else (512, 72, 100, 8)
    ranks = ((16, 0, 5, 40), (8, 64, 0, 17), (1, 16, 16, 3), (64, 64, 64, 0))
    modules = [random_module(rng, r, 704, w, 1, dtype) for w, r in zip(widths, ranks, strict=False)]
    slices, columns, at = [], [], 0 if interleaved else 8
    for index, width in enumerate(widths):
        slices.append(LoraSlice(width, index, 2) if interleaved else LoraSlice(width, at))
        columns.append(slice(index, None, 2) if interleaved else slice(at, at + width))
        at += width + 8
    x = random_values(rng, (170, 704), dtype)
    total = 2 * widths[0] if interleaved else at
    y0 = np.zeros((170, total), resolve_dtype(dtype))
    y = _same_in_every_form(pair, case, x, y0, modules, slices=slices)
    for module, where in zip(modules, columns, strict=True):
        assert_close(y[:, where], pair_deltas(case, x, module), BOUNDS[dtype])
        y[:, where] = 0
    np.testing.assert_array_equal(bits_of(y), bits_of(y0))


@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
@pytest.mark.parametrize("foreign", [False, True])
def test_row_maps_agree(row_order: str, foreign: bool, pair: Pair) -> None:
    rng = np.random.default_rng(5)
    case = random_case(5, 300, 2, 2, 2, foreign_share=0.2)
    module = random_module(rng, (8, 20), 192, 136, 2, "bfloat16")
    routing = _route(case, row_order)
    routing = expert_order(routing, 1) if foreign else routing
    x = random_values(rng, (300, 192), "bfloat16")
    rows = int(routing.expert_first_token_offset[-1])
    pairs = routing.row_to_pair[:rows]
    y0 = random_values(rng, (600, 136), "bfloat16")
    by_pair = _same_in_every_form(pair, case, x, y0, [module], routing=routing)
    y_rows = y0.copy()
    y_rows[:rows] = y0[pairs]
    permuted = reference.permute_rows(x, routing)
    pair.border(LARGE)
    by_row = pair(
        case, permuted, y_rows, [module], routing=routing, tile_rows=64, x_rows="row", y_rows="row"
    )
    np.testing.assert_array_equal(bits_of(by_row[:rows]), bits_of(by_pair[pairs]))
    zero = np.zeros_like(y0)
    expected = pair_deltas(case, x, module, row_order)
    got = pair(case, x, zero, [module], routing=routing, tile_rows=64)
    assert_close(got, expected, BOUNDS["bfloat16"])


@pytest.mark.parametrize("border", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_no_adapter_keep_every_bit(dtype: str, border: int, pair: Pair) -> None:
    rng = np.random.default_rng(6)
    case = random_case(6, 400, 2, 4, 3, base_share=0.5)
    module = random_module(rng, (8, 0, 16), 192, 136, 4, dtype)
    x = random_values(rng, (400, 192), dtype)
    y0 = fragile_values((800, 136), dtype)
    pair.border(border)
    y = pair(case, x, y0, [module], tile_rows=32)
    slots = np.repeat(case.token_to_slot, 2)
    untouched = (slots < 0) | (slots == 1)
    assert untouched.any()
    assert not untouched.all()
    np.testing.assert_array_equal(bits_of(y[untouched]), bits_of(y0[untouched]))


@pytest.mark.parametrize("max_rank", [8, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_sum_stays_infinite(dtype: str, max_rank: int, pair: Pair) -> None:
    """h that overflows gives an infinite y of the right sign, in its own row alone."""
    rng = np.random.default_rng(7)
    case = make_case("overflow", np.zeros((40, 1)), np.zeros(40), 1, 1)
    size = 3e38 if dtype == "bfloat16" else 6e4
    kind = resolve_dtype(dtype)
    a = np.full((1, 8, 64), size, np.float32).astype(kind)
    b = np.ones((1, 72, 8), np.float32).astype(kind)
    module = ModuleWeights(64, 72, (Factors(a, b, 1.0),))
    x = random_values(rng, (40, 64), dtype, 1e-3)
    x[3], x[5] = size, -size
    y = _same_in_every_form(pair, case, x, np.zeros((40, 72), kind), [module], max_rank=max_rank)
    assert np.isposinf(y[3].astype(np.float32)).all()
    assert np.isneginf(y[5].astype(np.float32)).all()
    rest = np.delete(y, (3, 5), axis=0).astype(np.float32)
    assert not np.isnan(rest).any()


def test_settled_plans_and_hints_change_nothing(pair: Pair) -> None:
    rng = np.random.default_rng(8)
    case = random_case(8, 700, 1, 1, 5)
    module = random_module(rng, (16, 8, 4, 32, 16), 2048, 512, 1, "bfloat16")
    x = random_values(rng, (700, 2048), "bfloat16")
    y = random_values(rng, (700, 512), "bfloat16")
    plain = pair(case, x, y, [module], tile_rows=32)
    for options in ({"plan_settled": True}, {"max_active": 1}, {"max_active": 5}):
        other = pair(case, x, y, [module], tile_rows=32, **options)
        np.testing.assert_array_equal(bits_of(other), bits_of(plain))


def test_many_experts_with_few_rows_each(pair: Pair) -> None:
    """More tiles than CTAs, most of them short: CTAs go from tile to tile."""
    rng = np.random.default_rng(9)
    case = random_case(9, 900, 8, 64, 6)
    modules = [random_module(rng, (16,) * 6, 256, 192, 64, "bfloat16") for _ in range(2)]
    slices = [LoraSlice(192), LoraSlice(192, 192)]
    x = random_values(rng, (900, 256), "bfloat16")
    y = np.zeros((7200, 384), x.dtype)
    got = _same_in_every_form(pair, case, x, y, modules, slices=slices, max_rank=16)
    for index, module in enumerate(modules):
        part = got[:, index * 192 : (index + 1) * 192]
        assert_close(part, pair_deltas(case, x, module), BOUNDS["bfloat16"])


@pytest.mark.parametrize(
    ("border", "together", "rank"),
    [(SMALL, "", 32), (LARGE, "", 32), (LARGE, "wide", 64), (LARGE, "group", 128)],
)
def test_a_thousand_runs_give_the_same_bits(
    border: int, together: str, rank: int, pair: Pair
) -> None:
    import cupy

    rng = np.random.default_rng(10)
    case = random_case(10, 1500, 1, 1, 4)
    module = random_module(rng, (rank, 8, 16, 5), 4096, 1024, 1, "bfloat16")
    memory = DeviceMemory()
    entries = to_device(build_entries([module], memory.upload, packed=True))
    x = to_device(random_values(rng, (1500, 4096), "bfloat16"))
    start = to_device(random_values(rng, (1500, 1024), "bfloat16").view(np.uint16))
    routing = to_device(_route(case))
    slots = to_device(case.token_to_slot)
    segments = ops.build_segments(routing, slots, max_loras=4, tile_rows=64)
    size = ops.lora_workspace_bytes(1500, 1, 4096, rank, x.dtype)
    workspace = cupy.empty(size, np.uint8)
    pair.border(border, together)
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
            [LoraSlice(1024)],
            in_features=4096,
            max_rank=rank,
            workspace=workspace,
            kernel="pair",
        )
        first = y if first is None else first
        different += (y != first).sum()
    assert int(different) == 0


def test_a_rank_out_of_range_is_reported_and_skipped(pair: Pair) -> None:
    from cupylora.worklists import STATUS_BAD_RANK

    rng = np.random.default_rng(11)
    case = make_case("rank", np.zeros((600, 1)), np.arange(600) % 2, 1, 2)
    module = random_module(rng, (8, 16), 128, 136, 1, "bfloat16")
    wide = replace(module, slots=(module.slots[0], None))
    x = random_values(rng, (600, 128), "bfloat16")
    y = random_values(rng, (600, 136), "bfloat16")
    expected = pair(case, x, y, [wide], tile_rows=64, max_rank=8)
    status = to_device(np.zeros(1, np.int32))
    for border in (SMALL, LARGE):
        pair.border(border)
        got = pair(case, x, y, [module], tile_rows=64, max_rank=8, status=status)
        np.testing.assert_array_equal(bits_of(got), bits_of(expected))
        assert int(status[0]) == STATUS_BAD_RANK
        status[0] = 0
