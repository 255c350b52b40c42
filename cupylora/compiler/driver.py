"""The CUDA driver's functions that are used directly, through ctypes on ``libcuda``.

Loaded on first use. ``device`` asks it what there is; ``kernel`` sets attributes and launches with
it. A ctypes call with arguments made ahead costs a fraction of a microsecond, and the status of
every call becomes a named error in ``check``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from cupylora.errors import CupyloraError

__all__ = [
    "CLUSTER_DIMENSION",
    "PROGRAMMATIC_STREAM_SERIALIZATION",
    "LaunchAttribute",
    "LaunchConfig",
    "check",
    "error_text",
    "is_capturing",
    "library",
    "outside_captures",
]

CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; the union ``value`` is seen as words."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_uint * 16),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda; raises OSError where no driver is installed.

    The functions have no argument types: callers pass ctypes values, as the launch path needs
    (a conversion per argument would cost more than the rest of the call).
    """
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, doing: str) -> None:
    """Raise CupyloraError that says what was being done and the driver's name for the failure."""
    if status != 0:
        raise CupyloraError(f"{doing} failed: {error_text(status)}")


def error_text(status: int) -> str:
    """The driver's name and description of a status, such as CUDA_ERROR_INVALID_VALUE."""
    cuda = library()
    parts = []
    for function in (cuda.cuGetErrorName, cuda.cuGetErrorString):
        text = ctypes.c_char_p()
        if function(ctypes.c_int(status), ctypes.byref(text)) == 0 and text.value:
            parts.append(text.value.decode(errors="replace"))
    return f"{': '.join(parts) or 'unknown error'} (status {status})"


def is_capturing(stream: int) -> bool:
    """Whether what is enqueued on the stream of handle ``stream`` becomes part of a graph.

    The legacy default stream, handle 0 or 1, cannot be captured.
    """
    if stream in (0, 1):
        return False
    state = ctypes.c_int()
    status = library().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(state))
    check(status, "asking whether a stream is being captured")
    return state.value != 0


@contextlib.contextmanager
def outside_captures() -> Iterator[None]:
    """Inside, this thread may make and query events of streams that are not being captured.

    Else a query would void a capture under way in this thread, or in any thread where the host
    captures in global mode.
    """
    mode = ctypes.c_int(_RELAXED)
    exchange = library().cuThreadExchangeStreamCaptureMode
    check(exchange(ctypes.byref(mode)), "leaving the mode of stream captures")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
