"""What ``tools/make_fixtures.py`` stored, for tests: models, adapters and peft's own outputs.

``FIXTURES`` names every adapter under ``tests/data`` that can be read as it is; ``load_fixture``
returns all that a test of a layer needs, in NumPy. Values of weights, factors and inputs are exact
in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from cupylora.adapters.factors import LoraFactors
from cupylora.shapes import ModelShape, MoeShape, load_model

DATA = Path(__file__).parent / "data"
LAYER = 1
"""The layer whose weights and outputs are stored."""

UNDECIDED = {
    "gpt-oss-down-0190": "out_in",
    "gpt-oss-down-021": "in_out",
    "gpt-oss-down-021-tf4": "out_in",
}
"""Adapters that nothing in their files decides, with the axis order that they have."""
ALL = tuple(sorted(path.stem for path in (DATA / "expected").glob("*.safetensors")))
FIXTURES = tuple(name for name in ALL if name not in UNDECIDED)
MODELS = ("gpt-oss", "mixtral", "tiny-moe")
"""Those whose whole MoE block is stored, by several adapters."""
DEMO = tuple(sorted(path.name for path in (DATA / "demo").iterdir()))

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ModelData:
    """A tiny model: ``x`` [T, hidden] feeds q, k, v and the MoE block, ``o_x`` [T, q] feeds o;
    ``inputs`` has those of projections of other widths by name.

    weights (float32): ``q_proj.weight`` ... [out, in], ``experts.first`` [E, 2I, H] in the model's
    gate/up layout, ``experts.second`` [E, H, I], for gpt-oss also ``experts.first_bias`` [E, 2I]
    and ``experts.second_bias`` [E, H]. topk_ids int32 [T, k], topk_weights float32 [T, k]; both
    of no columns in a model without experts.
    """

    shape: ModelShape
    x: Array
    o_x: Array
    topk_ids: Array
    topk_weights: Array
    weights: Mapping[str, Array]
    inputs: Mapping[str, Array]

    @property
    def moe(self) -> MoeShape:
        assert self.shape.moe is not None
        return self.shape.moe

    @property
    def dense_modules(self) -> set[str]:
        return {module.name for group in self.shape.dense_groups for module in group}

    def input_of(self, module: str) -> Array:
        return self.o_x if module == "o_proj" else self.inputs.get(module, self.x)


@dataclass(frozen=True)
class Fixture:
    """An adapter directory and peft's outputs of layer ``LAYER``: ``moe``, ``q_proj``, ... in
    float32, and ``moe.bfloat16`` etc. where peft also ran in bfloat16."""

    name: str
    path: Path
    model: ModelData
    expected: Mapping[str, Array]
    releases: Mapping[str, str]


def load_model_data(name: str) -> ModelData:
    folder = DATA / "models" / name
    tensors = load_file(folder / "layer.safetensors")
    ids = tensors.pop("topk_ids", np.zeros((0, 0), np.int32))
    weights = tensors.pop("topk_weights", np.zeros((0, 0), np.float32))
    floats = {key: value.astype(np.float32) for key, value in tensors.items()}
    x, o_x = floats.pop("x"), floats.pop("o_x")
    inputs = {key.removesuffix(".x"): floats.pop(key) for key in list(floats) if key.endswith(".x")}
    return ModelData(load_model(str(folder)), x, o_x, ids, weights, floats, inputs)


def load_fixture(name: str) -> Fixture:
    path = DATA / "expected" / f"{name}.safetensors"
    with safe_open(path, "numpy") as file:
        releases = json.loads(file.metadata()["origin"])
    model = load_model_data(releases.pop("model"))
    folder = DATA / ("demo" if name in DEMO else "adapters") / name
    return Fixture(name, folder, model, load_file(path), releases)


def delta(x: Array, factors: LoraFactors | None, expert: int = 0) -> Array | float:
    """One module's LoRA delta of rows x [n, in] in float64."""
    if factors is None:
        return 0.0
    a = factors.a[expert % len(factors.a)].astype(np.float64)
    b = factors.b[expert % len(factors.b)].astype(np.float64)
    return factors.scale * ((x.astype(np.float64) @ a.T) @ b.T)


FactorsOf = Callable[[str], LoraFactors | None]
"""Module name → its factors in layer ``LAYER``, or None."""


def projection(model: ModelData, module: str, factors_of: FactorsOf) -> Array:
    """A dense projection with its delta, float64 [T, out]."""
    x, weight = model.input_of(module), model.weights[f"{module}.weight"]
    return x.astype(np.float64) @ weight.T.astype(np.float64) + delta(x, factors_of(module))


def moe_block(model: ModelData, factors_of: FactorsOf) -> Array:
    """The MoE block with its deltas, token by token, float64 [T, H]."""
    y = np.zeros(model.x.shape)
    for token, ids in enumerate(model.topk_ids):
        x = model.x[token : token + 1]
        for choice, expert in enumerate(ids):
            row = _expert(model, x, int(expert), factors_of)
            y[token] += float(model.topk_weights[token, choice]) * row[0]
    return y


def _expert(model: ModelData, x: Array, expert: int, factors_of: FactorsOf) -> Array:
    weights, moe = model.weights, model.moe
    first = x.astype(np.float64) @ weights["experts.first"][expert].T.astype(np.float64)
    first += weights.get("experts.first_bias", np.zeros((moe.experts, 1)))[expert]
    if moe.gate_up_layout == "interleaved":
        gate, up = first[:, 0::2], first[:, 1::2]
    else:
        gate, up = first[:, : moe.intermediate], first[:, moe.intermediate :]
    gate = gate + delta(x, factors_of("gate_proj"), expert)
    up = up + delta(x, factors_of("up_proj"), expert)
    if moe.activation == "swiglu_oai":
        gate, up = np.minimum(gate, moe.limit), np.clip(up, -moe.limit, moe.limit)
        inner = gate / (1 + np.exp(-moe.alpha * gate)) * (up + 1)
    else:
        inner = gate / (1 + np.exp(-gate)) * up
    y = inner @ weights["experts.second"][expert].T.astype(np.float64)
    y += weights.get("experts.second_bias", np.zeros((moe.experts, 1)))[expert]
    return y + delta(inner, factors_of("down_proj"), expert)
