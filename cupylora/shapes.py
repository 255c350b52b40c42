"""Shapes of models and limits of a runtime: what every other part is sized from.

A model is, to LoRA, a list of *modules* (linear layers an adapter may touch). Dense modules that
read the same ``x`` stand in one group and become slices of one operation; the routed experts are
described by one :class:`MoeShape`; where there are none, the MLP's projections are dense modules.
``load_model`` turns a preset's name or a Hugging Face ``config.json`` into a :class:`ModelShape`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cupylora.errors import ArgumentError
from cupylora.files import is_folder, read_json, reason
from cupylora.text import listed, quoted, shown

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

_MAX_SIZE = 2**31 - 1
"""Of features and layers: kernels count them in int32."""


def _check_count(where: str, value: Any, most: int = _MAX_SIZE) -> None:
    """Raise ArgumentError unless ``value`` is an int (bool is none) from 1 to ``most``."""
    if type(value) is not int or not 1 <= value <= most:
        raise ArgumentError(f"{where} is {quoted(value)}; an integer from 1 to {most} is needed")


def _check_type(where: str, value: Any, kind: type, need: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentError(f"{where} is {quoted(value)}; {need} is needed")


def _check_choice(where: str, value: Any, choices: Any) -> None:
    """``choices``: a Literal of strings."""
    if not isinstance(value, str) or value not in get_args(choices):
        known = ", ".join(get_args(choices))
        raise ArgumentError(f"{where} is {quoted(value)}; one of {known} is needed")


def _check_layers(where: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(type(i) is int and i >= 0 for i in value):
        raise ArgumentError(f"{where} is {quoted(value)}; a tuple of layers' numbers is needed")


def _is_finite(value: Any) -> bool:
    """Whether ``value`` is a finite real number (bool is none) within float32's range."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and abs(value) < 2.0**127 and not math.isnan(value)


@dataclass(frozen=True)
class ModuleShape:
    """One linear layer, ``y[out_features] = W x[in_features]``; ``experts`` is 1 if it is dense.

    layers: of the model that have it, None: all. Raises ArgumentError for a size that is no int or
    out of range.
    """

    name: str
    in_features: int
    out_features: int
    experts: int = 1
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_type("ModuleShape.name", self.name, str, "a string")
        where = f"ModuleShape {quoted(self.name)}:"
        _check_count(f"{where} in_features", self.in_features)
        _check_count(f"{where} out_features", self.out_features)
        _check_count(f"{where} experts", self.experts, MAX_EXPERTS)
        if self.layers is not None:
            _check_layers(f"{where} layers", self.layers)

    def is_in(self, layer: int) -> bool:
        """Whether ``layer`` has it."""
        return self.layers is None or layer in self.layers


