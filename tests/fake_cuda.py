"""A stand-in for the part of CuPy that deals with streams, events and memory of others.

"Device" memory is NumPy memory. Nothing runs: what is enqueued, recorded and waited for is logged,
and a test says which streams are being captured or have finished, and which its host destroyed. In:
``FakeCuda.installed``. Out: ``log``, ``wrong``, and arrays as ``fake_device`` has them.
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
from cupylora.interop import convert, events, streams

__all__ = ["FakeCuda", "Interface", "Stream", "describe"]


class Stream:
    """ptr: its handle. busy: has not finished what was enqueued, whichever object that was by."""

    def __init__(self, cuda: FakeCuda, ptr: int, foreign: Any = None) -> None:
        self._cuda, self.ptr, self._foreign_stream_ref = cuda, ptr, foreign

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    @property
    def busy(self) -> bool:
        return self.ptr in self._cuda.busy

    @busy.setter
    def busy(self, value: bool) -> None:
        (self._cuda.busy.add if value else self._cuda.busy.discard)(self.ptr)

    def wait_event(self, event: Any) -> None:
        self._cuda.touch("waits", self.ptr)
        self._cuda.log.append(("wait", self.ptr, event.stream.ptr))

    def synchronize(self) -> None:
        self._cuda.touch("is synchronised", self.ptr)
        self.busy = False

    def __enter__(self) -> Stream:
        self._cuda.touch("is made the current one", self.ptr)
        self._cuda.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cuda.entered.pop()


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.stream = cuda, None

    def record(self, stream: Stream) -> None:
        self._cuda.touch("has an event recorded", stream.ptr)
        self._cuda.log.append(("record", stream.ptr))
        self.stream = stream

    @property
    def done(self) -> bool:
        self._cuda.ask()
        return not self.stream.busy

    def synchronize(self) -> None:
        self._cuda.ask()
        self.stream.busy = False


@dataclass
class FakeCuda:
    """log: ("record", stream), ("wait", stream, other) and ("launch", kernel, arguments).

    capturing: handles of streams. elsewhere: another thread captures in global mode. device: the
    current one. memory: (kind, device) of an address that is not of the current device's memory.
    wrong: what would have crashed, or voided a capture; whoever did it may not have been told.
    """

    log: list[tuple[Any, ...]] = field(default_factory=list)
    capturing: set[int] = field(default_factory=set)
    elsewhere: bool = False
    device: int = 0
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    entered: list[Stream] = field(default_factory=list)
    streams: dict[int, Stream] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    destroyed: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    _relaxed: int = 0

    def __post_init__(self) -> None:
        self._kind: Any = type("Stream", (Stream,), {"from_external": self.from_external})

    def stream(self, ptr: int) -> Stream:
        """One of CuPy's own."""
        if ptr not in self.streams:
            self.streams[ptr] = self._kind(self, ptr)
        return self.streams[ptr]

    def from_external(self, foreign: Any) -> Stream:
        """CuPy's stream of another library's; it keeps the other."""
        version, ptr = foreign.__cuda_stream__()
        assert version == 0
        made: Stream = self._kind(self, ptr, foreign)
        return made

    def destroy(self, ptr: int) -> None:
        """The host does, once its work is over."""
        self.busy.discard(ptr)
        self.destroyed.add(ptr)

    def touch(self, what: str, ptr: int) -> None:
        """A handle goes to the driver."""
        if ptr in self.destroyed:
            self.wrong.append(f"stream {ptr:#x} {what} after its end")

    def ask(self) -> None:
        """An event is asked or waited for."""
        if self.elsewhere and not self._relaxed:
            self.wrong.append("a query voids the capture of another thread")

    @contextlib.contextmanager
    def outside_captures(self) -> Iterator[None]:
        self._relaxed += 1
        try:
            yield
        finally:
            self._relaxed -= 1

    def is_capturing(self, ptr: int) -> bool:
        self.touch("is asked for a capture", ptr)
        return ptr in self.capturing

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
            patch.setattr(driver, "is_capturing", self.is_capturing)
            patch.setattr(driver, "outside_captures", self.outside_captures)
            patch.setattr(events, "_events", {})
            for used in (streams, convert):
                patch.setattr(used, "require_device", lambda: None)
            yield self

    def _namespace(self) -> Any:
        made: Any = types.SimpleNamespace()
        self._kind.null, self._kind.ptds = self.stream(0), self.stream(2)
        made.Stream = self._kind
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
