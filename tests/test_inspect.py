"""``inspect_adapter`` and ``cupylora inspect``: what they show is what a load does."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapter_files as files
import ml_dtypes
import numpy as np
import pytest
from adapter_files import PREFIX, Tensors, linear, write
from click.testing import CliRunner, Result
from fixtures_util import ALL, FIXTURES, UNDECIDED, load_fixture
from safetensors.numpy import save

from cupylora import inspect_adapter
from cupylora.adapters import path_pattern
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import adapter_bytes
from cupylora.cli import main
from cupylora.errors import AdapterFormatError, ArgumentError
from cupylora.resources import data_dir
from cupylora.shapes import ModelShape

TOY = files.model()
MOE = TOY.moe
Q = "layers.0.self_attn.q_proj"
NAME = f"{PREFIX}{Q}.lora_A.weight"
REFUSED = sorted(path for path in (data_dir() / "refused").iterdir() if path.is_dir())
ONE = np.ones((1, 1), np.float16)


def q_tensors(rank: int = 4, layer: int = 0) -> Tensors:
    return files.dense(rank, TOY.modules[0], f"layers.{layer}.self_attn.q_proj")


def problems(folder: Path, model: ModelShape | None = TOY, **options: Any) -> list[str]:
    found = inspect_adapter(folder, model, **options)
    assert found.accepted == (not found.problems)
    return [problem.text for problem in found.problems]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)], env={"COLUMNS": "140"})


# What is applied


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_shown_is_what_a_load_does(name: str, dtype: str) -> None:
    fixture = load_fixture(name)
    adapter = read_adapter(fixture.path, fixture.model.shape)
    found = inspect_adapter(fixture.path, fixture.model.shape, dtype=dtype)
    assert found.problems == []
    assert found.values_read
    assert found.device_nbytes == adapter_bytes(adapter, 2 if dtype == "bfloat16" else 4)
    shown = {
        (layer, row.module): (row.rank, max(row.scales, key=abs))
        for row in found.applied
        for layer in row.layers
    }
    assert shown == {key: (f.rank, f.scale) for key, f in adapter.factors.items()}
    unread = inspect_adapter(fixture.path, fixture.model.shape, values=False)
    assert (unread.accepted, unread.values_read) == (True, False)


def test_a_repeated_a_is_counted_once(tmp_path: Path) -> None:
    """As a slot keeps it, in whatever form it is repeated; without its values nobody knows."""
    factors = files.expert_factors(MOE, 4)
    for form in (files.per_expert(factors, 0), files.three_dimensional(factors, 0)):
        folder = write(tmp_path / str(len(form)), form)
        found = inspect_adapter(folder, TOY)
        assert found.device_nbytes == adapter_bytes(read_adapter(folder, TOY), 2)
        assert inspect_adapter(folder, TOY, values=False).device_nbytes > found.device_nbytes


def test_experts_that_are_there(tmp_path: Path) -> None:
    tensors = files.per_expert(files.expert_factors(MOE, 4), 0, only=(0, 3))
    tensors |= files.per_expert(files.expert_factors(MOE, 4), 1)
    found = inspect_adapter(write(tmp_path, tensors), TOY)
    assert {row.experts for row in found.applied} == {(2, 4)}
    assert {row.of_experts for row in found.applied} == {4}
    assert {row.layers for row in found.applied} == {(0, 1)}


def test_without_a_model_all_is_listed_by_pattern(tmp_path: Path) -> None:
    tensors = q_tensors() | q_tensors(layer=1) | files.stacked(MOE, files.expert_factors(MOE, 4), 0)
    other = {"vision_tower.layers.7.conv.weight": np.ones((2, 3), np.float32)}
    pattern = {"alpha_pattern": {"layers.1.*q_proj": 12}, "peft_version": "0.21.2"}
    folder = write(tmp_path, tensors | other, base_model_name_or_path="org/base", **pattern)
    found = inspect_adapter(folder)
    assert (found.base_model, found.peft, found.tensors) == ("org/base", "0.21.2", 9)
    assert found.applied == ()
    assert found.device_nbytes is None
    rows = {row.name: row for row in found.held}
    q = rows["model.layers.*.self_attn.q_proj"]
    assert (q.count, q.shapes, q.scales) == (2, {"A": (4, 12), "B": (16, 4)}, (1.5, 3))
    assert rows["model.layers.*.mlp.experts.base_layer"].shapes["A"] == (16, 12)
    odd = rows["vision_tower.layers.*.conv.weight"]
    assert (odd.shapes, odd.why_not) == ({"tensor": (2, 3)}, "full weights (modules_to_save)")
    assert [problem.text[:12] for problem in found.problems] == ["1 of 9 tenso"]


def test_without_a_model_what_no_model_would_take_is_found(tmp_path: Path) -> None:
    odd = linear(Q, np.ones((4, 12), np.float32), np.ones((16, 3), np.float32))
    for name, tensors, config, words in (
        ("halves", odd, {}, "are not [r, in] and [out, r]"),
        ("flat", linear(Q, *(np.ones(4, np.float32),) * 2), {}, "are not [r, in] and [out, r]"),
        ("rank", q_tensors(), {"r": 8}, "r is 8"),
        ("pattern", q_tensors(), {"alpha_pattern": {"q_prj": 2}}, "matches alpha_pattern key"),
    ):
        [text] = problems(write(tmp_path / name, tensors, **config), None)
        assert words in text
    stacked = files.stacked(MOE, files.expert_factors(MOE, 4), 0) | q_tensors()
    pattern = {"alpha_pattern": {"experts.gate_up_proj": 2}}
    assert problems(write(tmp_path / "stacked", stacked, **pattern), None) == []


@pytest.mark.parametrize("name", ALL)
def test_without_a_model_every_fixture_is_fine(name: str) -> None:
    assert problems(load_fixture(name).path, None) == []


@pytest.mark.parametrize("folder", [*(load_fixture(name).path for name in ALL), *REFUSED])
def test_eighty_columns_break_no_name(folder: Path) -> None:
    text = CliRunner().invoke(main, ["inspect", str(folder)], env={"COLUMNS": "80"}).stdout
    table = [line for line in text.splitlines() if line[:1] in {"┃", "│"}]
    assert table
    assert max(map(len, table)) <= 80
    columns = zip(*(re.split("[┃│]", line)[1:-1] for line in table), strict=True)
    parts = {part for cell in next(columns)[1:] for part in re.findall(r"[^.]+", cell.strip())}
    names = {part for row in inspect_adapter(folder).held for part in row.name.split(".")}
    assert parts == names, "folded at dots alone"


def test_kohyas_file(tmp_path: Path) -> None:
    tensors = files.kohya_named(q_tensors()) | {f"{PREFIX}{Q}.alpha": np.asarray(np.float32(2))}
    file = tmp_path / "style.safetensors"
    file.write_bytes(save(tensors))
    found = inspect_adapter(file, TOY)
    assert [(row.module, row.scales) for row in found.applied] == [("q_proj", (0.5,))]
    [row] = found.held
    assert row.shapes == {"A": (4, 12), "B": (16, 4), "alpha": ()}
    assert problems(file, None) == []
    file.write_bytes(save(q_tensors()))
    [text] = problems(file, None)
    assert "scale stands in an adapter_config.json, which is not there" in text


# What is wrong


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    tensors = q_tensors() | q_tensors(rank=8, layer=1)
    tensors[f"{PREFIX}lm_head.lora_A.weight"] = np.ones((4, 4), np.float32)
    tensors |= {f"{PREFIX}layers.0.self_attn.k_proj.lora_A.weight": np.ones((4, 12), np.float32)}
    v = f"{PREFIX}layers.0.self_attn.v_proj"
    tensors |= files.dense(4, TOY.modules[2], "layers.0.self_attn.v_proj")
    tensors[f"{v}.lora_B.weight"][3, 2] = np.nan
    folder = write(tmp_path, tensors)
    for model in (TOY, None):
        told = "\n".join(problems(folder, model))
        for words in (
            "lm_head.lora_A.weight (LoRA on the output head)",
            "k_proj.lora_A.weight has no lora_B beside it",
            "layers.1.self_attn.q_proj.lora_A.weight, but its tensor has rank 8",
            "v_proj.lora_B.weight holds 1 values that are not finite",
        ):
            assert words in told
    assert [row.module for row in inspect_adapter(folder, TOY).applied] == ["q_proj", "v_proj"]


def test_a_refused_config_does_not_hide_the_tensors(tmp_path: Path) -> None:
    tensors = q_tensors() | {f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(16, np.float32)}
    found = inspect_adapter(write(tmp_path, tensors, use_dora=True, bias="all"), TOY)
    first, second = (problem.text for problem in found.problems)
    assert "use_dora" in first
    assert "bias" in first
    assert "DoRA is not supported" in second
    assert [row.count for row in found.held] == [1, 1]
    assert found.applied == ()


def test_problems_of_a_kind_are_counted(tmp_path: Path) -> None:
    """So that a file of very many tensors does not make as many messages."""
    experts = files.per_expert(files.expert_factors(MOE, 3), 0)
    [*kinds] = inspect_adapter(write(tmp_path / "few", experts), TOY).problems
    assert len(kinds) == 3
    many = files.model(experts=256, intermediate=2, hidden=2)
    halves = {
        f"layers.0.mlp.experts.{e}.up_proj.lora_A.weight": np.ones((4, 2), np.float32)
        for e in range(256)
    }
    [problem] = inspect_adapter(write(tmp_path / "many", halves), many).problems
    assert problem.count == 256
    names = {
        f"layers.0.self_attn.{a}{b}_proj.lora_A": np.ones((4, 2), np.float32)
        for a in "abcdefghijklmnopqrst"
        for b in "abcdefghijklmno"
    }
    found = inspect_adapter(write(tmp_path / "names", names))
    assert len(found.problems) == 201
    assert (found.problems[-1].text[:16], found.problems[-1].count) == ("further problems", 100)


def test_limits_of_the_runtime(tmp_path: Path) -> None:
    folder = write(tmp_path, q_tensors() | q_tensors(8, 1), rank_pattern={"layers.1.*q_proj": 8})
    [text] = problems(folder, max_rank=7)
    assert "rank 8; at most 7" in text
    found = inspect_adapter(folder, TOY, max_bytes=100)
    assert "at most 100 B are taken" in found.problems[0].text
    assert not found.values_read
    for wrong in ({"max_rank": 0}, {"max_bytes": -1}, {"dtype": "int8"}):
        with pytest.raises(ArgumentError):
            inspect_adapter(folder, TOY, **wrong)
    with pytest.raises(ArgumentError):
        inspect_adapter(folder, "tiny-moe")  # type: ignore[arg-type]


def test_values_beyond_the_type_of_the_device(tmp_path: Path) -> None:
    """A file's own type may reach further; a large alpha of one expert may too."""
    tensors = q_tensors()
    tensors[NAME][1, 2] = 70_000
    folder = write(tmp_path / "wide", tensors)
    [text] = problems(folder, dtype="float16")
    assert f"{NAME} holds a value beyond float16" in text
    assert problems(folder, dtype="bfloat16") == []
    assert problems(folder, dtype="float16", values=False) == []
    experts = files.per_expert(files.expert_factors(MOE, 4), 0)
    far = {"lora_alpha": 1e-38, "alpha_pattern": {r"experts\.0\.\w+": 8e6}}
    told = problems(write(tmp_path / "far", experts, **far))
    assert told
    assert all("too far apart for float32" in text for text in told)
    with pytest.raises(AdapterFormatError, match="too far apart"):
        read_adapter(tmp_path / "far", TOY)


