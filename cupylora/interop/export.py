"""DLPack capsules of our own, for memory that NumPy will not export: bfloat16 above all.

In: what an ArrayView says. Out: a capsule, whose memory is kept until its consumer calls the
deleter, or until the capsule goes unused.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from cupylora.errors import ArgumentError
from cupylora.interop import layout
from cupylora.interop.layout import Memory

__all__ = ["make_capsule"]

_CODES = {dtype: code for code, dtype in layout.DTYPES.items()}

_live: dict[int, tuple[Any, object]] = {}
"""Tensors handed out and not given back, by their addresses: the memory of each, and its owner."""


def _give_back(address: int) -> None:
    _live.pop(address, None)


_deleter = layout.Deleter(_give_back)

# A dying capsule is no object that Python may refer to any more, so it is passed by its address.
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_has_name = layout.python_function(
    "PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
)
_pointer_of = layout.python_function(
    "PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
)
_new_capsule = layout.python_function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor
)


def _drop_unused(capsule: int) -> None:
    """Of a capsule that goes: if nobody took it, its name is still the first one."""
    for name in (layout.LEGACY, layout.VERSIONED):
        if _has_name(capsule, name):
            _give_back(_pointer_of(capsule, name))


_destructor = _Destructor(_drop_unused)


def make_capsule(memory: Memory, device: tuple[int, int], *, versioned: bool) -> Any:
    """A capsule of ``memory``, whose strides are given; device: as DLPack counts.

    Raises ArgumentError for what the format cannot hold: another dtype, or, unless ``versioned``,
    memory that must not be written.
    """
    shape, counts = memory.shape, _strides(memory)
    if memory.read_only and not versioned:
        raise ArgumentError(
            "the array is read-only, which DLPack before 1.0 cannot say; ask for max_version (1, 0)"
        )
    start = layout.VERSIONED_HEAD.size if versioned else 0
    end = start + (layout.TENSOR_FIELDS if versioned else layout.LEGACY_FIELDS).size
    room = ctypes.create_string_buffer(end + 16 * len(shape))
    address = ctypes.addressof(room)
    struct.pack_into(f"@{2 * len(shape)}q", room, end, *shape, *counts)
    code = _CODES[memory.dtype]
    lists = (address + end, address + end + 8 * len(shape))
    tensor = (memory.pointer, *device, len(shape), *code, *lists, 0)
    deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
    if versioned:
        flags = layout.READ_ONLY if memory.read_only else 0
        layout.VERSIONED_HEAD.pack_into(room, 0, *layout.VERSION, 0, deleter, flags)
        layout.TENSOR_FIELDS.pack_into(room, start, *tensor)
    else:
        layout.LEGACY_FIELDS.pack_into(room, 0, *tensor, 0, deleter)
    _live[address] = (room, memory.owner)
    return _new_capsule(address, layout.VERSIONED if versioned else layout.LEGACY, _destructor)


def _strides(memory: Memory) -> list[int]:
    """In elements, as the format has them."""
    size, strides = memory.dtype.itemsize, memory.strides or ()
    if memory.dtype not in _CODES or any(stride % size for stride in strides):
        raise ArgumentError(
            f"an array of {memory.dtype} with strides {strides} has no form in DLPack"
        )
    return [stride // size for stride in strides]
