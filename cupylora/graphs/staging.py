"""A batch's ``token_to_slot`` on its way from host memory to the buffer that graphs read.

In: the host's array, one slot a token. Out: what the batch holds (groups of rows, slots used), and
one asynchronous copy, padding included, on the steps' stream.

The copy reads pinned memory after this returned, so the memory is a ring: a place is written again
only once its copy is over, which an event tells; else the next step's tenants would reach this
one's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from cupylora.backend import ArrayBackend
from cupylora.checks import INT32, check_array, check_int, check_max_loras
from cupylora.errors import ArgumentError, CapacityError
from cupylora.interop.convert import borrow
from cupylora.interop.streams import as_stream
from cupylora.text import counted
from cupylora.worklists import Array

__all__ = ["BatchSlots", "SlotReader", "SlotStaging", "make_staging"]

STAGING_DEPTH = 8
"""Copies that may be under way; a step waits for the oldest where they all are."""

HostSlots = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchSlots:
    """What ``token_to_slot`` says. Arrays are the reader's own, valid until it reads again.

    slots: int32 [T], every negative value as -1. used: bool [max_loras]. groups: as
    ``count_active_loras`` counts.
    """

    slots: HostSlots
    used: npt.NDArray[np.bool_]
    groups: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.slots)


class SlotReader:
    """Checks and counts, in a few passes over the array and without a Python loop."""

    def __init__(self, max_tokens: int, max_loras: int) -> None:
        self.max_tokens = check_int("max_tokens", max_tokens, 1)
        self.max_loras = check_max_loras(max_loras)
        self._slots = np.empty(max_tokens, np.int32)
        self._index = np.empty(max_tokens, np.intp)  # what indexing takes without a conversion
        # Behind the slots a place for all numbers that are none, and last, where -1 points, one
        # for rows of no adapter.
        self._seen = np.zeros(max_loras + 2, np.bool_)
        self._used = self._seen[:max_loras]

    @property
    def no_slots(self) -> HostSlots:
        """Of a batch of padding alone."""
        return self._slots[:0]

    def read(self, token_to_slot: Any) -> BatchSlots:
        """What a batch holds. Raises ArgumentError naming the first token whose slot does not
        exist, or what kind of array is needed; CapacityError for more than max_tokens tokens."""
        if not _is_host_slots(token_to_slot):
            name = "token_to_slot"
            token_to_slot = borrow(name, token_to_slot, on_device=False)
            check_array(name, token_to_slot, dtype=INT32, shape=(None,), on_device=False)
        tokens = len(token_to_slot)
        if tokens > self.max_tokens:
            raise CapacityError(
                f"token_to_slot has {counted(tokens, 'token')}; there is room for {self.max_tokens}"
            )
        slots = self._slots[:tokens]
        index = self._index[:tokens]
        np.maximum(token_to_slot, -1, out=slots)
        np.minimum(slots, self.max_loras, out=index)
        seen = self._seen
        seen.fill(False)
        seen[index] = True
        if seen[self.max_loras]:
            self._fail(token_to_slot)
        adapters = int(np.count_nonzero(self._used))
        return BatchSlots(slots, self._used, adapters + (adapters > 0 and bool(seen[-1])))

    def _fail(self, slots: HostSlots) -> NoReturn:
        token = int(np.argmax(slots >= self.max_loras))
        raise ArgumentError(
            f"token_to_slot[{token}] is {slots[token]}; the runtime has slots 0 to "
            f"{self.max_loras - 1} (negative: no adapter)"
        )


def _is_host_slots(value: Any) -> bool:
    """What ``check_array`` would accept, told in a fraction of its time."""
    return (
        type(value) is np.ndarray
        and value.ndim == 1
        and value.dtype == INT32
        and value.flags.c_contiguous
    )


class SlotStaging(Protocol):
    """Brings slots to where steps read them."""

    def send(self, slots: HostSlots, padded: int) -> None:
        """Enqueue: the target's first ``padded`` rows become ``slots``, then -1."""


class _DirectStaging:
    def __init__(self, target: Array) -> None:
        self._target = target

    def send(self, slots: HostSlots, padded: int) -> None:
        self._target[: len(slots)] = slots
        self._target[len(slots) : padded] = -1


class _PinnedStaging:
    def __init__(self, backend: ArrayBackend, target: Array, stream: Any, depth: int) -> None:
        cuda = backend.xp.cuda
        size, item = int(target.shape[0]), target.dtype.itemsize
        self._memory = cuda.alloc_pinned_memory(depth * size * item)
        ring = np.frombuffer(self._memory, np.int32, depth * size).reshape(depth, size)
        self._places = list(ring)
        self._addresses = [int(place.ctypes.data) for place in ring]
        self._copied = [cuda.Event(disable_timing=True) for _ in range(depth)]
        self._target, self._item, self._next = backend.address(target), item, 0
        self._copy, self._stream = cuda.runtime.memcpyAsync, as_stream("stream", stream)
        self._to_device = cuda.runtime.memcpyHostToDevice

    def send(self, slots: HostSlots, padded: int) -> None:
        index, tokens, stream = self._next, len(slots), self._stream
        self._copied[index].synchronize()
        place = self._places[index]
        place[:tokens] = slots
        place[tokens:padded] = -1
        self._copy(
            self._target, self._addresses[index], padded * self._item, self._to_device, stream.ptr
        )
        self._copied[index].record(stream)
        self._next = (index + 1) % len(self._places)


def make_staging(
    backend: ArrayBackend, target: Array, stream: Any, depth: int = STAGING_DEPTH
) -> SlotStaging:
    """For ``target``, int32 [max_tokens] of ``backend``; copies go to ``stream``, in any form, that
    must live until the last one was sent."""
    target = borrow("target", target, on_device=backend.on_device, written=True)
    check_array("target", target, dtype=INT32, shape=(None,), on_device=backend.on_device)
    if not backend.on_device:
        return _DirectStaging(target)
    return _PinnedStaging(backend, target, stream, check_int("depth", depth, 1))
