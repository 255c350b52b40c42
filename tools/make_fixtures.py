"""Make the files under ``tests/data``: PEFT adapters as peft writes them, and peft's own outputs.

Nothing else in the project needs torch, transformers or peft. This script does, in two throw-away
environments, best kept outside the source tree (Python 3.11; the CPU build of torch is enough):

    python -m venv old && old/bin/pip install torch transformers==4.57.1 peft==0.17.1
    python -m venv new && new/bin/pip install torch transformers==5.24.0 peft==0.21.2

``old`` holds the last releases that name every expert (``experts.3.gate_proj``); ``new`` holds
experts as stacked parameters. Stacked adapters differ between peft releases, so ``new`` is used
three times. Sets are saved in hash order, hence the fixed seed:

    export PYTHONHASHSEED=0
    old/bin/python tools/make_fixtures.py
    new/bin/pip install peft==0.18.1 && new/bin/python tools/make_fixtures.py
    new/bin/pip install peft==0.19.1 && new/bin/python tools/make_fixtures.py
    new/bin/pip install peft==0.21.2 && new/bin/python tools/make_fixtures.py

Start with ``old``: one recipe for ``new`` re-saves an adapter that ``old`` wrote. Each run makes
the recipes whose releases are the installed ones. Results are the same on every run.

What is written:

* ``models/MODEL/config.json`` and ``layer.safetensors``: a tiny random model, and of its last layer
  the attention projections and the experts (the first projection in the model's own gate/up layout,
  both as [expert, out, in]; no attention bias, though GPT-OSS has room for one: it is zero), the
  inputs ``x`` and ``o_x``, the router's ``topk_ids`` and ``topk_weights``.
* ``demo/NAME`` (tiny-moe adapters, which ``cupylora run`` uses if not told otherwise) and
  ``adapters/NAME``: the adapter directory, byte for byte as peft saved it, less its model card.
* ``expected/NAME.safetensors``: peft's output of the adapted projections (``q_proj`` ...) and of
  the MoE block (``moe``) of the last layer for those inputs, in float32, and for some in bfloat16
  (``moe.bfloat16``), with the releases in the header.

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

    @property
    def transformers(self) -> str:
        return "4" if self.peft == "0.17.1" else "5"

    def folder(self, out: Path) -> Path:
        return out / ("demo" if self.demo else "adapters") / self.name


def lora(r: int, alpha: int, modules: list[str], **options: Any) -> dict[str, Any]:
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
]


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
        """The MoE block; transformers 4 calls Mixtral's by another name."""
        return self.layer.mlp if hasattr(self.layer, "mlp") else self.layer.block_sparse_moe


def random(name: str, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Normal values of a seed taken from ``name``, exact in bfloat16."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32) * scale)
    return values.bfloat16().float()


def config_of(name: str) -> Any:
    common = {"num_hidden_layers": LAYERS, "vocab_size": 32, "num_experts_per_tok": 2}
    if name == "tiny-moe":
        return transformers.Qwen3MoeConfig(
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            moe_intermediate_size=48,
            num_experts=8,
            norm_topk_prob=True,
            **common,
        )
    if name == "mixtral":
        return transformers.MixtralConfig(
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=16,
            num_local_experts=4,
            **common,
        )
    return transformers.GptOssConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=4,
        layer_types=["full_attention"] * LAYERS,
        **common,
    )


def expert_sizes(config: Any) -> tuple[int, int, int]:
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return experts, config.hidden_size, inner


