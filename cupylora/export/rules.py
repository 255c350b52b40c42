"""How each kernel is launched, as data: expressions over its arguments and a few sizes.

A rule's expressions are text in the notation of SYMBOLS, the same in the manifest: integers, names,
``+ - * //``, comparisons, and the functions listed. Names are the kernel's parameters and the
fields of its structs, t0, t1 ... (the numbers among its template arguments), or SYMBOLS. Tests
evaluate them beside what the ops really launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FUNCTIONS", "RULES", "SYMBOLS", "Rule"]

SYMBOLS: Mapping[str, str] = {
    "rows": "R = T * k, pairs of a token and one of its choices",
    "itemsize": "bytes of an element of weights and activations",
    "tile_rows": "rows that a tile of the list may hold: 8, 16, 32 or 64",
    "tile_capacity": "room of the tile list, min(rows, segments + rows // tile_rows), at least 1",
    "column_blocks": "slices.first_block[num_slices]: column blocks of all slices together",
    "resident": "blocks of this kernel that the device holds at a time, at this block and shared",
    "cluster": "blocks that share an item, by the rules that `choice` has the numbers of",
    "block": "threads of a block, as this rule gives them",
    "keys": "num_experts * digits",
    "most_elements": "most elements of a piece",
    "num_pieces": "records in pieces",
    "num_runs": "records in runs",
    "most_row_bytes": "most bytes of a row of these",
}

FUNCTIONS: Mapping[str, str] = {
    "min": "least",
    "max": "greatest",
    "ceil_div": "ceil_div(a, b): a / b rounded up",
    "round_up": "round_up(a, b): a up to a multiple of b",
    "ceil_pow2": "the least power of two that is not below",
    "log2": "exponent of a power of two",
    "pick": "pick(condition, a, b): a where it holds, else b",
    "k_ranges": "min(16, the greatest power of two up to max(1, a // 192))",
}

_ROW_BLOCKS = "max(1, ceil_div(rows, {}))"
_WARPS = {"warps": "ceil_div(num_items, per_warp)"}
_ROWS_GRID = "ceil_div(warps * 32, block)"
_ROWS_BLOCK = "pick(warps <= 1024, 64, 256)"
_H = {"h": "max(1, splits * rows * num_slices * rank_pitch) * 4"}


@dataclass(frozen=True)
class Rule:
    """grid, block, cluster (x, and y of the grid) and shared: expressions; shared in bytes.

    dependent: it waits for its predecessor itself, so that it may be launched with programmatic
    stream serialization from compute capability 9.0 on. where: names that the expressions use.
    workspace: bytes of scratch by parameter. ranks: whether an adapter's rank matters, up to
    ``max_rank``, an expression.
    """

    grid: str
    block: str
    shared: str = "0"
    cluster: str = "1"
    grid_y: str = "1"
    dependent: bool = False
    where: Mapping[str, str] = field(default_factory=dict)
    workspace: Mapping[str, str] = field(default_factory=dict)
    max_rank: str = ""


def _sort(shared: str) -> Rule:
    return Rule(
        _ROW_BLOCKS.format(512),
        "512",
        shared,
        workspace={
            "histogram": "4 * (max(max_loras, num_experts) + 1) * ceil_div(rows, 512)",
            "order": "4 * rows",
            "totals": "4 * (max(max_loras, num_experts) + 1)",
        },
    )


def _expand_activation(columns: int) -> Rule:
    items = f"tile_capacity * ceil_div(hidden, {columns}) * parts"
    return Rule(
        "min(ceil_div(items * 32, block), resident)",
        "pick(items <= 1024, 32, 128)",
        dependent=True,
        where={
            "items": f"{items} + ceil_div(num_rows, 32) * ceil_div(hidden * itemsize, 512)",
        },
        max_rank="512",
    )


RULES: Mapping[str, Rule] = {
    "fill_uniform": Rule("min(max(1, ceil_div(count, 256)), 4096)", "256"),
    "read_stream": Rule("resident", "256"),
    "pad_rows": Rule("num_runs", "256", grid_y="min(64, ceil_div(most_row_bytes * rows, 16384))"),
    "unpack_factors": Rule("max(1, ceil_div(most_elements, 4096))", "256", grid_y="num_pieces"),
    "route_rank": Rule(_ROW_BLOCKS.format(128), "1024", "ceil_div(rows, 32) * 128"),
    "digit_histogram": _sort("digits * 4"),
    "digit_scan": Rule("max(1, ceil_div(digits, 8))", "256"),
    "digit_scatter": _sort("digits * 4"),
    "segment_counts": Rule(
        _ROW_BLOCKS.format(1024),
        "1024",
        workspace={"summaries": "16 * ceil_div(rows, 1024)"},
    ),
    "segment_fill": Rule(_ROW_BLOCKS.format(1024), "1024"),
    "plan_rank": Rule("1", "max(256, round_up(pairs * t0, 32))", dependent=True),
    "plan_table": Rule(
        "ceil_pow2(ceil_div(pairs, 256))",
        "pick(max(t0 > 16, pairs > 512, keys > 4096), 1024, 512)",
        "round_up((keys + 1) * t0, 16)",
        dependent=True,
    ),
    "plan_count": Rule(
        "ceil_div(pairs, t0 * t1 * 32)",
        "512",
        "round_up(keys, 8) * t0",
        dependent=True,
        workspace={
            "ranked": "round_up(4 * pairs, 16)",
            "counts": "ceil_div(pairs, t0 * t1 * 32) * round_up(keys, 8) * 2 + 512",
        },
    ),
    "plan_place": Rule("ceil_div(pairs, 512)", "512", "round_up(keys, 8) * 12 + 8", dependent=True),
    "slot_lookup": Rule("max(1, ceil_div(modules * num_tokens, 256))", "256"),
    "pointer_expand": Rule("ceil_div(rows, 256)", "256"),
    "problem_rows": Rule("ceil_div(num_rows + 1, 256)", "256"),
    "problem_runs": Rule("1", "1024"),
    "expert_problems": Rule("max(1, ceil_div(num_experts, 256))", "256", dependent=True),
    "lora_shrink": Rule(
        "min(tile_capacity * rank_groups * splits * parts, resident)",
        "128",
        dependent=True,
        workspace=_H,
        max_rank="512",
    ),
    "lora_shrink_stream": Rule(
        "min(tile_capacity * rank_groups * splits * parts, resident)",
        "128",
        "4 * (2 * (t1 + t0 * 16) * 128 + sum_bytes)",
        dependent=True,
        workspace=_H,
        max_rank="512",
    ),
    "lora_shrink_wide": Rule(
        "min(tile_capacity * rank_groups * splits * parts, resident)",
        "256",
        "pick(t0 > 4, pick(t1 > 32, 4, 3), 4) * (t1 + t0 * 16) * 128 + 8 * sum_bytes"
        " + round_up(ceil_div(in_features, 64) * 2, 16)",
        dependent=True,
        workspace=_H,
        max_rank="512",
    ),
    "lora_shrink_group": Rule(
        "min(tile_capacity * rank_groups * splits * parts, resident)",
        "512",
        "1024 + slots * (t0 + 128) * 128 + 8 * sum_bytes"
        " + round_up(ceil_div(in_features, 64) * 2, 16)",
        dependent=True,
        workspace=_H,
        max_rank="512",
    ),
    "lora_expand": Rule(
        "min(ceil_div(tile_capacity * column_blocks * parts, 4), resident)",
        "128",
        dependent=True,
        max_rank="512",
    ),
    "lora_expand_direct": Rule(
        "min(ceil_div(tile_capacity * column_blocks, 4), resident)",
        "128",
        dependent=True,
        max_rank="t0 * 16",
    ),
    "lora_expand_panel": Rule(
        "column_blocks * parts",
        "128",
        "(splits + 1) * tile_rows * t0 * 64 + 16384",
        dependent=True,
        max_rank="t0 * 16",
    ),
    "lora_expand_stream": Rule(
        "min(tile_capacity * column_blocks, resident)",
        "192",
        "slots * (16384 + b_bytes)",
        dependent=True,
        max_rank="t0 * 16",
    ),
    "lora_cluster": Rule(
        "clusters * cluster",
        "256",
        "(k_ranges(in_features) // cluster * 4 + 2 * cluster) * 32 * (t0 * 16 + 4)"
        " + cta_columns * max_rank * 2",
        "cluster",
        dependent=True,
        max_rank="t0 * 16",
    ),
    "lora_ring": Rule(
        "clusters * cluster",
        "160",
        "stages * (pick(max_rank > 32, 16384, 8192) + tile_rows * 536 + 48) + 288 + tile_rows * 8"
        " + (2 * chain_floats + 2 * cluster * tile_rows * sum_ranks) * 4",
        "cluster",
        dependent=True,
        max_rank="t0 * 16",
    ),
    "lora_shrink_f32": Rule(
        "min(tile_capacity * num_slices, resident)",
        "128",
        workspace={"h": "max(1, rows * num_slices * max_rank) * 4"},
        max_rank="512",
    ),
    "lora_expand_f32": Rule(
        "min(tile_capacity * column_blocks * parts, resident)", "128", max_rank="512"
    ),
    "lora_expand_activation": _expand_activation(64),
    "lora_expand_activation_f32": _expand_activation(128),
    "lora_finalize": Rule(
        "num_tokens",
        "256",
        grid_y="ceil_div(hidden, cta_columns)",
        dependent=True,
        max_rank="512",
    ),
    "gemm_tiles": Rule("1", "1024", dependent=True),
    "grouped_gemm": Rule(
        "resident", "128", "pick(t0 > 64, 3, 4) * (t0 + 128) * 128", dependent=True
    ),
    "grouped_gemm_f32": Rule("resident", "256", dependent=True),
    "permute_rows": Rule(_ROWS_GRID, _ROWS_BLOCK, dependent=True, where=_WARPS),
    "activation": Rule(_ROWS_GRID, _ROWS_BLOCK, dependent=True, where=_WARPS),
    "finalize": Rule(_ROWS_GRID, _ROWS_BLOCK, dependent=True, where={"warps": "num_items"}),
}
"""By ``__global__`` function."""
