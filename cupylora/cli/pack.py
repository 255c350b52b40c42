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
from cupylora.cli._options import GivenPath, dtype_option, max_rank_option
from cupylora.cli._pack_report import print_pack
from cupylora.shapes import PRESETS, load_model

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
    type=GivenPath(),
    required=True,
    metavar="FILE",
    help="What to write; a pack there is replaced, another file is not.",
)
@dtype_option
@max_rank_option
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