@dataclass(frozen=True)
class MoeShape:
    """A routed-expert MLP.

    ``experts`` are those of the model, of which a plan may hold a part (expert parallelism);
    ``top_k`` of them are chosen a token, so it cannot exceed them. ``gate_up_layout`` says how gate
    and up lie in the ``2 * intermediate`` columns of the first projection's output: as halves
    (``gate_first``, ``up_first``) or column by column (``interleaved``: gate 0, up 0, gate 1, ...).
    ``swiglu_oai`` is GPT-OSS's clamped form with ``alpha`` and ``limit``; the other activations
    ignore both. ``transposed_experts`` is true where the model stores expert weights as [in, out]
    (GPT-OSS, Llama-4), which adapter import needs to know.
    Raises ArgumentError, naming the field, for a value of another type or out of range.
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
            most = MAX_EXPERTS if field == "experts" else _MAX_SIZE
            _check_count(f"MoeShape.{field}", getattr(self, field), most)
        if self.top_k > self.experts:
            raise ArgumentError(
                f"MoeShape.top_k is {self.top_k}; at most experts ({self.experts}) can be chosen"
            )
        _check_choice("MoeShape.activation", self.activation, ActivationKind)
        _check_choice("MoeShape.gate_up_layout", self.gate_up_layout, GateUpLayout)
        for field in ("gated", "expert_bias", "transposed_experts"):
            _check_type(f"MoeShape.{field}", getattr(self, field), bool, "True or False")
        if not _is_finite(self.alpha):
            raise ArgumentError(
                f"MoeShape.alpha is {quoted(self.alpha)}; a finite number is needed"
            )
        if not _is_finite(self.limit) or self.limit <= 0:
            raise ArgumentError(
                f"MoeShape.limit is {quoted(self.limit)}; a positive finite number is needed"
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
        _check_count("LoraLimits.max_loras", self.max_loras, MAX_LORAS)
        _check_count("LoraLimits.max_rank", self.max_rank, MAX_RANK)


@dataclass(frozen=True)
class ModelShape:
    """One model: ``layers`` layers of dense groups followed by an optional MoE block.

    ``dense_groups``: modules of one group share their input (q, k and v, say). In models with
    experts, those of a shared expert are named ``shared_gate_proj`` and so on, those of an MLP in
    place of the experts ``dense_gate_proj`` and so on. ``dense_layers``: those without experts.
    Raises ArgumentError for fields of other types, sizes out of range, and groups that cannot share
    their input.
    """

    name: str
    layers: int
    hidden: int
    dense_groups: tuple[tuple[ModuleShape, ...], ...]
    moe: MoeShape | None
    family: str = "generic"
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_layers("ModelShape.dense_layers", self.dense_layers)
        for field in ("name", "family"):
            _check_type(f"ModelShape.{field}", getattr(self, field), str, "a string")
        _check_count("ModelShape.layers", self.layers)
        _check_count("ModelShape.hidden", self.hidden)
        if self.moe is not None:
            _check_type("ModelShape.moe", self.moe, MoeShape, "a MoeShape or None")
        groups = self.dense_groups
        _check_type("ModelShape.dense_groups", groups, tuple, "a tuple of tuples of ModuleShape")
        for group in groups:
            if not (isinstance(group, tuple) and all(isinstance(m, ModuleShape) for m in group)):
                raise ArgumentError(
                    f"ModelShape.dense_groups holds {quoted(group)}; a tuple of ModuleShape is "
                    "needed"
                )
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
        raise ArgumentError(f"model {self.name} has no module {quoted(name)}; it has {known}")

    def with_layers(self, layers: int) -> ModelShape:
        """The same model cut to ``layers`` layers."""
        _check_count("layers", layers)
        return replace(self, layers=layers)


def _attention(hidden: int, q: int, kv: int) -> tuple[tuple[ModuleShape, ...], ...]:
    qkv = (
        ModuleShape("q_proj", hidden, q),
        ModuleShape("k_proj", hidden, kv),
        ModuleShape("v_proj", hidden, kv),
    )
    return (qkv, (ModuleShape("o_proj", q, hidden),))


def _dense_mlp(
    hidden: int, intermediate: int, prefix: str = "", layers: tuple[int, ...] | None = None
) -> tuple[tuple[ModuleShape, ...], ...]:
    gate, up = (
        ModuleShape(f"{prefix}{name}", hidden, intermediate, layers=layers)
        for name in ("gate_proj", "up_proj")
    )
    down = ModuleShape(f"{prefix}down_proj", intermediate, hidden, layers=layers)
    return ((gate, up), (down,))


def _beside_experts(
    hidden: int, layers: int, *, shared: int = 0, dense: int = 0, dense_layers: tuple[int, ...] = ()
) -> tuple[tuple[ModuleShape, ...], ...]:
    """MLPs of a model with experts: a shared expert of ``shared`` features (0: none), and MLPs of
    ``dense`` in the layers that have no experts."""
    routed = tuple(i for i in range(layers) if i not in dense_layers) if dense_layers else None
    groups: tuple[tuple[ModuleShape, ...], ...] = ()
    if shared:
        groups += _dense_mlp(hidden, shared, "shared_", routed)
    if dense_layers:
        groups += _dense_mlp(hidden, dense, "dense_", dense_layers)
    return groups


def _latent_attention(
    hidden: int, q_rank: int | None, kv_rank: int, heads: int, nope: int, rope: int, v: int
) -> tuple[tuple[ModuleShape, ...], ...]:
    """q_rank: None where one q_proj makes the queries of x."""
    q = heads * (nope + rope)
    kv_a = ModuleShape("kv_a_proj_with_mqa", hidden, kv_rank + rope)
    queries: tuple[tuple[ModuleShape, ...], ...] = ((ModuleShape("q_proj", hidden, q), kv_a),)
    if q_rank is not None:
        q_a, q_b = ModuleShape("q_a_proj", hidden, q_rank), ModuleShape("q_b_proj", q_rank, q)
        queries = ((q_a, kv_a), (q_b,))
    return (
        *queries,
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
            _latent_attention(7168, 1536, 512, 128, 128, 64, 128)
            + _beside_experts(7168, 61, shared=2048, dense=18432, dense_layers=(0, 1, 2)),
            MoeShape(7168, 2048, 256, 8),
            "deepseek_v3",
            (0, 1, 2),
        ),
    )
}


def load_model(source: str | Path) -> ModelShape:
    """A preset by name, or a Hugging Face ``config.json`` by its path or its folder's.

    Raises ArgumentError, naming the file and the key, for whatever a config lacks or gives wrongly.
    """
    if not isinstance(source, str | Path):
        raise ArgumentError(
            f"model is {quoted(source)}; a preset's name ({', '.join(PRESETS)}) or the path of a "
            "config.json is needed"
        )
    if source in PRESETS:
        return PRESETS[str(source)]
    path = Path(source)
    if is_folder(path):
        path = path / "config.json"
    try:
        config = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArgumentError(
            f"model {quoted(str(source))} is neither a preset ({', '.join(PRESETS)}) nor a "
            "config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{quoted(str(path))}: cannot be read: {reason(error)}; give a model's config.json"
        ) from error
    return _from_config(config, path)


_MAX_HEADS = 1 << 15
_MAX_HEAD_DIM = 1 << 15
"""With these, heads times their width stays within _MAX_SIZE."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")

