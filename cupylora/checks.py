"""Argument checks that the NumPy ops and the device ops share.

An array is judged by its attributes alone (dtype, shape, flags, ``__cuda_array_interface__``), so
that nothing here needs CuPy. ``on_device`` says where an array must be: False host, True device,
None anywhere. Every failure is an ArgumentError that names the argument, what it got and what is
needed, raised before anything is written.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from cupylora.dtypes import DTYPES
from cupylora.errors import ArgumentError
from cupylora.shapes import MAX_EXPERTS, MAX_LORAS
from cupylora.worklists import (
    MAX_ROWS,
    SLOT_ENTRY_BYTES,
    TILE_INTS,
    TILE_ROWS,
    GemmProblems,
    LoraSlice,
    Routing,
    RowLora,
    Segments,
    TokenLora,
)

__all__ = [
    "FLOATS",
    "INT32",
    "INT32_MAX",
    "INT64",
    "UINT64",
    "check_array",
    "check_choice",
    "check_gemm_problems",
    "check_int",
    "check_max_loras",
    "check_number",
    "check_routing",
    "check_row_lora",
    "check_segments",
    "check_slices",
    "check_slot_entries",
    "check_slots_fit",
    "check_status",
    "check_tile_rows",
    "check_token_lora",
    "check_type",
    "is_on_device",
]

INT32, INT64, UINT64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint64)
UINT8, FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
INT32_MAX, FLOAT32_MAX = int(np.iinfo(np.int32).max), float(np.finfo(np.float32).max)
FLOATS: tuple[np.dtype[Any], ...] = tuple(DTYPES.values())
"""The element types of weights and activations."""

_FIT = "_checked_on_device"
"""Set in a work list's dict once its arrays were found fit, to where they are: a frozen bundle
stays so, and layers hand one list to many calls."""

Shape = Sequence[int | None]
DtypeSpec = np.dtype[Any] | tuple[np.dtype[Any], ...]


def is_on_device(value: Any) -> bool:
    """Whether ``value`` is a device array: it offers ``__cuda_array_interface__``."""
    return hasattr(type(value), "__cuda_array_interface__")


def check_array(
    name: str,
    value: Any,
    *,
    dtype: DtypeSpec | None = None,
    shape: Shape | None = None,
    contiguous: bool = True,
    writable: bool = False,
    on_device: bool | None = None,
) -> None:
    """Check one array: ``dtype`` (one or several allowed), ``shape`` (None: any extent; a shape of
    None: any), C-contiguity unless ``contiguous`` is False, writability, and where it is."""
    try:
        got_dtype, got_shape, flags = value.dtype, value.shape, value.flags
    except AttributeError:
        raise ArgumentError(
            f"{name} is a {type(value).__name__}; a NumPy or CuPy array is needed, or another "
            "library's with __dlpack__ or __cuda_array_interface__"
        ) from None
    # Written out rather than called: checks are most of what a call costs the host.
    if on_device is not None and hasattr(type(value), "__cuda_array_interface__") != on_device:
        needed, got = ("a device", "host") if on_device else ("a host (NumPy)", "device")
        raise ArgumentError(f"{name} is a {got} array; {needed} array is needed")
    if dtype is not None and got_dtype is not dtype:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if got_dtype not in allowed:
            needed = " or ".join(str(d) for d in allowed)
            raise ArgumentError(f"{name} has dtype {got_dtype}; {needed} is needed")
    if shape is not None and got_shape != shape and not _fits(got_shape, shape):
        raise ArgumentError(f"{name} has shape {tuple(got_shape)}; {_words(shape)} is needed")
    if contiguous and not flags.c_contiguous:
        raise ArgumentError(
            f"{name} of shape {tuple(got_shape)} is not C-contiguous; pass a contiguous copy"
        )
    if writable and not getattr(flags, "writeable", True):
        raise ArgumentError(f"{name} is read-only; a writable array is needed")


def _fits(got: Sequence[int], needed: Shape) -> bool:
    if len(got) != len(needed):
        return False
    for extent, wanted in zip(got, needed, strict=True):  # a loop: all() takes twice as long
        if wanted is not None and extent != wanted:
            return False
    return True


def _words(shape: Shape) -> str:
    return "[" + ", ".join("*" if n is None else str(n) for n in shape) + "]"


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int (bool refused), from ``low`` to ``high`` (None: no upper bound)."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} is {value!r}; an integer is needed")
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise ArgumentError(f"{name} is {number}; {bounds} is needed")
    return number


def check_type(name: str, value: Any, kind: type) -> None:
    """``value`` must be a ``kind``."""
    if not isinstance(value, kind):
        needed = kind.__name__
        article = "an" if needed[0] in "AEIOU" else "a"
        raise ArgumentError(f"{name} is a {type(value).__name__}; {article} {needed} is needed")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """``value`` must be one of ``choices``."""
    if type(value) is str and type(choices) is tuple and value in choices:
        return
    known = tuple(choices)
    # An array would be compared element by element.
    if not isinstance(value, Hashable) or value not in known:
        raise ArgumentError(f"{name} is {value!r}; use one of {', '.join(map(repr, known))}")


def check_number(name: str, value: Any) -> float:
    """``value`` as a float (bool refused) that is finite as a float32."""
    try:
        number = float(value) if not isinstance(value, str | bytes | bool | np.bool_) else np.nan
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not abs(number) <= FLOAT32_MAX:
        raise ArgumentError(f"{name} is {value!r}; a finite number is needed")
    return number


def check_max_loras(max_loras: Any) -> int:
    """Number of slots: 1 to MAX_LORAS, so that sort keys of (expert, slot) fit 32 bits."""
    return check_int("max_loras", max_loras, 1, MAX_LORAS)


def check_tile_rows(tile_rows: Any) -> int:
    """Rows a tile may hold: one of TILE_ROWS."""
    check_choice("tile_rows", tile_rows, TILE_ROWS)
    return int(tile_rows)


def check_status(status: Any, *, on_device: bool | None = None) -> None:
    """The error-flag word: None, or a writable int32 [1]."""
    if status is not None:
        check_array("status", status, dtype=INT32, shape=(1,), writable=True, on_device=on_device)


def check_routing(routing: Any, *, on_device: bool | None = None, name: str = "routing") -> None:
    """Array dtypes and shapes of a Routing, and its sizes."""
    check_type(name, routing, Routing)
    if vars(routing).get(_FIT) == on_device is not None:
        return
    check_int(f"{name}.num_tokens", routing.num_tokens, 0)
    check_int(f"{name}.top_k", routing.top_k, 1)
    check_int(f"{name}.num_rows", routing.num_rows, 0, MAX_ROWS)
    check_int(f"{name}.num_experts", routing.num_experts, 1, MAX_EXPERTS)
    check_int(f"{name}.start_expert", routing.start_expert, 0, INT32_MAX)
    check_choice(f"{name}.row_order", routing.row_order, ("token_major", "k_major"))
    rows = (routing.num_rows,)
    for field, dtype, shape in (
        ("row_to_pair", INT32, rows),
        ("pair_to_row", INT32, rows),
        ("expert_first_token_offset", INT64, (routing.num_experts + 1,)),
    ):
        value = getattr(routing, field)
        check_array(f"{name}.{field}", value, dtype=dtype, shape=shape, on_device=on_device)
    vars(routing)[_FIT] = on_device


def check_segments(segments: Any, *, on_device: bool | None = None, name: str = "segments") -> None:
    """Array dtypes and shapes of a Segments list."""
    check_type(name, segments, Segments)
    if vars(segments).get(_FIT) == on_device is not None:
        return
    check_tile_rows(segments.tile_rows)
    check_max_loras(segments.max_loras)
    check_array(f"{name}.expert", segments.expert, dtype=INT32, shape=(None,), on_device=on_device)
    capacity = segments.expert.shape[0]
    for field, shape in (
        ("start", (capacity + 1,)),
        ("slot", (capacity,)),
        ("count", (1,)),
        ("tiles", (None, TILE_INTS)),
        ("tile_count", (1,)),
    ):
        value = getattr(segments, field)
        check_array(f"{name}.{field}", value, dtype=INT32, shape=shape, on_device=on_device)
    vars(segments)[_FIT] = on_device


def check_token_lora(
    tokens: Any, num_tokens: int, *, on_device: bool | None = None, name: str = "tokens"
) -> int:
    """Check a TokenLora over ``num_tokens`` tokens; returns its number of modules M."""
    check_type(name, tokens, TokenLora)
    check_array(
        f"{name}.rank", tokens.rank, dtype=INT32, shape=(None, num_tokens), on_device=on_device
    )
    modules = int(tokens.rank.shape[0])
    for field, dtype in (
        ("a_ptr", UINT64),
        ("b_ptr", UINT64),
        ("a_stride", INT64),
        ("b_stride", INT64),
        ("scale", FLOAT32),
    ):
        value, shape = getattr(tokens, field), (modules, num_tokens)
        check_array(f"{name}.{field}", value, dtype=dtype, shape=shape, on_device=on_device)
    return modules


def check_row_lora(
    rows: Any, num_rows: int, *, on_device: bool | None = None, name: str = "rows"
) -> int:
    """Check a RowLora over ``num_rows`` rows; returns its number of modules M."""
    check_type(name, rows, RowLora)
    for field in ("token", "expert"):
        value = getattr(rows, field)
        check_array(f"{name}.{field}", value, dtype=INT32, shape=(num_rows,), on_device=on_device)
    check_array(f"{name}.rank", rows.rank, dtype=INT32, shape=(None, num_rows), on_device=on_device)
    modules = int(rows.rank.shape[0])
    for field, dtype in (("a_ptr", UINT64), ("b_ptr", UINT64), ("scale", FLOAT32)):
        value, shape = getattr(rows, field), (modules, num_rows)
        check_array(f"{name}.{field}", value, dtype=dtype, shape=shape, on_device=on_device)
    return modules


_GEMM_FIELDS = (
    ("m", INT32),
    ("n", INT32),
    ("k", INT32),
    ("a", UINT64),
    ("b", UINT64),
    ("d", UINT64),
    ("lda", INT64),
    ("ldb", INT64),
    ("ldd", INT64),
    ("alpha", FLOAT32),
)


def check_gemm_problems(
    problems: Any, *, on_device: bool | None = None, name: str = "problems"
) -> int:
    """Check a GemmProblems list's arrays; returns its capacity P."""
    check_type(name, problems, GemmProblems)
    check_array(f"{name}.m", problems.m, dtype=INT32, shape=(None,), on_device=on_device)
    capacity = int(problems.m.shape[0])
    for field, dtype in _GEMM_FIELDS:
        value = getattr(problems, field)
        check_array(f"{name}.{field}", value, dtype=dtype, shape=(capacity,), on_device=on_device)
    check_array(f"{name}.count", problems.count, dtype=INT32, shape=(1,), on_device=on_device)
    return capacity


