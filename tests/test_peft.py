"""Reading PEFT directories: scales, forms, and refusals that name what is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import adapter_files as files
import ml_dtypes
import numpy as np
import pytest
from adapter_files import PREFIX, Tensors, linear, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from cupylora.adapters.path_pattern import PatternTable
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.peft_config import read_config
from cupylora.adapters.safetensors_file import read_safetensors
from cupylora.adapters.stacked import swapped_by_release
from cupylora.errors import AdapterFormatError, ArgumentError
from cupylora.shapes import PRESETS, ModelShape, ModuleShape

TOY = files.model()
MODULES = {module.name: module for module in TOY.modules}
Q = "layers.0.self_attn.q_proj"


def q_tensors(rank: int = 4, layer: int = 0, prefix: str = PREFIX, seed: int = 0) -> Tensors:
    path = f"layers.{layer}.self_attn.q_proj"
    return files.dense(rank, MODULES["q_proj"], path, prefix, seed)


def refused(folder: Path, model: ModelShape = TOY) -> str:
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(folder, model)
    return str(caught.value)


# Scales and ranks


def test_scale_is_alpha_over_rank(tmp_path: Path) -> None:
    factors = read_adapter(write(tmp_path, q_tensors()), TOY).factors
    assert {key: f.scale for key, f in factors.items()} == {(0, "q_proj"): 1.5}


def test_rslora_dense_and_experts(tmp_path: Path) -> None:
    """Case 1: K64 N96 r16 alpha16 has factor 4, and the same flag reaches experts."""
    wide = ModelShape("wide", 1, 64, ((ModuleShape("q_proj", 64, 96),),), None)
    tensors = files.dense(16, wide.modules[0], Q)
    folder = write(tmp_path / "dense", tensors, r=16, lora_alpha=16, use_rslora=True)
    assert read_adapter(folder, wide).factors[0, "q_proj"].scale == 4

    toy = files.model(hidden=32, intermediate=16)
    experts = files.expert_factors(toy.moe, 4)
    for form in (files.per_expert(experts, 1), files.stacked(toy.moe, experts, 1)):
        folder = write(tmp_path / "experts", form, use_rslora=True, peft_version="0.21.2")
        scales = {f.scale for f in read_adapter(folder, toy).factors.values()}
        assert scales == {6 / math.sqrt(4)}


def test_rank_and_alpha_patterns_are_looked_up_independently(tmp_path: Path) -> None:
    """Case 2."""
    tensors = q_tensors(4, 0) | q_tensors(4, 1)
    tensors |= files.dense(8, MODULES["v_proj"], "layers.1.self_attn.v_proj")
    patterns = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.1.*q_proj": 64}}
    folder = write(tmp_path, tensors, r=8, lora_alpha=12, **patterns)
    factors = read_adapter(folder, TOY).factors
    assert factors[0, "q_proj"].scale == 3
    assert factors[1, "q_proj"].scale == 16
    assert factors[1, "v_proj"].scale == 1.5


def test_first_matching_pattern_wins(tmp_path: Path) -> None:
    patterns = {r"self_attn\.q_proj": 8, "q_proj": 2}
    folder = write(tmp_path, q_tensors(), alpha_pattern=patterns)
    assert read_adapter(folder, TOY).factors[0, "q_proj"].scale == 2


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_unmatched_pattern_is_named(key: str, tmp_path: Path) -> None:
    message = refused(write(tmp_path, q_tensors(), **{key: {"q_prj": 4}}))
    assert key in message
    assert "'q_prj'" in message


def test_rank_differs_between_layers(tmp_path: Path) -> None:
    """Case 3: each tensor's rank gives its scale, if the config explains it."""
    tensors = q_tensors(8, 0) | q_tensors(32, 1)
    explained = {"r": 8, "lora_alpha": 24, "rank_pattern": {r"layers\.1\..*q_proj": 32}}
    adapter = read_adapter(write(tmp_path, tensors, **explained), TOY)
    assert adapter.ranks == (8, 32)
    assert [f.scale for f in adapter.factors.values()] == [3, 0.75]
    message = refused(write(tmp_path, tensors, **{**explained, "rank_pattern": {}}))
    for words in ("r is 8", "layers.1.self_attn.q_proj", "rank 32", "rank_pattern", "correct r"):
        assert words in message


def test_rank_that_contradicts_the_tensors(tmp_path: Path) -> None:
    """alpha / 16 is not alpha / 4; without r nothing is contradicted."""
    message = refused(write(tmp_path, q_tensors(4), r=16))
    assert "r is 16" in message
    assert "rank 4" in message
    experts = files.expert_factors(TOY.moe, 3)
    for form in (files.per_expert, files.three_dimensional):
        assert "has rank 3" in refused(write(tmp_path, form(experts, 0)))
    stacked = files.stacked(TOY.moe, experts, 0)
    assert "has rank 3" in refused(write(tmp_path, stacked, peft_version="0.21.2"))
    [factors] = read_adapter(write(tmp_path, q_tensors(), r=None), TOY).factors.values()
    assert factors.scale == 1.5


