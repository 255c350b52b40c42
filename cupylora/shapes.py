"""Shapes of models and limits of a runtime: what every other part is sized from.

A model is, to LoRA, a list of *modules* (linear layers an adapter may touch). Dense modules that
read the same ``x`` stand in one group and become slices of one operation; the routed experts are
described by one :class:`MoeShape`; where there are none, the MLP's projections are dense modules.
``load_model`` turns a preset's name or a Hugging Face ``config.json`` into a :class:`ModelShape`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cupylora.errors import ArgumentError

__all__ = [
    "MAX_EXPERTS",
    "MAX_LORAS",
    "MAX_RANK",
    "PRESETS",
    "LoraLimits",
    "ModelShape",
    "ModuleShape",
    "MoeShape",
    "load_model",
]

MAX_RANK = 512
MAX_EXPERTS = 2048
MAX_LORAS = 4096

ActivationKind = Literal["silu", "gelu", "relu2", "swiglu_oai"]
GateUpLayout = Literal["gate_first", "up_first", "interleaved"]


@dataclass(frozen=True)
class ModuleShape:
    """One linear layer, ``y[out_features] = W x[in_features]``; ``experts`` is 1 if it is dense."""

    name: str
    in_features: int
    out_features: int
    experts: int = 1


@dataclass(frozen=True)
class MoeShape:
    """A routed-expert MLP.

    ``gate_up_layout`` says how gate and up lie in the ``2 * intermediate`` columns of the first
    projection's output: as halves (``gate_first``, ``up_first``) or column by column
    (``interleaved``: gate 0, up 0, gate 1, ...). ``swiglu_oai`` is GPT-OSS's clamped form with
    ``alpha`` and ``limit``; the other activations ignore both. ``transposed_experts`` is true where
    the model stores expert weights as [in, out] (GPT-OSS), which adapter import needs to know.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: ActivationKind = "silu"
    gated: bool = True
    gate_up_layout: GateUpLayout = "gate_first"
    alpha: float = 1.702
    limit: float = 7.0
    expert_bias: bool = False
    transposed_experts: bool = False

    def __post_init__(self) -> None:
        for field in ("hidden", "intermediate", "experts", "top_k"):
            if getattr(self, field) < 1:
                raise ArgumentError(
                    f"MoeShape.{field} is {getattr(self, field)}; it must be at least 1"
                )
        if self.experts > MAX_EXPERTS:
            raise ArgumentError(
                f"MoeShape.experts is {self.experts}; at most {MAX_EXPERTS} are supported"
            )

    @property
    def first_width(self) -> int:
        """Columns of the first projection's output: 2·I when gated, else I."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def modules(self) -> tuple[ModuleShape, ...]:
        """Modules an adapter may touch: gate_proj (gated only), up_proj, down_proj."""
        h, i, e = self.hidden, self.intermediate, self.experts
        first = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        return (*(ModuleShape(n, h, i, e) for n in first), ModuleShape("down_proj", i, h, e))


@dataclass(frozen=True)
class LoraLimits:
    """What a runtime is sized for: ``max_loras`` device slots, adapters of up to ``max_rank``."""

    max_loras: int = 16
    max_rank: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.max_loras <= MAX_LORAS:
            raise ArgumentError(f"LoraLimits.max_loras is {self.max_loras}; use 1 to {MAX_LORAS}")
        if not 1 <= self.max_rank <= MAX_RANK:
            raise ArgumentError(f"LoraLimits.max_rank is {self.max_rank}; use 1 to {MAX_RANK}")


@dataclass(frozen=True)
class ModelShape:
    """One model: ``layers`` equal layers of dense groups followed by an optional MoE block.

    ``dense_groups``: modules of one group share their input (q, k and v, say).
    """

    name: str
    layers: int
    hidden: int
    dense_groups: tuple[tuple[ModuleShape, ...], ...]
    moe: MoeShape | None
    family: str = "generic"

    def __post_init__(self) -> None:
        for group in self.dense_groups:
            if len({m.in_features for m in group}) != 1:
                names = ", ".join(m.name for m in group)
                raise ArgumentError(f"modules {names} share an input but differ in in_features")

    @property
    def modules(self) -> tuple[ModuleShape, ...]:
        """All modules of one layer, dense ones first; a module's place here is its index."""
        dense = tuple(m for group in self.dense_groups for m in group)
        return dense + (self.moe.modules if self.moe else ())

    def module_index(self, name: str) -> int:
        """Index of module ``name`` within a layer."""
        for index, module in enumerate(self.modules):
            if module.name == name:
                return index
        known = ", ".join(m.name for m in self.modules)
        raise ArgumentError(f"model {self.name} has no module {name!r}; it has {known}")

    def with_layers(self, layers: int) -> ModelShape:
        """The same model cut to ``layers`` layers."""
        if layers < 1:
            raise ArgumentError(f"layers is {layers}; it must be at least 1")
        return replace(self, layers=layers)


def _attention(hidden: int, q: int, kv: int) -> tuple[tuple[ModuleShape, ...], ...]:
    qkv = (
        ModuleShape("q_proj", hidden, q),
        ModuleShape("k_proj", hidden, kv),
        ModuleShape("v_proj", hidden, kv),
    )
    return (qkv, (ModuleShape("o_proj", q, hidden),))


def _dense_mlp(hidden: int, intermediate: int) -> tuple[tuple[ModuleShape, ...], ...]:
    first = tuple(ModuleShape(name, hidden, intermediate) for name in ("gate_proj", "up_proj"))
    return (first, (ModuleShape("down_proj", intermediate, hidden),))


