"""``adapter_config.json``: the scale and rank of every module, and what we cannot apply.

In: the file peft writes. Out: a :class:`PeftConfig`, which ``peft`` asks for each pair's scale.
The config's own ``r`` is not used: a rank is that of the tensor, and a rank_pattern must agree with
it. Settings that change the mathematics in a way we do not implement are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupylora.errors import AdapterFormatError

__all__ = ["PeftConfig", "read_config"]

_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights under which the base weights stay as they were."""

_LARGEST_SCALE = float(np.finfo(np.float32).max)

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
class PeftConfig:
    """What of adapter_config.json decides the numbers.

    ``version`` is peft's (major, minor), None if the file does not say (releases before 0.18, other
    tools). ``target_parameters`` are the stacked parameters the adapter was asked to adapt.
    ``base_model`` is what the file calls the model it was trained on, for messages.
    """

    path: Path
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_parameters: tuple[str, ...]
    version: tuple[int, int] | None
    base_model: str | None
    _matched: set[tuple[str, str]] = field(default_factory=set)

    def scale(self, paths: Iterable[str], rank: int, tensor: str) -> float:
        """alpha/rank, or alpha/√rank with rsLoRA, of the module known by any of ``paths``.

        The rank is the tensor's. Raises AdapterFormatError if a rank_pattern says otherwise, or the
        scale is beyond float32.
        """
        paths = tuple(paths)
        told = self._lookup("rank_pattern", self.rank_pattern, paths, rank)
        if told != rank:
            raise AdapterFormatError(
                f"{self.path}: rank_pattern gives {tensor} rank {told}, but its tensor has {rank}"
            )
        alpha = self._lookup("alpha_pattern", self.alpha_pattern, paths, self.alpha)
        scale = alpha / (math.sqrt(rank) if self.rslora else rank)
        if abs(scale) > _LARGEST_SCALE:
            raise AdapterFormatError(f"{self.path}: {tensor} gets scale {scale}, beyond float32")
        return scale

    def _lookup(
        self, field_name: str, patterns: Mapping[str, float], paths: tuple[str, ...], default: float
    ) -> float:
        """Value of the first pattern that matches, as peft matches them: at the end of the path."""
        values = []
        for pattern, value in patterns.items():
            try:
                found = any(re.match(rf"(.*\.)?({pattern})$", path) for path in paths)
            except (re.error, OverflowError, RecursionError) as error:
                raise AdapterFormatError(
                    f"{self.path}: {field_name} key {pattern!r} is no regular expression ({error})"
                ) from error
            if found:
                self._matched.add((field_name, pattern))
                values.append(value)
        return values[0] if values else default

    def check_patterns_used(self) -> None:
        """Raise AdapterFormatError naming each pattern that matched no module of the file."""
        keys = [("rank_pattern", key) for key in self.rank_pattern]
        keys += [("alpha_pattern", key) for key in self.alpha_pattern]
        unused = [f"{name} key {key!r}" for name, key in keys if (name, key) not in self._matched]
        if unused:
            raise AdapterFormatError(
                f"{self.path}: no adapted module matches {', '.join(unused)}; correct or remove it"
            )


def read_config(path: Path) -> PeftConfig:
    """Read ``adapter_config.json``.

    Raises AdapterFormatError if it is unreadable, not LoRA, lacks lora_alpha, or asks for
    something we cannot apply (all such settings are named).
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(values, dict):
        raise AdapterFormatError(f"{path}: holds a {type(values).__name__}; an object is needed")
    if values.get("peft_type") != "LORA":
        raise AdapterFormatError(f"{path}: peft_type is {values.get('peft_type')!r}, not 'LORA'")
    refused = [
        f"{key} = {values[key]!r} ({reason})"
        for key, (test, reason) in _REFUSED.items()
        if key in values and _tested(test, values[key])
    ]
    if refused:
        raise AdapterFormatError(f"{path}: cannot be applied: {'; '.join(refused)}")
    version = re.match(r"(\d{1,6})\.(\d{1,6})", str(values.get("peft_version")))
    return PeftConfig(
        path=path,
        alpha=_number(path, "lora_alpha", values.get("lora_alpha")),
        rslora=_flag(path, "use_rslora", values.get("use_rslora")),
        rank_pattern={k: _whole(path, k, v) for k, v in _pattern(path, values, "rank_pattern")},
        alpha_pattern=dict(_pattern(path, values, "alpha_pattern")),
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
    if value not in (True, False, None):
        raise AdapterFormatError(f"{path}: {key} is {value!r}; true or false is needed")
    return bool(value)


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterFormatError(f"{path}: {key} is {value!r}; a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterFormatError(f"{path}: {key} is {value!r}; a finite number is needed")
    return number


def _whole(path: Path, key: str, value: float) -> int:
    if value < 1 or value != int(value):
        raise AdapterFormatError(f"{path}: rank {key} is {value}; a positive integer is needed")
    return int(value)


def _pattern(path: Path, values: Mapping[str, Any], key: str) -> list[tuple[str, float]]:
    pattern = values.get(key) or {}
    if not isinstance(pattern, dict):
        raise AdapterFormatError(f"{path}: {key} is {pattern!r}; an object is needed")
    return [(name, _number(path, f"{key}[{name!r}]", value)) for name, value in pattern.items()]


def _strings(path: Path, values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    listed = values.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise AdapterFormatError(f"{path}: {key} is {listed!r}; a list of names is needed")
    return tuple(listed)