def build(name: str) -> Tiny:
    """The model with seeded weights; equal values whichever form its experts have."""
    config = config_of(name)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    experts, hidden, inner = expert_sizes(config)
    classes = {
        "tiny-moe": transformers.Qwen3MoeForCausalLM,
        "mixtral": transformers.MixtralForCausalLM,
        "gpt-oss": transformers.GptOssForCausalLM,
    }
    tiny = Tiny(classes[name](config).float().eval())
    for parameter in tiny.model.parameters():
        parameter.data.zero_()
    attention = tiny.layer.self_attn
    for projection in ATTENTION:
        linear = getattr(attention, projection)
        values = random(f"{name}.{projection}", tuple(linear.weight.shape), 0.15)
        tiny.tensors[f"{projection}.weight"] = linear.weight.data = values
    first = random(f"{name}.first", (experts, 2 * inner, hidden), hidden**-0.5)
    second = random(f"{name}.second", (experts, hidden, inner), inner**-0.5)
    tiny.tensors.update({"experts.first": first, "experts.second": second})
    if name == "gpt-oss":
        tiny.tensors["experts.first_bias"] = random(f"{name}.fb", (experts, 2 * inner), 0.3)
        tiny.tensors["experts.second_bias"] = random(f"{name}.sb", (experts, hidden), 0.3)
    set_experts(tiny, inner)
    router = tiny.block.router if name == "gpt-oss" else tiny.block.gate
    router.weight.data = random(f"{name}.router", (experts, hidden), 0.4)
    tiny.tensors["x"] = random(f"{name}.x", (TOKENS, hidden), 1.0)
    tiny.tensors["o_x"] = random(f"{name}.o_x", (TOKENS, attention.o_proj.weight.shape[1]), 1.0)
    return tiny


def set_experts(tiny: Tiny, inner: int) -> None:
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
    elif "experts.first_bias" in tiny.tensors:
        experts.gate_up_proj.data = first.transpose(1, 2).contiguous()
        experts.down_proj.data = second.transpose(1, 2).contiguous()
        experts.gate_up_proj_bias.data = tiny.tensors["experts.first_bias"]
        experts.down_proj_bias.data = tiny.tensors["experts.second_bias"]
    else:
        experts.gate_up_proj.data, experts.down_proj.data = first, second


def route(tiny: Tiny) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids int32 [T, k] and weights float32 [T, k], as the model's own router gives them."""
    x, block = tiny.tensors["x"], tiny.block
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


def outputs(tiny: Tiny, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """peft's output of the adapted projections and of the MoE block of the last layer."""
    tiny.model.to(dtype)
    x, o_x = tiny.tensors["x"].to(dtype), tiny.tensors["o_x"].to(dtype)
    moe = tiny.block(x[None])
    result = {"moe": (moe[0] if isinstance(moe, tuple) else moe).reshape(TOKENS, -1)}
    for projection in ATTENTION:
        linear = getattr(tiny.layer.self_attn, projection)
        if isinstance(linear, peft.tuners.lora.Linear):
            result[projection] = linear(o_x if projection == "o_proj" else x)
    return {key: value.detach().contiguous() for key, value in result.items()}


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
    tiny.tensors["topk_ids"], tiny.tensors["topk_weights"] = route(tiny)
    write_model(recipe.model, tiny, out)
    adapt(recipe, tiny, out)
    expected = outputs(tiny, torch.float32)
    if recipe.bf16_output:
        rounded = outputs(tiny, torch.bfloat16)
        expected.update({f"{key}.bfloat16": value for key, value in rounded.items()})
    folder = recipe.folder(out)
    shutil.rmtree(folder, ignore_errors=True)
    tiny.model.to(recipe.dtype).save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "adapter_model.safetensors").chmod(0o644)
    releases = {"peft": peft.__version__, "transformers": transformers.__version__}
    path = out / "expected" / f"{recipe.name}.safetensors"
    origin = json.dumps({"model": recipe.model, **releases})
    store(expected, path, {"origin": origin})  # one key, since several are saved in random order
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{recipe.name}: {size:,} bytes, {', '.join(expected)}")


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
        fits = recipe.peft == peft.__version__
        fits = fits and transformers.__version__.startswith(recipe.transformers)
        if fits and (not arguments.only or recipe.name in arguments.only):
            make(recipe, arguments.out)


if __name__ == "__main__":
    main()
