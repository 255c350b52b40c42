"""A run of bytes in host memory that may lie in several parts, as pinned memory gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["HostBytes", "HostMemory"]

HostBytes = npt.NDArray[np.uint8]

_COMPARED = 1 << 20
"""Bytes at a time: they stay in a core's cache, and a difference is found early."""


class HostMemory:
    """``parts`` (uint8), one behind the other: ``nbytes`` bytes numbered through."""

    def __init__(self, parts: Sequence[HostBytes]) -> None:
        self.parts = tuple(parts)
        self.nbytes = sum(part.nbytes for part in self.parts)

    @classmethod
    def of(cls, array: HostBytes) -> HostMemory:
        """One part."""
        return cls((array,))

    @classmethod
    def new(cls, nbytes: int) -> HostMemory:
        """Memory of NumPy's, its content undefined."""
        return cls.of(np.empty(nbytes, np.uint8))

    def spans(self, start: int, size: int) -> Iterator[tuple[int, HostBytes]]:
        """Bytes ``start`` to ``start + size`` as views of the parts, each with its first number."""
        at = 0
        for part in self.parts:
            first, last = max(start, at), min(start + size, at + part.nbytes)
            if first < last:
                yield first, part[first - at : last - at]
            at += part.nbytes

    def write(self, start: int, data: HostBytes) -> None:
        """Bytes from ``start`` on become ``data``."""
        for first, view in self.spans(start, data.nbytes):
            view[...] = data[first - start : first - start + view.nbytes]

    def clear(self, start: int, size: int) -> None:
        """Bytes become zero."""
        for _, view in self.spans(start, size):
            view[...] = 0

    def tobytes(self, start: int = 0, size: int | None = None) -> bytes:
        """A copy."""
        size = self.nbytes - start if size is None else size
        return b"".join(view.tobytes() for _, view in self.spans(start, size))

    def holds(self, start: int, data: HostBytes) -> bool:
        """Whether ``data`` is what is there from ``start`` on."""
        for first, view in self.spans(start, data.nbytes):
            other = data[first - start : first - start + view.nbytes]
            for at in range(0, view.nbytes, _COMPARED):
                if not _equal(view[at : at + _COMPARED], other[at : at + _COMPARED]):
                    return False
        return True

    def equals(self, other: HostMemory) -> bool:
        """Whether both have the same bytes, whatever their parts."""
        return self.nbytes == other.nbytes and all(
            self.holds(first, view) for first, view in other.spans(0, other.nbytes)
        )


def _equal(one: HostBytes, two: HostBytes) -> bool:
    """Eight bytes at a time where that can be."""
    if one.nbytes % 8 == 0:
        return bool((one.view(np.uint64) == two.view(np.uint64)).all())
    return bool((one == two).all())