def test_infinities_are_found_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupylora.adapters.value_check._PIECE", 7)
    tensors = {name: t.astype(ml_dtypes.bfloat16) for name, t in q_tensors().items()}
    tensors[NAME][2, 5] = np.inf
    tensors[NAME][3, 11] = np.nan
    folder = write(tmp_path, tensors)
    [text] = problems(folder)
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(folder, TOY)
    assert text in str(caught.value)
    assert "holds 2 values that are not finite, the first (inf) at [2, 5]" in text


# What is worth knowing


def notes(folder: Path) -> str:
    found = inspect_adapter(folder, TOY)
    assert found.accepted
    return "\n".join(found.notes)


def test_notes(tmp_path: Path) -> None:
    assert notes(write(tmp_path / "plain", q_tensors())) == ""
    empty = {NAME.replace("q_proj", "k_proj"): np.zeros((0, 4), np.float32)}
    assert "1 tensor of size 0 count as absent" in notes(write(tmp_path / "a", q_tensors() | empty))
    stacked = files.stacked(MOE, files.expert_factors(MOE, 4), 0)
    base = {"base_model_name_or_path": "unsloth/Qwen3-30B-A3B", "peft_version": "0.21.2"}
    assert "lora_B_layout" in notes(write(tmp_path / "b", stacked, **base))
    marked = write(tmp_path / "c", stacked, **base, lora_B_layout="rank_major")
    assert notes(marked) == ""
    assert notes(write(tmp_path / "d", q_tensors(), **base)) == ""


