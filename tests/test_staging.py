"""What a batch's token_to_slot holds, and its way into the buffer that graphs read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS
from hypothesis import given
from hypothesis import strategies as st

from cupylora.backend import ArrayBackend, open_backend
from cupylora.errors import ArgumentError, CapacityError
from cupylora.graphs.buckets import count_active_loras
from cupylora.graphs.capture import CudaRecorder
from cupylora.graphs.staging import SlotReader, make_staging


@given(st.lists(st.integers(-3, 6), max_size=40))
def test_a_batch_is_counted(slots: list[int]) -> None:
    given_slots = np.array(slots, np.int32)
    before = given_slots.copy()
    batch = SlotReader(40, 7).read(given_slots)
    assert batch.slots.tolist() == [max(-1, slot) for slot in slots]
    assert np.flatnonzero(batch.used).tolist() == sorted({slot for slot in slots if slot >= 0})
    assert batch.groups == count_active_loras(given_slots)
    assert batch.num_tokens == len(slots)
    assert (given_slots == before).all()


def test_one_batch_leaves_nothing_in_the_next() -> None:
    reader = SlotReader(8, 4)
    assert reader.read(np.array([0, 3, -1], np.int32)).groups == 3
    batch = reader.read(np.array([2, 2], np.int32))
    assert (batch.groups, batch.used.tolist()) == (1, [False, False, True, False])
    assert reader.read(np.full(5, -1, np.int32)).groups == 0
    assert reader.read(np.zeros(0, np.int32)).groups == 0


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
        SlotReader(8, 4).read(slots)


@pytest.mark.parametrize("name", BACKENDS)
def test_slots_arrive_with_padding(name: str) -> None:
    """More sends than there are places: none is overwritten before its copy is over."""
    backend: ArrayBackend = open_backend(name)
    target = backend.asarray(np.full(4096, 77, np.int32))
    backend.synchronize()
    stream = CudaRecorder().stream if backend.on_device else None
    staging = make_staging(backend, target, stream, depth=2)
    rng = np.random.default_rng(0)
    seen, wanted = [], []
    for _ in range(20):
        tokens = int(rng.integers(0, 4000))
        slots = rng.integers(-1, 9, tokens).astype(np.int32)
        padded = tokens + int(rng.integers(0, 90))
        staging.send(slots, padded)
        slots_then = np.append(slots, np.full(padded - tokens, -1, np.int32))
        wanted.append(slots_then)
        slots.fill(55)  # the sender's own again
        if stream is None:
            seen.append(target[:padded].copy())
        else:
            with stream:
                seen.append(target[:padded].copy())
    if stream is not None:
        stream.synchronize()
    for got, want in zip(seen, wanted, strict=True):
        assert (backend.to_host(got) == want).all()
