"""PEFT adapter directories, read without torch: files in, an :class:`Adapter` out.

Flow: ``peft_config`` and ``safetensors_file`` read and check the two files; every tensor's name is
looked up in one table (``_RULES``), which gives its layer, module, expert and factor; pairs are
then brought into the one form the rest of the package knows, A [experts, rank, in] and B [experts,
out, rank]. A tensor that finds no place refuses the whole adapter, with the list of what would be
lost.

Forms of routed experts that are read:

* by name: ``experts.3.gate_proj`` (or w1/w3/w2), A [r, in] and B [out, r] each; missing experts are
  zeros, smaller ranks are padded with zeros, another scale goes into that expert's B, in float32;
* stacked by peft's ``target_parameters``: A [E·r, in] with rows expert by expert, B [out, r·E]
  with column j·E + e, under ``experts.base_layer`` (gate and up together) and ``experts`` (down;
  or, if one parameter only is adapted, that one). Up to peft 0.18 in and out are swapped unless the
  model stores expert weights transposed;
* three-dimensional: ``experts.gate_up_proj`` and the like, A [E, r, in], B [E, out, r], where a
  leading 1 is a factor shared by all experts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.factors import Adapter, LoraFactors
from cupylora.adapters.peft_config import PeftConfig, read_config
from cupylora.adapters.safetensors_file import Shapes, read_weights
from cupylora.errors import AdapterFormatError, ArgumentError
from cupylora.files import reason
from cupylora.shapes import MAX_RANK, ModelShape, MoeShape
from cupylora.text import counted, listed, quoted, shown

__all__ = ["read_adapter"]

Array = npt.NDArray[Any]

_NUMBER = "(?:0|[1-9][0-9]{0,5})"
"""As models write layers and experts; 00 or another script's digits would be a second name."""

_TENSOR = re.compile(
    r"(?P<prefix>(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?)"
    rf"layers\.(?P<layer>{_NUMBER})\.(?P<path>.+?)"
    r"\.lora_(?P<factor>[AB])(?:\.default)?(?:\.weight)?"
)
"""A LoRA factor of a decoder layer. Other prefixes (a vision tower's, say) are not this model's."""

Form = Literal["dense", "expert", "group"]
_EXPERTS = r"(?:mlp|block_sparse_moe|feed_forward)\.experts"
_MLP = "(?:gate|up|down)_proj|w[123]"
_RULES: tuple[tuple[re.Pattern[str], Form], ...] = (
    (re.compile(rf"{_EXPERTS}\.(?P<expert>{_NUMBER})\.(?P<module>\w+)"), "expert"),
    (re.compile(rf"{_EXPERTS}(?P<inner>\.base_layer)?"), "group"),
    (re.compile(rf"{_EXPERTS}\.(?P<module>\w+)"), "group"),
    (re.compile(rf"mlp\.(?P<module>{_MLP})"), "dense"),
    (re.compile(rf"self_attn\.(?P<module>(?!{_MLP}$)\w+)"), "dense"),
)
"""Path within a layer → form; the groups give module and expert. The first that matches counts."""

_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"lora_magnitude_vector"), "DoRA is not supported"),
    (re.compile(r"lora_embedding_|(embed_tokens|wte)\b.*lora_"), "LoRA on embeddings"),
    (re.compile(r"lora_[AB](\.default)?\.bias$"), "a bias of a LoRA factor"),
    (re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router)\.(\w+\.)*lora_"), "LoRA on the router"),
    (re.compile(r"\blm_head\b.*lora_"), "LoRA on the output head"),
    (re.compile(r"^(?!.*lora_[AB]).*\.bias$"), "a trained bias"),
    (re.compile(r"^(?!.*lora_)"), "full weights (modules_to_save)"),
)


