"""Argument checks and dtype names: what is wrong, with which argument, and what is needed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupylora.checks import (
    INT32,
    check_array,
    check_choice,
    check_int,
    check_max_loras,
    check_number,
    check_routing,
    check_slices,
    check_status,
    is_on_device,
)
from cupylora.dtypes import BFLOAT16, DTYPES, dtype_name, resolve_dtype
from cupylora.errors import ArgumentError, CupyloraError
from cupylora.worklists import LoraSlice


class _Flags:
    c_contiguous = True


class _DeviceArray:
    """What a device array looks like from outside."""

    flags = _Flags()

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AssertionError("the data must not be asked for")


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ([1, 2], {}, "thing is a list; a NumPy or CuPy array is needed"),
        (np.zeros(2), {"dtype": INT32}, "thing has dtype float64; int32 is needed"),
        (
            np.zeros(2),
            {"dtype": (INT32, BFLOAT16)},
            "thing has dtype float64; int32 or bfloat16 is needed",
        ),
        (np.zeros((2, 3)), {"shape": (None, 4)}, r"thing has shape \(2, 3\); \[\*, 4\] is needed"),
        (np.zeros(6), {"shape": (2, 3)}, r"thing has shape \(6,\); \[2, 3\] is needed"),
        (np.zeros((2, 3)).T, {}, r"thing of shape \(3, 2\) is not C-contiguous"),
        (np.broadcast_to(np.zeros(1), 1), {"writable": True}, "thing is read-only"),
        (np.zeros(2), {"on_device": True}, "thing is a host array; a device array is needed"),
        (_DeviceArray((2,), "f4"), {"on_device": False}, r"thing is a device array; a host \(Num"),
        (_DeviceArray((2,), "f4"), {"shape": (3,)}, r"thing has shape \(2,\); \[3\]"),
    ],
)
def test_check_array_says_what_is_wrong(value: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        check_array("thing", value, **options)
    assert isinstance(caught.value, CupyloraError | ValueError)


def test_check_array_takes_sound_arrays_of_both_kinds() -> None:
    host, device = np.zeros((2, 3), np.int32), _DeviceArray((2, 3), np.int32)
    assert is_on_device(device)
    assert not is_on_device(host)
    for value in (host, device):
        check_array("thing", value, dtype=INT32, shape=(None, 3), writable=True)
    check_array("thing", host, on_device=False)
    check_array("thing", device, on_device=True)
    check_array("thing", host.T, contiguous=False)


def test_check_int_and_choice() -> None:
    assert check_int("n", np.int64(3), 0, 3) == 3
    for value, message in (
        (4, "n is 4; 0 to 3 is needed"),
        (-1, "n is -1; 0 to 3"),
        (1.0, r"n is 1\.0; an integer"),
        (True, "n is True; an integer"),
        ("1", "n is '1'; an integer"),
    ):
        with pytest.raises(ArgumentError, match=message):
            check_int("n", value, 0, 3)
    with pytest.raises(ArgumentError, match="n is 1; at least 2"):
        check_int("n", 1, 2)
    with pytest.raises(ArgumentError, match="by is 'col'; use one of 'pair', 'row'"):
        check_choice("by", "col", ("pair", "row"))


def test_work_lists_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(ArgumentError, match="routing is a dict; a Routing is needed"):
        check_routing({})
    with pytest.raises(ArgumentError, match=r"status has shape \(2,\); \[1\]"):
        check_status(np.zeros(2, np.int32))
    check_status(None)


def test_slices_may_interleave_but_not_overlap() -> None:
    check_slices([LoraSlice(4, 0, 2), LoraSlice(4, 1, 2), LoraSlice(2, 8)], 10)
    with pytest.raises(ArgumentError, match=r"slices\[1\] shares"):
        check_slices([LoraSlice(4, 0, 2), LoraSlice(4, 2, 2)], 10)
    with pytest.raises(ArgumentError, match=r"slices\[0\]\.y_stride is 0"):
        check_slices([LoraSlice(4, 0, 0)], 10)


def test_dtype_names_both_ways() -> None:
    for name, dtype in DTYPES.items():
        assert resolve_dtype(name) == resolve_dtype(dtype) == resolve_dtype(dtype.type) == dtype
        assert dtype_name(dtype) == name
    assert resolve_dtype(ml_dtypes.bfloat16).itemsize == 2
    for wrong in ("float64", "bf16", None, np.int32, 7):
        with pytest.raises(ArgumentError, match="use one of bfloat16, float16, float32"):
            resolve_dtype(wrong, "out_dtype")


def test_the_reference_needs_neither_cupy_nor_cuda() -> None:
    code = (
        "import sys, pkgutil, importlib, cupylora.reference as r\n"
        "for m in pkgutil.iter_modules(r.__path__):\n"
        "    importlib.import_module(f'{r.__name__}.{m.name}')\n"
        "sys.exit(any(n.split('.')[0] in ('cupy', 'cuda', 'torch', 'scipy') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_slices_share_no_column() -> None:
    check_slices([LoraSlice(4, 0, 2), LoraSlice(4, 1, 2)], 8)
    check_slices([LoraSlice(2**30, 0), LoraSlice(1, 2**30)], 2**31)
    for parts in (
        [LoraSlice(4, 0), LoraSlice(4, 3)],
        [LoraSlice(4, 0, 2), LoraSlice(2, 2, 2)],
        [LoraSlice(3, 0, 2), LoraSlice(3, 0, 3)],
        [LoraSlice(8, 0), LoraSlice(1, 5, 7)],
    ):
        with pytest.raises(ArgumentError, match="shares columns"):
            check_slices(parts, 64)
    with pytest.raises(ArgumentError, match="int; a LoraSlice is needed"):
        check_slices([5], 64)  # type: ignore[list-item]


@pytest.mark.parametrize("value", [0, 4097, 2**60, 1.5, True])
def test_number_of_slots_is_bounded(value: Any) -> None:
    with pytest.raises(ArgumentError, match="max_loras"):
        check_max_loras(value)


@pytest.mark.parametrize("value", [None, "a", float("nan"), float("inf"), True, 10**400, 1e39])
def test_numbers_must_be_finite(value: Any) -> None:
    with pytest.raises(ArgumentError, match="alpha is"):
        check_number("alpha", value)


def test_choices_are_not_compared_with_arrays() -> None:
    with pytest.raises(ArgumentError, match="kind is array"):
        check_choice("kind", np.zeros(2), ("silu",))
