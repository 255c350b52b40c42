"""A kernel on a device, and launches of it.

In: a CUDA function handle (from ``loader``). Out: work enqueued on the caller's stream. A
:class:`Launch` owns the storage that the driver reads (configuration and arguments); filling it
and calling ``cuLaunchKernelEx`` allocates nothing and never synchronises, so launches can be
captured.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

from cupylora.compiler import driver
from cupylora.errors import ArgumentError

__all__ = ["Dim3", "Kernel", "Launch"]

Dim3 = tuple[int, int, int]

_FORMATS = {"ptr": "Q", "u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f32": "f"}

_CONFIG = struct.Struct("@7IQ")
"""The leading fields of LaunchConfig: grid, block, shared bytes, stream."""

_MAX_DYNAMIC_SHARED = 8
_NON_PORTABLE_CLUSTER_SIZE = 14
_PORTABLE_CLUSTER = 8


class Kernel:
    """One kernel, loaded on one device.

    name: ``program/kernel``. function: the CUfunction handle as an integer. shared_limit: bytes of
    dynamic shared memory that launches may use so far (``allow_shared`` raises it).
    """

    def __init__(self, name: str, function: int, owner: object = None) -> None:
        self.name = name
        self.function = function
        self._owner = owner  # the module, which must live as long as its functions
        # The driver's own limit is 48 KiB less the static part, which only it knows.
        self.shared_limit = 0
        self._raising = threading.Lock()

    def prepare(
        self,
        types: Sequence[str],
        *,
        cluster: Dim3 | None = None,
        pdl: bool = False,
    ) -> Launch:
        """A reusable launch of this kernel.

        types: one per kernel parameter: ``ptr``, ``u64``, ``i64``, ``u32``, ``i32``, ``f32``, or
            ``bytesN`` for a struct of N bytes passed by value (8-byte aligned).
        cluster: blocks per cluster in x, y, z; the grid must be a multiple of it.
        pdl: programmatic dependent launch: the kernel may start before the one ahead of it in the
            stream has ended, and waits for it itself (``griddepcontrol.wait``).

        Raises ArgumentError for a type that does not exist or a list that is not the kernel's own,
        CupyloraError where the driver refuses.
        """
        self._check_parameters(types)
        if cluster is not None and cluster[0] * cluster[1] * cluster[2] > _PORTABLE_CLUSTER:
            self._set_attribute(_NON_PORTABLE_CLUSTER_SIZE, 1)
        return Launch(self, types, cluster=cluster, pdl=pdl)

    def allow_shared(self, size: int) -> None:
        """Let launches use up to ``size`` bytes of dynamic shared memory."""
        with self._raising:
            if size > self.shared_limit:
                self._set_attribute(_MAX_DYNAMIC_SHARED, size)
                self.shared_limit = size

    def blocks_per_sm(self, threads: int, smem: int = 0) -> int:
        """How many blocks of ``threads`` and ``smem`` dynamic bytes one SM holds at a time."""
        self.allow_shared(smem)
        blocks = ctypes.c_int()
        status = driver.library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks),
            ctypes.c_void_p(self.function),
            ctypes.c_int(threads),
            ctypes.c_size_t(smem),
        )
        driver.check(status, f"occupancy of kernel {self.name}")
        return blocks.value

    def active_clusters(self, threads: int, smem: int, size: int) -> int:
        """How many clusters of ``size`` blocks the device holds at a time."""
        self.allow_shared(smem)
        attributes = _attributes((size, 1, 1), pdl=False)
        config = driver.LaunchConfig(
            grid=(size, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=smem,
            attributes=attributes,
            num_attributes=len(attributes),
        )
        clusters = ctypes.c_int()
        status = driver.library().cuOccupancyMaxActiveClusters(
            ctypes.byref(clusters), ctypes.c_void_p(self.function), ctypes.byref(config)
        )
        driver.check(status, f"occupancy of kernel {self.name} in clusters of {size}")
        return clusters.value

    def _check_parameters(self, types: Sequence[str]) -> None:
        """Compare with the layout in the cubin; drivers before CUDA 12.4 cannot tell it.

        A list that is too short goes unseen: the driver tells the kernel's own number only by
        refusing a parameter beyond it, which tools that watch for errors would report.
        """
        query = getattr(driver.library(), "cuFuncGetParamInfo", None)
        if query is None:
            return
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for index, place in enumerate(_places(types)):
            status = query(
                ctypes.c_void_p(self.function),
                ctypes.c_size_t(index),
                ctypes.byref(offset),
                ctypes.byref(size),
            )
            found = (offset.value, size.value) if status == 0 else None
            if found != place:
                raise ArgumentError(
                    f"kernel {self.name} does not take parameters {tuple(types)}: parameter "
                    f"{index} of type {types[index]} lies at (offset, size) {place}, the kernel's "
                    f"at {found or 'no place: it has fewer'}"
                )

    def _set_attribute(self, attribute: int, value: int) -> None:
        status = driver.library().cuFuncSetAttribute(
            ctypes.c_void_p(self.function), ctypes.c_int(attribute), ctypes.c_int(value)
        )
        driver.check(status, f"setting attribute {attribute} of kernel {self.name} to {value}")


class Launch:
    """Storage for one kernel's launches; made by ``Kernel.prepare``.

    Called, it packs everything and launches: the form for operations whose arguments change. Or
    ``configure`` and ``set`` fill it once and ``run`` enqueues it as it stands. A call is safe from
    several threads; the second form belongs to one owner.
    """

    def __init__(
        self, kernel: Kernel, types: Sequence[str], *, cluster: Dim3 | None, pdl: bool
    ) -> None:
        self.kernel = kernel
        packing = struct.Struct("@" + "".join(map(_format, types)))
        self._single = [struct.Struct("@" + _format(t)) for t in types]
        self._offsets = [offset for offset, _ in _places(types)]
        self._arguments = ctypes.create_string_buffer(max(1, packing.size))
        base = ctypes.addressof(self._arguments)
        self._pointers = (ctypes.c_void_p * len(types))(*(base + o for o in self._offsets))
        self._attributes = _attributes(cluster, pdl)
        self._config = driver.LaunchConfig(
            attributes=self._attributes, num_attributes=len(self._attributes)
        )
        self._lock = threading.Lock()
        # Bound ahead, since a look-up costs as much as packing an argument does. What they are
        # bound to is the storage above.
        self._pack_config = functools.partial(_CONFIG.pack_into, self._config, 0)
        self._pack_arguments = functools.partial(packing.pack_into, self._arguments, 0)
        self._enqueue = functools.partial(
            driver.library().cuLaunchKernelEx,
            ctypes.byref(self._config),
            ctypes.c_void_p.from_param(kernel.function),
            ctypes.byref(self._pointers),
            None,
        )

    def __call__(
        self, stream: int, grid: Dim3, block: Dim3, smem: int, args: Sequence[Any]
    ) -> None:
        """Launch with ``args``, one per parameter; addresses and ``stream`` are integers.

        Raises CupyloraError with the driver's reason.
        """
        if smem > self.kernel.shared_limit:
            self.kernel.allow_shared(smem)
        with self._lock:
            self._pack_arguments(*args)
            self._pack_config(*grid, *block, smem, stream)
            status = self._enqueue()
        if status:
            self._fail(status)

    def configure(self, grid: Dim3, block: Dim3, smem: int = 0) -> None:
        """Set the shape of coming ``run`` calls."""
        self.kernel.allow_shared(smem)
        self._pack_config(*grid, *block, smem, 0)

    def set(self, index: int, value: Any) -> None:
        """Set argument ``index`` of coming ``run`` calls."""
        self._single[index].pack_into(self._arguments, self._offsets[index], value)

    def run(self, stream: int) -> None:
        """Launch as configured and set. Raises CupyloraError with the driver's reason."""
        self._config.stream = stream
        status = self._enqueue()
        if status:
            self._fail(status)

    def _fail(self, status: int) -> None:
        config = self._config
        driver.check(
            status,
            f"launch of kernel {self.kernel.name} with grid {tuple(config.grid)}, "
            f"block {tuple(config.block)}, {config.shared_bytes} B shared memory",
        )


