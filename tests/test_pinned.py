"""Host memory that is used again: within its limit, never the same memory for two at a time."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from cupylora.errors import ArgumentError, CapacityError
from cupylora.host_memory import HostMemory
from cupylora.pinned import GRANULE, PinnedPool

KB, MB = 1 << 10, 1 << 20


class System:
    """Gives memory, and counts what it has given and what it has back."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most, self.sizes = most, list[int]()

    def make(self, size: int) -> Any:
        if size > self.most:
            raise CapacityError("no memory")
        self.sizes.append(size)
        return bytearray(size)


def pool_of(limit: int, system: System | None = None) -> PinnedPool:
    return PinnedPool((system or System()).make, limit, chunk_bytes=MB)


def test_memory_serves_the_next_of_any_size() -> None:
    system = System()
    pool = pool_of(4 * MB, system)
    first = pool.take(2 * MB + 100)
    assert [part.nbytes for part in first.parts] == [MB, MB, 100]
    assert all((part.dtype, part.flags.writeable) == (np.uint8, True) for part in first.parts)
    view = first.parts[0][100:200]
    at = {part.ctypes.data for part in first.parts}
    del first
    assert (pool.used_bytes, pool.held_bytes) == (MB, 3 * MB)  # a view still has one part
    del view
    assert (pool.used_bytes, pool.held_bytes) == (0, 3 * MB)
    several = [pool.take(700 * KB) for _ in range(4)]  # each in a chunk of its own, then in two
    assert {part.ctypes.data for memory in several[:3] for part in memory.parts} == at
    assert len(several[3].parts) == 3
    assert system.sizes == [MB] * 3


def test_large_memory_takes_whole_chunks() -> None:
    """Copies of few parts, whatever came before: what is left over stays for what is small."""
    pool = pool_of(64 * MB)
    small = [pool.take(MB // 2) for _ in range(3)]
    large = pool.take(10 * MB)
    assert max(map(len, (memory.parts for memory in small))) == 1
    assert len(large.parts) <= 12


def test_chunks_beyond_the_limit_go_once_nobody_has_them() -> None:
    system = System()
    pool = pool_of(5 * MB // 2, system)
    first, second = pool.take(2 * MB), pool.take(MB)
    assert system.sizes == [MB, MB, MB // 2, MB // 2]  # the limit's rest, then what lacks
    assert pool.held_bytes == 3 * MB  # what is in use is not limited here
    del first, second
    assert pool.used_bytes == 0
    assert pool.held_bytes <= 5 * MB // 2


def test_sizes_of_all_kinds_keep_within_the_limit() -> None:
    """As a cache does that lets go before it takes: no chunk is made that was not made before."""
    limit = 12 * MB
    system = System()
    pool = pool_of(limit, system)
    rng = np.random.default_rng(0)
    held: list[tuple[HostMemory, int]] = []
    for size in rng.integers(0, 3 * MB, 3000).tolist():
        while sum(memory.nbytes + GRANULE for memory, _ in held) + size + GRANULE > limit:
            memory, value = held.pop(int(rng.integers(len(held))))
            assert set(memory.tobytes(0, 100)) <= {value}
            del memory
        value = int(rng.integers(256))
        memory = pool.take(size)
        memory.write(0, np.full(size, value, np.uint8))
        held.append((memory, value))
        assert pool.held_bytes <= limit
    assert all(set(memory.tobytes()) <= {value} for memory, value in held)
    assert sum(system.sizes) <= limit


def test_where_there_is_no_memory_nothing_is_lost() -> None:
    system = System()
    pool = pool_of(10 * MB, system)
    kept = pool.take(MB // 2)
    system.most = 0
    with pytest.raises(CapacityError, match="no memory"):
        pool.take(2 * MB)
    assert pool.used_bytes == kept.nbytes
    again = pool.take(MB // 2)
    assert pool.used_bytes == kept.nbytes + again.nbytes


def test_threads_never_share_memory() -> None:
    pool = pool_of(MB)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            memory = pool.take(5000)
            [part] = memory.parts
            part[:] = number
            if (part != number).any():
                wrong.append(number)
            del part, memory

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert pool.used_bytes == 0


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="limit is -1"):
        PinnedPool(System().make, -1)
    with pytest.raises(ArgumentError, match="nbytes is -1"):
        PinnedPool(System().make, 1).take(-1)
    assert PinnedPool(System().make, 0).take(0).nbytes == 0
    assert PinnedPool(System().make, 0).take(5).nbytes == 5


# --- bytes in parts ------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [3], [3, 3, 9], [0, 16]])
def test_parts_are_numbered_through(cuts: list[int]) -> None:
    whole = np.arange(16, dtype=np.uint8)
    memory = HostMemory(np.split(whole.copy(), cuts))
    assert (memory.nbytes, memory.tobytes()) == (16, whole.tobytes())
    assert memory.tobytes(2, 9) == whole[2:11].tobytes()
    assert b"".join(part.tobytes() for _, part in memory.spans(5, 11)) == whole[5:].tobytes()
    memory.write(2, np.full(9, 7, np.uint8))
    memory.clear(10, 3)
    expected = whole.copy()
    expected[2:11], expected[10:13] = 7, 0
    assert memory.tobytes() == expected.tobytes()
    assert memory.holds(2, expected[2:14])
    assert not memory.holds(1, expected[2:14])
    assert memory.equals(HostMemory.of(expected))
    expected[15] += 1
    assert not memory.equals(HostMemory.of(expected))
    assert not memory.equals(HostMemory.of(expected[:15]))
