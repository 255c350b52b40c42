"""A step recorded once and launched again: a CUDA graph by stream capture.

In: a function that enqueues a step's work on CuPy's current stream. Out: a :class:`Recording` whose
``launch`` enqueues all of it with one driver call. On NumPy a recording is the function itself,
so that everything above this file is written once.

Capture is in thread-local mode: what other threads do with the device meanwhile is theirs. Inside,
CuPy's allocator refuses: memory that a pool handed out would go back to it when the array's last
reference does, while the graph still reads and writes there.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cupylora.compiler import driver
from cupylora.errors import CupyloraError, GraphError
from cupylora.interop.lent import block_of
from cupylora.interop.streams import as_stream
from cupylora.interpreter import no_collection

__all__ = ["CudaRecorder", "DirectRecorder", "Recorder", "Recording"]

Work = Callable[[], object]

_STEP_PRIORITY = -1
"""Of CUDA's: lower goes first, and streams have 0 by default."""
_VERBOSE_DOT = 1
_PER_THREAD_STREAM = 2
_LEGACY_ADVICE = (
    "the legacy default stream cannot be captured; give a stream of your own "
    "(cupy.cuda.Stream(non_blocking=True)) and make your calls on it"
)


class Recording(ABC):
    """Recorded work. nodes: of its graph; nbytes: device memory that it took; seconds: to make."""

    nodes: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @abstractmethod
    def launch(self) -> None:
        """Enqueue all of it on the recorder's stream. Raises GraphError if the driver refuses."""

    @abstractmethod
    def kernel_names(self) -> tuple[str, ...]:
        """Names of its kernels, in no order; empty where there is no graph."""

    @abstractmethod
    def write_dot(self, path: Path) -> None:
        """Write the graph for Graphviz. Raises GraphError where there is none."""

    @abstractmethod
    def destroy(self) -> None:
        """Free it; launches that are under way finish. Nothing can be done with it afterwards."""


class Recorder(ABC):
    """Makes recordings, and says where their work goes.

    stream: CuPy's, None on NumPy. calls_work: whether ``record`` calls the work, and so shows
    whether it can be recorded.
    """

    stream: Any = None
    calls_work = False

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager[None]:
        """Work enqueued inside goes where recordings' work goes."""

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """The device is current inside: a thread begins on device 0."""
        return _Current(self)

    @abstractmethod
    def enter_device(self) -> int | None:
        """Make the device current: number of the one that was, to ``leave_device``; None: it was
        that already."""

    @abstractmethod
    def leave_device(self, before: int) -> None:
        """Back to the device that was current."""

    @abstractmethod
    def record(self, work: Work, what: str) -> Recording:
        """Record what ``work`` enqueues; nothing of it runs now. what: for messages.

        Raises GraphError naming ``what`` and the driver's reason, or whatever ``work`` raises of
        this package; the stream is as before then.
        """


class _Direct(Recording):
    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def launch(self) -> None:
        if self._work is None:
            raise GraphError("the recording was destroyed")
        self._work()

    def kernel_names(self) -> tuple[str, ...]:
        return ()

    def write_dot(self, path: Path) -> None:
        raise GraphError("there are no CUDA graphs on the numpy backend")

    def destroy(self) -> None:
        self._work = None


_NOWHERE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class DirectRecorder(Recorder):
    """For NumPy: a recording calls the function again."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Anywhere."""
        return _NOWHERE

    def enter_device(self) -> int | None:
        """There is none."""
        return None

    def leave_device(self, before: int) -> None:
        """Never called."""

    def record(self, work: Work, what: str) -> Recording:
        """Keep ``work``."""
        return _Direct(work)


