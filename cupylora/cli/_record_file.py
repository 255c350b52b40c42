"""The file of ``--json``: tried before the work begins, written once at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cupylora.cli._options import STDOUT
from cupylora.cli._streams import echo
from cupylora.errors import ArgumentError

__all__ = ["as_json", "check_writable", "write_record"]


def check_writable(path: Path | None) -> None:
    """Raise ArgumentError if ``path`` cannot be written; what is there stays as it is."""
    if path == STDOUT:
        return
    try:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ArgumentError(f"--json {path}: not a file in a folder that exists")
        new = path is not None and not path.exists()
        if path is not None and (new or path.is_file()):  # a pipe's reader would see its end
            path.open("ab").close()
            if new:
                path.unlink()
    except OSError as error:
        raise ArgumentError(f"--json: {error.strerror}: {path}") from error


def as_json(record: dict[str, Any]) -> str:
    """The record as text, ASCII, so that no terminal obeys a name in it."""
    return json.dumps(record, indent=2, allow_nan=False)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the record. Raises ArgumentError if that fails after all."""
    if path == STDOUT:
        return echo(as_json(record))
    try:
        path.write_text(as_json(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"--json {path}: cannot be written ({error.strerror})") from error
