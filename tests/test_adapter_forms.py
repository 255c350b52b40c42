"""Forms and names of adapters that other tools than peft write; mixed types; tensors of size 0.

``test_peft`` has what peft's config and files say; ``test_fixtures`` what peft itself computes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapter_files as files
import ml_dtypes
import numpy as np
import pytest
from adapter_files import PREFIX, Tensors, linear, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from cupylora.adapters import names
from cupylora.adapters.device_factors import FactorArrays
from cupylora.adapters.factors import Adapter, LoraFactors
from cupylora.adapters.names import Place, place
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import Arena, SlotTable
from cupylora.errors import AdapterFormatError
from cupylora.shapes import LoraLimits, ModelShape, ModuleShape

TOY = files.model()
MOE = files.model().moe
Q = "layers.0.self_attn.q_proj"
Q_SHAPE = TOY.modules[0]


def refused(path: Path, model: ModelShape = TOY) -> str:
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(path, model)
    return str(caught.value)


# Kohya's names


def kohya(path: str, a: Any, b: Any, alpha: Any = None) -> Tensors:
    tensors = {f"{path}.lora_down.weight": a, f"{path}.lora_up.weight": b}
    return tensors if alpha is None else {**tensors, f"{path}.alpha": np.asarray(alpha)}


def factors(rank: int = 4, seed: int = 0) -> tuple[Any, Any]:
    tensors = files.dense(rank, Q_SHAPE, Q, seed=seed)
    return tensors[f"{PREFIX}{Q}.lora_A.weight"], tensors[f"{PREFIX}{Q}.lora_B.weight"]


def save_as(path: Path, tensors: Tensors) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save({name: np.asarray(t, order="C") for name, t in tensors.items()}))
    return path


@pytest.mark.parametrize(
    "path",
    [
        "lora_te_model_layers_0_self_attn_q_proj",
        "lora_te1_layers_0_self_attn_q_proj",
        "lora_te2_model_language_model_layers_0_self_attn_q_proj",
        "model.layers.0.self_attn.q_proj",
        f"{PREFIX}{Q}",
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_kohya_names_with_their_own_alpha(
    path: str, dtype: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """A file of any name, without a config: scale is its alpha over its rank."""
    a, b = factors()
    alpha = np.full(shape, 6, dtype)
    file = save_as(tmp_path / "style.safetensors", kohya(path, a, b, alpha))
    adapter = read_adapter(file, TOY)
    assert adapter.name == "style"
    [(key, found)] = adapter.factors.items()
    assert (key, found.scale) == ((0, "q_proj"), 1.5)
    np.testing.assert_array_equal(found.a[0], a)
    np.testing.assert_array_equal(found.b[0], b)
    folder = tmp_path / "folder"
    save_as(folder / "adapter_model.safetensors", kohya(path, a, b, alpha))
    assert read_adapter(folder, TOY).factors.keys() == adapter.factors.keys()


def test_kohya_experts(tmp_path: Path) -> None:
    expected = files.expert_factors(MOE, 4)
    tensors: Tensors = {}
    for module, f in expected.items():
        for expert in range(MOE.experts):
            path = f"lora_te_model_layers_1_mlp_experts_{expert}_{module}"
            tensors |= kohya(path, f.a[expert], f.b[expert], np.float32(6))
    found = read_adapter(save_as(tmp_path / "a.safetensors", tensors), TOY).factors
    assert {key: f.scale for key, f in found.items()} == {(1, name): 1.5 for name in expected}
    for name, f in expected.items():
        np.testing.assert_array_equal(found[1, name].a, f.a)
        np.testing.assert_array_equal(found[1, name].b, f.b)


def test_kohya_alphas_differ_by_module(tmp_path: Path) -> None:
    tensors = kohya("model.layers.0.self_attn.q_proj", *factors(4), np.float32(2))
    tensors |= kohya("model.layers.1.self_attn.q_proj", *factors(2), np.float32(2))
    found = read_adapter(save_as(tmp_path / "a.safetensors", tensors), TOY).factors
    assert [f.scale for f in found.values()] == [0.5, 1]


def test_kohya_files_without_any_alpha_have_scale_one(tmp_path: Path) -> None:
    """As ``create_network_from_weights`` of Kohya's networks/lora.py reads them."""
    file = save_as(tmp_path / "a.safetensors", kohya(Q, *factors()))
    assert read_adapter(file, TOY).factors[0, "q_proj"].scale == 1


