"""The 16-bit LoRA deltas on the emulated device: no fault in any schedule, and the pair's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.device import Device, Schedule
from emulator.lora_cases import HOSTILE, KERNELS, check, draw
from problem_util import (
    BOUNDS,
    CASE_11_RANKS,
    ModuleWeights,
    RoutingCase,
    assert_close,
    bits_of,
    build_entries,
    hostile_routings,
    make_case,
    pair_deltas,
    random_case,
    random_module,
    random_values,
)

from cupylora import ops, reference
from cupylora.worklists import LoraSlice

pytestmark = pytest.mark.emulated

DTYPES = ("bfloat16", "float16")
PROGRAMS = (
    "lora_f32",
    *(
        f"lora_{kind}_{dtype}"
        for kind in (
            *("cluster", "ring", "shrink", "expand"),
            *("shrink_stream", "shrink_wide", "shrink_group"),
            *("expand_direct", "expand_panel", "expand_stream"),
        )
        for dtype in DTYPES
    ),
)
WIDE_CASES, SMALL_CASES, CROWDED_CASES, HOSTILE_CASES = 4, 14, 5, 2
LARGE_SEEDS = (274, 300, 305, 311, 315, 322, 326, 328)
"""Batches of many ranks, A packed in the first."""


@pytest.mark.parametrize("kernel", KERNELS)
def test_drawn_batches(kernel: str, emulated: Device) -> None:
    for seed in range(WIDE_CASES):
        check(emulated, draw(seed, kernel=kernel))
    for seed in range(100, 100 + SMALL_CASES):
        check(emulated, draw(seed, kernel=kernel, small=True))


@pytest.mark.parametrize("tile_rows", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_batches_of_large_tiles(dtype: str, tile_rows: int, emulated: Device) -> None:
    for seed in LARGE_SEEDS:
        check(emulated, draw(seed, kernel="stream", dtype=dtype, tile_rows=tile_rows, small=True))
    for form in ("wide", "group"):
        assert f"lora_shrink_{form}_{dtype}/8_{tile_rows}" in emulated.launched


@pytest.mark.parametrize("kernel", ["cluster", "ring"])
def test_drawn_batches_of_many_groups(kernel: str, emulated: Device) -> None:
    for seed in range(CROWDED_CASES):
        check(emulated, draw(seed, kernel=kernel, small=True, crowded=True))


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_drawn_batches_with_hostile_lists_and_values(
    kernel: str, hostile: str, emulated: Device
) -> None:
    for seed in range(1000, 1000 + HOSTILE_CASES):
        check(emulated, draw(seed, kernel=kernel, hostile=hostile, small=True))


def _delta(
    device: Device,
    case: RoutingCase,
    x: np.ndarray,
    modules: list[ModuleWeights],
    *,
    tile_rows: int = 8,
    plan_settled: bool = False,
    **options: Any,
) -> np.ndarray:
    """What is added to zeros, by pair."""
    args = (case.topk_ids, case.token_to_slot)
    routing = reference.route(*args, **case.sizes)  # type: ignore[arg-type]
    segments = reference.build_segments(
        routing, case.token_to_slot, max_loras=case.max_loras, tile_rows=tile_rows
    )
    entries = build_entries(modules, device.weights, packed=True)
    slices, at = [], 0
    for module in modules:
        slices.append(LoraSlice(module.out_features, at))
        at += module.out_features
    y = device.array(np.zeros((routing.num_rows, at), x.dtype), once=True)
    ops.lora_delta(
        device.array(x),
        y,
        device.upload(segments, late=not plan_settled),
        device.upload(routing, late=not plan_settled),
        device.array(entries, late=False),
        slices,
        in_features=x.shape[1],
        plan_settled=plan_settled,
        **options,
    )
    return y.get()


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("tile_rows", [8, 64])
def test_all_ranks_together(dtype: str, tile_rows: int, emulated: Device) -> None:
    rng = np.random.default_rng(1)
    case = random_case(1, 60, 2, 4, len(CASE_11_RANKS))
    module = random_module(rng, CASE_11_RANKS, 320, 136, 4, dtype)
    x = random_values(rng, (60, 320), dtype)
    got = _delta(emulated, case, x, [module], tile_rows=tile_rows, max_rank=512)
    assert_close(got, pair_deltas(case, x, module), BOUNDS[dtype])


@pytest.mark.parametrize("case", hostile_routings(), ids=lambda case: case.name)
def test_hostile_routings(case: RoutingCase, emulated: Device) -> None:
    rng = np.random.default_rng(2)
    ranks = [(8, 3, 16)[slot % 3] for slot in range(case.max_loras)]
    experts = case.num_experts + case.start_expert
    module = random_module(rng, ranks, 64, 40, experts, "bfloat16")
    x = random_values(rng, (len(case.topk_ids), 64), "bfloat16")
    options: dict[str, Any] = {"max_rank": 16}
    want = _delta(emulated, case, x, [module], kernel="pair", **options)
    assert_close(want, pair_deltas(case, x, module), BOUNDS["bfloat16"])
    for kernel in ("cluster", "ring"):
        got = _delta(emulated, case, x, [module], kernel=kernel, **options)
        assert (bits_of(got) == bits_of(want)).all()


@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("kernel", ["cluster", "ring"])
def test_shapes_that_sizes_ask_for(kernel: str, max_rank: int, emulated: Device) -> None:
    """More items than clusters, so that buffers are used again, in whole clusters of many CTAs."""
    rng = np.random.default_rng(3)
    emulated.blocks = 16
    case = random_case(3, 6, 2, 6, 3, base_share=0.1)
    modules = [random_module(rng, (max_rank, 5, 8), 1544, 264, 6, "float16") for _ in range(2)]
    x = random_values(rng, (6, 1544), "float16")
    want = _delta(emulated, case, x, modules, kernel="pair", max_rank=max_rank)
    for seed in range(3):
        emulated.schedule = Schedule(seed, pause=20_000)
        got = _delta(emulated, case, x, modules, kernel=kernel, max_rank=max_rank)
        assert (bits_of(got) == bits_of(want)).all()


@pytest.mark.parametrize("kernel", ["pair", "cluster", "ring"])
def test_a_batch_without_adapters_adds_nothing(kernel: str, emulated: Device) -> None:
    case = make_case("base", [[0], [1]], [-1, -1], 2, 1)
    module = random_module(np.random.default_rng(4), (8,), 64, 40, 2, "bfloat16")
    x = random_values(np.random.default_rng(4), (2, 64), "bfloat16")
    for settled in (False, True):
        options: dict[str, Any] = {"kernel": kernel, "plan_settled": settled, "max_rank": 16}
        got = _delta(emulated, case, x, [module], **options)
        assert not got.view(np.uint16).any()