def test_rank_pattern_that_contradicts_the_tensor(tmp_path: Path) -> None:
    message = refused(write(tmp_path, q_tensors(4), rank_pattern={"q_proj": 6}))
    assert "rank 6" in message
    assert "has rank 4" in message
    assert "q_proj" in message


HOSTILE = "((.)*)*(.*)*(.*)*Z"


@pytest.mark.parametrize(
    "key",
    [HOSTILE, "(.|.)" * 40 + "Z", "(((.{9}){9}){9}){9}", ".*" * 2000 + "Z", "(.?)" * 1000 + "Z"],
)
@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern"])
def test_no_pattern_takes_long(setting: str, key: str, tmp_path: Path) -> None:
    start = time.process_time()
    message = refused(write(tmp_path, q_tensors() | q_tensors(layer=1), **{setting: {key: 4}}))
    assert time.process_time() - start < 10
    assert setting in message
    assert key[:20] in message


ATOMS = st.sampled_from(
    ["a", "b", "1", ".", r"\.", r"\w", r"\d", "[ab]", "[^a]", "(a|b1)", "(?:ab)", "^", "$"]
)
PIECES = st.tuples(ATOMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{1,}", "*?"]))
KEY = st.lists(PIECES, min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    key=st.lists(KEY, min_size=1, max_size=3),
    paths=st.lists(st.from_regex(r"[ab1]{1,3}(\.[ab1]{1,3}){0,2}", fullmatch=True), max_size=5),
)
def test_patterns_match_as_peft_matches_them(
    key: list[list[tuple[str, str]]], paths: list[str]
) -> None:
    bare = [[(atom, "" if atom in "^$" else repeat) for atom, repeat in part] for part in key]
    text = "|".join("".join(atom + repeat for atom, repeat in part) for part in bare)
    table = PatternTable()
    table.add(text)
    for path in paths:
        found = table.first((path,)) == 0
        assert found == bool(re.match(rf"(.*\.)?({text})$", path)), path


TEXTS = st.lists(
    st.sampled_from(["a", "b", "1", ".", ".", r"\.", "-", "_", "é", "a*", r"\w", "(?P<n>b)?"]),
    min_size=1,
    max_size=5,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(TEXTS.filter(lambda t: t.count("<n>") < 2), max_size=6, unique=True),
    paths=st.lists(st.from_regex(r"[ab1é_-]{1,3}(\.[ab1-]{1,3}){0,3}", fullmatch=True), max_size=6),
)
def test_the_first_key_of_a_table_is_what_peft_finds(keys: list[str], paths: list[str]) -> None:
    table = PatternTable()
    for key in keys:
        table.add(key)
    pairs = list(zip(paths, reversed(paths), strict=True))
    match = [
        [any(re.match(rf"(.*\.)?({key})$", path) for path in pair) for key in keys]
        for pair in pairs
    ]
    for pair, matching in zip(pairs, match, strict=True):
        assert table.first(pair) == (matching.index(True) if True in matching else None)
    unmatched = [n for n in range(len(keys)) if not any(matching[n] for matching in match)]
    assert table.unmatched() == unmatched


def test_many_modules_and_keys_take_no_time() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        for layer in range(48)
        for expert in range(128)
        for name in ("gate", "up", "down")
    ]
    keys = [name if n % 2 else re.escape(name) for n, name in enumerate(names[::-4])][:4096]
    table = PatternTable()
    start = time.process_time()
    for key in keys:
        table.add(key)
    found = [table.first((name.removeprefix("model."), name)) for name in names]
    assert table.unmatched() == []
    assert time.process_time() - start < 20
    assert found[::-4][:4096] == list(range(4096))
    assert found.count(None) == len(names) - 4096


def test_many_modules_and_expressions_take_no_time() -> None:
    table = PatternTable()
    start = time.process_time()
    for expert in range(128):
        for layers in ("[0-9]", r"\d+", ".*"):
            table.add(rf".*layers\.{layers}\.mlp\.experts\.{expert}\..*")
    for layer in range(48):
        for expert in range(128):
            path = f"model.layers.{layer}.mlp.experts.{expert}.up_proj"
            assert table.first((path,)) == 3 * expert + (layer > 9)
    assert table.unmatched() == []
    assert time.process_time() - start < 20


