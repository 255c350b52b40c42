"""The packed layout of A: round trips, and the documented byte positions one by one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora.adapters.packing import chunk_elements, pack_a, unpack_a
from cupylora.errors import ArgumentError

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)]


def numbered(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Bit patterns that all differ (within 16 bits), so that a misplaced element shows."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.arange(np.prod(shape), dtype=np.uint64).astype(unsigned).reshape(shape).view(dtype)


def bits(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(1, 40),
    features=st.integers(1, 300),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from(DTYPES),
)
def test_round_trip(rank: int, features: int, lead: tuple[int, ...], dtype: np.dtype) -> None:
    a = numbered((*lead, rank, features), dtype)
    packed = pack_a(a)
    assert (packed.shape, packed.dtype, packed.nbytes) == (a.shape, a.dtype, a.nbytes)
    np.testing.assert_array_equal(bits(unpack_a(packed)), bits(a))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "features"), [(1, 1), (3, 101), (8, 128), (11, 200), (16, 64)])
def test_byte_positions(rank: int, features: int, dtype: np.dtype) -> None:
    """Every element is where the layout's text says, computed element by element."""
    a = numbered((2, rank, features), dtype)
    packed = bits(pack_a(a)).reshape(2, -1)
    size, width = dtype.itemsize, chunk_elements(dtype.itemsize)
    full = features // width
    for expert in range(2):
        for i in range(rank):
            for k in range(features):
                chunk, within = divmod(k, width)
                if chunk < full:
                    piece, rest = divmod(within * size, 16)
                    at = chunk * 128 * rank + i * 128 + (piece ^ (i & 7)) * 16 + rest
                else:
                    tail = features - full * width
                    at = full * 128 * rank + (i * tail + within) * size
                np.testing.assert_array_equal(
                    packed[expert, at : at + size], bits(a[expert, i, k : k + 1])
                )


def test_non_contiguous_input_and_nan_payloads_survive() -> None:
    a = numbered((64, 9), np.dtype(np.float32)).T
    a = a.copy().view(np.uint32) | np.uint32(0x7F800001)
    a = np.asfortranarray(a.view(np.float32))
    np.testing.assert_array_equal(bits(unpack_a(pack_a(a))), bits(a))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(8, np.float16), "shape"),
        (np.zeros((0, 8), np.float16), "shape"),
        (np.zeros((2, 8), np.float64), "itemsize is 8"),
    ],
)
def test_refusals(array: np.ndarray, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pack_a(array)
    with pytest.raises(ArgumentError, match=words):
        unpack_a(array)
