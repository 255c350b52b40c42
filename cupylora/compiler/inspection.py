"""What ptxas and the disassembler say about a compiled program.

In: a :class:`Compiled` cubin with its log. Out: a :class:`KernelReport` per kernel: registers,
shared memory, spills, and the number of tensor-core instructions.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cupylora.compiler.nvrtc import Compiled
from cupylora.errors import CompileError

__all__ = ["KernelReport", "disassembler", "report"]

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_MATRIX = re.compile(r"\bHG?MMA\.")


@dataclass(frozen=True)
class KernelReport:
    """One kernel's use of the device; bytes except for registers (per thread) and instructions.

    matrix_instructions is None where the program was not disassembled.
    """

    kernel: str
    registers: int
    shared: int
    stack: int
    spills: int
    matrix_instructions: int | None


def report(compiled: Compiled, *, disassemble: bool) -> list[KernelReport]:
    """A report for each kernel of a program.

    Raises CompileError where the log says nothing of a kernel, so that a change of ptxas's wording
    cannot pass for a clean result, and where disassembly is asked for and is not possible.
    """
    blocks = _blocks(compiled.log)
    matrix = _matrix_counts(compiled.cubin) if disassemble else None
    reports = []
    for kernel, lowered in compiled.lowered.items():
        block = blocks.get(lowered, "")
        stack, registers = _STACK.search(block), _REGISTERS.search(block)
        if stack is None or registers is None:
            raise CompileError(f"ptxas's log does not tell kernel {kernel!r}:\n{compiled.log}")
        shared = _SHARED.search(block)
        # Functions that were not inlined follow their kernel in the log; their spills are its own.
        spills = sum(int(m[2]) + int(m[3]) for m in _STACK.finditer(block))
        reports.append(
            KernelReport(
                kernel=kernel,
                registers=int(registers[1]),
                shared=int(shared[1]) if shared else 0,
                stack=int(stack[1]),
                spills=spills,
                matrix_instructions=None if matrix is None else matrix[lowered],
            )
        )
    return reports


def disassembler() -> Path:
    """nvdisasm, from its wheel or the PATH; raises CompileError where there is none."""
    path = _disassembler()
    if path is None:
        raise CompileError(
            "nvdisasm was found neither in site-packages nor on the PATH; "
            "install nvidia-cuda-nvdisasm (part of cupylora[test])"
        )
    return path


@functools.cache
def _disassembler() -> Path | None:
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    for found in sorted(packages.glob("*/bin/nvdisasm")):
        return found
    on_path = shutil.which("nvdisasm")
    return Path(on_path) if on_path else None


def _blocks(log: str) -> dict[str, str]:
    """The part of the log that belongs to each entry function."""
    starts = list(_ENTRY.finditer(log))
    bounds = [*(match.start() for match in starts), len(log)]
    return {
        match[1]: log[match.start() : end] for match, end in zip(starts, bounds[1:], strict=True)
    }


def _matrix_counts(cubin: bytes) -> Counter[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run(
            [disassembler(), "-c", file.name], capture_output=True, text=True, check=False
        )
    if result.returncode != 0:
        raise CompileError(f"nvdisasm failed: {result.stderr.strip()}")
    counts: Counter[str] = Counter()
    section = ""
    for line in result.stdout.splitlines():
        if start := _SECTION.match(line):
            section = start[1]
        elif _MATRIX.search(line):
            counts[section] += 1
    return counts