class CudaRecorder(Recorder):
    """Captures on ``stream``, and launches there.

    stream: in any form (see ``cupylora.use_stream``), of the device that is current now; it must
    live until the last block, record or launch, no longer. Left out: a new non-blocking one, of
    higher priority than the default. Raises GraphError for the legacy
    default stream, ArgumentError for what is no stream.
    """

    calls_work = True

    def __init__(self, stream: Any = None) -> None:
        import cupy

        self._cupy = cupy
        runtime = cupy.cuda.runtime
        self._get_device, self._set_device = runtime.getDevice, runtime.setDevice
        self._device = int(self._get_device())
        # Above the streams of loads, so that what these unpack gives way to steps.
        new = functools.partial(cupy.cuda.Stream, non_blocking=True, priority=_STEP_PRIORITY)
        self.stream = new() if stream is None else as_stream("stream", stream)
        handle = int(self.stream.ptr)
        if handle in (0, 1):
            raise GraphError(_LEGACY_ADVICE)
        if handle == _PER_THREAD_STREAM:
            raise GraphError("the per-thread default stream changes with the thread; give a stream")
        self._block = block_of(self.stream)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The stream is CuPy's current one inside, its device the current device."""
        with self.on_device(), self._block:
            # Also where it is: that alone makes the device's context current in a new thread, which
            # launches through the driver need.
            self._set_device(self._device)
            yield

    def enter_device(self) -> int | None:
        """A step asks each time, so it costs next to nothing."""
        current = self._get_device()
        if current == self._device:
            return None
        self._set_device(self._device)
        return int(current)

    def leave_device(self, before: int) -> None:
        """Make another device current."""
        self._set_device(before)

    def record(self, work: Work, what: str) -> Recording:
        """Capture, instantiate and upload. Python collects no garbage meanwhile: a finalizer that
        frees device memory would void the capture."""
        start = time.perf_counter()
        with self.on_device(), no_collection():
            free = self._free_bytes()
            graph = self._capture(work, what)
            try:
                executable = self._instantiate(graph, what)
            except BaseException:
                _driver().cuGraphDestroy(graph)
                raise
            made = _CudaRecording(graph, executable, self.stream, what)
        made.count_nodes()
        made.nbytes = max(0, free - self._free_bytes())
        made.seconds = time.perf_counter() - start
        return made

    def _capture(self, work: Work, what: str) -> Any:
        cuda = _driver()
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with self.active(), self._cupy.cuda.using_allocator(functools.partial(_refuse, what)):
            _check(cuda.cuStreamBeginCapture(self.stream.ptr, mode), f"begin of capture of {what}")
            try:
                work()
            except BaseException as error:
                self._abandon()
                if isinstance(error, CupyloraError) or not isinstance(error, Exception):
                    raise
                raise GraphError(f"capture of {what} failed: {error}") from error
            (graph,) = _check(cuda.cuStreamEndCapture(self.stream.ptr), f"capture of {what}")
        return graph

    def _abandon(self) -> None:
        """End a capture whose work raised; what it recorded is dropped."""
        cuda = _driver()
        status, graph = cuda.cuStreamEndCapture(self.stream.ptr)
        if status == cuda.CUresult.CUDA_SUCCESS and int(graph):
            cuda.cuGraphDestroy(graph)

    def _instantiate(self, graph: Any, what: str) -> Any:
        cuda = _driver()
        params = cuda.CUDA_GRAPH_INSTANTIATE_PARAMS()
        params.hUploadStream = self.stream.ptr
        params.flags = cuda.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
        status, *made = cuda.cuGraphInstantiateWithParams(graph, params)
        if status != cuda.CUresult.CUDA_SUCCESS:
            node = _describe(params.hErrNode_out)
            raise GraphError(
                f"instantiation of {what} failed: {driver.error_text(int(status))}, "
                f"{params.result_out.name}{f' at {node}' if node else ''}"
            )
        return made[0]

    def _free_bytes(self) -> int:
        free, _ = _check(_driver().cuMemGetInfo(), "asking for free memory")
        return int(free)


