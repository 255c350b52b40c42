"""Times loads: from files, from the host cache, and what they cost steps that run meanwhile.

    python tools/measure_loading.py                                    # on the current GPU
    python tools/measure_loading.py --backend numpy --model tiny-moe   # the same way without one

Writes three adapters of rank 16 of every module of the model, to a temporary folder. --form
stacked: gate and up share an A, as peft's target_parameters has them (1.29 GB for Qwen3-30B-A3B);
per-expert: a Linear each, gate and up with an A of their own (1.69 GB, in 37,248 tensors). All are
read from the page cache.

Pinned copy: the link's own rate, with copies of 64 MiB, either way. Files: seconds until the
adapter serves, by what is done, then until its copy is in the host cache too; for the first load of
a process, for later ones, and where the cache has to let another one go. Cache: bytes per second
from the host cache to a slot, and what that is of the link's rate. Resident: microseconds of
``ensure`` where all is loaded. Steps: median milliseconds of a decode step of 32 tokens, alone and
while another thread loads from files, and from the host cache, all the time.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from measure_graphs import BF16, device_us, fill_routes, lora_step
from rich.console import Console
from rich.table import Table

from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import adapter_bytes
from cupylora.backend import ArrayBackend, open_backend
from cupylora.dtypes import DTYPES, dtype_name
from cupylora.graphs.buckets import DispatchOptions
from cupylora.graphs.manager import GraphOptions
from cupylora.layers.stack import LayerStack
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits, ModelShape, MoeShape, load_model
from cupylora.text import byte_size

TOKENS, LOADS = 32, 5
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def tensors_of(
    model: ModelShape, rank: int, *, stacked: bool
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of an adapter of all the model's modules."""
    prefix = "base_model.model.model.layers"
    for layer in range(model.layers):
        for group in model.dense_groups:
            for module in group:
                path = f"{prefix}.{layer}.self_attn.{module.name}"
                yield f"{path}.lora_A.weight", (rank, module.in_features)
                yield f"{path}.lora_B.weight", (module.out_features, rank)
        if model.moe is not None:
            experts = stacked_experts if stacked else named_experts
            yield from experts(model.moe, f"{prefix}.{layer}.mlp.experts", rank)


