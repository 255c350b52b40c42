"""DLPack capsules, read without any library's help: bfloat16 and flags included.

In: an object with ``__dlpack__``. Out: its :class:`Memory`, whose ``owner`` calls the producer's
deleter once, when its last reference goes. A capsule is taken over before anything else is done
with it, so that this holds for one that is refused, too.

NumPy's own import knows no bfloat16, and no library's says which flags a capsule had.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from typing import Any

from cupylora.errors import ArgumentError
from cupylora.interop import layout
from cupylora.interop.layout import Memory

__all__ = ["device_of", "export"]

_USED = {
    layout.LEGACY: b"used_dltensor",
    layout.VERSIONED: b"used_dltensor_versioned",
}

_name_of = layout.python_function("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)
_pointer = layout.python_function(
    "PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
)
_rename = layout.python_function(
    "PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p
)


class _Owner:
    """A tensor that is ours: tells its producer when it is not needed any more, once."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: int) -> None:
        self._address, self._deleter = address, deleter

    def __del__(self) -> None:
        deleter, self._deleter = self._deleter, 0
        if deleter and not sys.is_finalizing():
            layout.Deleter(deleter)(self._address)


def device_of(name: str, value: Any) -> tuple[int, int]:
    """Kind of memory and number of the device, as ``value`` says.

    Raises ArgumentError naming the argument ``name`` where it does not say so.
    """
    try:
        kind, number = value.__dlpack_device__()
        return int(kind), int(number)
    except Exception as error:
        raise ArgumentError(
            f"{name} is a {type(value).__name__} that does not tell its device "
            f"(__dlpack_device__: {error}); give an array that does, or an ArrayView of its memory"
        ) from error


def export(name: str, value: Any, stream: int | None) -> Memory:
    """Ask ``value`` for its memory, and take it over.

    stream: as ``__dlpack__`` takes it: of the device work that will use the memory, so that the
    producer makes it wait; -1: do not; None: none is meant. Raises ArgumentError naming the
    argument ``name`` for whatever the producer refuses, and for what cannot be taken as it is.
    """
    return _take(name, _capsule(name, value, stream))


def _capsule(name: str, value: Any, stream: int | None) -> Any:
    """A capsule of what ``value`` holds, by the newest form of the call that it knows."""
    options: dict[str, Any] = {} if stream is None else {"stream": stream}
    try:
        try:
            return value.__dlpack__(max_version=layout.VERSION, copy=False, **options)
        except TypeError:  # older than DLPack 1.0
            return value.__dlpack__(**options)
    except Exception as error:
        raise ArgumentError(
            f"{name} is a {type(value).__name__} that does not hand out its memory (__dlpack__: "
            f"{error}); give an array that does, or an ArrayView of its memory"
        ) from error


def _take(name: str, capsule: Any) -> Memory:
    try:
        label = _name_of(capsule)
    except ValueError:  # no capsule
        label = None
    if label not in _USED:
        used = label in _USED.values()
        what = "a capsule that was consumed before" if used else f"no DLPack capsule: {capsule!r}"
        raise ArgumentError(f"{name}: its __dlpack__ gave {what}; each call has to give a new one")
    address = _pointer(capsule, label)
    # From here on the memory is ours to give back, whatever is found in it.
    _rename(capsule, _USED[label])
    if label == layout.LEGACY:
        *tensor, _, deleter = layout.LEGACY_FIELDS.unpack(
            ctypes.string_at(address, layout.LEGACY_FIELDS.size)
        )
        return _exported(name, tensor, _Owner(address, deleter), read_only=False)
    return _take_versioned(name, address)


def _take_versioned(name: str, address: int) -> Memory:
    head = layout.VERSIONED_HEAD.unpack(ctypes.string_at(address, layout.VERSIONED_HEAD.size))
    major, minor, _, deleter, flags = head
    owner = _Owner(address, deleter)
    if major != layout.VERSION[0]:
        raise ArgumentError(
            f"{name} is exported as DLPack {major}.{minor}; {layout.VERSION[0]}.x is understood"
        )
    if flags & layout.COPIED:
        raise ArgumentError(
            f"{name} was copied by its producer for DLPack, so that nothing written would be seen "
            "and every call would copy; give an array that can be exported as it is"
        )
    start = address + layout.VERSIONED_HEAD.size
    tensor = layout.TENSOR_FIELDS.unpack(ctypes.string_at(start, layout.TENSOR_FIELDS.size))
    return _exported(name, tensor, owner, read_only=bool(flags & layout.READ_ONLY))


def _exported(name: str, tensor: Any, owner: _Owner, *, read_only: bool) -> Memory:
    data, _, _, ndim, code, bits, lanes, shape_at, strides_at, offset = tensor
    dtype = layout.DTYPES.get((code, bits, lanes))
    if dtype is None:
        raise ArgumentError(
            f"{name} has an element type that is not understood (DLPack code {code}, {bits} bits, "
            f"{lanes} lanes); use bfloat16, float16, float32 or integers, as the call says"
        )
    shape = _int64s(shape_at, ndim)
    if min(shape, default=0) < 0 or (not data and 0 not in shape):
        raise ArgumentError(f"{name} is exported with shape {shape} at address {data}")
    size, strides = dtype.itemsize, None
    if strides_at:
        strides = tuple([size * stride for stride in _int64s(strides_at, ndim)])
    return Memory(data + offset, shape, dtype, strides, read_only, owner)


def _int64s(address: int, count: int) -> tuple[int, ...]:
    return _list_of(count).unpack(ctypes.string_at(address, 8 * count)) if count > 0 else ()


@functools.cache
def _list_of(count: int) -> struct.Struct:
    return struct.Struct(f"@{count}q")
