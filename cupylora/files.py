"""Bytes and JSON of files that users name: regular files only, bounded in size.

``load_model``, the adapter config and the safetensors reader all open files here. A file from
elsewhere may be anything: a FIFO that never answers, a device, gigabytes, JSON that nests without
end. Each is an OSError or ValueError with a short text, which callers put into their own error
after the file's name.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from cupylora.text import byte_size, quoted

__all__ = [
    "fill_from",
    "is_folder",
    "is_there",
    "named",
    "open_regular",
    "parse_json",
    "read_json",
    "reason",
]

_LARGEST_JSON = 16 << 20
_MOST_VALUES = 1 << 21
"""In one JSON text: parsed, each takes some 60 to 200 bytes, however few it has in the text."""


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; False also where that cannot be known (or is no name)."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Whether anything is at ``path``; False also where that cannot be known (or is no name)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def open_regular(path: Path) -> FileIO:
    """The file ``path``, open for reading, unbuffered.

    Raises OSError if it cannot be opened, ValueError if it is no regular file or no possible name.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        regular = stat.S_ISREG(os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    if not regular:
        os.close(handle)
        raise ValueError("not a regular file; put the file itself there")
    # The object alone closes it: a number that is closed twice may be another thread's file.
    return FileIO(handle)


def fill_from(file: FileIO, begin: int, target: memoryview) -> bool:
    """Fill ``target`` with a file's bytes from ``begin`` on; False if it ends before. Raises
    OSError. (One call of the system gives at most 2 GiB.)"""
    done = 0
    while done < len(target):
        got = os.preadv(file.fileno(), [target[done:]], begin + done)
        if not got:
            return False
        done += got
    return True


def read_json(
    path: Path, largest: int = _LARGEST_JSON, most_values: int = _MOST_VALUES
) -> dict[str, Any]:
    """The JSON object in ``path``. Raises OSError or ValueError; ``largest`` in bytes.

    A byte order mark, as some editors put before the text, is passed over.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise ValueError(f"{byte_size(size)} long; at most {byte_size(largest)} are read")
        return parse_json(file.read(size).removeprefix(codecs.BOM_UTF8), most_values)


def parse_json(text: bytes, most_values: int = _MOST_VALUES) -> dict[str, Any]:
    """The JSON object in UTF-8 ``text``, no key of which stands twice. Raises ValueError."""
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > most_values:
        raise ValueError(f"JSON of about {values} values; at most {most_values} are read")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON (not UTF-8 at byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("not valid JSON here (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}; an object is needed")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys: of two values of one key, one would be lost."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {quoted(key)} appears twice; remove one of them")
        result[key] = value
    return result


def named(path: Path) -> str:
    """``path`` for a message: as it is, or quoted where a terminal could not show it."""
    return str(path) if str(path).isprintable() else repr(str(path))


def reason(error: OSError | ValueError) -> str:
    """Why, in a few words: an OSError's own text would repeat the path, however long."""
    return str((isinstance(error, OSError) and error.strerror) or error)
