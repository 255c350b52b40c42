"""Foreign arguments as arrays of our own over the same memory; nothing is ever copied.

In: the arguments of a public call, by name. Out: the same with every foreign array replaced by a
NumPy array (host) or a CuPy array (device) at its address, of its shape, strides and type. What
would need a copy is refused with the argument's name, what it is and what to do. The view holds the
producer's memory, on the device until enqueued work is over (``lifetimes``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from cupylora.checks import is_on_device
from cupylora.errors import ArgumentError
from cupylora.interop import dlpack, layout
from cupylora.interop.cuda_interface import read_interface
from cupylora.interop.kinds import is_foreign, is_own, offers
from cupylora.interop.layout import Memory, home_of
from cupylora.interop.lifetimes import Lease, release_finished
from cupylora.interop.streams import dlpack_stream, order_behind, require_device
from cupylora.interop.view import ArrayView
from cupylora.worklists import Array, ArrayBundle

__all__ = ["borrow", "lives_on_device"]

_IMMUTABLE = ("jax", "jaxlib", "tensorflow")
"""Libraries whose arrays may not be written, though their DLPack capsules do not say so."""

_TO_HOST = "copy it to the host first, or use the cuda backend"
_TO_DEVICE = "copy it to the device first (cupy.asarray), or use the numpy backend"


def lives_on_device(name: str, value: Any) -> bool:
    """Whether an array, ours or foreign, or the first array of a bundle, is in device memory.

    Raises ArgumentError naming the argument ``name`` for a foreign one that does not say so.
    """
    if isinstance(value, ArrayBundle):
        value = next(iter(vars(value).values()))
    if not is_foreign(value):
        return is_on_device(value)
    if isinstance(value, ArrayView):
        return value.device != "cpu"
    if _only_interface(value):
        return True
    kind, _ = dlpack.device_of(name, value)
    return kind not in (layout.CPU, layout.CUDA_HOST)


def _only_interface(value: Any) -> bool:
    """DLPack says more, so it goes first where there are both."""
    if offers(value, "__dlpack_device__"):
        return False
    return offers(value, "__cuda_array_interface__") or not offers(value, "__dlpack__")


def borrow(name: str, value: Any, *, on_device: bool, written: bool = False) -> Any:
    """``value``, its foreign arrays replaced by views of ours.

    on_device: where the call works, and so where memory has to be. written: the call writes it.
    Bundles, lists and tuples are gone through, their parts named; anything else, and arrays of
    ours, come back as they are. Raises ArgumentError naming the argument for what cannot be viewed
    where it is, GraphError for one that a capture would have to wait for, DeviceUnavailableError
    for one on a device where CUDA is not ready for us.
    """
    if is_own(value):
        return value
    options = {"on_device": on_device, "written": written}
    if isinstance(value, ArrayBundle):
        fields = {
            field.name: borrow(f"{name}.{field.name}", getattr(value, field.name), **options)
            for field in dataclasses.fields(value)  # type: ignore[arg-type]
        }
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    if isinstance(value, list | tuple):
        parts = [borrow(f"{name}[{i}]", part, **options) for i, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if written and _is_immutable(value):
        raise ArgumentError(
            f"{name} is an array of {home_of(type(value))}, which may not be written; give an "
            "array of the backend (backend.empty), which that library can import"
        )
    return _device_view(name, value, written) if on_device else _host_view(name, value, written)


def _is_immutable(value: Any) -> bool:
    return home_of(type(value)) in _IMMUTABLE


def _require_writable(name: str, read_only: bool, written: bool) -> None:
    if written and read_only:
        raise ArgumentError(f"{name} is exported as read-only; a writable array is needed")


# --- host ----------------------------------------------------------------------------------------


class _Span:
    """Carries ``__array_interface__``: NumPy's way to look at memory by address. NumPy's array
    holds this, and this the owner."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def _host_view(name: str, value: Any, written: bool) -> Array:
    found = _host_memory(name, value)
    if _is_immutable(value):
        found = found._replace(read_only=True)
    layout.check_memory(name, found)
    _require_writable(name, found.read_only, written)
    if 0 in found.shape:  # there is nothing to look at, and perhaps no address
        return np.empty(found.shape, found.dtype)
    # NumPy's interface knows no types but its own.
    plain = found.dtype.kind != "V"
    kind = found.dtype if plain else np.dtype(f"u{found.dtype.itemsize}")
    interface = {
        "version": 3,
        "shape": found.shape,
        "typestr": kind.str,
        "strides": found.strides,
        "data": (found.pointer, found.read_only),
    }
    array = np.asarray(_Span(interface, found.owner))
    return array if plain else array.view(found.dtype)