def _places(types: Sequence[str]) -> list[tuple[int, int]]:
    """(offset, size) of each argument in C alignment, as the device reads them."""
    formats = [_format(t) for t in types]
    sizes = [struct.calcsize("@" + f) for f in formats]
    ends = [struct.calcsize("@" + "".join(formats[: i + 1])) for i in range(len(formats))]
    return [(end - size, size) for end, size in zip(ends, sizes, strict=True)]


def _format(name: str) -> str:
    if name in _FORMATS:
        return _FORMATS[name]
    size = name.removeprefix("bytes")
    if size != name and size.isdecimal():
        return f"0Q{size}s"
    raise ArgumentError(
        f"kernel parameter type {name!r} is unknown; use one of {', '.join(_FORMATS)}, bytesN"
    )


def _attributes(cluster: Dim3 | None, pdl: bool) -> ctypes.Array[driver.LaunchAttribute]:
    chosen: list[tuple[int, Dim3]] = []
    if cluster is not None:
        chosen.append((driver.CLUSTER_DIMENSION, cluster))
    if pdl:
        chosen.append((driver.PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0)))
    array = (driver.LaunchAttribute * len(chosen))()
    for attribute, (number, value) in zip(array, chosen, strict=True):
        attribute.id = number
        attribute.value[:3] = value
    return array
