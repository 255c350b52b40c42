"""CUDA streams in every form that libraries have them, and ours ordered behind another.

In: CuPy's streams, anything with ``__cuda_stream__`` (cuda.core, numba-cuda, PyTorch), PyTorch's
``cuda_stream`` number, or an integer handle. Out: a CuPy stream, which ops enqueue on while it is
the current one.

Order is made by events alone; nothing here waits on the host. In a capture an event of a stream
outside it would void the graph, so that is refused before it is tried. A stream that is not CuPy's
own is touched inside calls and blocks that its owner makes with it, not later (``lent``).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import Any

from cupylora.compiler import driver
from cupylora.device import require_cuda
from cupylora.errors import ArgumentError, GraphError
from cupylora.interop.events import put_event_back, take_event
from cupylora.interop.layout import home_of
from cupylora.interop.lent import Claim, block_of

__all__ = [
    "as_stream",
    "dlpack_stream",
    "order_behind",
    "require_device",
    "stream_handle",
    "use_stream",
]

_LEGACY, _PER_THREAD = 1, 2
_PROTOCOL = 0
"""Version of ``__cuda_stream__``."""


def stream_handle(name: str, stream: Any) -> int:
    """The handle of a stream in any form: 0 and 1 the legacy default stream, 2 the per-thread one.

    Raises ArgumentError naming the argument ``name`` for what is none.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return _by_protocol(name, stream, protocol() if callable(protocol) else protocol)
    for attribute in ("ptr", "cuda_stream"):  # CuPy's before it had the protocol, and PyTorch's
        found = getattr(stream, attribute, None)
        if found is not None:
            return _handle(name, stream, found)
    return _handle(name, stream, stream)


def _by_protocol(name: str, stream: Any, answer: Any) -> int:
    if not isinstance(answer, tuple) or len(answer) != 2 or answer[0] != _PROTOCOL:
        raise ArgumentError(
            f"{name} is a {type(stream).__name__} whose __cuda_stream__ gives {answer!r}; "
            f"({_PROTOCOL}, handle) is needed"
        )
    return _handle(name, stream, answer[1])


def _handle(name: str, stream: Any, number: Any) -> int:
    try:
        handle = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        handle = -1
    if handle < 0:
        raise ArgumentError(
            f"{name} is {stream!r}; a CUDA stream is needed: one of CuPy's, an object with "
            "__cuda_stream__, or its handle as an integer"
        )
    return handle


class _Foreign:
    """A stream by its handle, as CuPy takes it: CuPy keeps this, and this its library's object."""

    def __init__(self, handle: int, owner: object) -> None:
        self._handle, self.owner = handle, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return _PROTOCOL, self._handle


def as_stream(name: str, stream: Any) -> Any:
    """CuPy's stream for a stream in any form; it keeps what it was made from.

    One of CuPy's own is returned as it is. Raises ArgumentError as ``stream_handle`` does.
    """
    import cupy

    of_cupy = cupy.cuda.Stream
    if isinstance(stream, of_cupy):
        return stream
    handle = stream_handle(name, stream)
    if handle in (0, _LEGACY):
        return of_cupy.null
    if handle == _PER_THREAD:
        return of_cupy.ptds
    return of_cupy.from_external(_Foreign(handle, stream))


@contextlib.contextmanager
def use_stream(stream: Any) -> Iterator[None]:
    """Inside, ops and layers enqueue on ``stream``, in any form, in this thread.

    ``with use_stream(torch.cuda.current_stream()):`` puts our work in line with PyTorch's, so that
    neither needs to wait for the other. The stream must live until the block has ended, not longer;
    destroy it once its work is over. Raises ArgumentError for what is no stream,
    DeviceUnavailableError where CUDA is not ready.
    """
    require_device()
    with block_of(as_stream("stream", stream)):
        yield


@functools.cache
def require_device() -> None:
    """Raise DeviceUnavailableError where CUDA is not ready. Found ready once, it stays so: a step
    may come here each time."""
    require_cuda()


def dlpack_stream(value: Any, current: int) -> int | None:
    """What ``value.__dlpack__`` is told of the stream of handle ``current``, where work will go.

    Inside a capture: that it must not make the stream wait, since a wait for another stream would
    void the graph.
    """
    if driver.is_capturing(current):
        # JAX takes every number for a handle; it makes nobody wait if it gets none.
        return None if home_of(type(value)) in ("jax", "jaxlib") else -1
    return current or _LEGACY


def order_behind(name: str, producer: Any, current: Any) -> None:
    """What is enqueued on CuPy's stream ``current`` from here on waits for what is on ``producer``.

    producer: a stream in any form, which argument ``name`` was written on, or the claim to one that
    may be gone. Raises GraphError where one of them is being captured, since the wait would void
    the graph.
    """
    handle, ours = stream_handle(f"{name}.stream", producer), int(current.ptr)
    if (handle or _LEGACY) == (ours or _LEGACY):
        return
    event = producer.passed() if isinstance(producer, Claim) else None
    theirs = 0 if handle == _LEGACY or event is not None else handle
    if driver.is_capturing(ours) or driver.is_capturing(theirs):
        raise GraphError(
            f"{name} is written on another stream (handle {handle:#x}) than the current one, and "
            "one of the two is being captured: a wait for the other would void the graph; write it "
            "on the capturing stream, or have that stream wait before the capture and give an "
            "array that names no stream"
        )
    if event is None:
        _wait_for_all(as_stream(name, producer), current)
    else:
        current.wait_event(event)


def _wait_for_all(producer: Any, current: Any) -> None:
    """CuPy's stream ``current`` waits for what is on CuPy's stream ``producer``."""
    import cupy

    device = int(cupy.cuda.runtime.getDevice())
    event = take_event(device)
    event.record(producer)
    current.wait_event(event)
    put_event_back(device, event)
