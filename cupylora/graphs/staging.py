"""A batch's ``token_to_slot`` on its way from host memory to the buffer that steps read.

    host's array --> a place of the ring (pinned): checked, counted, padded with -1, its tokens
                          |                        ahead of it
                          v   one copy on the steps' stream
                     step buffers: tokens, slots --> padding of other buffers, part of the step

In: the host's array, one slot a token. Out: what the batch holds (groups of rows, slots used), and
the buffers' first rows as the step needs them.

The copy reads its place after this returned: were that written meanwhile, the next step's tenants
would reach this one's rows. The fence's events, one a step, guard the places too. The place of step
n is n modulo depth + 1, and written once the fence has given n - 1. Then step n - 1 - depth, which
had it before, is over. A copy that no step's number came to stand for (its step failed before that,
or it was a warm-up) is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from cupylora.adapters.leases import SlotSet
from cupylora.checks import INT32, check_array, check_int, check_max_loras
from cupylora.compiler import driver
from cupylora.compiler.loader import load_kernel
from cupylora.errors import ArgumentError, CapacityError, GraphError
from cupylora.graphs.buffers import BATCH_HEAD, SLOTS, StepBuffers
from cupylora.graphs.fence import StepFence
from cupylora.interop.convert import borrow
from cupylora.interop.streams import as_stream
from cupylora.ops._device import enqueue
from cupylora.text import counted

__all__ = ["BatchSlots", "SlotReader", "SlotStaging", "is_host_int32", "make_staging"]

HostSlots = npt.NDArray[np.int32]

_PROGRAM, _KERNEL = "step", "pad_rows"
_TYPES = ("ptr", "u32", "ptr")
_THREADS = 256
_PIECE = 16384
_MOST_PIECES = 64
"""Bytes that a block sets, until so many share a run of rows."""


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
            self._content = content if self._count(slots) else slots.tobytes()
        return self._batch

    def _count(self, slots: HostSlots) -> bool:
        """Note what a batch holds; negative numbers other than -1 become that. Whether there were
        none."""
        batch, tokens = self._batch, len(slots)
        batch.num_tokens, batch.used, batch.groups = tokens, 0, 0
        if not tokens:
            return True
        if slots.item(slots.argmax()) >= self.max_loras:
            self._fail(slots)
        plain: bool = slots.item(slots.argmin()) >= -1
        if not plain:
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
        return plain

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
        """Where the next batch's slots are written, which nothing in flight reads."""

    def send(self, tokens: int, rows: int) -> None:
        """Enqueue on the steps' stream: the buffers' first ``rows`` slots become those ``tokens``
        that were written to the room, then -1. Raises GraphError where the driver refuses."""

    def prepare(self) -> None:
        """Do on the current stream what ``pad`` must have had done to be recorded."""

    def pad(self, rows: int) -> None:
        """Enqueue on the current stream: rows behind the batch's, up to ``rows``, are set in the
        buffers that have a ``pad``; nothing where none has. May be recorded: a replay goes by the
        tokens of the batch sent last."""


class _DirectStaging:
    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._target = buffers.whole(SLOTS)
        self._slots = np.empty(buffers.max_tokens, np.int32)
        self._tokens = buffers.max_tokens

    def room(self) -> HostSlots:
        return self._slots

    def send(self, tokens: int, rows: int) -> None:
        self._target[:tokens] = self._slots[:tokens]
        self._target[tokens:rows] = -1
        self._tokens = tokens

    def prepare(self) -> None:
        pass

    def pad(self, rows: int) -> None:
        if self._tokens < rows:
            self._buffers.pad(self._tokens, rows)


class _PinnedStaging:
    def __init__(self, buffers: StepBuffers, stream: Any, fence: StepFence) -> None:
        backend = buffers.backend
        self._backend, self._buffers, self._fence = backend, buffers, fence
        self._stream = as_stream("stream", stream)
        self._depth = fence.depth + 1
        width = BATCH_HEAD + -(-buffers.max_tokens // 4) * 4
        ring = backend.host_buffer(self._depth * width * 4).view(np.int32)
        ring[:] = 0
        places = ring.reshape(self._depth, width)
        # Memory views are written in a fraction of an array's time.
        self._heads = [place[:BATCH_HEAD].data for place in places]
        self._rooms = [place[BATCH_HEAD : BATCH_HEAD + buffers.max_tokens] for place in places]
        self._addresses = [int(place.ctypes.data) for place in places]
        self._number = self._sent = 0
        runtime = backend.xp.cuda.runtime
        self._refused = runtime.CUDARuntimeError
        # The runtime's function, unlike the driver's, makes the device's context current in a new
        # thread.
        self._copy = partial(runtime.memcpyAsync, backend.address(buffers.batch))
        self._how = runtime.memcpyHostToDevice, int(self._stream.ptr)
        self._runs: Any = None
        self._num_runs, self._row_bytes, self._buffers_then = 0, 0, -1

    def room(self) -> HostSlots:
        self._number = number = self._fence.enqueued + 1
        if number == self._sent:
            self._settle()
        return self._rooms[number % self._depth]

    def send(self, tokens: int, rows: int) -> None:
        number = self._number
        place = number % self._depth
        if tokens < rows:
            self._rooms[place][tokens:rows] = -1
        self._heads[place][0] = tokens
        self._sent = number  # first: an interruption may come behind the copy
        try:
            self._copy(self._addresses[place], 4 * (BATCH_HEAD + rows), *self._how)
        except self._refused as error:
            raise GraphError(f"the copy of a batch's slots failed: {error}") from error

    def prepare(self) -> None:
        """Buffers are added while there is no graph, so none holds the former list's address."""
        if self._buffers_then == self._buffers.count:
            return
        runs = self._buffers.pad_runs()
        self._runs = None
        if len(runs):
            load_kernel(_PROGRAM, _KERNEL)
            self._runs = self._backend.asarray(runs.view(np.uint8))
            self._row_bytes = int(runs["row_bytes"].max())
        self._num_runs, self._buffers_then = len(runs), self._buffers.count

    def pad(self, rows: int) -> None:
        self.prepare()
        if self._runs is None:
            return
        pieces = min(_MOST_PIECES, -(-rows * self._row_bytes // _PIECE))
        address = self._backend.address
        args = address(self._buffers.batch), rows, address(self._runs)
        enqueue(_PROGRAM, _KERNEL, _TYPES, (self._num_runs, pieces), _THREADS, args)

    def _settle(self) -> None:
        """The place's last copy may be in flight, and no event tells."""
        with driver.outside_captures():
            self._stream.synchronize()
        self._sent = 0


def make_staging(buffers: StepBuffers, stream: Any, fence: StepFence) -> SlotStaging:
    """For the buffers' ``token_to_slot``. On a device, copies go to ``stream``, in any form, which
    must live until the last call; ``fence`` numbers the steps there."""
    if not buffers.backend.on_device:
        return _DirectStaging(buffers)
    return _PinnedStaging(buffers, stream, fence)
