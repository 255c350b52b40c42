"""Writes adapter directories for tests, in each form that other tools write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from cupylora.adapters.factors import LoraFactors
from cupylora.shapes import ModelShape, ModuleShape, MoeShape

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

PREFIX = "base_model.model.model."
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none"}


def model(**moe: Any) -> ModelShape:
    """Two layers, hidden 12: q/k/v/o of different widths, and experts (4 of width 10, top 2)."""
    qkv = (
        ModuleShape("q_proj", 12, 16),
        ModuleShape("k_proj", 12, 8),
        ModuleShape("v_proj", 12, 8),
    )
    sizes = {"hidden": 12, "intermediate": 10, "experts": 4, "top_k": 2}
    experts = MoeShape(**{**sizes, **moe})
    return ModelShape("toy", 2, 12, (qkv, (ModuleShape("o_proj", 16, 12),)), experts)


def random(rng: np.random.Generator, *shape: int) -> Array:
    """Small whole numbers, without zeros: exact in every type, and no product hides an error."""
    values = rng.integers(1, 7, shape) * rng.choice([-1, 1], shape)
    return values.astype(np.float32)


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A directory with these tensors and CONFIG changed by ``config``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    contiguous = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    (folder / "adapter_model.safetensors").write_bytes(save(contiguous))
    return folder


def linear(path: str, a: Array, b: Array, prefix: str = PREFIX) -> Tensors:
    return {f"{prefix}{path}.lora_A.weight": a, f"{prefix}{path}.lora_B.weight": b}


def dense(rank: int, shape: ModuleShape, path: str, prefix: str = PREFIX, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    a, b = random(rng, rank, shape.in_features), random(rng, shape.out_features, rank)
    return linear(path, a, b, prefix)


Experts = dict[str, LoraFactors]
"""Factors of gate_proj, up_proj and down_proj of one layer, [E, r, in] and [E, out, r]."""


def expert_factors(moe: MoeShape, rank: int, seed: int = 0) -> Experts:
    """gate and up share one A, so that every form can hold them."""
    rng = np.random.default_rng(seed)
    result: Experts = {}
    for module in moe.modules:
        a = random(rng, moe.experts, rank, module.in_features)
        if module.name == "up_proj" and "gate_proj" in result:
            a = result["gate_proj"].a
        b = random(rng, moe.experts, module.out_features, rank)
        result[module.name] = LoraFactors(a, b, 1.5)
    return result


def per_expert(factors: Experts, layer: int, only: tuple[int, ...] | None = None) -> Tensors:
    tensors: Tensors = {}
    for module, f in factors.items():
        for expert in only if only is not None else range(len(f.a)):
            path = f"layers.{layer}.mlp.experts.{expert}.{module}"
            tensors |= linear(path, f.a[expert], f.b[expert])
    return tensors


def three_dimensional(factors: Experts, layer: int) -> Tensors:
    tensors: Tensors = {}
    for module, f in factors.items():
        tensors |= linear(f"layers.{layer}.mlp.experts.{module}", f.a, f.b)
    return tensors


def fused_b(moe: MoeShape, factors: Experts) -> Array:
    """B of gate and up as one [E, 2I, r], in the model's layout."""
    gate, up = factors["gate_proj"].b, factors["up_proj"].b
    if moe.gate_up_layout == "interleaved":
        return np.stack([gate, up], axis=2).reshape(len(gate), -1, gate.shape[2])
    halves = [gate, up] if moe.gate_up_layout == "gate_first" else [up, gate]
    return np.concatenate(halves, axis=1)


def stacked(moe: MoeShape, factors: Experts, layer: int, *, swapped: bool = False) -> Tensors:
    """As peft's target_parameters: gate_up inside, down outside; ``swapped`` as up to peft 0.18."""
    pairs = {
        ".base_layer": (factors["gate_proj"].a, fused_b(moe, factors)),
        "": (factors["down_proj"].a, factors["down_proj"].b),
    }
    tensors: Tensors = {}
    for inner, (a, b) in pairs.items():
        if swapped:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        rows = a.reshape(-1, a.shape[2])
        columns = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        tensors |= linear(f"layers.{layer}.mlp.experts{inner}", rows, columns)
    return tensors


def in_lists(moe: MoeShape, factors: Experts, layer: int, only: tuple[int, ...]) -> Tensors:
    """As Unsloth names GPT-OSS's experts in four bits: one linear layer has gate and up."""
    fused, down = fused_b(moe, factors), factors["down_proj"]
    tensors: Tensors = {}
    for expert in only:
        path = f"layers.{layer}.mlp.experts."
        a = factors["gate_proj"].a[expert]
        tensors |= linear(f"{path}gate_up_projs.{expert}", a, fused[expert])
        tensors |= linear(f"{path}down_projs.{expert}", down.a[expert], down.b[expert])
    return tensors


def packed_by_expert(tensors: Tensors, experts: int) -> Tensors:
    """Stacked factors with the columns of B expert by expert, as Unsloth packed them."""
    return {
        name: t.reshape(len(t), -1, experts).transpose(0, 2, 1).reshape(t.shape)
        if "lora_B" in name
        else t
        for name, t in tensors.items()
    }


def kohya_named(tensors: Tensors) -> Tensors:
    """The same tensors under the ends of names that Kohya's scripts write."""
    return {
        name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): t
        for name, t in tensors.items()
    }
