"""Adapters that peft wrote, against peft's own outputs: scales, axis orders, sharing, all of it.

The mathematics here is a plain loop over tokens from the factors that ``read_adapter`` returns.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fixtures_util import (
    DATA,
    DEMO,
    FIXTURES,
    LAYER,
    MODELS,
    UNDECIDED,
    Fixture,
    load_fixture,
    load_model_data,
    moe_block,
    projection,
)

from cupylora.adapters.assembly import pair_up, plan_units, tensors_by_place
from cupylora.adapters.factors import Adapter
from cupylora.adapters.inspection import inspect_adapter
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.peft_config import read_config
from cupylora.adapters.safetensors_file import open_weights
from cupylora.errors import AdapterFormatError
from cupylora.shapes import PRESETS


def output(fixture: Fixture, adapter: Adapter | None, key: str) -> np.ndarray:
    def factors_of(module: str):
        return adapter.factors.get((LAYER, module)) if adapter else None

    if key == "moe":
        return moe_block(fixture.model, factors_of)
    return projection(fixture.model, key, factors_of)


def error(got: np.ndarray, expected: np.ndarray, base: np.ndarray) -> float:
    """Frobenius error relative to the adapter's own contribution."""
    contribution = np.linalg.norm(expected.astype(np.float64) - base)
    assert contribution > 0.05 * np.linalg.norm(base), "the adapter hardly changes the output"
    return float(np.linalg.norm(got - expected) / contribution)


@pytest.mark.parametrize("name", FIXTURES)
def test_peft_outputs_are_reproduced(name: str) -> None:
    fixture = load_fixture(name)
    adapter = read_adapter(fixture.path, fixture.model.shape)
    for key, expected in fixture.expected.items():
        module, _, rounded = key.partition(".")
        base = output(fixture, None, module)
        got = output(fixture, adapter, module)
        if module == "moe" or (LAYER, module) in adapter.factors:
            assert error(got, expected, base) < (0.02 if rounded else 5e-6), key
    adapted = {module for layer, module in adapter.factors if layer == LAYER}
    assert adapted & fixture.model.dense_modules <= fixture.expected.keys()
    assert ("moe" in fixture.expected) == (fixture.model.shape.moe is not None)


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_has_its_part_in_one_unit(name: str) -> None:
    fixture = load_fixture(name)
    model = fixture.model.shape
    config = read_config(fixture.path / "adapter_config.json")
    with open_weights(fixture.path) as weights:
        placed = tensors_by_place(weights.tensors, model)
        units = plan_units(
            pair_up(placed, weights.tensors, weights.scalar, model, config), model, config
        )
        used = [n for unit in units for pair in unit.pairs for n in (pair.a_name, pair.b_name)]
        assert sorted(used) == sorted(weights.tensors)
    given = [(unit.layer, module) for unit in units for module in unit.modules]
    assert len(given) == len(set(given))


REFUSED = {
    "dora": ("use_dora = True", "v_proj.lora_magnitude_vector (DoRA"),
    "bias": ("bias = 'lora_only'",),
    "lora-bias": ("lora_bias = True", "v_proj.lora_B.bias (a bias"),
    "modules-to-save": ("modules_to_save = ['norm']", "model.norm.weight (full weights"),
    "embeddings": ("embed_tokens.lora_embedding_A (LoRA on embeddings",),
    "output-head": ("lm_head.lora_A.weight (LoRA on the output head",),
    "tokens": ("trainable_token_indices = [1, 2]", "trainable_tokens_delta (trained token"),
    "router": ("layers.0.mlp.gate.lora_A.weight (LoRA on the router",),
    "router-parameter": ("layers.1.mlp.gate.lora_B.weight (LoRA on the router",),
    "shared-expert": ("shared_expert_gate.lora_A.weight (LoRA on a shared expert's gate",),
}


@pytest.mark.parametrize("name", sorted(path.name for path in (DATA / "refused").iterdir()))
def test_what_peft_writes_and_cannot_be_applied_is_named(name: str) -> None:
    """Case 4, as peft itself saves it: the setting and every tensor, and what to do."""
    models = {"router": "olmoe", "router-parameter": "olmoe", "shared-expert": "qwen2-moe"}
    model = load_model_data(models.get(name, "llama")).shape
    found = inspect_adapter(DATA / "refused" / name, model)
    told = " ".join(problem.text for problem in found.problems)
    for words in (*REFUSED[name], "train the adapter again without"):
        assert words in told
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(DATA / "refused" / name, model)
    assert REFUSED[name][0] in str(caught.value)


def test_tiny_moe_is_the_preset() -> None:
    stored = load_model_data("tiny-moe").shape
    preset = PRESETS["tiny-moe"]
    assert (stored.modules, stored.layers, stored.moe) == (
        preset.modules,
        preset.layers,
        preset.moe,
    )


