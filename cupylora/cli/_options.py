"""Options that commands about adapters share: what the device keeps, and the largest rank."""

from __future__ import annotations

import click

from cupylora.dtypes import DTYPES
from cupylora.shapes import MAX_RANK

__all__ = ["dtype_option", "max_rank_option"]

dtype_option = click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="bfloat16",
    show_default=True,
    help="What the device keeps weights in.",
)
max_rank_option = click.option(
    "--max-rank",
    type=click.IntRange(1, MAX_RANK),
    default=MAX_RANK,
    show_default=True,
    metavar="R",
    help="Your runtime's limit.",
)
