"""rich's console on stdout. Apart from ``_streams``, for rich takes a while to import."""

from __future__ import annotations

from typing import Any

from rich.console import Console

__all__ = ["OutputConsole"]


class OutputConsole(Console):
    """Leaves a reader that has gone away to the command line, as all other output does, and names
    from files as they are (rich would make an emoji of ``:name:``)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Called while the BrokenPipeError is being handled."""
        raise
