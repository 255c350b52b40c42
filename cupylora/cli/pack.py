"""``cupylora pack``: adapters in one file that a host without Python maps and copies.

Options → ``read_adapter`` of each → ``write_pack``. Nothing is loaded; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from cupylora.adapters.pack_file import write_pack
from cupylora.adapters.peft import read_adapter
from cupylora.cli._named_folder import named_folder
from cupylora.cli._pack_report import print_pack
from cupylora.dtypes import DTYPES
from cupylora.shapes import MAX_RANK, PRESETS, load_model

__all__ = ["command"]


@click.command("pack")
@click.argument("adapters", metavar="[NAME=]DIR...", nargs=-1, required=True)
@click.option(
    "--model",
    required=True,
    metavar="PRESET|CONFIG.JSON",
    help=f"What they are for: one of {', '.join(PRESETS)}, or a Hugging Face config.json.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="What to write; a file there is replaced.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="bfloat16",
    show_default=True,
    help="What the device keeps weights in.",
)
@click.option(
    "--max-rank",
    type=click.IntRange(1, MAX_RANK),
    default=MAX_RANK,
    show_default=True,
    metavar="R",
    help="Larger ranks are refused.",
)
def command(adapters: Sequence[str], model: str, out: Path, dtype: str, max_rank: int) -> None:
    """Write adapters to FILE as the device keeps them.

    A host copies its blocks to the device in one go and builds slot-table rows from its entries
    (cupylora.h, cupylora_table_entry); Python reads it with cupylora.read_pack. `cupylora inspect
    FILE` shows what it holds. FILE appears when all of it is written.
    """
    target = load_model(model)
    folders = [named_folder(text, "DIR") for text in adapters]
    read = (read_adapter(folder, target, name=name) for name, folder in folders)
    print_pack(write_pack(out, read, target, dtype=dtype, max_rank=max_rank))
