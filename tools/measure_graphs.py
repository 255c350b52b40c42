"""Times what serving through graphs costs: the host per step, capture, and what cases save.

    python tools/measure_graphs.py                  # on the current GPU
    python tools/measure_graphs.py --backend numpy  # the host's part without a device

Host: median and 90th percentile of ``LoraRuntime.step`` over 10,000 steps whose graph is empty or
one layer. Capture: a model's LoRA part alone, buckets times cases. Cases: device time of a step of
one adapter in graphs captured for 1 adapter and for most, in runtimes of 1, 16 and 64 slots.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from cupylora.adapters.factors import synthetic_adapter
from cupylora.adapters.slots import Arena, SlotTable, adapter_bytes
from cupylora.backend import ArrayBackend, open_backend
from cupylora.dtypes import resolve_dtype
from cupylora.graphs.buckets import DispatchOptions
from cupylora.graphs.manager import GraphOptions, Step
from cupylora.layers.stack import LayerStack
from cupylora.layers.stack_buffers import add_stack_buffers, stack_inputs
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits, ModelShape, load_model

BF16 = resolve_dtype("bfloat16")
STEPS = 10_000
CAPTURE_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)

Row = tuple[str, ...]


def runtime_of(
    backend: ArrayBackend,
    model: ModelShape,
    *,
    max_loras: int,
    loaded: int,
    buckets: Sequence[int],
    specialize: bool,
    rank: int = 16,
) -> LoraRuntime:
    """A runtime with ``loaded`` random adapters and the model's LoRA part as its step."""
    adapters = [
        synthetic_adapter(model, rank, seed, BF16, name=f"a{seed}") for seed in range(loaded)
    ]
    room = sum(adapter_bytes(adapter, 2) for adapter in adapters)
    table = SlotTable(
        model,
        LoraLimits(max_loras, rank),
        BF16,
        xp=backend.xp,
        arena=Arena(max(256, room), backend.xp),
    )
    for slot, adapter in enumerate(adapters):
        table.load(slot, adapter)
    dispatch = DispatchOptions(tuple(buckets), specialize_active_loras=specialize)
    runtime = LoraRuntime.of_table(
        table, backend, max_tokens=buckets[-1], graphs=GraphOptions(dispatch=dispatch)
    )
    stack = LayerStack(table, backend, max_tokens=buckets[-1], lora_only=True)
    runtime.set_step(lora_step(runtime, stack))
    return runtime


def lora_step(runtime: LoraRuntime, stack: LayerStack) -> Callable[[Step], object]:
    """The stack's step over buffers that it adds to ``runtime``."""
    add_stack_buffers(runtime.add_buffer, stack.model, stack.dtype)
    return lambda step: stack.step(stack_inputs(step, stack.model), active=step.active)


def fill_routes(runtime: LoraRuntime, model: ModelShape, tokens: int) -> None:
    """Distinct experts in every layer for the first ``tokens`` tokens."""
    if model.moe is None:
        return
    rng = np.random.default_rng(tokens)
    shape = (model.layers, tokens, model.moe.experts)
    ids = np.argsort(rng.random(shape), axis=2)[:, :, : model.moe.top_k].astype(np.int32)
    with runtime.on_stream():
        views = runtime.buffers.views(tokens)
        for layer in range(model.layers):
            rows = runtime.backend.asarray(np.ascontiguousarray(ids[layer]))
            runtime.backend.copy(views["topk_ids"][layer], rows)


# --- host ----------------------------------------------------------------------------------------


