"""A C++ program without Python: bit for bit what the Python ops give, on the emulated device and,
where there is one, on a GPU; and its kernels reached as meant."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator.build import Builder
from emulator.device import Device, Schedule
from host_case import Place, Sizes, write_case, write_demo_pack
from host_util import ROOT, STRICT, FakeDriver, build, hollow, write_hollow

from cupylora import open_backend
from cupylora.compiler.arch import arch_for
from cupylora.compiler.loader import _capability
from cupylora.export.folder import export_kernels
from cupylora.ops import _lora_pair

PROGRAMS = (
    *("plan", "sort", "segments", "rows"),
    *("lora_cluster_bfloat16", "lora_ring_bfloat16"),
    *(f"lora_{half}{form}_bfloat16" for half in ("shrink", "expand") for form in ("", "_stream")),
)
SOURCE = ROOT / "tools" / "hosts" / "cpp"


def build_host(export: Path, library: Path, out: Path, source: str = "mixed_moe.cpp") -> Path:
    """A program of SOURCE, linked with the libcuda in the folder ``library``."""
    include = (f"-I{export / 'include'}", f"-L{library}", "-l:libcuda.so.1")
    return build("g++", ("-std=c++17", "-O2", *STRICT), [SOURCE / source], out, include)


MANY_RANKS, MANY_ELSEWHERE = "prefill of many ranks", "prefill of many ranks elsewhere"
"""Where batches that can be emulated count as large: the export says from which sizes on."""

# Sizes, capability, and kernels that they must reach.
CASES: dict[str, tuple[Sizes, tuple[int, int], set[str]]] = {
    "decode on Hopper": (
        Sizes(9),
        (9, 0),
        {"plan/rank_8", "lora_cluster_bfloat16/1_1", "rows/activation_bare_bfloat16"},
    ),
    "larger tiles on Hopper": (
        Sizes(40, tile_rows=16),
        (9, 0),
        {"plan/rank_8", "lora_ring_bfloat16/1_16"},
    ),
    "decode elsewhere": (
        Sizes(9, max_rank=8),
        (8, 0),
        {"lora_shrink_bfloat16/4_8", "lora_expand_bfloat16/8", "rows/finalize_bare_bfloat16"},
    ),
    "many slots": (
        Sizes(140, max_loras=4096, slots=(4095, 0, 77)),
        (9, 0),
        {"sort/route_rank", "segments/segment_fill"},
    ),
    "prefill elsewhere": (
        Sizes(260, tile_rows=64),
        (12, 0),
        {"lora_shrink_stream_bfloat16/2_32", "lora_expand_direct_bfloat16/1"},
    ),
    MANY_RANKS: (
        Sizes(260, tile_rows=64, max_rank=64),
        (9, 0),
        {
            *("lora_shrink_wide_bfloat16/4_64", "lora_shrink_group_bfloat16/8_64"),
            "lora_expand_panel_bfloat16/4",
        },
    ),
    MANY_ELSEWHERE: (
        Sizes(260, tile_rows=64, max_rank=64),
        (12, 0),
        {
            *("lora_shrink_wide_bfloat16/4_64", "lora_shrink_wide_bfloat16/8_64"),
            "lora_expand_panel_bfloat16/4",
        },
    ),
}


@pytest.mark.emulated
@pytest.mark.parametrize("name", CASES)
def test_a_c_host_gives_the_bits_that_python_gives(
    name: str,
    emulated: Device,
    kernel_builder: Builder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, capability, kernels = CASES[name]
    if name in (MANY_RANKS, MANY_ELSEWHERE):
        monkeypatch.setattr(_lora_pair, "_WIDE_ROWS", _lora_pair._STREAM_ROWS)
        monkeypatch.setattr(_lora_pair, "_PANEL_ELEMENTS", 0)
    emulated.hopper = capability[0] == 9
    emulated.schedule = Schedule(3, pause=200)

    def put(array: np.ndarray, written: bool = False) -> Any:
        return emulated.array(array, writable=written)

    pack = write_demo_pack(tmp_path / "demo.pack")
    write_case(tmp_path / "case", sizes, pack, Place(put, lambda array: array.host))
    arch = {9: "sm_90a", 8: "sm_80", 12: "sm_120"}[capability[0]]
    driver = FakeDriver(tmp_path, hollow(arch), "emulate", kernel_builder, capability)
    driver.schedule = Schedule(8, pause=500)
    export = write_hollow(tmp_path / "export", driver.built)
    driver.make()
    host = build_host(export, tmp_path, tmp_path / "mixed_moe")
    done = driver.run([host, export, tmp_path / "demo.pack", tmp_path / "case"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("PASS\n")
    launched = [line[0] for line in driver.launches()]
    assert sorted(launched) == sorted(2 * emulated.launched)
    assert kernels <= set(launched)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [Sizes(9), Sizes(40, tile_rows=16), Sizes(600, tile_rows=64)])
def test_a_c_host_gives_the_bits_that_python_gives_on_a_gpu(sizes: Sizes, tmp_path: Path) -> None:
    backend = open_backend("cuda")

    def put(array: np.ndarray, written: bool = False) -> Any:
        return backend.asarray(array)

    pack = write_demo_pack(tmp_path / "demo.pack")
    write_case(tmp_path / "case", sizes, pack, Place(put, backend.to_host))
    export = tmp_path / "export"
    export_kernels([arch_for(_capability())], export)
    host = build_host(export, libcuda().parent, tmp_path / "mixed_moe")
    command = [str(host), str(export), str(tmp_path / "demo.pack"), str(tmp_path / "case")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("PASS\n")


def libcuda() -> Path:
    """Where the driver's library lies that programs here load."""
    ctypes.CDLL("libcuda.so.1")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in lines if "/libcuda.so" in line)


def test_an_enqueue_costs_little_more_than_a_launch(tmp_path: Path) -> None:
    """The program's own bar, 0.5 us, on a driver that drops launches: what is timed is the host."""
    driver = FakeDriver(tmp_path, hollow(), "nothing")
    export = write_hollow(tmp_path / "export", driver.built)
    driver.make()
    host = build_host(export, tmp_path, tmp_path / "enqueue_cost", "enqueue_cost.cpp")
    done = driver.run([host, export])
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split(" ")[0] for line in done.stdout.splitlines()} >= {"lists", "delta", "PASS"}
