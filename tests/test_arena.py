"""Room for an adapter's blocks: in few runs, wherever there is any, and all of it or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora.adapters.arena import Arena, Blocks
from cupylora.errors import RoomError
from cupylora.gaps import Gaps
from cupylora.host_memory import HostMemory

B = 256
"""Bytes of the smallest block."""


def taken(blocks: Blocks, sizes: list[int]) -> list[tuple[int, int]]:
    """Where each block is."""
    return list(zip(blocks.offsets.tolist(), sizes, strict=True))


def apart(arena: Arena, holes: list[int]) -> None:
    """Leave these gaps, in blocks, and nothing else."""
    between = [(arena.alloc(hole * B), arena.alloc(B)) for hole in holes]
    if arena.free_bytes:
        arena.alloc(arena.gaps[0][1])
    for hole, _ in between:
        arena.free(hole)


def test_blocks_stand_side_by_side() -> None:
    arena = Arena(20 * B)
    sizes = [B, 3 * B, 2 * B]
    blocks = arena.take(sizes)
    assert [(run.offset, run.start, run.size) for run in blocks.runs] == [(0, 0, 6 * B)]
    assert blocks.offsets.tolist() == [0, B, 4 * B]
    assert arena.used_bytes == 6 * B
    arena.free(blocks.runs[0].offset)
    assert arena.gaps == ((0, 20 * B),)


def test_several_gaps_are_used_in_order() -> None:
    arena = Arena(32 * B)
    apart(arena, [2, 4, 3])
    sizes = [2 * B, 2 * B, 2 * B, B]
    blocks = arena.take(sizes)
    assert [(run.start // B, run.size // B) for run in blocks.runs] == [(0, 4), (4, 3)]
    assert arena.free_bytes == 2 * B


def test_blocks_go_apart_where_runs_leave_no_room_for_large_ones() -> None:
    arena = Arena(32 * B)
    apart(arena, [3, 1])
    sizes = [B, 3 * B]  # the first one would take a part of the larger gap
    blocks = arena.take(sizes)
    assert len(blocks.runs) == 2
    assert arena.free_bytes == 0
    for run in blocks.runs:
        arena.free(run.offset)
    with pytest.raises(RoomError, match=f"{3 * B} bytes needed, {B} free"):
        arena.take([3 * B, 3 * B])
    assert arena.free_bytes == 4 * B


def test_nothing_takes_no_room() -> None:
    blocks = Arena(B).take([])
    assert (blocks.runs, blocks.offsets.tolist()) == ((), [])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_blocks_never_overlap_and_hold_what_was_written(data: st.DataObject) -> None:
    arena = Arena(60 * B)
    held: list[tuple[Blocks, list[int], bytes]] = []
    for number in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            blocks, sizes, content = held.pop(data.draw(st.integers(0, len(held) - 1)))
            whole = HostMemory(np.split(np.zeros(len(content), np.uint8), [len(content) // 3]))
            arena.read(blocks, 0, whole)
            assert whole.tobytes() == content
            start = len(content) // 5
            part = HostMemory.new(len(content) // 2)
            arena.read(blocks, start, part)
            assert part.tobytes() == content[start : start + part.nbytes]
            for run in blocks.runs:
                arena.free(run.offset)
        sizes = [B * n for n in data.draw(st.lists(st.integers(1, 6), max_size=8))]
        free = arena.free_bytes
        try:
            blocks = arena.take(sizes)
        except RoomError:
            assert arena.free_bytes == free
            continue
        assert arena.free_bytes == free - sum(sizes)
        content = np.random.default_rng(number).bytes(sum(sizes))
        arena.fill(blocks, HostMemory.of(np.frombuffer(content, np.uint8)))
        at = 0
        for offset, size in taken(blocks, sizes):
            assert arena.buffer[offset : offset + size].tobytes() == content[at : at + size]
            at += size
        held.append((blocks, sizes, content))
    for blocks, _, _ in held:
        arena.clear(blocks)
        for run in blocks.runs:
            assert not arena.buffer[run.offset : run.offset + run.size].any()
            arena.free(run.offset)
    assert arena.gaps == ((0, arena.capacity),)


def test_gaps_merge() -> None:
    gaps = Gaps([(0, 10)])
    assert gaps.cut((0, 10), 4) == 0
    assert (list(gaps), gaps.total, gaps.largest) == ([(4, 6)], 6, (4, 6))
    gaps.give(0, 2)
    assert gaps.smallest(2) == (0, 2)
    assert gaps.smallest(7) is None
    gaps.give(2, 2)
    assert list(gaps) == [(0, 10)]
    gaps.cut((0, 10), 10)
    assert (list(gaps), gaps.largest) == ([], (0, 0))
