"""The n-node stream: plain kernels that read as many bytes as an operation must move.

Read from memory that no recent node has touched, as nodes of one CUDA graph, like what they stand
beside. A yardstick, not a bound: it only reads, and a kernel that starts early may beat it. For
each order of magnitude the best of up to 15 launch shapes is found once and then kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from cupylora.backend import ArrayBackend
from cupylora.bench.floors import FOOTPRINT
from cupylora.bench.pools import random_array
from cupylora.bench.timing import Graphs
from cupylora.ops._device import enqueue
from cupylora.worklists import Array

__all__ = ["ReadStream"]

_THREADS = 256
_LOAD_BYTES = 16
_UNROLLS = (1, 4, 8)
_WAVES = (1, 2, 4, 8, 16)
_TYPES = ("ptr", "u64", "ptr")
_REGION_BYTES = 4 << 30
_MOST_NODES = 500
_REPLAYS, _SEARCH_REPLAYS = 7, 3

Shape = tuple[int, int]
"""Blocks, and loads that a thread has in flight."""


class ReadStream:
    """Microseconds that chains of read nodes take."""

    def __init__(self, backend: ArrayBackend, graphs: Graphs, processors: int) -> None:
        self._backend, self._graphs, self._processors = backend, graphs, processors
        size = min(_REGION_BYTES, backend.free_bytes() // 4) // 4096 * 4096
        self._region: Array = random_array(backend, (size // 2,), 7, 1.0)
        self._sink: Array = backend.zeros(1, "uint32")
        self._shapes: dict[int, Shape] = {}
        self._known: dict[tuple[int, ...], float] = {}

    def us(self, parts: Sequence[float]) -> float:
        """Of a chain of nodes, one for each number of bytes in ``parts``.

        A node of more bytes than the region has takes the region's time in proportion.
        """
        sizes = tuple(max(_LOAD_BYTES, round(size / _LOAD_BYTES) * _LOAD_BYTES) for size in parts)
        if sizes not in self._known:
            limit = int(self._region.nbytes)
            read = [min(size, limit) for size in sizes]
            scale = sum(sizes) / sum(read)
            shapes = [self._shape(size) for size in read]
            self._known[sizes] = scale * self._time(read, shapes, _REPLAYS)
        return self._known[sizes]

    def _shape(self, size: int) -> Shape:
        """The best launch shape around ``size`` bytes."""
        magnitude = round(math.log(size, 4))
        if magnitude not in self._shapes:
            tried = min(4**magnitude, int(self._region.nbytes))
            times = {
                shape: self._time([tried], [shape], _SEARCH_REPLAYS)
                for shape in self._candidates(tried)
            }
            self._shapes[magnitude] = min(times, key=times.__getitem__)
        return self._shapes[magnitude]

    def _candidates(self, size: int) -> Iterator[Shape]:
        """Shapes of which at least half the threads have something to read."""
        smallest = (self._processors, 1)
        yield smallest
        for unroll in _UNROLLS:
            for wave in _WAVES:
                shape = (self._processors * wave, unroll)
                work = shape[0] * _THREADS * _LOAD_BYTES * unroll
                if shape != smallest and work <= 2 * size:
                    yield shape

    def _time(self, sizes: Sequence[int], shapes: Sequence[Shape], replays: int) -> float:
        region, count = int(self._region.nbytes), self._sets(sum(sizes))
        base, at, calls = self._backend.address(self._region), 0, []
        for _ in range(count):
            for size, shape in zip(sizes, shapes, strict=True):
                if at + size > region:
                    at = 0
                calls.append(partial(self._read, base + at, size, shape))
                at += -(-size // 256) * 256
        with self._graphs.active():
            for call in calls[: len(sizes)]:  # loads the kernels, which capture must not
                call()
            graph = self._graphs.capture(calls)
            return self._graphs.time(graph, count, replays).median

    @staticmethod
    def _sets(size: int) -> int:
        return int(max(2, min(_MOST_NODES, -(-FOOTPRINT // size))))

    def _read(self, start: int, size: int, shape: Shape) -> None:
        blocks, unroll = shape
        args = (start, size // _LOAD_BYTES, self._backend.address(self._sink))
        enqueue("stream", str(unroll), _TYPES, (blocks,), _THREADS, args)
