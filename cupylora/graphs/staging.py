"""A batch's ``token_to_slot`` on its way from host memory to the buffer that steps read.

    host's array --> a place of the ring (pinned): checked, counted, published
                          |
                          v   the step's first kernel, part of its graph
                     step buffers: slots, and padding behind the batch's rows

In: the host's array, one slot a token. Out: what the batch holds (groups of rows, slots used), and
the buffers' first rows as the step needs them. A captured step takes its batch itself, so that one
launch enqueues it.

The kernel reads the ring after this returned: a place is written again only once its batch was
taken, which the kernel says in host memory; else the next step's tenants would reach this one's
rows. Kernel and host count batches alike, and each place carries its batch's number: a graph
launched without a batch takes none. Where a step failed, the host takes the kernel's count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from cupylora.adapters.leases import SlotSet
from cupylora.checks import INT32, check_array, check_int, check_max_loras
from cupylora.compiler import driver
from cupylora.errors import ArgumentError, CapacityError, GraphError
from cupylora.graphs.buffers import SLOTS, StepBuffers
from cupylora.interop.convert import borrow
from cupylora.interop.streams import as_stream
from cupylora.ops._device import enqueue
from cupylora.text import counted

__all__ = ["BatchSlots", "SlotReader", "SlotStaging", "is_host_int32", "make_staging"]

STAGING_DEPTH = 32
"""Batches that may be under way; a step waits for the oldest where they all are."""

HostSlots = npt.NDArray[np.int32]

_HEAD_BYTES = 16
_THREADS = 512
_TYPES = ("ptr", "ptr", "ptr", "ptr", "u32", "u32", "u64", "ptr", "u32")
_NOT_READY = 600  # cudaErrorNotReady; the runtime's numbers are the driver's


@dataclass(slots=True)
class BatchSlots:
    """What ``token_to_slot`` says; a reader fills the same one each time.

    num_tokens: without padding. used: its adapters' slots. groups: as ``count_active_loras``
    counts.
    """

    num_tokens: int
    used: SlotSet
    groups: int


class SlotReader:
    """Checks and counts, in a few passes over the array and without a Python loop."""

    def __init__(self, max_tokens: int, max_loras: int) -> None:
        self.max_tokens = check_int("max_tokens", max_tokens, 1)
        self.max_loras = check_max_loras(max_loras)
        self._index = np.empty(max_tokens, np.intp)  # what indexing takes without a conversion
        # Last, where -1 points, the place of rows of no adapter.
        self._seen = np.zeros(max_loras + 1, np.bool_)
        self._base_rows = 1 << 8 * max_loras
        self._batch = BatchSlots(0, 0, 0)
        self._content: bytes | None = None

    def read(self, token_to_slot: Any, room: HostSlots) -> BatchSlots:
        """What a batch holds, until the next is read; its slots go to ``room``, negative ones as
        -1.

        Raises ArgumentError naming the first token whose slot does not exist, or what kind of array
        is needed; CapacityError for more than max_tokens tokens.
        """
        if not is_host_int32(token_to_slot):
            name = "token_to_slot"
            token_to_slot = borrow(name, token_to_slot, on_device=False)
            check_array(name, token_to_slot, dtype=INT32, shape=(None,), on_device=False)
        tokens = len(token_to_slot)
        if tokens > self.max_tokens:
            raise CapacityError(
                f"token_to_slot has {counted(tokens, 'token')}; there is room for {self.max_tokens}"
            )
        slots = room[:tokens]
        slots[:] = token_to_slot  # first: what is checked is what is used
        content = slots.tobytes()
        if content != self._content:  # in decode mostly the batch before
            self._content = None
            self._count(slots)
            self._content = slots.tobytes()
        return self._batch

    def _count(self, slots: HostSlots) -> None:
        """Note what a batch holds; negative numbers other than -1 become that."""
        batch, tokens = self._batch, len(slots)
        batch.num_tokens, batch.used, batch.groups = tokens, 0, 0
        if not tokens:
            return
        if slots.item(slots.argmax()) >= self.max_loras:
            self._fail(slots)
        if slots.item(slots.argmin()) < -1:
            np.maximum(slots, -1, out=slots)
        seen, index = self._seen, self._index[:tokens]
        index[:] = slots
        seen.fill(False)
        seen[index] = True
        found = int.from_bytes(seen.tobytes(), "little")
        if found < self._base_rows:
            batch.used, batch.groups = found, found.bit_count()
        else:
            batch.used = found - self._base_rows
            adapters = batch.used.bit_count()
            batch.groups = adapters + (adapters > 0)

    def _fail(self, slots: HostSlots) -> NoReturn:
        token = int(np.argmax(slots >= self.max_loras))
        raise ArgumentError(
            f"token_to_slot[{token}] is {slots[token]}; the runtime has slots 0 to "
            f"{self.max_loras - 1} (negative: no adapter)"
        )


def is_host_int32(value: Any) -> bool:
    """Whether ``check_array`` would accept it as int32 [n] of the host, told in a fraction of its
    time."""
    return (
        type(value) is np.ndarray
        and value.ndim == 1
        and value.dtype == INT32
        and value.flags.c_contiguous
    )


class SlotStaging(Protocol):
    """Brings batches to where steps read them, one after another."""

    def room(self) -> HostSlots:
        """Where the next batch's slots are written; waits until it is free."""

    def publish(self, tokens: int) -> None:
        """So many slots were written; the next ``take`` that runs brings them."""

    def withdraw(self) -> None:
        """The step of what was published last failed: from the next ``room`` on it is not taken."""

    def take(self, rows: int) -> None:
        """Enqueue on the current stream: the buffers' first ``rows`` rows become the next batch's
        slots, and padding. May be recorded, and takes a batch at each replay."""


