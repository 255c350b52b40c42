"""``cupylora run`` as a user calls it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS
from click.testing import CliRunner, Result
from fixtures_util import DATA

import cupylora
from cupylora.adapters.factors import synthetic_adapter
from cupylora.adapters.slots import adapter_bytes
from cupylora.backend import NumpyBackend
from cupylora.cli import _check as check_module
from cupylora.cli import _measure, _report, _room, _setup, main
from cupylora.cli._setup import RunOptions, prepare_run
from cupylora.dtypes import resolve_dtype
from cupylora.errors import CapacityError
from cupylora.ops import lora_delta
from cupylora.shapes import PRESETS

GPT_OSS = ("--model", str(DATA / "models" / "gpt-oss"))


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)], prog_name="cupylora")


def record(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    path = tmp_path / "run.json"
    result = run("--json", path, "--steps", 2, *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def one_line(result: Result) -> str:
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return str(lines[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_options(backend: str) -> None:
    start = time.perf_counter()
    result = run("--backend", backend)
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - start < 10
    for text in ("contracts-r8", "legal-stacked-r6", "support-rslora-r4", "(no adapter)", "PASS"):
        assert text in result.output
    for stage in ("route", "dense deltas", "MoE first delta", "down base", "finalize"):
        assert stage in result.output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_record(tmp_path: Path, backend: str, dtype: str) -> None:
    found = record(tmp_path, "--backend", backend, "--dtype", dtype, "--tokens", 40)
    assert found["passed"] is True
    assert found["model"]["name"] == "tiny-moe"
    assert found["model"]["dtype"] == dtype
    assert [a["ranks"] for a in found["adapters"]] == [[8], [6], [4]]
    assert [a["scales"] for a in found["adapters"]] == [[1.5], [1.666667], [1.5]]
    assert [r["tokens"] for r in found["rows"]] == [10, 10, 10, 10]
    assert [r["rows"] for r in found["rows"]] == [20, 20, 20, 20]
    assert all(0 < s["min_seconds"] <= s["median_seconds"] for s in found["stages"])
    assert len(found["stages"]) == 8
    assert all(0 <= c["error"] <= c["bound"] for c in found["check"])
    assert (
        found["memory"]["base_weights"]
        == 2 * 8 * 3 * 48 * 64 * np.dtype("f4" if dtype == "float32" else "f2").itemsize
    )
    on_device = backend == "cuda"
    assert (found["memory"]["beyond_weights"] is not None) == on_device
    assert (found["copy_bytes_per_second"] is not None) == on_device


def test_options(tmp_path: Path) -> None:
    arguments = ("--synthetic-adapters", 3, "--rank", "4,11", "--layers", 1, "--base-share", 0)
    found = record(tmp_path, *GPT_OSS, *arguments, "--max-loras", 5, "--seed", 7, "--tokens", 9)
    assert [a["ranks"] for a in found["adapters"]] == [[4], [11], [4]]
    assert found["model"]["layers"] == 1
    assert found["model"]["max_loras"] == 5
    assert [r["tokens"] for r in found["rows"]] == [0, 3, 3, 3]
    assert found["model"]["moe"]["gate_up_layout"] == "interleaved"
    assert {c["layer"] for c in found["check"]} == {0}


def test_named_adapters(tmp_path: Path) -> None:
    demo = DATA / "demo"
    found = record(
        tmp_path,
        *("--adapter", f"one={demo / 'contracts-r8'}"),
        *("--adapter", f"two={demo / 'support-rslora-r4'}"),
        *("--layers", 1),
    )
    assert [a["name"] for a in found["adapters"]] == ["one", "two"]
    assert [a["source"] for a in found["adapters"]] == [
        str(demo / "contracts-r8"),
        str(demo / "support-rslora-r4"),
    ]


def test_adapters_are_called_by_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = shutil.copytree(DATA / "demo" / "support-rslora-r4", tmp_path / "a=b")
    monkeypatch.chdir(DATA / "demo" / "legal-stacked-r6")
    paths = (f"{DATA / 'demo' / 'contracts-r8'}/", odd, ".")
    options = [text for path in paths for text in ("--adapter", path)]
    found = record(tmp_path, *options, "--layers", 1)
    assert [a["name"] for a in found["adapters"]] == ["contracts-r8", "a=b", "legal-stacked-r6"]


def test_no_adapters_at_all(tmp_path: Path) -> None:
    found = record(tmp_path, "--synthetic-adapters", 0)
    assert found["adapters"] == []
    assert [r["tokens"] for r in found["rows"]] == [128]
    assert found["passed"] is True


def test_lora_only(tmp_path: Path) -> None:
    found = record(tmp_path, "--lora-only")
    assert found["memory"]["base_weights"] == 0
    assert found["passed"] is True


def test_no_check(tmp_path: Path) -> None:
    found = record(tmp_path, "--no-check")
    assert found["passed"] is None
    assert found["check"] is None
    assert "not checked" in run("--no-check", "--steps", 1).output


def test_same_seed_same_output() -> None:
    def output(seed: int) -> bytes:
        setup = prepare_run(RunOptions(backend="numpy", seed=seed), lambda _: None)
        return setup.stack.step(setup.batch).tobytes()

    assert output(1) == output(1)
    assert output(1) != output(2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--adapter", "x=/no/such/dir"), ["/no/such/dir", "no such directory"]),
        (("--adapter", "no-directory"), ["no-directory", "no such directory"]),
        (("--adapter", "=some/where"), ["--adapter '=some/where'", "NAME=DIR"]),
        (("--adapter", "name="), ["--adapter 'name='", "NAME=DIR"]),
        (("--adapter", f"x={DATA}"), ["adapter_config.json"]),
        (
            (*GPT_OSS, "--adapter", f"x={DATA / 'demo' / 'contracts-r8'}"),
            [
                "contracts-r8",
                "model gpt-oss has 2 layers of q_proj 32→32",
                "config.json",
                "experts.4",
            ],
        ),
        (("--adapter", "x=a", "--adapter", "x=b"), ["--adapter a", "'x' is given twice"]),
        (("--adapter", "a/x", "--adapter", "b/x/"), ["'x' is given twice", "NAME=DIR"]),
        (("--model", "no-such-model"), ["no-such-model", "tiny-moe"]),
        (("--layers", 3), ["--layers is 3", "has 2"]),
        (("--layers", 0), ["'--layers': 0 is not in the range", "cupylora run --help"]),
        (("--layers", 1.5), ["'--layers': '1.5' is not a valid integer"]),
        (("--tokens", 0), ["'--tokens': 0 is not in the range"]),
        (("--tokens", "many"), ["'--tokens': 'many' is not a valid integer"]),
        (("--tokens", 10**12), ["'--tokens'", "range"]),
        (("--tokens",), ["'--tokens' requires an argument", "cupylora run --help"]),
        (("--steps", 0), ["'--steps': 0 is not in the range"]),
        (("--steps", "1e3"), ["'--steps': '1e3' is not a valid integer"]),
        (("--seed", -1), ["'--seed': -1 is not in the range"]),
        (("--base-share", 2), ["'--base-share': 2.0 is not in the range"]),
        (("--base-share", "nan"), ["base_share is nan"]),
        (("--dtype", "int8"), ["'--dtype'", "bfloat16"]),
        (("--nonsense",), ["--nonsense"]),
        (("--rank", "8,0"), ["--rank '8,0'", "1 to 512"]),
        (("--rank", "513"), ["--rank '513'", "1 to 512"]),
        (("--rank", "8,,16"), ["--rank '8,,16'", "1 to 512"]),
        (("--rank", "8.5"), ["--rank '8.5'", "1 to 512"]),
        (("--max-loras", 2), ["3 adapters", "--max-loras 2"]),
        (("--max-loras", 4, "--synthetic-adapters", 5), ["5 adapters", "--max-loras 4"]),
        (
            ("--synthetic-adapters", 4096, "--adapter", "x=/no/such/dir"),
            ["4097 adapters", "the 4096 slots"],
        ),
        (("--synthetic-adapters", 5000), ["'--synthetic-adapters': 5000 is not in the range"]),
        (("--max-loras", 4097), ["'--max-loras': 4097 is not in the range"]),
        (("--synthetic-adapters", 4097), ["'--synthetic-adapters': 4097 is not in the range"]),
        (("--json", "/no/such/folder/x.json"), ["/no/such/folder"]),
        (("--json", ""), ["'--json': a path is needed, and it is empty"]),
        (("--trace", ""), ["'--trace': a path is needed, and it is empty"]),
        (("--trace", "/no/such/file"), ["/no/such/file: cannot be read: No such file"]),
        (("--trace", "/"), ["--trace /: cannot be read: Is a directory"]),
        (("--adapter", __file__), ["no directory and no .safetensors file"]),
        (("--rank", "8"), ["--rank 8 is for random adapters", "--synthetic-adapters"]),
        (("--rank", "8", "--synthetic-adapters", 0), ["--rank 8 is for random adapters"]),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[Any, ...], words: list[str]) -> None:
    result = run("--backend", "numpy", *arguments)
    line = one_line(result)
    assert line.startswith("cupylora: ")
    assert all(word in line for word in words), line
    assert result.stdout == ""


def test_model_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is made, with both sizes and what to do."""
    monkeypatch.setattr(_setup, "synthetic_adapter", None)
    start = time.perf_counter()
    line = one_line(run("--backend", "numpy", "--model", "deepseek-v3"))
    assert time.perf_counter() - start < 2
    assert "need 1375463276544 bytes (1281.0 GiB)" in line
    assert "are available" in line
    assert "--lora-only" in line