def read_adapter(path: str | Path, model: ModelShape, *, name: str | None = None) -> Adapter:
    """Read the PEFT directory ``path`` for ``model``; ``name`` defaults to the directory's.

    Every tensor is applied exactly once, or AdapterFormatError lists what would be lost. It is also
    raised for malformed files, shapes that do not fit the model, ranks other than the config's,
    values that are not finite, and settings that cannot be applied (DoRA, biases, modules_to_save,
    ...); ArgumentError for a ``path`` that is none.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path is {quoted(path)}; an adapter's directory is needed")
    folder = Path(path)
    try:
        found = folder.is_dir()
    except (OSError, ValueError) as error:
        raise AdapterFormatError(
            f"{shown(str(path))}: cannot be looked into ({reason(error)}); give a directory that "
            "can be read"
        ) from error
    if not found:
        raise AdapterFormatError(
            f"{shown(str(path))}: no such directory; a PEFT adapter is a directory"
        )
    config = read_config(folder / "adapter_config.json")
    placed: _Placed = {}

    def admit(shapes: Shapes) -> None:
        placed.update(_place_all(shapes, model, config, folder))

    tensors = read_weights(folder, admit)
    pairs = _pair_up(placed, tensors, folder)
    for pair in pairs:
        _check_finite(pair.a_name, pair.a, folder)
        _check_finite(pair.b_name, pair.b, folder)
    factors = _Assembly(model, config, folder).run(pairs)
    config.check_patterns_used()
    return Adapter(name or folder.name, factors, str(folder))


_LONGEST_NAME = 512
"""Characters of a tensor's name: far more than any has, and little for the expressions here."""


@dataclass(frozen=True)
class _Place:
    """Where a factor belongs. ``module`` is None for peft's unnamed stacked parameters, of which
    ``inner`` is the one below another; ``path`` is the module's path within the model."""

    layer: int
    form: Form
    module: str | None
    expert: int
    inner: bool
    path: str


@dataclass(frozen=True, eq=False)
class _Pair:
    place: _Place
    a_name: str
    b_name: str
    a: Array
    b: Array

    @property
    def where(self) -> str:
        """For messages: both tensors."""
        names, factors = (self.a_name, self.b_name), (self.a, self.b)
        both = (f"{shown(n)} {list(x.shape)}" for n, x in zip(names, factors, strict=True))
        return " and ".join(both)


class _Foreign(str):
    """Why a tensor has no place in this model, where it may have one in another."""

    __slots__ = ()


def _place(name: str, model: ModelShape) -> tuple[_Place, str] | str:
    """The place and factor ('A' or 'B') of a tensor, or why it has none."""
    if len(name) > _LONGEST_NAME:
        return f"a name of {len(name)} characters"
    for pattern, refusal in _REFUSED:
        if pattern.search(name):
            return refusal
    match = _TENSOR.fullmatch(name)
    if not match:
        return "no LoRA factor of a decoder layer"
    layer, path = int(match["layer"]), match["path"]
    if layer >= model.layers:
        return _Foreign(f"model {shown(model.name)} has {counted(model.layers, 'layer')}")
    found = _look_up(path)
    if not found:
        return _Foreign(f"no module of model {shown(model.name)}")
    form, groups = found
    module = groups.get("module")
    module = _ALIASES.get(module, module) if module else None
    expert = int(groups.get("expert") or 0)
    if not _exists(model, form, module, expert):
        return _Foreign(f"no module of model {shown(model.name)}")
    prefix = match["prefix"].removeprefix("base_model.model.")
    inner = bool(groups.get("inner"))
    place = _Place(layer, form, module, expert, inner, f"{prefix}layers.{layer}.{path}")
    return place, match["factor"]


def _look_up(path: str) -> tuple[Form, dict[str, str | None]] | None:
    for pattern, form in _RULES:
        found = pattern.fullmatch(path)
        if found:
            return form, found.groupdict()
    return None


def _exists(model: ModelShape, form: Form, module: str | None, expert: int) -> bool:
    if form == "dense":
        return any(module == m.name for group in model.dense_groups for m in group)
    if model.moe is None or expert >= model.moe.experts:
        return False
    names = {m.name for m in model.moe.modules}
    if form == "group":
        names |= {_first_name(model.moe)}
    return module in names or (module is None and form == "group")


def _first_name(moe: MoeShape) -> str:
    """The stacked parameter of the first projection, as models name it."""
    return "gate_up_proj" if moe.gated else "up_proj"


