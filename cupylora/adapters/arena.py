"""Device memory for weights: one buffer of bytes, given out in blocks of size classes.

An adapter's blocks stand side by side where there is room for that: it is taken, filled and freed
in few runs then, however many blocks it has. The same code serves NumPy and CuPy; only the
functions at the end know how bytes reach an array (on CuPy's current stream).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.packed import BLOCK_ALIGNMENT, block_bytes
from cupylora.checks import check_int
from cupylora.errors import ArgumentError, CapacityError, RoomError
from cupylora.gaps import Gaps
from cupylora.host_memory import HostBytes, HostMemory

__all__ = ["Arena", "Array", "Blocks", "Run", "address_of", "new_bytes", "put_column"]

Array = Any
"""An array of the arena's ``xp``."""


@dataclass(frozen=True)
class Run:
    """Blocks side by side. offset: of the first in the arena; start: bytes of the adapter's blocks
    before it; size: bytes."""

    offset: int
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """Room for blocks that belong together: ``runs`` in their order, and each one's offset."""

    runs: tuple[Run, ...]
    offsets: npt.NDArray[np.int64]


class Arena:
    """One buffer of ``capacity_bytes``, given out in blocks of size classes.

    ``buffer`` is uint8 of the array module ``xp``, its start a multiple of 256; what it holds at
    first is undefined. Free neighbours merge; a request takes the smallest gap that holds it.
    Raises ArgumentError for less than one block, CapacityError where there is no memory for it.
    """

    def __init__(self, capacity_bytes: int, xp: Any = np) -> None:
        capacity_bytes = check_int("capacity_bytes", capacity_bytes, BLOCK_ALIGNMENT)
        self.capacity = capacity_bytes // BLOCK_ALIGNMENT * BLOCK_ALIGNMENT
        self.xp = xp
        shape = (self.capacity + BLOCK_ALIGNMENT,)
        buffer = new_bytes(xp.empty, shape, "an arena", "use a smaller capacity_bytes")
        skip = -address_of(buffer) % BLOCK_ALIGNMENT
        self.buffer: Array = buffer[skip : skip + self.capacity]
        self.address = address_of(self.buffer)
        self._gaps = Gaps([(0, self.capacity)])
        self._used: dict[int, int] = {}  # bytes by where they start

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks given out, size classes included."""
        return sum(self._used.values())

    @property
    def free_bytes(self) -> int:
        """Bytes not given out, in however many gaps."""
        return self.capacity - self.used_bytes

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Where nothing is given out: offsets and bytes."""
        return tuple(self._gaps)

    def alloc(self, size: int) -> int:
        """Offset of a new block for ``size`` bytes; its content is undefined until written.

        Raises RoomError, with the bytes needed and free, if no gap holds it.
        """
        need = block_bytes(check_int("size", size, 1))
        gap = self._gaps.smallest(need)
        if gap is None:
            raise RoomError(
                f"arena of {self.capacity} bytes: {need} bytes needed, {self.free_bytes} free "
                f"(largest gap {self._gaps.largest[1]}); unload or evict an adapter, or make the "
                "arena larger"
            )
        return self._cut(gap, need)

    def take(self, sizes: Sequence[int]) -> Blocks:
        """Room for blocks of these size classes, in as few runs as the gaps allow.

        Each run is freed as a block is, by its offset. Raises RoomError as ``alloc`` does, having
        taken nothing.
        """
        runs: list[Run] = []
        try:
            if not self._take_runs(np.cumsum([0, *sizes]), runs):
                self._free_runs(runs)
                self._take_apart(sizes, runs)
            return Blocks(tuple(runs), _offsets(runs, sizes))
        except BaseException:
            self._free_runs(runs)
            raise

    def _take_runs(self, ends: npt.NDArray[np.int64], runs: list[Run]) -> bool:
        """All blocks that are left in one gap, else as many as the largest gap holds, and so on.
        False: not all were taken."""
        first, count = 0, len(ends) - 1
        while first < count:
            start = int(ends[first])
            gap = self._gaps.smallest(int(ends[-1]) - start) or self._gaps.largest
            last = int(np.searchsorted(ends, start + gap[1], "right")) - 1
            if last == first:
                return False
            size = int(ends[last]) - start
            runs.append(Run(self._cut(gap, size), start, size))
            first = last
        return True

    def _take_apart(self, sizes: Sequence[int], runs: list[Run]) -> None:
        """Every block in the gap that fits it best, which leaves the most for large ones."""
        start = 0
        for size in sizes:
            runs.append(Run(self.alloc(size), start, size))
            start += size

    def _free_runs(self, runs: list[Run]) -> None:
        while runs:
            self.free(runs.pop().offset)

    def _cut(self, gap: tuple[int, int], size: int) -> int:
        offset = self._gaps.cut(gap, size)
        self._used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Give a block, or a run of blocks, back. Raises ArgumentError if none starts there."""
        if check_int("offset", offset, 0) not in self._used:
            raise ArgumentError(f"offset {offset} is not the start of a block in use")
        self._gaps.give(offset, self._used.pop(offset))

    def write(self, offset: int, data: npt.NDArray[Any], size: int) -> None:
        """Fill the ``size`` bytes of the block at ``offset`` with ``data``'s, and the rest with
        zeros. Raises ArgumentError if it is smaller than ``data``."""
        if data.nbytes > size:
            raise ArgumentError(f"data has {data.nbytes} bytes; the block at {offset} has {size}")
        end = offset + data.nbytes
        if data.nbytes:
            host = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            _put(self.buffer[offset:end], host)
        _zero(self.buffer[end : offset + size])

    def fill(self, blocks: Blocks, data: HostMemory) -> None:
        """Fill blocks whole: ``data`` is what they hold, one behind the other. Read until work on
        the current stream is over."""
        for run in blocks.runs:
            for first, part in data.spans(run.start, run.size):
                at = run.offset + first - run.start
                _put(self.buffer[at : at + part.nbytes], part)

    def read(self, blocks: Blocks, start: int, data: HostMemory) -> None:
        """The other way round: ``data`` becomes what the blocks hold from byte ``start`` on. Waits
        for work on the current stream."""
        for run in blocks.runs:
            first, last = max(start, run.start), min(start + data.nbytes, run.start + run.size)
            for to, part in data.spans(first - start, last - first):
                at = run.offset + start + to - run.start
                _get(self.buffer[at : at + part.nbytes], part)
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()

    def clear(self, blocks: Blocks) -> None:
        """Fill blocks with zeros."""
        for run in blocks.runs:
            _zero(self.buffer[run.offset : run.offset + run.size])


def _offsets(runs: Sequence[Run], sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where each block is."""
    starts: npt.NDArray[np.int64] = np.cumsum([0, *sizes])[:-1]
    if not runs:
        return starts
    table = np.array([(run.start, run.offset) for run in runs], np.int64)
    own = table[np.searchsorted(table[:, 0], starts, "right") - 1]
    moved: npt.NDArray[np.int64] = starts - own[:, 0] + own[:, 1]
    return moved


