"""``cupylora doctor``: what the probe found, versions, architectures and the cache folder."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import click
import numpy as np

from cupylora import __version__
from cupylora.cli._streams import echo
from cupylora.compiler import ARCHITECTURES
from cupylora.compiler.exported import current_export
from cupylora.compiler.nvrtc import compiler_version
from cupylora.device import DeviceInfo, DeviceState, probe
from cupylora.errors import CompileError, ExportError
from cupylora.files import is_folder, is_there, named
from cupylora.resources import cuda_source_dir
from cupylora.text import wrapped

__all__ = ["command"]

_NO_CACHE = "a temporary folder each time, as"


@click.command("doctor")
def command() -> None:
    """Say whether the GPU can be used, and what is missing."""
    info = probe()
    rows = (*_device_rows(info), *_software_rows(info))
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        echo(wrapped(name.ljust(width), value))
    backend = "cuda" if info.state is DeviceState.READY else "numpy"
    echo(f"\n--backend auto uses {backend}.")
    if info.remedy:
        echo(wrapped("Remedy: ", info.remedy))


def _device_rows(info: DeviceInfo) -> list[tuple[str, str]]:
    rows = [("GPU", f"{info.state.value}: {info.detail}")]
    if info.driver_cuda:
        rows.append(("driver supports", "CUDA {}.{}".format(*info.driver_cuda)))
    if info.compute_capability and info.memory:
        capability = "{}.{}".format(*info.compute_capability)
        rows.append(("compute capability", f"{capability}, takes {info.arch}"))
        rows.append(("device memory", f"{info.memory / 2**30:.1f} GiB"))
        rows.append(("devices", str(info.device_count)))
    return rows


def _software_rows(info: DeviceInfo) -> list[tuple[str, str]]:
    try:
        nvrtc = "{}.{}".format(*compiler_version())
    except CompileError as error:
        nvrtc = f"not available: {error}"
    return [
        ("cupylora", __version__),
        ("Python", platform.python_version()),
        ("NumPy, ml_dtypes", f"{np.__version__}, {metadata.version('ml_dtypes')}"),
        ("CuPy", info.cupy_version or "not installed"),
        ("cuda-bindings", info.bindings_version or "not installed"),
        ("NVRTC", nvrtc),
        ("kernels built for", ", ".join(ARCHITECTURES)),
        ("CUDA sources", str(cuda_source_dir())),
        ("kernel cache", f"{_cache(info.cache_folder)} (CUPYLORA_CACHE_DIR)"),
        ("exported kernels", f"{_export()} (CUPYLORA_EXPORT_DIR)"),
    ]


def _cache(folder: Path | None) -> str:
    """Where compiled kernels are kept. Looks only: the folder is made when there is one to keep."""
    if folder is None:
        return f"{_NO_CACHE} there is no home directory"
    there = next(path for path in (folder, *folder.parents) if is_there(path))
    if is_folder(there) and os.access(there, os.W_OK | os.X_OK):
        return str(folder)
    return f"{_NO_CACHE} {folder} cannot be written"


def _export() -> str:
    """Where kernels come from that are not compiled here."""
    try:
        found = current_export()
    except ExportError as error:
        return f"cannot be used: {error}"
    return named(found.folder) if found else "none, kernels are compiled here"