def test_links_that_lead_out_are_noted(tmp_path: Path) -> None:
    target = write(tmp_path / "elsewhere", q_tensors())
    folder = write(tmp_path / "upload", q_tensors())
    inside = folder / "inside.safetensors"
    weights = folder / "adapter_model.safetensors"
    weights.rename(inside)
    weights.symlink_to(inside.name)
    assert notes(folder) == ""
    weights.unlink()
    weights.symlink_to(target / weights.name)
    assert "adapter_model.safetensors is a link that leads out" in notes(folder)


# The command


def test_the_command_on_a_good_adapter() -> None:
    fixture = load_fixture("mixed-ranks")
    result = run(fixture.path, "--model", "tiny-moe")
    assert result.exit_code == 0, result.output
    for words in ("model.layers.*.self_attn.q_proj", "gate_proj", "8 of 8", "1.75", "ACCEPTED"):
        assert words in result.stdout
    result = run(fixture.path)
    assert result.exit_code == 0, result.output
    assert "nothing wrong was found; --model checks it whole" in result.stdout
    assert "(its values were not read)" in run(fixture.path, "--no-values").stdout


def test_the_command_on_a_bad_adapter() -> None:
    name = next(iter(UNDECIDED))
    fixture = load_fixture(name)
    result = run(fixture.path, "--model", fixture.path.parents[1] / "models" / "gpt-oss")
    assert result.exit_code == 1
    assert "cupylora_expert_axes" in result.stdout
    assert "REFUSED: 1 problem" in result.stdout
    assert run(load_fixture("mixed-ranks").path, "--model", "mixtral-8x7b").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/dir",), "no such directory"),
        ((".", "--model", "nope"), "neither a preset"),
        ((".", "--dtype", "int8"), "--dtype"),
        ((".", "--max-rank", "513"), "--max-rank"),
        ((".", "--json", "/no/such/dir/x.json"), "--json"),
        ((), "Missing argument"),
    ],
)
def test_wrong_usage_is_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "holds neither adapter_model.safetensors nor" in " ".join(result.stdout.split())


