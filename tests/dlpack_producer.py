"""A minimal DLPack producer, by hand: capsules of NumPy memory whose deleters are counted.

In: a NumPy array (any strides) and what the capsule is to say of it. Out: an object with
``__dlpack__`` whose ``deleted`` counts the calls of its deleters. What NumPy's or CuPy's own export
would never say, such as bfloat16, flags or another device, can be said here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupylora.dtypes import BFLOAT16

__all__ = ["Producer"]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Legacy(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


def _code(dtype: np.dtype[Any]) -> int:
    return 4 if dtype == BFLOAT16 else _CODES[dtype.kind]


@dataclass(eq=False)
class Producer:
    """Exports ``array``'s memory.

    versioned: a capsule of DLPack 1.0 where the consumer takes one. version, flags: what it says.
    device: (type, number) it says. code, lanes: in place of the array's own. byte_offset: how much
    of the address is said as an offset. c_order: leave strides out. knows: keywords of
    ``__dlpack__`` that it understands. error: what it raises. capsule: one to give every time.
    """

    array: np.ndarray
    versioned: bool = True
    version: tuple[int, int] = (1, 0)
    flags: int = 0
    device: tuple[int, int] = (1, 0)
    code: int | None = None
    lanes: int = 1
    byte_offset: int = 0
    c_order: bool = False
    knows: tuple[str, ...] = ("stream", "max_version", "copy")
    error: Exception | None = None
    capsule: Any = None
    deleted: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    _kept: dict[int, Any] = field(default_factory=dict)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if unknown := set(options) - set(self.knows):
            raise TypeError(f"unexpected keyword arguments {unknown}")
        self.asked.append(options)
        if self.error is not None:
            raise self.error
        if self.capsule is not None:
            return self.capsule
        takes = options.get("max_version") is not None
        return self.export(versioned=self.versioned and takes)

    def export(self, *, versioned: bool) -> Any:
        """A new capsule; it has no destructor, so whoever took it has to call the deleter."""
        array = self.array
        ints = ctypes.c_int64 * array.ndim
        shape = ints(*array.shape)
        strides = ints(*(stride // array.itemsize for stride in array.strides))
        tensor = _Tensor(
            array.ctypes.data - self.byte_offset if array.size else 0,
            *self.device,
            array.ndim,
            _code(array.dtype) if self.code is None else self.code,
            8 * array.itemsize,
            self.lanes,
            ctypes.addressof(shape),
            0 if self.c_order else ctypes.addressof(strides),
            self.byte_offset if array.size else 0,
        )
        deleter = _Deleter(self._delete)
        address = ctypes.cast(deleter, ctypes.c_void_p).value
        managed: Any = (
            _Versioned(*self.version, 0, address, self.flags, tensor)
            if versioned
            else _Legacy(tensor, 0, address)
        )
        self._kept[ctypes.addressof(managed)] = (managed, shape, strides, deleter)
        name = b"dltensor_versioned" if versioned else b"dltensor"
        return _new_capsule(ctypes.addressof(managed), name, None)

    def _delete(self, address: int) -> None:
        assert address in self._kept, "a deleter was called for what it is not, or twice"
        self.deleted += 1
        # The callback runs in what would be freed: it goes with the producer.
        self._kept[address, self.deleted] = self._kept.pop(address)
