"""DLPack capsules of our own, for memory that NumPy will not export: bfloat16 above all.

In: what an ArrayView says. Out: a capsule, whose memory is kept until its consumer calls the
deleter, or until the capsule goes unused.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from cupylora.errors import ArgumentError
from cupylora.interop import layout

__all__ = ["make_capsule"]

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


def make_capsule(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    device: tuple[int, int],
    *,
    writable: bool,
    versioned: bool,
    owner: object,
) -> Any:
    """A capsule of the memory at ``pointer``; strides in bytes, device as DLPack counts.

    Raises ArgumentError for what the format cannot hold: another dtype, or, unless ``versioned``,
    memory that must not be written.
    """
    code = next((code for code, known in layout.DTYPES.items() if known == dtype), None)
    if code is None or any(stride % dtype.itemsize for stride in strides):
        raise ArgumentError(f"an array of {dtype} with strides {strides} has no form in DLPack")
    if not (writable or versioned):
        raise ArgumentError(
            "the array is read-only, which DLPack before 1.0 cannot say; ask for max_version (1, 0)"
        )
    head = layout.VERSIONED_HEAD if versioned else None
    start = head.size if head else 0
    size = start + layout.TENSOR_FIELDS.size
    tail = 0 if versioned else 16  # manager_ctx and deleter
    lists = size + tail
    memory = ctypes.create_string_buffer(lists + 16 * len(shape))
    address = ctypes.addressof(memory)
    deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
    if head:
        flags = 0 if writable else layout.READ_ONLY
        head.pack_into(memory, 0, *layout.VERSION, 0, deleter, flags)
    else:
        struct.pack_into("@QQ", memory, size, 0, deleter)
    counts = [stride // dtype.itemsize for stride in strides]
    struct.pack_into(f"@{2 * len(shape)}q", memory, lists, *shape, *counts)
    places = address + lists, address + lists + 8 * len(shape)
    layout.TENSOR_FIELDS.pack_into(memory, start, pointer, *device, len(shape), *code, *places, 0)
    _live[address] = (memory, owner)
    return _new_capsule(address, layout.VERSIONED if versioned else layout.LEGACY, _destructor)
