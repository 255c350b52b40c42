"""What GPU there is, and which backend a caller gets.

Asks the driver (through ctypes, without a CUDA context) and the installed packages' metadata;
imports neither CuPy nor cuda.bindings. The four states are told apart so that each has its remedy.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from cupylora.compiler import driver
from cupylora.compiler.arch import arch_for
from cupylora.compiler.cache import cache_dir
from cupylora.errors import ArgumentError, CupyloraError, DeviceUnavailableError

__all__ = ["Backend", "DeviceInfo", "DeviceState", "probe", "require_cuda", "resolve_backend"]

Backend = Literal["cuda", "numpy"]

_NO_DEVICE_STATUS = 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class DeviceState(Enum):
    """Whether the CUDA backend can be used, and if not, the first thing that is missing."""

    NO_DRIVER = "no driver"
    NO_DEVICE = "driver without device"
    CUPY_MISSING = "CuPy missing"
    READY = "ready"


@dataclass(frozen=True)
class DeviceInfo:
    """What ``probe`` found. Fields that do not apply are None; memory is in bytes.

    detail: the state in a sentence. remedy: what to do about it; empty when ready.
    driver_cuda: the newest CUDA version the driver supports, (major, minor).
    cache_folder: of the kernels; None where the environment names a home directory that is not
    there, so that a temporary folder serves.
    """

    state: DeviceState
    detail: str
    remedy: str
    cupy_version: str | None
    bindings_version: str | None
    cache_folder: Path | None
    driver_cuda: tuple[int, int] | None = None
    device_count: int = 0
    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    arch: str | None = None
    memory: int | None = None


class _UnusableError(Exception):
    """Why the driver offers no device, and what to do."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.detail, self.remedy = detail, remedy


def probe() -> DeviceInfo:
    """Look at driver, first visible device and packages. Never raises for what it finds."""
    info = DeviceInfo(
        state=DeviceState.NO_DRIVER,
        detail="",
        remedy="use the numpy backend, or install a driver: 580 or newer for the cuda13 extra, "
        "an older one with the cuda12 extra",
        cupy_version=_version("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),
        bindings_version=_version("cuda.bindings", ("cuda-bindings",)),
        cache_folder=cache_dir(),
    )
    try:
        cuda = driver.library()
    except OSError as error:
        return replace(info, detail=f"no NVIDIA driver is installed ({error})")
    try:
        info = _with_device(info, cuda)
    except _UnusableError as error:
        state = DeviceState.NO_DEVICE
        return replace(info, state=state, detail=error.detail, remedy=error.remedy)
    if lacking := _lacking_packages(info):
        return replace(info, state=DeviceState.CUPY_MISSING, detail=lacking, remedy=_install(info))
    return replace(info, state=DeviceState.READY, detail=f"{info.name} is ready", remedy="")


def require_cuda() -> DeviceInfo:
    """The probe's result when it is ready; else DeviceUnavailableError with state and remedy."""
    info = probe()
    if info.state is not DeviceState.READY:
        raise DeviceUnavailableError(
            f"the cuda backend is not ready ({info.state.value}): {info.detail}; {info.remedy}"
        )
    return info


def resolve_backend(backend: str) -> Backend:
    """``"cuda"`` or ``"numpy"`` for ``"auto"``, ``"cuda"`` or ``"numpy"``.

    ``"auto"`` is cuda where it is ready. Raises DeviceUnavailableError when cuda is asked for where
    it is not ready, ArgumentError for any other name.
    """
    if backend == "cuda":
        require_cuda()
        return "cuda"
    if backend == "numpy":
        return "numpy"
    if backend == "auto":
        return "cuda" if probe().state is DeviceState.READY else "numpy"
    raise ArgumentError(f"backend is {backend!r}; use auto, cuda or numpy")


def _version(module: str, distributions: tuple[str, ...]) -> str | None:
    """The version of an importable module, without importing it; None where there is none."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:
        return None
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown version"


def _lacking_packages(info: DeviceInfo) -> str:
    """What keeps the installed packages from driving the device; empty if nothing does."""
    versions = {"CuPy": info.cupy_version, "cuda-bindings": info.bindings_version}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return f"{info.name} is there, but {' and '.join(missing)} cannot be imported"
    supported = info.driver_cuda or (0, 0)
    compiler_major = str(info.bindings_version).partition(".")[0]
    if compiler_major.isdecimal() and int(compiler_major) > supported[0]:
        return (
            f"cuda-bindings {info.bindings_version} makes code for CUDA {compiler_major}, but the "
            f"driver supports CUDA {supported[0]}.{supported[1]}"
        )
    return ""


def _install(info: DeviceInfo) -> str:
    extra = "cuda13" if (info.driver_cuda or (0, 0)) >= (13, 0) else "cuda12"
    return f"pip install 'cupylora[{extra}]'"


def _with_device(info: DeviceInfo, cuda: ctypes.CDLL) -> DeviceInfo:
    """``info`` with what the driver says of itself and of its first device, or _UnusableError."""
    status = cuda.cuInit(ctypes.c_uint(0))
    count = ctypes.c_int()
    if status == 0:
        status = cuda.cuDeviceGetCount(ctypes.byref(count))
    if status == _NO_DEVICE_STATUS or (status == 0 and count.value == 0):
        raise _UnusableError("the driver sees no device", _visibility_remedy())
    try:
        driver.check(status, "starting the driver")
        described = _describe(info, cuda)
    except CupyloraError as error:
        remedy = "check the driver with nvidia-smi, or use the numpy backend"
        raise _UnusableError(str(error), remedy) from error
    try:
        arch = arch_for(described.compute_capability or (0, 0))
    except DeviceUnavailableError as error:
        detail = f"{described.name} cannot be used: {error}"
        raise _UnusableError(detail, "use the numpy backend") from error
    return replace(described, device_count=count.value, arch=arch)


def _describe(info: DeviceInfo, cuda: ctypes.CDLL) -> DeviceInfo:
    version, device = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    doing = "asking the driver about device 0"
    driver.check(cuda.cuDriverGetVersion(ctypes.byref(version)), doing)
    driver.check(cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0)), doing)
    driver.check(cuda.cuDeviceGetName(name, ctypes.c_int(len(name)), device), doing)
    driver.check(cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device), doing)
    return replace(
        info,
        driver_cuda=(version.value // 1000, version.value % 1000 // 10),
        name=name.value.decode(errors="replace"),
        compute_capability=(_attribute(cuda, _MAJOR, device), _attribute(cuda, _MINOR, device)),
        memory=memory.value,
    )


def _attribute(cuda: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    status = cuda.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), device)
    driver.check(status, f"asking for device attribute {attribute}")
    return value.value


def _visibility_remedy() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or use the numpy backend"
    return "give this machine or container a GPU, or use the numpy backend"
