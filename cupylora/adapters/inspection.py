"""What an adapter holds, what a model would get of it, and what is wrong, without loading it.

``cupylora inspect`` shows an :class:`Inspection`; servers call ``inspect_adapter`` where adapters
are uploaded. It goes the way of ``read_adapter``, with the same plan and the same refusals, but
collects them all, and builds nothing: of the data it holds one piece at a time (``value_check``).

Files may be hostile: nothing is executed, sizes are checked before memory is taken, and what is
read is bounded by ``max_bytes`` (headers by LARGEST_JSON), whatever a file claims.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupylora.adapters.assembly import (
    Placed,
    check_placed,
    pair_up,
    plan_units,
    scale_of,
    tensors_by_place,
)
from cupylora.adapters.peft import adapter_path, config_for, has_config
from cupylora.adapters.peft_config import CONFIG_FILE, PeftConfig, read_config
from cupylora.adapters.safetensors_file import SUFFIX, TensorInfo, WeightFiles, open_weights
from cupylora.adapters.slots import block_bytes
from cupylora.adapters.units import Pair, Unit
from cupylora.adapters.value_check import a_marks, check_values
from cupylora.checks import check_int, check_type
from cupylora.dtypes import dtype_name, resolve_dtype
from cupylora.errors import AdapterFormatError
from cupylora.shapes import MAX_RANK, ModelShape
from cupylora.text import byte_size, counted, listed, shown

__all__ = ["MAX_BYTES", "Applied", "Held", "Inspection", "Problem", "inspect_adapter"]

MAX_BYTES = 64 * 10**9
"""Bytes of tensors beyond which an adapter is refused unread, if not told otherwise."""
_UNSLOTH = "unsloth/"
_MOST_KINDS = 200
"""Of problems: hostile files may make as many as they have tensors."""
_READ_IF_REFUSED = 1 << 28
"""Bytes of tensors up to which values are looked at though something else is wrong."""
_MOST_PROBLEMS = 5000
"""After which nothing more is looked for."""
_DIGITS = re.compile("[0-9]+")
_NUMBERS = re.compile(r"(?<=[._])[0-9]+(?=[._]|$)")


class _EnoughError(Exception):
    """So much is wrong that it is not worth looking further."""


@dataclass(frozen=True)
class Held:
    """Factors (or other tensors) of a file that differ only in the numbers in their names.

    ``name``: the module's path, or of other tensors their name, with * for each such number;
    ``count``: how many they are; ``shapes``: by factor (A, B, alpha), of others by "tensor";
    ``dtype``: of all of them; ``scales``: as far as they can be known without a model; ``why_not``:
    why they cannot be applied, "" if they may be.
    """

    name: str
    count: int
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    scales: tuple[float, ...]
    why_not: str


@dataclass(frozen=True)
class Applied:
    """What one module would get, in the layers where rank and scales are these.

    ``scales``: one, or those of its experts where they differ; ``experts``: how many have factors,
    at least and at most; ``of_experts``: how many there are (1: a dense module); ``nbytes``: on the
    device, in all these layers.
    """

    module: str
    layers: tuple[int, ...]
    experts: tuple[int, int]
    of_experts: int
    rank: int
    scales: tuple[float, ...]
    nbytes: int


@dataclass(frozen=True)
class Problem:
    """One reason to refuse, with what to do; ``count``: how many that differ only in numbers."""

    text: str
    count: int = 1


@dataclass
class Inspection:
    """What is known of an adapter. ``problems``: why it is refused; ``notes``: what is worth
    knowing, but refuses nothing.

    ``nbytes``: of tensors in the files; ``device_nbytes``: of factors in ``dtype`` on the device,
    None without a model; ``values_read``: whether every value was looked at (not of a large
    adapter that is refused without).
    """

    path: Path
    model: ModelShape | None
    dtype: str
    nbytes: int = 0
    tensors: int = 0
    base_model: str | None = None
    peft: str | None = None
    held: tuple[Held, ...] = ()
    applied: tuple[Applied, ...] = ()
    device_nbytes: int | None = None
    values_read: bool = False
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _kinds: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def accepted(self) -> bool:
        """Whether nothing is wrong (without a model: with any model)."""
        return not self.problems

    def report(self, error: AdapterFormatError | str) -> None:
        """Add a problem, or count it with those of its kind."""
        text = str(error)
        kind = _DIGITS.sub("*", text)
        if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            text = kind = "further problems, of other kinds; those above come first"
        index = self._kinds.setdefault(kind, len(self.problems))
        if index == len(self.problems):
            self.problems.append(Problem(text))
        else:
            known = self.problems[index]
            self.problems[index] = Problem(known.text, known.count + 1)
        if sum(problem.count for problem in self.problems) >= _MOST_PROBLEMS:
            raise _EnoughError


def inspect_adapter(
    path: str | Path,
    model: ModelShape | None = None,
    *,
    dtype: Any = "bfloat16",
    max_rank: int = MAX_RANK,
    max_bytes: int = MAX_BYTES,
    values: bool = True,
    links: bool = True,
) -> Inspection:
    """Look at the adapter at ``path`` (as ``read_adapter`` takes it), as a server of these limits.

    model: what it is for; None lists what it holds, and finds only what is wrong with any model.
    dtype: what the device keeps factors in. max_bytes: of tensors in its files. values: read the
    data too, for values that are not finite, now or in ``dtype`` (not of a large
    adapter that is refused without). links:
    whether its files may be symbolic links that lead out of the directory; where strangers can have
    made them, they should not.
    An adapter that would be refused gives problems, and no error; AdapterFormatError is raised
    where there is no adapter at all, ArgumentError for arguments of other types or out of range.
    """
    place = adapter_path(path)
    if model is not None:
        check_type("model", model, ModelShape)
    limits = _Limits(check_int("max_rank", max_rank, 1), check_int("max_bytes", max_bytes, 0))
    check_type("values", values, bool)
    check_type("links", links, bool)
    result = Inspection(place, model, dtype_name(resolve_dtype(dtype)))
    outside = _links_outside(place)
    if outside and not links:
        result.report(
            f"{listed(map(shown, outside))}: links that lead out of the directory; unpack it "
            "without links"
        )
        return result
    result.notes += [
        f"{shown(name)} is a link that leads out of the directory; where others can have made it, "
        "refuse it (--no-links)"
        for name in outside
    ]
    config = _config(result)
    try:
        with open_weights(place) as weights:
            _Inspector(result, weights, limits).run(config, values)
    except AdapterFormatError as error:
        result.report(error)
    except _EnoughError:
        result.problems.append(Problem("more is wrong with it than is worth telling"))
    return result


def _links_outside(place: Path) -> list[str]:
    """Names of an adapter's files that are links out of its directory."""
    home = place if place.is_dir() else place.parent
    try:
        files = sorted(home.iterdir()) if place.is_dir() else [place]
        return [
            path.name
            for path in files
            if (path.name == CONFIG_FILE or SUFFIX in path.name)
            and path.is_symlink()
            and not path.resolve().is_relative_to(home.resolve())
        ]
    except (OSError, RuntimeError):  # unreadable, or links in a circle: opening it says so
        return []


