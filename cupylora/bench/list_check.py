"""The work lists of a batch against those of NumPy: equal element by element."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupylora import reference
from cupylora.backend import ArrayBackend
from cupylora.bench.calls import Lists
from cupylora.bench.check import Check, Verdict
from cupylora.bench.draws import Draw
from cupylora.bench.points import Point

__all__ = ["ListCheck"]


class ListCheck(Check):
    """One set's lists; everything in use is compared, and wiped before."""

    def __init__(self, backend: ArrayBackend, point: Point, draw: Draw, lists: Lists) -> None:
        self._backend, self._lists = backend, lists
        segments = lists.segments
        routing = reference.route(
            draw.experts, draw.slots, num_experts=point.experts, max_loras=point.max_loras
        )
        self._wanted = Lists(
            routing,
            reference.build_segments(
                routing,
                draw.slots,
                max_loras=point.max_loras,
                tile_rows=segments.tile_rows,
                max_segments=segments.expert.shape[0],
            ),
        )

    def before(self) -> None:
        """Wipe the lists, so that nothing of an earlier run is left to be compared."""
        for bundle in (self._lists.routing, self._lists.segments):
            for field in dataclasses.fields(bundle):
                array = getattr(bundle, field.name)
                if hasattr(array, "shape"):
                    self._backend.clear(array)

    def after(self) -> Verdict:
        """0 where all are equal, infinity where they are not."""
        segments = self._wanted.segments
        runs, tiles = int(segments.count[0]), int(segments.tile_count[0])
        lengths = {"start": runs + 1, "expert": runs, "slot": runs, "tiles": tiles}
        equal = self._equal(self._lists.routing, self._wanted.routing, {})
        equal = self._equal(self._lists.segments, segments, lengths) and equal
        error = 0.0 if equal else float(np.inf)
        return Verdict(error, error, f"the lists of {self._wanted.routing.num_rows} rows")

    def _equal(self, got: Any, wanted: Any, lengths: dict[str, int]) -> bool:
        for field in dataclasses.fields(wanted):
            want = getattr(wanted, field.name)
            if isinstance(want, np.ndarray):
                length = lengths.get(field.name, len(want))
                have = self._backend.to_host(getattr(got, field.name))
                if not np.array_equal(have[:length], want[:length]):
                    return False
        return True
