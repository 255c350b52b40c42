"""An adapter in memory: for each (layer, module) the factors A and B and their scale.

``peft`` makes an :class:`Adapter` of files, ``synthetic_adapter`` of random numbers; ``slots`` puts
it on the device. Arrays stand here as the file had them, row-major and in its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupylora.adapters.dtypes import factor_dtype, kept_by_float32
from cupylora.checks import check_int
from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError
from cupylora.shapes import LoraLimits, ModelShape, ModuleShape
from cupylora.text import counted, quoted, shown

__all__ = [
    "Adapter",
    "LoraFactors",
    "check_in_layer",
    "check_rank",
    "checked_scale",
    "synthetic_adapter",
    "synthetic_host_bytes",
]

Array = npt.NDArray[Any]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """Factors of one module: ``delta = scale · (x Aᵀ) Bᵀ``, applied exactly once.

    a [Ea, rank, in] and b [Eb, out, rank]; Ea and Eb are the module's number of experts, or 1 for a
    factor shared by all of them (and for dense modules); NumPy arrays of bfloat16 or any real
    floating type. The same array object in two modules means one copy on the device. Raises
    ArgumentError if they are something else or do not belong together, or scale is no float32.
    """

    a: Array
    b: Array
    scale: float

    def __post_init__(self) -> None:
        for name, array in (("a", self.a), ("b", self.b)):
            if not isinstance(array, np.ndarray):
                raise ArgumentError(f"{name} is a {type(array).__name__}; a NumPy array is needed")
            if array.dtype != _BFLOAT16 and not np.issubdtype(array.dtype, np.floating):
                raise ArgumentError(
                    f"{name} has dtype {array.dtype}; bfloat16, float16 or float32 is needed"
                )
        if self.a.ndim != 3 or self.b.ndim != 3 or self.a.shape[1] != self.b.shape[2]:
            raise ArgumentError(
                f"a {self.a.shape} and b {self.b.shape} are not [experts, rank, in] and "
                f"[experts, out, rank]"
            )
        if 0 in self.a.shape or 0 in self.b.shape:
            raise ArgumentError(f"a {self.a.shape} and b {self.b.shape} must not be empty")
        object.__setattr__(self, "scale", checked_scale(self.scale))

    @property
    def rank(self) -> int:
        """The adapter's own rank in this module."""
        return int(self.a.shape[1])


