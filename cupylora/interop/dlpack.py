"""DLPack capsules, read without any library's help: bfloat16 and flags included.

In: an object with ``__dlpack__``. Out: its :class:`Memory`, whose ``owner`` calls the producer's
deleter once, when its last reference goes. A capsule is taken over before anything else is done
with it, so that this holds for one that is refused, too.

NumPy's own import knows no bfloat16, and no library's says which flags a capsule had.
"""

from __future__ import annotations

import contextlib
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

_FORMS: tuple[dict[str, Any], ...] = (
    {"max_version": layout.VERSION, "copy": False},
    {"max_version": layout.VERSION},
)
"""Of the call, since DLPack 1.0; a producer that is older raises TypeError."""

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
            f"(__dlpack_device__: {_told(error)}); give an array that does, or an ArrayView of its "
            "memory"
        ) from error


def export(name: str, value: Any, stream: int | None, device: tuple[int, int]) -> Memory:
    """Ask ``value``, whose ``device_of`` is known, for its memory, and take it over.

    stream: as ``__dlpack__`` takes it: of the device work that will use the memory, so that the
    producer makes it wait; -1: do not; None: none is meant. Raises ArgumentError naming the
    argument ``name`` for whatever the producer refuses, and for what cannot be taken as it is.
    """
    return _take(name, _capsule(name, value, stream), device)


def _capsule(name: str, value: Any, stream: int | None) -> Any:
    """A capsule of what ``value`` holds, by the newest form of the call that it knows."""
    options: dict[str, Any] = {} if stream is None else {"stream": stream}
    try:
        for newer in _FORMS:
            with contextlib.suppress(TypeError):
                return value.__dlpack__(**newer, **options)
        return value.__dlpack__(**options)
    except Exception as error:
        raise ArgumentError(
            f"{name} is a {type(value).__name__} that does not hand out its memory (__dlpack__: "
            f"{_told(error)}); give an array that does, or an ArrayView of its memory"
        ) from error


def _told(error: Exception) -> str:
    """What an exception of somebody else's says, if it can be asked."""
    try:
        return str(error)
    except Exception:  # its own code
        return type(error).__name__


def _take(name: str, capsule: Any, device: tuple[int, int]) -> Memory:
    try:
        label = _name_of(capsule)
    except ValueError:  # no capsule
        label = None
    if label not in _USED:
        used = label in _USED.values()
        got = f"what is no DLPack capsule, a {type(capsule).__name__}"
        what = "a capsule that was consumed before" if used else got
        raise ArgumentError(f"{name}: its __dlpack__ gave {what}; each call has to give a new one")
    address = _pointer(capsule, label)
    # From here on the memory is ours to give back, whatever is found in it.
    _rename(capsule, _USED[label])
    if label == layout.LEGACY:
        *tensor, _, deleter = layout.LEGACY_FIELDS.unpack(
            ctypes.string_at(address, layout.LEGACY_FIELDS.size)
        )
        return _exported(name, tensor, _Owner(address, deleter), device, read_only=False)
    return _take_versioned(name, address, device)


def _take_versioned(name: str, address: int, device: tuple[int, int]) -> Memory:
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
    return _exported(name, tensor, owner, device, read_only=bool(flags & layout.READ_ONLY))


def _exported(
    name: str, tensor: Any, owner: _Owner, device: tuple[int, int], *, read_only: bool
) -> Memory:
    data, *where, ndim, code, bits, lanes, shape_at, strides_at, offset = tensor
    if _memory_of(*where) != _memory_of(*device):
        raise ArgumentError(
            f"{name} says that it is on DLPack device {device}, but its capsule says {where}; the "
            "library that made it is at fault"
        )
    if not 0 <= ndim <= layout.MOST_DIMENSIONS or (ndim and not shape_at):
        raise ArgumentError(
            f"{name} is exported with {ndim} dimensions (shape at {shape_at:#x}); 0 to "
            f"{layout.MOST_DIMENSIONS} can be"
        )
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


def _memory_of(kind: int, number: int) -> tuple[int, int]:
    """What has to agree: libraries number the host, and call pinned memory, as they like."""
    return (layout.CPU, 0) if kind in (layout.CPU, layout.CUDA_HOST) else (kind, number)


def _int64s(address: int, count: int) -> tuple[int, ...]:
    return _list_of(count).unpack(ctypes.string_at(address, 8 * count)) if count > 0 else ()


@functools.cache
def _list_of(count: int) -> struct.Struct:
    return struct.Struct(f"@{count}q")
