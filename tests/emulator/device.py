"""A stand-in for a GPU whose launches are emulated.

In: NumPy arrays (``Device.array``, ``Device.upload``), which kernels may touch as far as they were
told, and the ops' launches. Out: the arrays as the kernels left them (``host``), or EmulatorError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import Enqueued, FakeArray, each_array, install

from cupylora.compiler.programs import find_program
from cupylora.compiler.sources import KernelProgram
from cupylora.resources import cuda_source_dir

from .build import Builder

__all__ = [
    "EVERY_THREAD_WAITS",
    "ONE_BYTE_PROGRAMS",
    "READ_UNSET",
    "Device",
    "EmulatorError",
    "Schedule",
]

_GUARD = 256
ONE_BYTE_PROGRAMS = ("plan", "plan_large")
"""Programs whose threads share memory byte by byte; elsewhere two bytes are tracked together."""

EVERY_THREAD_WAITS = ("lora_cluster", "lora_ring")
"""Programs where a thread may not leave before the kernel ahead has ended."""

READ_UNSET = (
    "lora_ring",
    "lora_shrink_stream",
    "lora_shrink_wide",
    "lora_shrink_group",
    "lora_expand_panel",
    "lora_expand_stream",
)
"""Programs that multiply what lies in the places of rows and columns that a tile lacks, and drop
the products."""

_SHARED_LIMIT = 227 * 1024
_SHARED_PER_SM = 228 * 1024
_WRITABLE, _ONCE, _LATE, _BY_ANYONE = 1, 2, 4, 8
_REASONS = {2: "its parameters are others", 3: "the library has no such kernel"}


class EmulatorError(AssertionError):
    """What the emulator has against a launch, and where in the sources."""


class _Shape(ctypes.Structure):
    """emu::Shape of shape.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("grid_x", "grid_y", "cluster", "threads", "smem")),
        *((name, ctypes.c_uint32) for name in ("dependent", "each_waits", "may_read_unset")),
        ("granule_log2", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("deliver", "pause", "strict_push")),
    )


@dataclass(frozen=True)
class Schedule:
    """How threads and asynchronous work take turns; see shape.h.

    strict_push: st.async orders its own bytes for those who wait for them, not what its thread did
    before.
    """

    seed: int = 1
    deliver: int = 20_000
    pause: int = 2_000
    strict_push: bool = False


@dataclass
class _Range:
    """Memory that kernels may touch, and how (RangeFlags of shape.h)."""

    first: int
    size: int
    flags: int