def checked_scale(value: Any) -> float:
    """``value`` as a float that float32 can hold. Raises ArgumentError."""
    if isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool):
        try:
            scale = float(value)
        except OverflowError:
            scale = math.inf
        if kept_by_float32(scale):
            return scale
    raise ArgumentError(
        f"scale is {quoted(value)}; a finite float32 is needed, and one that is not lost to 0"
    )


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter: its name, its factors by (layer, module name), and where it came from.

    Raises ArgumentError for fields of other types; the factors' keys are judged when it is used.
    """

    name: str
    factors: Mapping[tuple[int, str], LoraFactors] = field(repr=False)
    source: str = field(default="memory")

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ArgumentError(f"Adapter.{name} is {quoted(value)}; a string is needed")
        if not isinstance(self.factors, Mapping):
            raise ArgumentError(
                f"Adapter.factors is a {type(self.factors).__name__}; a mapping of (layer, module "
                "name) to LoraFactors is needed"
            )
        # A mapping may make its values anew at every look; which arrays are the same is told by
        # their identity.
        object.__setattr__(self, "factors", dict(self.factors))

    def _check_keys(self) -> None:
        """Raise ArgumentError for a key that is no (layer, module name), or another value."""
        for key, factors in self.factors.items():
            layer, name = key if isinstance(key, tuple) and len(key) == 2 else (None, None)
            if type(layer) is not int or not isinstance(name, str):
                raise ArgumentError(
                    f"adapter {shown(self.name)}: {quoted(key)} is no key of factors; a layer "
                    "(int) and a module's name are needed"
                )
            if not isinstance(factors, LoraFactors):
                raise ArgumentError(
                    f"adapter {shown(self.name)}, {quoted(key)}: a {type(factors).__name__}; "
                    "LoraFactors are needed"
                )

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
        check_int("layers", layers, 1)
        self._check_keys()
        kept = {key: value for key, value in self.factors.items() if key[0] < layers}
        return Adapter(self.name, kept, self.source)

    def check(self, model: ModelShape, limits: LoraLimits) -> None:
        """Raise unless every factor fits ``model`` and ``limits``.

        ArgumentError names a key of ``factors`` that is none; AdapterFormatError a layer or module
        that the model lacks, or a factor of the wrong shape; CapacityError a rank beyond
        ``limits.max_rank``.
        """
        self._check_keys()
        modules = {module.name: module for module in model.modules}
        for (layer, name), factors in self.factors.items():
            where = f"adapter {shown(self.name)}, layer {layer}, {name}"
            if not 0 <= layer < model.layers or name not in modules:
                raise AdapterFormatError(
                    f"{where}: model {shown(model.name)} has {counted(model.layers, 'layer')} of "
                    f"{', '.join(modules)}; load an adapter of this model"
                )
            module = modules[name]
            check_in_layer(where, module, layer, model)
            _check_shape(
                f"{where}: A", factors.a, model.name, module.experts, 2, module.in_features
            )
            _check_shape(
                f"{where}: B", factors.b, model.name, module.experts, 1, module.out_features
            )
            check_rank(where, factors.rank, limits)


def check_in_layer(where: str, module: ModuleShape, layer: int, model: ModelShape) -> None:
    """Raise AdapterFormatError, beginning with ``where``, if ``layer`` has no such dense module."""
    if not module.is_in(layer):
        raise AdapterFormatError(
            f"{where}: model {shown(model.name)} has {module.name} in other layers only; leave it "
            "out, or load an adapter of this model"
        )


def check_rank(where: str, rank: int, limits: LoraLimits) -> None:
    """Raise CapacityError, beginning with ``where``, for a rank beyond ``limits.max_rank``."""
    if rank > limits.max_rank:
        raise CapacityError(
            f"{where}: rank {rank} exceeds max_rank {limits.max_rank}; raise LoraLimits.max_rank "
            "or use an adapter of smaller rank"
        )


def _check_shape(
    where: str, factor: Array, model: str, experts: int, axis: int, features: int
) -> None:
    if factor.shape[0] not in (1, experts) or factor.shape[axis] != features:
        raise AdapterFormatError(
            f"{where} has shape {factor.shape}; model {shown(model)} needs {experts} (or 1) on "
            f"axis 0 and {features} features on axis {axis}; load an adapter of this model"
        )


_BLOCK = 1_048_573
"""Elements of the random block: a prime, so that repeats never align with rows or experts."""
_STEP = 7919
_POOLED_FROM = 4 * _BLOCK
"""Elements of an adapter from which pools (of at least _BLOCK) take less time than they cost."""
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

    Factors of a large one (over 4 million elements) are views, each at another offset, into one
    random block repeated as often as the largest factor needs: good for tests and timing, not
    independent random numbers. x of unit variance gives deltas of standard deviation about 0.4;
    alpha is 1.5 · rank, so the scale is 1.5. ``modules`` restricts it (default: all); with
    ``shared_a`` gate_proj and up_proj of a layer share one A, as adapters with stacked experts do.
    Raises ArgumentError for a rank below 1, a negative seed, or an unknown dtype or module.
    """
    rank, seed, dtype = check_int("rank", rank, 1), check_int("seed", seed, 0), factor_dtype(dtype)
    chosen = [model.modules[model.module_index(n)] for n in modules] if modules else model.modules
    factor = _random_factors(chosen, model.layers, rank, seed, dtype)
    factors: dict[tuple[int, str], LoraFactors] = {}
    for layer in range(model.layers):
        for module in chosen:
            if not module.is_in(layer):
                continue
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


_Maker = Callable[[int, float, tuple[int, ...]], Array]
"""A factor's number, bound and shape → its values, uniform in [-bound, bound)."""


def synthetic_host_bytes(model: ModelShape, rank: int, itemsize: int) -> int:
    """Host bytes (at most) of a ``synthetic_adapter`` of all modules of ``model``."""
    elements, largest = _sizes(model.modules, model.layers, rank)
    if elements < _POOLED_FROM:
        return elements * itemsize
    bounds = len({module.in_features for module in model.modules}) + 1  # one for each A, one for B
    return bounds * (largest + _BLOCK) * itemsize


def _sizes(modules: Sequence[ModuleShape], layers: int, rank: int) -> tuple[int, int]:
    """Elements of all factors, and of the largest."""
    sizes = [m.experts * rank * n for m in modules for n in (m.in_features, m.out_features)]
    return layers * sum(sizes), max(sizes)


def _random_factors(
    modules: Sequence[ModuleShape], layers: int, rank: int, seed: int, dtype: np.dtype[Any]
) -> _Maker:
    """Makes the factors: each for itself, or from pools if there are many elements."""
    rng = np.random.default_rng(seed)
    elements, largest = _sizes(modules, layers, rank)

    def single(_: int, bound: float, shape: tuple[int, ...]) -> Array:
        return ((rng.random(shape, np.float32) * 2 - 1) * np.float32(bound)).astype(dtype)

    if elements < _POOLED_FROM:
        return single
    block = rng.random(_BLOCK, dtype=np.float32) * 2 - 1
    pools: dict[float, Array] = {}

    def pooled(number: int, bound: float, shape: tuple[int, ...]) -> Array:
        if bound not in pools:
            pools[bound] = np.resize((block * np.float32(bound)).astype(dtype), largest + _BLOCK)
        start = number * _STEP % _BLOCK
        return pools[bound][start : start + math.prod(shape)].reshape(shape)

    return pooled
