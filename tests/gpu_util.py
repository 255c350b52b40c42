"""Device memory for tests of the kernels: uploads, slot entries, and comparisons with the twins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def to_device(value: Any) -> Any:
    """A NumPy array, or a dataclass of arrays, on the current device."""
    import cupy

    if isinstance(value, np.ndarray):
        return cupy.asarray(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(
            value, **{f.name: to_device(getattr(value, f.name)) for f in fields}
        )
    return value


def to_host(value: Any) -> Any:
    """The inverse of ``to_device``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(
            value, **{f.name: to_host(getattr(value, f.name)) for f in fields}
        )
    return value.get() if hasattr(value, "get") else value


@dataclass
class DeviceMemory:
    """Keeps uploaded arrays alive, each ``shift`` bytes beyond an aligned address.

    Every block lies between 256-byte guards of NaN bits, so that a read past its end is seen.
    """

    shift: int = 0
    kept: list[Any] = field(default_factory=list)

    def upload(self, array: np.ndarray) -> int:
        """Device address of a copy of ``array``."""
        import cupy

        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = 256 + self.shift
        block = np.full(start + len(data) + 256, 0xFF, np.uint8)
        block[start : start + len(data)] = data
        self.kept.append(cupy.asarray(block))
        return int(self.kept[-1].data.ptr) + start


def shifted_copy(array: np.ndarray, elements: int) -> Any:
    """The array on the device, starting ``elements`` elements past an aligned address."""
    import cupy

    flat = cupy.empty(array.size + elements, array.dtype)
    view = flat[elements:].reshape(array.shape)
    view[...] = cupy.asarray(array)
    return view


def assert_same_lists(actual: Any, expected: Any, counts: dict[str, int] | None = None) -> None:
    """Equal arrays field by field; a field named in ``counts`` up to that many elements."""
    for f in dataclasses.fields(expected):
        want = getattr(expected, f.name)
        if dataclasses.is_dataclass(want):
            assert_same_lists(getattr(actual, f.name), want, counts)
        elif isinstance(want, np.ndarray):
            got = to_host(getattr(actual, f.name))
            length = (counts or {}).get(f.name, want.shape[0])
            np.testing.assert_array_equal(got[:length], want[:length], err_msg=f.name)