_Placed = dict[tuple[int, Form, str | None, int, bool], dict[str, tuple[str, _Place]]]
"""By place: its factors ('A', 'B'), each with its tensor's name."""


def _place_all(shapes: Shapes, model: ModelShape, config: PeftConfig, folder: Path) -> _Placed:
    """Every tensor at its place, or one error that lists those without."""
    placed: _Placed = defaultdict(dict)
    lost: list[str] = []
    foreign = False
    for name in sorted(shapes):
        result = _place(name, model)
        if isinstance(result, str):
            lost.append(f"{shown(name)} ({result})")
            foreign |= isinstance(result, _Foreign)
            continue
        place, factor = result
        key = (place.layer, place.form, place.module, place.expert, place.inner)
        if factor in placed[key]:
            lost.append(f"{shown(name)} (the same place as {shown(placed[key][factor][0])})")
        placed[key].setdefault(factor, (name, place))
    if lost:
        hint = f"{_contents(model)}; {_other_model(model, config)}; " if foreign else ""
        raise AdapterFormatError(
            f"{folder}: {len(lost)} of {counted(len(shapes), 'tensor')} cannot be applied to "
            f"model {shown(model.name)} and would be lost; {hint}they are: {listed(lost, '; ')}"
        )
    if not placed:
        raise AdapterFormatError(
            f"{folder}: holds no LoRA tensor, so it would change nothing; save the adapter again"
        )
    _check_sizes(shapes, model, config, folder)
    return placed


def _check_sizes(shapes: Shapes, model: ModelShape, config: PeftConfig, folder: Path) -> None:
    """No tensor is larger than the largest factor that a module of ``model`` can have."""
    widest = max(max(m.in_features, m.out_features) for m in model.modules)
    experts = model.moe.experts if model.moe else 1
    if model.moe:
        widest = max(widest, model.moe.first_width)
    most = experts * MAX_RANK * widest
    for name, shape in shapes.items():
        if math.prod(shape) > most:
            raise AdapterFormatError(
                f"{folder}: {shown(name)} {list(shape)} is larger than any factor of model "
                f"{shown(model.name)} ({most} elements, at rank {MAX_RANK}); "
                f"{_other_model(model, config)}"
            )


def _contents(model: ModelShape) -> str:
    """For messages: what an adapter of ``model`` may hold."""
    modules = ", ".join(
        f"{m.name} {m.in_features}→{m.out_features}" + (f" x {m.experts}" if m.experts > 1 else "")
        for m in model.modules
    )
    return f"model {shown(model.name)} has {counted(model.layers, 'layer')} of {modules}"


def _other_model(model: ModelShape, config: PeftConfig) -> str:
    """For messages: what to do about an adapter that does not fit the model."""
    trained = f" (it names {shown(config.base_model)})" if config.base_model else ""
    return (
        f"if the adapter was trained on another model{trained}, give that model's config.json, "
        f"else use an adapter of {shown(model.name)}"
    )


def _pair_up(placed: _Placed, tensors: dict[str, Array], folder: Path) -> list[_Pair]:
    pairs = []
    for factors in placed.values():
        if len(factors) < 2:
            [(factor, (name, _))] = factors.items()
            other = "B" if factor == "A" else "A"
            raise AdapterFormatError(
                f"{folder}: tensor {shown(name)} has no lora_{other} beside it; save the adapter "
                "again"
            )
        (a_name, place), (b_name, _) = factors["A"], factors["B"]
        pairs.append(_Pair(place, a_name, b_name, tensors[a_name], tensors[b_name]))
    return pairs


def _check_finite(name: str, values: Array, folder: Path) -> None:
    bad = not_finite(values)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AdapterFormatError(
            f"{folder}: tensor {shown(name)} holds {int(bad.sum())} values that are not finite, "
            f"the first ({values[at]}) at {list(at)}; the adapter is broken, save it again"
        )


@dataclass(frozen=True)
class _Group:
    """A stacked parameter: its name in models, its features, and what its B splits into."""

    name: str
    in_features: int
    out_features: int
    splits: tuple[tuple[str, slice], ...]


