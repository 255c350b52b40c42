"""Times what ``notes/kernels.md`` reports beside the peers' harness, on the current GPU.

Device times are per node sequence: many rotating input sets captured in one CUDA graph, the median
of its replays divided by the number of sets. Run from a checkout: ``python tools/measure.py``, or
``--only plan`` for one part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import cupy
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from cupylora import ops
from cupylora.compiler.loader import load_kernel
from cupylora.ops._device import shared_limit
from cupylora.ops._plan_choice import PlanSizes, choose_plan
from cupylora.worklists import (
    PACKED,
    SLOT_ENTRY,
    LoraSlice,
    choose_tile_rows,
    segment_capacity,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = 21) -> float:
    """Median microseconds of one call when all are replayed back to back from one graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(replays):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / len(calls))
    return statistics.median(times)


def host_us(call: Callable[[], Any], count: int = 3000) -> float:
    """Median microseconds that the host spends in a call, in batches that the queue can hold."""
    times = []
    for _ in range(count // 100):
        cupy.cuda.get_current_stream().synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            call()
        times.append((time.perf_counter() - begin) * 1e4)
    return statistics.median(times)


def random_batch(tokens: int, top_k: int, experts: int, loras: int, seed: int) -> tuple[Any, Any]:
    """topk_ids with distinct experts and token_to_slot with 10 % base rows, on the device."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    slots = rng.integers(0, loras, tokens).astype(np.int32)
    if tokens > 4:
        slots[rng.random(tokens) < 0.1] = -1
    return cupy.asarray(ids), cupy.asarray(slots)


def route_rows() -> list[tuple[str, ...]]:
    """Route and segments (with tiles) of one MoE layer."""
    return [
        _route_row(tokens, experts, top_k)
        for tokens, experts, top_k in (
            (1, 128, 8),
            (8, 128, 8),
            (32, 128, 8),
            (128, 128, 8),
            (128, 256, 8),
            (512, 128, 8),
            (4096, 128, 8),
            (4096, 1, 1),
        )
    ]


def _route_row(tokens: int, experts: int, top_k: int) -> tuple[str, ...]:
    sizes = {"num_experts": experts, "max_loras": 16}
    total = tokens * top_k
    lists = {
        "max_loras": 16,
        "tile_rows": choose_tile_rows(total, experts),
        "max_segments": segment_capacity(total, experts, 16),
    }
    size = max(
        16, ops.route_workspace_bytes(total, experts, 16), ops.segments_workspace_bytes(total)
    )
    scratch = cupy.empty(size, np.uint8)
    routes, builds = [], []
    for seed in range(40):
        ids, slots = random_batch(tokens, top_k, experts, 16, seed)
        routing = ops.route(ids, slots, **sizes)
        segments = ops.build_segments(routing, slots, **lists)
        routes.append(partial(ops.route, ids, slots, **sizes, out=routing, workspace=scratch))
        builds.append(
            partial(ops.build_segments, routing, slots, **lists, out=segments, workspace=scratch)
        )
    label = f"route T={tokens} k={top_k} E={experts}"
    return label, f"{graph_us(routes):.2f} µs", f"+ segments {graph_us(builds):.2f} µs"


def plan_rows() -> list[tuple[str, ...]]:
    """The fused plan of one MoE layer beside the two ops it stands for, of dense layers, and of
    batches that are known to hold few of many slots."""
    return [
        *(_plan_row(t, e, 8) for e in (128, 256) for t in (1, 8, 32, 128, 512, 4096)),
        *(_plan_row(t, 1, 1) for t in (32, 4096)),
        *(
            _plan_row(t, 128, 8, slots=slots, active=active)
            for t in (32, 128, 512, 1024, 4096)
            for slots, active in ((1, 1), (16, 1), (64, 1), (64, 8), (64, 64))
        ),
    ]


def _plan_row(
    tokens: int, experts: int, top_k: int, slots: int = 16, active: int | None = None
) -> tuple[str, ...]:
    total = tokens * top_k
    room = max(16, ops.plan_workspace_bytes(total, experts, slots))
    sizes = {
        "num_experts": experts,
        "max_loras": slots,
        "tile_rows": choose_tile_rows(total, experts),
        "max_active": active,
        "workspace": cupy.empty(room, np.uint8),
    }
    fused, apart = [], []
    for seed in range(40):
        batch = random_batch(tokens, top_k, experts, active or slots, seed)
        out = ops.plan(*batch, **sizes)
        fused.append(partial(ops.plan, *batch, **sizes, out=out))
        apart.append(partial(ops.plan, *batch, **sizes, out=out, fused=False))
    sizes_of = PlanSizes(tokens, top_k, experts, slots, 0, False, sizes["tile_rows"])
    chosen = choose_plan(sizes_of, shared_limit(), active)
    kernel = getattr(chosen, "kernel", None) or getattr(chosen, "count_kernel", "none")
    label = f"plan T={tokens} k={top_k} E={experts}, {active or 'any'} of {slots} ({kernel})"
    return label, f"{graph_us(fused):.2f} µs", f"two ops {graph_us(apart):.2f} µs"


def host_rows() -> list[tuple[str, ...]]:
    """What a launch costs the host: the driver's call alone, ours, and a whole op."""
    target = cupy.empty(64, BF16)
    kernel = load_kernel("fill", "bfloat16")
    launch = kernel.prepare(("ptr", "u64", "u64", "f32"))
    stream = cupy.cuda.Stream(non_blocking=True)
    args = (int(target.data.ptr), 64, 1, 1.0)
    launch.configure((1, 1, 1), (32, 1, 1), 0)
    for index, value in enumerate(args):
        launch.set(index, value)
    with stream:
        bare = host_us(launch._enqueue)
        run = host_us(lambda: launch.run(stream.ptr))
        packed = host_us(lambda: launch(stream.ptr, (1, 1, 1), (32, 1, 1), 0, args))
        ids, slots = random_batch(8, 8, 128, 4, 0)
        routing = ops.route(ids, slots, num_experts=128, max_loras=4)
        op = host_us(lambda: ops.route(ids, slots, num_experts=128, max_loras=4, out=routing))
        segments = ops.build_segments(routing, slots, max_loras=4)
        build = host_us(lambda: ops.build_segments(routing, slots, max_loras=4, out=segments))
        out = ops.plan(ids, slots, num_experts=128, max_loras=4)
        plan = host_us(lambda: ops.plan(ids, slots, num_experts=128, max_loras=4, out=out))
    return [
        ("cuLaunchKernelEx alone, host", f"{bare:.2f} µs", ""),
        ("prebuilt launch, host", f"{run:.2f} µs", f"{run - bare:+.2f} µs"),
        ("launch with packing, host", f"{packed:.2f} µs", f"{packed - bare:+.2f} µs"),
        ("ops.route, host", f"{op:.2f} µs", "checks and one launch"),
        ("ops.build_segments, host", f"{build:.2f} µs", "checks and one launch"),
        ("ops.plan, host", f"{plan:.2f} µs", "checks and one launch, lists seen before"),
    ]


def gemm_rows() -> list[tuple[str, ...]]:
    """Base expert weights through the grouped GEMM."""
    rows = []
    for model, hidden, width, experts, top_k in (
        ("qwen3-30b-a3b", 2048, 1536, 128, 8),
        ("mixtral-8x7b", 4096, 28672, 8, 2),
    ):
        weights = ops.fill_uniform(cupy.empty((experts, width, hidden), BF16), 1, hidden**-0.5)
        rows += [
            (f"gemm {model} T={tokens}", *_gemm_cells(weights, tokens, top_k))
            for tokens in (1, 32, 128, 1024, 4096)
        ]
    return rows


def _gemm_cells(weights: Any, tokens: int, top_k: int) -> tuple[str, str]:
    experts, width, hidden = weights.shape
    total = tokens * top_k
    ids, slots = random_batch(tokens, top_k, experts, 1, tokens)
    routing = ops.route(ids, slots, num_experts=experts, max_loras=1)
    x, y = (
        ops.fill_uniform(cupy.empty((total, hidden), BF16), 2, 1.0),
        cupy.empty((total, width), BF16),
    )
    problems = ops.expert_problems(
        routing,
        x_ptr=x.data.ptr,
        w_ptr=weights.data.ptr,
        y_ptr=y.data.ptr,
        itemsize=2,
        in_features=hidden,
        out_features=width,
    )
    tiles = cupy.empty(experts + 1, np.int32)
    used = int((cupy.bincount(ids.ravel(), minlength=experts) > 0).sum())
    size = 2 * (used * width * hidden + total * (hidden + width))
    cells = []
    for hint in (16, 256, 4096):
        call = partial(ops.grouped_gemm, problems, dtype=BF16, max_m=hint, tile_start=tiles)
        us = graph_us([call] * 4)
        rate = 2 * total * width * hidden / us / 1e6
        cells.append(f"max_m {hint}: {us:.0f} µs, {size / us / 1e3:.0f} GB/s, {rate:.0f} TFLOP/s")
    return cells[0], "; ".join(cells[1:])


CHAIN_EXPERTS, CHAIN_TOP_K, CHAIN_LORAS, CHAIN_RANK = 128, 8, 16, 16
CHAIN_HIDDEN, CHAIN_WIDTH = 2048, 768
CHAIN_BYTES = 200 << 20
"""What the rotating sets of inputs have at least: three times a large L2."""


def chain_rows() -> list[tuple[str, ...]]:
    """Qwen3-30B-A3B at rank 16, 16 adapters: delta and row op one after the other, and fused."""
    first = _chain_entries(2, CHAIN_HIDDEN, CHAIN_WIDTH)
    down = _chain_entries(1, CHAIN_WIDTH, CHAIN_HIDDEN)
    rows = []
    for tokens in (1, 32, 128, 4096):
        calls = _chain_calls(tokens, first[0], down[0])
        for name, apart, fused in (
            ("gate+up", ("first delta", "activation"), "lora_activation"),
            ("down", ("down delta", "finalize"), "lora_finalize"),
        ):
            both = [call for pair in zip(*(calls[n] for n in apart), strict=True) for call in pair]
            steps = ", ".join(f"{n} {graph_us(calls[n]):.2f}" for n in apart)
            rows.append(
                (
                    f"chain {name} T={tokens}",
                    f"{fused} {graph_us(calls[fused]):.2f} µs",
                    f"two steps {2 * graph_us(both):.2f} µs (each alone: {steps})",
                )
            )
    return rows


def _chain_entries(modules: int, in_features: int, out_features: int) -> tuple[Any, list[Any]]:
    """Slot entries of ``modules`` alike, and the factors that they point at."""
    shape = (modules, CHAIN_LORAS, CHAIN_EXPERTS, CHAIN_RANK)
    factors = [
        ops.fill_uniform(cupy.empty((*shape, width), BF16), seed, CHAIN_RANK**-0.5)
        for seed, width in ((1, in_features), (2, out_features))
    ]
    table = np.zeros(shape[:2], SLOT_ENTRY)
    for field, factor in zip("ab", factors, strict=True):
        expert = CHAIN_RANK * factor.shape[-1] * BF16.itemsize
        slots = np.arange(modules * CHAIN_LORAS).reshape(shape[:2]) * CHAIN_EXPERTS
        table[f"{field}_ptr"] = factor.data.ptr + slots * expert
        table[f"{field}_expert_stride"] = expert
    table["rank"], table["scale"], table["a_layout"] = CHAIN_RANK, 0.5, PACKED
    return cupy.asarray(table.view(np.uint8).reshape(*shape[:2], -1)), factors


def _chain_calls(tokens: int, first: Any, down: Any) -> dict[str, list[Callable[[], Any]]]:
    """Calls over rotating sets: each step apart, and the fused ops."""
    total = tokens * CHAIN_TOP_K
    scratch = cupy.empty(
        max(
            ops.lora_workspace_bytes(total, modules, width, CHAIN_RANK, BF16)
            for modules, width in ((2, CHAIN_HIDDEN), (1, CHAIN_WIDTH))
        ),
        np.uint8,
    )
    first_at = {"in_features": CHAIN_HIDDEN, "max_rank": CHAIN_RANK, "workspace": scratch}
    down_at = {**first_at, "in_features": CHAIN_WIDTH}
    silu = {"kind": "silu", "gated": True}
    halves = [LoraSlice(CHAIN_WIDTH, 0), LoraSlice(CHAIN_WIDTH, CHAIN_WIDTH)]
    widths = (2 * CHAIN_WIDTH, CHAIN_WIDTH, CHAIN_HIDDEN)
    factors = 3 * CHAIN_RANK * (CHAIN_HIDDEN + CHAIN_WIDTH)
    set_bytes = total * (sum(widths) + factors) * BF16.itemsize
    calls: dict[str, list[Callable[[], Any]]] = {}
    for seed in range(max(4, min(100, CHAIN_BYTES // set_bytes))):
        ids, slots = random_batch(tokens, CHAIN_TOP_K, CHAIN_EXPERTS, CHAIN_LORAS, seed)
        routing, segments = ops.plan(
            ids,
            slots,
            num_experts=CHAIN_EXPERTS,
            max_loras=CHAIN_LORAS,
            tile_rows=choose_tile_rows(total, CHAIN_EXPERTS),
        )
        x, out = (
            ops.fill_uniform(cupy.empty((tokens, CHAIN_HIDDEN), BF16), s, 1.0) for s in (3, 4)
        )
        y, hidden, wide = (
            ops.fill_uniform(cupy.empty((total, width), BF16), 5 + width, 1.0) for width in widths
        )
        weights = cupy.full((tokens, CHAIN_TOP_K), 1 / CHAIN_TOP_K, np.float32)
        lists = (segments, routing)
        made = {
            "first delta": partial(ops.lora_delta, x, y, *lists, first, halves, **first_at),
            "activation": partial(ops.activation, y, **silu, routing=routing, out=hidden),
            "lora_activation": partial(
                ops.lora_activation, x, y, *lists, first, **first_at, **silu, out=hidden
            ),
            "down delta": partial(
                ops.lora_delta,
                hidden,
                wide,
                *lists,
                down,
                [LoraSlice(CHAIN_HIDDEN)],
                **down_at,
                x_rows="pair",
            ),
            "finalize": partial(ops.finalize, wide, weights, routing, out=out),
            "lora_finalize": partial(
                ops.lora_finalize, hidden, wide, weights, *lists, down, **down_at, out=out
            ),
        }
        for name, call in made.items():
            calls.setdefault(name, []).append(call)
    return calls


def _dense_entries(loras: int, rank: int, width: int, seed: int) -> tuple[Any, list[Any]]:
    """Slot entries of one float16 module [width, width], and the factors that they point at."""
    factors = [
        ops.fill_uniform(cupy.empty((loras, rank, width), np.float16), seed + i, rank**-0.5)
        for i in range(2)
    ]
    table = np.zeros((1, loras), SLOT_ENTRY)
    for field, factor in zip("ab", factors, strict=True):
        table[f"{field}_ptr"] = factor.data.ptr + np.arange(loras) * (rank * width * 2)
    table["rank"], table["scale"], table["a_layout"] = rank, 0.5, PACKED
    return cupy.asarray(table.view(np.uint8).reshape(1, loras, -1)), factors


BEHIND_WIDTH, BEHIND_RANK, BEHIND_LORAS, BEHIND_SETS = 4096, 16, 16, 8


def behind_rows() -> list[tuple[str, ...]]:
    """What a dense delta (4096 by 4096, rank 16) adds behind a library GEMM that makes its y."""
    rows = []
    for tokens, active in ((1, 1), (8, 4), (32, 16)):
        gemms, both, _ = behind_calls(tokens, active)
        alone = torch_graph_us(gemms)
        together = 2 * torch_graph_us(both)
        rows.append(
            (
                f"behind a GEMM, T={tokens}, {active} adapters",
                f"{together - alone:.2f} µs",
                f"GEMM alone {alone:.2f} µs, with the delta {together:.2f} µs",
            )
        )
    return rows


def behind_calls(
    tokens: int, active: int
) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]], list[Any]]:
    """GEMMs over rotating sets, the same each with a dense delta on its output behind it, and the
    outputs; the GEMM is torch's, whose library calls can be captured."""
    import torch
    from peers_adaptor import as_cupy, on_torch_stream

    width = BEHIND_WIDTH
    slots = cupy.arange(tokens, dtype=np.int32) % active
    routing, segments = ops.plan(
        cupy.zeros((tokens, 1), np.int32),
        slots,
        num_experts=1,
        max_loras=BEHIND_LORAS,
        tile_rows=choose_tile_rows(tokens, 1),
    )
    cupy.cuda.get_current_stream().synchronize()  # torch's stream does not wait for it
    gemms: list[Callable[[], Any]] = []
    both: list[Callable[[], Any]] = []
    outputs: list[Any] = []
    for number in range(BEHIND_SETS):
        weight = torch.randn(width, width, device="cuda", dtype=torch.float16) / width**0.5
        table, factors = _dense_entries(BEHIND_LORAS, BEHIND_RANK, width, 100 + 2 * number)
        x = torch.randn(tokens, width, device="cuda", dtype=torch.float16)
        y = torch.empty(tokens, width, device="cuda", dtype=torch.float16)
        gemm = partial(torch.matmul, x, weight.t(), out=y)
        delta = partial(
            ops.lora_delta,
            as_cupy(x, np.float16),
            as_cupy(y, np.float16),
            segments,
            routing,
            table,
            [LoraSlice(width)],
            in_features=width,
            max_rank=BEHIND_RANK,
            max_active=active,
            plan_settled=True,
        )
        call = on_torch_stream(delta)
        call.factors = factors  # type: ignore[attr-defined] # the table only points at them
        gemms.append(gemm)
        both += [gemm, call]
        outputs.append(y)
    cupy.cuda.get_current_stream().synchronize()
    return gemms, both, outputs


def torch_graph_us(calls: Sequence[Callable[[], Any]], replays: int = 21) -> float:
    """``graph_us`` for calls on torch's current stream."""
    import torch

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    for capturing in (False, True):
        with torch.cuda.graph(graph, stream=stream) if capturing else torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(replays + 2):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def rank_rows() -> list[tuple[str, ...]]:
    """Adapters of rank 8 on gate and up (Qwen3-30B-A3B), by the largest rank that was allowed."""
    rank = 8
    shape = (2, CHAIN_LORAS, CHAIN_EXPERTS)
    factors = [
        ops.fill_uniform(cupy.empty((*shape, rank, width), BF16), seed, rank**-0.5)
        for seed, width in ((1, CHAIN_HIDDEN), (2, CHAIN_WIDTH))
    ]
    table = np.zeros(shape[:2], SLOT_ENTRY)
    for field, factor in zip("ab", factors, strict=True):
        expert = rank * factor.shape[-1] * BF16.itemsize
        slots = np.arange(2 * CHAIN_LORAS).reshape(shape[:2]) * CHAIN_EXPERTS
        table[f"{field}_ptr"] = factor.data.ptr + slots * expert
        table[f"{field}_expert_stride"] = expert
    table["rank"], table["scale"], table["a_layout"] = rank, 0.5, PACKED
    entries = cupy.asarray(table.view(np.uint8).reshape(*shape[:2], -1))
    halves = [LoraSlice(CHAIN_WIDTH, 0), LoraSlice(CHAIN_WIDTH, CHAIN_WIDTH)]
    rows = []
    for tokens in (1, 32, 128):
        total = tokens * CHAIN_TOP_K
        times = {}
        for max_rank in (8, 16, 64):
            calls = []
            for seed in range(12):
                ids, slots_of = random_batch(tokens, CHAIN_TOP_K, CHAIN_EXPERTS, 16, seed)
                routing, segments = ops.plan(
                    ids, slots_of, num_experts=CHAIN_EXPERTS, max_loras=CHAIN_LORAS, tile_rows=8
                )
                x = ops.fill_uniform(cupy.empty((tokens, CHAIN_HIDDEN), BF16), 3, 1.0)
                y = ops.fill_uniform(cupy.empty((total, 2 * CHAIN_WIDTH), BF16), 4, 1.0)
                calls.append(
                    partial(
                        ops.lora_delta,
                        x,
                        y,
                        segments,
                        routing,
                        entries,
                        halves,
                        in_features=CHAIN_HIDDEN,
                        max_rank=max_rank,
                        plan_settled=True,
                    )
                )
            times[max_rank] = graph_us(calls)
        rows.append(
            (
                f"rank 8, T={tokens}",
                f"max_rank 8 {times[8]:.2f} µs",
                f"max_rank 16 {times[16]:.2f} µs, 64 {times[64]:.2f} µs",
            )
        )
    return rows


PARTS = {
    "host": host_rows,
    "route": route_rows,
    "plan": plan_rows,
    "gemm": gemm_rows,
    "chain": chain_rows,
    "behind": behind_rows,
    "rank": rank_rows,
}


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="This part alone.")
def main(only: Sequence[str]) -> None:
    """Measure everything, or some parts, and print one table."""
    table = Table(title=f"cupylora on {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}")
    for column in ("what", "measured", "note"):
        table.add_column(column)
    for part in only or PARTS:
        for row in PARTS[part]():
            table.add_row(*row)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