def test_too_many_expressions_are_refused(tmp_path: Path) -> None:
    patterns = {f"key{i}.*": 4 for i in range(4097)}
    message = refused(write(tmp_path, q_tensors(), rank_pattern=patterns))
    assert "'key4096.*'" in message
    assert "beyond what is read (4096 expressions" in message


def test_long_keys_are_read(tmp_path: Path) -> None:
    key = "|".join(f"layers.{i}.self_attn.q_proj" for i in range(140))
    assert 3500 < len(key) <= 4096
    folder = write(tmp_path, q_tensors(), alpha_pattern={key: 2})
    assert read_adapter(folder, TOY).factors[0, "q_proj"].scale == 0.5


def test_repeated_keys_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, q_tensors())
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 4, "r": 8'))
    assert "'r' appears twice" in refused(folder)


@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.index.json"],
)
def test_a_fifo_is_refused_at_once(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, q_tensors())
    if name.endswith("index.json"):
        (folder / "adapter_model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    message = refused(folder)
    assert name in message
    assert "not a regular file" in message


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"r": ' + "9" * 5000 + "}", "[1]", "", '{"r": 4', "\xff"], ids=len
)
def test_configs_that_are_no_json(text: str, tmp_path: Path) -> None:
    folder = write(tmp_path, q_tensors())
    (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
    message = refused(folder)
    assert "adapter_config.json" in message
    assert len(message) < 500 + len(str(folder))


# Names


@pytest.mark.parametrize("prefix", ["", "model.", "base_model.model.", PREFIX])
def test_prefixes_give_the_same_result(prefix: str, tmp_path: Path) -> None:
    """Case 5."""
    tensors = q_tensors(prefix=prefix)
    pattern = {r"model\.layers\.0\.self_attn\.q_proj": 10}
    factors = read_adapter(write(tmp_path, tensors, alpha_pattern=pattern), TOY).factors
    assert list(factors) == [(0, "q_proj")]
    np.testing.assert_array_equal(factors[0, "q_proj"].a[0], tensors[f"{prefix}{Q}.lora_A.weight"])
    assert factors[0, "q_proj"].scale == 2.5


def test_adapter_name_in_keys(tmp_path: Path) -> None:
    tensors = {k.replace(".weight", ".default.weight"): v for k, v in q_tensors().items()}
    assert list(read_adapter(write(tmp_path, tensors), TOY).factors) == [(0, "q_proj")]


def test_zero_matches_is_an_error(tmp_path: Path) -> None:
    vision = {
        name.replace(PREFIX, "base_model.model.vision_tower.encoder."): tensor
        for name, tensor in q_tensors().items()
    }
    message = refused(write(tmp_path / "a", vision))
    assert "2 of 2 tensors" in message
    assert "vision_tower.encoder.layers.0.self_attn.q_proj.lora_A" in message
    assert "no LoRA tensor" in refused(write(tmp_path / "b", {}))


@pytest.mark.parametrize(
    "path",
    [
        "layers.2.self_attn.q_proj",  # the model has two layers
        "layers.0.self_attn.qkv_proj",
        "layers.0.mlp.gate_proj",  # its MLP has experts only
        "layers.0.mlp.shared_experts.up_proj",
        "layers.0.mlp.experts.4.up_proj",  # it has four
        "layers.0.mlp.experts.base_layer.base_layer",
        "layers.0.mlp.q_proj",
        "layers.00.self_attn.q_proj",
        "layers.\u0660.self_attn.q_proj",
        "layers.0.mlp.experts.03.up_proj",
        "layers.0.mlp.experts.\uff13.up_proj",
    ],
)
def test_what_would_be_lost_is_listed(path: str, tmp_path: Path) -> None:
    lost = linear(path, np.ones((4, 12), np.float32), np.ones((8, 4), np.float32))
    message = refused(write(tmp_path, q_tensors() | lost))
    assert "2 of 4 tensors" in message
    for name in lost:
        assert name in message
    assert f"{Q}.lora_A" not in message


def test_refused_tensors_are_each_named(tmp_path: Path) -> None:
    """Case 4, and every other kind that has no place."""
    one = np.ones((4, 4), np.float32)
    odd = {
        f"{PREFIX}{Q}.lora_magnitude_vector": one[0],
        f"{PREFIX}{Q}.lora_B.bias": one[0],
        f"{PREFIX}{Q}.bias": one[0],
        "base_model.model.lm_head.weight": one,
        "base_model.model.lm_head.lora_A.weight": one,
        f"{PREFIX}embed_tokens.lora_embedding_A": one,
        f"{PREFIX}layers.0.mlp.gate.lora_A.weight": one,
        f"{PREFIX}layers.0.mlp.router.lora_B.weight": one,
    }
    message = refused(write(tmp_path, q_tensors() | odd))
    for name in odd:
        assert name in message
    for word in ("DoRA", "bias", "full weights", "embeddings", "router", "output head"):
        assert word in message


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 2]]},
        {"init_lora_weights": "pissa_niter_4"},
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [5]},
        {"peft_type": "IA3"},
        {"lora_alpha": None},
        {"lora_alpha": True},
        {"lora_alpha": math.inf},
        {"lora_alpha": 1e-46},
        {"use_rslora": "yes"},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": {"q_proj": 2.5}},
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": {"(": 3}},
        {"r": "banana"},
        {"r": 4.5},
        {"r": True},
        {"r": 0},
        {"rank_pattern": {"x" * 4097: 4}},
        {"rank_pattern": {"(x|y)" * 820: 4}},
        {"rank_pattern": {r"(?P<a>q)(?P<a>_)proj": 4}},
        {"rank_pattern": {r"(?P=a)q_proj": 4}},
        {"rank_pattern": {r"\bq_proj": 4}},
        {"rank_pattern": {r"(q)_proj\1": 4}},
        {"rank_pattern": {"(?=q)q_proj": 4}},
        {"rank_pattern": {"(?i)q_proj": 4}},
        {"rank_pattern": {f"key{i}": 4 for i in range(5000)}},
        {"use_rslora": 1},
    ],
    ids=str,
)
def test_refused_settings_are_named(setting: dict[str, Any], tmp_path: Path) -> None:
    [(key, value)] = setting.items()
    message = refused(write(tmp_path, q_tensors(), **setting))
    assert (key in message) or (isinstance(value, dict) and next(iter(value)) in message)