@dataclass(frozen=True)
class _Limits:
    max_rank: int
    max_bytes: int


def _config(result: Inspection) -> PeftConfig | None:
    """adapter_config.json, if it is there and can be applied."""
    if not has_config(result.path):
        return None
    try:
        config = read_config(result.path / CONFIG_FILE)
    except AdapterFormatError as error:
        result.report(error)
        return None
    result.base_model = config.base_model
    if config.release:
        result.peft = ".".join(map(str, config.release.number))
    return config


class _Inspector:
    """The steps from open files to all that an Inspection says of them."""

    def __init__(self, result: Inspection, weights: WeightFiles, limits: _Limits) -> None:
        self.result, self.weights, self.limits = result, weights, limits

    def run(self, config: PeftConfig | None, values: bool) -> None:
        """Fill the result; ``config`` is None where it is missing or cannot be applied."""
        result, weights = self.result, self.weights
        result.nbytes, result.tensors = weights.nbytes, len(weights.tensors)
        placed = tensors_by_place(weights.tensors, result.model)
        check_placed(placed, result.model, result.base_model, result.report)
        config = config or self._stand_in(placed)
        units: list[Unit] = []
        scales: dict[str, float] = {}
        if config:
            pairs = pair_up(
                placed, weights.tensors, weights.scalar, result.model, config, result.report
            )
            if result.model:
                units = self._plan(pairs, result.model, config)
            else:
                scales = self._scales(pairs, config)
            self._note_packing(config, pairs)
        self._note_empty(placed)
        result.held = _held(weights, placed, scales)
        digests: Mapping[str, bytes] = {}
        # What is refused already is not worth long reading, however large it claims to be.
        worth_it = result.accepted or weights.nbytes <= _READ_IF_REFUSED
        if self._few_bytes() and values and worth_it:
            names = _factor_names(placed)
            dtype = resolve_dtype(result.dtype)
            digests = check_values(weights, names, units, dtype, result.report)
            result.values_read = True
        if result.model:
            result.applied = _applied(units, digests, result.model, resolve_dtype(result.dtype))
            result.device_nbytes = sum(row.nbytes for row in result.applied)

    def _stand_in(self, placed: Placed) -> PeftConfig | None:
        if has_config(self.result.path) or not placed.by_key:
            return None
        try:
            return config_for(self.result.path, placed)
        except AdapterFormatError as error:
            self.result.report(error)
            return None

    def _plan(self, pairs: Sequence[Pair], model: ModelShape, config: PeftConfig) -> list[Unit]:
        units = plan_units(pairs, model, config, self.result.report)
        beyond = sorted({unit.rank for unit in units if unit.rank > self.limits.max_rank})
        if beyond:
            self.result.report(
                f"has modules of rank {listed(map(str, beyond))}; at most {self.limits.max_rank} "
                "is taken; train it at a smaller rank, or raise the limit"
            )
        return units

    def _scales(self, pairs: Sequence[Pair], config: PeftConfig) -> dict[str, float]:
        """By A's name: the scale of each pair whose rank can be known without a model."""
        scales = {}
        single = [pair for pair in pairs if pair.key.form != "group"]
        for pair in single:
            try:
                scales[pair.a_name] = scale_of(config, pair, _rank_of_one(pair))
            except AdapterFormatError as error:
                self.result.report(error)
        if len(scales) == len(pairs):  # patterns may be for what else there is
            try:
                config.check_patterns_used()
            except AdapterFormatError as error:
                self.result.report(error)
        return scales

    def _few_bytes(self) -> bool:
        """Whether the files are small enough to be read."""
        size, most = self.weights.nbytes, self.limits.max_bytes
        if size > most:
            self.result.report(
                f"has {byte_size(size)} of tensors; at most {byte_size(most)} are taken; save it "
                "in a 2-byte type or at a smaller rank, or raise the limit"
            )
        return size <= most

    def _note_empty(self, placed: Placed) -> None:
        if placed.empty and placed.by_key:
            self.result.notes.append(
                f"{counted(len(placed.empty), 'tensor')} of size 0 count as absent; if they should "
                "not be, save the adapter again with its parameters gathered from all devices; "
                f"they are: {listed(map(shown, placed.empty))}"
            )

    def _note_packing(self, config: PeftConfig, pairs: Sequence[Pair]) -> None:
        stacked = any(p.key.form == "group" and p.key.module is None for p in pairs)
        base = config.base_model or ""
        if stacked and not config.packing_told and base.startswith(_UNSLOTH):
            self.result.notes.append(
                f"it names {shown(base)}: Unsloth packed B of stacked experts expert by expert "
                "before September 2026, without saying so; it is read as peft packs it; if Unsloth "
                'trained it then, add "lora_B_layout": "grouped_by_expert" to adapter_config.json'
            )


