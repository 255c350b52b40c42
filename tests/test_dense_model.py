"""Models without experts: their config.json, their adapters, the stack and ``cupylora run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_files as files
import numpy as np
import pytest
from backend_util import BACKENDS, DTYPES, make_table, random_adapter
from click.testing import CliRunner

from cupylora.adapters.factors import Adapter
from cupylora.adapters.peft import read_adapter
from cupylora.backend import open_backend
from cupylora.cli import main
from cupylora.cli._check import check_stack, step_outputs
from cupylora.errors import AdapterFormatError, ArgumentError
from cupylora.layers.batch import make_batch, mixed_slots
from cupylora.layers.stack import LayerStack, base_weight_bytes
from cupylora.ops import lora_delta
from cupylora.shapes import ModelShape, load_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
PATHS = {
    **{f"{m}_proj": f"self_attn.{m}_proj" for m in "qkvo"},
    **{f"{m}_proj": f"mlp.{m}_proj" for m in ("gate", "up", "down")},
}


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return path


def load(tmp_path: Path, **changes: Any) -> ModelShape:
    return load_model(str(write_config(tmp_path / "tiny-llama", **changes)))


def write_adapter(folder: Path, model: ModelShape, *, rank: int = 4, skip: str = "") -> Path:
    """Every module of every layer, but ``skip``; alpha 6."""
    tensors: files.Tensors = {}
    for layer in range(model.layers):
        for number, module in enumerate(model.modules):
            if module.name != skip:
                path = f"layers.{layer}.{PATHS[module.name]}"
                tensors |= files.dense(rank, module, path, seed=10 * layer + number)
    return files.write(folder, tensors, r=rank)


def test_shape_of_a_dense_config(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert model.moe is None
    assert (model.name, model.family, model.layers, model.hidden) == ("tiny-llama", "llama", 3, 48)
    groups = [[(m.name, m.in_features, m.out_features) for m in g] for g in model.dense_groups]
    assert groups == [
        [("q_proj", 48, 48), ("k_proj", 48, 24), ("v_proj", 48, 24)],
        [("o_proj", 48, 48)],
        [("gate_proj", 48, 72), ("up_proj", 48, 72)],
        [("down_proj", 72, 48)],
    ]
    assert base_weight_bytes(model, "bfloat16") == 0


@pytest.mark.parametrize(
    "changes", [{"num_experts": 0}, {"num_local_experts": None, "num_experts_per_tok": 2}], ids=str
)
def test_no_experts_is_dense(changes: dict[str, Any], tmp_path: Path) -> None:
    assert load(tmp_path, **changes).moe is None


@pytest.mark.parametrize(
    ("changes", "dense_layers", "shared", "dense"),
    [
        ({"model_type": "qwen3_moe"}, (), 0, 0),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 2},
            (0, 2),
            0,
            72,
        ),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}, (), 40, 0),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1, **LATENT}, (0,), 0, 72),
        (
            {
                "model_type": "deepseek_v2",
                "first_k_dense_replace": 1,
                "n_shared_experts": 2,
                **LATENT,
            },
            (0,),
            48,
            72,
        ),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2, **LATENT}, (1,), 0, 72),
        (
            {
                "model_type": "llama4_text",
                "moe_intermediate_size": None,
                "intermediate_size": 24,
                "intermediate_size_mlp": 96,
                "interleave_moe_layer_step": 2,
            },
            (0, 2),
            24,
            96,
        ),
        (
            {
                "model_type": "llama4_text",
                "moe_intermediate_size": None,
                "intermediate_size": 24,
                "intermediate_size_mlp": 96,
                "moe_layers": [2, 0],
            },
            (1,),
            24,
            96,
        ),
    ],
    ids=str,
)
def test_layers_without_experts_and_shared_experts(
    changes: dict[str, Any],
    dense_layers: tuple[int, ...],
    shared: int,
    dense: int,
    tmp_path: Path,
) -> None:
    model = load(tmp_path, **{**EXPERTS, **changes})
    assert model.moe is not None
    assert (model.moe.experts, model.moe.intermediate) == (8, 24)
    assert model.dense_layers == dense_layers
    assert [m.name for m in model.modules].count("gate_proj") == 1
    routed = tuple(i for i in range(3) if i not in dense_layers) if dense_layers else None
    wanted = {}
    for prefix, width, layers in (("shared", shared, routed), ("dense", dense, dense_layers)):
        if width:
            for name in ("gate_proj", "up_proj"):
                wanted[f"{prefix}_{name}"] = (48, width, layers)
            wanted[f"{prefix}_down_proj"] = (width, 48, layers)
    found = {
        m.name: (m.in_features, m.out_features, m.layers)
        for m in model.modules
        if m.name.startswith(("shared", "dense"))
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, "layers from 0 to 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "0"}, "layers from 0 to 2"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": -1, **LATENT}, "0 or a positive"),
        ({"model_type": "deepseek_v3", "n_shared_experts": "2", **LATENT}, "n_shared_experts"),
        ({"model_type": "llama4_text", "moe_layers": [True]}, "moe_layers"),
        ({"num_hidden_layers": 1 << 17}, "num_hidden_layers"),
    ],
    ids=str,
)
def test_odd_keys_of_layers(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        load(tmp_path, **{**EXPERTS, **changes})


def test_unknown_expert_keys_are_not_taken_for_dense(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"config\.json: has moe_num_experts.*num_experts"):
        load(tmp_path, moe_num_experts=8, moe_layer_interval=1)


def test_no_intermediate_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"intermediate_size is present"):
        load(tmp_path, intermediate_size=None)


def test_adapter_reaches_every_module(tmp_path: Path) -> None:
    model = load(tmp_path)
    adapter = read_adapter(write_adapter(tmp_path / "a", model, skip="up_proj"), model)
    assert set(adapter.factors) == {
        (layer, m.name) for layer in range(3) for m in model.modules if m.name != "up_proj"
    }
    for (_, name), factors in adapter.factors.items():
        shape = model.modules[model.module_index(name)]
        assert factors.a.shape == (1, 4, shape.in_features)
        assert factors.b.shape == (1, shape.out_features, 4)
        assert factors.scale == 1.5


@pytest.mark.parametrize("path", ["self_attn.gate_proj", "mlp.q_proj", "mlp.experts.0.up_proj"])
def test_modules_in_the_wrong_place_are_refused(path: str, tmp_path: Path) -> None:
    """A gate within attention, say, is not the MLP's."""
    model = load(tmp_path)
    shape = model.modules[model.module_index("gate_proj")]
    folder = files.write(tmp_path / "a", files.dense(4, shape, f"layers.0.{path}"))
    with pytest.raises(AdapterFormatError, match=r"2 of 2 tensors .* tiny-llama"):
        read_adapter(folder, model)


