"""Host memory that is used again: within its limit, never the same memory for two at a time."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from cupylora.errors import ArgumentError, CapacityError
from cupylora.pinned import PinnedBuffers

MB = 1 << 20


class System:
    """Gives memory, and counts what it has given."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most, self.made = most, 0

    def make(self, size: int) -> Any:
        if size > self.most:
            raise CapacityError("no memory")
        self.made += 1
        return bytearray(size)


def test_memory_serves_the_next_of_its_size() -> None:
    system = System()
    buffers = PinnedBuffers(system.make, 10 * MB)
    first = buffers.take(MB)
    assert (first.dtype, first.shape, first.flags.writeable) == (np.uint8, (MB,), True)
    at = first.ctypes.data
    part = first[100:200]
    del first
    assert buffers.used_bytes == MB  # a view still has it
    del part
    gc.collect()
    assert (buffers.used_bytes, buffers.idle_bytes) == (0, MB)
    again = buffers.take(MB - 1000)  # of the same class
    assert again.ctypes.data == at
    assert len(again) == MB - 1000
    other = buffers.take(MB)
    assert other.ctypes.data != at
    assert system.made == 2


def test_what_nobody_has_goes_before_the_limit_is_passed() -> None:
    system = System()
    buffers = PinnedBuffers(system.make, 3 * MB)
    small = [buffers.take(MB) for _ in range(2)]
    small.clear()
    gc.collect()
    assert buffers.idle_bytes == 2 * MB
    large = buffers.take(2 * MB)
    assert (buffers.used_bytes, buffers.idle_bytes) == (2 * MB, 0)
    more = buffers.take(2 * MB)  # what is in use is not limited here
    assert buffers.used_bytes == 4 * MB
    del more
    gc.collect()
    assert (buffers.used_bytes, buffers.idle_bytes) == (2 * MB, 0)
    assert large.sum() >= 0


def test_sizes_of_all_kinds_keep_within_the_limit() -> None:
    buffers = PinnedBuffers(System().make, 4 * MB)
    rng = np.random.default_rng(0)
    held: list[Any] = []
    for size in rng.integers(0, MB, 3000).tolist():
        held.append(buffers.take(size))
        if len(held) > 2:
            held.pop(int(rng.integers(3)))
        assert buffers.used_bytes + buffers.idle_bytes <= 4 * MB


def test_where_there_is_no_memory_what_is_kept_goes_first() -> None:
    system = System()
    buffers = PinnedBuffers(system.make, 10 * MB)
    del (kept := [buffers.take(MB)])[:]
    assert not kept
    gc.collect()
    tries: list[int] = []

    def make(size: int) -> Any:
        tries.append(buffers.idle_bytes)
        if len(tries) == 1:
            raise CapacityError("no memory")
        return bytearray(size)

    buffers._make = make
    buffers.take(2 * MB)
    assert tries == [MB, 0]
    system.most = 0
    buffers._make = system.make
    with pytest.raises(CapacityError, match="no memory"):
        buffers.take(3 * MB)


def test_threads_never_share_memory() -> None:
    buffers = PinnedBuffers(System().make, 8 * MB)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            buffer = buffers.take(5000)
            buffer[:] = number
            if (buffer != number).any():
                wrong.append(number)
            del buffer

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert buffers.used_bytes == 0


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="limit is -1"):
        PinnedBuffers(System().make, -1)
    with pytest.raises(ArgumentError, match="nbytes is -1"):
        PinnedBuffers(System().make, 1).take(-1)
    assert len(PinnedBuffers(System().make, 0).take(0)) == 0
