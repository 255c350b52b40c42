"""Names of tensors → where they belong: the one table of every naming that is read.

``assembly`` asks ``place`` about each tensor of a file. A name says four things: which decoder
layer, which module of it (and which expert), and which factor. ``_RULES`` and ``_FACTORS`` hold all
of them, for all models; a model only decides whether the place exists in it. What stands in
``_REFUSED`` is named as what it is; whatever else has no place is refused as unknown.

Sources: the module names are those of the classes in transformers 4.57 and 5.24 (``models/*/
modeling_*.py``), wrapped by peft 0.17 to 0.21 (``tuners/lora/layer.py``); Kohya's are
``networks/lora.py`` of kohya-ss/sd-scripts; the experts of GPT-OSS in four bits are
``temporary_patches/gpt_oss.py`` of unsloth-zoo.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from cupylora.shapes import ModelShape, MoeShape
from cupylora.text import counted, shown

__all__ = [
    "Factor",
    "Foreign",
    "Form",
    "Key",
    "ModelPlaces",
    "Place",
    "first_name",
    "place",
]

Form = Literal["dense", "mlp", "shared", "expert", "group"]
"""A linear layer of the attention; of the MLP; of a shared expert; one expert's; all experts of a
layer in one pair of tensors."""
Factor = Literal["A", "B", "alpha"]

_NUMBER = "(?:0|[1-9][0-9]{0,5})"
"""As models write layers and experts; 00 or another script's digits would be a second name."""

_FACTORS: tuple[tuple[str, Factor, bool], ...] = (
    # peft; the adapter's name where it was saved by hand, no .weight where it is a bare parameter
    (r"lora_A(?:\.default)?(?:\.weight)?", "A", False),
    (r"lora_B(?:\.default)?(?:\.weight)?", "B", False),
    # Kohya: down is A, up is B, and each module's alpha stands beside them
    (r"lora_down\.weight", "A", True),
    (r"lora_up\.weight", "B", True),
    (r"alpha", "alpha", True),
)
"""End of a name → factor, and whether that is Kohya's way."""

_EXPERTS = r"(?:mlp|block_sparse_moe|feed_forward)\.experts"
_MLP = "(?:gate|up|down)_proj|w[123]"

_RULES: tuple[tuple[str, Form], ...] = (
    # Qwen2/3-MoE, OLMoE, DeepSeek (mlp); Mixtral (block_sparse_moe, w1 w3 w2): a Linear per expert
    (rf"{_EXPERTS}\.(?P<expert>{_NUMBER})\.(?P<module>{_MLP})", "expert"),
    # GPT-OSS as Unsloth loads it in four bits: lists of Linears, gate and up in one
    (rf"{_EXPERTS}\.(?P<module>gate_up_proj|down_proj)s\.(?P<expert>{_NUMBER})", "expert"),
    # peft's target_parameters, nested; Llama-4 says feed_forward
    (rf"{_EXPERTS}(?P<inner>\.base_layer)?", "group"),
    # three-dimensional factors by the parameter's name
    (rf"{_EXPERTS}\.(?P<module>\w+)", "group"),
    # Qwen2-MoE: shared_expert; DeepSeek: shared_experts, which are one MLP; Llama-4: feed_forward
    (rf"(?:mlp|feed_forward)\.shared_experts?\.(?P<module>{_MLP})", "shared"),
    # Llama, Mistral, Qwen: mlp; the dense layers of Llama-4: feed_forward
    (rf"(?:mlp|feed_forward)\.(?P<module>{_MLP})", "mlp"),
    (rf"self_attn\.(?P<module>(?!(?:shared_|dense_)?(?:{_MLP})$)\w+)", "dense"),
)
"""Path within a layer → form; the groups give module and expert. The first that matches counts."""

_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

_DOTTED = (
    r"(?P<prefix>(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?)"
    rf"layers\.(?P<layer>{_NUMBER})\.(?P<path>.+?)\."
)
"""Before the factor. Other prefixes (a vision tower's, say) are not this model's."""
_FLAT = rf"lora_te[12]?_(?:model_)?(?:language_model_)?layers_(?P<layer>{_NUMBER})_(?P<path>\w+?)\."
"""The same as Kohya writes it: a prefix, and every dot of the module's path an underscore."""


