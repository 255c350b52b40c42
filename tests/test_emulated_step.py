"""The kernel that sets padding, on the emulated device, with the host's side of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.device import Device
from fake_device import FakeArray
from late_device import LateBackend, LateStream
from test_staging import SIZES, Sender, check_padding, check_slots

from cupylora.graphs import staging
from cupylora.graphs.buffers import StepBuffers
from cupylora.graphs.capture import DirectRecorder
from cupylora.graphs.fence import DirectFence

pytestmark = pytest.mark.emulated

PROGRAMS = ("step",)


class Filled(FakeArray):
    """What buffers ask of an array beside."""

    def fill(self, value: Any) -> None:
        self.host.fill(value)


class EmulatedBackend(LateBackend):
    """Memory that kernels may touch; copies are made at once."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def zeros(self, shape: Any, dtype: Any) -> Any:
        made = self.device.array(np.zeros(shape, dtype), writable=True)
        return Filled(made.host)

    def asarray(self, host: np.ndarray) -> Any:
        return self.device.array(host)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)


class EmulatedSender(Sender):
    def __init__(self, device: Device) -> None:
        self.backend, self.recorder = EmulatedBackend(device), DirectRecorder()
        self.add_buffers(StepBuffers(self.backend, 4096))
        self.fence = DirectFence()
        self.staging = staging.make_staging(self.buffers, LateStream(), self.fence)

    def slots(self, rows: int) -> Any:
        return self.buffers.whole("token_to_slot").host[:rows].copy()

    def host(self, array: Any) -> np.ndarray:
        return array.host if isinstance(array, FakeArray) else array


@pytest.fixture
def sender(emulated: Device, monkeypatch: pytest.MonkeyPatch) -> EmulatedSender:
    monkeypatch.setattr(staging, "enqueue", emulated.enqueue)
    monkeypatch.setattr(staging, "load_kernel", lambda *_: None)
    monkeypatch.setattr(staging, "as_stream", lambda _, stream: stream)
    return EmulatedSender(emulated)


def test_slots_arrive_with_padding(sender: EmulatedSender) -> None:
    check_slots(sender, 6)


@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_padding_is_set_behind_the_batch_alone(
    tokens: int, rows: int, sender: EmulatedSender
) -> None:
    check_padding(sender, tokens, rows)
