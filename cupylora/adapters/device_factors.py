"""Factors that are arrays on a backend already, as a training loop has them.

In: a :class:`FactorArrays` for each module that an adapter changes, checked here against model and
limits. Out: blocks of the arena, written by ``unpack_factors`` for ``SlotTable.store_arrays``.
Nothing passes through the host but one word, which says whether all values are finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora import ops
from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.factors import check_in_layer, check_rank, checked_scale
from cupylora.checks import INT32_MAX, check_array, check_type
from cupylora.errors import AdapterFormatError, ArgumentError
from cupylora.interop.convert import borrow
from cupylora.interop.kinds import is_own
from cupylora.reference.unpack_factors import MOST_PIECES, PIECE_ELEMENTS, SOURCE_TYPES
from cupylora.shapes import LoraLimits, ModelShape, ModuleShape
from cupylora.text import quoted, shown
from cupylora.worklists import FACTOR_PIECE, FACTOR_PIECE_BYTES

__all__ = [
    "FactorArrays",
    "borrow_factors",
    "check_arrays",
    "find_not_finite",
    "unpack_arrays",
]

Array = Any
"""A NumPy or CuPy array, or one of another library."""


@dataclass(frozen=True, eq=False)
class FactorArrays:
    """Factors of one module: a [E or 1, rank, in] and b [E or 1, out, rank], C-contiguous.

    Row-major, of the table's dtype and on its backend; a leading 1: shared by all experts. The same
    array in two modules is one copy in the arena. Raises ArgumentError for a scale that float32
    cannot hold.
    """

    a: Array
    b: Array
    scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", checked_scale(self.scale))


def borrow_factors(
    name: str, factors: Mapping[tuple[int, str], FactorArrays], *, on_device: bool
) -> dict[tuple[int, str], FactorArrays]:
    """``factors`` of adapter ``name`` with views of ours in place of other libraries' arrays.

    A mapping may make its values anew at every look: it is looked at once. An array that two
    modules share is one view. Raises ArgumentError naming it as ``borrow`` does.
    """
    views: dict[int, tuple[Array, Array]] = {}  # with what is viewed: ids are of what lives

    def ours(where: str, array: Array) -> Array:
        if id(array) not in views:
            views[id(array)] = (array, borrow(where, array, on_device=on_device))
        return views[id(array)][1]

    taken = {}
    for key, value in factors.items():
        if isinstance(value, FactorArrays) and not (is_own(value.a) and is_own(value.b)):
            where = f"adapter {shown(name)}, {quoted(key)}"
            a, b = ours(f"{where}: a", value.a), ours(f"{where}: b", value.b)
            value = FactorArrays(a, b, value.scale)
        taken[key] = value
    return taken


def check_arrays(
    name: str,
    factors: Mapping[tuple[int, str], FactorArrays],
    model: ModelShape,
    limits: LoraLimits,
    dtype: np.dtype[Any],
    *,
    on_device: bool,
) -> None:
    """Raise unless every module of adapter ``name`` fits.

    ArgumentError names a key or an array that is not as it must be, CapacityError a rank beyond
    ``limits.max_rank``.
    """
    modules = {module.name: module for module in model.modules}
    for key, value in factors.items():
        where = f"adapter {shown(name)}, {quoted(key)}"
        layer, module = key if isinstance(key, tuple) and len(key) == 2 else (None, None)
        if type(layer) is not int or not 0 <= layer < model.layers or module not in modules:
            raise ArgumentError(
                f"{where} is no (layer, module) of model {shown(model.name)}, which has "
                f"{model.layers} layers of {', '.join(modules)}"
            )
        check_in_layer(where, modules[module], layer, model)
        check_type(where, value, FactorArrays)
        rank = _check_pair(where, value, modules[module], dtype, on_device)
        check_rank(where, rank, limits)


def _check_pair(
    where: str, value: FactorArrays, module: ModuleShape, dtype: np.dtype[Any], on_device: bool
) -> int:
    """The rank of a pair that fits ``module``."""
    a_shape = (None, None, module.in_features)
    check_array(f"{where}: a", value.a, dtype=dtype, shape=a_shape, on_device=on_device)
    rank = int(value.a.shape[1])
    b_shape = (None, module.out_features, rank)
    check_array(f"{where}: b", value.b, dtype=dtype, shape=b_shape, on_device=on_device)
    for role, array in (("a", value.a), ("b", value.b)):
        if array.shape[0] not in (1, module.experts) or rank < 1:
            raise ArgumentError(
                f"{where}: {role} has shape {tuple(array.shape)}; {module.experts} (or 1) experts "
                "and a rank of at least 1 are needed"
            )
    return rank


def unpack_arrays(
    arrays: Sequence[Array],
    offsets: Sequence[int],
    target: Array,
    *,
    packed: Sequence[bool],
    xp: Any,
) -> None:
    """Write factors of one dtype, [experts, rows, columns] each, to blocks at bytes ``offsets`` of
    ``target``; packed: those whose rows are to be K-chunks (``adapters.packing``).

    Raises AdapterFormatError for a value that is not finite, once all is written.
    """
    if not arrays:
        return
    records = [
        _records(array, at, form) for array, at, form in zip(arrays, offsets, packed, strict=True)
    ]
    pieces = xp.asarray(np.concatenate(records).view(np.uint8).reshape(-1, FACTOR_PIECE_BYTES))
    fault = xp.zeros(1, np.int32)
    first = 0
    for array, own in zip(arrays, records, strict=True):
        for start in range(0, len(own), MOST_PIECES):
            count = min(MOST_PIECES, len(own) - start)
            ops.unpack_factors(
                array.reshape(-1).view(np.uint8),
                pieces[first : first + count],
                target,
                dtype=array.dtype,
                most_elements=PIECE_ELEMENTS,
                fault=fault,
            )
            first += count
    if int(fault[0]):
        raise AdapterFormatError("holds a value that is not finite")


def _records(array: Array, offset: int, packed: bool) -> npt.NDArray[np.void]:
    """What ``unpack_factors`` is to do with a whole array."""
    starts = np.arange(0, array.size, PIECE_ELEMENTS)
    made = np.zeros(len(starts), FACTOR_PIECE)
    for name, value in {
        "source": starts * array.dtype.itemsize,
        "first": starts,
        "target": offset,
        "count": np.minimum(PIECE_ELEMENTS, array.size - starts),
        "source_type": SOURCE_TYPES.index(array.dtype),
        "extent": array.shape,
        "axis": (0, 1, 2),
        "rows": array.shape[1],
        "columns": array.shape[2],
        "split": INT32_MAX,
        "packed": packed,
        "ratio": 1.0,
    }.items():
        made[name] = value
    return made


def find_not_finite(name: str, factors: Mapping[tuple[int, str], FactorArrays]) -> None:
    """Raise AdapterFormatError for the first factor that has a value that is not finite."""
    for key, value in factors.items():
        for role, array in (("a", value.a), ("b", value.b)):
            if not_finite(array).any():
                raise AdapterFormatError(
                    f"adapter {shown(name)}, {quoted(key)}: {role} holds a value that is not finite"
                )
