"""``cupylora kernels``: the kernel programs, how many kernels are in them and where they run."""

from __future__ import annotations

import click
from rich.table import Table

from cupylora.cli._console import OutputConsole
from cupylora.cli._streams import echo
from cupylora.compiler import ARCHITECTURES, PROGRAMS
from cupylora.compiler.sources import read_sources
from cupylora.resources import cuda_source_dir
from cupylora.text import counted, wrapped

__all__ = ["command"]


@click.command("kernels")
@click.option("--all", "each", is_flag=True, help="Name each kernel.")
def command(each: bool) -> None:
    """List the CUDA kernels and their architectures."""
    root = cuda_source_dir()
    echo(f"Kernel programs in {root}")
    table = Table()
    for column in ("program", "source", "kernels", "arch"):
        table.add_column(
            column, overflow="fold", justify="right" if column == "kernels" else "left"
        )
    for program in PROGRAMS:
        read_sources(program, root)  # a listing of files that are not there would be worthless
        first = next(arch for arch in ARCHITECTURES if program.built_for(arch))
        arch = first if program.exact_arch else f"{first}+"
        table.add_row(program.name, program.source, str(len(program.kernels)), arch)
    OutputConsole().print(table)
    for program in PROGRAMS if each else ():
        echo(wrapped(f"{program.name}: ", ", ".join(program.kernels)))
    count = sum(len(program.kernels) for program in PROGRAMS)
    more = "" if each else " (--all names them)"
    echo(f"{counted(count, 'kernel')} in {counted(len(PROGRAMS), 'program')}{more}")
    echo(f"architectures: {', '.join(ARCHITECTURES)}")