def test_names_in_messages_are_escaped_and_few(tmp_path: Path) -> None:
    one = np.ones((4, 4), np.float32)
    message = refused(write(tmp_path, {f"\x1b[31m{i}\n": one for i in range(30)}))
    assert "30 of 30 tensors" in message
    assert r"'\x1b[31m0\n'" in message
    assert "and 20 more" in message
    assert message.isprintable()
    assert len(refused(write(tmp_path, {"x" * 100_000: one}))) < 1000
    patterns = {f"\x1bkey{i}": 4 for i in range(50)}
    message = refused(write(tmp_path, q_tensors(), alpha_pattern=patterns))
    assert "and 40 more" in message
    assert message.isprintable()


def test_half_a_pair(tmp_path: Path) -> None:
    tensors = q_tensors()
    del tensors[f"{PREFIX}{Q}.lora_B.weight"]
    assert f"{PREFIX}{Q}.lora_A.weight has no lora_B" in refused(write(tmp_path, tensors))


def test_same_place_twice(tmp_path: Path) -> None:
    tensors = q_tensors() | q_tensors(prefix="model.", seed=1)
    message = refused(write(tmp_path, tensors))
    assert "the same place as" in message
    experts = files.expert_factors(TOY.moe, 4)
    both = files.per_expert(experts, 0) | files.stacked(TOY.moe, experts, 0)
    assert "given twice" in refused(write(tmp_path, both, peft_version="0.21.2"))


def test_wrong_shapes_name_both(tmp_path: Path) -> None:
    tensors = linear(Q, np.ones((4, 13), np.float32), np.ones((16, 4), np.float32))
    message = refused(write(tmp_path, tensors))
    assert "[4, 13]" in message
    assert "[r, 12]" in message


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_not_finite_names_the_tensor(dtype: Any, value: float, tmp_path: Path) -> None:
    """Case 10."""
    tensors = {name: tensor.astype(dtype) for name, tensor in q_tensors().items()}
    tensors[f"{PREFIX}{Q}.lora_B.weight"][3, 2] = value
    message = refused(write(tmp_path, tensors))
    assert f"{Q}.lora_B.weight" in message
    assert "[3, 2]" in message
    assert f"{Q}.lora_A" not in message


# Experts


LAYOUTS = ("gate_first", "up_first", "interleaved")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", ["0.17.1", "0.18.1", "0.19.1", "0.21.2", None])
def test_forms_of_experts_agree(layout: str, version: str | None, tmp_path: Path) -> None:
    """Case 6, also square (H = 2I and, for down, H = I is ruled out by the other)."""
    toy = files.model(gate_up_layout=layout, intermediate=6)
    experts = files.expert_factors(toy.moe, 3)
    swapped = version in ("0.17.1", "0.18.1")
    forms = {
        "per_expert": files.per_expert(experts, 1),
        "3d": files.three_dimensional(experts, 1),
        "stacked": files.stacked(toy.moe, experts, 1, swapped=swapped),
    }
    for name, tensors in forms.items():
        config = {"peft_version": version} if version else {}
        factors = read_adapter(write(tmp_path / name, tensors, r=3, **config), toy).factors
        assert list(factors) == [(1, "gate_proj"), (1, "up_proj"), (1, "down_proj")]
        assert factors[1, "gate_proj"].a is factors[1, "up_proj"].a
        for module, expected in experts.items():
            np.testing.assert_array_equal(factors[1, module].a, expected.a, err_msg=name)
            np.testing.assert_array_equal(factors[1, module].b, expected.b, err_msg=name)


