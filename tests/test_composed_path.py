"""From a slot table of row-major A to problems for a general grouped GEMM, on either backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS, DTYPES, make_table, random_adapter
from problem_util import (
    BOUNDS,
    Factors,
    ModuleWeights,
    RoutingCase,
    assert_close,
    bits_of,
    comparable_rows,
    pair_deltas,
    random_case,
    random_values,
)

from cupylora.adapters.factors import Adapter
from cupylora.adapters.slots import SlotTable
from cupylora.backend import ArrayBackend, open_backend
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.ops import (
    build_problems,
    grouped_gemm,
    permute_rows,
    pointer_expand,
    route,
    slot_lookup,
)
from cupylora.shapes import ModelShape, ModuleShape, MoeShape
from cupylora.worklists import PACKED, ROW_MAJOR, STATUS_BAD_LAYOUT

MAX_RANK = 24
LAYER = 1
ROUNDED_H = np.sqrt(2)
"""h is rounded to the dtype between the two GEMMs, y after them: two errors of one size."""

MOE = MoeShape(hidden=136, intermediate=40, experts=7, top_k=3)
MODEL = ModelShape("toy", 2, 136, ((ModuleShape("q_proj", 136, 56),),), MOE)
ADAPTERS = {
    0: random_adapter(MODEL, 5, 1, shared=("up_proj",)),
    1: random_adapter(MODEL, 24, 2, without=("gate_proj",)),
}
"""Slot 2 is empty."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    return open_backend(request.param)


def table_of(backend: ArrayBackend, dtype: str, a_layout: int) -> SlotTable:
    sizes = {"max_loras": 3, "max_rank": MAX_RANK}
    return make_table(backend, MODEL, ADAPTERS, dtype, a_layout=a_layout, **sizes)


def weights(module: str, dtype: str) -> ModuleWeights:
    """What the adapters hold for a module of LAYER, rounded as the table rounds it."""
    shape = MODEL.modules[MODEL.module_index(module)]

    def held(adapter: Adapter | None) -> Factors | None:
        found = adapter and adapter.factors.get((LAYER, module))
        if not found:
            return None
        a, b = (f.astype(resolve_dtype(dtype)) for f in (found.a, found.b))
        return Factors(a, b, found.scale)

    slots = tuple(held(ADAPTERS.get(slot)) for slot in range(3))
    return ModuleWeights(shape.in_features, shape.out_features, slots)


def run_path(
    backend: ArrayBackend,
    case: RoutingCase,
    x: np.ndarray,
    y: Any,
    modules: Sequence[str],
    dtype: str,
) -> None:
    """Deltas of ``modules`` side by side into y [R, sum of widths], by row."""
    table, status = table_of(backend, dtype, ROW_MAJOR), backend.status
    slots = backend.asarray(case.token_to_slot)
    routing = route(backend.asarray(case.topk_ids), slots, status=status, **case.sizes)
    entries = table.entries_of(LAYER, modules)
    tokens = slot_lookup(slots, entries, max_rank=MAX_RANK, status=status)
    rows = pointer_expand(routing, tokens)
    permuted = permute_rows(backend.asarray(x), routing)
    # NaN: what the expand reads, the shrink must have written.
    h = backend.asarray(np.full((routing.num_rows, MAX_RANK), np.nan, resolve_dtype(dtype)))
    column = 0
    for index, name in enumerate(modules):
        shape = MODEL.modules[MODEL.module_index(name)]
        problems = build_problems(
            rows,
            routing,
            index,
            x_ptr=backend.address(permuted),
            h_ptr=backend.address(h),
            y_ptr=backend.address(y) + column * h.itemsize,
            itemsize=h.itemsize,
            in_features=shape.in_features,
            out_features=shape.out_features,
            max_rank=MAX_RANK,
            ldy=y.shape[1],
            status=status,
        )
        grouped_gemm(problems.shrink, dtype=dtype)
        grouped_gemm(problems.expand, dtype=dtype, beta=1)
        column += shape.out_features
    backend.synchronize()
    backend.check_status()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("modules", [("gate_proj", "up_proj"), ("up_proj",)], ids=str)