_GATED_ACTIVATIONS: dict[str, ActivationKind] = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
"""Of the families below, whose experts are all gated, by the names that configs use."""

_LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
_MOE_FAMILIES = (
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "llama4_text",
    *_LATENT_FAMILIES,
)
_TRANSPOSED_FAMILIES = ("gpt_oss", "llama4_text")
"""Whose experts' weights are kept as [in, out]."""
_DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_UNNAMED = "generic"
"""Of a config without a model_type, which is believed if it has all the keys that tell its kind."""

_LLAMA_KEYS = ("hidden_act", "intermediate_size", "num_key_value_heads")
"""With the keys that every config must have, those by which a model of Llama's kind is known."""


class _Config:
    """Typed look-ups in a ``config.json``, with errors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def int(self, *keys: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """The first of ``keys`` that is present and not null."""
        key = self.key(*keys)
        if key is not None:
            value = self.values[key]
            if type(value) is not int or not 1 <= value <= most:
                raise self.error(key, f"a positive integer up to {most} is needed")
            return int(value)
        if default is None:
            raise ArgumentError(f"{self.path}: none of {', '.join(keys)} is present; add one")
        return default

    def key(self, *keys: str) -> str | None:
        """The first of ``keys`` that is present and not null."""
        return next((key for key in keys if self.values.get(key) is not None), None)

    def error(self, key: str | None, need: str) -> ArgumentError:
        """For a key whose value will not do."""
        return ArgumentError(f"{self.path}: {key} is {quoted(self.values.get(str(key)))}; {need}")


def _from_config(values: Mapping[str, Any], path: Path) -> ModelShape:
    config = _Config(values, path)
    if "hidden_size" not in values and isinstance(values.get("text_config"), dict):
        raise ArgumentError(
            f"{path}: the language model's keys stand under text_config; save that object as a "
            "config.json of its own and give it"
        )
    family = _family(config)
    hidden = config.int("hidden_size")
    dense = _attention_from_config(config, family, hidden)
    layers = config.int("num_hidden_layers", most=_MAX_LAYERS)
    moe = _moe_from_config(config, family, hidden) if _has_experts(config) else None
    dense_layers: tuple[int, ...] = ()
    if moe is None:
        dense += _dense_mlp_from_config(config, family, hidden)
    else:
        dense_layers = _dense_layers(config, family, layers)
        dense += _beside_experts(
            hidden,
            layers,
            shared=_shared_from_config(config, family, moe),
            dense=config.int(_DENSE_SIZES.get(family, "intermediate_size")) if dense_layers else 0,
            dense_layers=dense_layers,
        )
    return ModelShape(
        name=path.absolute().parent.name if path.name == "config.json" else path.stem,
        layers=layers,
        hidden=hidden,
        dense_groups=dense,
        moe=moe,
        family=family,
        dense_layers=dense_layers,
    )


_DENSE_SIZES = {"llama4_text": "intermediate_size_mlp"}
"""Key of the width of an MLP in place of experts, where it is not intermediate_size."""

_MAX_LAYERS = 1 << 16


def _shared_from_config(config: _Config, family: str, moe: MoeShape) -> int:
    """Width of the shared expert, 0 where there is none.

    As transformers' modeling_*.py have it: DeepSeek's are one MLP of all their widths, Llama-4's is
    as wide as a routed one.
    """
    if family == "llama4_text":
        return moe.intermediate
    if family in _LATENT_FAMILIES:
        number = config.values.get("n_shared_experts")
        return moe.intermediate * config.int("n_shared_experts", most=1024) if number else 0
    if family == "qwen2_moe" and config.values.get("shared_expert_intermediate_size"):
        return config.int("shared_expert_intermediate_size")
    return 0


def _dense_layers(config: _Config, family: str, layers: int) -> tuple[int, ...]:
    """Layers whose MLP is none of routed experts, as transformers' modeling_*.py has them."""
    values = config.values
    if family in _LATENT_FAMILIES:
        first = values.get("first_k_dense_replace") or 0
        if type(first) is not int or first < 0:
            raise config.error("first_k_dense_replace", "0 or a positive integer is needed")
        every = config.int("moe_layer_freq", default=1)
        return tuple(i for i in range(layers) if i < first or i % every)
    if family in ("qwen2_moe", "qwen3_moe"):
        only = _layer_list(config, "mlp_only_layers", layers)
        step = config.int("decoder_sparse_step", default=1)
        return tuple(i for i in range(layers) if i in only or (i + 1) % step)
    if family == "llama4_text":
        step = config.int("interleave_moe_layer_step", default=1)
        routed = range(step - 1, layers, step)
        if values.get("moe_layers") is not None:
            return tuple(set(range(layers)) - set(_layer_list(config, "moe_layers", layers)))
        return tuple(i for i in range(layers) if i not in routed)
    return ()