def only(tensors: Tensors, inner: bool) -> Tensors:
    """One stacked parameter alone, which peft saves without the nesting."""
    return {
        name.replace(".base_layer", ""): tensor
        for name, tensor in tensors.items()
        if (".base_layer" in name) == inner
    }


@pytest.mark.parametrize("inner", [True, False])
def test_single_stacked_parameter_is_told_by_shape(inner: bool, tmp_path: Path) -> None:
    experts = files.expert_factors(TOY.moe, 3)
    tensors = only(files.stacked(TOY.moe, experts, 0), inner)
    factors = read_adapter(write(tmp_path, tensors, r=3, peft_version="0.21.2"), TOY).factors
    found = [name for _, name in factors]
    assert found == (["gate_proj", "up_proj"] if inner else ["down_proj"])
    for name in found:
        np.testing.assert_array_equal(factors[0, name].b, experts[name].b)


@pytest.mark.parametrize(
    ("version", "rows", "gpt_oss", "llama4"),
    [
        (None, None, False, False),
        ("0.17.1", True, False, False),
        ("0.18.1", True, False, False),
        ("0.19.0", True, None, False),
        ("0.19.1", False, None, True),
        ("0.21.2", False, None, True),
        ("1.0", False, None, True),
        ("0.18.2.dev0@main", None, None, None),
        ("0.19.1.dev0", None, None, None),
        ("0.22.0.dev0", False, None, True),
        ("banana", None, False, False),
    ],
)
def test_axis_order_by_release(
    version: str | None,
    rows: bool | None,
    gpt_oss: bool | None,
    llama4: bool | None,
    tmp_path: Path,
) -> None:
    """As in ``ParamWrapper.update_layer`` of each release; None: not to be known."""
    folder = write(tmp_path, q_tensors(), peft_version=version)
    release = read_config(folder / "adapter_config.json").release
    assert swapped_by_release(release, False, "mixtral") is rows
    assert swapped_by_release(release, True, "gpt_oss") is gpt_oss
    assert swapped_by_release(release, True, "llama4_text") is llama4


def test_axes_that_the_config_states(tmp_path: Path) -> None:
    """They decide what nothing else does, and contradict no shape."""
    square = files.model(hidden=12, intermediate=6)
    experts = files.expert_factors(square.moe, 3)
    for axes, swapped in (("in_out", False), ("out_in", True)):
        tensors = only(files.stacked(square.moe, experts, 0, swapped=swapped), inner=True)
        folder = write(tmp_path, tensors, r=3, cupylora_expert_axes=axes)
        factors = read_adapter(folder, square).factors
        np.testing.assert_array_equal(factors[0, "up_proj"].a, experts["up_proj"].a)
    told = files.stacked(TOY.moe, files.expert_factors(TOY.moe, 3), 0)
    assert "disagree" in refused(write(tmp_path, told, r=3, cupylora_expert_axes="out_in"))
    message = refused(write(tmp_path, q_tensors(), cupylora_expert_axes="rows"))
    assert "cupylora_expert_axes is 'rows'; one of in_out, out_in" in message


@pytest.mark.parametrize(
    ("version", "transposed", "swapped"),
    [("0.18.1", False, True), ("0.19.1", False, False), ("0.18.1", True, False)],
)
def test_square_parameter_by_version_then_flag(
    version: str, transposed: bool, swapped: bool, tmp_path: Path
) -> None:
    square = files.model(hidden=12, intermediate=6, transposed_experts=transposed)
    experts = files.expert_factors(square.moe, 3)
    tensors = only(files.stacked(square.moe, experts, 0, swapped=swapped), inner=True)
    factors = read_adapter(write(tmp_path, tensors, r=3, peft_version=version), square).factors
    for name in ("gate_proj", "up_proj"):
        np.testing.assert_array_equal(factors[0, name].a, experts[name].a)
        np.testing.assert_array_equal(factors[0, name].b, experts[name].b)


def test_square_parameter_that_nothing_tells(tmp_path: Path) -> None:
    square = files.model(hidden=12, intermediate=6)
    experts = files.expert_factors(square.moe, 3)
    tensors = only(files.stacked(square.moe, experts, 0), inner=True)
    assert "peft_version" in refused(write(tmp_path, tensors), square)


def test_stacked_tensors_that_disagree(tmp_path: Path) -> None:
    experts = files.expert_factors(TOY.moe, 3)
    tensors = files.stacked(TOY.moe, experts, 0) | files.stacked(TOY.moe, experts, 1, swapped=True)
    assert "disagree" in refused(write(tmp_path, tensors, peft_version="0.21.2"))


