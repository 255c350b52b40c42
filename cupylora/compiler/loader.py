"""Programs onto the current device: declaration -> cubin -> module -> :class:`Kernel`.

Cubins come from the cache, or from an export that is in use (``exported``).

A program is compiled and loaded at the first use of one of its kernels on a device and kept.
Loading a module is not allowed while a stream is being captured: ``prepare`` does it ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cupylora.compiler import driver
from cupylora.compiler.arch import arch_for
from cupylora.compiler.cache import default_cache
from cupylora.compiler.exported import current_export
from cupylora.compiler.kernel import Kernel
from cupylora.compiler.programs import PROGRAMS, find_program
from cupylora.compiler.sources import KernelProgram
from cupylora.errors import CompileError, DeviceUnavailableError, GraphError

__all__ = ["load_kernel", "prepare"]

_loaded: dict[tuple[int, str], Mapping[str, Kernel]] = {}
_loading = threading.Lock()


def load_kernel(program: str, kernel: str) -> Kernel:
    """The kernel ``kernel`` of program ``program`` on CuPy's current device.

    Raises CompileError for an unknown name or a program that does not compile,
    DeviceUnavailableError for a device that the program is not built for or cannot be loaded on,
    and ExportError for an export in use that does not fit.
    """
    kernels = _kernels(program)
    try:
        return kernels[kernel]
    except KeyError:
        raise CompileError(
            f"kernel program {program!r} has no kernel {kernel!r}; it has {', '.join(kernels)}"
        ) from None


def prepare(
    programs: Iterable[str] | None = None,
    progress: Callable[[str, int], object] | None = None,
) -> None:
    """Compile and load programs on the current device (all that it supports, if none are named).

    After it, first calls load nothing, so that they can be captured into a graph. What was compiled
    before comes from the cache. progress: told each program that is loaded, and how many are still
    to come. Raises as ``load_kernel`` does.
    """
    if programs is None:
        arch = arch_for(_capability())
        programs = [p.name for p in PROGRAMS if p.built_for(arch)]
    names = list(programs)
    for index, name in enumerate(names):
        _kernels(name)
        if progress is not None:
            progress(name, len(names) - index - 1)


def _kernels(name: str) -> Mapping[str, Kernel]:
    import cupy

    key = (cupy.cuda.runtime.getDevice(), name)
    kernels = _loaded.get(key)
    if kernels is None:
        _require_no_capture(name)
        with _loading:
            if key not in _loaded:
                _loaded[key] = _load(find_program(name))
            kernels = _loaded[key]
    return kernels


def _require_no_capture(name: str) -> None:
    """A module loaded now would void the capture that the host has under way."""
    import cupy

    if driver.is_capturing(cupy.cuda.get_current_stream().ptr):
        raise GraphError(
            f"kernel program {name!r} is not loaded yet, and the current stream is being captured; "
            "call cupylora.prepare() before the capture, or make the same calls once without it"
        )


def _load(program: KernelProgram) -> Mapping[str, Kernel]:
    import cupy

    arch = arch_for(_capability())
    if not program.built_for(arch):
        needed = program.min_arch if program.exact_arch else f"{program.min_arch} or newer"
        raise DeviceUnavailableError(
            f"kernel program {program.name!r} needs {needed}; the current device takes {arch}"
        )
    entry = (current_export() or default_cache()).get(program, arch)
    try:
        module = cupy.RawModule(path=str(entry.path))
        return {
            name: Kernel(f"{program.name}/{name}", _function(module, lowered), module)
            for name, lowered in entry.lowered.items()
        }
    except cupy.cuda.driver.CUDADriverError as error:
        raise DeviceUnavailableError(
            f"kernel program {program.name!r} ({entry.path}) cannot be loaded: {error}; "
            "a driver older than the compiler's CUDA version is the usual reason (see "
            "`cupylora doctor`)"
        ) from error


def _function(module: Any, lowered: str) -> int:
    return int(module.get_function(lowered).kernel.ptr)


def _capability() -> tuple[int, int]:
    import cupy

    text = str(cupy.cuda.Device().compute_capability)
    return int(text[:-1]), int(text[-1])
