"""An export's folder: compiled, described and put in place whole.

In: architectures and a path. Out: the folder, of which nothing is seen before all of it is there:

    DIR/manifest.json, manifest.schema.json     for any language
    DIR/include/cupylora.h (and what it includes)   for C
    DIR/sm_90a/PROGRAM.cubin                    what both name
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from cupylora.compiler.arch import ARCHITECTURES
from cupylora.compiler.cache import default_cache
from cupylora.compiler.exported import MANIFEST
from cupylora.compiler.nvrtc import compiler_version
from cupylora.compiler.programs import PROGRAMS, find_program
from cupylora.errors import CompileError, ExportError
from cupylora.export.manifest import Built, describe, make_manifest, schema
from cupylora.export.table import c_table
from cupylora.files import is_there, named, read_json, reason
from cupylora.resources import include_dir

__all__ = ["ArchReport", "export_kernels"]

_PR_SET_PDEATHSIG = 1
SCHEMA, INCLUDE, TABLE = "manifest.schema.json", "include", "cupylora_table.h"


@dataclass(frozen=True)
class ArchReport:
    """One architecture of an export. seconds: from its first compilation to its last."""

    arch: str
    programs: int
    kernels: int
    nbytes: int
    seconds: float


def export_kernels(
    archs: Sequence[str], out: Path, *, workers: int | None = None
) -> list[ArchReport]:
    """Write all kernels of ``archs`` to the folder ``out``, in place of an export there.

    workers: processes that compile (default: one a CPU). Raises ExportError where ``out`` is
    anything but a former export or empty, or cannot be written; CompileError without NVRTC.
    """
    version = compiler_version()
    out = Path(os.path.realpath(out))  # a link stays one: what it leads to is written
    _check_replaceable(out)
    built: list[Built] = []
    reports = []
    for arch in archs:
        begin = time.monotonic()
        made = _build(arch, workers or os.cpu_count() or 1)
        reports.append(_report(arch, made, time.monotonic() - begin))
        built += made
    try:
        _write(out, built, version)
    except OSError as error:
        raise ExportError(f"{named(out)} cannot be written: {reason(error)}") from error
    return reports


def _check_replaceable(out: Path) -> None:
    if not is_there(out) or (out.is_dir() and _is_ours(out)):
        return
    raise ExportError(
        f"{named(out)} is there and is no export; name another --out, or remove it yourself"
    )


def _is_ours(folder: Path) -> bool:
    """Whether there is nothing in it but an export, or nothing at all."""
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    known = {MANIFEST, SCHEMA, INCLUDE, *ARCHITECTURES}
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return False
    return names <= known and {"format", "cupylora", "programs"} <= manifest.keys()


def _build(arch: str, workers: int) -> list[Built]:
    """All programs of one architecture, in the order of PROGRAMS."""
    programs = [p for p in PROGRAMS if p.built_for(arch)]
    # What takes longest is begun first, so that no worker is left with it at the end.
    order = sorted(programs, key=lambda p: (not p.matrix, -len(p.kernels)))
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(order)), spawn, _end_with_parent)
    try:
        done = {p.name: pool.submit(_compile, p.name, arch) for p in order}
        return [done[p.name].result() for p in programs]
    except BrokenProcessPool as error:
        raise CompileError(
            "a process that compiled kernels died, for lack of memory as a rule; use fewer "
            "--workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """In a worker: Ctrl-C ends it at once, though it is within the compiler, and so does the end of
    the process that began it, however that came."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_option = getattr(ctypes.CDLL(None), "prctl", None)
    if set_option is not None:  # Linux
        set_option(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _compile(name: str, arch: str) -> Built:
    program = find_program(name)
    entry = default_cache().get(program, arch)
    return Built(program, arch, entry.path.read_bytes(), entry.lowered)


def _report(arch: str, built: Sequence[Built], seconds: float) -> ArchReport:
    kernels = sum(len(item.lowered) for item in built)
    nbytes = sum(len(item.cubin) for item in built)
    return ArchReport(arch, len(built), kernels, nbytes, seconds)


def _write(out: Path, built: Sequence[Built], version: tuple[int, int]) -> None:
    """Write beside ``out``, then rename: a path is never a folder that is half there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as room:
        made, former = Path(room) / "made", Path(room) / "former"
        _fill(made, built, version)
        if is_there(out):
            os.replace(out, former)
        try:
            os.replace(made, out)
        except BaseException:
            if former.exists():
                os.replace(former, out)
            raise


def _fill(folder: Path, built: Sequence[Built], version: tuple[int, int]) -> None:
    for item in built:
        path = folder / item.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.cubin)
    include = folder / INCLUDE
    shutil.copytree(include_dir(), include)
    (include / TABLE).write_text(c_table(built, describe()), encoding="utf-8")
    _write_json(folder / SCHEMA, schema())
    _write_json(folder / MANIFEST, make_manifest(built, version))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
