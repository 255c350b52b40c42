"""What differs between NumPy and CUDA for code that is written once for both.

A layer is given an :class:`ArrayBackend` and takes from it the array module, transfers, timing
marks, memory figures and the error-flag word of device work; the ops then follow the arrays. CuPy
is imported when a :class:`CudaBackend` is made, not before.
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.checks import check_array
from cupylora.device import Backend, require_cuda, resolve_backend
from cupylora.errors import CapacityError
from cupylora.host_memory import HostMemory
from cupylora.interop.convert import borrow
from cupylora.interop.lifetimes import release_finished
from cupylora.ops.status import DeviceStatus
from cupylora.pinned import PinnedPool
from cupylora.worklists import Array

__all__ = ["ArrayBackend", "CudaBackend", "NumpyBackend", "StageClock", "open_backend"]


class ArrayBackend(ABC):
    """One place where arrays live. ``xp`` is its array module, ``status`` what ops take as such."""

    name: Backend
    xp: Any
    status: Any

    @property
    def on_device(self) -> bool:
        """Whether its arrays are device arrays, as argument checks ask."""
        return self.name == "cuda"

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A new C-contiguous array, its content undefined.

        Raises CapacityError where there is no memory for it.
        """
        return self._allocate(self.xp.empty, shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A new C-contiguous array of zeros. Raises CapacityError as ``empty`` does."""
        return self._allocate(self.xp.zeros, shape, dtype)

    def _allocate(self, make: Any, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        try:
            return make(shape, dtype)
        except (MemoryError, ValueError, OverflowError) as error:  # the last two: not addressable
            needed = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
            if needed < 0:
                raise
            raise CapacityError(
                f"an array {shape} of {np.dtype(dtype)} needs {needed} bytes, {self.free_bytes()} "
                f"are available on the {self.name} backend; use fewer tokens or a smaller model"
            ) from error

    @abstractmethod
    def asarray(self, host: npt.NDArray[Any]) -> Array:
        """A copy of a host array here, C-contiguous."""

    def view(self, array: Any, name: str = "array", *, writable: bool = False) -> Array:
        """An array of ``xp`` over the memory of ``array``, which may be another library's.

        For what is given to many calls, such as weights: they then convert nothing, and wait for
        no one. Work on the current stream is ordered behind what wrote it so far. The view keeps
        the memory, on a device until work on that stream is over, too; use it on no other, or see
        to the rest yourself. writable: it will be written. Raises ArgumentError naming ``name`` for
        what cannot be viewed here.
        """
        taken = borrow(name, array, on_device=self.on_device, written=writable)
        check_array(name, taken, contiguous=False, writable=writable, on_device=self.on_device)
        return taken

    @abstractmethod
    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """A copy of a C-contiguous array in host memory, once all work before it has finished."""

    @abstractmethod
    def clear(self, array: Array) -> None:
        """Set all bytes of a C-contiguous array to zero."""

    @abstractmethod
    def host_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that copies to this backend read fastest, its content undefined. Raises
        CapacityError where there is none."""

    @abstractmethod
    def host_pool(self, limit: int) -> Callable[[int], HostMemory]:
        """Gives memory like ``host_buffer``'s, for about ``limit`` bytes together that come and
        go."""

    @abstractmethod
    def upload(self, target: Array, host: npt.NDArray[np.uint8]) -> None:
        """Copy bytes of a ``host_buffer`` to a uint8 array of equal size here, in stream order; the
        buffer is read until then."""

    @abstractmethod
    def wait_for(self, mark: Any) -> None:
        """Wait until work enqueued before a mark is over."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Make a C-contiguous array's content that of another one here, of equal dtype and shape,
        in stream order."""

    @abstractmethod
    def address(self, array: Array) -> int:
        """Address of an array's first element."""

    @abstractmethod
    def check_status(self) -> None:
        """Raise ArgumentError for what finished device work found wrong since the last check."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all enqueued work has finished."""

    @abstractmethod
    def mark(self) -> Any:
        """A point in the order of work, for ``seconds_between``; never waits."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another, both passed (``synchronize`` first)."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that could be allocated now."""

    @abstractmethod
    def held_bytes(self) -> int | None:
        """Bytes that allocations here hold, free blocks kept for reuse included; None: unknown."""


class NumpyBackend(ArrayBackend):
    """The CPU: every call has finished when it returns, and errors raise where they occur."""

    name: Backend = "numpy"
    xp: Any = np
    status: Any = None

    def asarray(self, host: npt.NDArray[Any]) -> Array:
        """A copy of a host array."""
        return np.array(host, order="C")

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """A copy of an array in host memory."""
        return np.array(array)

    def clear(self, array: Array) -> None:
        """Set every element to zero."""
        array.fill(0)

    def host_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Any memory."""
        buffer: npt.NDArray[np.uint8] = self.empty(nbytes, np.uint8)
        return buffer

    def host_pool(self, limit: int) -> Callable[[int], HostMemory]:
        """Any memory."""
        return HostMemory.new

    def upload(self, target: Array, host: npt.NDArray[np.uint8]) -> None:
        """Copy all bytes."""
        target[...] = host

    def wait_for(self, mark: Any) -> None:
        """Nothing to wait for."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy all elements."""
        target[...] = source

    def address(self, array: Array) -> int:
        """Address of an array's first element."""
        return int(array.ctypes.data)

    def check_status(self) -> None:
        """Nothing to report: host checks raise at once."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def mark(self) -> Any:
        """The time."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""
        return float(end - start)

    def free_bytes(self) -> int:
        """Available memory."""
        try:  # sysconf does not count the page cache
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def held_bytes(self) -> int | None:
        """Unknown: NumPy does not say."""
        return None


class CudaBackend(ArrayBackend):
    """CuPy's current device and current stream.

    ``status`` is one word for all that is given this backend: a call reports what work before it
    met. Raises DeviceUnavailableError where CUDA is not ready.
    """

    name: Backend = "cuda"

    def __init__(self) -> None:
        require_cuda()
        import cupy

        self.xp = cupy
        self.status = DeviceStatus()

    def asarray(self, host: npt.NDArray[Any]) -> Array:
        """A copy of a host array on the device."""
        array = self.xp.empty(host.shape, host.dtype)
        if array.size:
            array.set(np.ascontiguousarray(host))
        return array

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """A copy of an array in host memory."""
        if not array.size:
            return np.empty(array.shape, array.dtype)
        host: npt.NDArray[Any] = array.get()
        return host

    def clear(self, array: Array) -> None:
        """Set every byte to zero on the current stream."""
        if array.size:
            array.data.memset_async(0, array.nbytes)

    def host_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Pinned memory, which copies read without the driver's staging."""
        return np.frombuffer(self._pinned(max(1, nbytes)), np.uint8, nbytes)

    def host_pool(self, limit: int) -> Callable[[int], HostMemory]:
        """Pinned memory that is used again."""
        return PinnedPool(self._pinned, limit).take

    def _pinned(self, nbytes: int) -> Any:
        """New pinned memory, not from CuPy's pool, which would keep every size it ever had."""
        cuda = self.xp.cuda
        try:
            return cuda.PinnedMemoryPointer(cuda.PinnedMemory(nbytes), 0)
        except cuda.runtime.CUDARuntimeError as error:
            raise CapacityError(
                f"{nbytes} bytes of pinned host memory cannot be had: {error}; use a smaller "
                "host cache"
            ) from error

    def upload(self, target: Array, host: npt.NDArray[np.uint8]) -> None:
        """Copy all bytes on the current stream, and return at once."""
        cuda = self.xp.cuda
        kind, stream = cuda.runtime.memcpyHostToDevice, cuda.get_current_stream().ptr
        if host.size:
            address = self.address(target)
            cuda.runtime.memcpyAsync(address, host.ctypes.data, host.nbytes, kind, stream)

    def wait_for(self, mark: Any) -> None:
        """Wait for an event."""
        mark.synchronize()

    def copy(self, target: Array, source: Array) -> None:
        """Copy all bytes on the current stream, with no kernel, whatever the dtype."""
        if source.size:
            target.data.copy_from_device_async(source.data, source.nbytes)

    def address(self, array: Array) -> int:
        """Address of an array's first element."""
        return int(array.data.ptr)

    def check_status(self) -> None:
        """Raise for the bits of ``status`` and clear them."""
        self.status.check()

    def synchronize(self) -> None:
        """Wait for the current stream."""
        self.xp.cuda.get_current_stream().synchronize()
        release_finished()

    def mark(self) -> Any:
        """An event on the current stream."""
        event = self.xp.cuda.Event()
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""
        return float(self.xp.cuda.get_elapsed_time(start, end)) / 1e3

    def free_bytes(self) -> int:
        """The device's free memory, free blocks of CuPy's pool included."""
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def held_bytes(self) -> int | None:
        """All that CuPy's pool took from the device."""
        return int(self.xp.get_default_memory_pool().total_bytes())


def open_backend(name: str) -> ArrayBackend:
    """The backend for "auto" (cuda where it is ready), "cuda" or "numpy".

    Raises DeviceUnavailableError when cuda is asked for where it is not ready, ArgumentError for
    any other name.
    """
    return CudaBackend() if resolve_backend(name) == "cuda" else NumpyBackend()


class StageClock:
    """Seconds of each stage of a step, by marks between the stages' work.

    ``start`` once a step, then ``lap(name)`` after a stage's work has been enqueued; a name that
    comes again in a step adds up. Marks never wait, ``seconds`` does.
    """

    def __init__(self, backend: ArrayBackend) -> None:
        self._backend = backend
        self._steps: list[list[tuple[str, Any]]] = []

    def start(self) -> None:
        """Begin a step."""
        self._steps.append([("", self._backend.mark())])

    def lap(self, stage: str) -> None:
        """The work since the last mark belongs to ``stage``."""
        self._steps[-1].append((stage, self._backend.mark()))

    def seconds(self) -> tuple[dict[str, list[float]], list[float]]:
        """Per stage its seconds in each step, and the seconds of the whole steps."""
        self._backend.synchronize()
        stages: dict[str, list[float]] = {}
        for number, marks in enumerate(self._steps):
            for (_, before), (stage, after) in itertools.pairwise(marks):
                per_step = stages.setdefault(stage, [0.0] * len(self._steps))
                per_step[number] += self._backend.seconds_between(before, after)
        return stages, [self._between(marks[0], marks[-1]) for marks in self._steps]

    def _between(self, first: tuple[str, Any], last: tuple[str, Any]) -> float:
        return self._backend.seconds_between(first[1], last[1])


Lap = Callable[[str], None]
"""Told a stage's name once its work has been enqueued."""


def total_bytes(arrays: Iterable[Array | None]) -> int:
    """Bytes of the arrays' elements; None counts nothing."""
    return sum(int(array.nbytes) for array in arrays if array is not None)