def _latent_attention(
    hidden: int, q_rank: int, kv_rank: int, heads: int, nope: int, rope: int, v: int
) -> tuple[tuple[ModuleShape, ...], ...]:
    return (
        (
            ModuleShape("q_a_proj", hidden, q_rank),
            ModuleShape("kv_a_proj_with_mqa", hidden, kv_rank + rope),
        ),
        (ModuleShape("q_b_proj", q_rank, heads * (nope + rope)),),
        (ModuleShape("kv_b_proj", kv_rank, heads * (nope + v)),),
        (ModuleShape("o_proj", heads * v, hidden),),
    )


PRESETS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape("tiny-moe", 2, 64, _attention(64, 64, 32), MoeShape(64, 48, 8, 2), "qwen3_moe"),
        ModelShape(
            "qwen3-30b-a3b",
            48,
            2048,
            _attention(2048, 4096, 512),
            MoeShape(2048, 768, 128, 8),
            "qwen3_moe",
        ),
        ModelShape(
            "mixtral-8x7b",
            32,
            4096,
            _attention(4096, 4096, 1024),
            MoeShape(4096, 14336, 8, 2),
            "mixtral",
        ),
        ModelShape(
            "gpt-oss-20b",
            24,
            2880,
            _attention(2880, 4096, 512),
            MoeShape(
                2880,
                2880,
                32,
                4,
                activation="swiglu_oai",
                gate_up_layout="interleaved",
                expert_bias=True,
                transposed_experts=True,
            ),
            "gpt_oss",
        ),
        ModelShape(
            "deepseek-v3",
            61,
            7168,
            _latent_attention(7168, 1536, 512, 128, 128, 64, 128),
            MoeShape(7168, 2048, 256, 8),
            "deepseek_v3",
        ),
    )
}


def load_model(source: str) -> ModelShape:
    """A preset by name, or a Hugging Face ``config.json`` by its path or its folder's."""
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ArgumentError(
            f"model {source!r} is neither a preset ({', '.join(PRESETS)}) nor a config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArgumentError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return _from_config(config, path)


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu2": "relu2",
}


class _Config:
    """Typed look-ups in a ``config.json``, with errors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def int(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value is not None:
                raise ArgumentError(
                    f"{self.path}: {key} is {value!r}; a positive integer is needed"
                )
        if default is None:
            raise ArgumentError(f"{self.path}: none of {', '.join(keys)} is present")
        return default


def _from_config(values: Mapping[str, Any], path: Path) -> ModelShape:
    config = _Config(values, path)
    family = str(values.get("model_type", "generic"))
    hidden = config.int("hidden_size")
    heads = config.int("num_attention_heads")
    if family in ("deepseek_v2", "deepseek_v3") and values.get("q_lora_rank"):
        dense = _latent_attention(
            hidden,
            config.int("q_lora_rank"),
            config.int("kv_lora_rank"),
            heads,
            config.int("qk_nope_head_dim"),
            config.int("qk_rope_head_dim"),
            config.int("v_head_dim"),
        )
    else:
        head_dim = config.int("head_dim", default=hidden // heads)
        kv_heads = config.int("num_key_value_heads", default=heads)
        dense = _attention(hidden, heads * head_dim, kv_heads * head_dim)
    moe = _moe_from_config(config, family, hidden) if _has_experts(config) else None
    if moe is None:
        dense += _dense_mlp(hidden, config.int("intermediate_size"))
    return ModelShape(
        name=path.parent.name if path.name == "config.json" else path.stem,
        layers=config.int("num_hidden_layers"),
        hidden=hidden,
        dense_groups=dense,
        moe=moe,
        family=family,
    )


def _has_experts(config: _Config) -> bool:
    """Whether the model has routed experts, in some of its layers at least.

    Raises ArgumentError for a config that speaks of experts but gives their number under no key
    known here: taken for a dense model it would be another one.
    """
    told = {key: value for key, value in config.values.items() if value}
    if any(key in told for key in _EXPERT_COUNTS):
        return True
    odd = [key for key in told if "expert" in key or key.startswith("moe_")]
    if odd and not any(key in config.values for key in _EXPERT_COUNTS):
        raise ArgumentError(
            f"{config.path}: has {', '.join(odd)}, but none of {', '.join(_EXPERT_COUNTS)}, so "
            "that its number of experts is unknown; add one of them, or remove those for a dense "
            "model"
        )
    return False


def _moe_from_config(config: _Config, family: str, hidden: int) -> MoeShape:
    experts = config.int(*_EXPERT_COUNTS)
    top_k = config.int("num_experts_per_tok", "experts_per_token")
    intermediate = config.int("moe_intermediate_size", "intermediate_size")
    if family == "gpt_oss":
        preset = PRESETS["gpt-oss-20b"].moe
        if preset is None:
            raise ArgumentError("the gpt-oss-20b preset has no experts")
        limit = config.values.get("swiglu_limit", preset.limit)
        return replace(
            preset,
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            top_k=top_k,
            limit=float(limit),
        )
    name = str(config.values.get("hidden_act", "silu"))
    if name not in _ACTIVATIONS:
        raise ArgumentError(
            f"{config.path}: hidden_act {name!r} is not supported; "
            f"use one of {', '.join(_ACTIVATIONS)}"
        )
    return MoeShape(hidden, intermediate, experts, top_k, activation=_ACTIVATIONS[name])
