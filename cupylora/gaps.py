"""Which parts of an address range are free: what an arena and a pool of host memory give out of."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator

__all__ = ["Gaps"]


class Gaps:
    """Free (start, length) spans in order; neighbours merge."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._spans = sorted(spans)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    @property
    def total(self) -> int:
        """Of all spans together."""
        return sum(length for _, length in self._spans)

    @property
    def largest(self) -> tuple[int, int]:
        """The longest span, the first of several; (0, 0): there is none."""
        return max(self._spans, key=lambda span: (span[1], -span[0]), default=(0, 0))

    def smallest(self, size: int) -> tuple[int, int] | None:
        """The shortest span that holds ``size``; None: none does."""
        fitting = (span for span in self._spans if span[1] >= size)
        return min(fitting, key=lambda span: (span[1], span[0]), default=None)

    def cut(self, span: tuple[int, int], size: int) -> int:
        """Take the first ``size`` of one of the spans; where they start."""
        start, length = span
        at = self._spans.index(span)
        self._spans[at : at + 1] = [(start + size, length - size)] if length > size else []
        return start

    def give(self, start: int, length: int) -> None:
        """Make a span free that is not."""
        at = bisect(self._spans, (start, length))
        if at < len(self._spans) and self._spans[at][0] == start + length:
            length += self._spans.pop(at)[1]
        if at and sum(self._spans[at - 1]) == start:
            at -= 1
            before = self._spans.pop(at)
            start, length = before[0], length + before[1]
        self._spans.insert(at, (start, length))
