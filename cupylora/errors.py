"""Every error a user can cause, as one small family.

Each message says what was wrong, where (argument, tensor, row, key) and what to do about it.
Nothing in the package signals a user's mistake with ``assert``, ``print`` or a bare
``RuntimeError``.
"""

from __future__ import annotations

__all__ = [
    "AdapterFormatError",
    "ArgumentError",
    "CapacityError",
    "CompileError",
    "CupyloraError",
    "DeviceUnavailableError",
    "ExportError",
    "GraphError",
    "RoomError",
]


class CupyloraError(Exception):
    """Base of all errors raised by cupylora."""


class AdapterFormatError(CupyloraError):
    """An adapter's files cannot be read, or something in them could not be applied exactly."""


class CapacityError(CupyloraError):
    """A slot, arena, workspace or limit is too small for what was asked."""


class RoomError(CapacityError):
    """The arena has no gap that is large enough; unloading adapters helps."""


class ArgumentError(CupyloraError, ValueError):
    """An argument's dtype, shape, contiguity, device or value is not what the call needs."""


class GraphError(CupyloraError):
    """CUDA-graph capture or replay cannot proceed."""


class DeviceUnavailableError(CupyloraError):
    """The CUDA backend was asked for where it is not ready."""


class CompileError(CupyloraError):
    """A kernel did not compile; the message holds file, line, options and the compiler's log."""


class ExportError(CupyloraError):
    """A folder of exported kernels is damaged, of other sources, or lacks what is asked of it."""
