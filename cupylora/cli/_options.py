"""What commands share: paths, and the options about adapters (what the device keeps, the largest
rank)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupylora.dtypes import DTYPES
from cupylora.shapes import MAX_RANK

__all__ = ["STDOUT", "GivenPath", "dtype_option", "max_rank_option"]

STDOUT = Path("-")
"""As the file of ``--json``."""


class GivenPath(click.Path):
    """A Path, or a str. An empty text, as of a variable that is not set, would be the current
    directory."""

    def __init__(self, path_type: type[Any] = Path) -> None:
        super().__init__(path_type=path_type)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("a path is needed, and it is empty", param, ctx)
        return super().convert(value, param, ctx)


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
