"""CUDA C++ to cubin through NVRTC, which needs no GPU.

In: a program and its :class:`SourceSet`, an architecture. Out: a :class:`Compiled` cubin with the
lowered (mangled) name of each kernel and ptxas's log. Headers are handed to NVRTC as text: there is
no include path, so nothing outside the source set can get into a cubin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupylora.compiler.sources import KernelProgram, SourceSet
from cupylora.errors import CompileError

__all__ = ["Compiled", "compile_program", "compiler_version", "options_for"]

_FIRST_ERROR = re.compile(r"^(?P<file>[^\s()]+)\((?P<line>\d+)\): (?:catastrophic )?error", re.M)

_REMEDY = "install the compiler with cupylora[cuda13], cupylora[cuda12] or cupylora[test]"


@dataclass(frozen=True)
class Compiled:
    """A cubin, the lowered name of each of the program's kernels, and the compiler's log."""

    cubin: bytes
    lowered: Mapping[str, str]
    log: str


def compiler_version() -> tuple[int, int]:
    """NVRTC's version; raises CompileError where NVRTC is not installed."""
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        # cuda.bindings looks for the shared library at the first call; what it raises then
        # differs between its versions.
        raise CompileError(f"NVRTC's library cannot be loaded ({error}); {_REMEDY}") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC does not tell its version: {status.name}; {_REMEDY}")
    return int(major), int(minor)


def options_for(program: KernelProgram, arch: str) -> tuple[str, ...]:
    """The compiler's options; denormals, division and square roots stay IEEE."""
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{name}={value}" for name, value in sorted(program.defines.items())),
    )


def compile_program(program: KernelProgram, sources: SourceSet, arch: str) -> Compiled:
    """Compile all kernels of ``program`` for ``arch``.

    Raises CompileError with file, line, architecture, options and the compiler's log.
    """
    compiler_version()
    nvrtc = _nvrtc()
    names = [name.encode() for name in sources.headers]
    texts = [text.encode() for text in sources.headers.values()]
    handle = _call(
        nvrtc.nvrtcCreateProgram,
        sources.text.encode(),
        sources.path.encode(),
        len(texts),
        texts,
        names,
    )
    try:
        return _compile(handle, program, sources, arch)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _compile(handle: Any, program: KernelProgram, sources: SourceSet, arch: str) -> Compiled:
    nvrtc = _nvrtc()
    for expression in program.kernels.values():
        _call(nvrtc.nvrtcAddNameExpression, handle, expression.encode())
    options = options_for(program, arch)
    (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), [o.encode() for o in options])
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(_failure(program, sources, options, status.name, log))
    lowered = {
        name: _call(nvrtc.nvrtcGetLoweredName, handle, expression.encode()).decode()
        for name, expression in program.kernels.items()
    }
    cubin = _buffer(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, handle)
    return Compiled(cubin, lowered, log)


def _failure(
    program: KernelProgram, sources: SourceSet, options: tuple[str, ...], status: str, log: str
) -> str:
    first = _FIRST_ERROR.search(log)
    where = f"{first['file']}, line {first['line']}" if first else sources.path
    return (
        f"kernel program {program.name!r} did not compile ({status}) at {where}\n"
        f"source: {sources.path}\n"
        f"options: {' '.join(options)}\n"
        f"kernels: {', '.join(program.kernels.values())}\n"
        f"{log}"
    )


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(f"cuda-bindings is not installed; {_REMEDY}") from error
    return nvrtc


def _call(function: Any, *args: Any) -> Any:
    status, *result = function(*args)
    if status.value != 0:
        raise CompileError(f"{function.__name__} failed: {status.name}")
    return result[0] if result else None


def _buffer(size_of: Any, fetch: Any, handle: Any) -> bytes:
    buffer = bytearray(_call(size_of, handle))
    _call(fetch, handle, buffer)
    return bytes(buffer)


def _text(size_of: Any, fetch: Any, handle: Any) -> str:
    return _buffer(size_of, fetch, handle).rstrip(b"\0").decode(errors="replace").strip()