class _CudaRecording(Recording):
    def __init__(self, graph: Any, executable: Any, stream: Any, what: str) -> None:
        self._graph, self._stream, self._what = graph, stream, what
        # Also where the recording is dropped: the driver's handles free nothing themselves.
        self._free = weakref.finalize(self, _destroy, graph, executable)
        self._free.atexit = False
        # Bound ahead: this call is the step path. The runtime's function, unlike the driver's,
        # makes the device's context current in a new thread.
        import cupy

        runtime = cupy.cuda.runtime
        self._refused = runtime.CUDARuntimeError
        self._enqueue = functools.partial(runtime.graphLaunch, int(executable), int(stream.ptr))

    def count_nodes(self) -> None:
        self.nodes = _node_count(self._graph)

    def launch(self) -> None:
        try:
            self._enqueue()
        except self._refused as error:
            raise GraphError(f"launch of {self._what} failed: {error}") from error

    def kernel_names(self) -> tuple[str, ...]:
        self._require()
        return tuple(name for node in _nodes(self._graph) if (name := _kernel_name(node)))

    def write_dot(self, path: Path) -> None:
        self._require()
        written = _driver().cuGraphDebugDotPrint(self._graph, str(path).encode(), _VERBOSE_DOT)
        _check(written, f"writing {self._what} to {path}")

    def destroy(self) -> None:
        self._free()
        self._enqueue = functools.partial(_destroyed, self._what)

    def _require(self) -> None:
        if not self._free.alive:
            _destroyed(self._what)


def _destroy(graph: Any, executable: Any) -> None:
    """Free both; the driver waits for launches under way."""
    cuda = _driver()
    cuda.cuGraphExecDestroy(executable)
    cuda.cuGraphDestroy(graph)


class _Current:
    """A recorder's device is current inside; each is entered once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before: int | None = None

    def __enter__(self) -> None:
        self._before = self._recorder.enter_device()

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._recorder.leave_device(self._before)


def _destroyed(what: str) -> None:
    raise GraphError(f"the graph of {what} was destroyed")


def _refuse(what: str, size: int) -> Any:
    raise GraphError(
        f"{size} bytes were asked of CuPy while {what} was captured; allocate before, for instance "
        "with out= arguments and a workspace (a graph must not hold memory that a pool takes back)"
    )


def _driver() -> Any:
    from cuda.bindings import driver as cuda

    return cuda


def _check(result: tuple[Any, ...], doing: str) -> tuple[Any, ...]:
    """What a driver call gave beside its status. Raises GraphError with the driver's reason."""
    status, *values = result
    if int(status):
        raise GraphError(f"{doing} failed: {driver.error_text(int(status))}")
    return tuple(values)


def _node_count(graph: Any) -> int:
    _, count = _check(_driver().cuGraphGetNodes(graph), "counting the nodes of a graph")
    return int(count)


def _nodes(graph: Any) -> list[Any]:
    found = _driver().cuGraphGetNodes(graph, _node_count(graph))
    nodes, _ = _check(found, "reading the nodes of a graph")
    return list(nodes)


def _describe(node: Any) -> str:
    """A node in words; empty for none."""
    if not int(node):
        return ""
    (kind,) = _check(_driver().cuGraphNodeGetType(node), "asking for a node's type")
    name = _kernel_name(node)
    return f"kernel {name}" if name else f"a node of type {kind.name}"


def _kernel_name(node: Any) -> str:
    """The mangled name of a kernel node's kernel; empty for other nodes."""
    cuda = _driver()
    (kind,) = _check(cuda.cuGraphNodeGetType(node), "asking for a node's type")
    if kind != cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return ""
    (params,) = _check(cuda.cuGraphKernelNodeGetParams(node), "reading a kernel node")
    function = params.func if int(params.func) else None
    named = cuda.cuKernelGetName(params.kern) if function is None else cuda.cuFuncGetName(function)
    (name,) = _check(named, "asking for a kernel's name")
    return bytes(name).decode(errors="replace")
