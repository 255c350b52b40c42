"""Router output -> rows sorted by (expert, slot, pair), on the device (route/sort.cu).

In: ``topk_ids`` and ``token_to_slot``. Out: a Routing. Up to RANK_LIMIT pairs one launch ranks each
pair by counting; above, two stable counting sorts, by slot and then by expert.
"""

from __future__ import annotations

from cupylora import reference
from cupylora.checks import INT32, INT32_MAX, check_array, check_choice, check_int, check_max_loras
from cupylora.ops._device import (
    address,
    blocks_for,
    device_op,
    enqueue,
    output,
    route_arguments,
    status_pointer,
)
from cupylora.ops._device import workspace as scratch
from cupylora.outputs import routing_output
from cupylora.shapes import MAX_EXPERTS
from cupylora.worklists import MAX_ROWS, Array, Routing, RowOrder

__all__ = ["RANK_LIMIT", "route", "route_workspace_bytes"]

RANK_LIMIT = 2048
"""Pairs up to which counting every smaller pair is the faster way."""

_PAIRS_PER_BLOCK = 128
_RANK_THREADS = 1024
_SORT_THREADS = 512
_PAIRS = ("ptr", "ptr", "i32", "i32", "i32", "i32", "i32", "i32")
_RANK = (*_PAIRS, "ptr", "ptr", "ptr", "ptr")
_HISTOGRAM = (*_PAIRS, "ptr", "i32", "i32", "ptr", "ptr")
_SCAN = ("ptr", "i32", "i32", "ptr")
_SCATTER = (*_PAIRS, "ptr", "i32", "i32", "ptr", "ptr", "ptr", "ptr", "ptr")


@device_op(reference.route)
def route(
    topk_ids: Array,
    token_to_slot: Array,
    *,
    num_experts: int,
    max_loras: int,
    start_expert: int = 0,
    row_order: RowOrder = "token_major",
    out: Routing | None = None,
    workspace: Array | None = None,
    status: Array | None = None,
) -> Routing:
    num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    max_loras = check_max_loras(max_loras)
    start_expert = check_int("start_expert", start_expert, 0, INT32_MAX)
    check_choice("row_order", row_order, ("token_major", "k_major"))
    check_array("topk_ids", topk_ids, dtype=INT32, shape=(None, None), on_device=True)
    tokens, top_k = topk_ids.shape
    check_int("topk_ids.shape[1]", top_k, 1)
    check_int("topk_ids.size", tokens * top_k, 0, MAX_ROWS)
    check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(tokens,), on_device=True)
    result = routing_output(
        output,
        out,
        num_tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        start_expert=start_expert,
        row_order=row_order,
    )
    pairs = (
        address(topk_ids),
        address(token_to_slot),
        tokens,
        *route_arguments(result)[1:],
        num_experts,
        start_expert,
        max_loras,
    )
    if result.num_rows <= RANK_LIMIT:
        _rank(result, pairs, status_pointer(status))
    else:
        size = route_workspace_bytes(result.num_rows, num_experts, max_loras)
        memory = scratch(workspace, size, "route_workspace_bytes")
        _sort(result, pairs, max_loras, address(memory), status_pointer(status))
    return result


def route_workspace_bytes(num_rows: int, num_experts: int, max_loras: int) -> int:
    """Bytes of the workspace that ``route`` takes for any R up to ``num_rows`` rows."""
    if num_rows <= RANK_LIMIT:
        return 0
    totals = _sort_offsets(num_rows, num_experts, max_loras)[1]
    return totals + 4 * (max(max_loras, num_experts) + 1)


def _sort_offsets(num_rows: int, num_experts: int, max_loras: int) -> tuple[int, int]:
    """Bytes before the order of the first pass, which follows the histogram, and the totals."""
    blocks = blocks_for(num_rows, _SORT_THREADS)
    order = 4 * (max(max_loras, num_experts) + 1) * blocks
    return order, order + 4 * num_rows


def _rank(result: Routing, pairs: tuple[int, ...], status: int) -> None:
    count = result.num_rows
    args = (
        *pairs,
        address(result.row_to_pair),
        address(result.pair_to_row),
        address(result.expert_first_token_offset),
        status,
    )
    grid = (blocks_for(count, _PAIRS_PER_BLOCK),)
    enqueue("sort", "route_rank", _RANK, grid, _RANK_THREADS, args, smem=-(-count // 32) * 128)


def _sort(
    result: Routing, pairs: tuple[int, ...], max_loras: int, memory: int, status: int
) -> None:
    blocks = blocks_for(result.num_rows, _SORT_THREADS)
    offsets = _sort_offsets(result.num_rows, result.num_experts, max_loras)
    histogram, by_slot, totals = memory, memory + offsets[0], memory + offsets[1]
    passes = (
        (0, max_loras + 1, 0, by_slot, 0, 0),
        (
            1,
            result.num_experts + 1,
            by_slot,
            address(result.row_to_pair),
            address(result.pair_to_row),
            address(result.expert_first_token_offset),
        ),
    )
    for by_expert, digits, order, target, pair_to_row, first_rows in passes:
        head = (*pairs, order, by_expert, digits, histogram)
        words = digits * 4
        enqueue(
            "sort", "digit_histogram", _HISTOGRAM, (blocks,), _SORT_THREADS, (*head, status), words
        )
        scan = (histogram, digits, blocks, totals)
        enqueue("sort", "digit_scan", _SCAN, (blocks_for(digits, 8),), 256, scan)
        tail = (totals, target, pair_to_row, first_rows)
        enqueue("sort", "digit_scatter", _SCATTER, (blocks,), _SORT_THREADS, (*head, *tail), words)
