"""A content-addressed store of cubins, shared by all processes of a user.

In: a program and an architecture. Out: an :class:`Entry`, a cubin's path with its kernels' lowered
names, compiled only if no entry of that content is there. The key covers the source, every quoted
header, options, name expressions and NVRTC's version; the place of the sources is not part of it.

An entry is two files, ``KEY.cubin`` and ``KEY.json``, each renamed into place; the second holds a
digest of the first and of its own names, so a torn, damaged or edited pair is seen and compiled
again. Folder: ``$CUPYLORA_CACHE_DIR``, else ``$XDG_CACHE_HOME/cupylora``, else
``~/.cache/cupylora``. Where that cannot be written, a temporary folder serves this process, with a
warning.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupylora.compiler.nvrtc import Compiled, compile_program, compiler_version, options_for
from cupylora.compiler.sources import KernelProgram, SourceSet, read_sources
from cupylora.resources import cuda_source_dir

__all__ = ["CubinCache", "Entry", "cache_dir", "cache_key", "default_cache", "source_digest"]


@dataclass(frozen=True)
class Entry:
    """A cubin on disk, the lowered name of each kernel in it, and the compiler's log."""

    path: Path
    lowered: Mapping[str, str]
    log: str


def cache_dir() -> Path | None:
    """The cache folder that the environment asks for; it need not exist.

    None: it is in the home directory of a user who has none.
    """
    chosen = os.environ.get("CUPYLORA_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    if base and not chosen:
        return Path(base) / "cupylora"
    try:
        return Path(chosen or "~/.cache/cupylora").expanduser()
    except RuntimeError:
        return None


def cache_key(
    program: KernelProgram, sources: SourceSet, arch: str, version: tuple[int, int]
) -> str:
    """Hex digest of everything that decides the cubin's bytes and the entry's names."""
    return _hex({**_content(program, sources, arch), "nvrtc": version})


def source_digest(program: KernelProgram, sources: SourceSet, arch: str) -> str:
    """Hex digest of all that ``cache_key`` covers but the compiler: what a cubin is made of."""
    return _hex(_content(program, sources, arch))


def _content(program: KernelProgram, sources: SourceSet, arch: str) -> dict[str, Any]:
    return {
        "source": [sources.path, sources.text],
        "headers": sorted(sources.headers.items()),
        "options": options_for(program, arch),
        "kernels": sorted(program.kernels.items()),
    }


def _hex(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class CubinCache:
    """Cubins under ``folder``; compiles what is missing from sources under ``source_dir``.

    folder: None for a temporary one.
    """

    def __init__(self, folder: Path | None, source_dir: Path) -> None:
        self.folder = _writable(folder)
        self.source_dir = source_dir

    def get(self, program: KernelProgram, arch: str) -> Entry:
        """The program's cubin for ``arch``, compiled if need be; raises CompileError."""
        sources = read_sources(program, self.source_dir)
        key = cache_key(program, sources, arch, compiler_version())
        entry = self._read(key, program)
        if entry is None:
            entry = self._store(key, compile_program(program, sources, arch))
        return entry

    def _read(self, key: str, program: KernelProgram) -> Entry | None:
        """The entry if it is whole and of exactly the program's kernels."""
        try:
            fields = json.loads(self._description(key).read_bytes())
            lowered, log = dict(fields["lowered"]), str(fields["log"])
            cubin = self._cubin(key, str(fields["cubin"]))
            if fields["sha256"] != _digest(cubin.read_bytes(), lowered, log):
                return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return Entry(cubin, lowered, log) if lowered.keys() == program.kernels.keys() else None

    def _store(self, key: str, compiled: Compiled) -> Entry:
        """Write an entry; where that fails, into a temporary folder from here on."""
        try:
            return self._write(key, compiled)
        except OSError as error:
            self.folder = _temporary(self.folder, error.strerror)
            return self._write(key, compiled)

    def _write(self, key: str, compiled: Compiled) -> Entry:
        # By its content: two processes that compile the same at a time name kernels differently,
        # and neither may put its cubin in the place of the one that the other has looked up.
        mark = hashlib.sha256(compiled.cubin).hexdigest()[:16]
        cubin, lowered = self._cubin(key, mark), dict(compiled.lowered)
        fields = {
            "cubin": mark,
            "sha256": _digest(compiled.cubin, lowered, compiled.log),
            "lowered": lowered,
            "log": compiled.log,
        }
        _replace(cubin, compiled.cubin)
        _replace(self._description(key), json.dumps(fields, indent=1).encode())
        return Entry(cubin, compiled.lowered, compiled.log)

    def _description(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _cubin(self, key: str, mark: str) -> Path:
        """Of an entry; ``mark``: of its content. Raises ValueError for what is no mark."""
        return self.folder / f"{key}.{int(mark, 16):016x}.cubin"


def _digest(cubin: bytes, lowered: Mapping[str, str], log: str) -> str:
    """Hex digest of all that an entry gives out."""
    content = [hashlib.sha256(cubin).hexdigest(), sorted(lowered.items()), log]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def default_cache() -> CubinCache:
    """The cache that the environment asks for, over the package's own CUDA sources."""
    return _cache(cache_dir(), cuda_source_dir())


@functools.cache
def _cache(folder: Path | None, source_dir: Path) -> CubinCache:
    return CubinCache(folder, source_dir)


def _writable(folder: Path | None) -> Path:
    if folder is None:
        return _temporary(None, "no home directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        return _temporary(folder, error.strerror)


def _temporary(instead_of: Path | None, why: str | None) -> Path:
    """A folder for this process, with a warning that says why."""
    temporary = Path(tempfile.mkdtemp(prefix="cupylora-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    which = "the kernel cache" if instead_of is None else f"the kernel cache {instead_of}"
    warnings.warn(
        f"{which} cannot be written ({why}): kernels are compiled into {temporary} for this "
        "process; set CUPYLORA_CACHE_DIR to a writable folder",
        RuntimeWarning,
        stacklevel=3,
    )
    return temporary


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that other processes see the old one or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
