"""The four states of the probe, on stand-ins for the driver and the installed packages."""

from __future__ import annotations

from typing import Any

import pytest

from cupylora import device
from cupylora.compiler import driver
from cupylora.device import DeviceState, probe, require_cuda, resolve_backend
from cupylora.errors import ArgumentError, DeviceUnavailableError


class FakeDriver:
    """Answers what the probe asks as a driver with ``count`` devices would."""

    def __init__(
        self, count: int = 2, capability: tuple[int, int] = (9, 0), cuda: int = 13000, init: int = 0
    ) -> None:
        self.count, self.capability, self.cuda, self.init = count, capability, cuda, init

    def cuInit(self, flags: Any) -> int:  # noqa: N802
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.cuda
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: Any) -> int:  # noqa: N802
        return 0

    def cuDeviceGetName(self, name: Any, size: Any, handle: Any) -> int:  # noqa: N802
        name.value = b"NVIDIA Test"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, handle: Any) -> int:  # noqa: N802
        memory._obj.value = 141 * 2**30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, handle: Any) -> int:  # noqa: N802
        value._obj.value = self.capability[attribute.value - 75]
        return 0

    def cuGetErrorName(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        return 0

    def cuGetErrorString(self, status: Any, text: Any) -> int:  # noqa: N802
        return 1


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    cuda: FakeDriver | None,
    cupy: str | None = "14.2.0",
    bindings: str | None = "13.5.0",
) -> None:
    def library() -> FakeDriver:
        if cuda is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return cuda

    versions = {"cupy": cupy, "cuda.bindings": bindings}
    monkeypatch.setattr(driver, "library", library)
    monkeypatch.setattr(device, "_version", lambda module, _: versions[module])


def test_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FakeDriver())
    info = require_cuda()
    assert info.state is DeviceState.READY
    assert (info.name, info.compute_capability, info.arch) == ("NVIDIA Test", (9, 0), "sm_90a")
    assert (info.device_count, info.memory, info.driver_cuda) == (2, 141 * 2**30, (13, 0))
    assert info.remedy == ""
    assert resolve_backend("auto") == resolve_backend("cuda") == "cuda"
    assert resolve_backend("numpy") == "numpy"


STATES = {
    "no driver": (
        None,
        "14.2.0",
        "13.5.0",
        DeviceState.NO_DRIVER,
        "older one with the cuda12 extra",
    ),
    "nothing at all": (None, None, None, DeviceState.NO_DRIVER, "numpy backend"),
    "no device": (FakeDriver(init=100), "14.2.0", "13.5.0", DeviceState.NO_DEVICE, "a GPU"),
    "zero devices": (FakeDriver(count=0), "14.2.0", "13.5.0", DeviceState.NO_DEVICE, "a GPU"),
    "broken": (FakeDriver(init=803), "14.2.0", "13.5.0", DeviceState.NO_DEVICE, "nvidia-smi"),
    "old": (FakeDriver(capability=(7, 5)), "14.2.0", "13.5.0", DeviceState.NO_DEVICE, "numpy"),
    "no cupy": (FakeDriver(), None, "13.5.0", DeviceState.CUPY_MISSING, "cupylora[cuda13]"),
    "no bindings": (FakeDriver(), "14.2.0", None, DeviceState.CUPY_MISSING, "cupylora[cuda13]"),
    "too new": (
        FakeDriver(cuda=12080),
        "14.2.0",
        "13.5.0",
        DeviceState.CUPY_MISSING,
        "cupylora[cuda12]",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_not_ready_says_which_state_and_the_remedy(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, cupy, bindings, state, remedy = STATES[case]
    pretend(monkeypatch, cuda, cupy, bindings)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe().state is state
    assert resolve_backend("auto") == "numpy"
    with pytest.raises(DeviceUnavailableError) as caught:
        resolve_backend("cuda")
    assert state.value in str(caught.value)
    assert remedy in str(caught.value)


def test_old_and_broken_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FakeDriver(capability=(7, 5)))
    assert "NVIDIA Test cannot be used: compute capability 7.5" in probe().detail
    pretend(monkeypatch, FakeDriver(init=803))
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in probe().detail


def test_hidden_devices_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FakeDriver(init=100))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES is '-1'" in probe().remedy


def test_unknown_backend() -> None:
    with pytest.raises(ArgumentError, match="backend is 'torch'; use auto, cuda or numpy"):
        resolve_backend("torch")


def test_version_of_what_is_and_is_not_installed() -> None:
    assert device._version("numpy", ("no-such-distribution",)) == "unknown version"
    assert device._version("pytest", ("no-such-distribution", "pytest")) == pytest.__version__
    assert device._version("no_such_module", ("numpy",)) is None
    assert device._version("no_such_package.module", ("numpy",)) is None


@pytest.mark.gpu
def test_probe_agrees_with_cupy() -> None:
    import cupy

    info = probe()
    major, minor = info.compute_capability or (0, 0)
    assert cupy.cuda.Device(0).compute_capability == f"{major}{minor}"
    assert info.device_count == cupy.cuda.runtime.getDeviceCount()
    assert info.cupy_version == cupy.__version__