class _Naming(NamedTuple):
    tensor: re.Pattern[str]
    rules: tuple[tuple[re.Pattern[str], Form], ...]


def _naming(before: str, dot: str) -> _Naming:
    """The tables compiled for names that begin with ``before`` and have ``dot`` between modules."""
    ends = "|".join(f"(?P<end{i}>{end})" for i, (end, _, _) in enumerate(_FACTORS))
    rules = ((re.compile(path.replace(r"\.", dot)), form) for path, form in _RULES)
    return _Naming(re.compile(f"{before}(?:{ends})"), tuple(rules))


_NAMINGS = (_naming(_DOTTED, r"\."), _naming(_FLAT, "_"))

_NO_FACTOR = r"^(?!.*lora_(?:[AB]|down|up))(?!.*\.alpha$)"
_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"lora_magnitude_vector|\bdora_scale\b"), "DoRA is not supported"),
    (
        re.compile(r"\b(?:hada|lokr|oft)_|\blora_mid\b"),
        "a variant of LoRA (LoHa, LoKr, LoCon, OFT)",
    ),
    (re.compile(r"\btrainable_tokens_"), "trained token embeddings"),
    (re.compile(r"lora_embedding_|(?:embed_tokens|wte)\b.*lora_"), "LoRA on embeddings"),
    (re.compile(r"lora_(?:[AB](?:\.default)?|down|up)\.bias$"), "a bias of a LoRA factor"),
    (
        re.compile(
            r"[._](?:mlp|block_sparse_moe|feed_forward)[._](?:gate|router)\.(?:\w+\.)*lora_"
        ),
        "LoRA on the router",
    ),
    (re.compile(r"[._]shared_expert_gate\.(?:\w+\.)*lora_"), "LoRA on a shared expert's gate"),
    (re.compile(r"lm_head\b.*lora_"), "LoRA on the output head"),
    (re.compile(_NO_FACTOR + r".*\.bias$"), "a trained bias"),
    (re.compile(_NO_FACTOR), "full weights (modules_to_save)"),
)

_NUMBERED = re.compile(rf"(?<=[._])({_NUMBER})(?=[._])")
"""A number of a layer or an expert, or of anything else that is counted in a name."""

_LONGEST_NAME = 256
"""Characters of a tensor's name: far more than any has, and little for the expressions here."""


class Key(NamedTuple):
    """What a factor belongs to; the factors of one key make a pair."""

    layer: int
    form: Form
    module: str | None
    expert: int
    inner: bool


class Place(NamedTuple):
    """Where a tensor belongs. ``key.module`` is None for peft's unnamed stacked parameters, of
    which ``key.inner`` is the one below another; ``path`` is the module's path within the model, as
    rank_pattern and alpha_pattern know it; ``kohya``: the tensor is named in Kohya's way."""

    key: Key
    factor: Factor
    path: str
    kohya: bool


class Foreign(str):
    """Why a tensor has no place in this model, where it may have one in another."""

    __slots__ = ()


def place(name: str) -> Place | str:
    """The place that a tensor's ``name`` says, or why it says none."""
    if len(name) > _LONGEST_NAME:
        return f"a name of {len(name)} characters"
    pieces = _NUMBERED.split(name)
    form = _form_of("0".join(pieces[::2]))
    return form if isinstance(form, str) else _in_form(form, name, pieces[1::2]) or _look_up(name)


class _NameForm(NamedTuple):
    """What names have in common that differ in the numbers of layer and expert only.

    place: of the one with zeros. begin, end: of "layer.path" in it, counted from either side;
    layer, expert: which of the numbers they are; None: it has none. before: what its path begins
    with.
    """

    place: Place
    begin: int
    end: int
    layer: int
    expert: int | None
    before: str