def new_bytes(make: Callable[..., Array], shape: tuple[int, ...], what: str, remedy: str) -> Array:
    """A uint8 array by ``make``; CapacityError where there is no memory for it."""
    try:
        return make(shape, dtype=np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:  # the last two: not addressable
        raise CapacityError(
            f"{what} of {math.prod(shape)} bytes cannot be allocated: {error}; {remedy}"
        ) from error


def address_of(array: Array) -> int:
    """Address of an array's first byte, in host or device memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def put_column(target: Array, column: int, rows: npt.NDArray[np.uint8], xp: Any) -> None:
    """``target[:, column] = rows`` for a C-contiguous target of ``xp``: one strided copy, with no
    kernel and nothing allocated. (What is not pinned, the driver stages before this returns.)"""
    if xp is np:
        target[:, column] = rows
        return
    count, columns, width = target.shape
    rows = np.ascontiguousarray(rows)
    xp.cuda.runtime.memcpy2DAsync(
        address_of(target) + column * width,
        columns * width,
        rows.ctypes.data,
        width,
        width,
        count,
        xp.cuda.runtime.memcpyHostToDevice,
        xp.cuda.get_current_stream().ptr,
    )


def _put(target: Array, source: HostBytes) -> None:
    """Copy host bytes into an array of either module."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.data.copy_from_host_async(source.ctypes.data, source.nbytes)


def _get(source: Array, target: HostBytes) -> None:
    """Copy an array of either module to host bytes."""
    if isinstance(source, np.ndarray):
        target[...] = source
    else:
        source.data.copy_to_host_async(target.ctypes.data, target.nbytes)


def _zero(target: Array) -> None:
    """Clear bytes, with no kernel: CuPy would compile one at its first use."""
    if isinstance(target, np.ndarray):
        target[...] = 0
    elif target.size:
        target.data.memset_async(0, target.nbytes)
