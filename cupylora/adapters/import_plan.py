"""What an import of an adapter's files does, from their headers alone.

In: an open adapter and a table. Out: an :class:`ImportPlan`: the blocks and table rows
(``AdapterLayout``), and which bytes of which file become which elements of which block
(FACTOR_PIECE records). ``importing`` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cupylora.adapters.factors import checked_scale
from cupylora.adapters.packed import AdapterLayout, block_bytes, stride_of, table_row
from cupylora.adapters.peft import OpenAdapter, check_ranks, same_bytes
from cupylora.adapters.slots import SlotTable
from cupylora.adapters.units import Pair, Unit, a_dtype, is_stacked
from cupylora.checks import INT32_MAX
from cupylora.reference.unpack_factors import MOST_PIECES, PIECE_ELEMENTS, SOURCE_TYPES
from cupylora.worklists import FACTOR_PIECE, PACKED, SLOT_ENTRY

__all__ = ["Chunk", "ImportPlan", "chunks_of", "most_pieces", "plan_import"]

_EXPERT, _ROW, _COLUMN = 0, 1, 2


def most_pieces(nbytes: int) -> int:
    """Records, at most, of ``nbytes`` of a file that travel together."""
    return min(MOST_PIECES, nbytes // 256)


@dataclass(frozen=True, eq=False)
class ImportPlan:
    """What an import does, without its data.

    pieces: FACTOR_PIECE, in the order of files and of bytes, ``target`` being numbers of blocks,
    ``source`` not set; file, begin, end: where each lies, in the data of that file.
    """

    layout: AdapterLayout
    pieces: npt.NDArray[np.void]
    file: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file that travel together, and the pieces that they hold."""

    file: int
    begin: int
    end: int
    pieces: slice


def chunks_of(plan: ImportPlan, nbytes: int) -> Iterator[Chunk]:
    """All pieces, as many at a time as ``nbytes`` of one file hold."""
    first, total = 0, len(plan.pieces)
    while first < total:
        file, begin = int(plan.file[first]), int(plan.begin[first])
        last = min(total, first + most_pieces(nbytes))
        same = int(np.searchsorted(plan.file[first:last], file, "right"))
        fit = int(np.searchsorted(plan.end[first : first + same], begin + nbytes, "right"))
        last = first + max(1, fit)
        yield Chunk(file, begin, int(plan.end[last - 1]), slice(first, last))
        first = last


@dataclass(frozen=True)
class _Target:
    """Where a factor goes: its blocks' numbers, their shape [experts, rows, columns] before it is
    split, and how ``FACTOR_PIECE`` says the split."""

    blocks: tuple[int, int]
    rows: int
    columns: int
    split: int = INT32_MAX
    interleaved: bool = False
    packed: bool = False

    @property
    def form(self) -> tuple[int, int, int, bool, bool]:
        """As ``FACTOR_PIECE`` has it, from rows on."""
        return self.rows, self.columns, self.split, self.interleaved, self.packed


def plan_import(table: SlotTable, name: str, opened: OpenAdapter) -> ImportPlan:
    """How an open adapter gets into the table's arena, to serve as ``name``.

    Raises CapacityError for a rank beyond the table's limits.
    """
    return _Planner(table, name, opened).plan()


