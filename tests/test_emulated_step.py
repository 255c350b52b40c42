"""The kernel that takes a step's batch, on the emulated device, with the host's side
of the ring."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
import pytest
from emulator.device import Device
from fake_device import FakeArray
from test_staging import Sender, check_padding, check_slots, check_taken_once

from cupylora.backend import NumpyBackend
from cupylora.compiler import driver
from cupylora.errors import GraphError
from cupylora.graphs import staging
from cupylora.graphs.buffers import StepBuffers
from cupylora.graphs.capture import DirectRecorder

pytestmark = pytest.mark.emulated

PROGRAMS = ("step",)
STREAM = 7


class Filled(FakeArray):
    """What buffers ask of an array beside."""

    def fill(self, value: Any) -> None:
        self.host.fill(value)


class EmulatedBackend(NumpyBackend):
    """Memory that kernels may touch."""

    name = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.runtime = types.SimpleNamespace(streamQuery=lambda _: 0)
        self.xp = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=self.runtime))

    def zeros(self, shape: Any, dtype: Any) -> Any:
        made = self.device.array(np.zeros(shape, dtype), writable=True)
        return Filled(made.host)

    def asarray(self, host: np.ndarray) -> Any:
        return self.device.array(host)

    def host_buffer(self, nbytes: int) -> np.ndarray:
        made = self.device.array(np.zeros(nbytes, np.uint8), writable=True)
        return np.asarray(made.host)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)


class _Stream:
    ptr = STREAM

    def __enter__(self) -> None:
        """Nothing: kernels run where they are enqueued."""

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Kernels have run when they were enqueued."""


class EmulatedSender(Sender):
    def __init__(self, device: Device, depth: int = 2) -> None:
        self.backend, self.recorder = EmulatedBackend(device), DirectRecorder()
        self.add_buffers(StepBuffers(self.backend, 4096))
        self.staging = staging.make_staging(self.buffers, _Stream(), depth)

    def slots(self, rows: int) -> Any:
        return self.buffers.whole("token_to_slot").host[:rows].copy()

    def host(self, array: Any) -> np.ndarray:
        return array.host if isinstance(array, FakeArray) else array


@pytest.fixture
def sender(emulated: Device, monkeypatch: pytest.MonkeyPatch) -> EmulatedSender:
    monkeypatch.setattr(staging, "enqueue", emulated.enqueue)
    monkeypatch.setattr(staging, "as_stream", lambda _, stream: stream)
    return EmulatedSender(emulated)


def test_slots_arrive_with_padding(sender: EmulatedSender) -> None:
    check_slots(sender, 6)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 1), (5, 8), (8, 8), (700, 4096)])
def test_padding_is_set_behind_the_batch_alone(
    tokens: int, rows: int, sender: EmulatedSender
) -> None:
    check_padding(sender, tokens, rows)


def test_a_batch_is_taken_once_and_only_if_it_was_published(sender: EmulatedSender) -> None:
    check_taken_once(sender)


@pytest.mark.parametrize("end", ["taken", "lost", "failed"])
def test_a_full_ring_waits_for_the_oldest_batch(
    end: str, sender: EmulatedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def query(stream: int) -> int:
        asked.append(stream)
        if len(asked) < 3:
            return 600
        if end == "taken":
            sender.take(1)
        return {"taken": 600, "lost": 0, "failed": 700}[end]

    sender.staging._query = query  # type: ignore[attr-defined]
    monkeypatch.setattr(driver, "outside_captures", contextlib.nullcontext)
    monkeypatch.setattr(driver, "error_text", str)
    for slot in range(2):
        sender.publish(np.array([slot], np.int32))
    assert not asked
    if end == "taken":
        sender.publish(np.array([2], np.int32))
        for _ in range(2):
            sender.take(1)
        assert sender.slots(1).tolist() == [2]
    else:
        message = {"lost": "no step took it", "failed": "waiting for a step failed: 700"}[end]
        with pytest.raises(Exception, match=message) as caught:
            sender.staging.room()
        assert isinstance(caught.value, GraphError) == (end == "lost")
    assert asked == [STREAM] * 3


@pytest.mark.parametrize("taken", [False, True], ids=["not enqueued", "enqueued all the same"])
def test_a_step_that_failed_leaves_host_and_kernel_with_one_count(
    taken: bool, sender: EmulatedSender
) -> None:
    """Interrupted before or behind the launch: the next batch is taken, and no former one."""
    for slot in range(3):
        sender.publish(np.array([slot], np.int32))
        sender.take(1)
    sender.publish(np.array([7], np.int32))
    if taken:
        sender.take(1)
    sender.staging.withdraw()
    for slot in (4, 5, 6):
        sender.publish(np.array([slot], np.int32))
        sender.take(1)
        assert sender.slots(1).tolist() == [slot]