def test_kohya_alphas_that_say_nothing_clear(tmp_path: Path) -> None:
    a, b = factors()
    two = kohya(Q, a, b, np.float32(2)) | kohya("layers.1.self_attn.q_proj", a, b)
    message = refused(save_as(tmp_path / "some.safetensors", two))
    assert "1 of 2 modules have no alpha" in message
    assert "layers.1.self_attn.q_proj.lora_down.weight" in message
    for alpha in (0.0, math.nan, math.inf):
        file = save_as(tmp_path / "x.safetensors", kohya(Q, a, b, np.float32(alpha)))
        assert f"the alpha beside {Q}.lora_down.weight is {alpha}" in refused(file)
    alone = save_as(tmp_path / "alone.safetensors", {f"{Q}.alpha": np.asarray(np.float32(1))})
    assert "has no lora_A beside it" in refused(alone)
    wide = save_as(tmp_path / "w.safetensors", kohya(Q, a, b, np.ones(4, np.float32)))
    assert "an alpha of shape [4], not one number" in refused(wide)


def test_an_alpha_beside_a_config_must_be_its_own(tmp_path: Path) -> None:
    a, b = factors()
    folder = write(tmp_path / "same", kohya(Q, a, b, np.float32(6)), use_rslora=True)
    assert read_adapter(folder, TOY).factors[0, "q_proj"].scale == 3
    message = refused(write(tmp_path / "other", kohya(Q, a, b, np.float32(5))))
    assert "alpha is 6.0 here, but 5.0 beside" in message
    named = write(tmp_path / "named", kohya(Q, a, b, np.float32(5)), alpha_pattern={"q_proj": 5})
    assert read_adapter(named, TOY).factors[0, "q_proj"].scale == 1.25


def test_names_of_peft_need_their_config(tmp_path: Path) -> None:
    file = save_as(tmp_path / "a.safetensors", linear(Q, *factors()))
    assert "adapter_config.json" in refused(file)
    mixed = kohya(Q, *factors(), 4.0) | linear("layers.1.self_attn.q_proj", *factors())
    assert "adapter_config.json" in refused(save_as(tmp_path / "b.safetensors", mixed))
    assert "no such directory" in refused(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("dora_scale", "DoRA"),
        ("lora_mid.weight", "variant of LoRA"),
        ("hada_w1_a", "variant of LoRA"),
        ("lokr_w1", "variant of LoRA"),
        ("lora_up.bias", "bias of a LoRA factor"),
    ],
)
def test_kohyas_other_kinds_are_named(end: str, words: str, tmp_path: Path) -> None:
    name = f"lora_te_model_layers_0_self_attn_q_proj.{end}"
    tensors = kohya(name.rpartition(f".{end}")[0], *factors(), np.float32(4))
    message = refused(save_as(tmp_path / "a.safetensors", {**tensors, name: np.ones(4, "f4")}))
    assert f"{name} (" in message
    assert words in message


# Names that say what they are, though it cannot be applied


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("layers.0.mlp.gate", "router"),
        ("layers.0.mlp.router", "router"),
        ("layers.0.block_sparse_moe.gate", "router"),
        ("layers.0.feed_forward.router", "router"),
        ("layers.0.mlp.shared_expert_gate", "shared expert's gate"),
        ("embed_tokens", "embeddings"),
    ],
)
def test_what_is_refused_by_name(path: str, words: str, tmp_path: Path) -> None:
    message = refused(write(tmp_path, linear(path, *factors()) | linear(Q, *factors())))
    assert "2 of 4 tensors" in message
    assert f"{PREFIX}{path}.lora_A.weight (LoRA on " in message
    assert words in message


# MLPs beside the experts


