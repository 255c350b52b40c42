"""Steps through captured graphs: capture per key, replay, and eager steps for what has no graph.

    token_to_slot (host) --> staging: check, count groups --> dispatcher: key, or none
                                 |                                |
                     ring in pinned memory                    graph of the key: one launch
                                 v  one copy                  none: the same, call by call
                          buffers (never moved) <---------------- padding of other buffers behind
                                                                  the batch; step function

The step function is the host's: it enqueues everything a step does, base model and LoRA layers
alike, on views of the buffers, for the number of tokens and of adapters that it is told. It is
called once eagerly per number of tokens and once recorded per key (eagerly before, too, where a
first recording fails), and its Python never runs in a replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from cupylora.backend import ArrayBackend
from cupylora.checks import check_choice, check_int, check_type
from cupylora.errors import ArgumentError, CupyloraError, GraphError
from cupylora.graphs.buckets import (
    BatchKey,
    DispatchCounts,
    Dispatcher,
    DispatchOptions,
    EagerReason,
)
from cupylora.graphs.buffers import SLOTS, StepBuffers, StepViews
from cupylora.graphs.capture import CudaRecorder, DirectRecorder, Recorder, Recording
from cupylora.graphs.fence import CudaFence, DirectFence, StepFence
from cupylora.graphs.staging import BatchSlots, SlotReader, make_staging
from cupylora.worklists import Array

__all__ = ["CapturedGraph", "GraphOptions", "Step", "StepGraphs", "StepResult"]

_DROP_AFTER = 16
"""Batches by which a key must be asked for oftener than a graph was replayed to take its room: a
capture costs about as much as so many eager steps save."""

_NO_SLOTS = np.empty(0, np.int32)
"""Of a batch of padding alone."""


@dataclass(frozen=True)
class GraphOptions:
    """How steps are served. enabled: False: every step is eager.

    dispatch: buckets and cases. lazy: capture a key when a batch first needs it (``capture`` takes
    them all ahead). memory_budget: most bytes of device memory that graphs may take; None: no
    bound (measured as the device's free memory before and after, so that what others allocate
    meanwhile counts too). over_budget: "refuse": what would exceed it is not captured; "drop": a
    graph makes room for a key that batches ask for oftener.
    """

    enabled: bool = True
    dispatch: DispatchOptions = field(default_factory=DispatchOptions)
    lazy: bool = False
    memory_budget: int | None = None
    over_budget: Literal["refuse", "drop"] = "refuse"

    def __post_init__(self) -> None:
        check_type("enabled", self.enabled, bool)
        check_type("dispatch", self.dispatch, DispatchOptions)
        check_type("lazy", self.lazy, bool)
        if self.memory_budget is not None:
            check_int("memory_budget", self.memory_budget, 0)
        check_choice("over_budget", self.over_budget, ("refuse", "drop"))


@dataclass(frozen=True)
class Step:
    """What a step function works on.

    views: the buffers' first ``num_tokens`` rows, padding included. active: most groups of rows
    that the batch has, for ``BatchPlan.update``, which may rely on it; 0: no adapter at all, so
    that no LoRA work is needed. num_reqs, uniform: as in ``BatchKey``; None and False in a relaxed
    key's graph, which must serve any.
    """

    views: StepViews
    active: int
    num_reqs: int | None = None
    uniform: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of every view."""
        return self.views.num_tokens

    @property
    def token_to_slot(self) -> Array:
        """int32 [num_tokens], -1 in padding rows."""
        return self.views[SLOTS]

    def __getitem__(self, name: str) -> Array:
        return self.views[name]


StepFunction = Callable[[Step], object]


class StepResult(NamedTuple):
    """What one step did. key: of the graph that was replayed; None: it ran eagerly, or there were
    no tokens. num_tokens: without padding. groups: as ``count_active_loras`` counts."""

    key: BatchKey | None
    num_tokens: int
    groups: int


@dataclass(frozen=True)
class CapturedGraph:
    """One graph there is. replays: since it was captured."""

    key: BatchKey
    nodes: int
    nbytes: int
    seconds: float
    replays: int


@dataclass(slots=True)
class _Graph:
    recording: Recording
    replays: int = 0


