"""How the bench calls the operations it times: the one place that knows their arguments.

``make_lists`` builds a batch's work lists; ``add_delta`` enqueues one ``lora_delta``;
``relist`` makes the lists again in the same memory, as the route suite times it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cupylora.backend import ArrayBackend
from cupylora.ops.build_segments import build_segments
from cupylora.ops.lora_delta import lora_delta, lora_workspace_bytes
from cupylora.ops.route import route
from cupylora.worklists import (
    Array,
    LoraSlice,
    Routing,
    Segments,
    choose_tile_rows,
    segment_capacity,
)

__all__ = ["Lists", "add_delta", "delta_workspace", "make_lists", "relist", "relist_workspace"]


@dataclass(frozen=True)
class Lists:
    """A batch's routing, and the tiles made of it."""

    routing: Routing
    segments: Segments


def make_lists(
    backend: ArrayBackend,
    topk_ids: Array,
    slots: Array,
    experts: int,
    max_loras: int,
    *,
    max_active: int,
    rank: int,
) -> Lists:
    """The work lists of a batch of up to ``max_active`` adapters, in new memory."""
    routing = route(
        topk_ids, slots, num_experts=experts, max_loras=max_loras, status=backend.status
    )
    segments = build_segments(
        routing,
        slots,
        max_loras=max_loras,
        tile_rows=choose_tile_rows(routing.num_rows, experts, max_active=max_active, max_rank=rank),
        max_segments=segment_capacity(routing.num_rows, experts, max_loras),
        status=backend.status,
    )
    return Lists(routing, segments)


def delta_workspace(
    backend: ArrayBackend, rows: int, slices: int, in_features: int, rank: int, dtype: Any
) -> Array | None:
    """Scratch for ``add_delta``, which calls that follow each other share; None on NumPy."""
    if not backend.on_device:
        return None
    size = lora_workspace_bytes(rows, slices, in_features, rank, dtype)
    return backend.empty(max(1, size), "uint8")


def add_delta(
    backend: ArrayBackend,
    x: Array,
    y: Array,
    lists: Lists,
    entries: Array,
    slices: Sequence[LoraSlice],
    *,
    rank: int,
    x_rows: Literal["token", "pair"],
    workspace: Array | None,
    max_active: int,
) -> None:
    """Enqueue one delta whose lists were made before anything that is timed.

    max_active: the most adapters the batch may hold, as the graph's case would say.
    """
    lora_delta(
        x,
        y,
        lists.segments,
        lists.routing,
        entries,
        slices,
        in_features=x.shape[1],
        max_rank=rank,
        x_rows=x_rows,
        workspace=workspace,
        status=backend.status,
        max_active=max_active,
        plan_settled=True,
    )


def relist(
    backend: ArrayBackend,
    topk_ids: Array,
    slots: Array,
    lists: Lists,
    workspace: Array | None,
    max_active: int,
) -> Callable[[], Any]:
    """A call that makes ``lists`` again in the memory they lie in, as a graph for batches of up to
    ``max_active`` adapters does."""
    from cupylora.ops.plan import plan

    return functools.partial(
        plan,
        topk_ids,
        slots,
        num_experts=lists.routing.num_experts,
        max_loras=lists.segments.max_loras,
        tile_rows=lists.segments.tile_rows,
        max_active=max_active,
        out=(lists.routing, lists.segments),
        workspace=workspace,
        status=backend.status,
    )


def relist_workspace(backend: ArrayBackend, lists: Lists) -> Array | None:
    """Scratch for ``relist``; None on NumPy."""
    from cupylora.ops.plan import plan_workspace_bytes

    if not backend.on_device:
        return None
    routing = lists.routing
    size = plan_workspace_bytes(routing.num_rows, routing.num_experts, lists.segments.max_loras)
    return backend.empty(max(16, size), "uint8")