def beside(name: str) -> ModelShape:
    """Layer 0 has an MLP, layer 1 experts and a shared one."""
    widths = {"gate_proj": (12, 20), "up_proj": (12, 20), "down_proj": (20, 12)}
    groups = tuple(
        tuple(ModuleShape(f"{prefix}_{n}", *widths[n], layers=layers) for n in names)
        for prefix, layers in (("shared", (1,)), ("dense", (0,)))
        for names in (("gate_proj", "up_proj"), ("down_proj",))
    )
    return replace(TOY, name=name, dense_groups=TOY.dense_groups + groups, dense_layers=(0,))


@pytest.mark.parametrize(
    "path",
    [
        "layers.1.mlp.shared_expert",
        "layers.1.mlp.shared_experts",
        "layers.1.feed_forward.shared_expert",
        "layers.0.mlp",
        "layers.0.feed_forward",
    ],
)
@pytest.mark.parametrize("named_as_kohya", [False, True])
def test_mlps_beside_the_experts(path: str, named_as_kohya: bool, tmp_path: Path) -> None:
    model, layer = beside("mixed"), int(path[7])
    prefix = "shared" if "shared" in path else "dense"
    tensors: Tensors = {}
    expected = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = model.modules[model.module_index(f"{prefix}_{name}")]
        made = files.dense(4, shape, f"{path}.{name}", seed=len(expected))
        expected[layer, f"{prefix}_{name}"] = list(made.values())
        tensors |= made
    if named_as_kohya:
        flat = {n.removeprefix(PREFIX): t for n, t in tensors.items()}
        named = {}
        for name, tensor in flat.items():
            module, _, factor = name.partition(".lora_")
            end = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}[factor]
            named[f"lora_te_model_{module.replace('.', '_')}.{end}"] = tensor
        folder = save_as(tmp_path / "a.safetensors", named)
    else:
        folder = write(tmp_path / "a", tensors)
    found = read_adapter(folder, model).factors
    assert found.keys() == expected.keys()
    for key, (a, b) in expected.items():
        np.testing.assert_array_equal(found[key].a[0], a)
        np.testing.assert_array_equal(found[key].b[0], b)
    assert "no module of model toy" in refused(folder, TOY)


@pytest.mark.parametrize(
    "path",
    [
        "layers.0.mlp.shared_expert.up_proj",
        "layers.1.mlp.up_proj",
        "layers.0.mlp.experts.1.up_proj",
        "layers.0.mlp.experts.up_proj",
    ],
)
def test_modules_that_a_layer_lacks(path: str, tmp_path: Path) -> None:
    message = refused(write(tmp_path, linear(path, *factors())), beside("mixed"))
    assert "no module of layer" in message


@pytest.mark.parametrize("name", ["shared_up_proj", "dense_up_proj", "up_proj"])
def test_an_attention_has_no_mlp(name: str, tmp_path: Path) -> None:
    """Names of the model's own that no file has."""
    tensors = linear(f"layers.1.self_attn.{name}", *factors())
    assert "no module that is known" in refused(write(tmp_path, tensors), beside("mixed"))


def test_factors_for_layers_that_lack_the_module() -> None:
    model = beside("mixed")
    table = SlotTable(model, LoraLimits(2, 8), "float32", arena=Arena(1 << 16))
    a, b = np.ones((1, 2, 12), np.float32), np.ones((1, 20, 2), np.float32)
    for key in ((0, "shared_up_proj"), (1, "dense_up_proj")):
        with pytest.raises(AdapterFormatError, match="in other layers only"):
            table.store_arrays("x", {key: FactorArrays(a, b, 1.0)})
        with pytest.raises(AdapterFormatError, match="in other layers only"):
            table.store(Adapter("x", {key: LoraFactors(a, b, 1.0)}))
    table.store_arrays("x", {(1, "shared_up_proj"): FactorArrays(a, b, 1.0)})


# Experts


