"""Words for messages and tables."""

from __future__ import annotations

import reprlib
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

__all__ = ["byte_size", "counted", "listed", "quoted", "shown", "wrapped"]

_NARROWEST = 40
_LISTED = 10
_LONGEST = 200

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _LONGEST
_REPR.maxlong = 40
_REPR.maxlevel = 3


def counted(number: int, noun: str) -> str:
    """``"1 layer"``, ``"2 layers"``: a number with its noun, which takes a plain s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def byte_size(count: int) -> str:
    """``"512 B"``, ``"63.5 kB"``, ``"2.42 GB"``: bytes in decimal units, to three digits."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:.3g} GB" if value < 1000 else f"{value:.0f} GB"


def quoted(value: Any) -> str:
    """``repr(value)`` of any value from outside, cut to a length and depth fit for a message."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an int of more digits than Python writes
        return "a number of thousands of digits"


def shown(name: str) -> str:
    """A name from a file: as it is, or quoted if it is long, empty or not all printable."""
    return name if name.isprintable() and 0 < len(name) <= _LONGEST else quoted(name)


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """The first ten ``items`` and how many more there are."""
    every = list(items)
    rest = [f"and {len(every) - _LISTED} more"] if len(every) > _LISTED else []
    return separator.join(every[:_LISTED] + rest)


def wrapped(name: str, value: str) -> str:
    """``value`` after ``name``, wrapped between words to the terminal's width; paths stay whole."""
    return textwrap.fill(
        value,
        max(_NARROWEST, shutil.get_terminal_size().columns),
        initial_indent=name,
        subsequent_indent=" " * len(name),
        break_long_words=False,
        break_on_hyphens=False,
    )
