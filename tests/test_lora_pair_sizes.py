"""How the two-node pair lays out h, that the workspace promised is enough for every batch, and
which kernels serve large ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_text import constants, layout, source_text
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora.compiler.programs import find_program
from cupylora.dtypes import FLOAT32, resolve_dtype
from cupylora.ops import _lora_pair
from cupylora.ops._lora_choice import k_ranges
from cupylora.ops._lora_pair import hidden_layout, lora_workspace_bytes
from cupylora.worklists import LoraSlice

KINDS = tuple(map(resolve_dtype, ("bfloat16", "float16", "float32")))


@given(
    most=st.integers(0, 40_000),
    share=st.floats(0, 1),
    slices=st.integers(1, 8),
    in_features=st.integers(1, 20_000),
    max_rank=st.integers(1, 512),
    experts=st.integers(1, 2048),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=500, deadline=None)
def test_the_workspace_is_enough_for_every_smaller_batch(
    most: int,
    share: float,
    slices: int,
    in_features: int,
    max_rank: int,
    experts: int,
    kind: np.dtype[Any],
) -> None:
    rows = round(most * share)
    layout = hidden_layout(rows, slices, in_features, max_rank, kind, experts=experts)
    assert layout.nbytes <= lora_workspace_bytes(most, slices, in_features, max_rank, kind)
    assert layout.rank_pitch >= max_rank
    assert layout.split_stride == rows * slices * layout.rank_pitch
    ranges = 1 if kind == FLOAT32 else k_ranges(in_features)
    assert layout.splits in {1, 2, 4, 8, 16}
    assert layout.splits <= ranges


@pytest.mark.parametrize("max_rank", [16, 32, 33, 64, 65, 128, 512])
@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_the_workspace_is_enough_below_the_limits_of_large_batches(
    slices: int, max_rank: int
) -> None:
    limits = (_lora_pair._STREAM_ROWS, _lora_pair._WIDE_ROWS, 3 * _lora_pair._WIDE_ROWS)
    near = {rows + by for rows in limits for by in (-1, 0, 1)}
    steps = {1 << exponent for exponent in range(16)} | {100 * n for n in range(1, 99)}
    for most in near:
        for features in (64, 1536, 4096):
            room = lora_workspace_bytes(most, slices, features, max_rank, KINDS[0])
            for rows in (rows for rows in near | steps if rows <= most):
                made = hidden_layout(rows, slices, features, max_rank, KINDS[0])
                assert made.nbytes <= room, (rows, most, features)


@pytest.mark.parametrize(
    ("rows", "experts", "in_features", "splits"),
    [
        (1, 1, 4096, 16),  # few CTAs: every range of K is one's own
        (8, 128, 2048, 8),
        (1024, 256, 2048, 1),  # a tile an expert at least
        (512, 1, 4096, 4),
        (4096, 1, 4096, 2),
        (8192, 1, 4096, 1),
        (32768, 128, 768, 1),
    ],
)
def test_k_is_split_only_where_there_is_little_work(
    rows: int, experts: int, in_features: int, splits: int
) -> None:
    layout = hidden_layout(rows, 1, in_features, 16, KINDS[0], experts=experts)
    assert layout.splits == splits


@pytest.mark.parametrize("ranges", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_two_blocks_of_the_stream_shrink_fit_a_large_device(
    tiles: int, rows: int, ranges: int
) -> None:
    part = _lora_pair._stream_part(tiles, rows)
    sums, smem = _lora_pair._shrink_room(tiles, part, ranges)
    assert part in (16, 32)
    assert part * tiles <= 64
    assert sums % 16 == 0
    assert smem <= 228 * 1024 // 2 - 2 * 1024


@pytest.mark.parametrize("room", [(227, 228), (163, 164), (99, 100)])
def test_the_ring_fits_every_device(room: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    per_block, per_sm = (1024 * kib for kib in room)
    monkeypatch.setattr(_lora_pair, "shared_memory", lambda: (per_block, per_sm))
    slots = _lora_pair._ring_slots(32768, 4)
    assert 3 <= slots <= 4
    assert slots * 32768 <= per_block - 1024


@dataclass
class Call:
    """Sizes of a call, and which kernels serve it."""

    rows: int = _lora_pair._WIDE_ROWS
    max_rank: int = 64
    in_features: int = 4096
    tile_rows: int = 64
    tiles: int = 1000
    widths: list[int] = field(default_factory=lambda: [4096])

    def _given(self) -> tuple[Any, _lora_pair.HiddenLayout]:
        inputs = SimpleNamespace(
            max_rank=self.max_rank,
            in_features=self.in_features,
            tiles=self.tiles,
            segments=SimpleNamespace(tile_rows=self.tile_rows),
        )
        sizes = (self.rows, len(self.widths), self.in_features, self.max_rank)
        return inputs, hidden_layout(*sizes, KINDS[0])

    def shrink(self) -> _lora_pair._ShrinkForm:
        form = _lora_pair._shrink_form(*self._given(), "bfloat16")
        assert form.kernel in find_program(form.program).kernels
        return form

    def expand(self) -> _lora_pair._ExpandForm:
        slices = [LoraSlice(width) for width in self.widths]
        form = _lora_pair._expand_form(*self._given(), "bfloat16", slices)
        assert form.kernel in find_program(form.program).kernels
        return form


@pytest.fixture
def large_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lora_pair, "shared_memory", lambda: (227 * 1024, 228 * 1024))
    monkeypatch.setattr(_lora_pair, "resident_blocks", lambda *_: 396)
    monkeypatch.setattr(_lora_pair, "is_hopper", lambda: False)


@pytest.fixture
def large_hopper(large_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lora_pair, "is_hopper", lambda: True)


LONGEST = _lora_pair._MOST_CHUNKS * _lora_pair._CHUNK


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, "wide_bfloat16/4_64"),
        ({"rows": _lora_pair._WIDE_ROWS - 1}, "stream_bfloat16/4_16"),
        ({"max_rank": _lora_pair._WIDE_RANK}, "wide_bfloat16/4_64"),
        ({"max_rank": _lora_pair._WIDE_RANK - 1}, "stream_bfloat16/2_32"),
        ({"max_rank": 65}, "wide_bfloat16/8_64"),
        ({"widths": [4096, 64]}, "wide_bfloat16/8_64"),
        ({"tile_rows": 32}, "wide_bfloat16/4_32"),
        ({"tile_rows": 32, "max_rank": 128}, "wide_bfloat16/8_32"),
        ({"tile_rows": 16, "max_rank": 128}, "stream_bfloat16/4_16"),
        ({"in_features": LONGEST}, "wide_bfloat16/4_64"),
        ({"in_features": LONGEST + 1}, "stream_bfloat16/4_16"),
        # The list of chunks has no room beside the slots.
        ({"in_features": 65_536, "max_rank": 128}, "wide_bfloat16/8_64"),
        ({"in_features": 66_560, "max_rank": 128}, "stream_bfloat16/4_16"),
        ({"tiles": 2**31 - 1}, "wide_bfloat16/4_64"),
        ({"tiles": 2**31}, "bfloat16/4_16"),
        # More groups of ranks make more items.
        ({"tiles": 2**29, "max_rank": 128}, "wide_bfloat16/8_64"),
    ],
)
def test_the_shrink_of_large_batches(
    sizes: dict[str, Any], expected: str, large_device: None
) -> None:
    form = Call(**sizes).shrink()
    assert f"{form.program}/{form.kernel}" == f"lora_shrink_{expected}"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, "wide_bfloat16/4_64"),
        ({"max_rank": 65}, "group_bfloat16/8_64"),
        ({"max_rank": 65, "rows": _lora_pair._WIDE_ROWS - 1}, "stream_bfloat16/4_16"),
        ({"widths": [4096, 64]}, "group_bfloat16/8_64"),
        ({"widths": [4096, 64], "max_rank": 32}, "stream_bfloat16/4_16"),
        ({"tile_rows": 32, "max_rank": 128}, "group_bfloat16/8_32"),
        ({"tile_rows": 32}, "wide_bfloat16/4_32"),
        ({"tile_rows": 16, "max_rank": 128}, "stream_bfloat16/4_16"),
        # With four slots and the list of chunks, shared memory is full.
        ({"in_features": 32_768, "max_rank": 128}, "group_bfloat16/8_64"),
        ({"in_features": 32_832, "max_rank": 128}, "wide_bfloat16/8_64"),
        ({"in_features": 66_560, "max_rank": 128}, "stream_bfloat16/4_16"),
        ({"in_features": 66_560, "max_rank": 128, "tile_rows": 32}, "group_bfloat16/8_32"),
    ],
)
def test_the_shrink_of_large_batches_on_hopper(
    sizes: dict[str, Any], expected: str, large_hopper: None
) -> None:
    form = Call(**sizes).shrink()
    assert f"{form.program}/{form.kernel}" == f"lora_shrink_{expected}"


@pytest.mark.parametrize("in_features", [64, 768, 2048, 4096, 32_768])
@pytest.mark.parametrize("rows", [32, 64])
def test_slots_of_warpgroup_products_fill_the_block(
    rows: int, in_features: int, large_hopper: None
) -> None:
    chunks, ranges = in_features // _lora_pair._CHUNK, _lora_pair.k_ranges(in_features)
    levels, slots, smem = _lora_pair._group_room(rows, ranges, chunks)
    assert _lora_pair._FEWEST_GROUP_SLOTS <= slots <= _lora_pair._GROUP_SLOTS
    room, slot = 226 * 1024 - smem, (rows + 128) * 128
    assert room >= 0
    assert room < slot or slots == _lora_pair._GROUP_SLOTS
    assert levels == (ranges.bit_length() - 1) * rows // 8 * 512


COLUMNS = _lora_pair._PANEL_ELEMENTS // _lora_pair._WIDE_ROWS


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"widths": [COLUMNS]}, "panel_bfloat16/4"),
        ({"widths": [COLUMNS - 1]}, "stream_bfloat16/4"),
        ({"widths": [COLUMNS - 100, 100]}, "panel_bfloat16/4"),
        ({"tile_rows": 32}, "stream_bfloat16/4"),
        ({"max_rank": _lora_pair._DIRECT_RANK + 1}, "panel_bfloat16/4"),
        ({"max_rank": _lora_pair._DIRECT_RANK}, "direct_bfloat16/2"),
        ({"max_rank": 65}, "bfloat16/16"),
        ({"rows": 512, "widths": [2**17]}, "panel_bfloat16/4"),
        ({"rows": 511, "widths": [2**17]}, "bfloat16/16"),
    ],
)
def test_the_expand_of_large_batches(
    sizes: dict[str, Any], expected: str, large_device: None
) -> None:
    form = Call(**sizes).expand()
    assert f"{form.program}/{form.kernel}" == f"lora_expand_{expected}"
    assert form.panels == ("panel" in expected)


@pytest.mark.parametrize("room", [(227, 228), (163, 164), (99, 100)])
@pytest.mark.parametrize("rows", [512, 2048, 40_000])
def test_panels_fit_the_device(
    rows: int, room: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lora_pair, "shared_memory", lambda: tuple(1024 * kib for kib in room))
    monkeypatch.setattr(_lora_pair, "resident_blocks", lambda *_: 396)
    for widths in ([2**17], [2**16, 100, 2**16], [300] * 8):
        form = Call(rows=rows, widths=widths).expand()
        panels = sum(-(-width // _lora_pair._PANEL_COLUMNS) for width in widths)
        assert form.smem <= 1024 * room[0]
        if form.panels:
            share = form.parts * panels / (-(-form.parts * panels // 396) * 396)
            assert 7 / 8 <= share <= 1
    few = Call(rows=rows, widths=[2**17, 1], tiles=1).expand()
    assert not few.panels or few.parts <= 64 // _lora_pair._PANEL_PART


def test_large_kernels_are_as_the_host_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory of lora/shrink_wide.cu, lora/shrink_group.cu and lora/expand_panel.cu, and
    where panels end."""
    texts = ("ptx/types.cuh", "lora/k_order.cuh", "lora/operands.cuh", "lora/slot_entry.cuh")
    heads = "\n".join(map(source_text, texts))
    plain = constants(heads)
    assert plain["kChunk"] == _lora_pair._CHUNK
    for tiles in (_lora_pair._WIDE_TILES, _lora_pair._MOST_WIDE_TILES):
        for rows in (_lora_pair._SHORT_PART, _lora_pair._WIDE_PART):
            text = source_text("lora/shrink_wide.cu")
            own = constants(text, **plain, MT=tiles, R=rows)
            levels, smem = _lora_pair._wide_room(tiles, rows, 8, 100)
            assert own["kThreads"] == _lora_pair._WIDE_THREADS
            assert own["kWarps"] == _lora_pair._WIDE_WARPS
            assert levels == 3 * own["kTiles"] * own["kWarp"] * 4 * 4
            assert smem == own["kSlots"] * own["kSlotBytes"] + own["kWarps"] * levels + 208
    for rows in (_lora_pair._SHORT_PART, _lora_pair._WIDE_PART):
        own = constants(source_text("lora/shrink_group.cu"), **plain, R=rows)
        assert own["kThreads"] == _lora_pair._GROUP_THREADS
        assert own["kUsers"] == _lora_pair._GROUP_TILES == _lora_pair._GROUP_WARPS
        assert own["kMostSlots"] == _lora_pair._GROUP_SLOTS
        assert own["kTeams"] == _lora_pair._FEWEST_GROUP_SLOTS
        assert own["kSlotAlign"] == _lora_pair._GROUP_ALIGN
        assert own["kNT"] * own["kWarp"] * 4 * 4 == rows // 8 * _lora_pair._PRODUCT_BYTES
        slots = _lora_pair._GROUP_ALIGN + 4 * own["kSlotBytes"]
        monkeypatch.setattr(_lora_pair, "shared_memory", lambda room=slots + 1024: (room, room))
        assert _lora_pair._group_room(rows, 1, 0) == (0, 4, slots)
    text = source_text("lora/expand_panel.cu")
    own = constants(text, **plain, KS=4)
    assert own["kPartRows"] == _lora_pair._PANEL_PART
    assert own["kThreads"] == _lora_pair._THREADS
    assert own["kHiddenRow"] == 4 * _lora_pair._RANK_TILE * 4
    assert own["kWarps"] * own["kAhead"] * own["kYSlot"] == _lora_pair._PANEL_Y_BYTES
    assert own["kWarps"] * _lora_pair._COLUMNS == _lora_pair._PANEL_COLUMNS
    lists = layout(heads + text, "TileLists", own)[1]
    rows_at = layout(heads + text, "RowAddresses", own)[1]
    static = own["kLists"] * lists + 2 * rows_at + 4 * own["kMaxRows"]
    assert static + 1024 <= _lora_pair._PANEL_RESERVED