def test_experts_in_lists_by_parameter(tmp_path: Path) -> None:
    """GPT-OSS as Unsloth loads it in four bits: one linear layer has an expert's gate and up."""
    toy = files.model(gate_up_layout="interleaved", transposed_experts=True)
    expected = files.expert_factors(MOE, 4)
    tensors = files.in_lists(toy.moe, expected, 0, only=(0, 2, 3))
    found = read_adapter(write(tmp_path, tensors), toy).factors
    assert found[0, "gate_proj"].a is found[0, "up_proj"].a
    present = np.array([1, 0, 1, 1])[:, None, None]
    for name, f in expected.items():
        np.testing.assert_array_equal(found[0, name].a, f.a * present)
        np.testing.assert_array_equal(found[0, name].b, f.b * present)
        assert found[0, name].scale == 1.5


def test_llama4_names(tmp_path: Path) -> None:
    expected = files.expert_factors(MOE, 3)
    tensors = {
        name.replace("mlp", "feed_forward"): t
        for name, t in files.stacked(MOE, expected, 1, swapped=True).items()
    }
    toy = replace(files.model(transposed_experts=True), family="llama4_text")
    found = read_adapter(write(tmp_path, tensors, r=3, peft_version="0.21.2"), toy).factors
    for name, f in expected.items():
        np.testing.assert_array_equal(found[1, name].b, f.b)
    dense = ModelShape("llama", 1, 12, ((ModuleShape("up_proj", 12, 16),),), None)
    path = "layers.0.feed_forward.up_proj"
    tensors = files.dense(4, dense.modules[0], path)
    assert list(read_adapter(write(tmp_path / "dense", tensors), dense).factors) == [(0, "up_proj")]


PACKINGS = ({"lora_B_layout": "rank_major"}, {"lora_B_layout": "grouped_by_expert"})


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("config", PACKINGS, ids=lambda c: c["lora_B_layout"])
def test_unsloths_packing_of_b(config: dict[str, str], swapped: bool, tmp_path: Path) -> None:
    """Marked ``grouped_by_expert``, column e·r + j of B is expert e's, where peft has j·E + e."""
    expected = files.expert_factors(MOE, 3)
    tensors = files.stacked(MOE, expected, 0, swapped=swapped)
    if config["lora_B_layout"] == "grouped_by_expert":
        tensors = files.packed_by_expert(tensors, MOE.experts)
    version = "0.18.1" if swapped else "0.21.2"
    folder = write(tmp_path, tensors, r=3, peft_version=version, **config)
    found = read_adapter(folder, TOY).factors
    for name, f in expected.items():
        np.testing.assert_array_equal(found[0, name].a, f.a)
        np.testing.assert_array_equal(found[0, name].b, f.b)


def test_packings_that_are_not_known(tmp_path: Path) -> None:
    tensors = files.stacked(MOE, files.expert_factors(MOE, 3), 0)
    message = refused(write(tmp_path, tensors, r=3, lora_B_layout="mixed"))
    assert "lora_B_layout is 'mixed'; one of rank_major, grouped_by_expert" in message
    detail = {"parameters": {"down_proj": {"lora_B_layout": "rank_major"}}}
    config = {**PACKINGS[1], "unsloth_fused_expert_lora": detail}
    message = refused(write(tmp_path, tensors, r=3, **config))
    assert "says 'rank_major' of 'down_proj', but lora_B_layout is 'grouped_by_expert'" in message


# Types and sizes


TYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    types=st.lists(st.sampled_from(TYPES), min_size=32, max_size=32),
    runtime=st.sampled_from(TYPES),
)
def test_mixed_types_round_once(
    seed: int,
    types: list[np.dtype[Any]],
    runtime: np.dtype[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each tensor of a type of its own: a slot holds each value of the file rounded once."""
    rng = np.random.default_rng(seed)
    tensors = files.dense(4, Q_SHAPE, Q) | files.per_expert(files.expert_factors(MOE, 4), 0)
    tensors = {
        name: rng.standard_normal(t.shape).astype(dtype)
        for (name, t), dtype in zip(tensors.items(), types, strict=False)
    }
    folder = write(tmp_path_factory.getbasetemp() / "mixed", tensors)
    adapter = read_adapter(folder, TOY)
    table = SlotTable(TOY, LoraLimits(1, 8), runtime, arena=Arena(1 << 20))
    table.load(0, adapter)
    for (layer, module), found in adapter.factors.items():
        for factor, letter in ((found.a, "A"), (found.b, "B")):
            for expert, values in enumerate(factor):
                part = f"mlp.experts.{expert}.{module}" if len(factor) > 1 else "self_attn.q_proj"
                source = tensors[f"{PREFIX}layers.{layer}.{part}.lora_{letter}.weight"]
                np.testing.assert_array_equal(values.astype(runtime), source.astype(runtime))


def test_tensors_of_size_zero_are_absent(tmp_path: Path) -> None:
    """DeepSpeed saves them for parameters that live on other devices."""
    empty = np.zeros((0,), np.float32)
    absent = linear("layers.1.self_attn.q_proj", empty, np.zeros((16, 0), np.float32))
    folder = write(tmp_path, linear(Q, *factors()) | absent)
    assert list(read_adapter(folder, TOY).factors) == [(0, "q_proj")]
    half = linear("layers.1.self_attn.q_proj", empty, factors()[1])
    assert "has no lora_A beside it" in refused(write(tmp_path, linear(Q, *factors()) | half))
    message = refused(write(tmp_path, absent))
    assert "holds no LoRA tensor (2 tensors of size 0)" in message
    assert "gathered from all devices" in message


def test_a_number_that_is_no_factor(tmp_path: Path) -> None:
    whole = {f"{PREFIX}{Q}.lora_A.weight": np.asarray(np.int64(3))}
    folder = write(tmp_path, {})
    save_file(whole, folder / "adapter_model.safetensors")
    assert "a factor of dtype int64" in refused(folder)


# The table of names


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="layers.0123_mlpexpertsgate_projbaselora_ABwight\n\x1b", max_size=80))
def test_any_name_has_a_place_or_a_reason(name: str) -> None:
    assert isinstance(place(name), Place | str)


@pytest.mark.parametrize("piece", ["layers.0.", "mlp.", "lora_A.", "a", "_", "..", "model."])
def test_no_name_takes_long(piece: str) -> None:
    """The expressions stay linear enough: names are cut at 512 characters."""
    names = [piece * (512 // len(piece)) + end for end in ("", "x", ".lora_A.weight", ".alpha")]
    for name in names:
        for _ in range(20):
            place(name[:512])


NUMBERS = st.sampled_from(["0", "3", "12", "007", "999999", "1234567", "\u0663"])
WORDS = st.sampled_from(
    [
        "base_model",
        "model",
        "layers",
        "mlp",
        "experts",
        "self_attn",
        "q_proj",
        "q_0_proj",
        "gate_proj",
        "w1",
        "lora_A",
        "lora_B",
        "weight",
        "default",
        "base_layer",
        "shared_expert",
        "feed_forward",
        "lora_te1",
        "lora_te",
        "alpha",
        "bias",
    ]
)
ENDS = st.sampled_from(["lora_A.weight", "lora_B", "lora_down.weight", "alpha", "lora_A.bias"])


@settings(max_examples=1500, deadline=None)
@given(
    st.one_of(
        st.builds(
            "{}.layers.{}.mlp.experts.{}.{}.{}".format,
            st.sampled_from(["base_model.model.model", "model", "vision.3"]),
            NUMBERS,
            NUMBERS,
            WORDS | NUMBERS,
            ENDS,
        ),
        st.builds("layers.{}.mlp.experts.{}_projs.{}.{}".format, NUMBERS, WORDS, NUMBERS, ENDS),
        st.builds("layers.{}.self_attn.{}.{}".format, NUMBERS, WORDS | NUMBERS, ENDS),
        st.builds("layers.{}.mlp.experts.{}".format, NUMBERS, ENDS),
        st.builds(
            "lora_te1_model_layers_{}_mlp_experts_{}_{}.{}".format, NUMBERS, NUMBERS, WORDS, ENDS
        ),
        st.lists(WORDS | NUMBERS, min_size=2, max_size=9).map(".".join),
        st.lists(WORDS | NUMBERS, min_size=2, max_size=9).map("_".join),
    )
)
def test_names_of_one_form_are_placed_as_each_by_itself(name: str) -> None:
    found, alone = place(name), names._look_up(name)
    assert (type(found), found) == (type(alone), alone)
