"""A content-addressed store of cubins, shared by all processes of a user.

In: a program and an architecture. Out: an :class:`Entry`, a cubin's path with its kernels' lowered
names, compiled only if no entry of that content is there. The key covers the source, every quoted
header, options, name expressions and NVRTC's version; the place of the sources is not part of it.

An entry is two files, ``KEY.cubin`` and ``KEY.json``, each renamed into place; the second holds the
first one's digest, so a torn or damaged pair is seen and compiled again. Folder:
``$CUPYLORA_CACHE_DIR``, else ``$XDG_CACHE_HOME/cupylora``, else ``~/.cache/cupylora``. Where that
cannot be written, a temporary folder serves this process, with a warning.
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

from cupylora.compiler.nvrtc import Compiled, compile_program, compiler_version, options_for
from cupylora.compiler.sources import KernelProgram, SourceSet, read_sources
from cupylora.resources import cuda_source_dir

__all__ = ["CubinCache", "Entry", "cache_dir", "cache_key", "default_cache"]


@dataclass(frozen=True)
class Entry:
    """A cubin on disk, the lowered name of each kernel in it, and the compiler's log."""

    path: Path
    lowered: Mapping[str, str]
    log: str


def cache_dir() -> Path:
    """The cache folder that the environment asks for; it need not exist."""
    if chosen := os.environ.get("CUPYLORA_CACHE_DIR"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "cupylora"
    return Path("~/.cache/cupylora").expanduser()


def cache_key(
    program: KernelProgram, sources: SourceSet, arch: str, version: tuple[int, int]
) -> str:
    """Hex digest of everything that decides the cubin's bytes and the entry's names."""
    content = {
        "source": [sources.path, sources.text],
        "headers": sorted(sources.headers.items()),
        "options": options_for(program, arch),
        "kernels": sorted(program.kernels.items()),
        "nvrtc": version,
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class CubinCache:
    """Cubins under ``folder``; compiles what is missing from sources under ``source_dir``."""

    def __init__(self, folder: Path, source_dir: Path) -> None:
        self.folder = _writable(folder)
        self.source_dir = source_dir

    def get(self, program: KernelProgram, arch: str) -> Entry:
        """The program's cubin for ``arch``, compiled if need be; raises CompileError."""
        sources = read_sources(program, self.source_dir)
        key = cache_key(program, sources, arch, compiler_version())
        entry = self._read(key)
        if entry is None:
            entry = self._store(key, compile_program(program, sources, arch))
        return entry

    def _read(self, key: str) -> Entry | None:
        cubin, description = self._paths(key)
        try:
            fields = json.loads(description.read_bytes())
            if hashlib.sha256(cubin.read_bytes()).hexdigest() != fields["sha256"]:
                return None
            return Entry(cubin, dict(fields["lowered"]), str(fields["log"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _store(self, key: str, compiled: Compiled) -> Entry:
        cubin, description = self._paths(key)
        fields = {
            "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
            "lowered": dict(compiled.lowered),
            "log": compiled.log,
        }
        _replace(cubin, compiled.cubin)
        _replace(description, json.dumps(fields, indent=1).encode())
        return Entry(cubin, compiled.lowered, compiled.log)

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.cubin", self.folder / f"{key}.json"


def default_cache() -> CubinCache:
    """The cache that the environment asks for, over the package's own CUDA sources."""
    return _cache(cache_dir(), cuda_source_dir())


@functools.cache
def _cache(folder: Path, source_dir: Path) -> CubinCache:
    return CubinCache(folder, source_dir)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="cupylora-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        warnings.warn(
            f"the kernel cache {folder} cannot be written ({error.strerror}): kernels are compiled "
            f"into {temporary} for this process; set CUPYLORA_CACHE_DIR to a writable folder",
            RuntimeWarning,
            stacklevel=2,
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
