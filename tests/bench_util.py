"""Stand-ins for a device in tests of the bench: graphs that run at once, made-up times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cupylora.backend import NumpyBackend
from cupylora.bench.measure import GraphMeasurer, Measured
from cupylora.bench.points import Point, suite_points
from cupylora.bench.record import Record, Row
from cupylora.bench.timing import Times
from cupylora.shapes import MoeShape


class EagerGraph:
    """Calls that run when they are launched."""

    def __init__(self, calls: Iterable[Any]) -> None:
        self.calls = list(calls)

    def launch(self) -> None:
        for call in self.calls:
            call()


class EagerGraphs:
    """Graphs on NumPy; a call takes 2 µs."""

    def __init__(self) -> None:
        self.captured: list[EagerGraph] = []

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capture(self, calls: Iterable[Any]) -> EagerGraph:
        self.captured.append(EagerGraph(calls))
        return self.captured[-1]

    def time(self, graph: EagerGraph, calls: int, replays: int) -> Times:
        graph.launch()
        return Times(2.0, 1.9, 2.2)


class OneStream:
    """A byte stream at 1 GB/s."""

    def us(self, parts: Sequence[float]) -> float:
        return sum(parts) / 1e3


def numpy_measurer(sets: int = 3) -> GraphMeasurer:
    """The bench's own way through a point, on NumPy."""
    return GraphMeasurer(NumpyBackend(), EagerGraphs(), OneStream(), 1e12, sets=sets)


class FakeMeasurer:
    """Answers at once; ``errors``: by tokens, what to raise instead."""

    bandwidth = 4e12

    def __init__(self, errors: dict[int, BaseException] | None = None, us: float = 10.0) -> None:
        self.errors, self.us = errors or {}, us
        self.asked: list[Point] = []
        self.alive = True

    def measure(self, point: Point) -> Measured:
        self.asked.append(point)
        if point.tokens in self.errors:
            raise self.errors[point.tokens]
        us = self.us + point.tokens / 10
        return Measured(us, 0.01, (us,), us / 4, us / 2, 1e6, 88, 1.7e-3, "all 8 rows")

    def usable(self) -> bool:
        return self.alive


def make_row(point: Point | None = None, **changes: Any) -> Row:
    """A row of a point (the first MoE point's, if none is given)."""
    point = point or suite_points("moe")[0]
    values: dict[str, Any] = {"us": 10.0, "spread": 0.01, "floor_us": 2.5, "stream_us": 5.0}
    return Row(**(point.identity | values | changes))


def make_record(rows: Sequence[Row], **changes: Any) -> Record:
    """A record of ``rows``."""
    record = Record(
        "Some GPU", "580.1", {"cupylora": "1"}, "2026-11-30T12:00:00+00:00", tuple(rows)
    )
    return replace(record, **({"copy_bytes_per_second": 4e12} | changes))


def small(kind: str, **changes: Any) -> Point:
    """A point of few numbers."""
    moe = MoeShape(128, 80, 8, 2)
    base = {"model": "small", "rank": 8, "max_loras": 4, "tokens": 12, "active": 3}
    if kind in ("moe", "moe step"):
        point = next(p for p in suite_points("moe"))
        sizes = {"in_features": 128, "out_features": 80, "experts": 8, "top_k": 2, "moe": moe}
        shaped = replace(point, kind=kind.split()[-1], **base, **sizes)
    elif kind == "route":
        shaped = replace(suite_points("route")[0], **(base | {"rank": 0}))
    else:
        sizes = {"in_features": 100, "out_features": 96, "widths": (64, 32)}
        shaped = replace(suite_points("dense")[0], **base, **sizes)
        if kind == "dense step":
            shaped = replace(shaped, kind="step", second=(72, 128))
    return replace(shaped, **changes)
