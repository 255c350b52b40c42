"""``cupylora bench`` as a command: options, tables, files and exit codes, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_util import FakeMeasurer, make_record, make_row
from click.testing import CliRunner, Result

from cupylora.bench.check import OffReferenceError
from cupylora.bench.plot import active_class, panels
from cupylora.bench.points import suite_points
from cupylora.bench.record import read_record, write_record
from cupylora.cli import bench, main
from cupylora.device import DeviceInfo, DeviceState, probe

QWEN = ("--suite", "moe", "--model", "qwen3-30b-a3b", "--rank", "16", "--tokens", "1,32")

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> FakeMeasurer:
    made = FakeMeasurer()
    ready = replace(probe(), state=DeviceState.READY, name="Some GPU", driver_cuda=(13, 0))
    monkeypatch.setattr(bench, "_require_gpu", lambda: ready)
    monkeypatch.setattr(bench, "_open_measurer", lambda: made)
    monkeypatch.setattr(bench, "_free_bytes", lambda: 10**11)
    return made


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], prog_name="cupylora")


def one_line(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("cupylora: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (DeviceState.NO_DRIVER, "bench needs a GPU (no driver): none there; `cupylora doctor`"),
        (DeviceState.CUPY_MISSING, "none there; pip install 'cupylora[cuda13]'; `cupylora doctor`"),
    ],
)
def test_without_a_gpu_it_says_what_is_missing(
    state: DeviceState, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = "pip install 'cupylora[cuda13]'"
    info: DeviceInfo = replace(probe(), state=state, detail="none there", remedy=remedy)
    monkeypatch.setattr(bench, "probe", lambda: info)
    assert words in one_line(run())


def test_help_says_what_there_is() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("--suite", "--peers", "--compare", "--budget", "prefill", "Exit code 0"):
        assert name in result.output


def test_saved_records_are_read_without_a_device_s_packages(saved: Path) -> None:
    script = (
        "import sys; from click.testing import CliRunner; from cupylora.cli import main\n"
        f"assert CliRunner().invoke(main, ['bench', '--from', {str(saved)!r}]).exit_code == 0\n"
        "print([m for m in ('cupy', 'cuda.bindings.driver', 'matplotlib') if m in sys.modules])\n"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert output.decode().strip() == "[]"


def test_a_suite_s_points_are_measured_and_shown(measurer: FakeMeasurer, tmp_path: Path) -> None:
    result = run(*QWEN, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert [(p.tokens, p.active) for p in measurer.asked] == [(1, 1), (32, 1), (32, 4), (32, 16)]
    assert "moe: qwen3-30b-a3b 2048x768, rank 16, 16 slots" in result.stdout
    assert "Some GPU, driver " in result.stdout
    assert "floor at 4.00 TB/s" in result.stdout
    assert "moe: 4 points, floor/time 0.25 (geometric mean)" in result.stdout
    record = read_record(tmp_path / "r.json")
    assert [row.us for row in record.rows] == [10.1, 13.2, 13.2, 13.2]
    assert record.device == "Some GPU"
    assert record.copy_bytes_per_second == 4e12
    assert {"cupylora", "cupy", "python"} <= record.versions.keys()


def test_the_default_is_the_moe_suite(measurer: FakeMeasurer) -> None:
    assert run().exit_code == 0
    assert [p.key for p in measurer.asked] == [p.key for p in suite_points("moe")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--model", "4096x14336", "--rank", "64", "--tokens", "8", "--active", "4"),
            ("linear", 4096, 14336, 64, 64, 8, 4),
        ),
        (
            ("--model", "gpt-oss-20b", "--tokens", "7", "--active", "3", "--max-loras", "5"),
            ("gpt-oss-20b", 2880, 2880, 16, 5, 7, 3),
        ),
    ],
)
def test_a_single_point(
    arguments: tuple[str, ...], expected: tuple[Any, ...], measurer: FakeMeasurer
) -> None:
    assert run(*arguments).exit_code == 0
    (p,) = measurer.asked
    sizes = (p.model, p.in_features, p.out_features, p.rank, p.max_loras, p.tokens, p.active)
    assert sizes == expected


def test_a_model_alone_is_a_curve(measurer: FakeMeasurer) -> None:
    assert run("--model", "mixtral-8x7b").exit_code == 0
    assert [p.tokens for p in measurer.asked if p.active == 1] == [1, 8, 32, 128, 512, 4096]
    assert {p.active for p in measurer.asked} == {1, 4, 16}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "none"), "'none'"),
        (("--tokens", "0"), "integers from 1 on"),
        (("--tokens", "1,,2"), "integers from 1 on"),
        (("--rank", "9" * 5000), "integers from 1 on"),
        (("--rank", "600", "--model", "tiny-moe"), "--rank 600: 1 to 512"),
        (("--suite", "dense", "--tokens", "7"), "suite dense has no such point"),
        (("--model", "nothing"), "neither a preset"),
        (("--model", "0x4"), "in_features"),
        (("--max-loras", "0"), "--max-loras"),
        (("--budget", "0"), "--budget"),
        (("--from", "/nowhere.json"), "/nowhere.json"),
        (("--compare", "/nowhere.json"), "/nowhere.json"),
        (("--json", "/nowhere/r.json"), "not a file in a folder that exists"),
        (("--json", "-"), "--json -: the record is written anew after each point: name a file"),
        (("--from", ""), "'--from': a path is needed, and it is empty"),
        (("--plot", "/nowhere/r.jpg"), ".png, .svg, .pdf"),
        (("--from", "a.json", "--json", "b.json"), "--from measures nothing"),
        (("--peers", "/nowhere"), "common.py is not there"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], words: str, measurer: FakeMeasurer
) -> None:
    assert words in one_line(run(*arguments))
    assert measurer.asked == []


def test_a_failed_point_is_shown_and_costs_the_exit_code(
    measurer: FakeMeasurer, tmp_path: Path
) -> None:
    measurer.errors = {1: OffReferenceError("output off the float32 reference: 0.5")}
    result = run(*QWEN, "--json", tmp_path / "r.json")
    assert result.exit_code == 1
    assert result.stdout.count("FAILED") == 2
    assert "1 token, 1 active: output off the float32 reference: 0.5" in result.stdout
    rows = read_record(tmp_path / "r.json").rows
    assert [row.us for row in rows] == [None, 13.2, 13.2, 13.2]
    assert rows[0].failed.startswith("output off")


def test_an_interruption_shows_and_keeps_what_there_is(
    measurer: FakeMeasurer, tmp_path: Path
) -> None:
    measurer.errors = {32: KeyboardInterrupt()}
    result = run(*QWEN, "--json", tmp_path / "r.json")
    assert result.exit_code == 130
    assert result.stderr.endswith("cupylora: interrupted\n")
    assert "10.10" in result.stdout
    assert "not measured: 3 points, as interrupted" in result.stdout
    assert len(read_record(tmp_path / "r.json").rows) == 1


def test_a_used_up_budget_is_said(measurer: FakeMeasurer) -> None:
    result = run(*QWEN, "--budget", "1e-9")
    assert result.exit_code == 0
    assert "not measured: 4 points, as the time allowed (--budget) is used up" in result.stdout


def test_a_full_disk_costs_no_result(
    measurer: FakeMeasurer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cupylora.bench.record.os.fsync", full)
    result = run(*QWEN, "--json", tmp_path / "r.json")
    assert result.exit_code == 0
    assert "No space left on device" in result.stderr
    assert len(measurer.asked) == 4
    assert "13.20" in result.stdout


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rows = [
        make_row(p, us=10.0 + p.tokens, peers_us={"vllm_maxloras": 40.0, "sgl_v2": 20.0})
        for p in (*suite_points("moe")[:15], *suite_points("dense")[:20])
    ]
    write_record(tmp_path / "saved.json", make_record(rows))
    return tmp_path / "saved.json"


def test_a_saved_record_needs_no_gpu(saved: Path) -> None:
    result = run("--from", saved)
    assert result.exit_code == 0, result.output
    assert "moe: qwen3-30b-a3b 2048x768, rank 16, 16 slots" in result.stdout
    assert "dense: linear 4096x4096, rank 16, 64 slots" in result.stdout
    for words in ("vLLM", "SGL v2", "best peer", "1.82x", "ahead of the best peer on 3 of 15"):
        assert words in result.stdout


def test_a_part_of_a_saved_record(saved: Path) -> None:
    result = run("--from", saved, "--suite", "moe", "--tokens", "1,8")
    assert result.exit_code == 0
    assert "moe: 3 points" in result.stdout
    assert "linear" not in result.stdout
    assert "none of its rows" in one_line(run("--from", saved, "--suite", "route"))


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_narrow_terminals_show_the_best_peer(
    columns: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("--from", saved).stdout.splitlines()
    tables = [line for line in lines if line.startswith(("│", "┃"))]
    assert tables
    assert all(len(line) <= columns for line in tables)


def test_a_comparison_marks_what_changed(saved: Path, tmp_path: Path) -> None:
    record = read_record(saved)
    faster = [replace(row, us=(row.us or 0) * 0.5) for row in record.rows[:2]]
    write_record(tmp_path / "new.json", replace(record, rows=(*faster, *record.rows[2:])))
    result = run("--from", tmp_path / "new.json", "--compare", saved)
    assert result.exit_code == 0
    assert "0 slower, 2 faster, 33 the same" in result.stdout
    assert "-50.0%" in result.stdout
    back = run("--from", saved, "--compare", tmp_path / "new.json")
    assert back.exit_code == 1
    assert "2 slower, 0 faster, 33 the same" in back.stdout
    assert "+100.0%" in back.stdout


def test_a_run_can_be_compared_at_once(measurer: FakeMeasurer, tmp_path: Path) -> None:
    assert run(*QWEN, "--json", tmp_path / "r.json").exit_code == 0
    measurer.us = 20.0
    result = run(*QWEN, "--compare", tmp_path / "r.json")
    assert result.exit_code == 1
    assert f"against {tmp_path / 'r.json'} (Some GPU, " in result.stdout
    assert "4 slower, 0 faster, 0 the same" in result.stdout


def test_the_file_compared_with_may_be_the_one_written(
    measurer: FakeMeasurer, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    assert run(*QWEN, "--json", path).exit_code == 0
    measurer.us = 5.0
    result = run(*QWEN, "--json", path, "--compare", path)
    assert result.exit_code == 0
    assert "0 slower, 4 faster" in result.stdout
    assert json.loads(path.read_text())["rows"][0]["us"] == 5.1


def test_without_matplotlib_it_says_how_to_get_it(
    measurer: FakeMeasurer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else real(n, *a)
    )
    result = run(*QWEN, "--plot", tmp_path / "p.png")
    assert "pip install 'cupylora[plot]'" in one_line(result)
    assert measurer.asked == []


@needs_matplotlib
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(suffix: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / f"p{suffix}"
    result = run("--from", saved, "--plot", path)
    assert result.exit_code == 0, result.output
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in path.read_bytes()


@needs_matplotlib
def test_a_picture_of_one_point(measurer: FakeMeasurer, tmp_path: Path) -> None:
    arguments = ("--model", "tiny-moe", "--tokens", "4", "--active", "2")
    assert run(*arguments, "--plot", tmp_path / "p.png").exit_code == 0
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_panels_are_shapes_and_classes_of_active_adapters() -> None:
    assert [active_class(a) for a in (1, 2, 4, 5, 16, 17, 64, 65)] == [
        "1",
        "2-4",
        "2-4",
        "5-16",
        "5-16",
        "17-64",
        "17-64",
        "over 64",
    ]
    points = [p for p in suite_points("all") if p.model == "qwen3-30b-a3b" and p.kind == "moe"]
    found = panels([make_row(p) for p in reversed(points)])
    rows = found["qwen3-30b-a3b 2048x768, rank 16, 16 slots", "2-4"]
    assert [row.tokens for row in rows] == [8, 32, 128, 512, 2048, 4096]
    assert {row.suite for row in rows} == {"moe", "prefill"}
    assert panels([make_row(us=None)]) == {}