def test_ungated_parameters_by_nesting_or_config(tmp_path: Path) -> None:
    """Without a gate both parameters have the same two widths; shapes cannot tell them apart."""
    plain = files.model(gated=False)
    experts = files.expert_factors(plain.moe, 3)
    up, down = experts["up_proj"], experts["down_proj"]
    columns = {
        name: f.b.transpose(1, 2, 0).reshape(f.b.shape[1], -1) for name, f in experts.items()
    }
    tensors = linear(
        "layers.0.mlp.experts.base_layer", up.a.reshape(-1, 12), columns["up_proj"]
    ) | linear("layers.0.mlp.experts", down.a.reshape(-1, 10), columns["down_proj"])
    factors = read_adapter(write(tmp_path, tensors, r=3, peft_version="0.21.2"), plain).factors
    for name, expected in experts.items():
        np.testing.assert_array_equal(factors[0, name].a, expected.a)
        np.testing.assert_array_equal(factors[0, name].b, expected.b)
    alone = only(tensors, inner=False)
    config = {"r": 3, "peft_version": "0.21.2", "target_parameters": ["mlp.experts.down_proj"]}
    assert list(read_adapter(write(tmp_path, alone, **config), plain).factors) == [(0, "down_proj")]
    del config["target_parameters"]
    assert "target_parameters" in refused(write(tmp_path, alone, **config), plain)


def test_missing_experts_are_zero(tmp_path: Path) -> None:
    """Case 7."""
    toy = files.model(experts=8)
    experts = files.expert_factors(toy.moe, 4)
    tensors = files.per_expert(experts, 0, only=(0, 3))
    factors = read_adapter(write(tmp_path, tensors), toy).factors
    for name, expected in experts.items():
        found = factors[0, name]
        assert found.a.shape == expected.a.shape
        for expert in range(8):
            present = expert in (0, 3)
            np.testing.assert_array_equal(found.a[expert], expected.a[expert] * present)
            np.testing.assert_array_equal(found.b[expert], expected.b[expert] * present)


def test_experts_of_different_rank_and_scale(tmp_path: Path) -> None:
    """Ranks are padded with zeros; scales differ by a power of two, so the delta is exact."""
    small, large = files.expert_factors(TOY.moe, 2), files.expert_factors(TOY.moe, 4, seed=1)
    tensors = files.per_expert(small, 0, only=(0, 1)) | files.per_expert(large, 0, only=(2, 3))
    patterns = {r"experts\.[01]\.\w+": 2}
    factors = read_adapter(write(tmp_path, tensors, rank_pattern=patterns), TOY).factors
    for name in small:
        found = factors[0, name]
        assert found.rank == 4
        for expert, (source, scale) in enumerate([(small, 3)] * 2 + [(large, 1.5)] * 2):
            expected = scale * source[name].b[expert] @ source[name].a[expert]
            got = found.scale * found.b[expert] @ found.a[expert]
            np.testing.assert_array_equal(got, expected)


def test_an_expert_of_scale_zero(tmp_path: Path) -> None:
    experts = files.expert_factors(TOY.moe, 4)
    tensors = files.per_expert(experts, 0)
    pattern = {r"experts\.0\.\w+": 0}
    factors = read_adapter(write(tmp_path, tensors, alpha_pattern=pattern), TOY).factors
    for name, expected in experts.items():
        assert factors[0, name].scale == 1.5
        assert not factors[0, name].b[0].any()
        np.testing.assert_array_equal(factors[0, name].b[1], expected.b[1])


def test_alphas_of_experts_far_apart(tmp_path: Path) -> None:
    """In float16 the expert of alpha 8 would be zero beside one of 8e6; B is float32 then."""
    experts = files.expert_factors(TOY.moe, 4)
    tensors = {
        name: (tensor / 64).astype(np.float16)
        for name, tensor in files.per_expert(experts, 0).items()
    }
    folder = write(tmp_path, tensors, lora_alpha=8, alpha_pattern={r"experts\.0\.\w+": 8e6})
    for (_, name), found in read_adapter(folder, TOY).factors.items():
        for expert, scale in enumerate([2e6, 2, 2, 2]):
            expected = scale * (experts[name].b[expert] / 64).astype(np.float64)
            got = found.scale * found.b[expert].astype(np.float64)
            np.testing.assert_allclose(got, expected, rtol=2e-7)
    folder = write(tmp_path, tensors, lora_alpha=1e-38, alpha_pattern={r"experts\.0\.\w+": 8e6})
    message = refused(folder)
    assert "too far apart" in message
    assert "lora_B" in message


