"""The kernel that brings tensors of files into the arena, on the emulated device: as its twin."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator.device import Device, Schedule

from cupylora import ops, reference
from cupylora.dtypes import DTYPES
from cupylora.worklists import FACTOR_PIECE, FACTOR_PIECE_BYTES

pytestmark = pytest.mark.emulated

PROGRAMS = ("unpack",)
SOURCES = (ml_dtypes.bfloat16, np.float16, np.float32)
NO_SPLIT = 2**31 - 1


def values(rng: np.random.Generator, count: int, kind: Any) -> np.ndarray:
    """Of all magnitudes that float16 holds, numbers below its normal ones among them."""
    exponents = rng.integers(-20, 12, count)
    return (rng.standard_normal(count) * 2.0**exponents).astype(kind)


def record(**fields: Any) -> np.ndarray:
    piece = np.zeros(1, FACTOR_PIECE)
    for name, value in {"split": NO_SPLIT, "axis": (0, 1, 2), "ratio": 1.0, **fields}.items():
        piece[name] = value
    return piece


def run(device: Device, source: np.ndarray, pieces: np.ndarray, size: int, dtype: str) -> int:
    """The fault that kernel and twin report, having compared what they write."""
    records = pieces.view(np.uint8).reshape(-1, FACTOR_PIECE_BYTES)
    options = {"dtype": DTYPES[dtype], "most_elements": int(pieces["count"].max())}
    wanted, fault = np.full(size, 0xA5, np.uint8), np.zeros(1, np.int32)
    reference.unpack_factors(source, records, wanted, fault=fault, **options)
    target = device.array(np.full(size, 0xA5, np.uint8), once=True)
    word = device.array(np.zeros(1, np.int32), writable=True, late=False, by_anyone=True)
    place = device.array(source, late=False)
    ops.unpack_factors(place, device.array(records, late=False), target, fault=word, **options)
    assert word.get()[0] == fault[0]
    if not fault[0]:  # else the bytes are of no use: NaNs come in many forms
        np.testing.assert_array_equal(target.get(), wanted)
    return int(fault[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("packed", [False, True])
def test_orders_and_splits(packed: bool, kind: Any, dtype: str, emulated: Device) -> None:
    """Every order of the axes, whole and split, cut into pieces at odd places."""
    emulated.schedule = Schedule(3)
    rng = np.random.default_rng(0)
    lengths = {0: 3, 1: 10, 2: 70}
    itemsize = DTYPES[dtype].itemsize
    orders = [(0, 1, 2), (1, 2, 0), (1, 0, 2), (0, 2, 1), (2, 1, 0), (2, 0, 1)]
    for axis, (split, interleaved) in product(orders, [(NO_SPLIT, 0), (5, 0), (NO_SPLIT, 1)]):
        extent = [lengths[a] for a in axis]
        total = math.prod(extent)
        rows = lengths[1] if split == NO_SPLIT and not interleaved else lengths[1] // 2
        block = lengths[0] * rows * lengths[2] * itemsize
        cuts = [0, 1, 701, total]
        source = values(rng, total, kind).view(np.uint8)
        start = 2  # the tensor lies on two bytes only
        parts = [
            record(
                source=start + first * np.dtype(kind).itemsize,
                first=first,
                target=(0, block),
                count=last - first,
                source_type=SOURCES.index(kind),
                extent=extent,
                axis=axis,
                rows=rows,
                columns=lengths[2],
                split=split,
                interleaved=interleaved,
                packed=packed,
            )
            for first, last in pairwise(cuts)
        ]
        shifted = np.concatenate([np.zeros(start, np.uint8), source])
        fault = run(emulated, shifted, np.concatenate(parts), 2 * block, dtype)
        assert fault == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_from_a_base_with_ratios(dtype: str, emulated: Device) -> None:
    rng = np.random.default_rng(1)
    itemsize, rank, columns, count = DTYPES[dtype].itemsize, 4, 40, 3 * 40
    block = 3 * rank * columns * itemsize
    source = values(rng, 2 * count, np.float32)
    parts = [
        record(
            source=4 * i * count,
            target=(0, 0),
            count=count,
            source_type=2,
            extent=(1, 3, columns),
            expert=expert,
            rows=rank,
            columns=columns,
            ratio=ratio,
        )
        for i, (expert, ratio) in enumerate([(2, 1 / 3), (0, -0.75)])
    ]
    fault = run(emulated, source.view(np.uint8), np.concatenate(parts), block, dtype)
    assert fault == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "ratio"),
    [(np.nan, 1.0), (np.inf, 1.0), (-np.inf, 0.5), (1e-30, 1e-30), (3e38, 4.0), (7e4, 1.0)],
)
def test_faults(value: float, ratio: float, dtype: str, emulated: Device) -> None:
    source = np.ones(5000, np.float32)
    source[4999] = value
    piece = record(
        count=5000, source_type=2, extent=(1, 1, 5000), rows=1, columns=5000, ratio=ratio
    )
    fault = run(emulated, source.view(np.uint8), piece, 20_000, dtype)
    assert fault == (value != 7e4 or dtype == "float16")
