"""Size classes of memory that comes and goes: blocks of the arena, buffers of the host cache."""

from __future__ import annotations

__all__ = ["size_class"]

_BITS = 4


def size_class(size: int, smallest: int) -> int:
    """``size`` rounded up: a multiple of ``smallest``, at most 1/16 more where that is small beside
    it. Pieces of about equal size replace one another then, and leave no gaps that fit nothing."""
    step = max(smallest, 1 << max(0, (size - 1).bit_length() - 1 - _BITS))
    return -(-size // step) * step