def test_adapters_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupylora.backend.NumpyBackend.free_bytes", lambda self: 10_000)
    line = one_line(run("--backend", "numpy", "--lora-only"))
    assert "3 adapters need" in line
    assert "10000 bytes" in line


@pytest.mark.parametrize("free", [1 << 30, 1 << 36])
def test_synthetic_adapters_beyond_memory(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory the host's copies do not fit, with more the arena: before any is made."""
    monkeypatch.setattr(_setup, "synthetic_adapter", None)
    monkeypatch.setattr("cupylora.backend.NumpyBackend.free_bytes", lambda self: free)
    arguments = ("--model", "deepseek-v3", "--lora-only", "--rank", 512)
    line = one_line(run("--backend", "numpy", *arguments, "--synthetic-adapters", 16))
    assert re.search(r"16 adapters need \d{13} bytes \(\d+\.\d GiB\), but", line), line
    assert f"{free} bytes" in line
    assert "smaller ranks" in line


def test_host_and_device_room_are_asked_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device only the blocks are its own; the host holds what they are made from."""

    class Device(NumpyBackend):
        name: Any = "cuda"

        def free_bytes(self) -> int:
            return free["device"]

    model, free = PRESETS["qwen3-30b-a3b"].with_layers(1), {"device": 1 << 40, "host": 1 << 40}
    monkeypatch.setattr("cupylora.backend.NumpyBackend.free_bytes", lambda self: free["host"])
    host = 2 * _room.synthetic_host_bytes(model, 32, 2)
    arena = 2 * _room.synthetic_arena_bytes(model, 32, 2)

    def ask(**changed: int) -> None:
        free.update({"device": arena + 5, "host": host} | changed)
        _room.require_adapter_room(Device(), model, [], [32, 32], 2, 5)

    ask()
    with pytest.raises(CapacityError, match=rf"2 adapters in host memory need {host} bytes"):
        ask(host=host - 1)
    with pytest.raises(
        CapacityError, match=rf"need {arena + 5} bytes.* cuda backend; use --lora-only"
    ):
        ask(device=arena + 4)


@pytest.mark.parametrize("name", ["tiny-moe", "gpt-oss-20b", "dense"])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_room_that_synthetic_adapters_take(name: str, dtype: str, itemsize: int) -> None:
    """What is asked for beforehand, against what is there afterwards."""
    model = PRESETS["tiny-moe" if name == "dense" else name].with_layers(1)
    if name == "dense":
        model = replace(model, moe=None)
    adapter = synthetic_adapter(model, 3, dtype=resolve_dtype(dtype))
    blocks = {}
    for factors in adapter.factors.values():
        for array in (factors.a, factors.b):
            while isinstance(array.base, np.ndarray):
                array = array.base
            blocks[id(array)] = array.nbytes
    told = _room.synthetic_host_bytes(model, 3, itemsize)
    assert told / 2 < sum(blocks.values()) <= told
    assert _room.synthetic_arena_bytes(model, 3, itemsize) == adapter_bytes(adapter, itemsize)


def test_only_files_that_are_read_count(tmp_path: Path) -> None:
    for name, size in (("adapter_model", 5), ("optimizer", 70), ("s-1", 11), ("s-2", 13)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    assert _room.file_bytes(str(tmp_path)) == 5
    (tmp_path / "adapter_model.safetensors").unlink()
    index = tmp_path / "adapter_model.safetensors.index.json"
    names = {"a": "s-1.safetensors", "b": "s-2.safetensors", "c": "s-1.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    assert _room.file_bytes(str(tmp_path)) == 24
    for broken in ('{"weight_map": [1]}', "{", '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        assert _room.file_bytes(str(tmp_path)) == 0


def test_control_characters_are_escaped_in_tables(tmp_path: Path) -> None:
    folder = tmp_path / "bold\x1b[1m"
    folder.mkdir()
    (folder / "config.json").write_text((DATA / "models/tiny-moe/config.json").read_text())
    adapter = f"red\x1b[31m={DATA / 'demo' / 'contracts-r8'}"
    result = run("--model", folder, "--adapter", adapter, "--backend", "numpy", "--steps", 1)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert r"'red\x1b[31m'" in result.output
    assert r"'bold\x1b[1m'" in result.output
    (folder / "config.json").write_text("{")
    result = run("--model", folder)
    assert result.exit_code == 2
    assert "\x1b" not in result.output
    assert r"bold\x1b[1m" in result.output


def test_files_count_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DATA / "demo" / "contracts-r8"
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert _room.file_bytes(str(folder)) == size
    assert _room.file_bytes(str(folder / "adapter_model.safetensors")) == size
    assert _room.file_bytes("/no/such/folder") == 0
    assert _room.file_bytes("a\0b") == 0
    monkeypatch.setattr(_setup, "read_adapter", None)
    monkeypatch.setattr("cupylora.backend.NumpyBackend.free_bytes", lambda self: size - 1)
    line = one_line(run("--backend", "numpy", "--lora-only", "--adapter", folder))
    assert f"need {size} bytes" in line


def test_what_compared_nothing_is_not_shown_as_passed(tmp_path: Path) -> None:
    arguments = ("--backend", "numpy", "--tokens", 1, "--base-share", 1)
    found = record(tmp_path, *arguments)
    by_name = {check["what"]: check for check in found["check"]}
    for name in ("q+k+v delta", "q+k+v y", "o delta", "o y"):
        assert (by_name[name]["rows"], by_name[name]["passed"]) == (0, None)
    assert by_name["q+k+v base rows"]["passed"] is True
    assert found["passed"] is True
    lines = run(*arguments).output.splitlines()
    assert sum("no rows" in line for line in lines) == 4
    verdict = " ".join(lines[-2:])
    assert "no row had an adapter, so no delta was compared" in verdict
    compared = sum(check["rows"] > 0 for check in found["check"])
    assert f"all {compared} comparisons" in verdict
    assert "no row had an adapter" not in run("--backend", "numpy", "--steps", 1).output


def test_rows_without_base_rows_say_so(tmp_path: Path) -> None:
    found = record(tmp_path, "--backend", "numpy", "--base-share", 0)
    passed = {check["what"]: check["passed"] for check in found["check"]}
    assert passed["q+k+v base rows"] is None
    assert passed["q+k+v delta"] is True


def test_adapters_without_a_groups_modules_give_it_no_delta(tmp_path: Path) -> None:
    """Only down_proj: no dense delta is compared, and all rows of the dense groups keep bits."""
    found = record(tmp_path, "--adapter", DATA / "adapters" / "tiny-down-only")
    rows = {check["what"]: check["rows"] for check in found["check"]}
    assert (rows["q+k+v delta"], rows["q+k+v base rows"]) == (0, 128)


def test_help_says_what_synthetic_adapters_replace() -> None:
    assert "in place of the shipped examples" in " ".join(run("--help").output.split())


def test_package_exports_without_cupy() -> None:
    """Every name resolves, and nothing of CUDA is imported for it."""
    code = (
        "import sys, cupylora\n"
        "assert 'numpy' not in sys.modules\n"
        "[getattr(cupylora, name) for name in cupylora.__all__]\n"
        "assert not {'cupy', 'cuda.bindings'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cupylora.nothing


def test_one_layer_one_step_one_token() -> None:
    output = run("--layers", 1, "--steps", 1, "--tokens", 1, "--backend", "numpy").output
    for text in ("tiny-moe, 1 layer ", "1 token,", "(1 layer, 1 eager step)"):
        assert text in output
    assert not re.search(r"\b1 (layers|steps|tokens|adapters)\b", output)


def test_row_bound_stands_beside_the_largest_row(tmp_path: Path) -> None:
    found = record(tmp_path, "--backend", "numpy")
    for check in found["check"]:
        assert check["row_bound"] == 4 * check["bound"]
    output = run("--backend", "numpy").output
    title = next(line for line in output.splitlines() if "comparison" in line)
    columns = [cell.strip() for cell in title.split("┃")[1:-1]]
    wanted = ["comparison", "rows", "error", "bound", "max row", "row bound", "result"]
    assert columns == wanted
    block = next(line for line in output.splitlines() if "MoE block" in line)
    cells = dict(zip(columns, (c.strip() for c in block.split("│")[1:-1]), strict=True))
    assert float(cells["max row"]) <= float(cells["row bound"]) == 4 * float(cells["bound"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-6, "2.5 µs"),
        (9.994e-4, "999.4 µs"),
        (0.01234, "12.34 ms"),
        (1.0, "1.00 s"),
        (754.3, "754.30 s"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert _report._time(seconds) == text


def test_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A delta that is a little off is found, reported and tells by the exit code."""

    def off(x: Any, y: Any, *arguments: Any, **options: Any) -> None:
        before = y.copy()
        lora_delta(x, y, *arguments, **options)
        y += (y - before) * y.dtype.type(0.05)

    monkeypatch.setattr("cupylora.layers.dense.lora_delta", off)
    path = tmp_path / "run.json"
    result = run("--backend", "numpy", "--json", path)
    assert result.exit_code == 1
    assert "FAIL" in result.output
    found = json.loads(path.read_text())
    assert found["passed"] is False
    failed = {c["what"] for c in found["check"] if not c["passed"]}
    assert "q+k+v delta" in failed
    assert "MoE block" not in failed


def test_the_record_on_stdout_stands_alone() -> None:
    result = run("--backend", "numpy", "--layers", 1, "--steps", 1, "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"] is True


def test_infinite_errors_are_valid_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_module, "_errors", lambda got, expected: (np.nan, np.inf))
    path = tmp_path / "run.json"
    assert run("--backend", "numpy", "--json", path).exit_code == 1
    assert json.loads(path.read_text())["check"][0]["error"] == "nan"


