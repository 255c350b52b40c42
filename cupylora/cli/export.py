"""``cupylora export``: kernels for hosts without a compiler, or without Python.

Options → ``export_kernels`` → a folder, and a table of what went into it. No GPU is needed.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from cupylora.cli._console import OutputConsole
from cupylora.cli._options import GivenPath
from cupylora.compiler.arch import ARCHITECTURES, architectures
from cupylora.export.folder import ArchReport, export_kernels
from cupylora.files import named
from cupylora.text import byte_size

__all__ = ["command"]


@click.command("export")
@click.option(
    "--arch",
    default=",".join(ARCHITECTURES),
    show_default=True,
    metavar="LIST",
    help="What to build for, by commas.",
)
@click.option(
    "--out",
    type=GivenPath(),
    required=True,
    metavar="DIR",
    help="The folder to write; a former export there is replaced.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes that compile; default: one a CPU.",
)
def command(arch: str, out: Path, workers: int | None) -> None:
    """Compile all kernels and write cubins, a manifest and the C headers to DIR.

    Programs without a compiler use them: Python with CUPYLORA_EXPORT_DIR=DIR or
    cupylora.use_export(DIR), C and C++ with DIR/include/cupylora.h, any other language by
    DIR/manifest.json. No GPU is needed. DIR appears when all of it is written.
    """
    reports = export_kernels(architectures(arch), out, workers=workers)
    console = OutputConsole()
    console.print(_table(reports))
    console.print(f"written to {named(out)}", markup=False, highlight=False, soft_wrap=True)


def _table(reports: list[ArchReport]) -> Table:
    table = Table()
    table.add_column("architecture")
    for column in ("programs", "kernels", "bytes", "seconds"):
        table.add_column(column, justify="right")
    for report in reports:
        table.add_row(
            report.arch,
            str(report.programs),
            str(report.kernels),
            byte_size(report.nbytes),
            f"{report.seconds:.1f}",
        )
    return table