def host_rows(backend: ArrayBackend) -> list[Row]:
    """Microseconds of ``step`` and ``step_requests``, by tokens; the graph is empty."""
    runtime = LoraRuntime(
        load_model("tiny-moe"),
        LoraLimits(16, 16),
        dtype=BF16,
        max_tokens=512,
        arena_bytes=1 << 24,
        backend=backend,
        graphs=GraphOptions(dispatch=DispatchOptions(specialize_active_loras=True)),
    )
    runtime.add_buffer("ids", (8,), np.int32, layers=48, pad=-1)
    runtime.set_step(nothing)
    for seed in range(16):
        adapter = synthetic_adapter(runtime.table.model, 4, seed, BF16, name=f"a{seed}")
        runtime.load(f"a{seed}", adapter)
    runtime.capture()
    rng, rows = np.random.default_rng(0), []
    for tokens in (1, 8, 31, 128, 500, 512):
        slots = rng.integers(-1, 16, tokens).astype(np.int32)
        call = partial(runtime.step, slots)
        rows.append((f"step, {tokens} tokens", *timed(call, runtime)))
    batches = itertools.cycle([rng.integers(-1, 16, 512).astype(np.int32) for _ in range(7)])
    others = timed(lambda: runtime.step(next(batches)), runtime)
    rows.append(("step, 512 tokens, another batch each time", *others))
    slots = rng.integers(-1, 16, 512).astype(np.int32)
    lengths = np.ones(512, np.int32)
    call = partial(runtime.step_requests, slots, lengths)
    rows.append(("step_requests, 512 requests", *timed(call, runtime)))
    names = [None if slot < 0 else f"a{slot}" for slot in slots]
    rows.append(("slots_of, 512 names", *timed(partial(runtime.slots_of, names), runtime)))
    return rows


def nothing(_: Step) -> None:
    """The emptiest step."""


def timed(call: Callable[[], object], runtime: LoraRuntime) -> tuple[str, str]:
    """Median and 90th percentile; the queue is emptied every 32 calls, outside the times."""
    times = []
    for number in range(STEPS):
        if number % 32 == 0:
            runtime.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return f"{statistics.median(times):.1f} µs", f"{np.quantile(times, 0.9):.1f} µs (90 %)"


# --- capture -------------------------------------------------------------------------------------


def capture_rows(backend: ArrayBackend) -> list[Row]:
    """Seconds and bytes of all graphs of Qwen3-30B-A3B's 48 layers, the LoRA part alone."""
    rows = []
    for specialize in (False, True):
        runtime = runtime_of(
            backend,
            load_model("qwen3-30b-a3b"),
            max_loras=16,
            loaded=0,
            buckets=CAPTURE_BUCKETS,
            specialize=specialize,
        )
        begin = time.perf_counter()
        graphs = runtime.capture()
        seconds = time.perf_counter() - begin
        recorded = sum(graph.seconds for graph in graphs)
        nodes, size = sum(g.nodes for g in graphs), sum(g.nbytes for g in graphs)
        rows.append(
            (
                f"{len(graphs)} graphs, {nodes} nodes",
                f"{seconds:.2f} s, {recorded:.2f} s of it recording",
                f"{size / 1e6:.0f} MB",
            )
        )
        runtime.release_graphs()
    return rows


# --- cases ---------------------------------------------------------------------------------------


def case_rows(backend: ArrayBackend) -> list[Row]:
    """A step of one adapter: graphs for 1 and for most adapters, in runtimes of three sizes."""
    model, rows = load_model("qwen3-30b-a3b").with_layers(8), []
    for tokens in (1, 8, 32, 128):
        for max_loras in (1, 16, 64):
            times = []
            for specialize in (True, False):
                runtime = runtime_of(
                    backend,
                    model,
                    max_loras=max_loras,
                    loaded=1,
                    buckets=(tokens,),
                    specialize=specialize,
                )
                runtime.capture()
                fill_routes(runtime, model, tokens)
                times.append(device_us(runtime, np.zeros(tokens, np.int32)))
                runtime.release_graphs()
            rows.append(
                (
                    f"{tokens} tokens, {max_loras} slots",
                    f"specialised {times[0]:.1f} µs",
                    f"not {times[1]:.1f} µs ({times[0] / times[1] - 1:+.1%})",
                )
            )
    return rows


def device_us(runtime: LoraRuntime, slots: Any, replays: int = 60) -> float:
    """Median device microseconds of a step."""
    times = []
    for _ in range(replays):
        with runtime.on_stream():
            begin = runtime.backend.mark()
            runtime.step(slots)
            end = runtime.backend.mark()
            runtime.backend.synchronize()
            times.append(runtime.backend.seconds_between(begin, end) * 1e6)
    return statistics.median(times)


PARTS = {"host": host_rows, "capture": capture_rows, "cases": case_rows}


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="This part alone.")
@click.option("--backend", type=click.Choice(["auto", "cuda", "numpy"]), default="auto")
def main(only: Sequence[str], backend: str) -> None:
    """Print one table a part; without a device only the host's."""
    here, console = open_backend(backend), Console()
    for part in only or (PARTS if here.on_device else ["host"]):
        table = Table(title=f"{part} ({here.name})", show_header=False)
        for row in PARTS[part](here):
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