@pytest.mark.parametrize("where", ["-", "file"])
def test_the_record(where: str, tmp_path: Path) -> None:
    fixture = load_fixture("olmoe-stacked-021")
    file = tmp_path / "record.json" if where == "file" else Path("-")
    model = fixture.path.parents[1] / "models" / "olmoe"
    result = run(fixture.path, "--model", model, "--json", file)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text() if where == "file" else result.stdout)
    assert ("ACCEPTED" in result.stdout) == (where == "file")
    assert (record["accepted"], record["problems"], record["peft"]) == (True, [], "0.21.2")
    adapter = read_adapter(fixture.path, fixture.model.shape)
    assert record["device_bytes"] == adapter_bytes(adapter, 2)
    assert {row["module"] for row in record["applied"]} == {name for _, name in adapter.factors}
    assert sum(row["bytes"] for row in record["applied"]) == record["device_bytes"]
    assert sum(row["count"] * len(row["shapes"]) for row in record["held"]) == record["tensors"]
    refused = run(fixture.path, "--model", "tiny-moe", "--json", "-")
    assert refused.exit_code == 1
    assert not json.loads(refused.stdout)["accepted"]
    assert all(set(p) == {"text", "count"} for p in json.loads(refused.stdout)["problems"])


def test_nothing_of_a_file_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    """Escape codes, markup of rich, and names without end."""
    one = np.ones((4, 4), np.float32)
    evil = ["\x1b]0;gone\x07", "[bold red]x[/]", "[/nothing]", "\r\n\t", "x" * 5000, "\u202egnp"]
    tensors = {f"{name}.weight": one for name in evil} | q_tensors()
    settings = {"base_model_name_or_path": "\x1b[2Jbase[/]", "peft_version": "0.21.2\x1b[0m"}
    folder = write(tmp_path / "up\x1bload[/]", tensors, **settings)
    for model in ([], ["--model", "tiny-moe"]):
        result = run(folder, *model)
        assert result.exit_code == 1, result.exception
        text = result.stdout.replace("\n", "")
        assert text.isprintable()
        assert len(text) < 40_000
        assert "[boldred]x[/].weight" in text.replace(" ", "")
    assert run(folder, "--json", "-").stdout.isascii()