def _groups(moe: MoeShape) -> tuple[_Group, _Group]:
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
    first = _Group(_first_name(moe), moe.hidden, moe.first_width, splits)
    return first, _Group("down_proj", inner, moe.hidden, (("down_proj", every),))


_Factors = dict[tuple[int, str], LoraFactors]


class _Assembly:
    """Brings placed pairs into the package's form, module by module."""

    def __init__(self, model: ModelShape, config: PeftConfig, folder: Path) -> None:
        self.model, self.config, self.folder = model, config, folder
        self.factors: _Factors = {}

    def run(self, pairs: list[_Pair]) -> _Factors:
        experts: dict[tuple[int, str], list[_Pair]] = defaultdict(list)
        groups: list[_Pair] = []
        for pair in pairs:
            place = pair.place
            if place.form == "expert" and place.module:
                experts[place.layer, place.module].append(pair)
            elif place.form == "dense" and place.module:
                self._dense(pair, place.module)
            else:
                groups.append(pair)
        for (layer, module), members in experts.items():
            self._per_expert(layer, module, members)
        if groups and self.model.moe:
            self._grouped(groups, self.model.moe)
        self._share_gate_and_up()
        order = {module.name: i for i, module in enumerate(self.model.modules)}
        return dict(sorted(self.factors.items(), key=lambda item: (item[0][0], order[item[0][1]])))

    def _fail(self, problem: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.folder}: {problem}")

    def _misfit(self, pair: _Pair, need: str) -> AdapterFormatError:
        """A pair whose shapes are not those of this model; ``need``: which of its parts is how."""
        return self._fail(
            f"{pair.where} do not fit model {self.model.name}, whose {need}; "
            f"{_other_model(self.model, self.config)}"
        )

    def _add(self, layer: int, module: str, a: Array, b: Array, scale: float, where: str) -> None:
        if (layer, module) in self.factors:
            raise self._fail(f"layer {layer}, {module} is given twice, the second time by {where}")
        self.factors[layer, module] = LoraFactors(a, b, scale)

    def _scale(self, pair: _Pair, rank: int, parameter: str = "") -> float:
        """The pair's scale; patterns may name its path with or without the leading ``model.``."""
        path = pair.place.path.replace(".base_layer", "")
        path = f"{path}.{parameter}" if parameter and pair.place.module is None else path
        bare = path[path.index("layers.") :]
        return self.config.scale((path, f"model.{bare}"), rank, pair.a_name)

    def _check_pair(self, pair: _Pair, module: str) -> int:
        """Rank of a two-dimensional pair that fits ``module``."""
        shape = self.model.modules[self.model.module_index(module)]
        need_in, need_out = shape.in_features, shape.out_features
        fits = pair.a.ndim == pair.b.ndim == 2 and pair.a.shape[0] == pair.b.shape[1]
        if not fits or (pair.a.shape[1], pair.b.shape[0]) != (need_in, need_out):
            raise self._misfit(pair, f"{module} needs [r, {need_in}] and [{need_out}, r]")
        return int(pair.a.shape[0])

    def _dense(self, pair: _Pair, module: str) -> None:
        rank = self._check_pair(pair, module)
        scale = self._scale(pair, rank)
        self._add(pair.place.layer, module, pair.a[None], pair.b[None], scale, pair.where)

    def _per_expert(self, layer: int, module: str, pairs: list[_Pair]) -> None:
        """Experts by name, stacked; missing experts and ranks below the largest are zeros.

        A module has one scale, the largest in magnitude of its experts'; where experts differ, B is
        float32 and holds the ratio, with one rounding (the file's own type may not reach that far).
        """
        ranks = [self._check_pair(pair, module) for pair in pairs]
        scales = [self._scale(pair, rank) for pair, rank in zip(pairs, ranks, strict=True)]
        scale = max(scales, key=abs)
        shape = self.model.modules[self.model.module_index(module)]
        rank, count = max(ranks), shape.experts
        dtype = _common_dtype(x for pair in pairs for x in (pair.a, pair.b))
        b_dtype = dtype if len(set(scales)) == 1 else np.dtype(np.float32)
        a = np.zeros((count, rank, shape.in_features), dtype)
        b = np.zeros((count, shape.out_features, rank), b_dtype)
        for pair, own_rank, own_scale in zip(pairs, ranks, scales, strict=True):
            expert = pair.place.expert
            a[expert, :own_rank] = pair.a
            same = own_scale == scale
            b[expert, :, :own_rank] = pair.b if same else self._scaled(pair, own_scale, scale)
        self._add(layer, module, a, b, scale, pairs[0].where)

    def _scaled(self, pair: _Pair, own: float, scale: float) -> Array:
        """The pair's B in float32, times own/scale. Refused if float32 cannot hold the product."""
        exact = pair.b.astype(np.float64) * (own / scale)
        small = (np.abs(exact) < np.finfo(np.float32).tiny) & (pair.b != 0)
        if own and small.any():
            raise self._fail(
                f"{shown(pair.b_name)} has scale {own}, another expert of its module {scale}: too "
                "far apart for float32; bring their alphas closer (and multiply their B instead)"
            )
        return exact.astype(np.float32)

    def _grouped(self, pairs: list[_Pair], moe: MoeShape) -> None:
        """Stacked (two-dimensional) and three-dimensional pairs."""
        stacked = [p for p in pairs if p.a.ndim == p.b.ndim == 2 and p.place.module is None]
        layouts = _StackedLayouts(moe, self.config, self._fail, self._misfit)
        for pair, (group, swapped) in zip(stacked, layouts.decide(stacked), strict=True):
            rank = pair.a.shape[0] // moe.experts
            a, b = _unstack(pair.a, pair.b, moe.experts, swapped)
            self._split(pair, group, a, b, self._scale(pair, rank, group.name))
        decided = {id(pair) for pair in stacked}
        for pair in pairs:
            if id(pair) not in decided:
                self._three_dimensional(pair, moe)

    def _three_dimensional(self, pair: _Pair, moe: MoeShape) -> None:
        experts, a, b = (1, moe.experts), pair.a, pair.b
        group = self._named_group(pair, moe)
        fits = a.ndim == b.ndim == 3 and a.shape[0] in experts and b.shape[0] in experts
        need = (group.in_features, group.out_features)
        if not fits or a.shape[1] != b.shape[2] or (a.shape[2], b.shape[1]) != need:
            raise self._misfit(
                pair,
                f"{group.name} needs [{moe.experts} or 1, r, {need[0]}] and "
                f"[{moe.experts} or 1, {need[1]}, r]",
            )
        self._split(pair, group, a, b, self._scale(pair, int(a.shape[1]), group.name))

    def _named_group(self, pair: _Pair, moe: MoeShape) -> _Group:
        """The group (or one half of the first) that a three-dimensional pair adapts."""
        first, second = _groups(moe)
        name = pair.place.module
        if name is None:
            return first if pair.place.inner else second
        for group in (first, second):
            if name == group.name:
                return group
        return _Group(name, moe.hidden, moe.intermediate, ((name, slice(None)),))

    def _split(self, pair: _Pair, group: _Group, a: Array, b: Array, scale: float) -> None:
        """One module per split of B, all with the same A."""
        for module, rows in group.splits:
            self._add(pair.place.layer, module, a, b[:, rows], scale, pair.where)

    def _share_gate_and_up(self) -> None:
        """One A for gate and up also where a file repeats it, so that form does not cost memory."""
        for (layer, module), up in list(self.factors.items()):
            gate = self.factors.get((layer, "gate_proj"))
            if module == "up_proj" and gate and gate.a is not up.a and _same_bytes(gate.a, up.a):
                self.factors[layer, module] = LoraFactors(gate.a, up.b, up.scale)


