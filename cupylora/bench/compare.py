"""Two records of the same points: which rows became slower or faster, beyond what is noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupylora.bench.record import Row

__all__ = ["LEAST_CHANGE", "Change", "Comparison", "compare_rows"]

LEAST_CHANGE = 0.03
"""A change of less is never called one: runs on different days differ by about as much."""


@dataclass(frozen=True)
class Change:
    """A row whose time changed. ratio: new / old."""

    old: Row
    new: Row
    ratio: float

    @property
    def slower(self) -> bool:
        """Whether it takes longer now."""
        return self.ratio > 1


@dataclass(frozen=True)
class Comparison:
    """changed: largest slow-down first. same: rows within the noise. only_old, only_new: rows that
    have a time in one of the records alone."""

    changed: tuple[Change, ...]
    same: int
    only_old: int
    only_new: int

    @property
    def slower(self) -> tuple[Change, ...]:
        """The changes for the worse."""
        return tuple(change for change in self.changed if change.slower)


def compare_rows(old: Sequence[Row], new: Sequence[Row]) -> Comparison:
    """Compare rows of the same points.

    A time has changed if it differs by more than both rows' spreads, and by more than 3 %, of the
    old one.
    """
    before = {row.key: row for row in old if row.us}
    after = {row.key: row for row in new if row.us}
    changes = [_change(before[key], row) for key, row in after.items() if key in before]
    found = [change for change in changes if change is not None]
    return Comparison(
        changed=tuple(sorted(found, key=lambda change: -change.ratio)),
        same=len(changes) - len(found),
        only_old=len(before.keys() - after.keys()),
        only_new=len(after.keys() - before.keys()),
    )


def _change(old: Row, new: Row) -> Change | None:
    """The change from one to the other, if it is one."""
    if not old.us or not new.us:
        return None
    ratio = new.us / old.us
    noise = max(LEAST_CHANGE, old.spread or 0.0, new.spread or 0.0)
    return Change(old, new, ratio) if abs(ratio - 1) > noise else None
