"""From the headers of an adapter's files to a plan of what is applied where.

``peft`` plans and then builds; ``inspection`` plans and shows. ``tensors_by_place`` looks every
tensor's name up in the one table (``names``), so that a tensor without a place is known before any
data is read; ``pair_up`` finds A and B of each place, and ``plan_units`` brings the pairs into
:class:`Unit`s, module by module, with their ranks and scales. They tell what is wrong to
``report``: raising there (the default) stops at the first.

Forms of routed experts that are read:

* by name: ``experts.3.gate_proj`` (or w1/w3/w2), A [r, in] and B [out, r] each; missing experts are
  zeros, smaller ranks are padded with zeros, another scale goes into that expert's B, in float32.
  ``experts.gate_up_projs.3`` has gate and up in one B;
* stacked by peft's ``target_parameters``: A [E·r, in] with rows expert by expert, B [out, r·E]
  with column j·E + e (or, where Unsloth marks it, e·r + j), under ``experts.base_layer`` (gate and
  up together) and ``experts`` (down; or, if one parameter only is adapted, that one). ``stacked``
  decides where in and out are swapped;
* three-dimensional: ``experts.gate_up_proj`` and the like, A [E, r, in], B [E, out, r], where a
  leading 1 is a factor shared by all experts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cupylora.adapters.dtypes import FACTOR_DTYPES
from cupylora.adapters.names import Factor, Foreign, Key, ModelPlaces, Place, place
from cupylora.adapters.peft_config import PeftConfig
from cupylora.adapters.safetensors_file import TensorInfo
from cupylora.adapters.stacked import StackedLayouts
from cupylora.adapters.units import Group, Pair, StackedOrder, Unit, groups_of, single
from cupylora.errors import AdapterFormatError
from cupylora.shapes import MAX_RANK, ModelShape, MoeShape
from cupylora.text import counted, listed, shown

__all__ = [
    "Placed",
    "Report",
    "check_placed",
    "pair_up",
    "plan_units",
    "raise_it",
    "scale_of",
    "tensors_by_place",
]

Report = Callable[[AdapterFormatError], None]
"""Told what is wrong with an adapter; what it is about is left out of what follows."""


def raise_it(error: AdapterFormatError) -> None:
    """The Report that stops at the first."""
    raise error


@dataclass(frozen=True)
class Placed:
    """Tensors by what they belong to: of each, its factors with the tensor's name and place.

    ``lost``: the tensors without a place, and why; ``empty``: those of size 0, which count as
    absent; ``count``: of all tensors.
    """

    by_key: Mapping[Key, Mapping[Factor, tuple[str, Place]]]
    lost: tuple[tuple[str, str], ...]
    empty: tuple[str, ...]
    count: int

    @property
    def kohya(self) -> bool:
        """Whether every tensor is named in Kohya's way, whose files need no config."""
        places = [place for factors in self.by_key.values() for _, place in factors.values()]
        return bool(places) and all(place.kohya for place in places)


def tensors_by_place(tensors: Mapping[str, TensorInfo], model: ModelShape | None) -> Placed:
    """Look every name up; without a ``model``, any layer, module and expert exists."""
    by_key: dict[Key, dict[Factor, tuple[str, Place]]] = defaultdict(dict)
    lost: list[tuple[str, str]] = []
    places = None if model is None else ModelPlaces(model)
    for name in sorted(name for name, info in tensors.items() if info.nbytes):
        found = _find(name, tensors[name], places)
        if isinstance(found, str):
            lost.append((name, found))
        elif found.factor in by_key[found.key]:
            lost.append((name, f"the same place as {shown(by_key[found.key][found.factor][0])}"))
        else:
            by_key[found.key][found.factor] = (name, found)
    empty = tuple(sorted(name for name, info in tensors.items() if not info.nbytes))
    return Placed(by_key, tuple(lost), empty, len(tensors))


