"""Adapters as the command line names them: ``NAME=DIR``, or ``DIR`` under its own name."""

from __future__ import annotations

from pathlib import Path

from cupylora.errors import ArgumentError

__all__ = ["named_folder"]


def named_folder(text: str, argument: str) -> tuple[str, str]:
    """(name, directory) of NAME=DIR, or of DIR alone, which may itself hold a "="."""
    name, separator, path = text.partition("=")
    try:
        if not separator or Path(text).is_dir():
            name, path = Path(text).absolute().name, text
    except OSError as error:
        raise ArgumentError(f"{argument}: {error.strerror}: {text}") from error
    if not name or not path:
        raise ArgumentError(f"{argument} {text!r}: NAME=DIR, or a directory with a name, is needed")
    return name, path