class _DirectStaging:
    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._target = buffers.whole(SLOTS)
        self._slots = np.empty(buffers.max_tokens, np.int32)
        self._tokens: int | None = None

    def room(self) -> HostSlots:
        return self._slots

    def publish(self, tokens: int) -> None:
        self._tokens = tokens

    def withdraw(self) -> None:
        self._tokens = None

    def take(self, rows: int) -> None:
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return
        self._target[:tokens] = self._slots[:tokens]
        self._target[tokens:rows] = -1
        if tokens < rows:
            self._buffers.pad(tokens, rows)


class _PinnedStaging:
    def __init__(self, buffers: StepBuffers, stream: Any, depth: int) -> None:
        backend = buffers.backend
        self._backend, self._buffers, self._depth = backend, buffers, depth
        self._stream = as_stream("stream", stream)
        self._place_bytes = _HEAD_BYTES + -(-4 * buffers.max_tokens // 16) * 16
        # Behind the places a word where the kernel says which batch it took.
        memory = backend.host_buffer(depth * self._place_bytes + _HEAD_BYTES)
        memory[:] = 0
        places = memory[: depth * self._place_bytes].reshape(depth, self._place_bytes)
        # Memory views are read and written in a fraction of an array's time.
        self._heads = [place[:_HEAD_BYTES].view(np.uint64).data for place in places]
        self._rooms = [place[_HEAD_BYTES:].view(np.int32)[: buffers.max_tokens] for place in places]
        self._told = memory[depth * self._place_bytes :].view(np.uint64).data
        self._number, self._in_doubt = 0, False
        self._query = backend.xp.cuda.runtime.streamQuery
        with self._stream:
            self._taken = backend.zeros((1,), np.uint64)
        self._runs, self._num_runs, self._buffers_then = None, 0, -1
        ring = int(memory.ctypes.data)
        told = ring + depth * self._place_bytes
        slots = backend.address(buffers.whole(SLOTS))
        self._addresses = (backend.address(self._taken), ring, told, slots)

    def room(self) -> HostSlots:
        if self._in_doubt:
            self._settle()
        number = self._number + 1
        if number - self._told[0] > self._depth:
            self._wait_for(number - self._depth)
        return self._rooms[number % self._depth]

    def publish(self, tokens: int) -> None:
        self._number = number = self._number + 1
        head = self._heads[number % self._depth]
        head[1] = tokens
        head[0] = number

    def withdraw(self) -> None:
        self._in_doubt = True

    def take(self, rows: int) -> None:
        if self._buffers_then != self._buffers.count:
            self._note_runs()
        args = (
            *self._addresses,
            rows,
            self._depth,
            self._place_bytes,
            0 if self._runs is None else self._backend.address(self._runs),
            self._num_runs,
        )
        enqueue("step", "take_batch", _TYPES, (1,), _THREADS, args)

    def _note_runs(self) -> None:
        """Buffers are added while there is no graph, so none holds the former list's address."""
        runs = self._buffers.pad_runs()
        self._runs = self._backend.asarray(runs.view(np.uint8)) if len(runs) else None
        self._num_runs, self._buffers_then = len(runs), self._buffers.count

    def _settle(self) -> None:
        """A step failed: only the kernel knows whether it took the batch."""
        self._stream.synchronize()
        self._number = self._told[0]
        for head in self._heads:
            if head[0] > self._number:
                head[0] = 0
        self._in_doubt = False

    def _wait_for(self, number: int) -> None:
        """Until the batch was taken; looks at the stream for failures of the device."""
        stream = int(self._stream.ptr)
        with driver.outside_captures():
            status = _NOT_READY
            while self._told[0] < number:
                if status == 0:
                    raise GraphError("a batch was enqueued, but no step took it")
                status = self._query(stream)
                if status not in (0, _NOT_READY):
                    driver.check(status, "waiting for a step")


def make_staging(
    buffers: StepBuffers, stream: Any = None, depth: int = STAGING_DEPTH
) -> SlotStaging:
    """For the buffers' ``token_to_slot``; on a device, what takes batches runs on ``stream``, in
    any form, which must live until the last batch was taken."""
    if not buffers.backend.on_device:
        return _DirectStaging(buffers)
    return _PinnedStaging(buffers, stream, check_int("depth", depth, 1))