@lru_cache(1024)
def _form_of(name: str) -> _NameForm | str:
    """The form of names of which this is the one with zeros, or why they have no place: a file has
    thousands of names, of a few forms."""
    found = _look_up(name)
    if isinstance(found, str):
        return found
    match = next(filter(None, (naming.tensor.fullmatch(name) for naming in _NAMINGS)))
    begin, end = match.start("layer"), match.end("path")
    numbers = [at.start() for at in _NUMBERED.finditer(name)]
    layer = numbers.index(begin)
    others = [number for number in range(len(numbers)) if number != layer]
    before = found.path[: found.path.index("layers.")]
    return _NameForm(
        found, begin, len(name) - end, layer, others[0] if len(others) == 1 else None, before
    )


def _in_form(form: _NameForm, name: str, numbers: list[str]) -> Place | None:
    """The place of a name of this form, its numbers being these; None: it takes a closer look."""
    layer, key = numbers[form.layer], form.place.key
    if len(numbers) != 1 and (form.expert is None or key.form != "expert"):
        return None  # a number that is part of a module's name
    expert = 0 if form.expert is None else int(numbers[form.expert])
    path = name[form.begin + len(layer) + 1 : len(name) - form.end]
    return Place(
        key._replace(layer=int(layer), expert=expert),
        form.place.factor,
        f"{form.before}layers.{layer}.{path}",
        form.place.kohya,
    )


def _look_up(name: str) -> Place | str:
    """``place`` by the tables."""
    for pattern, refusal in _REFUSED:
        if pattern.search(name):
            return refusal
    for naming in _NAMINGS:
        match = naming.tensor.fullmatch(name)
        if match:
            return _place(match, naming) or Foreign("no module that is known")
    return "no LoRA factor of a decoder layer"


def _place(match: re.Match[str], naming: _Naming) -> Place | None:
    path, prefix = match["path"], match.groupdict().get("prefix") or ""
    for pattern, form in naming.rules:
        found = pattern.fullmatch(path)
        if found:
            part = found.groupdict()
            module = part.get("module")
            module = _ALIASES.get(module, module) if module else None
            key = Key(
                layer=int(match["layer"]),
                form=form,
                module=f"shared_{module}" if form == "shared" else module,
                expert=int(part.get("expert") or 0),
                inner=bool(part.get("inner")),
            )
            _, factor, kohya = _FACTORS[int(str(match.lastgroup).removeprefix("end"))]
            before = prefix.removeprefix("base_model.model.")
            return Place(key, factor, f"{before}layers.{key.layer}.{path}", kohya)
    return None


def first_name(moe: MoeShape) -> str:
    """The stacked parameter of the first projection, as models name it."""
    return "gate_up_proj" if moe.gated else "up_proj"


class ModelPlaces:
    """The places that ``model`` has."""

    def __init__(self, model: ModelShape) -> None:
        self._model, self._moe = model, model.moe
        self._dense = {m.name: m for group in model.dense_groups for m in group}
        self._routed = set[str | None]()
        if model.moe is not None:
            self._routed |= {m.name for m in model.moe.modules} | {first_name(model.moe)}

    def find(self, key: Key) -> Key | Foreign:
        """``key`` with its module named as the model names it (an MLP beside experts has names of
        its own), or why the model has no such place."""
        model = self._model
        if key.form == "mlp" and self._moe is not None:
            key = key._replace(module=f"dense_{key.module}")
        if key.layer >= model.layers:
            return Foreign(f"model {shown(model.name)} has {counted(model.layers, 'layer')}")
        if key.form in ("expert", "group"):
            known = self._moe is not None and key.expert < self._moe.experts
            named = key.module in self._routed or (key.module is None and key.form == "group")
            known, here = known and named, key.layer not in model.dense_layers
        else:
            module = self._dense.get(str(key.module))
            known, here = module is not None, module is not None and module.is_in(key.layer)
        if known and not here:
            return Foreign(f"no module of layer {key.layer} of model {shown(model.name)}")
        return key if known else Foreign(f"no module of model {shown(model.name)}")
