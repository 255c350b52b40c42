"""``ArrayView``: memory that a caller names by its address.

For hosts whose buffers no Python library owns: a TensorRT binding, a C server's arena. In: an
address and what lies there. Out: an argument like any other array, and a DLPack export for whoever
else needs it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cupylora.dtypes import DTYPES
from cupylora.errors import ArgumentError
from cupylora.interop import layout
from cupylora.interop.export import make_capsule
from cupylora.interop.layout import Memory
from cupylora.interop.lent import Claim, is_lent
from cupylora.interop.streams import as_stream, order_behind
from cupylora.worklists import Array

__all__ = ["ArrayView"]

_NO_WAIT = -1
"""A DLPack consumer's word for having seen to the order itself."""


@dataclass(frozen=True, eq=False)
class ArrayView:
    """An array at ``pointer``, to be given to any op or layer.

    pointer: address of element [0, ..., 0], in bytes; 0 only where there are no elements.
    shape: extents. dtype: a NumPy dtype, or "bfloat16". device: "cpu", or the number of the CUDA
    device whose memory it is. strides: bytes from one element to the next of each axis; None:
    C-contiguous. writable: False refuses it as an output. stream: what writes it, in any form that
    a stream may have (see ``use_stream``): work waits for what is enqueued there, so it must live
    until the view is given for the last time; None: the caller has seen to that. owner: kept alive
    as long as work that was enqueued with this view.

    It exports itself by DLPack, bfloat16 included: ``jax.dlpack.from_dlpack(ArrayView.of(result))``
    works where NumPy's arrays of bfloat16 refuse.

    Nothing can tell whether the memory is what is said: a wrong address is read and written.
    Raises ArgumentError naming a field that cannot be.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    device: int | Literal["cpu"]
    strides: tuple[int, ...] | None = None
    writable: bool = True
    stream: Any = None
    owner: object = None
    memory: Memory = field(init=False, repr=False)
    """What every form of an array comes down to."""

    def __post_init__(self) -> None:
        shape = _integers("shape", self.shape)
        if any(extent < 0 for extent in shape):
            raise ArgumentError(f"ArrayView.shape is {shape}; extents of 0 or more are needed")
        strides = None if self.strides is None else _integers("strides", self.strides)
        if strides is not None and len(strides) != len(shape):
            raise ArgumentError(
                f"ArrayView.strides is {strides} for shape {shape}; one number of bytes an axis is "
                "needed, or None for C order"
            )
        pointer = _integer("pointer", self.pointer)
        if pointer < 0 or (pointer == 0 and 0 not in shape):
            raise ArgumentError(f"ArrayView.pointer is {pointer}; an address is needed")
        named = isinstance(self.device, str) and self.device == "cpu"
        device: int | str = "cpu" if named else _integer("device", self.device)
        if isinstance(device, int) and not 0 <= device < 1 << 31:
            raise ArgumentError(f'ArrayView.device is {device}; "cpu" or a number is needed')
        dtype = _dtype(self.dtype)
        checked = {"pointer": pointer, "shape": shape, "strides": strides, "dtype": dtype}
        memory = Memory(pointer, shape, dtype, strides, not self.writable, self.owner)
        layout.check_memory("ArrayView", memory)
        for name, value in (*checked.items(), ("device", device), ("memory", memory)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, array: Array) -> ArrayView:
        """A view of a NumPy or CuPy array, which it keeps; of CuPy's: written on the current
        stream, which its importers wait for (also after the end of a block of ``use_stream``)."""
        try:
            shape, strides = tuple(array.shape), tuple(array.strides)
        except AttributeError:
            raise ArgumentError(
                f"array is a {type(array).__name__}; a NumPy or CuPy array is needed"
            ) from None
        if isinstance(array, np.ndarray):
            writable, at = bool(array.flags.writeable), int(array.ctypes.data)
            return cls(at, shape, array.dtype, "cpu", strides, writable, owner=array)
        import cupy

        at, device, stream = int(array.data.ptr), array.device.id, cupy.cuda.get_current_stream()
        if is_lent(stream):
            stream = Claim(stream)
        return cls(at, shape, array.dtype, device, strides, stream=stream, owner=array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (layout.CPU, 0) if self.device == "cpu" else (layout.CUDA, int(self.device))

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule, as the array API standard has it; ``stream`` waits for the view's own."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("an ArrayView is exported where it is, without a copy")
        if self.stream is not None and self.device != "cpu" and stream != _NO_WAIT:
            order_behind("the view", self.stream, as_stream("stream", stream or 0))
        memory = self.memory._replace(strides=self._byte_strides(), owner=self)
        versioned = max_version is not None and tuple(max_version) >= layout.VERSION
        return make_capsule(memory, self.__dlpack_device__(), versioned=versioned)

    def _byte_strides(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        return layout.c_strides(self.shape, np.dtype(self.dtype).itemsize)


def _integer(field: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ArgumentError(f"ArrayView.{field} is {value!r}; an integer is needed")
    return number


def _integers(field: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise ArgumentError(f"ArrayView.{field} is {values!r}; a tuple of integers is needed")
    return tuple(_integer(f"{field}[{place}]", value) for place, value in enumerate(values))


def _dtype(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        found: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    # Memory that is taken for Python objects or records would be followed wherever it points.
    if found is None or found.kind not in "biufcV" or found.type is np.void or not found.isnative:
        raise ArgumentError(f"ArrayView.dtype is {dtype!r}; a type of numbers is needed")
    return found