def test_experts_against_float64(
    backend: ArrayBackend, dtype: str, modules: tuple[str, ...]
) -> None:
    """Mixed ranks, a shared A, a missing module, an empty slot, base rows and foreign experts."""
    case = random_case(11, 50, 3, 5, 3, foreign_share=0.2, start_expert=2)
    rng = np.random.default_rng(12)
    x = random_values(rng, (50, MOE.hidden), dtype)
    by_pair = np.concatenate([pair_deltas(case, x, weights(m, dtype)) for m in modules], axis=1)
    routing = route(case.topk_ids, case.token_to_slot, **case.sizes)
    valid = int(routing.expert_first_token_offset[-1])
    expected = np.zeros_like(by_pair)
    expected[:valid] = by_pair[routing.row_to_pair[:valid]]
    before = comparable_rows(rng, expected, dtype)
    y = backend.asarray(before)
    run_path(backend, case, x, y, modules, dtype)
    after = backend.to_host(y)
    change = after.astype(np.float64) - before.astype(np.float64)
    for start in range(0, expected.shape[1], MOE.intermediate):
        columns = slice(start, start + MOE.intermediate)
        idle = ~expected[:, columns].any(axis=1)
        assert idle.any()
        assert (bits_of(after)[idle, columns] == bits_of(before)[idle, columns]).all()
    assert_close(change, expected, BOUNDS[dtype] * ROUNDED_H)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_against_float64(backend: ArrayBackend, dtype: str) -> None:
    """A dense module is the same path with one expert and k = 1."""
    rng = np.random.default_rng(13)
    slots = rng.integers(-1, 3, 40, dtype=np.int32)
    case = RoutingCase("dense", np.zeros((40, 1), np.int32), slots, 1, 3)
    x = random_values(rng, (40, MODEL.hidden), dtype)
    routing = route(case.topk_ids, slots, **case.sizes)
    expected = pair_deltas(case, x, weights("q_proj", dtype))[routing.row_to_pair]
    before = comparable_rows(rng, expected, dtype)
    y = backend.asarray(before)
    run_path(backend, case, x, y, ("q_proj",), dtype)
    change = backend.to_host(y).astype(np.float64) - before.astype(np.float64)
    assert_close(change, expected, BOUNDS[dtype] * ROUNDED_H)


def test_packed_table_is_refused_with_the_advice() -> None:
    here = open_backend("numpy")
    entries = table_of(here, "bfloat16", PACKED).entries_of(LAYER, ["up_proj"])
    slots = np.array([-1, 1], np.int32)
    with pytest.raises(
        ArgumentError, match=r"module 0, token 1 .*packed.*SlotTable\(\.\.\., a_layout=ROW_MAJOR\)"
    ):
        slot_lookup(slots, entries, max_rank=MAX_RANK)
    readable = slot_lookup(slots, entries, max_rank=MAX_RANK, a_layout=PACKED)
    assert readable.rank.tolist() == [[0, 24]]
    rows = table_of(here, "bfloat16", ROW_MAJOR).entries_of(LAYER, ["up_proj"])
    with pytest.raises(ArgumentError, match=r"row-major.*a_layout=PACKED"):
        slot_lookup(slots, rows, max_rank=MAX_RANK, a_layout=PACKED)


@pytest.mark.gpu
def test_packed_table_sets_the_status_on_the_device() -> None:
    import cupy

    here = open_backend("cuda")
    entries = table_of(here, "bfloat16", PACKED).entries_of(LAYER, ["up_proj"])
    status = cupy.zeros(1, np.int32)
    slots = here.asarray(np.array([-1, 1, 2], np.int32))
    tokens = slot_lookup(slots, entries, max_rank=MAX_RANK, status=status)
    assert int(status[0]) == STATUS_BAD_LAYOUT
    assert not here.to_host(tokens.rank).any()
    assert not here.to_host(tokens.a_ptr).any()
    slot_lookup(slots, entries, max_rank=MAX_RANK, status=here.status)
    here.synchronize()
    with pytest.raises(ArgumentError, match="another layout"):
        here.check_status()