def test_demo_adapters_show_the_kinds() -> None:
    adapters = [read_adapter(DATA / "demo" / name, PRESETS["tiny-moe"]) for name in DEMO]
    assert len(adapters) >= 3
    assert len({adapter.max_rank for adapter in adapters}) == len(adapters)
    configs = [json.loads((DATA / "demo" / n / "adapter_config.json").read_text()) for n in DEMO]
    assert any(config["use_rslora"] for config in configs)
    assert any(config.get("target_parameters") for config in configs)


def test_router_output_is_usable() -> None:
    for name in MODELS:
        model = load_model_data(name)
        assert model.topk_ids.dtype == np.int32
        assert model.topk_ids.max() < model.moe.experts
        np.testing.assert_allclose(model.topk_weights.sum(1), 1, atol=1e-6)


def test_data_stays_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 2_000_000


def copy_with_config(name: str, target: Path, **changes: object) -> tuple[Fixture, Path]:
    fixture = load_fixture(name)
    folder = target / name
    shutil.copytree(fixture.path, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return fixture, folder


@pytest.mark.parametrize(
    ("name", "version"), [("mixtral-gate-up-018", "0.19.1"), ("mixtral-gate-up-021", "0.18.1")]
)
def test_square_factors_depend_on_peft_version(name: str, version: str, tmp_path: Path) -> None:
    """The version is what decides here: the wrong one gives another output."""
    fixture, folder = copy_with_config(name, tmp_path, peft_version=version)
    wrong = output(fixture, read_adapter(folder, fixture.model.shape), "moe")
    base = output(fixture, None, "moe")
    assert error(wrong, fixture.expected["moe"], base) > 0.5


def test_square_factors_without_version_are_refused(tmp_path: Path) -> None:
    fixture, folder = copy_with_config("mixtral-gate-up-018", tmp_path, peft_version=None)
    with pytest.raises(AdapterFormatError, match="add the peft_version"):
        read_adapter(folder, fixture.model.shape)


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_transformers_decided_is_asked_for(name: str, tmp_path: Path) -> None:
    """GPT-OSS's second projection alone is square, and peft's release does not tell its order."""
    fixture = load_fixture(name)
    with pytest.raises(AdapterFormatError, match="cupylora_expert_axes") as caught:
        read_adapter(fixture.path, fixture.model.shape)
    five = "out_in" if name == "gpt-oss-down-0190" else "in_out"
    assert f'"{five}" if it was trained with transformers 5' in str(caught.value)
    for axes in ("in_out", "out_in"):
        _, folder = copy_with_config(name, tmp_path / axes, cupylora_expert_axes=axes)
        got = output(fixture, read_adapter(folder, fixture.model.shape), "moe")
        off = error(got, fixture.expected["moe"], output(fixture, None, "moe"))
        assert off < 5e-6 if axes == UNDECIDED[name] else off > 0.5


def test_transposed_experts_need_no_version(tmp_path: Path) -> None:
    fixture, folder = copy_with_config("gpt-oss-down-018", tmp_path, peft_version=None)
    adapter = read_adapter(folder, fixture.model.shape)
    got, base = output(fixture, adapter, "moe"), output(fixture, None, "moe")
    assert error(got, fixture.expected["moe"], base) < 5e-6


def test_other_shapes_outweigh_a_wrong_version(tmp_path: Path) -> None:
    """gate_up is square, but down's shapes tell the axis order of both."""
    fixture, folder = copy_with_config("mixtral-stacked-018", tmp_path, peft_version="0.21.2")
    adapter = read_adapter(folder, fixture.model.shape)
    got, base = output(fixture, adapter, "moe"), output(fixture, None, "moe")
    assert error(got, fixture.expected["moe"], base) < 5e-6


def test_resaved_block_diagonal_adapter_has_the_same_delta() -> None:
    named, resaved = load_fixture("contracts-r8"), load_fixture("tiny-resaved")
    shape = named.model.shape
    one, two = read_adapter(named.path, shape), read_adapter(resaved.path, shape)
    assert one.factors.keys() == two.factors.keys()
    assert (one.max_rank, two.max_rank) == (8, 16)
    for key, factors in one.factors.items():
        other = two.factors[key]
        np.testing.assert_allclose(
            factors.scale * factors.b.astype(np.float64) @ factors.a.astype(np.float64),
            other.scale * other.b.astype(np.float64) @ other.a.astype(np.float64),
            rtol=1e-12,
            err_msg=str(key),
        )


def test_stacked_gate_and_up_share_one_a() -> None:
    fixture = load_fixture("legal-stacked-r6")
    factors = read_adapter(fixture.path, fixture.model.shape).factors
    for layer in range(fixture.model.shape.layers):
        assert factors[layer, "gate_proj"].a is factors[layer, "up_proj"].a
