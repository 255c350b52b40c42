"""Which kernels make a batch's plan, and how they are launched: a matter of sizes alone.

In: the sizes of a call, most adapters of its batch if known, and the shared memory that a block may
have. Out: a Small (one launch), a Large (two) or None where neither fits. The limits follow from
the kernels (route/plan.cu, route/plan_large.cu); where several fit, the order is by measured or
estimated time. A batch of few adapters may have the slots that it holds numbered, so that its keys
are few however many slots there are.
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

_TABLE_PAIRS, _TABLE_PAIR_COST = 2048, 7
"""Pairs that every block of plan_table counts in the time of what it does anyway; estimated clock
cycles for each one more that its shape has room for."""

_COUNTS = ((16, 4), (8, 4))
_COUNT_STATIC = 1024
_PLACE_THREADS = 512
_PLACE_STATIC = 1024
_PLACE_KEY_BYTES = 12
_VECTOR_KEYS = 8
_LARGE_COST = 12_000
"""Estimated clock cycles of the two launches but for what the keys cost."""

_NUMBERED_SLOTS = 1024
_NUMBERS = 256
"""Most slots of a table that can be numbered, and most of them that a batch may hold then."""
_NUMBER_COST = 300
_NUMBER_TOKENS = 8
"""Estimated clock cycles of numbering, and in a Large one more for so many tokens."""
_NO_COST = 1 << 40

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
        return self.num_experts * self.digits

    @property
    def digits(self) -> int:
        """Different slots, none among them."""
        return self.max_loras + 1

    @property
    def divisor(self) -> int:
        """What divides a pair into token and choice; with one choice a pair is a token."""
        return self.tokens if self._by_choice else self.top_k

    @property
    def _by_choice(self) -> bool:
        return self.k_major and self.top_k > 1

    def packed(self, digits: int) -> bytes:
        """PlanSizes of route/plan.cuh; ``digits`` are those of the chosen launches."""
        divisor = max(1, self.divisor)
        return struct.pack(
            "3i2I3iI2i4x",
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
            self.max_loras,
        )


@dataclass(frozen=True)
class Small:
    """One launch of program "plan". digits: different slots by which it counts; cost: estimated
    clock cycles."""

    kernel: str
    grid: int
    threads: int
    smem: int
    digits: int
    cost: int

    @property
    def grid_shift(self) -> int | None:
        """log2 of the grid, which plan_table takes and plan_rank does not."""
        return self.grid.bit_length() - 1 if self.kernel.startswith("table") else None


@dataclass(frozen=True)
class Large:
    """The two launches of program "plan_large". digits, cost: as of a Small."""

    count_kernel: str
    blocks: int
    block_pairs: int
    threads: int
    count_smem: int
    place_grid: int
    place_smem: int
    ranked_bytes: int
    workspace_bytes: int
    digits: int
    cost: int


@functools.lru_cache(maxsize=4096)
def choose_plan(
    sizes: PlanSizes, shared: int, max_active: int | None = None
) -> Small | Large | None:
    """The launches for these sizes where a block may have ``shared`` bytes; None: none fits.

    max_active: most different slots that the batch holds, if known.
    """
    shared = min(shared, _MOST_SHARED)
    chosen = _choose(sizes, sizes.digits, shared)
    if max_active is None or max_active >= sizes.max_loras:
        return chosen
    if sizes.max_loras > _NUMBERED_SLOTS or max_active > _NUMBERS:
        return chosen
    other = _choose(sizes, max_active + 1, shared)
    if other is None:
        return chosen
    reading = sizes.tokens // _NUMBER_TOKENS if isinstance(other, Large) else 0
    cost = _NO_COST if chosen is None else chosen.cost
    return other if other.cost + _NUMBER_COST + reading < cost else chosen


def _choose(sizes: PlanSizes, digits: int, shared: int) -> Small | Large | None:
    pairs, keys = sizes.pairs, sizes.num_experts * digits
    if pairs * sizes.divisor >= 1 << 32:
        return None  # the kernels' division is exact up to there
    if pairs <= _RANK_ALWAYS:
        return _rank(pairs, sizes.digits)
    shape = _table_shape(pairs, keys, shared)
    if pairs <= _RANK_MOST and (shape is None or _rank_cost(pairs) < _table_cost(keys, shape)):
        return _rank(pairs, sizes.digits)
    if shape is None:
        return _large(pairs, keys, shared, digits)
    table, large = _table(pairs, keys, shape, digits), _large(pairs, keys, shared, digits)
    return table if large is None or table.cost < large.cost else large


def large_workspace_bytes(num_rows: int, keys: int) -> int:
    """Bytes that a Large of any number of rows up to ``num_rows`` needs at most, on any device."""
    if num_rows <= _RANK_ALWAYS:
        return 0
    rows = min(num_rows, _LARGE_MOST)
    keys = min(keys, _MOST_SHARED // _PLACE_KEY_BYTES)  # where more are, slots may be numbered
    return _workspace(rows, keys, min(_pairs_of(*shape) for shape in _COUNTS))


def _rank(pairs: int, digits: int) -> Small:
    parts = 8 if pairs <= _RANK_ALWAYS else 4
    threads = max(256, -(-pairs * parts // _WARP) * _WARP)
    return Small(f"rank_{parts}", 1, threads, 0, digits, _rank_cost(pairs))


def _rank_cost(pairs: int) -> int:
    """Estimated clock cycles of one SM: four instructions a comparison, and what surrounds them."""
    return 150 + pairs * pairs // 32


def _table_cost(keys: int, shape: tuple[int, int]) -> int:
    """Estimated clock cycles of one SM: two passes over the keys, rounds, what surrounds them."""
    columns, rounds = shape
    many = max(0, _pairs_of(columns, rounds) - _TABLE_PAIRS)
    return 400 + keys * 45 // 128 + keys * columns // 64 + rounds * 150 + many * _TABLE_PAIR_COST


def _table_shape(pairs: int, keys: int, shared: int) -> tuple[int, int] | None:
    fitting = (
        (columns, rounds)
        for columns, rounds in _TABLES
        if pairs <= _pairs_of(columns, rounds)
        and _table_bytes(keys, columns) + _TABLE_STATIC <= shared
    )
    return min(fitting, key=lambda shape: _table_cost(keys, shape), default=None)


def _table(pairs: int, keys: int, shape: tuple[int, int], digits: int) -> Small:
    columns, rounds = shape
    threads = 1024 if columns > 16 or pairs > 512 or keys > 4096 else 512
    grid = 1 << (-(-pairs // _SHARE) - 1).bit_length()
    return Small(
        f"table_{columns}_{rounds}",
        grid,
        threads,
        _table_bytes(keys, columns),
        digits,
        _table_cost(keys, shape),
    )


def _table_bytes(keys: int, columns: int) -> int:
    return _round_up((keys + 1) * columns, 16)


def _large(pairs: int, keys: int, shared: int, digits: int) -> Large | None:
    padded = _round_up(keys, _VECTOR_KEYS)
    if pairs > _LARGE_MOST or _place_bytes(keys) + _PLACE_STATIC > shared:
        return None
    for columns, rounds in _COUNTS:
        block_pairs = _pairs_of(columns, rounds)
        if padded * columns + _COUNT_STATIC <= shared:
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
                digits=digits,
                cost=_LARGE_COST + keys * 5 // 2,
            )
    return None


def _place_bytes(keys: int) -> int:
    return _round_up(keys, _VECTOR_KEYS) * _PLACE_KEY_BYTES + 8


def _workspace(pairs: int, keys: int, block_pairs: int) -> int:
    counts = -(-pairs // block_pairs) * _round_up(keys, _VECTOR_KEYS) * 2
    return _round_up(pairs * 4, 16) + counts + _NUMBERS * 2


def _pairs_of(columns: int, rounds: int) -> int:
    return columns * rounds * _WARP


def _magic(divisor: int) -> int:
    """A number m with n // divisor == n * m >> 32 for n * divisor < 2^32; 0 stands for 1."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
