"""A stand-in for the part of CuPy that deals with streams, events and memory of others.

"Device" memory is NumPy memory. Nothing runs: what is enqueued, recorded and waited for is logged,
and a test says which streams are being captured or have finished. In: ``FakeCuda.installed``. Out:
``log``, and arrays as ``fake_device`` has them.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fake_device import FakeArray, fake, install

from cupylora.compiler import driver
from cupylora.interop import convert, streams

__all__ = ["FakeCuda", "Interface", "Stream", "describe"]


class Stream:
    """ptr: its handle. busy: has not finished what was enqueued."""

    def __init__(self, cuda: FakeCuda, ptr: int) -> None:
        self._cuda, self.ptr, self.busy, self.external = cuda, ptr, False, None

    def wait_event(self, event: Any) -> None:
        self._cuda.log.append(("wait", self.ptr, event.stream.ptr))

    def __enter__(self) -> Stream:
        self._cuda.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cuda.entered.pop()


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.stream = cuda, None

    def record(self, stream: Stream) -> None:
        self._cuda.log.append(("record", stream.ptr))
        self.stream = stream

    @property
    def done(self) -> bool:
        return not self.stream.busy


@dataclass
class FakeCuda:
    """log: ("record", stream), ("wait", stream, other) and ("launch", kernel, arguments).

    capturing: handles of streams. device: the current one. memory: (kind, device) of an address
    that is not of the current device's memory.
    """

    log: list[tuple[Any, ...]] = field(default_factory=list)
    capturing: set[int] = field(default_factory=set)
    device: int = 0
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    entered: list[Stream] = field(default_factory=list)
    streams: dict[int, Stream] = field(default_factory=dict)

    def stream(self, ptr: int) -> Stream:
        return self.streams.setdefault(ptr, Stream(self, ptr))

    def from_external(self, foreign: Any) -> Stream:
        """CuPy's stream of another library's; it keeps the other."""
        version, ptr = foreign.__cuda_stream__()
        assert version == 0
        made = self.stream(ptr)
        made.external = foreign
        return made

    @property
    def current(self) -> Stream:
        return self.entered[-1] if self.entered else self.stream(0)

    def enqueue(self, program: str, kernel: str, types: Any, grid: Any, threads: int, args: Any,
                smem: int = 0, **_: Any) -> None:  # fmt: skip
        self.log.append(("launch", f"{program}/{kernel}", tuple(args)))

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        with pytest.MonkeyPatch.context() as patch:
            install(patch, fake, enqueue=self.enqueue, shared_limit=lambda: 227 * 1024)
            sys.modules["cupy"].cuda = self._namespace()
            patch.setattr(driver, "is_capturing", lambda handle: handle in self.capturing)
            patch.setattr(driver, "outside_captures", contextlib.nullcontext)
            patch.setattr(streams, "_events", {})
            for used in (streams, convert):
                patch.setattr(used, "require_device", lambda: None)
            yield self

    def _namespace(self) -> Any:
        made: Any = types.SimpleNamespace()
        # Instances are made by ``stream``; the class is what is asked for.
        known = {"null": self.stream(0), "ptds": self.stream(2)}
        made.Stream = type("Stream", (), {**known, "from_external": self.from_external})
        made.Event = lambda disable_timing=False: _Event(self)
        made.Device = lambda number: contextlib.nullcontext()
        made.get_current_stream = lambda: self.current
        made.UnownedMemory = lambda ptr, size, owner, device: types.SimpleNamespace(
            ptr=ptr, owner=owner, device=device
        )
        made.MemoryPointer = lambda memory, offset: types.SimpleNamespace(
            ptr=memory.ptr + offset, memory=memory
        )
        made.runtime = types.SimpleNamespace(
            getDevice=lambda: self.device,
            setDevice=lambda number: setattr(self, "device", number),
            memoryTypeHost=1,
            memoryTypeDevice=2,
            memoryTypeManaged=3,
            pointerGetAttributes=self._attributes,
        )
        return made

    def _attributes(self, pointer: int) -> Any:
        kind, device = self.memory.get(pointer, (2, self.device))
        return types.SimpleNamespace(type=kind, device=device)


class Interface:
    """An object of another library: no attributes but ``__cuda_array_interface__``."""

    def __init__(self, entries: dict[str, Any], kept: object = None) -> None:
        self._entries, self._kept = entries, kept

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._entries


def describe(array: np.ndarray, **changes: Any) -> Interface:
    """NumPy memory as another library's device array; ``changes`` to what it says, ... left out."""
    entries = {
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (array.ctypes.data, False),
        "version": 3,
        "strides": None if array.flags.c_contiguous else array.strides,
        "stream": None,
        **changes,
    }
    return Interface({k: v for k, v in entries.items() if v is not ...}, array)


def own(array: np.ndarray) -> FakeArray:
    """An array of the stand-in's own over the same memory."""
    return FakeArray(array)
