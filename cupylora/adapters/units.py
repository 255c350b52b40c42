"""From tensors of a file to factors: which tensors make a module's A and B, and how.

``assembly`` plans :class:`Unit`s of the headers alone; ``Unit.build`` makes of the tensors the one
form the rest of the package knows, A [experts, rank, in] and B [experts, out, rank]. ``inspection``
shows the same plan and never builds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.names import Key, first_name
from cupylora.adapters.safetensors_file import TensorInfo
from cupylora.errors import AdapterFormatError
from cupylora.shapes import ModuleShape, MoeShape
from cupylora.text import shown

__all__ = [
    "Group",
    "Pair",
    "StackedOrder",
    "Unit",
    "a_dtype",
    "check_finite",
    "common_dtype",
    "common_dtype_of",
    "groups_of",
    "is_stacked",
    "scaled",
    "single",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """A and B of one place: what their headers say, and the alpha the file keeps beside them."""

    key: Key
    path: str
    a_name: str
    b_name: str
    a: TensorInfo
    b: TensorInfo
    alpha: float | None = None

    @property
    def where(self) -> str:
        """For messages: both tensors."""
        both = ((self.a_name, self.a), (self.b_name, self.b))
        return " and ".join(f"{shown(name)} {list(info.shape)}" for name, info in both)


@dataclass(frozen=True)
class Group:
    """What a pair adapts: its name in models, its features, and the modules its B splits into."""

    name: str
    in_features: int
    out_features: int
    splits: tuple[tuple[str, slice], ...]


def single(module: ModuleShape) -> Group:
    """A module that is adapted by itself."""
    return Group(
        module.name, module.in_features, module.out_features, ((module.name, slice(None)),)
    )


def groups_of(moe: MoeShape) -> tuple[Group, Group]:
    """The first projection (gate and up as one, in the model's layout) and the second."""
    inner, every = moe.intermediate, slice(None)
    splits: tuple[tuple[str, slice], ...] = (("up_proj", every),)
    if moe.gated:
        low, high = slice(0, inner), slice(inner, None)
        gate, up = {
            "gate_first": (low, high),
            "up_first": (high, low),
            "interleaved": (slice(0, None, 2), slice(1, None, 2)),
        }[moe.gate_up_layout]
        splits = (("gate_proj", gate), ("up_proj", up))
    first = Group(first_name(moe), moe.hidden, moe.first_width, splits)
    return first, Group("down_proj", inner, moe.hidden, (("down_proj", every),))


@dataclass(frozen=True)
class StackedOrder:
    """How a file stacks experts. ``swapped``: its A holds the module's out features and its B the
    in features, so each gives the other. ``by_expert``: column e·r + j of B belongs to expert e,
    where peft has it in column j·E + e."""

    swapped: bool = False
    by_expert: bool = False


@dataclass(frozen=True, eq=False)
class Unit:
    """Pairs that become one A and, for each of ``group.splits``, one B of one layer.

    ``experts``: of the result (1: dense). ``ranks`` and ``scales``: by pair. ``order`` is that of
    stacked pairs; without it, a pair of two dimensions is one expert's, and one of three is the
    result.
    """

    layer: int
    group: Group
    experts: int
    pairs: tuple[Pair, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    order: StackedOrder | None = None

    @property
    def rank(self) -> int:
        """Of the result: the largest."""
        return max(self.ranks)

    @property
    def scale(self) -> float:
        """Of the result: the largest in magnitude; where experts differ, B holds the ratio."""
        return max(self.scales, key=abs)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules it gives factors to."""
        return tuple(name for name, _ in self.group.splits)

    @property
    def a_shape(self) -> tuple[int, int, int]:
        """Shape of the resulting A."""
        return self._experts_of("a"), self.rank, self.group.in_features

    def b_shape(self, rows: slice) -> tuple[int, int, int]:
        """Shape of the resulting B of the module that has these rows."""
        out = len(range(*rows.indices(self.group.out_features)))
        return self._experts_of("b"), out, self.rank

    def _experts_of(self, factor: str) -> int:
        shape = getattr(self.pairs[0], factor).shape
        return int(shape[0]) if len(shape) == 3 else self.experts

    def build(self, tensors: Mapping[str, Array]) -> tuple[Array, Array]:
        """A and B [experts, rank, in], [experts, out, rank], out being the whole group's.

        Raises AdapterFormatError where scales of experts lie too far apart for float32.
        """
        first = self.pairs[0]
        if self.order is not None:
            return _unstack(tensors[first.a_name], tensors[first.b_name], self.experts, self.order)
        if len(first.a.shape) == 3:
            return tensors[first.a_name], tensors[first.b_name]
        if self.experts == 1:
            return tensors[first.a_name][None], tensors[first.b_name][None]
        return self._stack(tensors)

    def _stack(self, tensors: Mapping[str, Array]) -> tuple[Array, Array]:
        """Experts by name, stacked; missing experts and ranks below the largest are zeros.

        Where scales differ, B is float32 and holds the ratio, with one rounding (the file's own
        type may not reach that far).
        """
        dtype = common_dtype_of(self)
        b_dtype = dtype if len(set(self.scales)) == 1 else np.dtype(np.float32)
        a = np.zeros(self.a_shape, dtype)
        b = np.zeros(self.b_shape(slice(None)), b_dtype)
        for pair, rank, own in zip(self.pairs, self.ranks, self.scales, strict=True):
            expert, values = pair.key.expert, tensors[pair.b_name]
            a[expert, :rank] = tensors[pair.a_name]
            same = own == self.scale
            b[expert, :, :rank] = values if same else scaled(pair.b_name, values, own, self.scale)
        return a, b


def scaled(name: str, values: Array, own: float, scale: float) -> Array:
    """``values`` of tensor ``name`` in float32, times own/scale.

    Raises AdapterFormatError where float32 cannot hold the product.
    """
    exact = values.astype(np.float64) * (own / scale)
    small = (np.abs(exact) < np.finfo(np.float32).tiny) & (values != 0)
    if own and small.any():
        raise AdapterFormatError(
            f"{shown(name)} has scale {own}, another expert of its module {scale}: too far apart "
            "for float32; bring their alphas closer (and multiply their B instead)"
        )
    return exact.astype(np.float32)


def common_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """The one dtype of all; float32, which holds the others exactly, where they differ."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else np.dtype(np.float32)


def common_dtype_of(unit: Unit) -> np.dtype[Any]:
    """The one dtype of a unit's tensors, as ``common_dtype`` says."""
    return common_dtype(info.dtype for pair in unit.pairs for info in (pair.a, pair.b))


def is_stacked(unit: Unit) -> bool:
    """Whether it is put together of one pair an expert."""
    return unit.order is None and unit.experts > 1 and len(unit.pairs[0].a.shape) == 2


def a_dtype(unit: Unit) -> np.dtype[Any]:
    """The dtype of the A that ``Unit.build`` makes."""
    return common_dtype_of(unit) if is_stacked(unit) else unit.pairs[0].a.dtype


def _unstack(a: Array, b: Array, experts: int, order: StackedOrder) -> tuple[Array, Array]:
    """A [E, r, in] and B [E, out, r] of stacked factors."""
    by_rows = a.reshape(experts, -1, a.shape[1])  # [E, r, features of A]
    if order.by_expert:
        by_columns = b.reshape(b.shape[0], experts, -1).transpose(0, 2, 1)
    else:
        by_columns = b.reshape(b.shape[0], -1, experts)  # [features of B, r, E]
    if order.swapped:
        return by_columns.transpose(2, 1, 0), by_rows.transpose(0, 2, 1)
    return by_rows, by_columns.transpose(2, 0, 1)


def check_finite(name: str, shape: tuple[int, ...], pieces: Iterable[Array]) -> None:
    """Raise AdapterFormatError if tensor ``name`` of ``shape``, given flat in ``pieces``, holds an
    infinity or NaN."""
    count, at, first, value = 0, 0, None, None
    for piece in pieces:
        bad = not_finite(piece)
        if bad.any():
            if first is None:
                here = int(bad.argmax())
                first, value = at + here, piece[here]
            count += int(bad.sum())
        at += piece.size
    if first is not None:
        place = [int(i) for i in np.unravel_index(first, shape)]
        raise AdapterFormatError(
            f"tensor {shown(name)} holds {count} values that are not finite, the first ({value}) "
            f"at {place}; the adapter is broken, save it again"
        )
