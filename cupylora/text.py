"""Words for messages and tables."""

from __future__ import annotations

import shutil
import textwrap

__all__ = ["byte_size", "counted", "wrapped"]

_NARROWEST = 40


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
