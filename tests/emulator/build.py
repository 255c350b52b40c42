"""Shared libraries of the emulator: its core, and one for each kernel program.

In: programs (``compiler.programs``) and the folder of their sources. Out: paths. A library's name
holds a digest of all that it is made of, so one that is there is used as it stands, by any process.
They are kept in ``emulator`` of the kernel cache's folder.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupylora.compiler.cache import cache_dir
from cupylora.compiler.sources import KernelProgram, read_sources

from .rewrite import rewritten

__all__ = ["BuildError", "Builder", "missing_tools"]

_HERE = Path(__file__).resolve().parent
_JOBS = 2
_running = threading.BoundedSemaphore(_JOBS)
_FLAGS = ("-std=c++17", "-g1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden")
_CORE_FLAGS = (*_FLAGS, "-O2")
# Kernels are written for another compiler, so its warnings are not asked for.
_PROGRAM_FLAGS = (*_FLAGS, "-O1", "-fno-strict-aliasing", "-w", "-fsanitize=thread")
_ENTRY = """
#include "launch.h"
extern "C" __attribute__((visibility("default"))) int emulate(
    const char* name, const emu::Shape* shape, const unsigned char* packed, unsigned bytes) {{
  static const emu::Entry entries[] = {{{entries}}};
  return emu::start_by_name(entries, name, *shape, packed, bytes);
}}
"""


class BuildError(Exception):
    """The C++ compiler refused; the message is its own."""


def missing_tools() -> str | None:
    """Why kernels cannot be emulated on this machine, if they cannot."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "kernels are emulated on Linux on x86-64 only"
    if shutil.which("g++") is None:
        return "kernels are emulated with g++, which is not installed"
    return None


class Builder:
    """Builds from the CUDA sources under ``source_dir``, as they are at the first use of each."""

    def __init__(self, source_dir: Path) -> None:
        self.source_dir = source_dir
        self.folder = _writable(cache_dir())
        self._built: dict[str, Path] = {}

    def build(self, programs: Iterable[KernelProgram]) -> None:
        """Compile what is missing, two at a time."""
        with ThreadPoolExecutor(_JOBS) as pool:
            jobs = [pool.submit(self.core), *(pool.submit(self.library, p) for p in programs)]
            for job in jobs:
                job.result()

    @property
    def built(self) -> Mapping[str, Path]:
        """Libraries so far, by program."""
        return self._built

    def core(self) -> Path:
        """The model of the machine; programs need it loaded before them."""
        return self._once("core", self._build_core)

    def library(self, program: KernelProgram) -> Path:
        """The program's kernels, behind ``emulate`` (see ``launch.h``)."""
        return self._once(program.name, lambda: self._build_program(program))

    def _once(self, name: str, build: Callable[[], Path]) -> Path:
        if name not in self._built:
            self._built[name] = build()
        return self._built[name]

    def _build_core(self) -> Path:
        units = {name: text for name, text in _own_files().items() if name.endswith(".cpp")}
        return self._library("core", {}, sorted(units), [*_CORE_FLAGS, f"-I{_HERE}"])

    def _build_program(self, program: KernelProgram) -> Path:
        sources, numbers = read_sources(program, self.source_dir), itertools.count()
        texts = {**sources.headers, sources.path: sources.text}
        texts = {name: rewritten(text, numbers) for name, text in texts.items()}
        kernels = program.kernels.items()
        entries = ", ".join(f'{{"{n}", &emu::start<&{e}>}}' for n, e in kernels)
        defines = "".join(f"#define {name} {value}\n" for name, value in program.defines.items())
        texts["program.cpp"] = (
            f'#include "cuda.h"\n{defines}#include "{sources.path}"\n'
            + _ENTRY.format(entries=entries)
        )
        flags = [*_PROGRAM_FLAGS, f"-I{_HERE}", "-I."]
        return self._library(program.name, texts, ["program.cpp"], flags)

    def _library(
        self, name: str, texts: Mapping[str, str], units: list[str], flags: list[str]
    ) -> Path:
        plain = [flag for flag in flags if str(_HERE) not in flag]
        content = [name, sorted(texts.items()), sorted(_own_files().items()), plain, _compiler()]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        path = self.folder / f"{name}-{digest[:32]}.so"
        with _locked(self.folder / f"{name}.lock"):
            if path.exists():
                return path
            with tempfile.TemporaryDirectory(dir=self.folder) as work:
                _compile(Path(work), texts, units, flags, path)
        return path


def _compile(
    work: Path, texts: Mapping[str, str], units: list[str], flags: list[str], out: Path
) -> None:
    for name, text in texts.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text, encoding="utf-8")
    inputs = units if texts else [str(_HERE / unit) for unit in units]
    # The sanitizer is for its calls alone; linked without the flag, they are the core's.
    objects = []
    for index, unit in enumerate(inputs):
        objects.append(f"{index}.o")
        _run([*flags, f"-ffile-prefix-map={work}=.", "-c", unit, "-o", objects[-1]], work)
    _run(["-shared", *objects, "-o", "made.so"], work)
    os.replace(work / "made.so", out)


def _run(arguments: list[str], work: Path) -> None:
    with _running:
        done = subprocess.run([_gxx(), *arguments], cwd=work, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(arguments)}\n{done.stderr}")


def _gxx() -> str:
    found = shutil.which("g++")
    if found is None:
        raise BuildError("g++ is not installed")
    return found


@functools.cache
def _compiler() -> str:
    done = subprocess.run([_gxx(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


@functools.cache
def _own_files() -> dict[str, str]:
    files = sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")])
    return {file.name: file.read_text(encoding="utf-8") for file in files}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among threads and processes: test workers ask for the same libraries at once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _writable(cache: Path | None) -> Path:
    """The emulator's folder of the cache, or one for this process."""
    if cache is not None:
        folder = cache / "emulator"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    temporary = Path(tempfile.mkdtemp(prefix="cupylora-emulator-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