def _rank_of_one(pair: Pair) -> int:
    """Rank of a pair that is one linear layer's. Raises AdapterFormatError if it is none."""
    a, b = pair.a.shape, pair.b.shape
    if not len(a) == len(b) == 2 or a[0] != b[1]:
        raise AdapterFormatError(
            f"{pair.where} are not [r, in] and [out, r]; save the adapter again"
        )
    return a[0]


def _factor_names(placed: Placed) -> list[str]:
    return [
        name
        for factors in placed.by_key.values()
        for factor, (name, _) in factors.items()
        if factor != "alpha"
    ]


_Row = tuple[str, tuple[tuple[str, tuple[int, ...]], ...], str, str]
"""What tensors in one row have in common: name, shapes by factor, types and why they are lost."""


def _held(weights: WeightFiles, placed: Placed, scales: Mapping[str, float]) -> tuple[Held, ...]:
    """All tensors, those alike in one row: pairs by their modules' names, then the others."""
    rows: Counter[_Row] = Counter()
    found: dict[_Row, set[float]] = defaultdict(set)
    for factors in placed.by_key.values():
        names = {factor: name for factor, (name, _) in sorted(factors.items())}
        path = next(place.path for _, place in factors.values())
        row = _common(path, {factor: weights.tensors[name] for factor, name in names.items()})
        rows[row] += 1
        found[row].update(scales[name] for name in names.values() if name in scales)
    others = dict.fromkeys(placed.empty, "size 0: absent") | dict(placed.lost)
    for name, why in sorted(others.items()):
        rows[_common(name, {"tensor": weights.tensors[name]}, why)] += 1
    return tuple(
        Held(row[0], count, dict(row[1]), row[2], tuple(sorted(found[row])), row[3])
        for row, count in rows.items()
    )