def _find(name: str, info: TensorInfo, places: ModelPlaces | None) -> Place | str:
    """The place of a tensor, or why it has none."""
    found = place(name)
    if isinstance(found, str):
        return found
    if found.factor == "alpha":
        if math.prod(info.shape) != 1:
            return f"an alpha of shape {list(info.shape)}, not one number"
    elif info.dtype not in FACTOR_DTYPES:
        return f"a factor of dtype {info.dtype}"
    if places is None:
        return found
    key = places.find(found.key)
    if isinstance(key, Foreign):
        return key
    return found if key is found.key else found._replace(key=key)


def check_placed(
    placed: Placed, model: ModelShape | None, base_model: str | None, report: Report
) -> None:
    """Report what would be lost of an adapter that names ``base_model``, or that it is empty."""
    if placed.lost:
        foreign = any(isinstance(reason, Foreign) for _, reason in placed.lost)
        hint = "train the adapter again without them"
        if foreign and model:
            hint = f"{_contents(model)}; {_other_model(model, base_model)}"
        target = f" to model {shown(model.name)}" if model else ""
        lost = [f"{shown(name)} ({reason})" for name, reason in placed.lost]
        report(
            AdapterFormatError(
                f"{len(lost)} of {counted(placed.count, 'tensor')} cannot be applied{target} and "
                f"would be lost; {hint}; they are: {listed(lost, '; ')}"
            )
        )
    elif not placed.by_key:
        size = f" ({counted(len(placed.empty), 'tensor')} of size 0)" if placed.empty else ""
        report(
            AdapterFormatError(
                f"holds no LoRA tensor{size}, so it would change nothing; save the adapter again"
                + (", with its parameters gathered from all devices" if placed.empty else "")
            )
        )


def _contents(model: ModelShape) -> str:
    """For messages: what an adapter of ``model`` may hold."""
    modules = ", ".join(
        f"{m.name} {m.in_features}→{m.out_features}" + (f" x {m.experts}" if m.experts > 1 else "")
        for m in model.modules
    )
    return f"model {shown(model.name)} has {counted(model.layers, 'layer')} of {modules}"


def _other_model(model: ModelShape, base_model: str | None) -> str:
    """For messages: what to do about an adapter that does not fit the model."""
    trained = f" (it names {shown(base_model)})" if base_model else ""
    return (
        f"if the adapter was trained on another model{trained}, give that model's config.json, "
        f"else use an adapter of {shown(model.name)}"
    )


def pair_up(
    placed: Placed,
    tensors: Mapping[str, TensorInfo],
    alpha: Callable[[str], float],
    model: ModelShape | None,
    config: PeftConfig,
    report: Report = raise_it,
) -> list[Pair]:
    """The placed tensors by pairs; alpha: the value of a tensor that holds one.

    Reports halves of pairs, tensors larger than any of ``model``, and alphas that only some have.
    """
    pairs = []
    most = _largest_factor(model) if model else 0
    for key, factors in placed.by_key.items():
        try:
            pair = _pair(key, factors, tensors, alpha)
            if model:
                _check_size(pair, most, model, config.base_model)
            pairs.append(pair)
        except AdapterFormatError as error:
            report(error)
    bare = [pair.a_name for pair in pairs if pair.alpha is None]
    if config.alpha is None and 0 < len(bare) < len(pairs):
        report(
            AdapterFormatError(
                f"{len(bare)} of {counted(len(pairs), 'module')} have no alpha, so their scale is "
                f"unknown; save the adapter again; they are: {listed(map(shown, bare))}"
            )
        )
    return pairs


def _pair(
    key: Key,
    factors: Mapping[Factor, tuple[str, Place]],
    tensors: Mapping[str, TensorInfo],
    alpha: Callable[[str], float],
) -> Pair:
    for factor in ("A", "B"):
        if factor not in factors:
            name, _ = next(iter(factors.values()))
            raise AdapterFormatError(
                f"tensor {shown(name)} has no lora_{factor} beside it; save the adapter again"
            )
    (a_name, found), (b_name, _) = factors["A"], factors["B"]
    stored = alpha(factors["alpha"][0]) if "alpha" in factors else None
    return Pair(key, found.path, a_name, b_name, tensors[a_name], tensors[b_name], stored)