def test_factors_shared_over_experts(tmp_path: Path) -> None:
    """Case 8: A (1, 4, 32), B (8, 48, 4)."""
    tiny = files.model(hidden=32, intermediate=48, experts=8)
    rng = np.random.default_rng(3)
    a, b = files.random(rng, 1, 4, 32), files.random(rng, 8, 48, 4)
    tensors = linear("layers.0.mlp.experts.up_proj", a, b)
    factors = read_adapter(write(tmp_path, tensors), tiny).factors[0, "up_proj"]
    assert (factors.a.shape, factors.b.shape) == ((1, 4, 32), (8, 48, 4))
    bad = linear("layers.0.mlp.experts.up_proj", np.repeat(a, 3, 0), b)
    assert "[8 or 1, r, 32]" in refused(write(tmp_path, bad), tiny)


def test_fused_three_dimensional_gate_up(tmp_path: Path) -> None:
    toy = files.model(gate_up_layout="interleaved")
    experts = files.expert_factors(toy.moe, 4)
    fused = files.fused_b(toy.moe, experts)
    tensors = linear("layers.1.mlp.experts.gate_up_proj", experts["gate_proj"].a, fused)
    factors = read_adapter(write(tmp_path, tensors), toy).factors
    for name in ("gate_proj", "up_proj"):
        np.testing.assert_array_equal(factors[1, name].b, experts[name].b)


def test_mixtral_and_latent_attention_names(tmp_path: Path) -> None:
    mixtral = {
        name.replace("mlp", "block_sparse_moe")
        .replace("gate_proj", "w1")
        .replace("up_proj", "w3")
        .replace("down_proj", "w2"): tensor
        for name, tensor in files.per_expert(files.expert_factors(TOY.moe, 4), 0).items()
    }
    found = read_adapter(write(tmp_path, mixtral), TOY).factors
    expected = files.expert_factors(TOY.moe, 4)
    for name in expected:
        np.testing.assert_array_equal(found[0, name].b, expected[name].b)

    deepseek = PRESETS["deepseek-v3"]
    tensors: Tensors = {}
    attention = [m for group in deepseek.dense_groups for m in group if m.layers is None]
    for module in attention:
        tensors |= files.dense(1, module, f"layers.60.self_attn.{module.name}")
    names = [name for _, name in read_adapter(write(tmp_path, tensors, r=1), deepseek).factors]
    assert names == [module.name for module in attention]


# Files


def test_pickles_and_missing_files(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "absent")
    assert "adapter_config.json" in refused(tmp_path)
    folder = write(tmp_path, q_tensors())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "pickle" in refused(folder)
    (folder / "adapter_model.bin").unlink()
    assert "adapter_model.safetensors" in refused(folder)


def shards(folder: Path) -> Path:
    tensors = q_tensors() | q_tensors(layer=1)
    write(folder, {})
    (folder / "adapter_model.safetensors").unlink()
    places = {}
    for number, layer in enumerate((0, 1)):
        shard = f"adapter_model-0000{number + 1}-of-00002.safetensors"
        part = {name: t for name, t in tensors.items() if f"layers.{layer}." in name}
        save_file(part, folder / shard)
        places |= dict.fromkeys(part, shard)
    index = folder / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return folder


def test_shards(tmp_path: Path) -> None:
    factors = read_adapter(shards(tmp_path), TOY).factors
    assert list(factors) == [(0, "q_proj"), (1, "q_proj")]


def test_incomplete_shards(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    index = folder / "adapter_model.safetensors.index.json"
    second = folder / "adapter_model-00002-of-00002.safetensors"
    places = json.loads(index.read_text())["weight_map"]
    kept = second.read_bytes()
    second.unlink()
    assert f"{second.name} is missing" in refused(folder)
    second.write_bytes(kept)
    dropped = next(name for name in places if "layers.1." in name)
    fewer = {name: place for name, place in places.items() if name != dropped}
    index.write_text(json.dumps({"weight_map": fewer}))
    assert dropped in refused(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(places, "../elsewhere.safetensors")}))
    assert "not a file name" in refused(folder)
    index.write_text("[]")
    assert "index" in refused(folder)


@pytest.mark.parametrize("shard", ["x" * 300, "a\0b", "..", ".", 5, None, "no\x1b.safetensors"])
def test_odd_names_of_shards(shard: Any, tmp_path: Path) -> None:
    folder = shards(tmp_path)
    index = folder / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(q_tensors(), shard)}))
    message = refused(folder)
    assert message.isprintable()
    assert "shard" in message or "not a regular file" in message