def stacked_experts(moe: MoeShape, prefix: str, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """All experts of a layer in one pair of tensors for each parameter."""
    rows = moe.experts * rank
    sizes = {".base_layer": (moe.hidden, moe.first_width), "": (moe.intermediate, moe.hidden)}
    for inner, (inputs, outputs) in sizes.items():
        yield f"{prefix}{inner}.lora_A.weight", (rows, inputs)
        yield f"{prefix}{inner}.lora_B.weight", (outputs, rows)


def named_experts(moe: MoeShape, prefix: str, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """A pair of tensors for each module of each expert."""
    for expert in range(moe.experts):
        for module in moe.modules:
            path = f"{prefix}.{expert}.{module.name}"
            yield f"{path}.lora_A.weight", (rank, module.in_features)
            yield f"{path}.lora_B.weight", (module.out_features, rank)


def write_adapter(
    folder: Path, model: ModelShape, rank: int, dtype: np.dtype[Any], *, stacked: bool
) -> Path:
    """A PEFT directory with random values, others for each name of a folder."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "peft_version": "0.21.2"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors_of(model, rank, stacked=stacked):
        size = shape[0] * shape[1] * dtype.itemsize
        span = [at, at + size]
        header[name] = {"dtype": _NAMES[dtype_name(dtype)], "shape": shape, "data_offsets": span}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Of an odd number, so that factors that follow one another are never alike.
    seed = int.from_bytes(folder.name.encode(), "little")
    values = np.random.default_rng(seed).standard_normal((1 << 22) + 1) * 0.01
    block = values.astype(dtype).tobytes()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at, len(block)):
            file.write(block[: at - start])
    return folder


class Stages:
    """Seconds of each stage of a load, by what ``progress`` tells."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.told: list[tuple[str, float]] = []

    def __call__(self, stage: str) -> None:
        self.told.append((stage, time.perf_counter()))

    def text(self) -> str:
        """Total, and its parts."""
        ends = [at for _, at in self.told[1:]] + [time.perf_counter()]
        parts = [f"{s} {end - at:.2f}" for (s, at), end in zip(self.told, ends, strict=True)]
        return f"{ends[-1] - self.begin:.3f} s ({', '.join(parts)})"


def link_rate(backend: ArrayBackend, *, up: bool) -> float:
    """Bytes per second of pinned copies, to the device or from it; on NumPy, of memory."""
    nbytes, copies = 64 << 20, 20
    host, device = backend.host_buffer(nbytes), backend.empty(nbytes, np.uint8)
    host[:] = 1
    rates = []
    for _ in range(5):
        backend.synchronize()
        start = backend.mark()
        for _ in range(copies):
            if up:
                backend.upload(device, host)
            elif backend.on_device:
                device.data.copy_to_host_async(host.ctypes.data, nbytes)
            else:
                host[:] = device
        end = backend.mark()
        backend.synchronize()
        rates.append(nbytes * copies / backend.seconds_between(start, end))
    return max(rates)


def link_row(backend: ArrayBackend) -> tuple[str, str]:
    up, down = (link_rate(backend, up=up) / 1e9 for up in (True, False))
    return "pinned copy", f"{up:.1f} GB/s to the device, {down:.1f} GB/s from it"


def file_rows(runtime: LoraRuntime, folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Until each serves, and until it is in the host cache: the first times, with the same content
    again, then in turn, three in room for two, so that every load lets one go."""
    store = runtime.store
    assert store is not None
    turns = [0, 1, 0, 1, *[2, 0, 1] * 2]
    for number, which in enumerate(turns):
        stages, evicted = Stages(), store.counts.evictions
        runtime.load(f"file{which}", folders[which], progress=stages)
        runtime.synchronize()
        text = stages.text()
        store.wait()
        text += f"; cached after {time.perf_counter() - stages.begin:.3f} s"
        if store.counts.evictions > evicted:
            what = "from files, cache full"
        elif number < 2:
            what = f"from files, {('first', 'second')[number]}"
        else:
            what = "from files, cached before"
        yield what, text


def back_to_back_row(runtime: LoraRuntime, folders: list[Path]) -> tuple[str, str]:
    """Loads that do not wait for copies to the host cache."""
    begin, count = time.perf_counter(), 6
    for number in range(count):
        runtime.load(f"file{number % 3}", folders[number % 3])
    runtime.synchronize()
    seconds = (time.perf_counter() - begin) / count
    assert runtime.store is not None
    runtime.store.wait()
    return "from files, in a row", f"{seconds:.3f} s each"


def cache_rows(runtime: LoraRuntime, nbytes: int) -> Iterator[tuple[str, str]]:
    """Cache, resident."""
    times = []
    for number in range(4 * LOADS):
        name = f"file{1 + number % 2}"
        if name in runtime.loaded:
            runtime.unload(name)
        begin = time.perf_counter()
        runtime.load(name)
        runtime.synchronize()
        times.append(time.perf_counter() - begin)
    times = times[2:]  # before those, it may have gone from the cache
    best, median = min(times), statistics.median(times)
    share = nbytes / median / link_rate(runtime.backend, up=True)
    yield (
        "from the host cache",
        f"{median:.4f} s, {nbytes / median / 1e9:.1f} GB/s, {share:.0%} of pinned copies "
        f"(best {best:.4f} s)",
    )
    begin = time.perf_counter()
    for _ in range(1000):
        runtime.ensure(["file1", "file2", None])
    yield "resident", f"{(time.perf_counter() - begin) * 1e3:.1f} µs"


def step_rows(runtime: LoraRuntime, folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Steps alone, and while loads go on."""
    slots = np.resize(runtime.ensure(["file0", None]), TOKENS)
    alone = step_ms(runtime, slots)
    yield "steps alone", f"{alone:.4f} ms"
    for what in ("files", "the host cache"):
        stop, loads = threading.Event(), [0]

        def keep_loading(stop: threading.Event, loads: list[int], what: str) -> None:
            while not stop.is_set():
                runtime.load("other", folders[1] if what == "files" else None, keep=["file0"])
                runtime.unload("other")
                loads[0] += 1

        if what != "files":
            runtime.load("other", folders[1], keep=["file0"])
            runtime.unload("other")
            runtime.store.wait()  # type: ignore[union-attr]
        thread = threading.Thread(target=keep_loading, args=(stop, loads, what))
        thread.start()
        busy = step_ms(runtime, slots)
        stop.set()
        thread.join()
        text = f"{busy:.4f} ms, {busy / alone - 1:+.1%} ({loads[0]} loads meanwhile)"
        yield f"steps during loads from {what}", text


def step_ms(runtime: LoraRuntime, slots: Any) -> float:
    return statistics.median(device_us(runtime, slots, 200) for _ in range(5)) / 1e3


def runtime_of(backend: ArrayBackend, model: ModelShape, rank: int, nbytes: int) -> LoraRuntime:
    """Four slots, a cache for two adapters, and steps that do the LoRA part alone."""
    dispatch = DispatchOptions((TOKENS,))
    runtime = LoraRuntime(
        model,
        LoraLimits(4, rank),
        dtype=BF16,
        max_tokens=TOKENS,
        arena_bytes=int(nbytes * 4.2),
        backend=backend,
        graphs=GraphOptions(dispatch=dispatch),
        host_cache_bytes=int(nbytes * 2.1),
    )
    stack = LayerStack(runtime.table, backend, max_tokens=TOKENS, lora_only=True)
    runtime.set_step(lora_step(runtime, stack))
    runtime.capture()
    fill_routes(runtime, model, TOKENS)
    return runtime


@click.command()
@click.option("--backend", type=click.Choice(["auto", "cuda", "numpy"]), default="auto")
@click.option("--model", default="qwen3-30b-a3b", show_default=True)
@click.option("--layers", type=int, help="The first so many; left out: all.")
@click.option("--rank", default=16, show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option(
    "--form",
    "forms",
    type=click.Choice(["stacked", "per-expert"]),
    multiple=True,
    default=("stacked", "per-expert"),
    show_default=True,
)
def main(
    backend: str, model: str, layers: int | None, rank: int, dtype: str, forms: tuple[str, ...]
) -> None:
    """Print a table for each form."""
    here, shape = open_backend(backend), load_model(model)
    shape = shape.with_layers(layers) if layers else shape
    for form in forms:
        print_table(here, shape, rank, DTYPES[dtype], form)


def print_table(
    here: ArrayBackend, shape: ModelShape, rank: int, dtype: np.dtype[Any], form: str
) -> None:
    title = f"loads of {form} adapters ({here.name}), files of {dtype_name(dtype)}"
    table = Table(title=title, show_header=False)
    stacked = form == "stacked"
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        folders = [
            write_adapter(place / name, shape, rank, dtype, stacked=stacked)
            for name in ("one", "other", "third")
        ]
        begin = time.perf_counter()
        adapter = read_adapter(folders[0], shape)
        by_host = time.perf_counter() - begin
        nbytes = adapter_bytes(adapter, BF16.itemsize)
        del adapter
        count = sum(1 for _ in tensors_of(shape, rank, stacked=stacked))
        text = f"{shape.name}, rank {rank} of every module: {byte_size(nbytes)}, {count} tensors"
        table.add_row("adapter", text)
        table.add_row("read by NumPy alone", f"{by_host:.2f} s")
        runtime = runtime_of(here, shape, rank, nbytes)
        table.add_row(*link_row(here))
        for row in file_rows(runtime, folders):
            table.add_row(*row)
        table.add_row(*back_to_back_row(runtime, folders))
        for row in (*cache_rows(runtime, nbytes), *step_rows(runtime, folders)):
            table.add_row(*row)
        runtime.close()
    Console().print(table)


if __name__ == "__main__":
    main()
