"""``adapter_config.json``: the scale and rank of every module, and what we cannot apply.

In: the file peft writes. Out: a :class:`PeftConfig`, which ``assembly`` asks for each pair's scale.
A rank is that of the tensor, and the file must agree with it: the first rank_pattern that matches
the module, else ``r``. For alpha was chosen with the rank that the file states; were another rank
in the tensors, the scale would silently be another one. (A file without ``r`` states no rank, and
contradicts none.) Settings that change the mathematics in a way we do not implement are refused by
name. Kohya's files have an alpha per module in place of this file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cupylora.adapters.dtypes import kept_by_float32
from cupylora.adapters.path_pattern import PatternTable, TooMuchWorkError
from cupylora.errors import AdapterFormatError
from cupylora.files import named, read_json, reason
from cupylora.shapes import MAX_RANK
from cupylora.text import listed, quoted, shown

__all__ = [
    "AXES_KEY",
    "CONFIG_FILE",
    "IN_OUT",
    "OUT_IN",
    "PeftConfig",
    "Release",
    "no_config",
    "read_config",
]

CONFIG_FILE = "adapter_config.json"
AXES_KEY = "cupylora_expert_axes"
"""Ours: what the sides of stacked A and B are, for files of which nothing else tells it."""
IN_OUT, OUT_IN = "in_out", "out_in"
_PACKING_KEY, _PACKING_DETAIL = "lora_B_layout", "unsloth_fused_expert_lora"
"""Unsloth's, of how stacked B has experts (unsloth-zoo, ``write_fused_expert_lora_layout``)."""
_RANK_MAJOR, _BY_EXPERT = "rank_major", "grouped_by_expert"

_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights under which the base weights stay as they were."""


_Test = Callable[[Any], bool]
_REFUSED: dict[str, tuple[_Test, str]] = {
    "use_dora": (bool, "DoRA scales the base weights themselves"),
    "bias": (lambda v: v not in (None, "none"), "trained biases are not supported"),
    "lora_bias": (bool, "a bias of lora_B is not supported"),
    "modules_to_save": (bool, "fully trained modules are not supported"),
    "trainable_token_indices": (bool, "trained token embeddings are not supported"),
    "layer_replication": (bool, "replicated layers are not supported"),
    "alora_invocation_tokens": (bool, "activated LoRA is not supported"),
    "use_qalora": (bool, "QA-LoRA pools its input"),
    "use_bdlora": (bool, "block-diagonal LoRA is not supported"),
    "arrow_config": (bool, "Arrow routing is not supported"),
    "monteclora_config": (bool, "MonteCLoRA is not supported"),
    "velora_config": (bool, "VeLoRA is not supported"),
    "kasa_config": (bool, "KaSA changes the base weights"),
    "init_lora_weights": (
        lambda v: v not in _PLAIN_INITS,
        "this initialisation changes the base weights; convert the adapter "
        "(save_pretrained with path_initial_model_for_weight_conversion)",
    ),
}


@dataclass(frozen=True)
class _Patterns:
    """rank_pattern or alpha_pattern: keys and values in the file's order."""

    path: Path
    setting: str
    keys: tuple[str, ...]
    values: tuple[float, ...]
    table: PatternTable

    def value(self, paths: tuple[str, ...]) -> tuple[str, float] | None:
        """What is told of a module: by which key (for messages), and the value."""
        try:
            number = self.table.first(paths)
        except TooMuchWorkError:
            raise self._too_much() from None
        return None if number is None else (self._where(number), self.values[number])

    def unmatched(self) -> list[str]:
        """The keys that match no module asked for, for messages."""
        try:
            return list(map(self._where, self.table.unmatched()))
        except TooMuchWorkError:
            raise self._too_much() from None

    def _too_much(self) -> AdapterFormatError:
        return AdapterFormatError(
            f"{named(self.path)}: the expressions of {self.setting} take too long to match with "
            "all modules; use fewer or simpler ones, or the modules' paths"
        )

    def _where(self, number: int) -> str:
        return f"{self.setting} key {quoted(self.keys[number])}"


class Release(NamedTuple):
    """A version of peft; ``final``: it is no development version."""

    number: tuple[int, int, int]
    final: bool


