"""``adapter_config.json``: the scale and rank of every module, and what we cannot apply.

In: the file peft writes. Out: a :class:`PeftConfig`, which ``peft`` asks for each pair's scale.
A rank is that of the tensor, and the file must agree with it: the first rank_pattern that matches
the module, else ``r``. For alpha was chosen with the rank that the file states; were another rank
in the tensors, the scale would silently be another one. (A file without ``r`` states no rank, and
contradicts none.) Settings that change the mathematics in a way we do not implement are refused by
name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupylora.adapters.dtypes import kept_by_float32
from cupylora.adapters.path_pattern import PatternTable
from cupylora.errors import AdapterFormatError
from cupylora.files import read_json, reason
from cupylora.shapes import MAX_RANK
from cupylora.text import listed, quoted, shown

__all__ = ["PeftConfig", "read_config"]

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

    setting: str
    keys: tuple[str, ...]
    values: tuple[float, ...]
    table: PatternTable

    def value(self, paths: tuple[str, ...]) -> tuple[str, float] | None:
        """What is told of a module: by which key (for messages), and the value."""
        number = self.table.first(paths)
        return None if number is None else (self._where(number), self.values[number])

    def unmatched(self) -> list[str]:
        """The keys that match no module asked for, for messages."""
        return list(map(self._where, self.table.unmatched()))

    def _where(self, number: int) -> str:
        return f"{self.setting} key {quoted(self.keys[number])}"


@dataclass(frozen=True)
class PeftConfig:
    """What of adapter_config.json decides the numbers.

    ``rank`` is the file's r, None if it has none. ``version`` is peft's (major, minor), None if the
    file does not say (releases before 0.18, other tools). ``target_parameters`` are the stacked
    parameters the adapter was asked to adapt. ``base_model`` is what the file calls the model it
    was trained on, for messages.
    """

    path: Path
    rank: int | None
    alpha: float
    rslora: bool
    rank_patterns: _Patterns
    alpha_patterns: _Patterns
    target_parameters: tuple[str, ...]
    version: tuple[int, int] | None
    base_model: str | None

    def scale(self, paths: Iterable[str], rank: int, tensor: str) -> float:
        """alpha/rank, or alpha/√rank with rsLoRA, of the module known by any of ``paths``.

        The rank is the tensor's. Raises AdapterFormatError if the file says otherwise, the rank is
        beyond MAX_RANK, or the scale is beyond float32 (too large, or lost to 0).
        """
        paths = tuple(dict.fromkeys(paths))
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
            raise self._error(f"{shown(tensor)} has rank {rank}; at most {MAX_RANK} is supported")
        pattern = self.alpha_patterns.value(paths)
        alpha = self.alpha if pattern is None else pattern[1]
        scale = alpha / (math.sqrt(rank) if self.rslora else rank)
        if not kept_by_float32(scale):
            raise self._error(
                f"{shown(tensor)} gets scale {scale}, beyond float32; correct lora_alpha"
            )
        return scale

    def _error(self, problem: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.path}: {problem}")

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
        raise AdapterFormatError(f"{path}: cannot be read: {reason(error)}") from error
    if values.get("peft_type") != "LORA":
        raise AdapterFormatError(
            f"{path}: peft_type is {quoted(values.get('peft_type'))}, not 'LORA'"
        )
    refused = [
        f"{key} = {quoted(values[key])} ({why})"
        for key, (test, why) in _REFUSED.items()
        if key in values and _tested(test, values[key])
    ]
    if refused:
        raise AdapterFormatError(f"{path}: cannot be applied: {'; '.join(refused)}")
    version = re.match(r"([0-9]{1,6})\.([0-9]{1,6})", str(values.get("peft_version")))
    return PeftConfig(
        path=path,
        rank=None if values.get("r") is None else _rank(path, "r", values["r"]),
        alpha=_number(path, "lora_alpha", values.get("lora_alpha")),
        rslora=_flag(path, "use_rslora", values.get("use_rslora")),
        rank_patterns=_patterns(path, values, "rank_pattern", _rank),
        alpha_patterns=_patterns(path, values, "alpha_pattern", _number),
        target_parameters=_strings(path, values, "target_parameters"),
        version=(int(version[1]), int(version[2])) if version else None,
        base_model=str(values.get("base_model_name_or_path") or "") or None,
    )


def _tested(test: _Test, value: Any) -> bool:
    """``test`` on a value that may be of any JSON type; one it cannot judge is refused."""
    try:
        return test(value)
    except TypeError:
        return True


def _flag(path: Path, key: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterFormatError(f"{path}: {key} is {quoted(value)}; true or false is needed")
    return bool(value)


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterFormatError(f"{path}: {key} is {quoted(value)}; a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterFormatError(f"{path}: {key} is {quoted(value)}; a finite number is needed")
    return number


def _rank(path: Path, key: str, value: Any) -> int:
    number = _number(path, key, value)
    if number < 1 or number != int(number):
        raise AdapterFormatError(f"{path}: {key} is {quoted(value)}; a positive integer is needed")
    return int(number)


def _patterns(
    path: Path, values: Mapping[str, Any], setting: str, read: Callable[[Path, str, Any], float]
) -> _Patterns:
    entries = values.get(setting) or {}
    if not isinstance(entries, dict):
        raise AdapterFormatError(f"{path}: {setting} is {quoted(entries)}; an object is needed")
    table = PatternTable()
    for key in entries:
        try:
            table.add(key)
        except ValueError as error:
            raise AdapterFormatError(
                f"{path}: {setting} key {quoted(key)} cannot be read: {error}; write such keys "
                "more simply, as plain paths say"
            ) from error
    numbers = (read(path, f"{setting}[{quoted(key)}]", value) for key, value in entries.items())
    return _Patterns(setting, tuple(entries), tuple(numbers), table)


def _strings(path: Path, values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise AdapterFormatError(f"{path}: {key} is {quoted(names)}; a list of names is needed")
    return tuple(names)