def _same_bytes(a: Array, b: Array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = np.dtype(f"u{a.itemsize}")
    return np.array_equal(np.ascontiguousarray(a).view(bits), np.ascontiguousarray(b).view(bits))


def _common_dtype(arrays: Iterable[Array]) -> np.dtype[Any]:
    dtypes = {array.dtype for array in arrays}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def _unstack(a: Array, b: Array, experts: int, swapped: bool) -> tuple[Array, Array]:
    """A [E, r, in] and B [E, out, r] of stacked factors.

    ``swapped``: the file's A holds the module's out features and its B the in features, so each
    gives the other.
    """
    by_rows = a.reshape(experts, -1, a.shape[1])  # [E, r, features of A]
    by_columns = b.reshape(b.shape[0], -1, experts)  # [features of B, r, E]
    if swapped:
        return by_columns.transpose(2, 1, 0), by_rows.transpose(0, 2, 1)
    return by_rows, by_columns.transpose(2, 0, 1)


_Choice = tuple[_Group, bool]
"""A stacked parameter, and whether in and out are swapped."""


class _StackedLayouts:
    """Decides for all stacked pairs of a file which parameter each adapts and in which axis order.

    The parameter: by shape, else by nesting, else by the config's target_parameters. The axis
    order, one for the whole file: by the shapes of any pair that has one reading only, then by
    peft's version, then by the model (with transposed expert weights, no release swaps).
    """

    def __init__(
        self,
        moe: MoeShape,
        config: PeftConfig,
        fail: Callable[[str], AdapterFormatError],
        misfit: Callable[[_Pair, str], AdapterFormatError],
    ) -> None:
        self.moe, self.config, self.fail, self.misfit = moe, config, fail, misfit
        self.groups = _groups(moe)

    def decide(self, pairs: list[_Pair]) -> list[_Choice]:
        nested = {pair.place.layer for pair in pairs if pair.place.inner}
        options = [self._options(pair, pair.place.layer in nested) for pair in pairs]
        swapped = self._swapped(pairs, options)
        result = []
        for pair, choices in zip(pairs, options, strict=True):
            group = next((group for group, order in choices if order == swapped), None)
            if group is None:
                raise self.fail(f"{pair.where}: in and out lie the other way than in other tensors")
            result.append((group, swapped))
        return result

    def _options(self, pair: _Pair, nested: bool) -> list[_Choice]:
        experts, (rows, a_width), (b_width, columns) = self.moe.experts, pair.a.shape, pair.b.shape
        features = (a_width, b_width)
        choices = [
            (group, swapped)
            for group in self.groups
            for swapped in (False, True)
            if features == _ordered(group, swapped)
        ]
        if rows != columns or rows % experts or not choices:
            known = ", ".join(f"{g.name} {g.in_features}→{g.out_features}" for g in self.groups)
            raise self.misfit(pair, f"{experts} experts need stacked factors of {known}")
        if len({group.name for group, _ in choices}) > 1:
            hint = self._hint(pair, nested)
            choices = [choice for choice in choices if choice[0].name == hint]
        if not choices:
            raise self.fail(f"{pair.where}: fits both parameters; name one in target_parameters")
        return choices

    def _hint(self, pair: _Pair, nested: bool) -> str | None:
        first, second = self.groups
        if nested:
            return first.name if pair.place.inner else second.name
        targets = {name.rpartition(".")[2] for name in self.config.target_parameters}
        named = [group.name for group in self.groups if group.name in targets]
        return named[0] if len(named) == 1 else None

    def _swapped(self, pairs: list[_Pair], options: list[list[_Choice]]) -> bool:
        told = {choices[0][1] for choices in options if len({s for _, s in choices}) == 1}
        if len(told) == 1:
            return told.pop()
        if len(told) == 2:
            raise self.fail("its stacked tensors disagree on which axis is in and which is out")
        if self.moe.transposed_experts:
            return False
        if self.config.version is not None:
            return self.config.version <= (0, 18)
        if not pairs:
            return False
        raise self.fail(
            f"{pairs[0].where}: square, the config has no peft_version and the model's expert "
            f"weights are not transposed, so in and out cannot be told apart; add the peft_version "
            f"that wrote it to adapter_config.json"
        )


def _ordered(group: _Group, swapped: bool) -> tuple[int, int]:
    """Features of A and of B as the file has them."""
    pair = (group.in_features, group.out_features)
    return pair[::-1] if swapped else pair
