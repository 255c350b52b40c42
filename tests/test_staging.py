"""What a batch's token_to_slot holds, and its way into the buffers that steps read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS
from hypothesis import given
from hypothesis import strategies as st

from cupylora.adapters.leases import slots_in
from cupylora.backend import ArrayBackend, open_backend
from cupylora.errors import ArgumentError, CapacityError
from cupylora.graphs.buckets import count_active_loras
from cupylora.graphs.buffers import StepBuffers
from cupylora.graphs.capture import CudaRecorder, DirectRecorder, Recorder
from cupylora.graphs.fence import CudaFence, DirectFence, StepFence
from cupylora.graphs.staging import BatchSlots, SlotReader, SlotStaging, make_staging

ROOM = np.empty(40, np.int32)


@given(st.lists(st.integers(-3, 6), max_size=40))
def test_a_batch_is_counted(slots: list[int]) -> None:
    given_slots = np.array(slots, np.int32)
    before = given_slots.copy()
    batch = SlotReader(40, 7).read(given_slots, ROOM)
    assert ROOM[: len(slots)].tolist() == [max(-1, slot) for slot in slots]
    assert slots_in(batch.used) == sorted({slot for slot in slots if slot >= 0})
    assert batch.groups == count_active_loras(given_slots)
    assert batch.num_tokens == len(slots)
    assert (given_slots == before).all()


def test_one_batch_leaves_nothing_in_the_next() -> None:
    reader = SlotReader(8, 4)
    assert reader.read(np.array([0, 3, -1], np.int32), ROOM).groups == 3
    batch = reader.read(np.array([2, 2], np.int32), ROOM)
    assert (batch.groups, slots_in(batch.used)) == (1, [2])
    assert reader.read(np.full(5, -1, np.int32), ROOM).groups == 0
    assert reader.read(np.zeros(0, np.int32), ROOM) == BatchSlots(0, 0, 0)


def test_a_batch_that_comes_again_is_counted_as_before() -> None:
    """Also behind one that was refused, or that had other negative numbers."""
    reader, room = SlotReader(8, 4), np.empty(8, np.int32)
    batches: list[list[int]] = [[], [0, 3, -1], [0, 3, -1], [9], [], [9], [0, 3, -5], [0, 3, -5]]
    for slots in [*batches, [1], [0, 3, -1], [0, 3]]:
        room.fill(77)
        given_slots = np.array(slots, np.int32)
        if 9 in slots:
            with pytest.raises(ArgumentError, match=r"token_to_slot\[0\] is 9"):
                reader.read(given_slots, room)
            continue
        batch = reader.read(given_slots, room)
        used = sorted({slot for slot in slots if slot >= 0})
        assert (batch.num_tokens, slots_in(batch.used)) == (len(slots), used)
        assert batch.groups == count_active_loras(given_slots)
        assert room[: len(slots)].tolist() == [max(-1, slot) for slot in slots]


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        (np.array([0, 4], np.int32), ArgumentError, r"token_to_slot\[1\] is 4; .* slots 0 to 3"),
        (np.array([0, 5], np.int32), ArgumentError, r"token_to_slot\[1\] is 5"),
        (np.array([-1, 2**31 - 1], np.int32), ArgumentError, r"token_to_slot\[1\] is 2147483647"),
        (np.zeros(9, np.int32), CapacityError, r"token_to_slot has 9 tokens; there is room for 8"),
        (np.zeros(3, np.int64), ArgumentError, r"token_to_slot has dtype int64"),
        (np.zeros((1, 3), np.int32), ArgumentError, r"token_to_slot has shape"),
        ([0, 1], ArgumentError, r"token_to_slot is a list"),
        (np.zeros(6, np.int32)[::2], ArgumentError, r"token_to_slot .* is not C-contiguous"),
    ],
)
def test_what_is_no_batch_is_refused(slots: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SlotReader(8, 4).read(slots, ROOM)


class Sender:
    """Buffers of up to 4096 tokens, and batches that go there."""

    def __init__(self, name: str, depth: int = 2) -> None:
        self.backend: ArrayBackend = open_backend(name)
        self.recorder: Recorder = CudaRecorder() if self.backend.on_device else DirectRecorder()
        with self.recorder.active():
            self.add_buffers(StepBuffers(self.backend, 4096))
        on_device, stream = self.backend.on_device, self.recorder.stream
        self.fence: StepFence = CudaFence(stream, depth) if on_device else DirectFence()
        self.staging: SlotStaging = make_staging(self.buffers, stream, self.fence)

    def add_buffers(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.odd = buffers.add("odd", (3,), np.int8, layers=2, pad=-1)
        self.even = buffers.add("even", (2, 2), np.int32, pad=-1)
        self.zero = buffers.add("zero", (1,), np.float32, layers=3, pad=0)
        self.kept = buffers.add("kept", (1,), np.int32)

    def send(self, slots: np.ndarray, rows: int) -> None:
        self.staging.room()[: len(slots)] = slots
        self.staging.send(len(slots), rows)

    def pad(self, rows: int) -> None:
        with self.recorder.active():
            self.staging.pad(rows)

    def slots(self, rows: int) -> Any:
        """A copy, in the order of work."""
        with self.recorder.active():
            return self.buffers.whole("token_to_slot")[:rows].copy()

    def host(self, array: Any) -> np.ndarray:
        with self.recorder.active():
            return self.backend.to_host(array)


def check_slots(sender: Sender, batches: int) -> None:
    """More batches than there are places: none is overwritten before it was copied."""
    rng = np.random.default_rng(0)
    seen, wanted = [], []
    for _ in range(batches):
        tokens = int(rng.integers(0, 4000))
        slots = rng.integers(-1, 9, tokens).astype(np.int32)
        padded = tokens + int(rng.integers(0, 90))
        sender.send(slots, padded)
        wanted.append(np.append(slots, np.full(padded - tokens, -1, np.int32)))
        seen.append(sender.slots(padded))
        sender.fence.submit()
    for got, want in zip(seen, wanted, strict=True):
        assert (sender.host(got) == want).all()


def check_padding(sender: Sender, tokens: int, rows: int) -> None:
    sender.send(np.zeros(tokens, np.int32), rows)
    for _ in range(2):  # as replays of a graph would
        with sender.recorder.active():
            for array in (sender.odd, sender.even, sender.zero, sender.kept):
                array.fill(7)
        sender.pad(rows)
        padding = np.zeros(4096, np.bool_)
        padding[tokens:rows] = True
        for array, pad in ((sender.odd, -1), (sender.even, -1), (sender.zero, 0)):
            host = sender.host(array)
            for layer in host if host.shape[0] < 4096 else [host]:
                assert (layer[padding] == pad).all()
                assert (layer[~padding] == 7).all()
        assert (sender.host(sender.kept) == 7).all()


SIZES = [(0, 1), (5, 8), (8, 8), (9, 8), (13, 14), (700, 4096)]
"""Tokens and rows; more tokens than rows: of a graph launched by hand."""


@pytest.mark.parametrize("name", BACKENDS)
def test_slots_arrive_with_padding(name: str) -> None:
    check_slots(Sender(name), 20)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_padding_is_set_behind_the_batch_alone(name: str, tokens: int, rows: int) -> None:
    check_padding(Sender(name), tokens, rows)
