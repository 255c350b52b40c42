"""Make the files under ``tests/data``: PEFT adapters as peft writes them, and peft's own outputs.

Nothing else in the project needs torch, transformers or peft. This script does, in two throw-away
environments, best kept outside the source tree (Python 3.11; the CPU build of torch is enough):

    python -m venv old && old/bin/pip install torch transformers==4.57.1 peft==0.17.1
    python -m venv new && new/bin/pip install torch transformers==5.24.0 peft==0.21.2

``old`` holds the last releases that name every expert (``experts.3.gate_proj``); ``new`` holds
experts as stacked parameters. Stacked adapters differ between releases of peft, and those of
GPT-OSS also between releases of transformers, so both are used several times. Sets are saved in
hash order, hence the fixed seed:

    export PYTHONHASHSEED=0
    old/bin/python tools/make_fixtures.py
    old/bin/pip install peft==0.21.2 && old/bin/python tools/make_fixtures.py
    new/bin/pip install peft==0.18.1 && new/bin/python tools/make_fixtures.py
    new/bin/pip install peft==0.19.0 && new/bin/python tools/make_fixtures.py
    new/bin/pip install peft==0.19.1 && new/bin/python tools/make_fixtures.py
    new/bin/pip install peft==0.21.2 && new/bin/python tools/make_fixtures.py

Start with ``old``: one recipe for ``new`` re-saves an adapter that ``old`` wrote. Each run makes
the recipes whose releases are the installed ones. Results are the same on every run.

What is written:

* ``models/MODEL/config.json`` and ``layer.safetensors``: a tiny random model, and of its last layer
  the attention projections and the experts (the first projection in the model's own gate/up layout,
  both as [expert, out, in]; no attention bias, though GPT-OSS has room for one: it is zero) or the
  dense MLP's projections, the inputs ``x`` and, for projections of another width, ``o_x`` or
  ``NAME.x``, and ``topk_ids`` and ``topk_weights``: the router's, or given ones where only the
  experts are run.
* ``demo/NAME`` (tiny-moe adapters, which ``cupylora run`` uses if not told otherwise) and
  ``adapters/NAME``: the adapter directory, byte for byte as peft saved it, less its model card.
* ``refused/NAME``: adapters with something that cannot be applied (DoRA, biases, the router, ...).
* ``expected/NAME.safetensors``: peft's output of the adapted projections (``q_proj`` ...) and of
  the MoE block, less shared experts (``moe``), of the last layer for those inputs, in float32, and
  for some in bfloat16 (``moe.bfloat16``), with the releases in the header.

All weights, factors and inputs are exact in bfloat16, whatever type a file has, so float32 results
are the reference for every type.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

TOKENS = 24
LAYERS = 2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LLAMA4 = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
ROUTED = ("tiny-moe", "mixtral", "gpt-oss")
"""Models whose MoE block is run as it is; of the others the experts alone, by given choices."""
TRANSPOSED = ("gpt-oss", "llama4")
"""Models that keep expert weights as [in, out]."""


@dataclass(frozen=True)
class Recipe:
    """One adapter: on which model, by which releases, with which LoraConfig and stored type."""

    name: str
    model: str
    peft: str
    lora: dict[str, Any]
    dtype: torch.dtype = torch.float32
    demo: bool = False
    bf16_output: bool = False
    resave_of: str | None = None
    """Instead of new factors: load this adapter and save it again."""
    transformers: str = ""
    """Its first number; "": 4 for peft 0.17.1, else 5."""

    def fits_releases(self) -> bool:
        """Whether this is to be made by what is installed."""
        transformers_release = self.transformers or ("4" if self.peft == "0.17.1" else "5")
        return self.peft == peft.__version__ and (
            transformers.__version__.startswith(transformers_release)
        )

    def folder(self, out: Path) -> Path:
        return out / ("demo" if self.demo else "adapters") / self.name


def lora(r: int, alpha: int, modules: list[str] | str, **options: Any) -> dict[str, Any]:
    return {"r": r, "lora_alpha": alpha, "target_modules": modules, **options}


EXPERT_LINEARS = ["gate_proj", "up_proj", "down_proj"]
RECIPES = [
    # tiny-moe, every expert by name
    Recipe(
        "contracts-r8",
        "tiny-moe",
        "0.17.1",
        lora(8, 12, ATTENTION + EXPERT_LINEARS),
        torch.bfloat16,
        demo=True,
        bf16_output=True,
    ),
    Recipe(
        "support-rslora-r4",
        "tiny-moe",
        "0.17.1",
        lora(4, 3, ATTENTION + EXPERT_LINEARS, use_rslora=True),
        torch.float16,
        demo=True,
    ),
    Recipe(
        "mixed-ranks",
        "tiny-moe",
        "0.17.1",
        lora(
            8,
            6,
            ["q_proj", "v_proj", *EXPERT_LINEARS],
            rank_pattern={"q_proj": 4, r"layers\.0\..*\.up_proj": 3, "down_proj": 5},
            alpha_pattern={r"layers.1.*q_proj": 7, r"experts\.[0-3]\.gate_proj": 12},
        ),
    ),
    # tiny-moe, stacked experts
    Recipe(
        "legal-stacked-r6",
        "tiny-moe",
        "0.21.2",
        lora(6, 10, ATTENTION, target_parameters=STACKED),
        torch.bfloat16,
        demo=True,
        bf16_output=True,
    ),
    Recipe(
        "tiny-stacked-018",
        "tiny-moe",
        "0.18.1",
        lora(3, 5, ["q_proj"], target_parameters=STACKED, use_rslora=True),
        torch.bfloat16,
    ),
    Recipe("tiny-resaved", "tiny-moe", "0.21.2", {}, torch.bfloat16, resave_of="contracts-r8"),
    Recipe(
        "tiny-down-only",
        "tiny-moe",
        "0.21.2",
        lora(4, 5, ["o_proj"], target_parameters=STACKED[1:]),
    ),
    # mixtral: hidden = 2 * intermediate, so shapes do not tell in from out in the first projection
    Recipe(
        "mixtral-per-expert",
        "mixtral",
        "0.17.1",
        lora(5, 8, ["q_proj", "v_proj", "w1", "w2", "w3"], use_rslora=True),
    ),
    Recipe(
        "mixtral-gate-up-018",
        "mixtral",
        "0.18.1",
        lora(3, 4, ["k_proj"], target_parameters=STACKED[:1]),
    ),
    Recipe(
        "mixtral-gate-up-021",
        "mixtral",
        "0.21.2",
        lora(3, 4, ["k_proj"], target_parameters=STACKED[:1]),
    ),
    Recipe(
        "mixtral-stacked-018",
        "mixtral",
        "0.18.1",
        lora(2, 5, ["q_proj"], target_parameters=STACKED),
    ),
    Recipe(
        "mixtral-stacked-019",
        "mixtral",
        "0.19.1",
        lora(
            2,
            3,
            ["q_proj"],
            target_parameters=STACKED,
            rank_pattern={"gate_up_proj": 5},
            alpha_pattern={r"layers\.1\.mlp\.experts\.down_proj": 7},
        ),
        torch.bfloat16,
    ),
    # gpt-oss: hidden = intermediate, so shapes do not tell in from out in the second projection
    Recipe(
        "gpt-oss-stacked-017",
        "gpt-oss",
        "0.17.1",
        lora(4, 7, ATTENTION, target_parameters=STACKED),
    ),
    Recipe(
        "gpt-oss-down-018",
        "gpt-oss",
        "0.18.1",
        lora(3, 5, ["q_proj"], target_parameters=STACKED[1:]),
    ),
    Recipe(
        "gpt-oss-stacked-021",
        "gpt-oss",
        "0.21.2",
        lora(7, 4, ["v_proj", "o_proj"], target_parameters=STACKED, use_rslora=True),
        torch.bfloat16,
        bf16_output=True,
    ),
    # in and out by the release of transformers, where shapes tell it and where nothing does
    Recipe(
        "gpt-oss-stacked-021-tf4",
        "gpt-oss",
        "0.21.2",
        lora(2, 3, ["q_proj"], target_parameters=STACKED),
        torch.bfloat16,
        transformers="4",
    ),
    Recipe(
        "gpt-oss-down-021-tf4",
        "gpt-oss",
        "0.21.2",
        lora(2, 3, ["q_proj"], target_parameters=STACKED[1:]),
        torch.bfloat16,
        transformers="4",
    ),
    Recipe(
        "gpt-oss-down-021",
        "gpt-oss",
        "0.21.2",
        lora(2, 3, ["q_proj"], target_parameters=STACKED[1:]),
        torch.bfloat16,
    ),
    Recipe(
        "gpt-oss-down-0190",
        "gpt-oss",
        "0.19.0",
        lora(2, 3, ["q_proj"], target_parameters=STACKED[1:]),
        torch.bfloat16,
    ),
    Recipe(
        "mixtral-gate-up-0190",
        "mixtral",
        "0.19.0",
        lora(3, 4, ["k_proj"], target_parameters=STACKED[:1]),
        torch.bfloat16,
    ),
    # Llama-4: the second projection is square
    Recipe(
        "llama4-down-017",
        "llama4",
        "0.17.1",
        lora(2, 3, ["q_proj"], target_parameters=LLAMA4[1:]),
        torch.bfloat16,
    ),
    Recipe(
        "llama4-down-0190",
        "llama4",
        "0.19.0",
        lora(2, 3, ["q_proj"], target_parameters=LLAMA4[1:]),
        torch.bfloat16,
    ),
    Recipe(
        "llama4-down-021",
        "llama4",
        "0.21.2",
        lora(2, 3, ["q_proj"], target_parameters=LLAMA4[1:]),
        torch.bfloat16,
    ),
    Recipe(
        "llama4-stacked-021",
        "llama4",
        "0.21.2",
        lora(3, 5, ATTENTION, target_parameters=LLAMA4),
        torch.bfloat16,
    ),
    # the other models' namings
    Recipe(
        "llama-017",
        "llama",
        "0.17.1",
        lora(3, 4, ATTENTION + EXPERT_LINEARS, rank_pattern={"down_proj": 2}),
        torch.bfloat16,
    ),
    Recipe(
        "llama-021",
        "llama",
        "0.21.2",
        lora(2, 5, ["q_proj", "gate_proj", "down_proj"], use_rslora=True),
        torch.bfloat16,
    ),
    Recipe(
        "olmoe-per-expert",
        "olmoe",
        "0.17.1",
        lora(2, 3, ATTENTION + EXPERT_LINEARS),
        torch.bfloat16,
    ),
    Recipe(
        "olmoe-stacked-021",
        "olmoe",
        "0.21.2",
        lora(3, 2, ["v_proj"], target_parameters=STACKED),
        torch.bfloat16,
    ),
    Recipe(
        "qwen2-moe-per-expert",
        "qwen2-moe",
        "0.17.1",
        lora(2, 3, r".*(self_attn\.k_proj|experts\.\d+\.(gate|up|down)_proj)"),
        torch.bfloat16,
    ),
    Recipe(
        "qwen2-moe-stacked-021",
        "qwen2-moe",
        "0.21.2",
        lora(3, 2, ["o_proj"], target_parameters=STACKED),
        torch.bfloat16,
    ),
    Recipe(
        "deepseek-v2-per-expert",
        "deepseek-v2",
        "0.17.1",
        lora(2, 3, r".*(self_attn\.(q|kv_b)_proj|experts\.\d+\.(gate|up|down)_proj)"),
        torch.bfloat16,
    ),
    Recipe(
        "deepseek-v2-stacked-019",
        "deepseek-v2",
        "0.19.1",
        lora(3, 2, ["q_proj"], target_parameters=STACKED),
        torch.bfloat16,
    ),
    Recipe(
        "deepseek-v3-per-expert",
        "deepseek-v3",
        "0.17.1",
        lora(2, 3, r".*(self_attn\.\w+_(proj|mqa)|experts\.\d+\.(gate|up|down)_proj)"),
        torch.bfloat16,
    ),
    Recipe(
        "deepseek-v3-stacked-021",
        "deepseek-v3",
        "0.21.2",
        lora(3, 2, ["q_b_proj"], target_parameters=STACKED),
        torch.bfloat16,
    ),
]


REFUSED = [
    Recipe("dora", "llama", "0.21.2", lora(2, 3, ["v_proj"], use_dora=True)),
    Recipe("bias", "llama", "0.21.2", lora(2, 3, ["v_proj"], bias="lora_only")),
    Recipe("lora-bias", "llama", "0.21.2", lora(2, 3, ["v_proj"], lora_bias=True)),
    Recipe("modules-to-save", "llama", "0.21.2", lora(2, 3, ["v_proj"], modules_to_save=["norm"])),
    Recipe("embeddings", "llama", "0.21.2", lora(2, 3, ["v_proj", "embed_tokens"])),
    Recipe("output-head", "llama", "0.21.2", lora(2, 3, ["v_proj", "lm_head"])),
    Recipe("tokens", "llama", "0.21.2", lora(2, 3, ["v_proj"], trainable_token_indices=[1, 2])),
    Recipe("router", "olmoe", "0.17.1", lora(2, 3, ["v_proj", "gate"])),
    Recipe(
        "router-parameter",
        "olmoe",
        "0.21.2",
        lora(2, 3, ["v_proj"], target_parameters=["mlp.gate.weight"]),
    ),
    Recipe(
        "shared-expert",
        "qwen2-moe",
        "0.17.1",
        lora(2, 3, r".*shared_expert(\.up_proj|_gate)"),
    ),
]
"""Adapters with something that cannot be applied; no output is kept of them."""


@dataclass
class Tiny:
    """A tiny model, filled from a seed of its name, and what of it is stored."""

    model: torch.nn.Module
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def layer(self) -> torch.nn.Module:
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return base.model.layers[LAYERS - 1]

    @property
    def block(self) -> torch.nn.Module:
        """The MoE block or the MLP, whatever the model and the release call it."""
        names = ("mlp", "block_sparse_moe", "feed_forward")
        return next(getattr(self.layer, name) for name in names if hasattr(self.layer, name))

    @property
    def projections(self) -> dict[str, torch.nn.Module]:
        """The dense linear layers by name: attention's and, without experts, the MLP's."""
        parts = [self.layer.self_attn, *([] if hasattr(self.block, "experts") else [self.block])]
        return {
            name: module
            for part in parts
            for name, module in part.named_children()
            if hasattr(module, "in_features")
        }

    def input_of(self, name: str) -> str:
        """The tensor that is the input of a projection."""
        width = self.projections[name].in_features
        other = "o_x" if name == "o_proj" else f"{name}.x"
        return "x" if name != "o_proj" and width == self.tensors["x"].shape[1] else other


def random(name: str, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Normal values of a seed taken from ``name``, exact in bfloat16."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32) * scale)
    return values.bfloat16().float()


MODEL_CLASSES = {
    "tiny-moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "gpt-oss": "GptOss",
    "llama4": "Llama4",
    "llama": "Llama",
    "olmoe": "Olmoe",
    "qwen2-moe": "Qwen2Moe",
    "deepseek-v2": "DeepseekV2",
    "deepseek-v3": "DeepseekV3",
}
LATENT = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny-moe": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    "mixtral": {"head_dim": 16, "hidden_size": 32, "intermediate_size": 16, "num_local_experts": 4},
    "gpt-oss": {
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "llama4": {
        "head_dim": 8,
        "intermediate_size": 16,
        "intermediate_size_mlp": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "llama": {"intermediate_size": 24},
    "olmoe": {"intermediate_size": 12, "num_experts": 4},
    "qwen2-moe": {
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 8,
        "num_experts": 4,
    },
    "deepseek-v2": {"intermediate_size": 24, "q_lora_rank": None, **LATENT},
    "deepseek-v3": {"intermediate_size": 24, "q_lora_rank": 10, **LATENT},
}


def config_of(name: str) -> Any:
    kind = "Llama4Text" if name == "llama4" else MODEL_CLASSES[name]
    common = {
        "num_hidden_layers": LAYERS,
        "vocab_size": 32,
        "num_experts_per_tok": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2 if name.startswith("deepseek") else 1,
    }
    if name == "llama":
        del common["num_experts_per_tok"]
    return getattr(transformers, f"{kind}Config")(**{**common, **SIZES[name]})


def expert_sizes(config: Any) -> tuple[int, int, int]:
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next(getattr(config, key) for key in counts if getattr(config, key, None))
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return experts, config.hidden_size, inner


def build(name: str) -> Tiny:
    """The model with seeded weights; equal values whichever form its experts have."""
    config = config_of(name)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{MODEL_CLASSES[name]}ForCausalLM")(config)
    tiny = Tiny(model.float().eval())
    for parameter in tiny.model.parameters():
        parameter.data.zero_()
    for projection, linear in tiny.projections.items():
        values = random(f"{name}.{projection}", tuple(linear.weight.shape), 0.15)
        tiny.tensors[f"{projection}.weight"] = linear.weight.data = values
    if hasattr(tiny.block, "experts"):
        fill_experts(name, tiny, config)
    tiny.tensors["x"] = random(f"{name}.x", (TOKENS, config.hidden_size), 1.0)
    for projection, linear in tiny.projections.items():
        key = tiny.input_of(projection)
        if key not in tiny.tensors:
            tiny.tensors[key] = random(f"{name}.{key}", (TOKENS, linear.in_features), 1.0)
    return tiny


def fill_experts(name: str, tiny: Tiny, config: Any) -> None:
    experts, hidden, inner = expert_sizes(config)
    first = random(f"{name}.first", (experts, 2 * inner, hidden), hidden**-0.5)
    second = random(f"{name}.second", (experts, hidden, inner), inner**-0.5)
    tiny.tensors.update({"experts.first": first, "experts.second": second})
    if name == "gpt-oss":
        tiny.tensors["experts.first_bias"] = random(f"{name}.fb", (experts, 2 * inner), 0.3)
        tiny.tensors["experts.second_bias"] = random(f"{name}.sb", (experts, hidden), 0.3)
    set_experts(name, tiny, inner)
    if name in ROUTED:
        router = tiny.block.router if name == "gpt-oss" else tiny.block.gate
        router.weight.data = random(f"{name}.router", (experts, hidden), 0.4)


def set_experts(name: str, tiny: Tiny, inner: int) -> None:
    """Put first and second into the experts, by name, stacked, or stacked and transposed."""
    experts, first, second = (
        tiny.block.experts,
        tiny.tensors["experts.first"],
        tiny.tensors["experts.second"],
    )
    if isinstance(experts, torch.nn.ModuleList):
        for index, expert in enumerate(experts):
            gate, up, down = (
                (expert.w1, expert.w3, expert.w2)
                if hasattr(expert, "w1")
                else (expert.gate_proj, expert.up_proj, expert.down_proj)
            )
            gate.weight.data, up.weight.data = first[index, :inner], first[index, inner:]
            down.weight.data = second[index]
    elif name in TRANSPOSED:
        experts.gate_up_proj.data = first.transpose(1, 2).contiguous()
        experts.down_proj.data = second.transpose(1, 2).contiguous()
        if name == "gpt-oss":
            experts.gate_up_proj_bias.data = tiny.tensors["experts.first_bias"]
            experts.down_proj_bias.data = tiny.tensors["experts.second_bias"]
    else:
        experts.gate_up_proj.data, experts.down_proj.data = first, second


def route(name: str, tiny: Tiny) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids int32 [T, k] and weights float32 [T, k]: the model's own router's, or given."""
    x, block = tiny.tensors["x"], tiny.block
    if name not in ROUTED:
        experts, _, _ = expert_sizes(tiny.model.config)
        k = tiny.model.config.num_experts_per_tok
        ids = (torch.arange(TOKENS)[:, None] + torch.arange(k)) % experts
        return ids.int(), torch.full((TOKENS, k), 1 / k)
    if hasattr(block, "router"):
        *_, scores, ids = block.router(x)
        weights = scores if scores.shape == ids.shape else scores.gather(1, ids)
    elif isinstance(block.gate, torch.nn.Linear):
        weights, ids = torch.topk(torch.softmax(block.gate(x), -1), block.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
    else:
        _, weights, ids = block.gate(x)
    return ids.int(), weights.float()


def fill(model: torch.nn.Module, name: str) -> None:
    """Random factors, B too, exact in bfloat16."""
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            scale = parameter.shape[1] ** -0.5 if "lora_A" in key else 0.2
            parameter.data = random(f"{name}.{key}", tuple(parameter.shape), scale)


def outputs(name: str, tiny: Tiny, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """peft's output of the adapted projections and of the MoE block of the last layer."""
    tiny.model.to(dtype)
    result = {}
    if name in ROUTED:
        moe = tiny.block(tiny.tensors["x"].to(dtype)[None])
        result["moe"] = (moe[0] if isinstance(moe, tuple) else moe).reshape(TOKENS, -1)
    elif hasattr(tiny.block, "experts"):
        result["moe"] = run_experts(name, tiny, dtype)
    for projection, linear in tiny.projections.items():
        if isinstance(linear, peft.tuners.lora.Linear):
            result[projection] = linear(tiny.tensors[tiny.input_of(projection)].to(dtype))
    return {key: value.detach().contiguous() for key, value in result.items()}


def run_experts(name: str, tiny: Tiny, dtype: torch.dtype) -> torch.Tensor:
    """The weighted sum over each token's given experts."""
    x, experts = tiny.tensors["x"].to(dtype), tiny.block.experts
    ids, weights = tiny.tensors["topk_ids"].long(), tiny.tensors["topk_weights"].to(dtype)
    if name != "llama4" and not isinstance(experts, torch.nn.ModuleList):
        return experts(x, ids, weights)
    count, _, _ = expert_sizes(tiny.model.config)
    if name == "llama4":  # takes as many rows for every expert
        each = experts(x.repeat(count, 1)).reshape(count, TOKENS, -1)
    else:
        each = torch.stack([expert(x) for expert in experts])
    chosen = each[ids, torch.arange(TOKENS)[:, None]]  # [T, k, H]
    return (weights[..., None] * chosen).sum(1)


def adapt(recipe: Recipe, tiny: Tiny, out: Path) -> None:
    """Wrap the model with peft: new factors, or an existing adapter loaded."""
    if recipe.resave_of:
        source = next(r for r in RECIPES if r.name == recipe.resave_of).folder(out)
        tiny.model = peft.PeftModel.from_pretrained(tiny.model, str(source))
    else:
        config = peft.LoraConfig(lora_dropout=0.0, bias="none", **recipe.lora)
        tiny.model = peft.get_peft_model(tiny.model, config)
        fill(tiny.model, recipe.name)
    tiny.model.eval()


@torch.no_grad()
def make(recipe: Recipe, out: Path) -> None:
    tiny = build(recipe.model)
    if hasattr(tiny.block, "experts"):
        tiny.tensors["topk_ids"], tiny.tensors["topk_weights"] = route(recipe.model, tiny)
    write_model(recipe.model, tiny, out)
    adapt(recipe, tiny, out)
    expected = outputs(recipe.model, tiny, torch.float32)
    if recipe.bf16_output:
        rounded = outputs(recipe.model, tiny, torch.bfloat16)
        expected.update({f"{key}.bfloat16": value for key, value in rounded.items()})
    folder = recipe.folder(out)
    tiny.model.to(recipe.dtype)
    save(tiny, folder)
    releases = {"peft": peft.__version__, "transformers": transformers.__version__}
    path = out / "expected" / f"{recipe.name}.safetensors"
    origin = json.dumps({"model": recipe.model, **releases})
    store(expected, path, {"origin": origin})  # one key, since several are saved in random order
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{recipe.name}: {size:,} bytes, {', '.join(expected)}")


@torch.no_grad()
def make_refused(recipe: Recipe, out: Path) -> None:
    tiny = build(recipe.model)
    config = peft.LoraConfig(**{"lora_dropout": 0.0, "bias": "none", **recipe.lora})
    tiny.model = peft.get_peft_model(tiny.model, config)
    save(tiny, out / "refused" / recipe.name)


def save(tiny: Tiny, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    tiny.model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "adapter_model.safetensors").chmod(0o644)


def store(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)


def write_model(name: str, tiny: Tiny, out: Path) -> None:
    """Config and tensors of the model; written by the old releases, compared by the new ones."""
    folder = out / "models" / name
    path = folder / "layer.safetensors"
    exact = {"topk_weights", "topk_ids"}
    stored = {k: v if k in exact else v.bfloat16() for k, v in tiny.tensors.items()}
    stored = {k: v.contiguous() for k, v in stored.items()}
    if transformers.__version__.startswith("4"):
        store(stored, path)
        config = json.loads(tiny.model.config.to_json_string())
        config = {key: value for key, value in config.items() if not key.startswith("_")}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return
    for key, value in load_file(path).items():
        if not torch.allclose(value.float(), stored[key].float(), atol=1e-6):
            raise SystemExit(f"{path}: {key} differs between the two releases of transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tests/data; see this file's first lines.")
    default = Path(__file__).resolve().parent.parent / "tests" / "data"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--only", nargs="*", help="names of recipes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"peft {peft.__version__}, transformers {transformers.__version__}")
    for recipe in RECIPES:
        if recipe.fits_releases() and (not arguments.only or recipe.name in arguments.only):
            make(recipe, arguments.out)
    for recipe in REFUSED:
        if recipe.fits_releases() and (not arguments.only or recipe.name in arguments.only):
            make_refused(recipe, arguments.out)


if __name__ == "__main__":
    main()
