"""Times what ``notes/kernels.md`` reports beside the peers' harness, on the current GPU.

Device times are per node sequence: many rotating input sets captured in one CUDA graph, the median
of its replays divided by the number of sets. Run from a checkout: ``python tools/measure.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from cupylora import ops
from cupylora.compiler.loader import load_kernel
from cupylora.worklists import choose_tile_rows, segment_capacity

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


def host_rows() -> list[tuple[str, ...]]:
    """What a launch costs the host: the driver's call alone, ours, and a whole op."""
    out = cupy.empty(64, BF16)
    kernel = load_kernel("fill", "bfloat16")
    launch = kernel.prepare(("ptr", "u64", "u64", "f32"))
    stream = cupy.cuda.Stream(non_blocking=True)
    args = (int(out.data.ptr), 64, 1, 1.0)
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
    return [
        ("cuLaunchKernelEx alone, host", f"{bare:.2f} µs", ""),
        ("prebuilt launch, host", f"{run:.2f} µs", f"{run - bare:+.2f} µs"),
        ("launch with packing, host", f"{packed:.2f} µs", f"{packed - bare:+.2f} µs"),
        ("ops.route, host", f"{op:.2f} µs", "checks and one launch"),
        ("ops.build_segments, host", f"{build:.2f} µs", "checks and one launch"),
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


def main() -> None:
    """Measure everything and print one table."""
    table = Table(title=f"cupylora on {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}")
    for column in ("what", "measured", "note"):
        table.add_column(column)
    for row in (*host_rows(), *route_rows(), *gemm_rows()):
        table.add_row(*row)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
