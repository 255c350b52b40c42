"""How the two-node pair lays out h, and that the workspace promised is enough for every batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora.dtypes import FLOAT32, resolve_dtype
from cupylora.ops import _lora_pair
from cupylora.ops._lora_choice import k_ranges
from cupylora.ops._lora_pair import hidden_layout, lora_workspace_bytes

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
