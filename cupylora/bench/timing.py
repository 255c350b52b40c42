"""CUDA graphs of calls and the time of their replays, and the copy bandwidth of the device.

All work goes to one non-blocking stream; capture keeps the edges of programmatic dependent launch.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cupylora.backend import CudaBackend
from cupylora.bench.pools import DTYPE, random_array
from cupylora.errors import GraphError

__all__ = ["CudaGraphs", "Graph", "Graphs", "Times", "copy_bandwidth", "summarise"]

_MOST_REPLAYS = 60
_LEAST_MS, _MOST_MS = 12.0, 400.0
_COPY_BYTES = 4 << 30
_COPIES, _COPIES_DROPPED = 14, 3
_WARM_UP_MS = 300.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median over the replays, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float


class Graph(Protocol):
    """Calls that are launched together."""

    def launch(self) -> None:
        """Enqueue all of them."""


class Graphs(Protocol):
    """What makes graphs and times them."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Work inside goes where the graphs' does."""

    def capture(self, calls: Iterable[Call]) -> Graph:
        """A graph of ``calls``, none of which runs now. Raises GraphError if one cannot be."""

    def time(self, graph: Graph, calls: int, replays: int) -> Times:
        """Replay at least ``replays`` times; ``calls``: those in the graph."""


def summarise(milliseconds: Sequence[float], calls: int) -> Times:
    """Times of one call from those of whole replays."""
    ordered = sorted(milliseconds)
    last = len(ordered) - 1
    picks = (len(ordered) // 2, int(len(ordered) * 0.1), min(last, int(len(ordered) * 0.9)))
    return Times(*(ordered[pick] * 1e3 / calls for pick in picks))


class CudaGraphs:
    """Graphs on CuPy's current device, as the peers' harness times them."""

    def __init__(self, backend: CudaBackend) -> None:
        self._cuda = backend.xp.cuda
        self._stream = self._cuda.Stream(non_blocking=True)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The stream is CuPy's current one inside."""
        with self._stream:
            yield

    def capture(self, calls: Iterable[Call]) -> Graph:
        """Capture; the graph is instantiated and on the device when this returns."""
        with self._stream:
            self._stream.begin_capture()
            try:
                for call in calls:
                    call()
            except BaseException:
                with contextlib.suppress(Exception):  # it is void already; only close it
                    self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
            graph.upload(self._stream)
        return _CudaGraph(graph, self._stream)

    def time(self, graph: Graph, calls: int, replays: int) -> Times:
        """Two replays to warm up, then until ``replays`` and 12 ms, or 60 or 400 ms, are done."""
        for _ in range(2):
            graph.launch()
        self._stream.synchronize()
        times: list[float] = []
        while len(times) < replays or (sum(times) < _LEAST_MS and len(times) < _MOST_REPLAYS):
            times.append(self.milliseconds(graph.launch))
            if sum(times) > _MOST_MS:
                break
        return summarise(times, calls)

    def milliseconds(self, call: Call) -> float:
        """Device time of what ``call`` enqueues."""
        start, end = self._cuda.Event(), self._cuda.Event()
        start.record(self._stream)
        call()
        end.record(self._stream)
        end.synchronize()
        return float(self._cuda.get_elapsed_time(start, end))


class _CudaGraph:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream

    def launch(self) -> None:
        self._graph.launch(self._stream)


def copy_bandwidth(backend: CudaBackend, graphs: CudaGraphs) -> float:
    """Bytes a second, read and written, of a device-to-device copy of 4 GiB (less where there is
    less room), the device warmed up by the same copies before."""
    size = min(_COPY_BYTES, backend.free_bytes() // 4) // 4096 * 4096
    if size <= 0:
        raise GraphError("the device has no memory free for a copy to be timed")
    with graphs.active():
        source, target = (random_array(backend, (size // DTYPE.itemsize,), i, 1.0) for i in (1, 2))

        def copy() -> None:
            target.data.copy_from_device_async(source.data, size)

        spent = 0.0
        while spent < _WARM_UP_MS:
            spent += graphs.milliseconds(copy)
        times = [graphs.milliseconds(copy) for _ in range(_COPIES)]
    return 2e3 * size / statistics.median(times[_COPIES_DROPPED:])
