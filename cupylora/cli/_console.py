"""rich's console on stdout. Apart from ``_streams``, for rich takes a while to import."""

from __future__ import annotations

from rich.console import Console

__all__ = ["OutputConsole"]


class OutputConsole(Console):
    """Leaves a reader that has gone away to the command line, as all other output does."""

    def on_broken_pipe(self) -> None:
        """Called while the BrokenPipeError is being handled."""
        raise
