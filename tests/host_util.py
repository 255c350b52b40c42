"""C and C++ hosts under test: an export that needs no compiler, builds of the host programs, and
the stand-in for the driver that they run on (hosts/fake_libcuda.cpp)."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from emulator.build import Builder
from emulator.device import EVERY_THREAD_WAITS, ONE_BYTE_PROGRAMS, READ_UNSET, Schedule

from cupylora.compiler.programs import PROGRAMS, find_program
from cupylora.export.manifest import Built, Described, describe, function_of
from cupylora.export.table import c_table
from cupylora.resources import include_dir

HOSTS = Path(__file__).parent / "hosts"
ROOT = Path(__file__).resolve().parent.parent
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
ARCH = "sm_90a"
SM, SHARED_SM, SHARED_BLOCK, MAJOR, MINOR = 16, 81, 97, 75, 76
"""Numbers of device attributes."""

Done = subprocess.CompletedProcess[str]


def compiler(name: str) -> str:
    """Path of gcc or g++; skips the test where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def build(
    tool: str,
    flags: Sequence[str],
    sources: Sequence[Path],
    out: Path,
    libraries: Sequence[str] = (),
) -> Path:
    """Compile and link ``sources`` with gcc or g++; fails with the compiler's words."""
    command = [compiler(tool), *flags, *map(str, sources), *libraries, "-ldl", "-lm"]
    command += ["-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@functools.cache
def fake_libcuda() -> Path:
    """The stand-in for the driver, built once."""
    folder = Path(tempfile.mkdtemp(prefix="cupylora-hosts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    sources = [HOSTS / "fake_libcuda.cpp"]
    return build("g++", (*flags, *STRICT), sources, folder / "libcuda.so.1")


@functools.cache
def described() -> Described:
    return describe()


def hollow(arch: str = ARCH) -> list[Built]:
    """What an export of ``arch`` would hold, with hollow cubins; "mangled" names are our own."""
    return [
        Built(p, arch, b"\x7fELF" + p.name.encode(), {k: f"{p.name}/{k}" for k in p.kernels})
        for p in PROGRAMS
        if p.built_for(arch)
    ]


def write_hollow(folder: Path, built: Sequence[Built]) -> Path:
    """An export's folder as far as C reads it."""
    shutil.copytree(include_dir(), folder / "include")
    (folder / "include" / "cupylora_table.h").write_text(c_table(built, described()))
    for item in built:
        path = folder / item.file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(item.cubin)
    return folder


@dataclass
class FakeDriver:
    """The stand-in as it shall behave, and where it is built.

    mode: emulate, log (a line a launch) or nothing. blocks: of a kernel that an SM holds;
    clusters: that the device holds, by their size; shared: bytes that a block may have, and an SM.
    """

    folder: Path
    built: Sequence[Built]
    mode: str = "log"
    builder: Builder | None = None
    capability: tuple[int, int] = (9, 0)
    processors: int = 1
    blocks: int = 5
    clusters: Mapping[int, int] = field(default_factory=lambda: dict.fromkeys((1, 2, 4, 8), 5))
    shared: tuple[int, int] = (227 * 1024, 228 * 1024)
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def log(self) -> Path:
        """Launches of the last run, a line each."""
        return self.folder / "launches.txt"

    def make(self) -> None:
        """Put its library into the folder, if that was not done."""
        library = self.folder / "libcuda.so.1"
        if not library.exists():
            shutil.copyfile(fake_libcuda(), library)

    def run(
        self, command: Sequence[str | Path], text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a host program on it, ``text`` as its input."""
        self.make()
        config = self.folder / "device.txt"
        config.write_text("\n".join(self._lines()) + "\n")
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.folder),
            "CUPYLORA_FAKE_CUDA": str(config),
        }
        return subprocess.run(
            list(map(str, command)),
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )

    def launches(self) -> list[tuple[str, list[int], bytes]]:
        """Kernel; grid, threads, shared bytes, cluster and whether dependent; arguments."""
        found = []
        for line in self.log.read_text().splitlines():
            kernel, *numbers, args = line.split(" ")
            found.append((kernel, list(map(int, numbers)), bytes.fromhex(args)))
        return found

    def _lines(self) -> list[str]:
        attributes = {
            SM: self.processors,
            MAJOR: self.capability[0],
            MINOR: self.capability[1],
            SHARED_BLOCK: self.shared[0],
            SHARED_SM: self.shared[1],
        }
        how = self.schedule
        return [
            f"mode {self.mode}",
            *([f"log {self.log}"] if self.mode != "nothing" else []),
            f"blocks {self.blocks}",
            f"schedule {how.seed} {how.deliver} {how.pause}",
            *(f"attribute {number} {value}" for number, value in attributes.items()),
            *(f"clusters {size} {count}" for size, count in self.clusters.items()),
            *([f"core {self.builder.core()}"] if self.builder else []),
            *self._kernels(),
        ]

    def _kernels(self) -> list[str]:
        lines = []
        for item in self.built:
            program = item.program.name
            library = "-"
            if self.builder and program in self.builder.built:
                library = str(self.builder.library(find_program(program)))
            flags = (
                program.startswith(EVERY_THREAD_WAITS),
                program.startswith(READ_UNSET),
                program not in ONE_BYTE_PROGRAMS,
            )
            for name, mangled in item.lowered.items():
                places = described().functions[function_of(item.program, name)]
                numbers = " ".join(f"{p.offset} {p.size}" for p in places)
                words = (mangled, program, name, library, *map(int, flags), numbers)
                lines.append("kernel " + " ".join(map(str, words)))
        return lines
