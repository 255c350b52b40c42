"""``LoraRuntime``: adapters in slots, buffers, and steps through graphs, tied together.

    load(name, adapter) --> a slot that no step reads --> name serves from it at the next step
    step function (host's, over buffers) --> capture() --> step(token_to_slot): replay or eager

The parts do the work: ``SlotTable`` holds weights, ``SlotLeases`` says who serves from where,
``StepGraphs`` captures and replays. What is here is their order in time: a load writes on a stream
of its own into a slot that no step under way reads, the steps' stream waits for that write, then
the name moves. A step checks its slots, enqueues, and notes which slots it reads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.factors import Adapter
from cupylora.adapters.leases import SlotLeases
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import Arena, SlotTable
from cupylora.backend import ArrayBackend, open_backend
from cupylora.checks import check_array, check_int, check_type
from cupylora.errors import ArgumentError, GraphError
from cupylora.graphs.buckets import BatchKey, DispatchCounts
from cupylora.graphs.buffers import Pad, StepBuffers
from cupylora.graphs.capture import CudaRecorder, DirectRecorder, Recorder
from cupylora.graphs.fence import CudaFence, DirectFence, StepFence
from cupylora.graphs.manager import CapturedGraph, GraphOptions, StepFunction, StepGraphs
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.worklists import Array

__all__ = ["LoraRuntime", "RuntimeStep"]


@dataclass(frozen=True, slots=True)
class RuntimeStep:
    """One step that was enqueued.

    number: counted from 1; 0 for a batch of no tokens. key: of the graph replayed; None: eager.
    num_tokens: without padding. groups: as ``count_active_loras`` counts. generations: int64
    [max_loras], the load that each slot held when the step was enqueued; 0: none.
    """

    number: int
    key: BatchKey | None
    num_tokens: int
    groups: int
    generations: npt.NDArray[np.int64]


class LoraRuntime:
    """Adapters and steps of one model on one device.

    model, limits, dtype: as of a SlotTable. max_tokens: rows of the largest step. arena_bytes:
    device memory for weights. backend: "auto", "cuda", "numpy", or an ArrayBackend. graphs: how
    steps are served. stream: CuPy's, for all steps; left out: a new non-blocking one.

    ``recorder.active()`` is the context in which work goes to the steps' stream.

    Loads may come from any thread while another steps; two loads wait for one another. Raises
    CapacityError where memory lacks, GraphError for the legacy default stream.
    """

    def __init__(
        self,
        model: ModelShape,
        limits: LoraLimits,
        *,
        dtype: npt.DTypeLike,
        max_tokens: int,
        arena_bytes: int,
        backend: str | ArrayBackend = "auto",
        graphs: GraphOptions | None = None,
        stream: Any = None,
    ) -> None:
        backend = backend if isinstance(backend, ArrayBackend) else open_backend(backend)
        arena = Arena(arena_bytes, backend.xp)
        table = SlotTable(model, limits, dtype, xp=backend.xp, arena=arena)
        self._set_up(table, backend, max_tokens, graphs, stream)

    @classmethod
    def of_table(
        cls,
        table: SlotTable,
        backend: ArrayBackend,
        *,
        max_tokens: int,
        graphs: GraphOptions | None = None,
        stream: Any = None,
    ) -> LoraRuntime:
        """A runtime over a table that exists, filled on the current stream.

        What its slots hold serves by the adapters' names; from now on it is loaded through the
        runtime only. Raises ArgumentError for two slots of one name, and as the constructor does.
        """
        check_type("table", table, SlotTable)
        check_type("backend", backend, ArrayBackend)
        made = cls.__new__(cls)
        made._set_up(table, backend, max_tokens, graphs, stream)
        for slot, info in enumerate(table.slots):
            if info is not None:
                made.leases.adopt(slot, info.name)
        made._note_generations()
        return made

    def _set_up(
        self,
        table: SlotTable,
        backend: ArrayBackend,
        max_tokens: int,
        graphs: GraphOptions | None,
        stream: Any,
    ) -> None:
        backend.synchronize()  # what made the table went to the caller's stream, not to those below
        self.table, self.backend = table, backend
        self.graph_options = GraphOptions() if graphs is None else graphs
        check_type("graphs", self.graph_options, GraphOptions)
        self.recorder: Recorder
        self._fence: StepFence
        if backend.on_device:
            self.recorder = CudaRecorder(stream)
            self._fence = CudaFence(self.recorder.stream)
            self._copies = backend.xp.cuda.Stream(non_blocking=True)
        else:
            self.recorder, self._fence, self._copies = DirectRecorder(), DirectFence(), None
        with self.recorder.active():
            self.buffers = StepBuffers(backend, max_tokens)
            backend.synchronize()
        max_loras = table.limits.max_loras
        self.leases = SlotLeases(max_loras, self._fence)
        self._graphs: StepGraphs | None = None
        self._generations = np.zeros(max_loras, np.int64)
        self._lock, self._loading = threading.RLock(), threading.RLock()

    # --- adapters ----------------------------------------------------------------------------

    @property
    def loaded(self) -> Mapping[str, int]:
        """Slot of every adapter that serves."""
        with self._lock:
            names = self.leases.names
        return {name: slot for slot, name in enumerate(names) if name is not None}

    def load(
        self,
        name: str,
        adapter: Adapter | str | Path,
        *,
        keep: Sequence[str] = (),
        pin: bool | None = None,
    ) -> int:
        """Let ``adapter`` (or the PEFT directory) serve as ``name`` from the next step on.

        It goes into a free slot, else into that of the adapter unused longest, which is unloaded;
        never into one that work in flight reads (the call waits for that), and never of a pinned
        adapter or of one in ``keep``. Where ``name`` serves already, the former version does so
        until the new one is in place. pin: whether its slot may be taken by other loads; None: as
        it was, no at first. Returns the slot.

        Raises as ``read_adapter`` and ``SlotTable.load`` do, CapacityError if there is no slot;
        what served before goes on serving then.
        """
        check_type("name", name, str)
        with self._loading:
            if not isinstance(adapter, Adapter):
                adapter = read_adapter(adapter, self.table.model, name=name)
            adapter.check(self.table.model, self.table.limits)
            with self._lock:
                place = self.leases.reserve(name, keep)
            try:
                self._write(place.slot, adapter)
            except BaseException:
                with self._lock:
                    self.leases.give_back(place)
                raise
            with self._lock:
                self.leases.publish(place, name)
                if pin is not None:
                    self.leases.pin(name, pin)
                self._note_generations()
        return place.slot

    def unload(self, name: str) -> None:
        """``name`` serves no more from the next step on. Its slot and room are taken again once
        the steps that read them are over. Raises ArgumentError if it is not loaded."""
        with self._loading, self._lock:
            self.leases.drop(name)
            self._note_generations()

    def slots_of(self, names: Sequence[str | None]) -> npt.NDArray[np.int32]:
        """Slot of each name, -1 for None, for a ``token_to_slot`` or a request's tokens.

        Raises CapacityError, naming them, for more adapters than can serve together, ArgumentError
        for one that is not loaded.
        """
        with self._lock:
            wanted = [name for name in names if name is not None]
            self.leases.check_room(wanted)
            slots = (-1 if name is None else self.leases.require(name) for name in names)
            return np.fromiter(slots, np.int32, len(names))

    def _write(self, slot: int, adapter: Adapter) -> None:
        """Weights and table rows of ``slot``, which no step reads when this begins; the steps that
        are enqueued when this has returned read the new ones."""
        self._evict_free()
        self.leases.wait(slot)
        with self._copying():
            self.table.load(slot, adapter)

    def _evict_free(self) -> None:
        """Give the room of adapters that serve no more back to the arena."""
        with self._lock:
            free = self.leases.free_slots()
        with self._copying():
            for slot in free:
                if self.table.slots[slot] is not None:
                    self.table.evict(slot)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Writes go to the copy stream; the steps' stream waits for them."""
        if self._copies is None:
            yield
            return
        with self._copies:
            yield
            written = self._copies.record()
        with self._lock:
            self.recorder.stream.wait_event(written)

    def _note_generations(self) -> None:
        """A new array, since steps before keep theirs."""
        slots = zip(self.table.slots, self.leases.serving, strict=True)
        self._generations = np.array(
            [info.generation if info is not None and serves else 0 for info, serves in slots],
            np.int64,
        )

    # --- steps -------------------------------------------------------------------------------

    def add_buffer(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        layers: int | None = None,
        pad: Pad | None = None,
    ) -> Array:
        """A buffer that steps read or write, as ``StepBuffers.add``. Raises GraphError once
        something was captured."""
        with self._lock, self.recorder.active():
            return self.buffers.add(name, shape, dtype, layers=layers, pad=pad)

    def set_step(self, function: StepFunction) -> None:
        """What a step does; see ``cupylora.graphs.manager``. Raises GraphError while graphs of a
        former function exist."""
        with self._lock:
            if self._graphs is not None and self._graphs.graphs:
                raise GraphError("graphs of the former step function exist; release_graphs() first")
            self._graphs = StepGraphs(
                function,
                self.buffers,
                max_loras=self.table.limits.max_loras,
                options=self.graph_options,
                recorder=self.recorder,
            )

    @property
    def graphs(self) -> StepGraphs:
        """Captured graphs and their counts. Raises ArgumentError before ``set_step``."""
        if self._graphs is None:
            raise ArgumentError("there is no step function yet; call set_step first")
        return self._graphs

    def capture(
        self, progress: Callable[[CapturedGraph, int], object] | None = None
    ) -> tuple[CapturedGraph, ...]:
        """Capture every key of buckets and cases; as ``StepGraphs.capture``."""
        with self._lock:
            return self.graphs.capture(progress=progress)

    def release_graphs(self) -> None:
        """Drop all graphs once their replays are over; buffers may be added again."""
        with self._lock:
            self.graphs.release()

    def step(
        self,
        token_to_slot: npt.NDArray[np.int32],
        *,
        num_reqs: int | None = None,
        uniform: bool = False,
    ) -> RuntimeStep:
        """Enqueue one step over the buffers' first T rows, and return at once.

        token_to_slot: int32 [T] in host memory, -1 for no adapter (``slots_of`` has the others'
        numbers). Results are in the buffers when the steps' stream has come that far.

        Raises ArgumentError for a slot that no adapter serves from or that does not exist, and for
        what device work of an earlier step found wrong; CapacityError for more than max_tokens
        tokens; nothing is enqueued then.
        """
        with self._lock:
            graphs = self.graphs
            self.backend.check_status()
            batch = graphs.read(token_to_slot)
            self.leases.require_serving(batch.used)
            number = 0
            try:
                made = graphs.run(batch, num_reqs=num_reqs, uniform=uniform)
            finally:  # also where it failed halfway: what was enqueued reads these slots
                if batch.num_tokens:
                    number = self._fence.submit()
                    self.leases.use(batch.used, number)
            return RuntimeStep(number, made.key, made.num_tokens, made.groups, self._generations)

    def step_requests(
        self, slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], **options: Any
    ) -> RuntimeStep:
        """``step`` for requests in a row: int32 [requests] slots and tokens of each.

        Raises ArgumentError as ``step`` does, and for a length below 0.
        """
        for name, array in (("slots", slots), ("lengths", lengths)):
            check_array(name, array, dtype=np.dtype(np.int32), shape=(None,), on_device=False)
        if len(slots) != len(lengths):
            raise ArgumentError(f"slots has {len(slots)} requests, lengths {len(lengths)}")
        if len(lengths) and int(lengths.min()) < 0:
            request = int(np.argmin(lengths))
            raise ArgumentError(f"lengths[{request}] is {lengths[request]}; 0 or more is needed")
        options.setdefault("num_reqs", len(slots))
        return self.step(np.repeat(slots, lengths), **options)

    def counts(self) -> DispatchCounts:
        """Which graphs served how many steps, what ran eagerly and why."""
        with self._lock:
            return self.graphs.counts()

    def synchronize(self, step: int | None = None) -> None:
        """Wait until ``step``, or all steps, are over; raise what device work found wrong."""
        with self._lock:
            last = self._fence.enqueued
            number = last if step is None else check_int("step", step, 0, last)
            self._fence.wait(number)
            self.backend.check_status()