def _host_memory(name: str, value: Any) -> Memory:
    if isinstance(value, ArrayView):
        if value.device != "cpu":
            raise ArgumentError(f"{name} is on CUDA device {value.device}; {_TO_HOST}")
        return value.memory
    if _only_interface(value):
        raise ArgumentError(
            f"{name} is a {type(value).__name__} in device memory (__cuda_array_interface__); "
            f"{_TO_HOST}"
        )
    kind, number = dlpack.device_of(name, value)
    if kind not in (layout.CPU, layout.CUDA_HOST):
        raise ArgumentError(f"{name} is {_place(kind, number)}; {_TO_HOST}")
    return dlpack.export(name, value, None, (kind, number))


# --- device --------------------------------------------------------------------------------------


def _device_view(name: str, value: Any, written: bool) -> Array:
    require_device()
    import cupy

    release_finished()
    cuda = cupy.cuda
    stream, here = cuda.get_current_stream(), int(cuda.runtime.getDevice())
    found = _device_memory(name, value, stream, here)
    layout.check_memory(name, found)
    _require_writable(name, found.read_only, written)
    pointer, dtype = found.pointer, found.dtype
    if pointer % dtype.itemsize:
        raise ArgumentError(
            f"{name} starts at address {pointer:#x}, which is no multiple of the {dtype.itemsize} "
            "bytes of an element; kernels cannot read that, so pass an aligned copy"
        )
    lease = None if found.owner is None else Lease(found.owner, stream, here)
    size = math.prod(found.shape) * dtype.itemsize
    memory = cuda.MemoryPointer(cuda.UnownedMemory(pointer, size, lease, here), 0)
    return cupy.ndarray(found.shape, dtype, memory, found.strides)


def _device_memory(name: str, value: Any, stream: Any, here: int) -> Memory:
    """What ``value`` has on device ``here``; CuPy's ``stream`` waits for what wrote it."""
    if isinstance(value, ArrayView):
        return _viewed_memory(name, value, stream, here)
    if _only_interface(value):
        return _interface_memory(name, value, stream, here)
    kind, number = dlpack.device_of(name, value)
    if kind not in (layout.CUDA, layout.CUDA_MANAGED):
        raise ArgumentError(f"{name} is {_place(kind, number)}; {_TO_DEVICE}")
    if kind == layout.CUDA:
        _require_here(name, number, here)
    return dlpack.export(name, value, dlpack_stream(value, int(stream.ptr)), (kind, number))


def _viewed_memory(name: str, view: ArrayView, stream: Any, here: int) -> Memory:
    if view.device == "cpu":
        raise ArgumentError(f"{name} is in host memory; {_TO_DEVICE}")
    _require_here(name, view.device, here)
    if view.stream is not None:
        order_behind(name, view.stream, stream)
    return view.memory


def _interface_memory(name: str, value: Any, stream: Any, here: int) -> Memory:
    memory, producer = read_interface(name, value)
    if memory.pointer:
        _require_device_pointer(name, memory.pointer, here)
    if producer is not None:
        order_behind(name, producer, stream)
    return memory


def _require_here(name: str, device: Any, here: int) -> None:
    if device != here:
        raise ArgumentError(
            f"{name} is on CUDA device {device}, but the current device is {here}; make that one "
            f"current (with cupy.cuda.Device({device})), or move the array"
        )


def _require_device_pointer(name: str, pointer: int, here: int) -> None:
    """The interface does not say where memory is; the driver does."""
    import cupy

    runtime = cupy.cuda.runtime
    found = runtime.pointerGetAttributes(pointer)
    if int(found.type) not in (runtime.memoryTypeDevice, runtime.memoryTypeManaged):
        raise ArgumentError(f"{name} is in host memory, at {pointer:#x}; {_TO_DEVICE}")
    if int(found.type) == runtime.memoryTypeDevice:
        _require_here(name, int(found.device), here)


def _place(kind: int, number: int) -> str:
    """Memory of DLPack's ``kind`` in words."""
    if kind in (layout.CUDA, layout.CUDA_MANAGED):
        managed = "managed memory of " if kind == layout.CUDA_MANAGED else ""
        return f"in {managed}CUDA device {number}" if managed else f"on CUDA device {number}"
    if kind == layout.CPU:
        return "in host memory"
    if kind == layout.CUDA_HOST:
        return "in pinned host memory"
    return f"on a device of another make (DLPack type {kind}, number {number})"
