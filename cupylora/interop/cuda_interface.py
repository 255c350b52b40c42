"""``__cuda_array_interface__``, versions 2 and 3, as pointer, shape and type.

In: the dictionary that an object shows. Out: its :class:`Memory`, and a stream. The interface has
no way to name bfloat16, nor the device: DLPack is asked first where an object offers both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupylora.errors import ArgumentError
from cupylora.interop.layout import Memory

__all__ = ["read_interface"]


def read_interface(name: str, value: Any) -> tuple[Memory, int | None]:
    """An array's memory, and the stream that it is written on: 1 (legacy default stream), 2
    (per-thread default stream) or a handle; None: there is nothing to wait for.

    Raises ArgumentError naming the argument ``name`` and the entry that cannot be taken.
    """
    try:
        entries = value.__cuda_array_interface__
    except Exception as error:
        raise ArgumentError(
            f"{name} is a {type(value).__name__} that shows no __cuda_array_interface__ ({error}); "
            "give an array that does, or an ArrayView of its memory"
        ) from error
    try:
        pointer, read_only = entries["data"]
        shape = tuple(int(extent) for extent in entries["shape"])
        given = entries.get("strides")
        strides = None if given is None else tuple(int(stride) for stride in given)
        dtype, stream = _dtype(name, entries["typestr"]), _stream(name, entries.get("stream"))
        found = Memory(int(pointer), shape, dtype, strides, bool(read_only), owner=value)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ArgumentError(
            f"{name}: its __cuda_array_interface__ is not of version 2 or 3 ({error!r})"
        ) from error
    _check(name, found, entries)
    return found, stream


def _check(name: str, found: Memory, entries: Any) -> None:
    if entries.get("mask") is not None:
        raise ArgumentError(
            f"{name} has a mask in its __cuda_array_interface__; give the array without one"
        )
    if any(extent < 0 for extent in found.shape) or (not found.pointer and 0 not in found.shape):
        raise ArgumentError(
            f"{name}: its __cuda_array_interface__ has shape {found.shape} at address "
            f"{found.pointer}"
        )
    if found.strides is not None and len(found.strides) != len(found.shape):
        raise ArgumentError(
            f"{name}: its __cuda_array_interface__ has strides {found.strides} for shape "
            f"{found.shape}"
        )


def _dtype(name: str, typestr: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(typestr)
    except TypeError:
        dtype = np.dtype(np.void)
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise ArgumentError(
            f"{name}: its __cuda_array_interface__ has typestr {typestr!r}, which names no number "
            "type of this machine; bfloat16 goes through DLPack or an ArrayView"
        )
    return dtype


def _stream(name: str, stream: Any) -> int | None:
    if stream is None:
        return None
    handle = int(stream)
    if handle <= 0:
        raise ArgumentError(
            f"{name}: its __cuda_array_interface__ has stream {handle}, which the interface "
            "forbids; 1 and 2 are the default streams, None needs no wait"
        )
    return handle