def test_help_is_for_those_who_see_it_first() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for words in ("DIR", "--model", "--json", "no GPU", "Exit code 0"):
        assert words in result.stdout


def test_an_inspection_leaves_no_file_open(tmp_path: Path) -> None:
    folder = write(tmp_path, q_tensors())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        inspect_adapter(folder, TOY)
        inspect_adapter(write(tmp_path / "bad", {}), TOY)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Time and memory that hostile files may take


def test_what_is_refused_is_not_read_however_large_it_claims_to_be(tmp_path: Path) -> None:
    """4 GB of holes take no room on disk, and would take long to read."""
    rows = 1 << 25
    spans = {"A": [rows, 64], "B": [64, rows]}
    at, header = 0, {}
    for factor, shape in spans.items():
        size = 2 * shape[0] * shape[1]
        header[f"{PREFIX}layers.0.self_attn.q_proj.lora_{factor}.weight"] = {
            "dtype": "F16",
            "shape": shape,
            "data_offsets": [at, at + size],
        }
        at += size
    folder = write(tmp_path / "a", {})
    file = folder / "adapter_model.safetensors"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, file.stat().st_size + at)
    start = time.process_time()
    found = inspect_adapter(folder, TOY)
    assert time.process_time() - start < 10
    assert not found.values_read
    assert "larger than any factor" in found.problems[0].text


def test_expressions_that_take_long_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_pattern, "_MOST_WORK", 1 << 20)
    tensors: Tensors = {}
    for layer in range(300):
        tensors |= files.dense(4, TOY.modules[0], f"layers.{layer}.self_attn.q_proj")
    keys = [
        f".*[a-z0-9]*[{i % 10}-9].*{i % 7}.*[a-m{i % 9}]*.*{i // 7 % 10}{i // 70 % 10}?.*"
        for i in range(4000)
    ]
    folder = write(tmp_path / "a", tensors, alpha_pattern=dict.fromkeys(keys, 4))
    start = time.process_time()
    found = inspect_adapter(folder)
    assert time.process_time() - start < 20
    assert "take too long to match" in found.problems[0].text
    with pytest.raises(AdapterFormatError, match="take too long to match"):
        read_adapter(folder, replace(TOY, layers=300))


def test_after_thousands_of_problems_no_more_are_looked_for(tmp_path: Path) -> None:
    tensors = {f"{PREFIX}layers.{i}.self_attn.q_proj.lora_A.weight": ONE for i in range(6000)}
    found = inspect_adapter(write(tmp_path / "a", tensors))
    assert sum(problem.count for problem in found.problems) == 5001
    assert "more is wrong with it than is worth telling" in found.problems[-1].text


def test_an_index_of_more_shards_or_names_than_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {})
    (folder / "adapter_model.safetensors").unlink()
    index = folder / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{i}": f"s{i}" for i in range(257)}}))
    assert "names 257 shards; at most 256 are read" in inspect_adapter(folder).problems[0].text
    names = ",".join(f'"{i}":"a"' for i in range(400_001))
    index.write_text('{"weight_map":{' + names + "}}")
    assert "at most 400000 are read" in inspect_adapter(folder).problems[0].text


def test_links_that_lead_out_can_be_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", q_tensors())
    assert inspect_adapter(folder, TOY, links=False).accepted
    weights = folder / "adapter_model.safetensors"
    outside = weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(outside)
    assert inspect_adapter(folder, TOY).accepted
    found = inspect_adapter(folder, TOY, links=False)
    assert "links that lead out of the directory" in found.problems[0].text
    weights.unlink()
    weights.symlink_to("/etc/passwd")  # nothing of what it says is told
    result = CliRunner().invoke(main, ["inspect", str(folder), "--no-links"])
    assert result.exit_code == 1
    assert "its header should be" not in result.output


def test_names_are_not_made_emoji(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {f"{PREFIX}layers.0.x:bomb:y.lora_A.weight": ONE})
    output = CliRunner().invoke(main, ["inspect", str(folder)]).output
    assert ":bomb:" in output
