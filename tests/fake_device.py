"""Stand-ins for a device: arrays that carry NumPy memory, and what the ops ask of CuPy.

Whoever installs them says what becomes of launches: recorded, or run by the emulator.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from cupylora.compiler import kernel as kernels
from cupylora.ops import _device


class FakeArray:
    """What an op may ask of a device array: dtype, shape, flags, views and an address.

    Around a host array, or made as CuPy's: from shape, dtype, memory at an address, and strides.
    """

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, host: Any, dtype: Any = None, memory: Any = None, strides: Any = None
    ) -> None:
        if memory is not None:
            host = _at(memory.ptr, host, np.dtype(dtype), strides)
        self.host, self.memory = host, memory
        self.dtype, self.shape, self.flags, self.size = (
            host.dtype,
            host.shape,
            host.flags,
            host.size,
        )
        self.data = types.SimpleNamespace(ptr=host.ctypes.data)
        self.strides, self.device = host.strides, types.SimpleNamespace(id=0)

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, key: Any) -> FakeArray:
        return FakeArray(self.host[key])

    def view(self, dtype: Any) -> FakeArray:
        """The same bytes as another type."""
        made = FakeArray(self.host.view(dtype))
        made.memory = self.memory
        return made

    def get(self) -> np.ndarray:
        """A copy on the host."""
        return self.host.copy()


class _Span:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _at(address: int, shape: Any, dtype: np.dtype, strides: Any) -> np.ndarray:
    """An array at an address, of any dtype."""
    if 0 in shape:
        return np.empty(shape, dtype)
    typestr = f"<u{dtype.itemsize}"
    interface = {"version": 3, "shape": shape, "typestr": typestr, "strides": strides}
    return np.asarray(_Span({**interface, "data": (address, False)})).view(dtype)


def each_array(value: Any, change: Callable[[np.ndarray], Any]) -> Any:
    """``value`` with ``change`` made to it, or to every array of a dataclass."""
    if isinstance(value, np.ndarray):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        parts = {name: each_array(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **parts)
    return value


def fake(value: Any) -> Any:
    """An array, or a dataclass of arrays, on the device that is none; contents are not kept."""
    return each_array(value, lambda array: FakeArray(aligned(array)))


def aligned(array: np.ndarray) -> np.ndarray:
    """Unset memory of the array's form on a 256-byte boundary."""
    room = np.empty(array.nbytes + 256, np.uint8)
    skip = -room.ctypes.data % 256
    return room[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)


@dataclasses.dataclass(frozen=True)
class Enqueued:
    """What an op asked of ``ops._device.enqueue``, whose arguments these are."""

    program: str
    kernel: str
    types: Sequence[str]
    grid: Sequence[int]
    threads: int
    args: Sequence[Any]
    smem: int = 0
    _: dataclasses.KW_ONLY
    dependent: bool = False
    cluster: Any = None

    @property
    def name(self) -> str:
        """Of the kernel in its program."""
        return f"{self.program}/{self.kernel}"

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] if self.cluster else 1

    def packed(self) -> bytes:
        """The arguments as the launch would pack them; fails where they do not fit their types."""
        return struct.pack("@" + "".join(map(kernels._format, self.types)), *self.args)


def install(
    monkeypatch: pytest.MonkeyPatch, new_array: Callable[[np.ndarray], Any], **functions: Any
) -> None:
    """Put a module in CuPy's place, and ``functions`` in the places of those of ``ops._device``."""
    module: Any = types.ModuleType("cupy")
    module.ndarray = FakeArray
    module.empty = lambda shape, dtype: new_array(np.empty(shape, dtype))
    module.asarray = new_array
    module.zeros = lambda shape, dtype: new_array(np.zeros(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(_device, "in_capture", lambda: False)
    for name, used in list(sys.modules.items()):
        if not name.startswith("cupylora.ops.") or used is _device:
            continue
        for function, replacement in functions.items():
            if hasattr(used, function):
                monkeypatch.setattr(used, function, replacement)
