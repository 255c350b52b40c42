"""Grouped GEMMs on the emulated device: float64 products within the bounds of the GPU's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.device import Device, Schedule
from problem_util import BOUNDS, assert_close, bits_of, random_values

from cupylora import ops
from cupylora.dtypes import resolve_dtype
from cupylora.worklists import GemmProblems

pytestmark = pytest.mark.emulated

DTYPES = tuple(BOUNDS)
PROGRAMS = ("gemm_tiles", "gemm_bfloat16", "gemm_float16", "gemm_f32")
SIZES = [
    (1, 16, 64),
    (70, 131, 100),
    (0, 64, 64),
    (17, 40, 264),
    (5, 0, 32),
    (3, 40, 0),
    (8, 101, 72),
]


class Problems:
    """A list of problems on the device, and its operands on the host."""

    def __init__(
        self,
        device: Device,
        sizes: list[tuple[int, int, int]],
        dtype: str,
        out_dtype: str,
        shift: int,
    ) -> None:
        rng = np.random.default_rng(10)
        count = len(sizes)
        self.alpha = np.linspace(0.5, 1.5, count, dtype=np.float32)
        self.operands, self.outputs = [], []
        columns: dict[str, list[int]] = {name: [] for name in "abd"}
        for m, n, k in sizes:
            a = random_values(rng, (m, k), dtype)
            b = random_values(rng, (n, k), dtype, max(1, k) ** -0.5)
            d = random_values(rng, (m, n), out_dtype)
            here = device.array(d, once=True, shift=shift)
            self.operands.append((a, b, d))
            self.outputs.append(here)
            columns["a"].append(device.weights(a, shift))
            columns["b"].append(device.weights(b, shift))
            columns["d"].append(int(here.data.ptr))
        m, n, k = (np.array(side, np.int32) for side in zip(*sizes, strict=True))
        pointers = (np.array(columns[name], np.uint64) for name in "abd")
        strides = (side.astype(np.int64) for side in (k, k, n))
        lists = (m, n, k, *pointers, *strides, self.alpha, np.array([count], np.int32))
        self.list = device.upload(GemmProblems(*lists))

    def check(self, dtype: str, beta: int) -> None:
        each = zip(self.operands, self.outputs, self.alpha, strict=True)
        for (a, b, d), here, alpha in each:
            got = here.get()
            if a.shape[1] == 0:
                assert (got == (d if beta else np.zeros_like(d))).all()
                continue
            want = float(alpha) * (a.astype(np.float64) @ b.astype(np.float64).T)
            assert_close(got, want + beta * d.astype(np.float64), BOUNDS[dtype])


@pytest.mark.parametrize("max_m", [None, 16, 256])
@pytest.mark.parametrize(("beta", "shift"), [(0, 0), (1, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm(
    dtype: str, beta: int, shift: int, max_m: int | None, emulated: Device
) -> None:
    emulated.schedule = Schedule(beta, pause=500)
    problems = Problems(emulated, SIZES, dtype, dtype, shift)
    ops.grouped_gemm(problems.list, dtype=dtype, beta=beta, max_m=max_m)
    problems.check(dtype, beta)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_grouped_gemm_into_float32(dtype: str, emulated: Device) -> None:
    for max_m in (16, 64):
        problems = Problems(emulated, [(16, 70, 392), (1, 16, 200)], dtype, "float32", 0)
        ops.grouped_gemm(problems.list, dtype=dtype, out_dtype="float32", max_m=max_m)
        problems.check("float32", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_problem(dtype: str, emulated: Device) -> None:
    rng = np.random.default_rng(12)
    a, b = random_values(rng, (70, 200), dtype), random_values(rng, (72, 200), dtype)
    one = np.ones(1, np.int64)
    results: list[Any] = []
    for rows, max_m in ((70, None), (64, 64), (9, 16), (1, 16)):
        d = emulated.array(np.zeros((rows, 72), resolve_dtype(dtype)), once=True)
        pointers = (emulated.weights(a[:rows]), emulated.weights(b), int(d.data.ptr))
        problems = GemmProblems(
            *(np.array([v], np.int32) for v in (rows, 72, 200)),
            *(np.array([v], np.uint64) for v in pointers),
            one * 200,
            one * 200,
            one * 72,
            np.ones(1, np.float32),
            np.ones(1, np.int32),
        )
        ops.grouped_gemm(emulated.upload(problems), dtype=dtype, max_m=max_m)
        results.append(d.get())
    for result in results[1:]:
        assert (bits_of(result) == bits_of(results[0][: len(result)])).all()