def check_slot_entries(
    name: str, value: Any, *, modules: int | None = None, on_device: bool | None = None
) -> tuple[int, int]:
    """Check slot-table bytes uint8 [modules, max_loras, 48]; returns (modules, max_loras)."""
    check_array(
        name, value, dtype=UINT8, shape=(modules, None, SLOT_ENTRY_BYTES), on_device=on_device
    )
    if value.shape[1] < 1:
        raise ArgumentError(f"{name} has shape {tuple(value.shape)}; room for a slot is needed")
    return int(value.shape[0]), int(value.shape[1])


def check_slots_fit(segments: Segments, max_loras: int) -> None:
    """A table of ``max_loras`` slots can be looked up by the slots of ``segments``."""
    if segments.max_loras > max_loras:
        raise ArgumentError(
            f"segments were built for {segments.max_loras} slots; entries have {max_loras}"
        )


_MOST_FITTING = 1024
_fitting: dict[int, tuple[tuple[LoraSlice, ...], int]] = {}
"""Slices that were found to fit y's width, by their id; kept, so that no other has it. A layer
gives the same tuple to each call."""


def check_slices(slices: Sequence[LoraSlice], width: int, name: str = "slices") -> None:
    """Every slice's columns lie within the ``width`` columns of y, and no two slices share one."""
    found, fits = _fitting.get(id(slices), (None, 0))
    if found is slices and fits == width:
        return
    if not slices:
        raise ArgumentError(f"{name} is empty; at least one LoraSlice is needed")
    ranges: list[range] = []
    for index, part in enumerate(slices):
        label = f"{name}[{index}]"
        check_type(label, part, LoraSlice)
        out = check_int(f"{label}.out_features", part.out_features, 1, INT32_MAX)
        first = check_int(f"{label}.y_column", part.y_column, 0, INT32_MAX)
        step = check_int(f"{label}.y_stride", part.y_stride, 1, INT32_MAX)
        columns = range(first, first + (out - 1) * step + 1, step)
        if columns[-1] >= width:
            raise ArgumentError(f"{label} ends at column {columns[-1]}; y has {width} columns")
        if any(_share_a_column(columns, taken) for taken in ranges):
            raise ArgumentError(f"{label} shares columns of y with an earlier slice")
        ranges.append(columns)
    if type(slices) is tuple:
        if len(_fitting) >= _MOST_FITTING:
            _fitting.clear()
        _fitting[id(slices)] = slices, width


def _share_a_column(a: range, b: range) -> bool:
    if a[-1] < b.start or b[-1] < a.start:
        return False
    if a.step == b.step:
        return (a.start - b.start) % a.step == 0
    return any(column in a for column in b)
