"""A list of points -> rows, one after the other, whatever happens to any of them.

A point that fails is a row that says why; the rest goes on while the device answers. Each row is
handed to ``keep`` at once. In: a measurer and, if peers are asked for, something that times them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cupylora.bench.measure import Measured, Measurer
from cupylora.bench.points import Point
from cupylora.bench.record import Row
from cupylora.errors import CupyloraError

__all__ = ["Outcome", "PeerTimer", "run_points"]

Say = Callable[[str], None]


class PeerTimer(Protocol):
    """Times other projects' kernels on a point."""

    def measure(self, point: Point, bandwidth: float) -> dict[str, float]:
        """Microseconds by name; empty for a point that they do not serve."""


@dataclass
class Outcome:
    """rows: in the points' order. left: points not measured, and ``why``."""

    rows: list[Row] = field(default_factory=list)
    left: int = 0
    why: str = ""
    interrupted: bool = False


def run_points(
    points: Sequence[Point],
    measurer: Measurer,
    peers: PeerTimer | None = None,
    *,
    keep: Callable[[Sequence[Row]], None] = lambda _: None,
    say: Say = lambda _: None,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measure ``points``; no new one is begun after so many seconds.

    Ctrl-C ends it with what there is (``interrupted``).
    """
    outcome = Outcome()
    deadline = clock() + seconds
    try:
        for number, point in enumerate(points):
            outcome.left = len(points) - number
            if clock() >= deadline:
                outcome.why = "the time allowed (--budget) is used up"
                return outcome
            say(f"point {number + 1} of {len(points)}: {point.label}")
            row, alive = _row(point, measurer, peers)
            outcome.rows.append(row)
            outcome.left -= 1
            keep(outcome.rows)
            if not alive:
                outcome.why = "the device does not answer after the last failure"
                return outcome
    except KeyboardInterrupt:
        outcome.interrupted = True
        outcome.why = "interrupted"
    return outcome


def _row(point: Point, measurer: Measurer, peers: PeerTimer | None) -> tuple[Row, bool]:
    """A point's row, and whether the device can go on."""
    try:
        measured = measurer.measure(point)
    except Exception as error:  # whatever it is, the other points' results shall not be lost
        failed = _reason(error)
    else:
        times = peers.measure(point, measurer.bandwidth) if peers else {}
        return _measured_row(point, measured, times), True
    return _failed_row(point, failed), measurer.usable()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, CupyloraError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _measured_row(point: Point, measured: Measured, peers: dict[str, float]) -> Row:
    return Row(
        **point.identity,
        us=_short(measured.us),
        spread=_short(measured.spread),
        floor_us=_short(measured.floor_us),
        stream_us=_short(measured.stream_us),
        peers_us={name: _short(us) for name, us in peers.items()},
        parts_us=tuple(map(_short, measured.parts_us)) if len(measured.parts_us) > 1 else (),
        bytes=round(measured.nbytes),
        sets=measured.sets,
        error=_short(measured.error),
        checked=measured.checked,
    )


def _failed_row(point: Point, failed: str) -> Row:
    times: dict[str, Any] = dict.fromkeys(("us", "spread", "floor_us", "stream_us"))
    return Row(**point.identity, **times, failed=failed)


def _short(value: float) -> float:
    """Five significant digits: no time is known better."""
    return float(f"{value:.5g}")
