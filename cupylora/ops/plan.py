"""Router output -> rows, segments and tiles of a batch, on the device (route/plan*.cu).

In: ``topk_ids`` and ``token_to_slot``. Out: a Routing and its Segments. One launch up to a few
thousand pairs, two above; sizes that neither holds take the launches of ``route`` and
``build_segments``. What follows from sizes alone, and that an ``out`` was found fit for them, is
remembered from call to call.
"""

from __future__ import annotations

import functools
import struct
import weakref
from dataclasses import dataclass
from typing import Any

from cupylora import reference
from cupylora.checks import (
    INT32,
    INT32_MAX,
    check_array,
    check_choice,
    check_int,
    check_max_loras,
    check_tile_rows,
)
from cupylora.errors import CapacityError
from cupylora.ops._device import (
    address,
    check_aligned,
    device_op,
    enqueue,
    output,
    shared_limit,
    status_pointer,
)
from cupylora.ops._device import workspace as scratch
from cupylora.ops._plan_choice import Large, PlanSizes, Small, choose_plan, large_workspace_bytes
from cupylora.ops.build_segments import build_segments, segments_workspace_bytes
from cupylora.ops.route import route, route_workspace_bytes
from cupylora.outputs import plan_parts, plan_segments_output, routing_output
from cupylora.shapes import MAX_EXPERTS
from cupylora.worklists import MAX_ROWS, Array, Routing, RowOrder, Segments

__all__ = ["plan", "plan_workspace_bytes"]

_SIZES, _LISTS = "bytes48", "bytes72"
_RANK = ("ptr", "ptr", _SIZES, _LISTS, "ptr")
_TABLE = ("ptr", "ptr", _SIZES, _LISTS, "i32", "ptr")
_COUNT = ("ptr", "ptr", _SIZES, "ptr", "ptr", "ptr")
_PLACE = ("ptr", "ptr", "i32", "i32", _SIZES, _LISTS)

_Head = tuple[int, int, bytes]
"""Addresses of topk_ids and token_to_slot, and the sizes as the kernels take them."""


@device_op(reference.plan)
def plan(
    topk_ids: Array,
    token_to_slot: Array,
    *,
    num_experts: int,
    max_loras: int,
    tile_rows: int = 8,
    max_active: int | None = None,
    start_expert: int = 0,
    row_order: RowOrder = "token_major",
    out: tuple[Routing, Segments] | None = None,
    workspace: Array | None = None,
    status: Array | None = None,
    fused: bool | None = None,
) -> tuple[Routing, Segments]:
    check_array("topk_ids", topk_ids, dtype=INT32, shape=(None, None), on_device=True)
    tokens, top_k = topk_ids.shape
    check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(tokens,), on_device=True)
    options = (num_experts, max_loras, start_expert, row_order, tile_rows)
    try:
        sizes = _sizes(tokens, top_k, *options)
    except TypeError:  # an argument that cannot be a key of the cache, and is none that fits
        sizes = _sizes.__wrapped__(tokens, top_k, *options)
    chosen = _choose(sizes, max_active, fused)
    routing, segments, packed = _lists(out, sizes)
    flag = status_pointer(status)
    digits = sizes.digits if chosen is None else chosen.digits
    head = (address(topk_ids), address(token_to_slot), _packed(sizes, digits))
    if isinstance(chosen, Small):
        _run_small(chosen, head, packed, flag)
    elif isinstance(chosen, Large):
        memory = scratch(workspace, chosen.workspace_bytes, "plan_workspace_bytes")
        _run_large(chosen, head, packed, address(memory), flag)
    else:
        _run_ops(topk_ids, token_to_slot, routing, segments, workspace, status)
    return routing, segments


def plan_workspace_bytes(num_rows: int, num_experts: int, max_loras: int) -> int:
    """Bytes of the workspace that ``plan`` takes for any R up to ``num_rows`` rows."""
    return max(
        large_workspace_bytes(num_rows, num_experts * (max_loras + 1)),
        route_workspace_bytes(num_rows, num_experts, max_loras),
        segments_workspace_bytes(num_rows),
    )


@functools.lru_cache(maxsize=4096, typed=True)
def _sizes(
    tokens: int,
    top_k: int,
    num_experts: int,
    max_loras: int,
    start_expert: int,
    row_order: RowOrder,
    tile_rows: int,
) -> PlanSizes:
    check_int("topk_ids.shape[1]", top_k, 1)
    check_int("topk_ids.size", tokens * top_k, 0, MAX_ROWS)
    check_choice("row_order", row_order, ("token_major", "k_major"))
    return PlanSizes(
        tokens=tokens,
        top_k=top_k,
        num_experts=check_int("num_experts", num_experts, 1, MAX_EXPERTS),
        max_loras=check_max_loras(max_loras),
        start_expert=check_int("start_expert", start_expert, 0, INT32_MAX),
        k_major=row_order == "k_major",
        tile_rows=check_tile_rows(tile_rows),
    )


