"""What every device op needs: dispatch to its NumPy twin, outputs, and launches on CuPy's stream.

An op is written once for the device and bound to its twin by :func:`device_op`, which also gives it
the twin's signature and docstring. Host arrays go to the twin, device arrays to the kernels; where
the first argument is decides; where that is the host, but others are on a device, it is named as
what is to be copied. Arrays of other libraries become views of ours on the way in, so that neither
side sees any.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from cupylora.checks import check_array, is_on_device
from cupylora.compiler import driver
from cupylora.compiler.kernel import Dim3, Kernel, Launch
from cupylora.compiler.loader import load_kernel
from cupylora.dtypes import dtype_name
from cupylora.errors import ArgumentError, CapacityError, GraphError
from cupylora.interop.convert import borrow, lives_on_device
from cupylora.interop.kinds import all_own
from cupylora.worklists import Array, ArrayBundle, GemmProblems, Routing

__all__ = [
    "GEMM_PROBLEMS",
    "active_clusters",
    "address",
    "blocks_for",
    "check_aligned",
    "current_device",
    "device_op",
    "enqueue",
    "host_op",
    "in_capture",
    "is_hopper",
    "kernel_dtype",
    "output",
    "pack_problems",
    "resident_blocks",
    "route_arguments",
    "shared_limit",
    "status_pointer",
    "vector_aligned",
    "workspace",
]

_HOPPER = 9
"""Major compute capability that the one-node kernels are built for."""

_FIRST_DEPENDENT_LAUNCH = 90
"""Compute capability from which a kernel may wait for its predecessor itself."""

_WRITTEN = frozenset({"out", "status", "tile_start", "workspace"})
"""Arguments that any op which takes them writes."""

P = ParamSpec("P")
R = TypeVar("R")

GEMM_PROBLEMS = "bytes88"
"""The parameter type of a GemmProblems list with its count (gemm/problems.cuh)."""


def device_op(
    twin: Callable[P, R], *, writes: Sequence[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a device function the public op whose NumPy twin is ``twin``.

    writes: arguments that it writes beside ``out``, scratch and the error-flag word.
    """

    def bind(device: Callable[P, R]) -> Callable[P, R]:
        signature, written = inspect.signature(twin), _WRITTEN.union(writes)

        @functools.wraps(twin)
        def op(*args: P.args, **kwargs: P.kwargs) -> R:
            if not (all_own(args) and all_own(kwargs.values())):
                return _call_with_foreign(op, signature, written, args, kwargs)
            first: Any = args[0] if args else next(iter(kwargs.values()), None)
            if hasattr(type(first), "__cuda_array_interface__") or _lives_on_device(first):
                return device(*args, **kwargs)
            try:
                return twin(*args, **kwargs)
            except ArgumentError:
                _require_one_place(_by_name(signature, args, kwargs))
                raise

        op.__module__ = device.__module__
        return op

    return bind


def _as_bytes(array: Any) -> Any:
    """Scratch is bytes of either sign: cuda.core exports a Buffer as int8."""
    return array.view(np.uint8) if getattr(array, "dtype", None) == np.int8 else array


def _lives_on_device(first: Any) -> bool:
    """Of an argument that is known to be ours."""
    if isinstance(first, ArrayBundle):
        first = next(iter(first.__dict__.values()))
    return is_on_device(first)