def _common(name: str, infos: Mapping[str, TensorInfo], why_not: str = "") -> _Row:
    types = sorted({str(info.dtype) for factor, info in infos.items() if factor != "alpha"})
    shapes = tuple((factor, info.shape) for factor, info in infos.items())
    return _NUMBERS.sub("*", name), shapes, ", ".join(types), why_not


_Same = tuple[str, int, tuple[float, ...]]
"""What units in one row have in common: module, rank and scales."""


def _applied(
    units: Sequence[Unit], digests: Mapping[str, bytes], model: ModelShape, dtype: Any
) -> tuple[Applied, ...]:
    """The plan by module, rank and scale, with the blocks that SlotTable would write."""
    rows: dict[_Same, list[tuple[Unit, int]]] = defaultdict(list)
    marks, written = a_marks(units, digests), set()
    for unit in units:
        size = 0 if marks[id(unit)] in written else _block(unit.a_shape, dtype)
        written.add(marks[id(unit)])
        for module, part in unit.group.splits:
            size += _block(unit.b_shape(part), dtype)
            scales = tuple(sorted(set(unit.scales)))
            rows[module, unit.rank, scales].append((unit, size))
            size = 0
    order = {module.name: i for i, module in enumerate(model.modules)}
    return tuple(
        _row(same, members)
        for same, members in sorted(
            rows.items(), key=lambda item: (order[item[0][0]], item[1][0][0].layer)
        )
    )


def _block(shape: Iterable[int], dtype: Any) -> int:
    return block_bytes(math.prod(shape) * dtype.itemsize)


def _row(same: _Same, members: Sequence[tuple[Unit, int]]) -> Applied:
    module, rank, scales = same
    named = [len(u.pairs) if u.pairs[0].key.form == "expert" else u.experts for u, _ in members]
    return Applied(
        module,
        tuple(sorted({unit.layer for unit, _ in members})),
        (min(named), max(named)),
        members[0][0].experts,
        rank,
        scales,
        sum(size for _, size in members),
    )