def test_adapter_of_another_model_says_what_to_do(tmp_path: Path) -> None:
    other = load(tmp_path / "other", intermediate_size=80)
    folder = write_adapter(tmp_path / "a", other)
    config = folder / "adapter_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "base_model_name_or_path": "org/other-model"}))
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(folder, load(tmp_path))
    message = str(caught.value)
    for words in (
        "[4, 80] and ",  # what it has: the down projection's A, read first
        "do not fit model tiny-llama, whose down_proj needs [r, 72] and [48, r]",
        "trained on another model (it names org/other-model)",
        "config.json",
        "an adapter of tiny-llama",
    ):
        assert words in message, message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_stack_passes_its_check(name: str, dtype: str, tmp_path: Path) -> None:
    model, backend = load(tmp_path), open_backend(name)
    adapters = {
        0: random_adapter(model, 3, 1),
        1: random_adapter(model, 16, 2, without=("up_proj", "o_proj")),
    }
    stack = LayerStack(make_table(backend, model, adapters, dtype), backend, max_tokens=40)
    batch = make_batch(model, backend, mixed_slots(40, 3, 0.25, seed=3), dtype=dtype, seed=3)
    x = stack.step(batch)
    stepped = step_outputs(stack, batch, x)
    assert stepped.shape == (40, 48 + 96 + 48 + 144 + 48)
    held = [adapters.get(slot, Adapter("empty", {})) for slot in range(3)]
    findings = check_stack(stack, batch, held, stepped)
    assert [f for f in findings if not f.passed] == []
    assert len(findings) == 3 * 4 * 3 + 1
    assert stack.weight_bytes == 0
    stepped[1, -1] += stepped.dtype.type(1)
    failed = [f.what for f in check_stack(stack, batch, held, stepped) if not f.passed]
    assert failed == ["same step again"]


def run(tmp_path: Path, *arguments: Any) -> tuple[int, str, Any]:
    path = tmp_path / "run.json"
    options = ["run", "--steps", "2", "--json", str(path), *map(str, arguments)]
    result = CliRunner().invoke(main, options)
    return result.exit_code, result.output, json.loads(path.read_text())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lora_only", [False, True])
def test_run(backend: str, lora_only: bool, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny-llama")
    adapter = write_adapter(tmp_path / "mine", load_model(str(config)))
    options = ["--lora-only"] if lora_only else []
    code, output, found = run(
        tmp_path,
        *("--backend", backend, "--model", config, "--adapter", adapter),
        *("--synthetic-adapters", 1, "--rank", 11, *options),
    )
    assert code == 0, output
    assert "tiny-llama, 3 layers" in output
    assert "gate_proj 48->72, up_proj 48->72" in output
    assert [a["name"] for a in found["adapters"]] == ["mine", "synthetic-0-r11"]
    assert [s["stage"] for s in found["stages"]] == ["route", "dense deltas"]
    assert [r["rows"] for r in found["rows"]] == [r["tokens"] for r in found["rows"]]
    assert found["model"]["moe"] is None
    assert found["memory"]["base_weights"] == 0
    assert {c["what"] for c in found["check"]} >= {"gate+up delta", "down y", "same step again"}
    assert found["passed"] is True


def test_run_finds_a_wrong_delta(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def off(x: Any, y: Any, *arguments: Any, **options: Any) -> None:
        before = y.copy()
        lora_delta(x, y, *arguments, **options)
        y += (y - before) * y.dtype.type(0.05)

    monkeypatch.setattr("cupylora.layers.dense.lora_delta", off)
    config = write_config(tmp_path / "tiny-llama")
    code, _, found = run(tmp_path, "--backend", "numpy", "--model", config)
    assert code == 1
    failed = {c["what"] for c in found["check"] if not c["passed"]}
    assert failed >= {"gate+up delta", "down delta"}
    assert np.all([c["error"] > c["bound"] for c in found["check"] if not c["passed"]])
