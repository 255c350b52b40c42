"""Times loads: from files, from the host cache, and what they cost steps that run meanwhile.

    python tools/measure_loading.py                                    # on the current GPU
    python tools/measure_loading.py --backend numpy --model tiny-moe   # the same way without one

Writes two adapters of rank 16 with stacked experts, as peft's target_parameters do (1.6 GB each for
all layers of Qwen3-30B-A3B), to a temporary folder. Files: seconds until the adapter serves, by
what is done, from the page cache, for the first load of a process and for later ones. Cache: bytes
per second from the host cache to a slot. Resident: microseconds of ``ensure`` where all is loaded.
Steps: median milliseconds of a decode step of 32 tokens, alone and while another thread loads from
files, and from the host cache, all the time.
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
from cupylora.shapes import LoraLimits, ModelShape, load_model
from cupylora.text import byte_size

TOKENS, LOADS = 32, 5
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def tensors_of(model: ModelShape, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of a stacked adapter of all the model's modules."""
    prefix = "base_model.model.model.layers"
    for layer in range(model.layers):
        for group in model.dense_groups:
            for module in group:
                path = f"{prefix}.{layer}.self_attn.{module.name}"
                yield f"{path}.lora_A.weight", (rank, module.in_features)
                yield f"{path}.lora_B.weight", (module.out_features, rank)
        moe = model.moe
        if moe is None:
            continue
        stacked = moe.experts * rank
        sizes = {".base_layer": (moe.hidden, moe.first_width), "": (moe.intermediate, moe.hidden)}
        for inner, (inputs, outputs) in sizes.items():
            path = f"{prefix}.{layer}.mlp.experts{inner}"
            yield f"{path}.lora_A.weight", (stacked, inputs)
            yield f"{path}.lora_B.weight", (outputs, stacked)


def write_adapter(folder: Path, model: ModelShape, rank: int, dtype: np.dtype[Any]) -> Path:
    """A PEFT directory with random values."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "peft_version": "0.21.2"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors_of(model, rank):
        size = shape[0] * shape[1] * dtype.itemsize
        span = [at, at + size]
        header[name] = {"dtype": _NAMES[dtype_name(dtype)], "shape": shape, "data_offsets": span}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = np.random.default_rng(len(folder.name)).standard_normal(1 << 22) * 0.01
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


def load_rows(runtime: LoraRuntime, folders: list[Path], nbytes: int) -> Iterator[tuple[str, str]]:
    """Files, cache, resident."""
    for number in range(LOADS):
        stages = Stages()
        runtime.load(f"file{number % 2}", folders[number % 2], progress=stages)
        runtime.synchronize()
        yield ("from files, first" if number == 0 else "from files"), stages.text()
    times = []
    for number in range(2 * LOADS):
        name = f"file{number % 2}"
        runtime.unload(name)
        begin = time.perf_counter()
        runtime.load(name)
        runtime.synchronize()
        times.append(time.perf_counter() - begin)
    best, median = min(times), statistics.median(times)
    yield (
        "from the host cache",
        f"{median:.4f} s, {nbytes / median / 1e9:.1f} GB/s (best {best:.4f} s)",
    )
    begin = time.perf_counter()
    for _ in range(1000):
        runtime.ensure(["file0", "file1", None])
    yield "resident", f"{(time.perf_counter() - begin) * 1e3:.1f} µs"


def step_rows(runtime: LoraRuntime, folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Steps alone, and while loads go on."""
    slots = np.resize(runtime.slots_of(["file0", None]), TOKENS)
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
    """Four slots, and steps that do the LoRA part alone."""
    dispatch = DispatchOptions((TOKENS,))
    runtime = LoraRuntime(
        model,
        LoraLimits(4, rank),
        dtype=BF16,
        max_tokens=TOKENS,
        arena_bytes=int(nbytes * 4.2),
        backend=backend,
        graphs=GraphOptions(dispatch=dispatch),
        host_cache_bytes=int(nbytes * 3.1),
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
def main(backend: str, model: str, layers: int | None, rank: int, dtype: str) -> None:
    """Print one table."""
    here, shape = open_backend(backend), load_model(model)
    shape = shape.with_layers(layers) if layers else shape
    table = Table(title=f"loads ({here.name}), files of {dtype}", show_header=False)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        folders = [
            write_adapter(place / name, shape, rank, DTYPES[dtype]) for name in ("one", "other")
        ]
        begin = time.perf_counter()
        adapter = read_adapter(folders[0], shape)
        by_host = time.perf_counter() - begin
        nbytes = adapter_bytes(adapter, BF16.itemsize)
        del adapter
        table.add_row("adapter", byte_size(nbytes))
        table.add_row("read by NumPy alone", f"{by_host:.2f} s")
        runtime = runtime_of(here, shape, rank, nbytes)
        for row in (*load_rows(runtime, folders, nbytes), *step_rows(runtime, folders)):
            table.add_row(*row)
        runtime.close()
    Console().print(table)


if __name__ == "__main__":
    main()
