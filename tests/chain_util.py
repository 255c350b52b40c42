"""The fused ops of the MoE chain on either backend: operands in place, and float64 answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpu_util import DeviceMemory, shifted_copy, to_device, to_host
from problem_util import (
    HostMemory,
    ModuleWeights,
    RoutingCase,
    build_entries,
    pair_deltas,
    random_module,
    random_values,
)

from cupylora import ops, reference
from cupylora.dtypes import resolve_dtype
from cupylora.reference.oracle import activation_oracle
from cupylora.shapes import MoeShape
from cupylora.worklists import Routing


@dataclass
class Place:
    """Where a test's arrays live. ``shift``: elements that arrays start beyond an aligned address,
    ``factor_shift``: bytes that factors do."""

    on_device: bool
    shift: int = 0
    factor_shift: int = 0
    memory: Any = field(init=False)

    def __post_init__(self) -> None:
        self.memory = (DeviceMemory if self.on_device else HostMemory)(self.factor_shift)

    def put(self, value: Any) -> Any:
        """A copy of an array (shifted), or of a work list's arrays, here; None stays."""
        if not isinstance(value, np.ndarray):
            return to_device(value) if self.on_device else value
        if self.on_device:
            return shifted_copy(value, self.shift)
        flat = np.zeros(value.size + self.shift, value.dtype)
        flat[self.shift :] = value.reshape(-1)
        return flat[self.shift :].reshape(value.shape)

    def get(self, value: Any) -> np.ndarray:
        return np.asarray(to_host(value))


def place_of(backend: str, **options: Any) -> Place:
    return Place(backend == "cuda", **options)


@dataclass
class Lists:
    """Work lists and slot entries of a case, in a place."""

    routing: Any
    segments: Any
    entries: Any


def make_lists(
    case: RoutingCase,
    modules: list[ModuleWeights],
    place: Place,
    *,
    routing: Routing | None = None,
    row_order: str = "token_major",
    tile_rows: int = 8,
    packed: bool = True,
) -> Lists:
    """Lists over ``routing`` (by default the case's own order)."""
    if routing is None:
        args = (case.topk_ids, case.token_to_slot)
        routing = reference.route(*args, row_order=row_order, **case.sizes)  # type: ignore[arg-type]
    lists = place.put(routing)
    slots = to_device(case.token_to_slot) if place.on_device else case.token_to_slot
    segments = ops.build_segments(lists, slots, max_loras=case.max_loras, tile_rows=tile_rows)
    entries = build_entries(modules, place.memory.upload, packed=packed)
    return Lists(lists, segments, to_device(entries) if place.on_device else entries)


def first_modules(
    rng: np.random.Generator, moe: MoeShape, ranks: Any, experts: int, dtype: str, **options: Any
) -> list[ModuleWeights]:
    """Gate (if there is one) and up; ``ranks`` one list for both, or a list for each."""
    count = 2 if moe.gated else 1
    each = ranks if isinstance(ranks[0], list | tuple) else [ranks] * count
    return [
        random_module(rng, own, moe.hidden, moe.intermediate, experts, dtype, **options)
        for own in each[:count]
    ]


def gate_up_columns(moe: MoeShape) -> tuple[np.ndarray, ...]:
    """Columns of gate and up (of up alone) in a row of ``first_width``."""
    each = np.arange(moe.intermediate)
    if not moe.gated:
        return (each,)
    if moe.gate_up_layout == "interleaved":
        return 2 * each, 2 * each + 1
    halves = (each, each + moe.intermediate)
    return halves if moe.gate_up_layout == "gate_first" else halves[::-1]


def pair_experts(case: RoutingCase, row_order: str = "token_major") -> np.ndarray:
    """Local expert of each pair, -1 for one that is not ours."""
    found = np.full(case.topk_ids.size, -1)
    for expert, _, pair, _ in case.local_pairs(row_order):
        found[pair] = expert
    return found


def activation_answer(
    case: RoutingCase,
    x: np.ndarray,
    y: np.ndarray,
    modules: list[ModuleWeights],
    moe: MoeShape,
    *,
    bias: np.ndarray | None = None,
    row_order: str = "token_major",
) -> np.ndarray:
    """Float64 [R, I] by pair, zeros for pairs that are not ours; y by pair."""
    total = y.astype(np.float64)
    columns = gate_up_columns(moe)
    for module, own in zip(modules, columns, strict=True):
        total[:, own] += pair_deltas(case, x, module, row_order)
    experts = pair_experts(case, row_order)
    if bias is not None:
        total += bias.astype(np.float64)[experts]
    parts = [total[:, own] for own in columns]
    result = activation_oracle(parts[0] if moe.gated else None, parts[-1], moe)
    result[experts < 0] = 0
    return result


def finalize_answer(
    case: RoutingCase,
    x: np.ndarray,
    y: np.ndarray,
    weights: np.ndarray,
    module: ModuleWeights,
    *,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    row_order: str = "token_major",
) -> np.ndarray:
    """Float64 [T, H]; x and y by pair."""
    tokens, top_k = case.topk_ids.shape
    total = np.zeros((tokens, y.shape[1])) if residual is None else residual.astype(np.float64)
    for expert, slot, pair, token in case.local_pairs(row_order):
        value = y[pair].astype(np.float64)
        factors = module.slots[slot] if slot >= 0 else None
        if factors is not None:
            a, b, scale = factors.expert(expert + case.start_expert)
            h = a.astype(np.float64) @ x[pair].astype(np.float64)
            value = value + scale * (b.astype(np.float64) @ h)
        if bias is not None:
            value = value + bias[expert].astype(np.float64)
        choice = pair // max(1, tokens) if row_order == "k_major" else pair % top_k
        total[token] += float(weights[token, choice]) * value
    return total


def to_rows(values: np.ndarray, routing: Routing, fill: float = np.nan) -> np.ndarray:
    """Values by pair laid out by sorted row; ghost rows hold ``fill``, which nobody may read."""
    host = to_host(routing)
    valid = int(host.expert_first_token_offset[-1])
    out = np.full_like(values, fill)
    out[:valid] = values[host.row_to_pair[:valid]]
    return out


def unit_in_last_place(values: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance between neighbouring numbers of ``dtype`` around each value."""
    half = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}[dtype]
    least = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}[dtype]
    size = np.maximum(np.abs(values), least)
    return half * 2.0 ** np.ceil(np.log2(size))


def random_inputs(
    rng: np.random.Generator, case: RoutingCase, moe: MoeShape, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """x [T, H] and base outputs y [R, first_width]."""
    x = random_values(rng, (len(case.topk_ids), moe.hidden), dtype)
    return x, random_values(rng, (case.topk_ids.size, moe.first_width), dtype)


def no_values(shape: tuple[int, int], dtype: str) -> np.ndarray:
    return np.full(shape, math.nan, resolve_dtype(dtype))