def host_op(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of host arrays a public op."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        if all_own(args) and all_own(kwargs.values()):
            return function(*args, **kwargs)
        return _call_with_foreign(function, signature, _WRITTEN, args, kwargs, on_device=False)

    return op


def _call_with_foreign(
    function: Callable[..., R],
    signature: inspect.Signature,
    written: frozenset[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    on_device: bool | None = None,
) -> R:
    """Call with views of ours; an ``out`` comes back as it was given."""
    given = _by_name(signature, args, kwargs)
    if len(given) < len(args) + len(kwargs):
        signature.bind(*args, **kwargs)  # raises TypeError: too many, or one given twice
    if on_device is None:
        on_device = lives_on_device(*next(iter(given.items())))
        if not on_device:
            _require_one_place(given)
    taken = {
        name: borrow(name, value, on_device=on_device, written=name in written)
        for name, value in given.items()
    }
    if "workspace" in taken:
        taken["workspace"] = _as_bytes(taken["workspace"])
    result = function(**taken)
    out = given.get("out")
    return result if out is None or taken["out"] is out else out


def _by_name(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    return {**dict(zip(signature.parameters, args, strict=False)), **kwargs}


def _require_one_place(given: Mapping[str, Any]) -> None:
    """Raise ArgumentError where the first argument is on the host, and another on a device: who has
    arrays there means to work there."""
    first = next(iter(given), "")
    for name, value in given.items():
        there = _device_part(name, value)
        if there and name == first:
            return
        if there:
            raise ArgumentError(
                f"{first} is in host memory, but {there} is on a device; copy {first} to the "
                "device first (cupy.asarray), or give all arrays in host memory"
            )


def _device_part(name: str, value: Any) -> str:
    """The name of an array on a device in an argument; empty where there is none."""
    if isinstance(value, ArrayBundle):
        parts = [(f"{name}.{field}", part) for field, part in vars(value).items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    else:
        return name if lives_on_device(name, value) else ""
    return next(filter(None, (_device_part(*part) for part in parts)), "")


def output(name: str, out: Any, shape: tuple[int, ...], dtype: Any, *, zero: bool = False) -> Array:
    """``out`` once checked, or a new device array (zeros where ``zero``, else not set)."""
    if out is None:
        import cupy

        _require_no_capture(name, f"{name.partition('.')[0]}=")
        return cupy.zeros(shape, dtype) if zero else cupy.empty(shape, dtype)
    check_array(name, out, dtype=np.dtype(dtype), shape=shape, writable=True, on_device=True)
    return out


def in_capture() -> bool:
    """Whether CuPy's current stream is being captured into a graph."""
    import cupy

    return driver.is_capturing(cupy.cuda.get_current_stream().ptr)


def _require_no_capture(what: str, argument: str) -> None:
    """New memory would go back to CuPy's pool with its last reference, but stay in the graph."""
    if in_capture():
        raise GraphError(
            f"{what} would be allocated while the current stream is being captured; give memory of "
            f"your own with {argument}"
        )


def workspace(given: Array | None, size: int, needed_by: str) -> Array:
    """Scratch of at least ``size`` bytes: ``given`` (uint8, aligned to 16 bytes), or new memory."""
    if given is None:
        import cupy

        _require_no_capture("the workspace", "workspace=")
        return cupy.empty(size, np.uint8)
    check_array("workspace", given, dtype=np.dtype(np.uint8), shape=(None,), on_device=True)
    if given.shape[0] < size:
        raise CapacityError(
            f"workspace has {given.shape[0]} bytes; {size} are needed ({needed_by})"
        )
    if address(given) % 16:
        raise ArgumentError("workspace does not start on a 16-byte boundary")
    return given


def address(array: Array | None) -> int:
    """Device address of an array's first element, 0 for none."""
    return 0 if array is None else int(array.data.ptr)


def check_aligned(name: str, array: Array) -> None:
    """Kernels read records of this array as 16-byte vectors."""
    if address(array) % 16:
        raise ArgumentError(f"{name} does not start on a 16-byte boundary; pass an aligned copy")


def vector_aligned(array: Array) -> bool:
    """Whether rows of a C-contiguous 2-D array all start on 16-byte boundaries."""
    return address(array) % 16 == 0 and array.shape[1] * array.dtype.itemsize % 16 == 0


def status_pointer(status: Any) -> int:
    """Address of the error-flag word: of a DeviceStatus, of an int32 [1] device array, or 0."""
    if status is None:
        return 0
    pointer = getattr(status, "device_pointer", None)
    if pointer is not None:
        return int(pointer)
    check_array("status", status, dtype=np.dtype(np.int32), shape=(1,), on_device=True)
    return address(status)


@functools.cache
def _launch(
    device: int,  # noqa: ARG001 - a key of the cache: kernels are loaded on the current device
    program: str,
    kernel: str,
    types: tuple[str, ...],
    dependent: bool,
    cluster: Dim3 | None,
) -> Launch:
    return load_kernel(program, kernel).prepare(types, cluster=cluster, pdl=dependent)


@functools.cache
def _has_dependent_launch(device: int) -> bool:
    import cupy

    return int(cupy.cuda.Device(device).compute_capability) >= _FIRST_DEPENDENT_LAUNCH


def enqueue(
    program: str,
    kernel: str,
    types: tuple[str, ...],
    grid: Sequence[int],
    threads: int,
    args: Sequence[Any],
    smem: int = 0,
    *,
    dependent: bool = False,
    cluster: Dim3 | None = None,
) -> None:
    """Launch a kernel on CuPy's current stream of the current device.

    dependent: the kernel waits for the work before it itself, so that it may start early (where the
    device can: programmatic dependent launch).
    cluster: blocks per cluster in x, y, z (compute capability 9.0 on); the grid is a multiple.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    early = dependent and _has_dependent_launch(device)
    launch = _launch(device, program, kernel, types, early, cluster)
    shape = (grid[0], grid[1] if len(grid) > 1 else 1, 1)
    launch(cupy.cuda.get_current_stream().ptr, shape, (threads, 1, 1), smem, args)


@functools.cache
def _resident(device: int, program: str, kernel: str, threads: int, smem: int) -> int:
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    loaded: Kernel = load_kernel(program, kernel)
    return int(attributes["MultiProcessorCount"]) * max(1, loaded.blocks_per_sm(threads, smem))


def resident_blocks(program: str, kernel: str, threads: int, smem: int = 0) -> int:
    """Blocks of a kernel that the whole current device holds at a time: a persistent grid."""
    import cupy

    return _resident(cupy.cuda.runtime.getDevice(), program, kernel, threads, smem)


def current_device() -> int:
    """Number of the current device."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def _active_clusters(
    device: int,  # noqa: ARG001 - a key of the cache, as in _launch
    program: str,
    kernel: str,
    threads: int,
    smem: int,
    size: int,
) -> int:
    return max(1, load_kernel(program, kernel).active_clusters(threads, smem, size))


def active_clusters(program: str, kernel: str, threads: int, smem: int, size: int) -> int:
    """Clusters of ``size`` blocks that the whole current device holds at a time."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    return _active_clusters(device, program, kernel, threads, smem, size)


@functools.cache
def _is_hopper(device: int) -> bool:
    import cupy

    return int(cupy.cuda.Device(device).compute_capability) // 10 == _HOPPER


def is_hopper() -> bool:
    """Whether the current device runs the Hopper kernels (clusters, bulk copies)."""
    import cupy

    return _is_hopper(cupy.cuda.runtime.getDevice())


@functools.cache
def _shared_limit(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def shared_limit() -> int:
    """Bytes of shared memory that a block may have on the current device."""
    import cupy

    return _shared_limit(cupy.cuda.runtime.getDevice())


def blocks_for(items: int, per_block: int) -> int:
    """Blocks that cover ``items``; at least one, since a grid cannot be empty."""
    return max(1, -(-items // per_block))


def route_arguments(routing: Routing) -> tuple[int, int, int]:
    """(num_tokens, top_k, k_major), as the kernels take them. ``num_tokens`` 0 becomes 1: it is a
    divisor there, and no row depends on it."""
    return max(1, routing.num_tokens), routing.top_k, int(routing.row_order == "k_major")


def pack_problems(problems: GemmProblems, *, count: bool) -> bytes:
    """The addresses of a problem list's arrays as the kernels' struct, ``count`` last if asked."""
    fields = [f.name for f in dataclasses.fields(GemmProblems)]
    pointers = [address(getattr(problems, f)) for f in (fields if count else fields[:-1])]
    return struct.pack(f"{len(pointers)}Q", *pointers)


def kernel_dtype(array: Array) -> str:
    """Name of the kernel instance for an array's element type."""
    return dtype_name(array.dtype)
