"""What a record says of the machine: device, driver, package versions."""

from __future__ import annotations

import ctypes
import platform
from datetime import UTC, datetime

import numpy as np

from cupylora import __version__
from cupylora.bench.record import Record
from cupylora.compiler.nvrtc import compiler_version
from cupylora.device import DeviceInfo
from cupylora.errors import CompileError

__all__ = ["driver_version", "empty_record"]

_LONGEST = 96


def empty_record(info: DeviceInfo, bandwidth: float | None) -> Record:
    """A record of this machine and moment, without rows."""
    versions = {
        "cupylora": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": info.cupy_version or "none",
        "cuda-bindings": info.bindings_version or "none",
        "nvrtc": _nvrtc(),
    }
    supported = "for CUDA {}.{}".format(*info.driver_cuda) if info.driver_cuda else "none"
    return Record(
        device=info.name or "none",
        driver=driver_version() or supported,
        versions=versions,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        copy_bytes_per_second=bandwidth,
    )


def _nvrtc() -> str:
    try:
        return "{}.{}".format(*compiler_version())
    except CompileError:
        return "none"


def driver_version() -> str:
    """The driver's own version, such as 580.65.06; empty where its library does not tell."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(_LONGEST)
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, _LONGEST):
            return ""
    except (OSError, AttributeError):
        return ""
    return text.value.decode(errors="replace")