@dataclass
class Device:
    """An emulated device.

    schedule: of the launches to come. blocks: that it is said to hold at a time. find: the program
    of a name. launched: the kernels that ran.
    """

    builder: Builder = field(default_factory=lambda: Builder(cuda_source_dir()))
    schedule: Schedule = field(default_factory=Schedule)
    hopper: bool = True
    blocks: int = 5
    find: Callable[[str], KernelProgram] = find_program
    launched: list[str] = field(default_factory=list, repr=False)
    _ranges: list[_Range] = field(default_factory=list, repr=False)
    _kept: list[np.ndarray] = field(default_factory=list, repr=False)

    def array(
        self,
        values: np.ndarray,
        *,
        writable: bool = False,
        once: bool = False,
        late: bool = True,
        by_anyone: bool = False,
        shift: int = 0,
        visible: int | None = None,
    ) -> FakeArray:
        """A copy of ``values`` that kernels may touch.

        writable: also to write; once: each element at most once. late: a kernel ahead of the
        next launch may write it.
        by_anyone: threads may write one byte in no order. shift: bytes beyond an aligned address.
        visible: bytes that may be touched, if not all.
        """
        values = np.ascontiguousarray(values)
        room = np.full(values.nbytes + 3 * _GUARD + shift, 0xFF, np.uint8)
        start = -room.ctypes.data % _GUARD + _GUARD + shift
        host = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        host[...] = values
        flags = (writable or once) * _WRITABLE | once * _ONCE
        flags |= late * _LATE | by_anyone * _BY_ANYONE
        size = values.nbytes if visible is None else visible
        if size:
            self._ranges.append(_Range(host.ctypes.data, size, flags))
        self._kept.append(room)
        return FakeArray(host)

    def upload(self, value: Any, **options: Any) -> Any:
        """``array`` of an array, or of every array of a dataclass."""
        return each_array(value, lambda array: self.array(array, **options))

    def weights(self, values: np.ndarray, shift: int = 0) -> int:
        """Address of a copy of what no kernel writes."""
        return int(self.array(values, late=False, shift=shift).data.ptr)

    def status(self) -> FakeArray:
        """A word for the faults that kernels report."""
        word = np.zeros(1, np.int32)
        return self.array(word, writable=True, late=False, by_anyone=True)

    def forget(self) -> None:
        """Let go of all memory."""
        self._ranges.clear()
        self._kept.clear()

    def enqueue(self, *args: Any, **options: Any) -> None:
        """Run a launch to its end, in the place of ``ops._device.enqueue``."""
        launch = Enqueued(*args, **options)
        program, grid, packed = launch.program, launch.grid, launch.packed()
        shape = _Shape(
            grid_x=grid[0],
            grid_y=grid[1] if len(grid) > 1 else 1,
            cluster=launch.cluster_size,
            threads=launch.threads,
            smem=launch.smem,
            dependent=launch.dependent,
            each_waits=program.startswith(EVERY_THREAD_WAITS),
            may_read_unset=program.startswith(READ_UNSET),
            granule_log2=0 if program in ONE_BYTE_PROGRAMS else 1,
            seed=self.schedule.seed,
            deliver=self.schedule.deliver,
            pause=self.schedule.pause,
            strict_push=self.schedule.strict_push,
        )
        core = _load(self.builder.core(), ctypes.RTLD_GLOBAL)
        path = self.builder.library(self.find(program))
        library = _load(path, ctypes.RTLD_LOCAL)
        core.emulator_clear_ranges()
        for part in self._ranges:
            first, size = ctypes.c_uint64(part.first), ctypes.c_uint64(part.size)
            core.emulator_add_range(first, size, part.flags)
        self.launched.append(launch.name)
        code = library.emulate(launch.kernel.encode(), ctypes.byref(shape), packed, len(packed))
        if code:
            core.emulator_message.restype = ctypes.c_char_p
            why = _REASONS.get(code) or _with_places(core.emulator_message().decode(), path)
            raise EmulatorError(
                f"{launch.name}, grid {tuple(grid)}, {launch.threads} threads, "
                f"{launch.smem} bytes: {why}"
            )
        # What a launch waits for is all that came before the one ahead of it has waited for.
        for number, part in enumerate(self._ranges):
            late = core.emulator_range_written(number) and not part.flags & _BY_ANYONE
            part.flags = part.flags & ~_LATE | _LATE * bool(late)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Device]:
        """Within, the ops called with this device's arrays launch on it."""
        with pytest.MonkeyPatch.context() as patch:
            install(
                patch,
                lambda array: self.array(array, writable=True),
                enqueue=self.enqueue,
                current_device=lambda: 0,
                is_hopper=lambda: self.hopper,
                resident_blocks=lambda *_: self.blocks,
                active_clusters=lambda *_: self.blocks,
                shared_limit=lambda: _SHARED_LIMIT,
                shared_memory=lambda: (_SHARED_LIMIT, _SHARED_PER_SM),
            )
            yield self
        self.forget()


_loaded: dict[Path, ctypes.CDLL] = {}


def _load(path: Path, mode: int) -> ctypes.CDLL:
    if path not in _loaded:
        _loaded[path] = ctypes.CDLL(str(path), mode)
    return _loaded[path]


def _with_places(message: str, library: Path) -> str:
    """``message`` with the sources' lines where it has the library's addresses."""
    tool = shutil.which("addr2line")
    if tool is None:
        return message

    def place(found: re.Match[str]) -> str:
        at = hex(int(found.group(1), 16) - 1)  # within the call, not behind it
        command = [tool, "-i", "-e", str(library), at]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        own = (line.split()[0] for line in lines.splitlines() if line.startswith("./"))
        return f"({' < '.join(dict.fromkeys(map(os.path.normpath, own))) or '?'})"

    return re.sub(r"\[code\+(0x[0-9a-f]+)\]", place, message)
