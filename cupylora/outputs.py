"""The lists that ops return: made anew, or the caller's ``out`` once checked.

An op and its NumPy twin return the same bundles; they differ in how one array is made. That is the
argument ``make``: (name, given or None, shape, dtype) -> array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupylora.checks import INT32, check_array, check_type
from cupylora.errors import ArgumentError, CapacityError
from cupylora.worklists import (
    TILE_INTS,
    Array,
    GemmProblems,
    LoraProblems,
    Routing,
    RowLora,
    Segments,
    TokenLora,
    segment_capacity,
    tile_capacity,
)

__all__ = [
    "Make",
    "lora_problems_output",
    "plan_parts",
    "plan_segments_output",
    "problems_output",
    "routing_output",
    "row_lora_output",
    "segments_output",
    "token_lora_output",
]

Make = Callable[[str, Any, tuple[int, ...], Any], Array]
Fields = Mapping[str, tuple[tuple[int, ...], Any]]


def _arrays(make: Make, name: str, out: Any, kind: type, fields: Fields) -> dict[str, Array]:
    if out is not None:
        check_type(name, out, kind)
    return {
        field: make(f"{name}.{field}", out if out is None else getattr(out, field), shape, dtype)
        for field, (shape, dtype) in fields.items()
    }


def _same(out: Any, kind: type, **sizes: Any) -> None:
    """A given list must be made for the same sizes."""
    for field, needed in sizes.items():
        if isinstance(out, kind) and getattr(out, field) != needed:
            raise ArgumentError(f"out.{field} is {getattr(out, field)!r}; {needed!r} is needed")


def routing_output(make: Make, out: Routing | None, **sizes: Any) -> Routing:
    """A Routing of these sizes (the fields of Routing that are not arrays)."""
    _same(out, Routing, **sizes)
    rows, experts = sizes["num_tokens"] * sizes["top_k"], sizes["num_experts"]
    fields: Fields = {
        "row_to_pair": ((rows,), np.int32),
        "pair_to_row": ((rows,), np.int32),
        "expert_first_token_offset": ((experts + 1,), np.int64),
    }
    return Routing(**_arrays(make, "out", out, Routing, fields), **sizes)


def segments_output(
    make: Make,
    out: Segments | None,
    room: int,
    tile_room: int,
    *,
    tile_rows: int,
    max_loras: int,
) -> Segments:
    """Segments with room for so many segments and tiles."""
    sizes = {"tile_rows": tile_rows, "max_loras": max_loras}
    _same(out, Segments, **sizes)
    fields: Fields = {
        "start": ((room + 1,), np.int32),
        "expert": ((room,), np.int32),
        "slot": ((room,), np.int32),
        "count": ((1,), np.int32),
        "tiles": ((tile_room, TILE_INTS), np.int32),
        "tile_count": ((1,), np.int32),
    }
    return Segments(**_arrays(make, "out", out, Segments, fields), **sizes)


def plan_parts(out: Any) -> tuple[Routing | None, Segments | None]:
    """The two lists that ``plan`` is given, or None for each."""
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise ArgumentError(f"out is a {type(out).__name__}; a tuple (Routing, Segments) is needed")
    check_type("out[0]", out[0], Routing)
    check_type("out[1]", out[1], Segments)
    return out


def plan_segments_output(
    make: Make, out: Segments | None, rows: int, experts: int, *, tile_rows: int, max_loras: int
) -> Segments:
    """Segments with room for all that ``rows`` rows in our order can make, or more in ``out``."""
    room = least = segment_capacity(rows, experts, max_loras)
    if out is not None:
        check_array("out.expert", out.expert, dtype=INT32, shape=(None,))
        room = int(out.expert.shape[0])
        if room < least:
            raise CapacityError(
                f"out.expert has room for {room} segments; {least} can come up (segment_capacity)"
            )
    tile_room = tile_capacity(rows, room, tile_rows)
    return segments_output(make, out, room, tile_room, tile_rows=tile_rows, max_loras=max_loras)


def token_lora_output(make: Make, out: TokenLora | None, modules: int, tokens: int) -> TokenLora:
    """A TokenLora [modules, tokens]."""
    shape = (modules, tokens)
    fields: Fields = {
        "rank": (shape, np.int32),
        "a_ptr": (shape, np.uint64),
        "b_ptr": (shape, np.uint64),
        "a_stride": (shape, np.int64),
        "b_stride": (shape, np.int64),
        "scale": (shape, np.float32),
    }
    return TokenLora(**_arrays(make, "out", out, TokenLora, fields))


def row_lora_output(make: Make, out: RowLora | None, modules: int, rows: int) -> RowLora:
    """A RowLora [modules, rows]."""
    one, per_module = (rows,), (modules, rows)
    fields: Fields = {
        "token": (one, np.int32),
        "expert": (one, np.int32),
        "rank": (per_module, np.int32),
        "a_ptr": (per_module, np.uint64),
        "b_ptr": (per_module, np.uint64),
        "scale": (per_module, np.float32),
    }
    return RowLora(**_arrays(make, "out", out, RowLora, fields))


def problems_output(
    make: Make, out: GemmProblems | None, room: int, name: str = "out"
) -> GemmProblems:
    """A list with room for exactly ``room`` problems."""
    fields: Fields = {
        **dict.fromkeys(("m", "n", "k"), ((room,), np.int32)),
        **dict.fromkeys(("a", "b", "d"), ((room,), np.uint64)),
        **dict.fromkeys(("lda", "ldb", "ldd"), ((room,), np.int64)),
        "alpha": ((room,), np.float32),
        "count": ((1,), np.int32),
    }
    return GemmProblems(**_arrays(make, name, out, GemmProblems, fields))


def lora_problems_output(
    make: Make, out: LoraProblems | None, room: int, *, split: bool
) -> LoraProblems:
    """Shrink and expand lists of ``room`` problems, with split-K offsets if ``split``."""
    if out is not None:
        check_type("out", out, LoraProblems)
    given = None if out is None else out.splitk_offsets
    if out is not None and split != (given is not None):
        held, asked = ("no", "are") if split else ("its", "are not")
        raise ArgumentError(
            f"out has {held} splitk_offsets, but split-K offsets {asked} asked for (splitk_slices)"
        )
    return LoraProblems(
        problems_output(make, None if out is None else out.shrink, room, "out.shrink"),
        problems_output(make, None if out is None else out.expand, room, "out.expand"),
        make("out.splitk_offsets", given, (room + 1,), np.int64) if split else None,
    )
