"""Which kernels make a batch's plan, and how they are launched: a matter of sizes alone.

In: the sizes of a call and the shared memory that a block may have. Out: a Small (one launch), a
Large (two) or None where neither fits. The limits follow from the kernels (route/plan.cu,
route/plan_large.cu); where several fit, the order is by measured or estimated time.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Large", "PlanSizes", "Small", "choose_plan", "large_workspace_bytes"]

_WARP = 32
_RANK_THREADS = 1024
_RANK_ALWAYS = 128
"""Pairs up to which counting smaller pairs beats a table, whatever the number of keys."""
_RANK_MOST = 256

_SHARE = 256
"""Pairs whose lists one block of plan_table writes."""
_TABLES = ((8, 1), (8, 2), (8, 4), (16, 2), (16, 4), (32, 2), (32, 4))
"""(columns, rounds) of plan_table."""
_TABLE_STATIC = 12 * 1024
"""Bytes, and more, of plan_table's own arrays."""

_COUNTS = ((16, 4), (8, 4))
_PLACE_THREADS = 512
_PLACE_STATIC = 1024
_PLACE_KEY_BYTES = 12
_VECTOR_KEYS = 8
_MOST_SHARED = 227 * 1024
"""Bytes that a block of any device may have."""
_LARGE_MOST = 1 << 17
"""Pairs beyond which adding up all blocks' counts in every block is the slower way."""


class PlanSizes(NamedTuple):
    """The sizes of a call of ``plan``."""

    tokens: int
    top_k: int
    num_experts: int
    max_loras: int
    start_expert: int
    k_major: bool
    tile_rows: int

    @property
    def pairs(self) -> int:
        """T·k."""
        return self.tokens * self.top_k

    @property
    def keys(self) -> int:
        """Different (expert, slot or none)."""
        return self.num_experts * (self.max_loras + 1)

    @property
    def divisor(self) -> int:
        """What divides a pair into token and choice; with one choice a pair is a token."""
        return self.tokens if self._by_choice else self.top_k

    @property
    def _by_choice(self) -> bool:
        return self.k_major and self.top_k > 1

    def packed(self) -> bytes:
        """PlanSizes of route/plan.cuh."""
        divisor, digits = max(1, self.divisor), self.max_loras + 1
        return struct.pack(
            "3i2I3iIi",
            self.pairs,
            self.top_k,
            self._by_choice,
            divisor,
            _magic(divisor),
            self.num_experts,
            self.start_expert,
            digits,
            _magic(digits),
            self.tile_rows.bit_length() - 1,
        )


@dataclass(frozen=True)
class Small:
    """One launch of program "plan"."""

    kernel: str
    grid: int
    threads: int
    smem: int

    @property
    def grid_shift(self) -> int | None:
        """log2 of the grid, which plan_table takes and plan_rank does not."""
        return self.grid.bit_length() - 1 if self.kernel.startswith("table") else None


@dataclass(frozen=True)
class Large:
    """The two launches of program "plan_large"."""

    count_kernel: str
    blocks: int
    block_pairs: int
    threads: int
    count_smem: int
    place_grid: int
    place_smem: int
    ranked_bytes: int
    workspace_bytes: int


@functools.lru_cache(maxsize=4096)
def choose_plan(sizes: PlanSizes, shared: int) -> Small | Large | None:
    """The launches for these sizes where a block may have ``shared`` bytes; None: none fits."""
    pairs, keys, shared = sizes.pairs, sizes.keys, min(shared, _MOST_SHARED)
    if pairs * sizes.divisor >= 1 << 32:
        return None  # the kernels' division is exact up to there
    if pairs <= _RANK_ALWAYS:
        return _rank(pairs)
    shape = _table_shape(pairs, keys, shared)
    if pairs <= _RANK_MOST and (shape is None or _rank_cost(pairs) < _table_cost(keys, shape)):
        return _rank(pairs)
    return _large(pairs, keys, shared) if shape is None else _table(pairs, keys, shape)


def large_workspace_bytes(num_rows: int, keys: int) -> int:
    """Bytes that a Large of any number of rows up to ``num_rows`` needs at most, on any device."""
    if num_rows <= _RANK_ALWAYS or _place_bytes(keys) > _MOST_SHARED:
        return 0
    rows = min(num_rows, _LARGE_MOST)
    return _workspace(rows, keys, min(_pairs_of(*shape) for shape in _COUNTS))


def _rank(pairs: int) -> Small:
    parts = 8 if pairs <= _RANK_ALWAYS else 4
    threads = max(256, -(-pairs * parts // _WARP) * _WARP)
    return Small(f"rank_{parts}", 1, threads, 0)


def _rank_cost(pairs: int) -> int:
    """Estimated clock cycles of one SM: four instructions a comparison, and what surrounds them."""
    return 150 + pairs * pairs // 32


def _table_cost(keys: int, shape: tuple[int, int]) -> int:
    """Estimated clock cycles of one SM: two passes over the keys, rounds, what surrounds them."""
    columns, rounds = shape
    return 400 + keys * 45 // 128 + keys * columns // 64 + rounds * 150


def _table_shape(pairs: int, keys: int, shared: int) -> tuple[int, int] | None:
    fitting = (
        (columns, rounds)
        for columns, rounds in _TABLES
        if pairs <= _pairs_of(columns, rounds)
        and _table_bytes(keys, columns) + _TABLE_STATIC <= shared
    )
    return min(fitting, key=lambda shape: _table_cost(keys, shape), default=None)


def _table(pairs: int, keys: int, shape: tuple[int, int]) -> Small:
    columns, rounds = shape
    threads = 1024 if columns > 16 or pairs > 512 or keys > 4096 else 512
    grid = 1 << (-(-pairs // _SHARE) - 1).bit_length()
    return Small(f"table_{columns}_{rounds}", grid, threads, _table_bytes(keys, columns))


def _table_bytes(keys: int, columns: int) -> int:
    return _round_up((keys + 1) * columns, 16)


def _large(pairs: int, keys: int, shared: int) -> Large | None:
    padded = _round_up(keys, _VECTOR_KEYS)
    if pairs > _LARGE_MOST or _place_bytes(keys) + _PLACE_STATIC > shared:
        return None
    for columns, rounds in _COUNTS:
        block_pairs = _pairs_of(columns, rounds)
        if padded * columns <= shared:
            return Large(
                count_kernel=f"count_{columns}_{rounds}",
                blocks=-(-pairs // block_pairs),
                block_pairs=block_pairs,
                threads=_PLACE_THREADS,
                count_smem=padded * columns,
                place_grid=-(-pairs // _PLACE_THREADS),
                place_smem=_place_bytes(keys),
                ranked_bytes=_round_up(pairs * 4, 16),
                workspace_bytes=_workspace(pairs, keys, block_pairs),
            )
    return None


def _place_bytes(keys: int) -> int:
    return _round_up(keys, _VECTOR_KEYS) * _PLACE_KEY_BYTES + 8


def _workspace(pairs: int, keys: int, block_pairs: int) -> int:
    counts = -(-pairs // block_pairs) * _round_up(keys, _VECTOR_KEYS) * 2
    return _round_up(pairs * 4, 16) + counts


def _pairs_of(columns: int, rounds: int) -> int:
    return columns * rounds * _WARP


def _magic(divisor: int) -> int:
    """A number m with n // divisor == n * m >> 32 for n * divisor < 2^32; 0 stands for 1."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
