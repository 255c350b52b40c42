"""An adapter in memory: for each (layer, module) the factors A and B and their scale.

``peft`` makes an :class:`Adapter` of files, ``synthetic_adapter`` of random numbers; ``slots`` puts
it on the device. Arrays stand here as the file had them, row-major and in its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError
from cupylora.shapes import LoraLimits, ModelShape
from cupylora.text import counted

__all__ = ["Adapter", "LoraFactors", "synthetic_adapter"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """Factors of one module: ``delta = scale · (x Aᵀ) Bᵀ``, applied exactly once.

    a [Ea, rank, in] and b [Eb, out, rank]; Ea and Eb are the module's number of experts, or 1 for a
    factor shared by all of them (and for dense modules). The same array object in two modules means
    one copy on the device. Raises ArgumentError if the two do not belong together.
    """

    a: Array
    b: Array
    scale: float

    def __post_init__(self) -> None:
        if self.a.ndim != 3 or self.b.ndim != 3 or self.a.shape[1] != self.b.shape[2]:
            raise ArgumentError(
                f"a {self.a.shape} and b {self.b.shape} are not [experts, rank, in] and "
                f"[experts, out, rank]"
            )
        if 0 in self.a.shape or 0 in self.b.shape:
            raise ArgumentError(f"a {self.a.shape} and b {self.b.shape} must not be empty")
        if not abs(self.scale) <= float(np.finfo(np.float32).max):
            raise ArgumentError(f"scale is {self.scale}; a finite float32 is needed")

    @property
    def rank(self) -> int:
        """The adapter's own rank in this module."""
        return int(self.a.shape[1])


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter: its name, its factors by (layer, module name), and where it came from."""

    name: str
    factors: Mapping[tuple[int, str], LoraFactors]
    source: str = field(default="memory")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks in it, ascending."""
        return tuple(sorted({f.rank for f in self.factors.values()}))

    @property
    def max_rank(self) -> int:
        """Its largest rank."""
        return max(self.ranks, default=0)

    @property
    def parameters(self) -> int:
        """Elements of its factors, shared ones counted once."""
        arrays = {id(x): x.size for f in self.factors.values() for x in (f.a, f.b)}
        return sum(arrays.values())

    def with_layers(self, layers: int) -> Adapter:
        """The part of it that a model cut to its first ``layers`` layers has use for."""
        kept = {key: value for key, value in self.factors.items() if key[0] < layers}
        return Adapter(self.name, kept, self.source)

    def check(self, model: ModelShape, limits: LoraLimits) -> None:
        """Raise unless every factor fits ``model`` and ``limits``.

        AdapterFormatError names a layer or module that the model lacks, or a factor of the wrong
        shape; CapacityError a rank beyond ``limits.max_rank``.
        """
        modules = {module.name: module for module in model.modules}
        for (layer, name), factors in self.factors.items():
            where = f"adapter {self.name}, layer {layer}, {name}"
            if not 0 <= layer < model.layers or name not in modules:
                raise AdapterFormatError(
                    f"{where}: model {model.name} has {counted(model.layers, 'layer')} of "
                    f"{', '.join(modules)}; load an adapter of this model"
                )
            module = modules[name]
            _check_shape(
                f"{where}: A", factors.a, model.name, module.experts, 2, module.in_features
            )
            _check_shape(
                f"{where}: B", factors.b, model.name, module.experts, 1, module.out_features
            )
            if factors.rank > limits.max_rank:
                raise CapacityError(
                    f"{where}: rank {factors.rank} exceeds max_rank {limits.max_rank}; "
                    f"raise LoraLimits.max_rank or use an adapter of smaller rank"
                )


def _check_shape(
    where: str, factor: Array, model: str, experts: int, axis: int, features: int
) -> None:
    if factor.shape[0] not in (1, experts) or factor.shape[axis] != features:
        raise AdapterFormatError(
            f"{where} has shape {factor.shape}; model {model} needs {experts} (or 1) on axis 0 and "
            f"{features} features on axis {axis}; load an adapter of this model"
        )


_BLOCK = 1_048_573
"""Elements of the random block: a prime, so that repeats never align with rows or experts."""
_STEP = 7919
_ALPHA_PER_RANK = 1.5


def synthetic_adapter(
    model: ModelShape,
    rank: int,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float32,
    *,
    modules: Iterable[str] | None = None,
    shared_a: bool = False,
    name: str | None = None,
) -> Adapter:
    """A random adapter of ``model``, made fast enough for gigabytes.

    Factors are views, each at another offset, into one random block repeated as often as the
    largest factor needs: good for tests and timing, not independent random numbers. x of unit
    variance gives deltas of standard deviation about 0.4; alpha is 1.5 · rank, so the scale is 1.5.
    ``modules`` restricts it (default: all); with ``shared_a`` gate_proj and up_proj of a layer
    share one A, as adapters with stacked experts do.
    """
    if rank < 1:
        raise ArgumentError(f"rank is {rank}; it must be at least 1")
    chosen = [model.modules[model.module_index(n)] for n in modules] if modules else model.modules
    rng = np.random.default_rng(seed)
    block = rng.random(_BLOCK, dtype=np.float32) * 2 - 1
    pools: dict[float, Array] = {}
    largest = max(m.experts * rank * max(m.in_features, m.out_features) for m in chosen)

    def factor(number: int, bound: float, shape: tuple[int, ...]) -> Array:
        if bound not in pools:
            values = (block * np.float32(bound)).astype(dtype)
            pools[bound] = np.resize(values, largest + _BLOCK)
        start = number * _STEP % _BLOCK
        return pools[bound][start : start + math.prod(shape)].reshape(shape)

    factors: dict[tuple[int, str], LoraFactors] = {}
    for layer in range(model.layers):
        for module in chosen:
            number = 2 * len(factors)
            gate = factors.get((layer, "gate_proj"))
            shape = (module.experts, rank, module.in_features)
            bound = math.sqrt(3 / module.in_features)
            share = shared_a and module.name == "up_proj" and gate is not None
            a = gate.a if share and gate is not None else factor(number, bound, shape)
            shape = (module.experts, module.out_features, rank)
            b = factor(number + 1, 0.5 / math.sqrt(rank), shape)
            factors[layer, module.name] = LoraFactors(a, b, _ALPHA_PER_RANK)
    return Adapter(name or f"synthetic-{seed}-r{rank}", factors, f"synthetic_adapter(seed={seed})")