@dataclass(frozen=True)
class PeftConfig:
    """What of adapter_config.json decides the numbers.

    ``rank`` is the file's r and ``alpha`` its lora_alpha, None where there is none. ``release`` is
    the peft that wrote it, None if the file does not say (releases before 0.18, other tools).
    ``target_parameters`` are the stacked parameters the adapter was asked to adapt; ``expert_axes``
    (IN_OUT or OUT_IN) and ``by_expert`` tell of stacked experts what AXES_KEY and Unsloth's marker
    say. ``base_model`` is what the file calls the model it was trained on, for messages.
    """

    path: Path
    rank: int | None
    alpha: float | None
    rslora: bool
    rank_patterns: _Patterns
    alpha_patterns: _Patterns
    target_parameters: tuple[str, ...]
    release: Release | None
    expert_axes: str | None
    by_expert: bool
    packing_told: bool
    base_model: str | None

    def scale(
        self, paths: Iterable[str], rank: int, tensor: str, stored: float | None = None
    ) -> float:
        """alpha/rank, or alpha/√rank with rsLoRA, of the module known by any of ``paths``.

        The rank is the tensor's; ``stored`` is the alpha that stands beside it in the weights file,
        if any. Raises AdapterFormatError if the file says otherwise, the rank is beyond MAX_RANK,
        or the scale is beyond float32 (too large, or lost to 0).
        """
        paths = tuple(dict.fromkeys(paths))
        self._check_rank(paths, rank, tensor)
        alpha = self._alpha(paths, rank, tensor, stored)
        scale = alpha / (math.sqrt(rank) if self.rslora else rank)
        if not kept_by_float32(scale):
            raise self._error(
                f"{shown(tensor)} gets scale {scale}, beyond float32; correct lora_alpha"
            )
        return scale

    def _check_rank(self, paths: tuple[str, ...], rank: int, tensor: str) -> None:
        told = self.rank_patterns.value(paths)
        if told is not None and told[1] != rank:
            raise self._error(
                f"{told[0]} gives {shown(tensor)} rank {told[1]:.0f}, but its tensor has "
                f"rank {rank}; correct rank_pattern"
            )
        if told is None and self.rank not in (None, rank):
            raise self._error(
                f"r is {self.rank} and no rank_pattern key matches {shown(tensor)}, but its tensor "
                f"has rank {rank}; correct r, or add the module and its rank to rank_pattern (the "
                "scale depends on them)"
            )
        if rank > MAX_RANK:
            raise self._error(
                f"{shown(tensor)} has rank {rank}; at most {MAX_RANK} is supported, so reduce it"
            )

    def _alpha(self, paths: tuple[str, ...], rank: int, tensor: str, stored: float | None) -> float:
        """The pattern's, else the file's, which ``stored`` must equal; else ``stored``.

        Without any, the rank: files of Kohya's scripts without alpha have scale 1
        (``create_network_from_weights`` in its networks/lora.py).
        """
        if stored is not None and (stored == 0 or not math.isfinite(stored)):
            raise self._error(
                f"the alpha beside {shown(tensor)} is {stored}, which tools read differently; "
                "write the alpha that is meant"
            )
        pattern = self.alpha_patterns.value(paths)
        alpha = self.alpha if pattern is None else pattern[1]
        if alpha is None:
            return rank if stored is None else stored
        if stored not in (None, alpha):
            raise self._error(
                f"alpha is {alpha} here, but {stored} beside {shown(tensor)} in the weights file; "
                "remove the one that is wrong"
            )
        return alpha

    def _error(self, problem: str) -> AdapterFormatError:
        return AdapterFormatError(f"{named(self.path)}: {problem}")

    def check_patterns_used(self) -> None:
        """Raise AdapterFormatError naming each pattern that matched no module of the file."""
        unused = [*self.rank_patterns.unmatched(), *self.alpha_patterns.unmatched()]
        if unused:
            raise self._error(
                f"no adapted module matches {listed(unused)}; correct or remove each of them"
            )


def read_config(path: Path) -> PeftConfig:
    """Read ``adapter_config.json``.

    Raises AdapterFormatError if it is unreadable, not LoRA, lacks lora_alpha, or asks for
    something we cannot apply (all such settings are named).
    """
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise AdapterFormatError(
            f"{named(path)}: cannot be read: {reason(error)}; copy or save it again"
        ) from error
    if values.get("peft_type") != "LORA":
        raise AdapterFormatError(
            f"{named(path)}: peft_type is {quoted(values.get('peft_type'))}; only adapters of "
            "type 'LORA' are read"
        )
    refused = [
        f"{key} = {quoted(values[key])} ({why})"
        for key, (test, why) in _REFUSED.items()
        if key in values and _tested(test, values[key])
    ]
    if refused:
        raise AdapterFormatError(
            f"{named(path)}: cannot be applied: {'; '.join(refused)}; train the adapter again "
            "without that, or merge it into the base weights"
        )
    by_expert, told = _packing(path, values)
    return PeftConfig(
        path=path,
        rank=None if values.get("r") is None else _rank(path, "r", values["r"]),
        alpha=_number(path, "lora_alpha", values.get("lora_alpha")),
        rslora=_flag(path, "use_rslora", values.get("use_rslora")),
        rank_patterns=_patterns(path, values, "rank_pattern", _rank),
        alpha_patterns=_patterns(path, values, "alpha_pattern", _number),
        target_parameters=_strings(path, values, "target_parameters"),
        release=_release(values.get("peft_version")),
        expert_axes=_one_of(path, AXES_KEY, values.get(AXES_KEY), (IN_OUT, OUT_IN)),
        by_expert=by_expert,
        packing_told=told,
        base_model=str(values.get("base_model_name_or_path") or "") or None,
    )


