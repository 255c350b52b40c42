"""Compile every kernel program for every architecture, without a GPU, and judge the result.

``python -m cupylora.compiler.check [--arch sm_80,sm_90a] [--program NAME]``: a table of registers,
shared memory, spills and tensor-core instructions. Fails on a compile error, on register spills and
on a kernel of a ``matrix`` program without tensor-core instructions. Never reads the cubin cache.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table

from cupylora.compiler.arch import ARCHITECTURES, architectures
from cupylora.compiler.inspection import KernelReport, report
from cupylora.compiler.nvrtc import compile_program
from cupylora.compiler.programs import PROGRAMS, find_program
from cupylora.compiler.sources import KernelProgram, read_sources
from cupylora.errors import CupyloraError
from cupylora.resources import cuda_source_dir

__all__ = ["Outcome", "check_program", "main", "problems"]


@dataclass(frozen=True)
class Outcome:
    """What compiling one program for one architecture gave: reports, or why there are none."""

    program: KernelProgram
    arch: str
    kernels: tuple[KernelReport, ...] = ()
    failure: str = ""


def check_program(program: KernelProgram, arch: str) -> Outcome:
    """Compile and inspect one program; errors become part of the outcome."""
    try:
        compiled = compile_program(program, read_sources(program, cuda_source_dir()), arch)
        return Outcome(program, arch, tuple(report(compiled, disassemble=program.matrix)))
    except CupyloraError as error:
        return Outcome(program, arch, failure=str(error))


def problems(outcome: Outcome) -> list[str]:
    """What is wrong with an outcome, one line each; empty when it passes."""
    where = f"{outcome.program.name} for {outcome.arch}"
    if outcome.failure:
        return [f"{where}: {outcome.failure}"]
    found = []
    for kernel in outcome.kernels:
        if kernel.spills:
            found.append(f"{where}: kernel {kernel.kernel} spills {kernel.spills} bytes")
        if outcome.program.matrix and not kernel.matrix_instructions:
            found.append(f"{where}: kernel {kernel.kernel} has no tensor-core instruction")
    return found


@click.command()
@click.option("--arch", default=",".join(ARCHITECTURES), show_default=True, help="Comma-separated.")
@click.option("--program", "names", multiple=True, help="Only this program (repeatable).")
def main(arch: str, names: Sequence[str]) -> None:
    """Compile every kernel and fail on errors, spills and missing tensor-core instructions."""
    console = Console()
    try:
        programs = [find_program(name) for name in names] or list(PROGRAMS)
        builds = architectures(arch)
    except CupyloraError as error:
        raise click.UsageError(str(error)) from error
    jobs = [(p, a) for p in programs for a in builds if p.built_for(a)]
    outcomes = _run(jobs)
    console.print(_table(outcomes))
    found = [line for outcome in outcomes for line in problems(outcome)]
    for line in found:
        console.print(f"FAIL {line}", style="red", markup=False, highlight=False)
    kernels = sum(len(outcome.kernels) for outcome in outcomes)
    console.print(f"{kernels} kernels in {len(jobs)} cubins compiled, {len(found)} problems")
    if found or not kernels:
        raise SystemExit(1)


def _run(jobs: Sequence[tuple[KernelProgram, str]]) -> list[Outcome]:
    if not jobs:
        return []
    workers = min(len(jobs), os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        return list(pool.map(check_program, *zip(*jobs, strict=True)))


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Kernels: registers per thread, bytes, tensor-core instructions")
    for column in ("program", "kernel", "arch"):
        table.add_column(column)
    for column in ("regs", "shared", "stack", "spills", "HMMA"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        if outcome.failure:
            table.add_row(outcome.program.name, "did not compile", outcome.arch, style="red")
        for kernel in outcome.kernels:
            matrix = kernel.matrix_instructions
            table.add_row(
                outcome.program.name,
                kernel.kernel,
                outcome.arch,
                str(kernel.registers),
                str(kernel.shared),
                str(kernel.stack),
                str(kernel.spills),
                "" if matrix is None else str(matrix),
            )
    return table


if __name__ == "__main__":
    main()
