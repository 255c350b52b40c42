"""``LoraRuntime``: adapters in slots, buffers, and steps through graphs, tied together.

    load(name, adapter) --> room, then a slot that no step reads --> name serves at the next step
    step function (host's, over buffers) --> capture() --> step(token_to_slot): replay or eager

The parts do the work: ``SlotTable`` holds weights, ``SlotLeases`` says who serves from where,
``StepGraphs`` captures and replays. What is here is their order in time: a load writes on a stream
of its own into room that is free, then switches a slot that no step under way reads, the steps'
stream waits for that, then the name moves. A step checks its slots, enqueues, and notes which slots
it reads.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupylora.adapters.caching import CacheWriter
from cupylora.adapters.device_factors import FactorArrays
from cupylora.adapters.factors import Adapter
from cupylora.adapters.importing import Importer
from cupylora.adapters.leases import SlotLeases, SlotSet, slots_in
from cupylora.adapters.packed import PackedAdapter
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import Arena, SlotTable, StoredAdapter
from cupylora.adapters.store import AdapterStore, Arrival
from cupylora.backend import ArrayBackend, open_backend
from cupylora.checks import INT32, check_array, check_int, check_type
from cupylora.compiler import driver
from cupylora.errors import ArgumentError, CapacityError, GraphError, RoomError
from cupylora.graphs.buckets import BatchKey, DispatchCounts
from cupylora.graphs.buffers import Pad, StepBuffers
from cupylora.graphs.capture import CudaRecorder, DirectRecorder, Recorder, Recording
from cupylora.graphs.fence import CudaFence, DirectFence, StepFence
from cupylora.graphs.manager import CapturedGraph, GraphOptions, StepFunction, StepGraphs
from cupylora.graphs.staging import is_host_int32
from cupylora.interop.convert import borrow
from cupylora.interop.lifetimes import release_finished
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.text import counted, quoted
from cupylora.worklists import Array

__all__ = ["LoraRuntime", "RuntimeStep"]

Generations = npt.NDArray[np.int64]

_NO_THREAD = 0
"""The number of none."""


class RuntimeStep(NamedTuple):
    """One step that was enqueued.

    number: counted from 1; 0 for a batch of no tokens. key: of the graph replayed; None: eager.
    num_tokens: without padding. groups: as ``count_active_loras`` counts. generations: as
    ``LoraRuntime.generations`` when the step was enqueued.
    """

    number: int
    key: BatchKey | None
    num_tokens: int
    groups: int
    generations: Generations


_Brought = tuple[StoredAdapter, str | Path | None]
"""An adapter in free room; and where its files are, if its content is not in the host cache yet."""


class LoraRuntime:
    """Adapters and steps of one model on one device.

    model, limits, dtype: as of a SlotTable. max_tokens: rows of the largest step. arena_bytes:
    device memory for weights; a new version, or an adapter that takes another's slot, is written
    before the old one goes, so leave room for one adapter more than slots, or for two where ranks
    are mixed (gaps between blocks). host_cache_bytes: host memory (pinned, with CUDA) for packed
    adapters, so that ``load(name)`` needs no file, and room for one more while one is loaded; None:
    no cache. backend: "auto", "cuda", "numpy", or an ArrayBackend. graphs: how steps are served.
    stream: for all steps, in any form (see ``use_stream``). An object is kept; the stream, given by
    its number above all, must live until the last step, load or other call here is over.
    ``synchronize``, ``close`` and the runtime's end wait for its work without touching it. Left
    out: a new non-blocking one, which waits for no other (write buffers inside ``on_stream()``) and
    to which work of loads gives way.

    Loads may come from any thread while another steps; two loads wait for one another. Raises
    ArgumentError for options that do not fit, CapacityError where memory lacks, GraphError for the
    legacy default stream.
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
        host_cache_bytes: int | None = None,
    ) -> None:
        backend = backend if isinstance(backend, ArrayBackend) else open_backend(backend)
        self._begin(backend, max_tokens, graphs, stream)
        with self.on_stream():  # so that memory goes back to the steps' part of CuPy's pool
            arena = Arena(arena_bytes, backend.xp)
            table = SlotTable(model, limits, dtype, xp=backend.xp, arena=arena)
        self._finish(table, host_cache_bytes)

    @classmethod
    def of_table(
        cls,
        table: SlotTable,
        backend: ArrayBackend,
        *,
        max_tokens: int,
        graphs: GraphOptions | None = None,
        stream: Any = None,
        host_cache_bytes: int | None = None,
    ) -> LoraRuntime:
        """A runtime over a table that exists, filled on the current stream.

        What its slots hold serves by the adapters' names; from now on it is loaded through the
        runtime only. Raises ArgumentError for two slots of one name, and as the constructor does.
        """
        check_type("table", table, SlotTable)
        check_type("backend", backend, ArrayBackend)
        made = cls.__new__(cls)
        made._begin(backend, max_tokens, graphs, stream)
        made._finish(table, host_cache_bytes)
        for slot, info in enumerate(table.slots):
            if info is not None:
                made.leases.adopt(slot, info.name)
        made._note_generations()
        return made

    def _begin(
        self, backend: ArrayBackend, max_tokens: int, graphs: GraphOptions | None, stream: Any
    ) -> None:
        self.backend = backend
        self.graph_options = GraphOptions() if graphs is None else graphs
        check_type("graphs", self.graph_options, GraphOptions)
        self.graph_options.dispatch.buckets(max_tokens)
        self.recorder: Recorder
        self._fence: StepFence
        if backend.on_device:
            self.recorder = CudaRecorder(stream)
            self._fence = CudaFence(self.recorder.stream)
            self._copies = backend.xp.cuda.Stream(non_blocking=True)
        elif stream is not None:
            raise ArgumentError("a stream was given, but the numpy backend has none; leave it out")
        else:
            self.recorder, self._fence, self._copies = DirectRecorder(), DirectFence(), None
        backend.synchronize()  # what the caller enqueued went to the caller's stream
        with self.on_stream():
            self.buffers = StepBuffers(backend, max_tokens)

    def _finish(self, table: SlotTable, host_cache_bytes: int | None) -> None:
        with self.on_stream():
            self.backend.synchronize()
        self.table = table
        self.store: AdapterStore | None = None
        if host_cache_bytes is not None:
            check_int("host_cache_bytes", host_cache_bytes, 0)
            # What is rounded up for each adapter comes on top.
            room = self.backend.host_pool(host_cache_bytes + host_cache_bytes // 16)
            self.store = AdapterStore(table, budget_bytes=host_cache_bytes, allocate=room)
        # On a CPU its way is longer than the host's own.
        self._importer = Importer(self.backend) if self.backend.on_device else None
        self._cache_writer = None
        if self.store is not None:
            self._cache_writer = CacheWriter(self.store, self._read_context())
        self._loader: ThreadPoolExecutor | None = None
        self.leases = SlotLeases(table.limits.max_loras, self._fence)
        self._graphs: StepGraphs | None = None
        self._note_generations()
        self._lock, self._loading = threading.RLock(), threading.RLock()
        self._in_load = self._closed = False
        self._inside = _NO_THREAD
        self._loader_threads: set[int] = set()
        # Memory must not go back to CuPy's pool while work in flight uses it.
        self._close = weakref.finalize(self, _wait_for_all, self._fence)
        self._close.atexit = False

    # --- adapters ----------------------------------------------------------------------------

    @property
    def loaded(self) -> Mapping[str, int]:
        """Slot of every adapter that serves."""
        with self._lock:
            names = self.leases.names
        return {name: slot for slot, name in enumerate(names) if name is not None}

    @property
    def generations(self) -> Generations:
        """int64 [max_loras], read-only: the load that each slot holds, 0 for none; no two loads of
        a table have the same number. A new array at every change."""
        return self._generations

    def load(
        self,
        name: str,
        adapter: Adapter | str | Path | None = None,
        *,
        keep: Sequence[str] = (),
        pin: bool | None = None,
        progress: Callable[[str], object] | None = None,
    ) -> int:
        """Let ``adapter`` (or the PEFT directory) serve as ``name`` from the next step on.

        It goes into a free slot, else into that of the adapter unused longest, which is unloaded;
        never into one that work in flight reads (the call waits for that), and never of a pinned
        adapter or of one in ``keep``. Where ``name`` serves already, the former version does so
        until the new one is in place. With a host cache the packed adapter is kept there (with
        CUDA it is copied there afterwards, while it serves), and ``adapter`` may be left out for
        one that is. pin: whether its slot may be taken by other loads; None: as it was, no at
        first. progress: told what is being done ("reading", "packing", "copying", "placing").
        Returns the slot.

        Raises as ``read_adapter`` and ``SlotTable.load`` do, CapacityError if there is no slot or
        no room; what served before goes on serving then.
        """
        say = self._check_load(name, adapter, keep, pin, progress)
        _check_adapter(adapter)
        with self._loading_alone("load"):
            return self._load(name, lambda: self._load_to_room(name, adapter, say), keep, pin, say)

    def _load(
        self,
        name: str,
        bring: Callable[[], _Brought],
        keep: Sequence[str],
        pin: bool | None,
        say: Callable[[str], object] = lambda _: None,
    ) -> int:
        """Place what ``bring`` wrote to free room; undo all of it where something fails."""
        stored, arrival = None, None
        restoring = contextlib.nullcontext() if self.store is None else self.store.restoring(name)
        try:
            with restoring:
                stored, path = bring()
                say("placing")
                arrival = None if path is None else self._expect(name, stored, path)
                slot = self._place(name, stored, keep, pin)
        except BaseException:
            if arrival is not None:
                arrival.close()
            if stored is not None and stored.blocks is not None:
                self.table.discard(stored)
            raise
        # Not before the former content may leave the cache: it would take room beside it.
        if arrival is not None and self._cache_writer is not None:
            self._cache_writer.begin(arrival)
        return slot

    def _expect(self, name: str, stored: StoredAdapter, path: str | Path) -> Arrival | None:
        """Tell the host cache of what is to be copied there from the device."""
        if self.store is None:
            return None
        reader = self.table.reader(stored)
        try:
            return self.store.expect(name, path, reader)
        except BaseException:
            reader.close()
            raise

    def load_arrays(
        self,
        name: str,
        factors: Mapping[tuple[int, str], FactorArrays],
        *,
        keep: Sequence[str] = (),
        pin: bool | None = None,
    ) -> int:
        """``load`` of factors that are arrays on the device, as a training loop has them.

        They are copied, never through the host or a file, and may change when this returns. What
        computes them is to be on the current stream. Raises as ``SlotTable.store_arrays`` and
        ``load`` do.
        """
        self._check_load(name, factors, keep, pin, None)
        if not isinstance(factors, Mapping):
            raise ArgumentError(f"factors is a {type(factors).__name__}; a mapping is needed")
        given = dict(factors)
        with self._loading_alone("load_arrays"):
            self.backend.synchronize()
            write = partial(self.table.store_arrays, name, given)
            return self._load(name, lambda: (self._stored(write), None), keep, pin)

    def load_async(
        self,
        name: str,
        adapter: Adapter | str | Path | None = None,
        *,
        keep: Sequence[str] = (),
        pin: bool | None = None,
        progress: Callable[[str], object] | None = None,
    ) -> Future[int]:
        """``load`` in a thread of the runtime's own, one at a time in the order asked for.

        Steps go on meanwhile. The future's result is the slot, its exception what ``load`` raises;
        arguments that are none raise here, and GraphError after ``close``. ``cancel`` works until
        the load begins.
        """
        self._check_load(name, adapter, keep, pin, progress)
        _check_adapter(adapter)
        with self._lock:
            if self._closed:
                raise GraphError("the runtime is closed; nothing is loaded in the background")
            if self._loader is None:
                # A thread keeps its initializer, which must not keep the runtime.
                note = partial(_note_thread, self._loader_threads)
                self._loader = ThreadPoolExecutor(
                    1, thread_name_prefix="cupylora-load", initializer=note
                )
            return self._loader.submit(
                self.load, name, adapter, keep=tuple(keep), pin=pin, progress=progress
            )

    def ensure(self, names: Sequence[str | None]) -> npt.NDArray[np.int32]:
        """``slots_of`` after loading, from the host cache, what does not serve yet.

        Adapters that the batch does not need are unloaded where slots or room lack, those unused
        longest first. Raises as ``load`` and ``slots_of`` do; what was loaded or unloaded before
        the failure stays so.
        """
        wanted = [_check_name(name) for name in _check_names("names", names) if name is not None]
        with self._lock:
            self.leases.check_room(wanted)
            missing = [name for name in dict.fromkeys(wanted) if name not in self.loaded]
        if not missing:
            return self.slots_of(names)
        self._refuse_inside("ensure")
        with self._loading_alone("ensure"):
            for name in missing:
                if name not in self.loaded:
                    say = self._check_load(name, None, wanted, None, None)
                    self._load(
                        name, partial(self._load_to_room, name, None, say, wanted), wanted, None
                    )
            return self.slots_of(names)

    def _check_load(
        self, name: Any, adapter: Any, keep: Any, pin: Any, progress: Any
    ) -> Callable[[str], object]:
        _check_name(name)
        for kept in _check_names("keep", keep):
            _check_name(kept)
        if pin is not None:
            check_type("pin", pin, bool)
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress is a {type(progress).__name__}; a function is needed")
        if adapter is None and self.store is None:
            raise ArgumentError(
                f"adapter is left out for {name!r}, but there is no host cache to find it in; "
                "load it by its path, or make the runtime with host_cache_bytes"
            )
        self._refuse_inside("load")
        return progress or (lambda _: None)

    def _load_to_room(
        self,
        name: str,
        adapter: Adapter | str | Path | None,
        say: Callable[[str], object],
        staying: Sequence[str] | None = None,
    ) -> _Brought:
        """An adapter in free room: from the host cache, or by way of it where there is one.
        staying: as in ``_stored``."""
        content: Adapter | PackedAdapter | str | Path | None = adapter
        if content is None and self.store is not None:
            content = self.store.find(name)
        if isinstance(content, str | Path) and self._importer is not None:
            write = partial(self._importer.store, content, self.table, name=name, say=say)
            return self._stored(write, staying), content
        ready = content if isinstance(content, PackedAdapter) else self._read(name, content, say)
        say("copying")
        return self._stored(lambda: self.table.store(ready), staying), None

    def _read(
        self, name: str, adapter: Adapter | str | Path | None, say: Callable[[str], object]
    ) -> Adapter | PackedAdapter:
        """An adapter in host memory, kept in the host cache where there is one."""
        if adapter is None:  # ``_check_load`` has seen to it
            raise ArgumentError("adapter is left out")
        if self.store is not None:
            return self.store.put(name, adapter, say)
        if isinstance(adapter, Adapter):
            return replace(adapter, name=name)
        say("reading")
        table = self.table
        return read_adapter(adapter, table.model, name=name, limits=table.limits)

    def _read_context(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """For copies to the host cache: the device, and a stream that no load or step waits for;
        memory is pinned for them, which must void no capture. It keeps nothing of this object
        alive."""
        if not self.backend.on_device:
            return contextlib.nullcontext
        on_device, stream = self.recorder.on_device, self.backend.xp.cuda.Stream(non_blocking=True)

        @contextlib.contextmanager
        def entering() -> Iterator[None]:
            with on_device(), driver.outside_captures(), stream:
                yield

        return entering

    def unload(self, name: str) -> None:
        """``name`` serves no more from the next step on. Its slot and room are taken again once
        the steps that read them are over. Raises ArgumentError if it is not loaded."""
        _check_name(name)
        self._refuse_inside("unload")
        with self._lock:
            self.leases.drop(name)
            self._note_generations()

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter's slot from being taken by other loads, or no longer. Raises
        ArgumentError if it is not loaded."""
        _check_name(name)
        check_type("pinned", pinned, bool)
        with self._lock:
            self.leases.pin(name, pinned)

    def slots_of(self, names: Sequence[str | None]) -> npt.NDArray[np.int32]:
        """Slot of each name, -1 for None, for a ``token_to_slot`` or a request's tokens.

        They hold until the next load or unload. Where another thread may load in between, give
        ``step`` the ``generations`` seen before, pin the adapters, or use ``step_names``.
        Raises CapacityError, naming them, for more adapters than can serve together, ArgumentError
        for one that is not loaded.
        """
        _check_names("names", names)
        with self._lock:
            wanted = [_check_name(name) for name in names if name is not None]
            self.leases.check_room(wanted)
            slots = (-1 if name is None else self.leases.require(name) for name in names)
            return np.fromiter(slots, np.int32, len(names))

    def _stored(
        self, write: Callable[[], StoredAdapter], staying: Sequence[str] | None = None
    ) -> StoredAdapter:
        """Written to free room, that of adapters that serve no more included: once the steps that
        read them are over, if there is no other. staying: adapters that are not unloaded to make
        room, where others may be; None: none is."""
        while True:
            self._evict_free()
            try:
                return self._copied(write)
            except RoomError:
                if not self._more_room(staying):
                    raise

    def _more_room(self, staying: Sequence[str] | None) -> bool:
        """Whether something can be freed that could not before."""
        with self._lock:
            reading = self.leases.unnamed_steps()
        if not reading:
            # What was to go may have been read, until just now even.
            waited = self._cache_writer is not None and self._cache_writer.finish()
            if self.table.collect() or waited:
                return True
            with self._lock:
                name = None if staying is None else self.leases.idle_longest(staying)
                if name is None:
                    return False
                self.leases.drop(name)
                self._note_generations()
                return True
        self._fence.wait(max(reading))
        return True

    def _copied(self, write: Callable[[], StoredAdapter]) -> StoredAdapter:
        """Written, and the copies over: what they read may go or change afterwards.

        No step waits for them: none reads this room before ``_place``.
        """
        if self._copies is None:
            return write()
        with self._copies:
            stored = write()
            self._copies.synchronize()
        return stored

    def _place(
        self, name: str, stored: StoredAdapter, keep: Sequence[str], pin: bool | None
    ) -> int:
        """Switch a slot that no step reads to what was stored, and the name to the slot."""
        place = None
        try:
            with self._lock:
                place = self.leases.reserve(name, keep)
                read_by = self.leases.last_step(place.slot)
            self._fence.wait(read_by)
            with self._copying():
                self.table.place(place.slot, stored)
            with self._lock:
                self.leases.publish(place, name)
                if pin is not None:
                    self.leases.pin(name, pin)
                self._note_generations()
        finally:
            with self._lock:
                if place is not None and self.leases.is_open(place):
                    untouched = stored.blocks is not None
                    (self.leases.give_back if untouched else self.leases.abandon)(place)
                self._note_generations()  # also where an interrupt came before it
        return place.slot

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
        with self._lock:  # the steps' stream may be in a capture, which must not wait
            if self._closed:  # or be gone
                written.synchronize()
            else:
                self.recorder.stream.wait_event(written)

    def _note_generations(self) -> None:
        """A new array, since steps before keep theirs."""
        slots = zip(self.table.slots, self.leases.serving, strict=True)
        found = [info.generation if info is not None and serves else 0 for info, serves in slots]
        self._generations = np.array(found, np.int64)
        self._generations.flags.writeable = False

    # --- steps -------------------------------------------------------------------------------

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the steps' stream is CuPy's current one: for what fills and reads buffers."""
        return self.recorder.active()

    def add_buffer(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        layers: int | None = None,
        pad: Pad | None = None,
        array: Array | None = None,
    ) -> Array:
        """A buffer that steps read or write, as ``StepBuffers.add``: new, or the host's ``array``.
        Raises GraphError once something was captured."""
        with self._lock, self.on_stream():
            return self.buffers.add(name, shape, dtype, layers=layers, pad=pad, array=array)

    def set_step(self, function: StepFunction) -> None:
        """What a step does; see ``cupylora.graphs.manager``.

        Waits for what the current stream has to do, such as making the layers that the function
        uses. Raises ArgumentError for what is no function, GraphError while graphs of a former one
        exist.
        """
        self._refuse_inside("set_step")
        with self._lock:
            self._require_open()
            if self.captured:
                raise GraphError("graphs of the former step function exist; release_graphs() first")
            self.backend.synchronize()
            self._fence.wait(self._fence.enqueued)  # they read the former one's pinned memory
            self._graphs = StepGraphs(
                function,
                self.buffers,
                max_loras=self.table.limits.max_loras,
                options=self.graph_options,
                recorder=self.recorder,
                fence=self._fence,
                lock=self._lock,
            )

    @property
    def captured(self) -> tuple[CapturedGraph, ...]:
        """The graphs there are, in the order of capture."""
        return () if self._graphs is None else self._graphs.graphs

    def recording(self, key: BatchKey) -> Recording:
        """The graph of ``key``, to look into it. Raises GraphError if there is none."""
        return self._require_graphs().recording(key)

    def capture(
        self,
        keys: Sequence[BatchKey] | None = None,
        progress: Callable[[CapturedGraph, int], object] | None = None,
    ) -> tuple[CapturedGraph, ...]:
        """Capture ``keys``, or every key of buckets and cases; as ``StepGraphs.capture``."""
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress is a {type(progress).__name__}; a function is needed")
        with self._entering("capture"):
            try:
                return self._require_graphs().capture(keys, progress)
            finally:
                with self.on_stream():  # no step's number stands for the warm-ups
                    self.backend.synchronize()

    def release_graphs(self) -> None:
        """Drop all graphs once their replays are over; buffers may be added again."""
        with self._entering("release_graphs"):
            self._require_graphs().release()

    def step(
        self,
        token_to_slot: npt.NDArray[np.int32],
        *,
        as_of: Generations | None = None,
        num_reqs: int | None = None,
        uniform: bool = False,
    ) -> RuntimeStep:
        """Enqueue one step over the buffers' first T rows, and return at once.

        token_to_slot: int32 [T] in host memory, -1 for no adapter (``slots_of`` has the others'
        numbers); an array of any library. as_of: ``generations`` as they were when slots were
        looked up: refuses a step that would find another adapter there. num_reqs, uniform: as in
        ``BatchKey``. Results are in the buffers when the steps' stream has come that far.

        Raises ArgumentError for a slot that no adapter serves from, that does not exist or that
        holds another load than ``as_of`` says, and for what device work of an earlier step found
        wrong; CapacityError for more than max_tokens tokens; nothing is enqueued then.
        """
        if num_reqs is not None or uniform:
            _check_requests(num_reqs, uniform)
        with self._lock:
            graphs = self._require_graphs()
            if self._inside:
                raise GraphError("step was called from inside a step or a capture")
            self.backend.check_status()
            batch = graphs.read(token_to_slot)
            tokens, used, groups = batch.num_tokens, batch.used, batch.groups
            self.leases.require_serving(used)
            if as_of is not None:
                self._require_same(used, as_of)
            number, recorder = 0, self.recorder
            before = recorder.enter_device()
            self._inside = threading.get_ident()
            try:
                if tokens:  # ahead: an interrupt may come behind what reads these slots
                    self.leases.use(used, self._fence.enqueued + 1)
                key = graphs.run(batch, num_reqs=num_reqs, uniform=uniform)
            finally:  # also where it failed halfway: what was enqueued reads these slots
                self._inside = _NO_THREAD
                if tokens:
                    number = self._fence.submit()
                if before is not None:
                    recorder.leave_device(before)
            return RuntimeStep(number, key, tokens, groups, self._generations)

    def step_requests(
        self,
        slots: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int32],
        *,
        as_of: Generations | None = None,
        uniform: bool = False,
    ) -> RuntimeStep:
        """``step`` for requests in a row: int32 [requests] slots and tokens of each.

        Raises ArgumentError as ``step`` does, and for a length below 0.
        """
        slots, lengths = _host_int32("slots", slots), _host_int32("lengths", lengths)
        if len(slots) != len(lengths):
            raise ArgumentError(f"slots has {len(slots)} requests, lengths {len(lengths)}")
        if len(lengths):
            request = int(lengths.argmin())
            if lengths[request] < 0:
                raise ArgumentError(
                    f"lengths[{request}] is {lengths[request]}; 0 or more is needed"
                )
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens > self.buffers.max_tokens:
            raise CapacityError(
                f"lengths are {counted(tokens, 'token')} together; there is room for "
                f"{self.buffers.max_tokens}"
            )
        token_to_slot = slots.repeat(lengths)
        return self.step(token_to_slot, as_of=as_of, num_reqs=len(slots), uniform=uniform)

    def step_names(
        self, names: Sequence[str | None], lengths: npt.NDArray[np.int32], *, uniform: bool = False
    ) -> RuntimeStep:
        """``step_requests`` by adapters' names (None: no adapter), looked up and enqueued with no
        load in between. Raises as ``slots_of`` and ``step_requests`` do."""
        with self._lock:
            return self.step_requests(self.slots_of(names), lengths, uniform=uniform)

    def counts(self) -> DispatchCounts:
        """Which graphs served how many steps, what ran eagerly and why."""
        with self._lock:
            return self._require_graphs().counts()

    def synchronize(self, step: int | None = None) -> None:
        """Wait until ``step``, or all steps, are over; raise what device work found wrong."""
        with self._lock:
            last = self._fence.enqueued
        self._fence.wait(last if step is None else check_int("step", step, 0, last))
        release_finished()
        self.backend.check_status()

    def close(self) -> None:
        """Wait for loads and steps, and drop all graphs. Nothing can be loaded in the background or
        stepped afterwards, and a stream that was given is not touched from here on. Raises
        GraphError where a load, its progress, its future's callback or a step function calls it,
        and, when all is closed, what went wrong with a copy to the host cache."""
        if threading.get_ident() in self._loader_threads:
            raise GraphError("close was called by a load in the background; call it elsewhere")
        self._refuse_inside("close")
        with self._loading_alone("close"), self._lock:
            self._closed = True
        if self._loader is not None:
            self._loader.shutdown()
        try:
            if self._cache_writer is not None:
                self._cache_writer.close()
        finally:
            self._end_steps()

    def _end_steps(self) -> None:
        with self._entering("close"):
            self._fence.wait(self._fence.enqueued)
            if self._graphs is not None:
                self._graphs.release(over=True)
            self._graphs = None

    def _require_graphs(self) -> StepGraphs:
        if self._graphs is None:
            self._require_open()
            raise ArgumentError("there is no step function yet; call set_step first")
        return self._graphs

    def _require_open(self) -> None:
        if self._closed:
            raise GraphError("the runtime is closed; there are no steps any more")

    def _require_same(self, used: SlotSet, as_of: Generations) -> None:
        shape = self._generations.shape
        as_of = borrow("as_of", as_of, on_device=False)
        check_array("as_of", as_of, dtype=np.dtype(np.int64), shape=shape, on_device=False)
        changed = [slot for slot in slots_in(used) if as_of[slot] != self._generations[slot]]
        if changed:
            slots = ", ".join(map(str, changed))
            raise ArgumentError(
                f"slot {slots} holds another load than when it was looked up; look the adapters up "
                "again (slots_of), or pin them"
            )

    @contextlib.contextmanager
    def _entering(self, what: str) -> Iterator[None]:
        """What calls the step function or the caller's progress, which must not load or step."""
        with self._lock:
            self._refuse_inside(what)
            self._inside = threading.get_ident()
            try:
                with self.recorder.on_device():
                    yield
            finally:
                self._inside = _NO_THREAD

    @contextlib.contextmanager
    def _loading_alone(self, what: str) -> Iterator[None]:
        """One load at a time; what a load's progress calls must not be one."""
        with self._loading:
            if self._in_load:
                raise GraphError(f"{what} was called from inside a load")
            self._in_load = True
            try:
                with self.recorder.on_device(), self._outside_captures():
                    yield
            finally:
                self._in_load = False

    def _outside_captures(self) -> contextlib.AbstractContextManager[None]:
        """Loads pin memory, wait and ask events, and void no capture of the host's in doing so."""
        return driver.outside_captures() if self.backend.on_device else contextlib.nullcontext()

    def _refuse_inside(self, what: str) -> None:
        """Of the same thread: a load would wait for another one that waits for this step."""
        if self._inside == threading.get_ident():
            raise GraphError(f"{what} was called from inside a step or a capture")


def _note_thread(threads: set[int]) -> None:
    threads.add(threading.get_ident())


def _wait_for_all(fence: StepFence) -> None:
    fence.wait(fence.enqueued)


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"{name!r} is no adapter's name; a string is needed")
    return name


def _check_adapter(adapter: Any) -> None:
    if adapter is not None and not isinstance(adapter, Adapter | str | Path):
        raise ArgumentError(f"adapter is {quoted(adapter)}; an Adapter or a path is needed")


def _check_names(what: str, names: Any) -> Sequence[Any]:
    if not isinstance(names, list | tuple):
        raise ArgumentError(
            f"{what} is a {type(names).__name__}; a list or tuple of adapters' names is needed"
        )
    return names


def _host_int32(name: str, array: Any) -> npt.NDArray[np.int32]:
    if is_host_int32(array):
        given: npt.NDArray[np.int32] = array
        return given
    taken: npt.NDArray[np.int32] = borrow(name, array, on_device=False)
    check_array(name, taken, dtype=INT32, shape=(None,), on_device=False)
    return taken


def _check_requests(num_reqs: Any, uniform: Any) -> None:
    if num_reqs is not None:
        check_int("num_reqs", num_reqs, 0)
    check_type("uniform", uniform, bool)
