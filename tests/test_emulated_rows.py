"""The MoE chain's row-wise kernels on the emulated device: the twins' bits or values, and those
with a delta as their own tests judge them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import test_lora_activation
import test_lora_finalize
from chain_util import Place, first_modules
from emulator.device import Device, Schedule
from problem_util import (
    RoutingCase,
    bits_of,
    hostile_routings,
    random_case,
    random_module,
    random_values,
)

from cupylora import ops, reference
from cupylora.ops import _row_items

pytestmark = pytest.mark.emulated

DTYPES = ("bfloat16", "float16", "float32")
PROGRAMS = (
    "fill",
    "rows",
    "rows_unaligned",
    "segments",
    "lora_f32",
    "lora_finalize",
    *(f"lora_activation_{dtype}" for dtype in DTYPES),
    *(f"lora_shrink_{dtype}" for dtype in DTYPES[:2]),
)
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}
CASES = [case for case in hostile_routings() if case.topk_ids.size <= 200]


@dataclass
class EmulatedPlace(Place):
    """Arrays and factors on an emulated device; kernels may write none of them."""

    device: Any = None

    def __post_init__(self) -> None:
        self.memory = self

    def put(self, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            return self.device.upload(value)
        return self.device.array(value, shift=self.shift * value.dtype.itemsize)

    def upload(self, array: np.ndarray) -> int:
        return int(self.device.weights(array, self.factor_shift))


@pytest.fixture
def place(emulated: Device) -> EmulatedPlace:
    emulated.schedule = Schedule(7, pause=2_000)
    return EmulatedPlace(on_device=True, device=emulated)


def _near(got: Any, want: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(
        got.get().astype(np.float64), want.astype(np.float64), rtol=TOLERANCE[dtype], atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "shift"), [(104, 0), (104, 1), (101, 0)])
@pytest.mark.parametrize("resident", [1, 1000], ids=["many items a warp", "one item a warp"])
def test_row_ops(
    resident: int,
    width: int,
    shift: int,
    dtype: str,
    place: EmulatedPlace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_row_items, "_RESIDENT_WARPS", resident)
    place.shift = shift
    rng = np.random.default_rng(1)
    case = random_case(1, 17, 3, 6, 3, foreign_share=0.3, start_expert=2)
    order = "k_major" if shift else "token_major"
    routing = reference.route(
        case.topk_ids,
        case.token_to_slot,
        row_order=order,
        **case.sizes,  # type: ignore[arg-type]
    )
    here = place.put(routing)
    x, y = random_values(rng, (17, width), dtype), random_values(rng, (51, width), dtype)
    permuted = ops.permute_rows(place.put(x), here)
    wanted = reference.permute_rows(x, routing)
    assert (bits_of(permuted.get()) == bits_of(wanted)).all()
    weights = rng.random((17, 3)).astype(np.float32)
    bias = random_values(rng, (6, width), dtype)
    for rows, b, residual in itertools.product(("pair", "row"), (None, bias), (None, x)):
        options: dict[str, Any] = {"y_rows": rows}
        want = reference.finalize(y, weights, routing, bias=b, residual=residual, **options)
        args = (place.put(y), place.put(weights), here)
        got = ops.finalize(*args, bias=place.put(b), residual=place.put(residual), **options)
        _near(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_activations(gated: bool, dtype: str, place: EmulatedPlace) -> None:
    rng = np.random.default_rng(2)
    case = random_case(2, 9, 2, 5, 2, foreign_share=0.3)
    routing = reference.route(case.topk_ids, case.token_to_slot, **case.sizes)  # type: ignore[arg-type]
    x, bias = random_values(rng, (18, 136), dtype, 3.0), random_values(rng, (5, 136), dtype)
    layouts = ("gate_first", "up_first", "interleaved") if gated else ("gate_first",)
    kinds = ("silu", "gelu", "relu2", *(("swiglu_oai",) if gated else ()))
    for kind, layout, shift in itertools.product(kinds, layouts, (0, 1)):
        place.shift = shift
        options: dict[str, Any] = {"kind": kind, "gated": gated, "layout": layout}
        for b, rows in ((None, "pair"), (bias, "row")):
            want = reference.activation(x, bias=b, routing=routing, rows=rows, **options)
            here = {"bias": place.put(b), "routing": place.put(routing)}
            _near(ops.activation(place.put(x), rows=rows, **here, **options), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", test_lora_activation.FORMS)
def test_activation_with_a_delta(form: str, dtype: str, place: EmulatedPlace) -> None:
    moe = test_lora_activation.FORMS[form]
    case = random_case(3, 20, 2, 4, 5, base_share=0.3, foreign_share=0.2, start_expert=2)
    ranks = [(16, 3, 0, 8, 0), (16, 5, 24, 0, 0)]
    modules = first_modules(np.random.default_rng(3), moe, ranks, 6, dtype)
    for shift, options in ((0, {"bias": True}), (1, {"tile_rows": 32, "packed": False})):
        place.shift, place.factor_shift = shift, 4 * shift
        test_lora_activation.check("", case, moe, modules, dtype, place=place, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [72, 101])
def test_finalize_with_a_delta(width: int, dtype: str, place: EmulatedPlace) -> None:
    case = random_case(4, 20, 3, 6, 5, base_share=0.3, foreign_share=0.2, start_expert=2)
    module = random_module(np.random.default_rng(4), (16, 3, 0, 64, 24), 72, width, 8, dtype)
    for shift, order in ((0, "token_major"), (1, "k_major")):
        place.shift, place.factor_shift = shift, 4 * shift
        test_lora_finalize.check(
            "", case, module, dtype, place=place, extras=shift == 0, row_order=order
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_deltas_on_hostile_routings(case: RoutingCase, place: EmulatedPlace) -> None:
    ranks = [(8, 3, 16)[slot % 3] for slot in range(case.max_loras)]
    experts = case.num_experts + case.start_expert
    rng = np.random.default_rng(5)
    module = random_module(rng, ranks, 64, 40, experts, "bfloat16")
    test_lora_finalize.check("", case, module, "bfloat16", place=place, extras=True)
    moe = test_lora_activation.BLOCK
    modules = first_modules(rng, moe, ranks, experts, "bfloat16")
    test_lora_activation.check("", case, moe, modules, "bfloat16", place=place)


@pytest.mark.parametrize("top_k", [9, 40])
def test_more_choices_than_warps_or_lanes(top_k: int, place: EmulatedPlace) -> None:
    case = random_case(6, 5, top_k, 48, 3, foreign_share=0.2)
    module = random_module(np.random.default_rng(6), (16, 0, 5), 64, 136, 48, "bfloat16")
    test_lora_finalize.check("", case, module, "bfloat16", place=place, extras=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_test_data(dtype: str, place: EmulatedPlace) -> None:
    want = reference.fill_uniform(random_values(np.random.default_rng(0), (3, 101), dtype), 5, 0.5)
    here = place.device.array(np.zeros_like(want), once=True)
    ops.fill_uniform(here, 5, 0.5)
    assert (bits_of(here.get()) == bits_of(want)).all()