@functools.lru_cache(maxsize=4096)
def _packed(sizes: PlanSizes, digits: int) -> bytes:
    return sizes.packed(digits)


def _choose(sizes: PlanSizes, max_active: int | None, fused: bool | None) -> Small | Large | None:
    check_choice("fused", fused, (None, True, False))
    if max_active is not None:
        max_active = min(sizes.max_loras, check_int("max_active", max_active, 0))
    if fused is False:
        return None
    chosen = choose_plan(sizes, shared_limit(), max_active)
    if fused and chosen is None:
        raise CapacityError(
            f"{sizes.pairs} pairs over {sizes.num_experts} experts and {sizes.max_loras} slots are "
            "more than the fused kernels hold on this device; leave fused at None"
        )
    return chosen


@dataclass(frozen=True)
class _Fit:
    """Lists that were given before and found fit for these sizes. It must not keep them alive."""

    routing: weakref.ref[Routing]
    segments: weakref.ref[Segments]
    sizes: PlanSizes
    packed: bytes


_fits: dict[int, _Fit] = {}
"""By the id of the Routing; an entry goes when its Routing does."""


def _lists(
    out: tuple[Routing, Segments] | None, sizes: PlanSizes
) -> tuple[Routing, Segments, bytes]:
    """The lists to write, and their addresses as the kernels take them."""
    if out is None:
        routing, segments = _checked_lists(None, None, sizes)
        return routing, segments, _pack(routing, segments)
    given_routing, given_segments = plan_parts(out)
    key = id(given_routing)
    fit = _fits.get(key)
    if (
        fit is None
        or fit.routing() is not given_routing
        or fit.segments() is not given_segments
        or fit.sizes != sizes
    ):
        packed = _pack(*_checked_lists(given_routing, given_segments, sizes))
        gone = weakref.ref(out[0], lambda _: _fits.pop(key, None))
        fit = _fits[key] = _Fit(gone, weakref.ref(out[1]), sizes, packed)
    return out[0], out[1], fit.packed


def _checked_lists(
    routing: Routing | None, segments: Segments | None, sizes: PlanSizes
) -> tuple[Routing, Segments]:
    cut = plan_segments_output(
        output,
        segments,
        sizes.pairs,
        sizes.num_experts,
        tile_rows=sizes.tile_rows,
        max_loras=sizes.max_loras,
    )
    check_aligned("out.tiles", cut.tiles)
    rows = routing_output(
        output,
        routing,
        num_tokens=sizes.tokens,
        top_k=sizes.top_k,
        num_experts=sizes.num_experts,
        start_expert=sizes.start_expert,
        row_order="k_major" if sizes.k_major else "token_major",
    )
    return rows, cut


def _pack(routing: Routing, segments: Segments) -> bytes:
    """PlanLists of route/plan.cuh."""
    arrays = (
        routing.row_to_pair,
        routing.pair_to_row,
        routing.expert_first_token_offset,
        segments.start,
        segments.expert,
        segments.slot,
        segments.count,
        segments.tiles,
        segments.tile_count,
    )
    return struct.pack("9Q", *map(address, arrays))


def _run_small(chosen: Small, head: _Head, lists: bytes, status: int) -> None:
    shift = chosen.grid_shift
    types = _RANK if shift is None else _TABLE
    args = (*head, lists, status) if shift is None else (*head, lists, shift, status)
    shape = ((chosen.grid,), chosen.threads)
    enqueue("plan", chosen.kernel, types, *shape, args, chosen.smem, dependent=True)


def _run_large(chosen: Large, head: _Head, lists: bytes, ranked: int, status: int) -> None:
    counts = ranked + chosen.ranked_bytes
    enqueue(
        "plan_large",
        chosen.count_kernel,
        _COUNT,
        (chosen.blocks,),
        chosen.threads,
        (*head, ranked, counts, status),
        chosen.count_smem,
        dependent=True,
    )
    enqueue(
        "plan_large",
        "place",
        _PLACE,
        (chosen.place_grid,),
        chosen.threads,
        (ranked, counts, chosen.blocks, chosen.block_pairs, head[2], lists),
        chosen.place_smem,
        dependent=True,
    )


def _run_ops(
    topk_ids: Array,
    token_to_slot: Array,
    routing: Routing,
    segments: Segments,
    workspace: Array | None,
    status: Array | None,
) -> None:
    given: dict[str, Any] = {"workspace": workspace, "status": status}
    route(
        topk_ids,
        token_to_slot,
        num_experts=routing.num_experts,
        max_loras=segments.max_loras,
        start_expert=routing.start_expert,
        row_order=routing.row_order,
        out=routing,
        **given,
    )
    build_segments(
        routing,
        token_to_slot,
        max_loras=segments.max_loras,
        tile_rows=segments.tile_rows,
        max_segments=int(segments.expert.shape[0]),
        out=segments,
        **given,
    )
