"""The numbers of the choice rules, collected from the ops that own them.

In: the constants of ``ops`` and ``worklists``, by name. Out: one table, which the manifest holds as
``choice`` and ``cupylora_table.h`` as macros and arrays. The rules themselves are code, once here
in Python (those modules) and once in C (cupylora.h); what is tuned is only a number, and stands in
one place.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from cupylora.errors import ExportError

__all__ = ["Rows", "Value", "choice"]

Rows = tuple[tuple[int, ...], ...]
"""A small table of numbers."""

Value = int | float | Rows

_NAMES: Mapping[str, str] = {
    "shapes": "MAX_RANK MAX_EXPERTS MAX_LORAS",
    "worklists": "MAX_ROWS TILE_INTS SLOT_ENTRY_BYTES TILE_CHOICES",
    "ops._lora_call": "MAX_SLICES BLOCK_LIMIT=_BLOCK_LIMIT",
    "ops._lora_choice": "CLUSTER_BYTES CLUSTER_LIMITS=_TILE_ROWS.cluster "
    "RING_LIMITS=_TILE_ROWS.ring _ITEM_LIMIT _MAX_CLUSTER _RANGE_FEATURES _MOST_RANGES "
    "_SHORT_SHARE _LONG_SHARE _START_BYTES _COLUMN_STEP _B_BYTES _B_LIMIT _SHARED_LIMIT",
    "ops._lora_fused": "_CLUSTER_THREADS _RING_THREADS _RING_STAGES _FEW_STAGES _STATIC_SHARED "
    "_RANK_TILE _SHARED_PER_SM _SHARED_PER_BLOCK _CHAINS _CHUNK _CLUSTER_WARPS _TOKENS _DEEP_STEPS "
    "_DEEP_CTAS",
    "ops._lora_pair": "_STREAM_ROWS _DIRECT_RANK _STREAM_RANK _STREAM_SPLITS _STREAM_ITEMS "
    "_STREAM_RANGES SHRINK_ITEMS=_ITEMS PAIR_ITEM_LIMIT=_ITEM_LIMIT PAIR_THREADS=_THREADS "
    "PAIR_WARPS=_WARPS _PART_ROWS _PART_TOKENS _LEAST_PART _SHRINK_WARPS _SHRINK_SLOTS "
    "_CHUNK_BYTES _WIDE_RANK _WIDE_ROWS _WIDE_WARPS _WIDE_THREADS _WIDE_TILES _MOST_WIDE_TILES "
    "_WIDE_PART _SHORT_PART _WIDE_SLOTS _FEW_WIDE_SLOTS _GROUP_TILES _GROUP_WARPS "
    "_GROUP_THREADS _FEWEST_GROUP_SLOTS _GROUP_SLOTS _GROUP_ALIGN _PRODUCT_BYTES PAIR_CHUNK=_CHUNK "
    "_CHUNK_ENTRY _MOST_CHUNKS _PANEL_ROWS _PANEL_ELEMENTS _PANEL_COLUMNS "
    "_PANEL_Y_BYTES _PANEL_PART _PANEL_RESERVED _PANEL_ROUNDS RESERVED_BYTES=_RESERVED "
    "_FEWEST_SLOTS _EXPAND_SLOTS _Y_BYTES EXPAND_B_BYTES=_B_BYTES _RUN_COLUMNS _STREAM_THREADS "
    "EXPAND_COLUMNS=_COLUMNS _MOST_GROUPS _TARGET_GROUPS _F32_COLUMNS _F32_ROWS",
    "ops._plan_choice": "_RANK_ALWAYS _RANK_MOST _SHARE _TABLE_STATIC _TABLE_PAIRS "
    "_TABLE_PAIR_COST _COUNT_STATIC _PLACE_THREADS "
    "_PLACE_STATIC _PLACE_KEY_BYTES _VECTOR_KEYS _MOST_SHARED _LARGE_MOST _LARGE_COST "
    "_NUMBERED_SLOTS _NUMBERS _NUMBER_COST _NUMBER_TOKENS _NO_COST PLAN_TABLES=_TABLES "
    "PLAN_COUNTS=_COUNTS",
    "ops._row_items": "_PIECE_BYTES _LARGE_THREADS _SMALL_THREADS _FEW_WARPS _RESIDENT_WARPS",
    "ops.activation": "ACTIVATION_AHEAD=_ITEMS_AHEAD",
    "ops.build_segments": "SEGMENT_THREADS=_THREADS _SUMMARY_BYTES",
    "ops.route": "RANK_LIMIT _PAIRS_PER_BLOCK ROUTE_RANK_THREADS=_RANK_THREADS _SORT_THREADS",
}
"""Module -> its constants: ``KEY=attribute``, or an attribute whose name without the underscore is
the key; ``attribute.entry`` is an entry of a mapping."""


def choice() -> dict[str, Value]:
    """Every number, by the name that the manifest and the C table have for it.

    Raises ExportError where an op no longer has a constant of that name.
    """
    found: dict[str, Value] = {}
    for module, names in _NAMES.items():
        for item in names.split():
            key, _, place = item.rpartition("=")
            found[key or place.lstrip("_")] = _constant(module, place)
    return found


def _constant(module: str, place: str) -> Value:
    name, _, entry = place.partition(".")
    try:
        value = getattr(importlib.import_module(f"cupylora.{module}"), name)
        value = value[entry] if entry else value
    except (AttributeError, KeyError) as error:
        raise ExportError(f"cupylora.{module} has no {place}, which the table needs") from error
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if isinstance(value, tuple):
        return tuple(tuple(int(x) for x in row) for row in value)
    return value if isinstance(value, float) else int(value)
