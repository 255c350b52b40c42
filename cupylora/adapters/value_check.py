"""Reading an adapter's values a piece at a time: what is wrong with them, and which A are equal.

``inspection`` calls ``check_values`` in place of a load: the same refusals (``units.check_finite``,
``units.scaled``, and values beyond the device's type), without holding any tensor whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.assembly import Report
from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.safetensors_file import WeightFiles
from cupylora.adapters.units import Unit, check_finite, common_dtype, scaled
from cupylora.errors import AdapterFormatError
from cupylora.text import shown

__all__ = ["a_marks", "check_values"]

Array = npt.NDArray[Any]
Digests = Mapping[str, bytes]

_PIECE = 4 << 20
_SHARING = ("gate_proj", "up_proj")
"""Modules whose A is kept once where they are equal."""


def check_values(
    weights: WeightFiles,
    names: Iterable[str],
    units: Sequence[Unit],
    dtype: np.dtype[Any],
    report: Report,
) -> dict[str, bytes]:
    """Read every tensor of ``names``, and report what cannot be applied in ``dtype``.

    Returns digests of those A that may be kept once for two modules.
    """
    ratios = {
        pair.b_name: (own, unit.scale)
        for unit in units
        for pair, own in zip(unit.pairs, unit.scales, strict=True)
        if own != unit.scale
    }
    twins = {pair.a_name for unit in units if _may_share(unit) for pair in unit.pairs}
    digests = {}
    for name in names:
        digest = hashlib.blake2b(digest_size=16)
        pieces = weights.pieces(name, _PIECE)
        pieces = _digested(pieces, digest) if name in twins else pieces
        try:
            tried = _tried(name, pieces, ratios.get(name), dtype)
            check_finite(name, weights.tensors[name].shape, tried)
        except AdapterFormatError as error:
            report(error)
        else:
            digests[name] = digest.digest()
    return {name: digests[name] for name in twins & digests.keys()}


def _digested(pieces: Iterable[Array], digest: hashlib.blake2b) -> Iterator[Array]:
    for piece in pieces:
        digest.update(piece.tobytes())
        yield piece


def _tried(
    name: str, pieces: Iterable[Array], ratio: tuple[float, float] | None, dtype: np.dtype[Any]
) -> Iterator[Array]:
    """The pieces, those that are finite tried in the device's type too."""
    for piece in pieces:
        if (ratio or piece.dtype != dtype) and not not_finite(piece).any():
            with np.errstate(over="ignore"):
                values = (scaled(name, piece, *ratio) if ratio else piece).astype(dtype)
            if not_finite(values).any():
                raise AdapterFormatError(
                    f"tensor {shown(name)} holds a value beyond {dtype}; use a runtime of wider "
                    "range (bfloat16 or float32), or repair the adapter"
                )
        yield piece


def _may_share(unit: Unit) -> bool:
    return unit.modules[0] in _SHARING and len(unit.modules) == 1


def a_marks(units: Iterable[Unit], digests: Digests) -> dict[int, object]:
    """By ``id`` of each unit, what its A is known by: equal where one copy serves both modules."""
    return {id(unit): _a_mark(unit, digests) for unit in units}


def _a_mark(unit: Unit, digests: Digests) -> object:
    names = [pair.a_name for pair in unit.pairs]
    if not _may_share(unit) or not all(name in digests for name in names):
        return id(unit)
    parts = sorted(
        (pair.key.expert, rank, digests[pair.a_name])
        for pair, rank in zip(unit.pairs, unit.ranks, strict=True)
    )
    dtype = common_dtype(info.dtype for pair in unit.pairs for info in (pair.a, pair.b))
    own = dtype if len(unit.pairs) > 1 else unit.pairs[0].a.dtype
    return (unit.layer, unit.a_shape, str(own), tuple(parts))