def test_floor_counts_each_factor_once() -> None:
    """By hand, for one layer: contracts (per expert), legal (one A for gate and up)."""
    options = RunOptions(backend="numpy", layers=1, tokens=64, base_share=0.5, dtype="float32")
    setup = prepare_run(options, lambda _: None)
    found = _measure.floor_bytes(setup)
    slots, ids = setup.batch.slots, setup.batch.ids[0]
    factors = 0
    for slot, adapter in enumerate(setup.adapters):
        experts = len(np.unique(ids[slots == slot]))
        arrays = {}
        for module in ("gate_proj", "up_proj"):
            pair = adapter.factors[0, module]
            arrays |= {("a", id(pair.a)): pair.a[0].size, ("b", id(pair.b)): pair.b[0].size}
        factors += experts * sum(arrays.values())
    assert found["MoE first delta"] == 4 * (factors + 32 * 64 + 2 * 32 * 2 * 96)
    ranks = sum(a.factors[0, "o_proj"].rank for a in setup.adapters)
    qkv = sum(
        a.factors[0, f"{m}_proj"].rank * (64 + n)
        for a in setup.adapters
        for m, n in (("q", 64), ("k", 32), ("v", 32))
    )
    assert found["dense deltas"] == 4 * (ranks * 128 + qkv + 32 * (64 + 2 * 128 + 64 + 2 * 64))
