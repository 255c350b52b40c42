"""Standard output and error as every command writes to them.

Whatever the streams' encoding, each character appears in some form; what is left in the buffer of a
stream that cannot be written is thrown away, so that the interpreter's end says nothing about it.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

import click

__all__ = ["discard_unwritable", "echo", "open_streams"]

_ERRORS = "cupylora.readable"
_PLAIN = {"µ": "u", "→": "->", "·": "*", "±": "+-", "…": "...", "ᵀ": "^T"}


def open_streams() -> None:
    """Let characters that a stream's encoding lacks be written plainly, or as their escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _readable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    escaped = (_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing)
    return "".join(escaped), error.end


codecs.register_error(_ERRORS, _readable)


def echo(text: str, *, err: bool = False) -> None:
    """A line on stdout or stderr. (Given the stream, click keeps to its encoding.)"""
    click.echo(text, file=sys.stderr if err else sys.stdout)


def discard_unwritable() -> None:
    """Point stdout at nothing if what its buffer still holds cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
