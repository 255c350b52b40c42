"""A point -> its measurement: build, warm up, capture, check what the graphs leave, time them.

``open_measurer`` does it on the CUDA device; a session only sees the protocol, so that tests can
put something else in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cupylora.backend import ArrayBackend, CudaBackend
from cupylora.bench.points import Point
from cupylora.bench.pools import Pools, free_unused, trim
from cupylora.bench.stream import ReadStream
from cupylora.bench.timing import CudaGraphs, Graphs, Times, copy_bandwidth
from cupylora.bench.workloads import make_workload

__all__ = ["GraphMeasurer", "Measured", "Measurer", "Streams", "open_measurer"]

_REPLAYS = {"dense": 11}
_OTHER_REPLAYS = 7


@dataclass(frozen=True)
class Measured:
    """One point's times in microseconds, and what they are to be seen beside.

    us: the sum of parts_us. spread: (90th - 10th percentile of the replays) / median.
    floor_us: of ``nbytes`` at the copy bandwidth. stream_us: of plain reads of them.
    error: relative, against the float32 reference, over the rows that ``checked`` names.
    """

    us: float
    spread: float
    parts_us: tuple[float, ...]
    floor_us: float
    stream_us: float
    nbytes: float
    sets: int
    error: float
    checked: str


class Measurer(Protocol):
    """What a session asks for points."""

    @property
    def bandwidth(self) -> float:
        """Copy bandwidth, bytes a second."""

    def measure(self, point: Point) -> Measured:
        """Raises OffReferenceError where the output is wrong, other errors as they come."""

    def usable(self) -> bool:
        """Whether points can be measured after an error."""


class Streams(Protocol):
    """The n-node stream."""

    def us(self, parts: Sequence[float]) -> float:
        """Microseconds of a chain of plain reads of so many bytes each."""


class GraphMeasurer:
    """Measures points on a backend whose graphs can be captured and timed.

    sets: rotating input sets, other than the point's own number.
    """

    def __init__(
        self,
        backend: ArrayBackend,
        graphs: Graphs,
        streams: Streams,
        bandwidth: float,
        *,
        sets: int | None = None,
    ) -> None:
        self._backend, self._graphs, self._streams = backend, graphs, streams
        self._bandwidth, self._sets = bandwidth, sets
        self._pools = Pools(backend)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a copy, read and written."""
        return self._bandwidth

    def measure(self, point: Point) -> Measured:
        """Everything about one point; its inputs are gone afterwards, its weights stay."""
        try:
            with self._graphs.active():
                return self._measure(point)
        finally:
            trim(self._backend)

    def usable(self) -> bool:
        """Whether the device still answers; what it held for the failed point is let go."""
        try:
            with self._graphs.active():
                self._backend.synchronize()
            self._pools.drop()
        except Exception:
            return False
        return True

    def _measure(self, point: Point) -> Measured:
        work = make_workload(self._backend, point, self._pools, self._sets)
        self._backend.synchronize()  # the lists are settled before any delta starts
        for part in work.parts:
            for call in part:
                call()
        self._backend.synchronize()
        self._backend.check_status()
        graphs = [self._graphs.capture(part) for part in work.parts]
        work.check.before()
        for graph in graphs:
            graph.launch()
        self._backend.synchronize()
        self._backend.check_status()
        verdict = work.check.after()
        verdict.require()
        replays = _REPLAYS.get(point.kind, _OTHER_REPLAYS)
        times = [self._graphs.time(graph, work.sets, replays) for graph in graphs]
        total = sum(work.nbytes)
        us = sum(t.median for t in times)
        return Measured(
            us=us,
            spread=_spread(times),
            parts_us=tuple(t.median for t in times),
            floor_us=total / self._bandwidth * 1e6,
            stream_us=self._streams.us(work.nbytes),
            nbytes=total,
            sets=work.sets,
            error=verdict.error,
            checked=verdict.checked,
        )


def _spread(times: Sequence[Times]) -> float:
    return sum(t.high - t.low for t in times) / sum(t.median for t in times)


def open_measurer() -> GraphMeasurer:
    """The measurer on CuPy's current device.

    Raises DeviceUnavailableError where CUDA is not ready.
    """
    backend = CudaBackend()
    graphs = CudaGraphs(backend)
    bandwidth = copy_bandwidth(backend, graphs)
    free_unused(backend)
    processors = int(backend.xp.cuda.Device().attributes["MultiProcessorCount"])
    with graphs.active():
        streams = ReadStream(backend, graphs, processors)
    return GraphMeasurer(backend, graphs, streams, bandwidth)