def _layer_list(config: _Config, key: str, layers: int) -> tuple[int, ...]:
    found = config.values.get(key) or []
    if not isinstance(found, list) or not all(type(i) is int and 0 <= i < layers for i in found):
        raise config.error(key, f"a list of layers from 0 to {layers - 1} is needed")
    return tuple(found)


def _family(config: _Config) -> str:
    """The config's model_type, if its layers are known."""
    family = config.values.get("model_type")
    if family is None:
        return _UNNAMED
    if not isinstance(family, str):
        raise config.error("model_type", "a string is needed")
    known = (_UNNAMED, *_DENSE_FAMILIES, *_MOE_FAMILIES)
    if family not in known:
        raise _unlike(config, "neither Llama's kind nor of a known one with routed experts", known)
    return family


def _unlike(config: _Config, what: str, known: Iterable[str]) -> ArgumentError:
    """For a model whose layers would be taken for others."""
    return config.error(
        "model_type",
        f"its layers are {what} ({', '.join(known)}); if they are built as one of these, give that "
        "as model_type, else describe them by a ModelShape in Python",
    )


def _attention_from_config(
    config: _Config, family: str, hidden: int
) -> tuple[tuple[ModuleShape, ...], ...]:
    heads = config.int("num_attention_heads", most=_MAX_HEADS)
    if family in _LATENT_FAMILIES or config.key("kv_lora_rank"):
        return _latent_attention(
            hidden,
            config.int("q_lora_rank") if config.key("q_lora_rank") else None,
            config.int("kv_lora_rank", most=_MAX_SIZE // 2),
            heads,
            config.int("qk_nope_head_dim", most=_MAX_HEAD_DIM // 2),
            config.int("qk_rope_head_dim", most=_MAX_HEAD_DIM // 2),
            config.int("v_head_dim", most=_MAX_HEAD_DIM // 2),
        )
    if config.key("head_dim") is None and heads > hidden:
        raise config.error(
            "num_attention_heads",
            f"at most hidden_size ({hidden}) can be, as there is no head_dim",
        )
    head_dim = config.int("head_dim", default=hidden // heads, most=_MAX_HEAD_DIM)
    kv_heads = config.int("num_key_value_heads", default=heads, most=_MAX_HEADS)
    return _attention(hidden, heads * head_dim, kv_heads * head_dim)


def _dense_mlp_from_config(
    config: _Config, family: str, hidden: int
) -> tuple[tuple[ModuleShape, ...], ...]:
    missing = [key for key in _LLAMA_KEYS if config.key(key) is None]
    if family == _UNNAMED and missing:
        raise ArgumentError(
            f"{config.path}: without a model_type, and without {', '.join(missing)}, this is not "
            f"Llama's kind; give one of {', '.join(_DENSE_FAMILIES)} as model_type if it is, else "
            "describe it by a ModelShape in Python"
        )
    if family == "gpt_oss":
        keys = ", ".join(_EXPERT_COUNTS)
        raise config.error("model_type", f"it has routed experts, but none of {keys} is given")
    return _dense_mlp(hidden, config.int("intermediate_size"))


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
            f"{config.path}: has {listed(map(shown, odd))}, but none of "
            f"{', '.join(_EXPERT_COUNTS)}, so that its number of experts is unknown; add one of "
            "them, or remove those for a dense model"
        )
    return False


def _moe_from_config(config: _Config, family: str, hidden: int) -> MoeShape:
    experts = config.int(*_EXPERT_COUNTS, most=MAX_EXPERTS)
    chosen = ("num_experts_per_tok", "experts_per_token")
    top_k = config.int(*chosen)
    if top_k > experts:
        raise config.error(
            config.key(*chosen), f"at most {config.key(*_EXPERT_COUNTS)} ({experts}) can be chosen"
        )
    intermediate = config.int("moe_intermediate_size", "intermediate_size", most=_MAX_SIZE // 2)
    sizes = MoeShape(hidden, intermediate, experts, top_k)
    if family in _DENSE_FAMILIES:
        raise _unlike(config, "none of those known with routed experts", _MOE_FAMILIES)
    activation = _gated_activation(config, family)
    sizes = replace(sizes, activation=activation, transposed_experts=family in _TRANSPOSED_FAMILIES)
    return _gpt_oss(config, sizes) if family == "gpt_oss" else sizes


def _gated_activation(config: _Config, family: str) -> ActivationKind:
    """What every activation key that is given says. Known families need none of them."""
    given = [key for key in _ACTIVATION_KEYS if config.key(key)]
    if not given and family == _UNNAMED:
        raise ArgumentError(
            f"{config.path}: has routed experts, but neither model_type nor hidden_act, so that "
            "what they compute is unknown; add one of them"
        )
    names = ("silu", "swish") if family == "gpt_oss" else tuple(_GATED_ACTIVATIONS)
    for key in given:
        value = config.values[key]
        if not isinstance(value, str) or value not in names:
            raise config.error(
                key,
                f"one of {', '.join(names)} is needed for gated experts; describe others by a "
                "MoeShape in Python",
            )
    kinds = {key: _GATED_ACTIVATIONS[config.values[key]] for key in given}
    if len(set(kinds.values())) > 1:
        raise config.error(given[0], f"but {given[-1]} differs from it; remove one of them")
    return next(iter(kinds.values()), "silu")


def _gpt_oss(config: _Config, sizes: MoeShape) -> MoeShape:
    """GPT-OSS's experts of these sizes."""
    limit = config.values.get("swiglu_limit", sizes.limit)
    if not _is_finite(limit) or limit <= 0:
        raise config.error("swiglu_limit", "a positive finite number is needed")
    return replace(
        sizes,
        activation="swiglu_oai",
        gate_up_layout="interleaved",
        expert_bias=True,
        limit=float(limit),
    )