def no_config(path: Path) -> PeftConfig:
    """For a weights file (Kohya's) that says all by itself; ``path`` is for messages."""
    none: Mapping[str, Any] = {}
    patterns = [_patterns(path, none, key, _number) for key in ("rank_pattern", "alpha_pattern")]
    return PeftConfig(
        path, None, None, False, patterns[0], patterns[1], (), None, None, False, False, None
    )


def _release(value: Any) -> Release | None:
    """Of ``"0.21.2"`` or ``"0.19.1.dev0@main"``; None for what is no version."""
    found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?(.*)", str(value))
    if not found:
        return None
    return Release((int(found[1]), int(found[2]), int(found[3] or 0)), not found[4])


def _packing(path: Path, values: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether stacked B has its columns expert by expert, and whether the file says anything.

    Unsloth read and trained them so until September 2026, and marks it; without a mark they are as
    peft has them.
    """
    known = (_RANK_MAJOR, _BY_EXPERT)
    said = _one_of(path, _PACKING_KEY, values.get(_PACKING_KEY), known)
    detail = values.get(_PACKING_DETAIL)
    parameters = detail.get("parameters") if isinstance(detail, dict) else None
    for name, entry in parameters.items() if isinstance(parameters, dict) else ():
        one = entry.get(_PACKING_KEY) if isinstance(entry, dict) else None
        if one is not None and one != said:
            raise AdapterFormatError(
                f"{named(path)}: {_PACKING_DETAIL} says {quoted(one)} of {quoted(name)}, but "
                f"{_PACKING_KEY} is {quoted(said)}; make them one, as only one packing of all "
                "parameters is read"
            )
    return said == _BY_EXPERT, said is not None


def _one_of(path: Path, key: str, value: Any, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        raise AdapterFormatError(
            f"{named(path)}: {key} is {quoted(value)}; one of {', '.join(known)} is needed"
        )
    return None if value is None else str(value)


def _tested(test: _Test, value: Any) -> bool:
    """``test`` on a value that may be of any JSON type; one it cannot judge is refused."""
    try:
        return test(value)
    except TypeError:
        return True


def _flag(path: Path, key: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterFormatError(
            f"{named(path)}: {key} is {quoted(value)}; true or false is needed"
        )
    return bool(value)


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterFormatError(f"{named(path)}: {key} is {quoted(value)}; a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterFormatError(
            f"{named(path)}: {key} is {quoted(value)}; a finite number is needed"
        )
    return number


def _rank(path: Path, key: str, value: Any) -> int:
    number = _number(path, key, value)
    if number < 1 or number != int(number):
        raise AdapterFormatError(
            f"{named(path)}: {key} is {quoted(value)}; a positive integer is needed"
        )
    return int(number)


def _patterns(
    path: Path, values: Mapping[str, Any], setting: str, read: Callable[[Path, str, Any], float]
) -> _Patterns:
    entries = values.get(setting) or {}
    if not isinstance(entries, dict):
        raise AdapterFormatError(
            f"{named(path)}: {setting} is {quoted(entries)}; an object is needed"
        )
    table = PatternTable()
    for key in entries:
        try:
            table.add(key)
        except ValueError as error:
            raise AdapterFormatError(
                f"{named(path)}: {setting} key {quoted(key)} cannot be read: {error}; write such "
                "keys more simply, as plain paths say"
            ) from error
    numbers = (read(path, f"{setting}[{quoted(key)}]", value) for key, value in entries.items())
    return _Patterns(path, setting, tuple(entries), tuple(numbers), table)


def _strings(path: Path, values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise AdapterFormatError(
            f"{named(path)}: {key} is {quoted(names)}; a list of names is needed"
        )
    return tuple(names)