def test_huge_files_cost_no_memory(tmp_path: Path) -> None:
    """A hole in a file takes no room on disk, but would in memory."""
    folder = write(tmp_path, q_tensors())
    path = folder / "adapter_model.safetensors"
    with path.open("r+b") as file:
        file.truncate(1 << 43)
    tracemalloc.start()
    try:
        assert "belong to none" in refused(folder)
        name = f"{PREFIX}{Q}.lora_A.weight"
        big, end = 1 << 42, (1 << 42) + 64
        header = {name: entry(0, big, [1 << 20, 1 << 20])}
        header |= {name.replace("lora_A", "lora_B"): entry(big, end, [16, 1])}
        path.write_bytes(raw(header))
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + end)
        message = refused(folder)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert name in message
    assert "larger than any factor" in message


@pytest.mark.parametrize(
    ("path", "words"),
    [("x" * 300, "too long"), ("x/" * 5000, "too long"), ("a\0b", "no such directory")],
    ids=["name", "path", "nul"],
)
def test_paths_that_cannot_be(path: str, words: str) -> None:
    message = refused(Path(path))
    assert words in message
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.parametrize("path", [None, 5, [], b"bytes"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(ArgumentError, match="path is"):
        read_adapter(path, TOY)


def test_ranks_beyond_the_largest(tmp_path: Path) -> None:
    assert "at most 512" in refused(write(tmp_path, q_tensors(513), r=513))


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_FILES = {
    "8-byte length": b"1234567",
    "header should be": raw({}, length=2**63),
    "not valid JSON": raw(b'{"a": '),
    "key 'a' appears twice": raw(b'{"a": {}, "a": {}}'),
    "object is needed": raw([]),
    "whole numbers": raw({"a": entry(0, 4, [-1])}),
    "65 dimensions": raw({"a": entry(0, 4, [1] * 65)}, bytes(4)),
    "convert it": raw({"a": entry(0, 16, [2], "F64")}, bytes(16)),
    "needs 8 bytes": raw({"a": entry(0, 4, [2])}, bytes(4)),
    "cut short": raw({"a": entry(0, 8, [2])}, bytes(7)),
    "overlaps": raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
    "gap": raw({"a": entry(0, 8, [2]), "b": entry(12, 16, [1])}, bytes(16)),
    "belong to none": raw({"a": entry(0, 8, [2])}, bytes(9)),
}


@pytest.mark.parametrize("words", BAD_FILES)
def test_malformed_files(words: str, tmp_path: Path) -> None:
    """Case 9."""
    folder = write(tmp_path, q_tensors())
    (folder / "adapter_model.safetensors").write_bytes(BAD_FILES[words])
    message = refused(folder)
    assert words in message
    assert "adapter_model.safetensors" in message


GOOD = save(q_tensors())


@pytest.mark.parametrize("size", [0, 7, len(GOOD) * 6 // 10, len(GOOD) - 1])
def test_truncated_files(size: int, tmp_path: Path) -> None:
    folder = write(tmp_path, q_tensors())
    (folder / "adapter_model.safetensors").write_bytes(GOOD[:size])
    refused(folder)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(GOOD) - 1), with_=st.binary(max_size=3), drop=st.integers(0, 3))
def test_corruption_is_refused_or_harmless(
    at: int, with_: bytes, drop: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever happens to the bytes: a complete, finite adapter, or AdapterFormatError."""
    folder = write(tmp_path_factory.getbasetemp() / "corrupt", q_tensors())
    (folder / "adapter_model.safetensors").write_bytes(GOOD[:at] + with_ + GOOD[at + drop :])
    try:
        [factors] = read_adapter(folder, TOY).factors.values()
    except AdapterFormatError:
        return
    assert factors.rank == 4
    assert np.isfinite(factors.a).all()
    assert np.isfinite(factors.b).all()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
KEYS = ("peft_type", "bias", "use_dora", "lora_alpha", "use_rslora", "rank_pattern")
KEYS += ("alpha_pattern", "target_parameters", "peft_version", "init_lora_weights")


@settings(max_examples=100, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=2))
def test_strange_configs_are_refused_or_harmless(
    changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write(tmp_path_factory.getbasetemp() / "strange", q_tensors(), **changes)
    try:
        [factors] = read_adapter(folder, TOY).factors.values()
    except AdapterFormatError:
        return
    assert np.isfinite(np.float32(factors.scale))


def test_unaligned_data_is_read_as_the_safetensors_library_does(tmp_path: Path) -> None:
    """A header of odd length puts the data at an odd address."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = tmp_path / "odd.safetensors"
    header = json.dumps({"a": entry(0, 24, [2, 3])}).encode()
    path.write_bytes(raw(header + b" " * (len(header) % 2 == 0), values.tobytes()))
    read = read_safetensors(path)["a"]
    assert read.flags.aligned
    np.testing.assert_array_equal(read, values)
    np.testing.assert_array_equal(read, load_file(path)["a"])
