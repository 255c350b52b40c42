"""``cupylora kernels``: the kernel programs, what is in them and where they run."""

from __future__ import annotations

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cupylora.compiler import ARCHITECTURES, PROGRAMS, supports
from cupylora.compiler.sources import KernelProgram, read_sources
from cupylora.resources import cuda_source_dir

__all__ = ["command"]


@click.command("kernels")
def command() -> None:
    """List the CUDA kernels and their architectures."""
    root = cuda_source_dir()
    table = Table(title=escape(f"Kernel programs in {root}"))
    for column in ("program", "source", "kernels", "architectures"):
        table.add_column(column, overflow="fold")
    for program in PROGRAMS:
        read_sources(program, root)  # a listing of files that are not there would be worthless
        table.add_row(program.name, program.source, ", ".join(program.kernels), _built_for(program))
    console = Console()
    console.print(table)
    count = sum(len(program.kernels) for program in PROGRAMS)
    console.print(f"{count} kernels in {len(PROGRAMS)} programs", highlight=False)


def _built_for(program: KernelProgram) -> str:
    return ", ".join(a for a in ARCHITECTURES if supports(a, program.min_arch))