class _Planner:
    """Collects an adapter's blocks and tensors, then cuts them into pieces."""

    def __init__(self, table: SlotTable, name: str, opened: OpenAdapter) -> None:
        self._table, self._name, self._opened = table, name, opened
        self._sizes: list[int] = []
        self._a_blocks: dict[int, int] = {}
        self._templates: list[tuple[Any, ...]] = []
        self._places: list[tuple[int, int, int, int]] = []  # file, begin, elements, item size

    def plan(self) -> ImportPlan:
        """As ``plan_import``."""
        table, units = self._table, self._opened.units
        gates = {unit.layer: unit for unit in units if unit.modules == ("gate_proj",)}
        records = np.zeros(len(table.entries), SLOT_ENTRY)
        check_ranks(self._name, units, table.limits)
        for unit in units:
            gate = gates.get(unit.layer)
            same = gate is not None and unit.modules == ("up_proj",) and self._same_a(gate, unit)
            a_block = self._a_block(gate if gate is not None and same else unit)
            self._add_b(unit, a_block, records)
        rank = max((unit.rank for unit in units), default=0)
        layout = AdapterLayout(
            self._name,
            tuple(self._sizes),
            records,
            rank,
            table.dtype,
            table.a_layout,
            self._opened.source,
        )
        return self._in_file_order(layout)

    def _same_a(self, gate: Unit, up: Unit) -> bool:
        """Whether both have the same A, as ``read_adapter`` judges it once they are built."""
        if gate.order or up.order or gate.a_shape != up.a_shape or a_dtype(gate) != a_dtype(up):
            return False
        experts = {pair.key.expert for unit in (gate, up) for pair in unit.pairs}
        return all(
            same_bytes(self._a_of(gate, expert), self._a_of(up, expert)) for expert in experts
        )

    def _a_of(self, unit: Unit, expert: int) -> npt.NDArray[Any]:
        """The A that an expert has once a unit is built, flat: what it lacks is zeros."""
        size = math.prod(unit.a_shape) // (unit.experts if is_stacked(unit) else 1)
        values = np.zeros(size, a_dtype(unit))
        for pair in unit.pairs:
            if pair.key.expert == expert:
                [own] = self._opened.weights.pieces(pair.a_name, pair.a.nbytes)
                values[: own.size] = own
        return values

    def _new_block(self, shape: tuple[int, int, int]) -> int:
        self._sizes.append(block_bytes(math.prod(shape) * self._table.dtype.itemsize))
        return len(self._sizes) - 1

    def _a_block(self, unit: Unit) -> int:
        """The block of a unit's A, and what fills it, once."""
        if id(unit) in self._a_blocks:
            return self._a_blocks[id(unit)]
        shape = unit.a_shape
        block = self._a_blocks[id(unit)] = self._new_block(shape)
        packed = self._table.a_layout == PACKED
        target = _Target((block, block), shape[1], shape[2], packed=packed)
        for pair in unit.pairs:
            self._add_tensor(pair, unit, "A", target, 1.0)
        return block

    def _add_b(self, unit: Unit, a_block: int, records: npt.NDArray[np.void]) -> None:
        """Blocks of a unit's B, what fills them, and the rows that point at them."""
        table, dtype = self._table, self._table.dtype
        blocks = []
        for module, rows in unit.group.splits:
            shape = unit.b_shape(rows)
            blocks.append(self._new_block(shape))
            row = table.row(unit.layer, table.model.module_index(module))
            strides = (stride_of(unit.a_shape, dtype), stride_of(shape, dtype))
            scale = checked_scale(unit.scale)
            records[row] = table_row(a_block, blocks[-1], strides, unit.rank, scale, table.a_layout)
        rows = unit.group.splits[0][1]
        interleaved, split = rows.step == 2, INT32_MAX
        if len(blocks) == 2 and not interleaved:
            split = unit.group.out_features // 2
            if rows.start:  # the first module has the upper half
                blocks.reverse()
        _, height, width = unit.b_shape(rows)
        target = _Target((blocks[0], blocks[-1]), height, width, split, interleaved)
        for pair, own in zip(unit.pairs, unit.scales, strict=True):
            ratio = 1.0 if own == unit.scale else own / unit.scale
            self._add_tensor(pair, unit, "B", target, ratio)

    def _add_tensor(
        self, pair: Pair, unit: Unit, factor: Literal["A", "B"], to: _Target, ratio: float
    ) -> None:
        """The tensor that gives a unit's ``factor``, on its way to ``to``, times ``ratio``."""
        swapped = unit.order is not None and unit.order.swapped
        from_a = (factor == "A") != swapped
        name, info = (pair.a_name, pair.a) if from_a else (pair.b_name, pair.b)
        extent, axes = _extent(info.shape, unit, from_a=from_a)
        if swapped:  # its ranks are the other factor's columns, and the other way round
            axes = tuple({_ROW: _COLUMN, _COLUMN: _ROW}.get(axis, axis) for axis in axes)
        kind = SOURCE_TYPES.index(info.dtype)
        expert = pair.key.expert or 0
        self._templates.append((0, 0, to.blocks, 0, kind, extent, axes, expert, *to.form, ratio))
        place = self._opened.weights.place_of(name)
        self._places.append((*place, math.prod(info.shape), info.dtype.itemsize))

    def _in_file_order(self, layout: AdapterLayout) -> ImportPlan:
        """Tensors cut into pieces, sorted by where their bytes lie."""
        # A thousand at a time: one call for all would keep other threads waiting for long.
        made = (
            np.array(self._templates[at : at + 1024], FACTOR_PIECE)
            for at in range(0, len(self._templates), 1024)
        )
        templates = np.concatenate([np.empty(0, FACTOR_PIECE), *made])
        places = np.array(self._places, np.int64).reshape(-1, 4)
        order = np.lexsort((places[:, 1], places[:, 0]))
        templates, places = templates[order], places[order]
        file, begin, elements, itemsize = places.T
        number = -(-elements // PIECE_ELEMENTS)
        tensor = np.repeat(np.arange(len(places)), number)
        before = np.cumsum(number) - number
        first: npt.NDArray[np.int64] = (np.arange(len(tensor)) - before[tensor]) * PIECE_ELEMENTS
        pieces = templates[tensor]
        pieces["first"] = first
        pieces["count"] = np.minimum(PIECE_ELEMENTS, elements[tensor] - first)
        start = begin[tensor] + first * itemsize[tensor]
        end = start + pieces["count"] * itemsize[tensor]
        return ImportPlan(layout, pieces, file[tensor], start, end)


def _extent(
    shape: tuple[int, ...], unit: Unit, *, from_a: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tensor's shape in three dimensions, and the axis of the factor that each one counts."""
    if unit.order is None:
        return (1, *shape)[-3:], (_EXPERT, _ROW, _COLUMN)
    experts = unit.experts
    if from_a:  # [E·r, features]
        return (experts, shape[0] // experts, shape[1]), (_EXPERT, _ROW, _COLUMN)
    rank = shape[1] // experts
    if unit.order.by_expert:  # [features, E·r]
        return (shape[0], experts, rank), (_ROW, _EXPERT, _COLUMN)
    return (shape[0], rank, experts), (_ROW, _COLUMN, _EXPERT)  # [features, r·E]