def _largest_factor(model: ModelShape) -> int:
    """Elements of the largest factor that a module of ``model`` can have."""
    widest = max(max(m.in_features, m.out_features) for m in model.modules)
    experts = model.moe.experts if model.moe else 1
    if model.moe:
        widest = max(widest, model.moe.first_width)
    return experts * MAX_RANK * widest


def _check_size(pair: Pair, most: int, model: ModelShape, base_model: str | None) -> None:
    """No tensor has more than ``most`` elements, the model's largest factor."""
    for name, shape in ((pair.a_name, pair.a.shape), (pair.b_name, pair.b.shape)):
        if math.prod(shape) > most:
            raise AdapterFormatError(
                f"{shown(name)} {list(shape)} is larger than any factor of model "
                f"{shown(model.name)} ({most} elements, at rank {MAX_RANK}); "
                f"{_other_model(model, base_model)}"
            )


def scale_of(config: PeftConfig, pair: Pair, rank: int, parameter: str = "") -> float:
    """The pair's scale by ``config``, as :meth:`PeftConfig.scale` gives it.

    Patterns may name its path with or without the leading ``model.``; ``parameter`` is the stacked
    parameter it adapts, which its name may lack.
    """
    path = pair.path.replace(".base_layer", "")
    path = f"{path}.{parameter}" if parameter and pair.key.module is None else path
    bare = path[path.index("layers.") :]
    return config.scale((path, f"model.{bare}"), rank, pair.a_name, pair.alpha)


def plan_units(
    pairs: Sequence[Pair], model: ModelShape, config: PeftConfig, report: Report = raise_it
) -> list[Unit]:
    """What becomes of the pairs, in the order of layers and of the model's modules.

    Reports shapes and ranks that do not fit, modules given twice, and patterns of ``config`` that
    match none.
    """
    planner = _Planner(model, config)
    units, whole = [], True
    taken: set[tuple[int, str]] = set()
    for make in planner.makers(pairs):
        try:
            for unit in make():
                _claim(taken, unit)
                units.append(unit)
        except AdapterFormatError as error:
            whole = False
            report(error)
    if whole:  # what was left out may be what a pattern is for
        try:
            config.check_patterns_used()
        except AdapterFormatError as error:
            report(error)
    order = {module.name: i for i, module in enumerate(model.modules)}
    return sorted(units, key=lambda unit: (unit.layer, order[unit.modules[0]]))


