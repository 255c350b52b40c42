"""Shapes judge their fields, and ``load_model`` names the file and the key that will not do."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupylora.errors import ArgumentError
from cupylora.shapes import PRESETS, LoraLimits, ModelShape, ModuleShape, MoeShape, load_model

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MIXTRAL = {**GPT_OSS, "model_type": "mixtral", "hidden_act": "silu", "head_dim": None}
DEEPSEEK = {
    **GPT_OSS,
    "model_type": "deepseek_v3",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
TINY = PRESETS["tiny-moe"]


def write(folder: Path, values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def refused(source: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        load_model(source)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_config_of_gpt_oss(tmp_path: Path) -> None:
    moe = load_model(write(tmp_path, {**GPT_OSS, "swiglu_limit": 5})).moe
    preset = PRESETS["gpt-oss-20b"].moe
    assert preset is not None
    assert moe == replace(preset, hidden=32, intermediate=24, experts=4, top_k=2, limit=5.0)
    default = load_model(write(tmp_path, GPT_OSS)).moe
    assert default is not None
    assert default.limit == 7


@pytest.mark.parametrize(
    "value", ["x", None, [1], float("nan"), float("inf"), -1, 0, True, 10**400]
)
def test_swiglu_limit(value: Any, tmp_path: Path) -> None:
    message = refused(write(tmp_path, {**GPT_OSS, "swiglu_limit": value}))
    assert "config.json: swiglu_limit is" in message


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (MIXTRAL, {"num_attention_heads": 64}),
        (MIXTRAL, {"head_dim": 0}),
        (MIXTRAL, {"head_dim": 1 << 40}),
        (MIXTRAL, {"num_key_value_heads": 1 << 20}),
        (MIXTRAL, {"num_local_experts": 4096}),
        (MIXTRAL, {"num_experts_per_tok": 5}),
        (MIXTRAL, {"num_experts_per_tok": 2.0}),
        (GPT_OSS, {"num_experts_per_tok": 5}),
        (MIXTRAL, {"hidden_act": ["silu"]}),
        (MIXTRAL, {"hidden_act": "tanh"}),
        (MIXTRAL, {"model_type": 5}),
        (MIXTRAL, {"hidden_size": 10**400}),
        (MIXTRAL, {"hidden_size": True}),
        (MIXTRAL, {"intermediate_size": 1 << 31}),
        (MIXTRAL, {"num_hidden_layers": -1}),
        (DEEPSEEK, {"v_head_dim": 1 << 30}),
        (DEEPSEEK, {"kv_lora_rank": (1 << 31) - 1}),
    ],
    ids=str,
)
def test_the_key_is_named(base: dict[str, Any], change: dict[str, Any], tmp_path: Path) -> None:
    load_model(write(tmp_path, base))
    message = refused(write(tmp_path, {**base, **change}))
    [key] = change
    assert f"config.json: {key} is" in message
    assert len(message) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("key", ["hidden_act", "hidden_activation", "mlp_hidden_act"])
def test_activations_of_experts(key: str, tmp_path: Path) -> None:
    bare = {k: v for k, v in MIXTRAL.items() if k != "hidden_act"}
    for value, kind in (("swish", "silu"), ("gelu", "gelu")):
        moe = load_model(write(tmp_path, {**bare, key: value})).moe
        assert moe is not None
        assert moe.activation == kind
    for value in ("relu2", "gelu_pytorch_tanh", "quick_gelu", 1):
        message = refused(write(tmp_path, {**bare, key: value}))
        assert f"config.json: {key} is {value!r}; one of silu, swish, gelu is needed" in message
        assert "MoeShape in Python" in message


def test_activations_that_differ_or_are_unknown(tmp_path: Path) -> None:
    both = {**MIXTRAL, "hidden_activation": "gelu"}
    assert "hidden_act is 'silu'; but hidden_activation" in refused(write(tmp_path, both))
    assert "hidden_act is 'gelu'" in refused(write(tmp_path, {**GPT_OSS, "hidden_act": "gelu"}))
    unnamed = {k: v for k, v in GPT_OSS.items() if k != "model_type"}
    assert "neither model_type nor hidden_act" in refused(write(tmp_path, unnamed))
    moe = load_model(write(tmp_path, {**unnamed, "hidden_act": "silu"})).moe
    assert moe == MoeShape(32, 24, 4, 2)


@pytest.mark.parametrize("family", ["bert", "gpt_neox", "nemotron", "phi3", "qwen9_moe", "x" * 500])
@pytest.mark.parametrize("experts", [{}, {"num_local_experts": 0}], ids=["moe", "dense"])
def test_unknown_families_are_refused(family: str, experts: dict[str, Any], tmp_path: Path) -> None:
    message = refused(write(tmp_path, {**MIXTRAL, **experts, "model_type": family}))
    for words in ("config.json: model_type is", "Llama's kind", "mixtral", "ModelShape in Python"):
        assert words in message
    assert len(message) < 600 + len(str(tmp_path))


def test_dense_families_have_no_experts(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {**MIXTRAL, "model_type": "llama"}))
    assert "model_type is 'llama'" in message
    assert "qwen3_moe" in message
    message = refused(write(tmp_path, {**GPT_OSS, "num_local_experts": 0}))
    assert "model_type is 'gpt_oss'; it has routed experts" in message


def test_a_dense_config_without_a_model_type(tmp_path: Path) -> None:
    whole = {**MIXTRAL, "num_local_experts": 0, "model_type": None}
    assert [m.name for m in load_model(write(tmp_path, whole)).modules][-1] == "down_proj"
    for key in ("hidden_act", "num_key_value_heads", "intermediate_size"):
        message = refused(write(tmp_path, {k: v for k, v in whole.items() if k != key}))
        assert f"without {key}" in message
        assert "not Llama's kind" in message


@pytest.mark.parametrize("family", [None, "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_known_by_kv_lora_rank(family: str | None, tmp_path: Path) -> None:
    config = {**DEEPSEEK, "hidden_act": "silu", "model_type": family}
    shapes = {
        (8,): {"q_a_proj": (32, 8), "q_b_proj": (8, 24)},
        (None,): {"q_proj": (32, 24)},
        (): {"q_proj": (32, 24)},
    }
    for (*rank,), queries in shapes.items():
        change = {"q_lora_rank": rank[0]} if rank else {}
        values = {k: v for k, v in config.items() if k != "q_lora_rank"} | change
        groups = load_model(write(tmp_path, values)).dense_groups
        expected = queries | {
            "kv_a_proj_with_mqa": (32, 12),
            "kv_b_proj": (8, 32),
            "o_proj": (16, 32),
        }
        assert {m.name: (m.in_features, m.out_features) for g in groups for m in g} == expected
        assert [m.name for m in groups[0]] == [next(iter(queries)), "kv_a_proj_with_mqa"]


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, MIXTRAL)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_model(path).family == "mixtral"


def test_text_config_is_pointed_at(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {"model_type": "llama4", "text_config": MIXTRAL}))
    assert "text_config; save that object" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000, "nested"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "digits"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' appears twice"),
        ("[]", "an object is needed"),
        ("{", "not valid JSON"),
    ],
    ids=range(6),
)
def test_what_is_no_json(text: str, words: str, tmp_path: Path) -> None:
    message = refused(str(write(tmp_path, text)))
    assert words in message
    assert "config.json" in message


@pytest.mark.parametrize("source", [None, [], 5, b"tiny-moe", {}])
def test_what_names_no_model(source: Any) -> None:
    assert "tiny-moe" in refused(source)


@pytest.mark.parametrize("source", ["absent", "x" * 300, "a/" * 5000, "a\0b", "", "README.md/x"])
def test_paths_without_a_config(source: str) -> None:
    assert len(refused(source)) < 700


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in refused(tmp_path)

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", "secret/config.json")

    monkeypatch.setattr(Path, "is_dir", denied)
    monkeypatch.setattr(os, "open", denied)
    assert "Permission denied" in refused("secret/config.json")


def test_a_config_in_the_working_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, MIXTRAL)
    monkeypatch.chdir(tmp_path)
    assert load_model("config.json").name == load_model(".").name == tmp_path.name


COUNTS = [0, -1, 1.0, True, "4", None, 1 << 40]


@pytest.mark.parametrize("value", COUNTS, ids=repr)
def test_counts(value: Any) -> None:
    moe = MoeShape(64, 48, 8, 2)
    for shape, fields in (
        (moe, ("hidden", "intermediate", "experts", "top_k")),
        (ModuleShape("q_proj", 8, 8), ("in_features", "out_features", "experts")),
        (LoraLimits(), ("max_loras", "max_rank")),
        (TINY, ("layers", "hidden")),
    ):
        for field in fields:
            with pytest.raises(ArgumentError, match=field):
                replace(shape, **{field: value})
    with pytest.raises(ArgumentError, match="layers is"):
        TINY.with_layers(value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 9),
        ("activation", "tanh"),
        ("activation", None),
        ("gate_up_layout", "sideways"),
        ("gated", 1),
        ("expert_bias", None),
        ("transposed_experts", "no"),
        ("alpha", "x"),
        ("alpha", float("nan")),
        ("limit", -1.0),
        ("limit", float("inf")),
        ("limit", 10**400),
    ],
)
def test_fields_of_experts(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"MoeShape.{field} is"):
        replace(MoeShape(64, 48, 8, 2), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None),
        ("family", 3),
        ("moe", "experts"),
        ("dense_groups", [()]),
        ("dense_groups", ((),)),
        ("dense_groups", (("q_proj",),)),
        ("dense_groups", ((ModuleShape("q", 8, 8), ModuleShape("k", 9, 8)),)),
    ],
    ids=str,
)
def test_fields_of_models(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError):
        replace(TINY, **{field: value})
    assert isinstance(TINY, ModelShape)