class StepGraphs:
    """Serves steps of ``function`` over ``buffers``.

    stream: in any form, where all steps go; it must live until the last call here, no longer. Left
    out: a new non-blocking one. A step and a capture exclude one another; either may be called from
    any thread. fence, lock: the owner's, if it has them. Raises ArgumentError for buckets larger
    than the buffers, GraphError for the legacy default stream.
    """

    def __init__(
        self,
        function: StepFunction,
        buffers: StepBuffers,
        *,
        max_loras: int,
        options: GraphOptions | None = None,
        stream: Any = None,
        recorder: Recorder | None = None,
        fence: StepFence | None = None,
        lock: Any = None,
    ) -> None:
        check_type("buffers", buffers, StepBuffers)
        if not callable(function):
            raise ArgumentError(
                f"function is a {type(function).__name__}; a function of a Step is needed"
            )
        self.options = GraphOptions() if options is None else options
        check_type("options", self.options, GraphOptions)
        self.dispatcher = Dispatcher(
            max_loras, self.options.dispatch, max_tokens=buffers.max_tokens
        )
        self.buffers, self._function = buffers, function
        self.recorder = recorder or _recorder(buffers.backend, stream)
        self._reader = SlotReader(buffers.max_tokens, max_loras)
        self._fence = _fence(buffers.backend, self.recorder) if fence is None else fence
        self._staging = make_staging(buffers, self.recorder.stream, self._fence)
        self._graphs: dict[BatchKey, _Graph] = {}
        self._asked: dict[BatchKey, int] = {}
        self._called: set[BatchKey] = set()
        self.failures: dict[BatchKey, str] = {}
        """Keys that are not captured lazily again, and why."""
        self._lock = threading.RLock() if lock is None else lock

    @property
    def nbytes(self) -> int:
        """Device memory that the graphs took."""
        return sum(graph.recording.nbytes for graph in self._graphs.values())

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """The graphs there are, in the order of capture."""
        return tuple(self._captured(key) for key in self._graphs)

    def recording(self, key: BatchKey) -> Recording:
        """The graph of ``key``, to look into it. Raises GraphError if there is none."""
        found = self._graphs.get(key)
        if found is None:
            raise GraphError(f"{key} has no graph")
        return found.recording

    def counts(self) -> DispatchCounts:
        """Which keys served how many batches, what ran eagerly and why."""
        return self.dispatcher.counts()

    def capture(
        self,
        keys: Sequence[BatchKey] | None = None,
        progress: Callable[[CapturedGraph, int], object] | None = None,
    ) -> tuple[CapturedGraph, ...]:
        """Capture ``keys`` that have no graph yet, all of the dispatcher's by default.

        Most tokens first. progress: told each graph, and how many are still to come. Returns the
        new graphs; where the memory budget is reached, what does not fit is left out. The step
        function is called on padding rows alone: buffers with a ``pad`` hold it afterwards, so
        write a batch after this.

        Raises ArgumentError for a key that the options do not have, GraphError where a capture
        fails and whatever the step function raises; the graphs captured before stay, and steps go
        on.
        """
        if not self.options.enabled:
            raise GraphError("graphs are off (GraphOptions(enabled=False)); nothing to capture")
        if keys is not None and not isinstance(keys, list | tuple):
            raise ArgumentError(f"keys is a {type(keys).__name__}; a list or tuple is needed")
        wanted = self.dispatcher.all_keys() if keys is None else tuple(dict.fromkeys(keys))
        for key in wanted:
            self.dispatcher.check_key(key)
        with self._lock:
            missing = [key for key in wanted if key not in self._graphs]
            made = []
            for index, key in enumerate(missing):
                if not self._capture_key(key):
                    break
                made.append(self._captured(key))
                if progress is not None:
                    progress(made[-1], len(missing) - index - 1)
        return tuple(made)

    def release(self, *, over: bool = False) -> None:
        """Drop all graphs once their replays are over; buffers may grow again.

        over: they are, as the caller knows; the stream, which may be gone, is not touched then.
        """
        with self._lock:
            if not over:
                self._wait()
            for key in tuple(self._graphs):
                self._drop(key)
            self._asked.clear()
            self._called.clear()
            self.failures.clear()
            self.buffers.unseal()

    def read(self, token_to_slot: Any) -> BatchSlots:
        """Check and count a batch, as ``step`` does; valid until the next read."""
        return self._reader.read(token_to_slot, self._staging.room())

    def step(
        self, token_to_slot: Any, *, num_reqs: int | None = None, uniform: bool = False
    ) -> StepResult:
        """Enqueue one step for the batch that the buffers hold, and return at once.

        token_to_slot: int32 [T] in host memory, negative for no adapter; it may be changed when
        this returns. num_reqs, uniform: as in ``BatchKey``.

        Raises ArgumentError or CapacityError for a batch that cannot be, with nothing enqueued;
        GraphError where a launch fails, and whatever the step function raises in an eager step.
        """
        with self._lock:
            batch = self.read(token_to_slot)
            tokens, groups = batch.num_tokens, batch.groups
            try:
                key = self.run(batch, num_reqs=num_reqs, uniform=uniform)
            finally:
                if tokens:
                    self._fence.submit()
            return StepResult(key, tokens, groups)

    def run(
        self, batch: BatchSlots, *, num_reqs: int | None = None, uniform: bool = False
    ) -> BatchKey | None:
        """``step`` for the batch read last: the key replayed, if one was. The caller keeps other
        steps out, and submits this one to the fence, also where it failed."""
        tokens, groups = batch.num_tokens, batch.groups
        if not self.options.enabled:
            self.dispatcher.count_eager("graphs are off")
            self._eager(tokens, BatchKey(tokens, num_reqs, uniform, groups))
            return None
        if self.options.lazy:
            ideal = self.dispatcher.ideal(tokens, groups)
            if ideal is not None and ideal not in self._graphs and self._may_capture(ideal):
                self._first_of(ideal, tokens)
                return None
        choice = self.dispatcher.choose(tokens, groups, num_reqs=num_reqs, uniform=uniform)
        if choice is None:
            self._eager(tokens, BatchKey(tokens, num_reqs, uniform, groups))
            return None
        graph: _Graph = choice.graph
        self._staging.send(tokens, choice.key.num_tokens)
        graph.recording.launch()
        graph.replays += 1
        return choice.key

    def _eager(self, tokens: int, key: BatchKey) -> None:
        if tokens:
            self._run_now(key, tokens)

    def _run_now(self, key: BatchKey, tokens: int) -> None:
        """The step's calls one by one, for the ``tokens`` slots that were read."""
        with self.recorder.active():
            self._staging.send(tokens, key.num_tokens)
            if tokens < key.num_tokens:
                self._staging.pad(key.num_tokens)
            self._call(key)

    def _record_calls(self, key: BatchKey) -> None:
        """What a replay does with the batch that was sent. One of one row is never padded."""
        if key.num_tokens > 1:
            self._staging.pad(key.num_tokens)
        self._call(key)

    def _call(self, key: BatchKey) -> None:
        views = self.buffers.views(key.num_tokens)
        self._function(Step(views, key.num_active_loras, key.num_reqs, key.uniform))

    def _may_capture(self, key: BatchKey) -> bool:
        """Whether it is worth a try: at a key's first batch, and where others may be dropped for it
        once batches asked for it oftener than for the graph that would go."""
        if key in self.failures:
            return False
        asked = self._asked[key] = self._asked.get(key, 0) + 1
        if asked == 1:
            return True
        if self.options.over_budget != "drop" or not self._graphs:
            return False
        return asked > self._graphs[self._least()].replays + _DROP_AFTER

    def _first_of(self, key: BatchKey, tokens: int) -> None:
        """Run a batch as its key's graph would, eagerly, and capture that for the next one.

        The step is done then: a capture that fails is noted, not raised. A step that fails was no
        first one.
        """
        try:
            self._run_now(key, tokens)
        except BaseException:
            self._asked[key] -= 1
            raise
        reason: EagerReason = "captured by it"
        try:
            if not self._record(key, drop=self._asked[key] > 1):
                reason = "no graph"
        except Exception as error:
            self.failures[key], reason = str(error), "its capture failed"
        self.dispatcher.count_eager(reason)

    def _capture_key(self, key: BatchKey) -> bool:
        """Whether there was room for a graph of ``key``.

        A call on padding alone goes before: it loads modules, makes views and measures occupancy,
        none of which a capture may do. The keys that differ in their case alone share one, unless
        the capture shows that there was more to do.
        """
        shape = replace(key, num_active_loras=0)
        if self.recorder.calls_work and shape in self._called:
            try:
                return self._record(key, drop=False)
            except CupyloraError:
                self._call_on_padding(key)
        else:
            self._call_on_padding(key)
            self._called.add(shape)
        return self._record(key, drop=False)

    def _call_on_padding(self, key: BatchKey) -> None:
        self.read(_NO_SLOTS)
        self._run_now(key, 0)

    def _record(self, key: BatchKey, *, drop: bool) -> bool:
        """Capture what has run eagerly before. drop: others, where the budget asks for room."""
        self.buffers.seal()
        try:
            with self.recorder.active():
                self._staging.prepare()
            recording = self.recorder.record(lambda: self._record_calls(key), str(key))
            if not self._fit(recording.nbytes, drop):
                recording.destroy()
                if recording.nbytes > (self.options.memory_budget or 0):
                    self.failures[key] = f"it takes {recording.nbytes} bytes, more than the budget"
                return False
            graph = self._graphs[key] = _Graph(recording)
            self.dispatcher.add(key, graph)
        finally:
            if not self._graphs:
                self.buffers.unseal()
        return True

    def _fit(self, nbytes: int, drop: bool) -> bool:
        """Whether so many more bytes keep the budget, the graphs replayed least dropped for it."""
        budget = self.options.memory_budget
        if budget is None:
            return True
        if drop and nbytes <= budget < self.nbytes + nbytes:
            self._wait()
            while budget < self.nbytes + nbytes:
                self._drop(self._least())
        return self.nbytes + nbytes <= budget

    def _least(self) -> BatchKey:
        """Of the graph replayed least."""
        return min(self._graphs, key=lambda key: self._graphs[key].replays)

    def _drop(self, key: BatchKey) -> None:
        self.dispatcher.remove(key)
        self._graphs.pop(key).recording.destroy()

    def _wait(self) -> None:
        with self.recorder.active():
            self.buffers.backend.synchronize()

    def _captured(self, key: BatchKey) -> CapturedGraph:
        graph = self._graphs[key]
        made = graph.recording
        return CapturedGraph(key, made.nodes, made.nbytes, made.seconds, graph.replays)


def _recorder(backend: ArrayBackend, stream: Any) -> Recorder:
    return CudaRecorder(stream) if backend.on_device else DirectRecorder()


def _fence(backend: ArrayBackend, recorder: Recorder) -> StepFence:
    return CudaFence(recorder.stream) if backend.on_device else DirectFence()