class _Planner:
    """Brings pairs into units, module by module."""

    def __init__(self, model: ModelShape, config: PeftConfig) -> None:
        self.model, self.config = model, config
        self.shapes = {module.name: module for module in model.modules}

    def makers(self, pairs: Sequence[Pair]) -> Iterator[Callable[[], list[Unit]]]:
        """What makes the units of every pair, each pair in one; every maker may fail by itself."""
        experts: dict[tuple[int, str], list[Pair]] = defaultdict(list)
        stacked: list[Pair] = []
        for pair in pairs:
            if pair.key.form == "expert" and pair.key.module:
                experts[pair.key.layer, pair.key.module].append(pair)
            elif pair.key.form == "group" and pair.key.module is None and _is_flat(pair):
                stacked.append(pair)
            else:
                yield partial(self._one, pair)
        for members in experts.values():
            yield partial(self._by_name, members)
        yield partial(self._stacked, stacked)

    def _misfit(self, pair: Pair, need: str) -> AdapterFormatError:
        """A pair whose shapes are not those of this model; ``need``: which of its parts is how."""
        return AdapterFormatError(
            f"{pair.where} do not fit model {shown(self.model.name)}, whose {need}; "
            f"{_other_model(self.model, self.config.base_model)}"
        )

    def _flat_rank(self, pair: Pair, group: Group) -> int:
        """Rank of a two-dimensional pair that fits ``group``."""
        (a, b), need = (pair.a.shape, pair.b.shape), (group.in_features, group.out_features)
        fits = len(a) == len(b) == 2 and a[0] == b[1]
        if not fits or (a[1], b[0]) != need:
            raise self._misfit(pair, f"{group.name} needs [r, {need[0]}] and [{need[1]}, r]")
        return a[0]

    def _one(self, pair: Pair) -> list[Unit]:
        """A dense module, or all experts in three dimensions."""
        if pair.key.form == "group" and self.model.moe:
            return [self._three_dimensional(pair, self.model.moe)]
        group = single(self.shapes[str(pair.key.module)])
        rank = self._flat_rank(pair, group)
        scale = scale_of(self.config, pair, rank)
        return [Unit(pair.key.layer, group, 1, (pair,), (rank,), (scale,))]

    def _by_name(self, pairs: Sequence[Pair]) -> list[Unit]:
        """The experts of one module that are there."""
        layer, name = pairs[0].key.layer, str(pairs[0].key.module)
        group = self._named_group(name)
        experts = self.model.moe.experts if self.model.moe else 1
        ranks = tuple(self._flat_rank(pair, group) for pair in pairs)
        scales = tuple(map(partial(scale_of, self.config), pairs, ranks))
        return [Unit(layer, group, experts, tuple(pairs), ranks, scales)]

    def _named_group(self, name: str) -> Group:
        """A stacked parameter, or a module of the experts by itself."""
        found = [g for g in groups_of(self.model.moe) if g.name == name] if self.model.moe else []
        return found[0] if found else single(self.shapes[name])

    def _stacked(self, pairs: Sequence[Pair]) -> list[Unit]:
        moe = self.model.moe
        if not pairs or moe is None:
            return []
        layouts = StackedLayouts(self.model, moe, self.config, self._misfit)
        units = []
        for pair, (group, swapped) in zip(pairs, layouts.decide(pairs), strict=True):
            rank = pair.a.shape[0] // moe.experts
            scale = scale_of(self.config, pair, rank, group.name)
            order = StackedOrder(swapped, self.config.by_expert)
            units.append(
                Unit(pair.key.layer, group, moe.experts, (pair,), (rank,), (scale,), order)
            )
        return units

    def _three_dimensional(self, pair: Pair, moe: MoeShape) -> Unit:
        experts, a, b = (1, moe.experts), pair.a.shape, pair.b.shape
        first, second = groups_of(moe)
        name = pair.key.module
        unnamed = first if pair.key.inner else second
        group = unnamed if name is None else self._named_group(name)
        fits = len(a) == len(b) == 3 and a[0] in experts and b[0] in experts
        need = (group.in_features, group.out_features)
        if not fits or a[1] != b[2] or (a[2], b[1]) != need:
            raise self._misfit(
                pair,
                f"{group.name} needs [{moe.experts} or 1, r, {need[0]}] and "
                f"[{moe.experts} or 1, {need[1]}, r]",
            )
        scale = scale_of(self.config, pair, a[1], group.name)
        return Unit(pair.key.layer, group, moe.experts, (pair,), (a[1],), (scale,))


def _is_flat(pair: Pair) -> bool:
    return len(pair.a.shape) == len(pair.b.shape) == 2


def _claim(taken: set[tuple[int, str]], unit: Unit) -> None:
    """Note the unit's modules as given. Raises AdapterFormatError if one already is."""
    for module in unit.modules:
        if (unit.layer, module) in taken:
            raise AdapterFormatError(
                f"layer {unit.layer}, {module} is given twice, the second time by "
                f"{unit.pairs[0].where}; remove one of them"
            )
        taken.add((unit.layer, module))
