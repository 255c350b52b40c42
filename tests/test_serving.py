"""``cupylora run`` through graphs and traces, the traces, and the tool that writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_util import BACKENDS
from click.testing import CliRunner, Result
from fixtures_util import DATA

from cupylora.cli import _serve, main
from cupylora.cli._trace import TraceStep, read_trace
from cupylora.errors import ArgumentError

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))
from make_trace import main as make_trace  # noqa: E402
from make_trace import make_traffic, zipf_shares  # noqa: E402

TRAFFIC: dict[str, Any] = {
    "adapters": 20,
    "steps": 60,
    "arrivals": 2.0,
    "prompt": 6,
    "output": 3,
    "max_tokens": 40,
    "most_adapters": 4,
    "base_share": 0.2,
    "exponent": 1.0,
    "churn": 0.3,
    "seed": 1,
}


def make_steps(**options: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = make_traffic(**options)[0]
    return lines


def write(path: Path, lines: Sequence[Any]) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(text + "\n" for text in texts))
    return path


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)], prog_name="cupylora")


def serving(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    path = tmp_path / "run.json"
    result = run("--json", path, "--steps", 3, "--layers", 1, *arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert record["passed"] is True
    found: dict[str, Any] = record["serving"]
    return found


# --- cupylora run --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_through_graphs(tmp_path: Path, backend: str) -> None:
    found = serving(tmp_path, "--graphs", "--tokens", 21, "--backend", backend)
    assert found["hits"] == [{"tokens": 21, "active_loras": 4, "steps": 3}]
    assert (found["steps"], found["tokens"], found["differing_steps"]) == (3, 63, 0)
    assert found["graphs"] == len([1, 2, 4, 8, 16, 21]) * 2
    if backend == "cuda":
        assert found["graph_nodes"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_specialised_graphs(tmp_path: Path, backend: str) -> None:
    options = ("--graphs", "--specialize-active-loras", "--buckets", "4,16", "--tokens", 16)
    found = serving(tmp_path, *options, "--backend", backend, "--max-loras", 6)
    assert found["hits"] == [{"tokens": 16, "active_loras": 4, "steps": 3}]
    assert found["graphs"] == len([0, 1, 2, 4]) + len([0, 1, 2, 4, 7])
    base = serving(tmp_path, *options, "--backend", backend, "--base-share", 1)
    assert base["hits"] == [{"tokens": 16, "active_loras": 0, "steps": 3}]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_is_replayed(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "trace", make_steps(**TRAFFIC))
    steps = list(read_trace(path))
    found = serving(
        tmp_path, "--trace", path, "--max-loras", 4, "--rank", "4,9,16", "--backend", backend
    )
    assert found["steps"] == 60
    assert found["tokens"] == sum(step.num_tokens for step in steps)
    assert found["differing_steps"] == 0
    assert found["loads"] > 10
    assert sum(hit["steps"] for hit in found["hits"]) + sum(found["eager"].values()) == 60


def test_a_trace_of_given_adapters(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "requests": [{"tokens": 3, "adapter": "contracts"}, {"tokens": 2}]},
        {"step": 4, "unload": ["contracts"], "requests": [{"tokens": 1}]},
        {"step": 5, "load": ["contracts"], "requests": []},
        {"step": 9, "requests": [{"tokens": 2, "adapter": "contracts"}]},
    ]
    path = write(tmp_path / "trace", lines)
    given = f"contracts={DATA / 'demo' / 'contracts-r8'}"
    found = serving(tmp_path, "--trace", path, "--adapter", given, "--backend", "numpy")
    assert (found["loads"], found["unloads"], found["steps"], found["tokens"]) == (1, 1, 4, 8)
    assert found["eager"] == {"no tokens": 1}
    result = run("--trace", path, "--adapter", given, "--backend", "numpy", "--layers", 1)
    for text in ("Steps by graph", "1 load, 1 unload", "every step has the bits of an eager one"):
        assert text in " ".join(result.output.split())


def test_a_step_that_differs_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = _serve._Server._step_function

    def wrong(self: Any, step: Any) -> None:
        honest(self, step)
        step["out"][-1, -1] += 1

    monkeypatch.setattr(_serve._Server, "_step_function", wrong)
    result = run("--graphs", "--tokens", 8, "--steps", 2, "--layers", 1, "--backend", "numpy")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "2 steps DIFFER from eager ones" in text
    assert "FAIL: steps through graphs differ from eager ones" in text
    unchecked = run("--graphs", "--tokens", 8, "--layers", 1, "--backend", "numpy", "--no-check")
    assert unchecked.exit_code == 0
    assert "not compared with eager steps" in " ".join(unchecked.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--graphs", "--buckets", "4,2"), "--buckets '4,2': rising numbers of tokens from 1 to 8"),
        (("--graphs", "--buckets", "4,x"), "--buckets '4,x': rising numbers of tokens"),
        (("--graphs", "--buckets", "16"), "--buckets '16': rising numbers of tokens from 1 to 8"),
        (("--graphs", "--buckets", ""), "--buckets '': rising numbers of tokens"),
        (("--buckets", "4"), "--buckets needs --graphs or --trace"),
        (("--specialize-active-loras",), "--specialize-active-loras needs --graphs or --trace"),
        (("--trace", "nowhere.jsonl"), "--trace nowhere.jsonl: cannot be read"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    result = run("--tokens", 8, "--backend", "numpy", "--layers", 1, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"requests": [{"tokens": 1, "adapter": name} for name in "abc"]},
            "step 3 has requests of 3 adapters, but there are 2 slots; raise --max-loras",
        ),
        ({"unload": ["b"], "requests": []}, "step 3 unloads b, which no request and no --adapter"),
    ],
)
def test_traces_that_cannot_be_served_are_refused_before_anything_is_made(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "trace", [{"step": 3} | line])
    result = run("--trace", path, "--max-loras", 2, "--backend", "numpy")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_trace_without_graphs_is_eager(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", make_steps(**TRAFFIC))
    found = serving(tmp_path, "--trace", path, "--no-graphs", "--max-loras", 4)
    assert (found["graphs"], found["hits"], found["eager"]) == (0, [], {"graphs are off": 60})
    assert found["differing_steps"] == 0


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_is_read(tmp_path: Path) -> None:
    lines = [
        {"step": 2, "requests": [{"tokens": 3, "adapter": "a"}, {"tokens": 1, "adapter": None}]},
        "",
        {"step": 3, "load": ["b"], "unload": ["a", "c"], "requests": []},
    ]
    first, second = read_trace(write(tmp_path / "trace", lines))
    assert first == TraceStep(2, (), (), ((3, "a"), (1, None)))
    assert (first.num_tokens, first.names) == (4, ("a",))
    assert second == TraceStep(3, ("b",), ("a", "c"), ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not a JSON object on a line"),
        ("[" * 100_000, r"line 2: not a JSON object on a line"),
        ("7", r"line 2: an object with step and requests"),
        ({"step": 5}, r"line 2: an object with step and requests"),
        ({"step": 5, "requests": [], "more": 1}, r"line 2: an object with step and requests"),
        ({"step": 1, "requests": []}, r"line 2: step 1 follows step 1; steps must rise"),
        ({"step": True, "requests": []}, r"line 2: step is True; an integer"),
        ({"step": 5, "requests": {}}, r"line 2: requests is a dict; a list is needed"),
        ({"step": 5, "requests": [3]}, r"line 2: requests\[0\]: an object with tokens"),
        (
            {"step": 5, "requests": [{"tokens": 0}]},
            r"\[0\]\.tokens is 0; an integer from 1",
        ),
        ({"step": 5, "requests": [{"tokens": 1.0}]}, r"requests\[0\]\.tokens is 1\.0"),
        (
            {"step": 5, "requests": [{"tokens": 1, "adapter": 3}]},
            r"adapter: 3 is no adapter's",
        ),
        ({"step": 5, "requests": [{"tokens": 1, "adapter": ""}]}, r"adapter: '' is no adapter's"),
        ({"step": 5, "requests": [], "load": "b"}, r"line 2: load is a str; a list is needed"),
        (" " * (1 << 20), r"line 2 has over 1048576 characters; split the step"),
    ],
)
def test_lines_that_are_no_steps_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "trace", [{"step": 1, "requests": [{"tokens": 1}]}, line])
    with pytest.raises(ArgumentError, match=message):
        list(read_trace(path))


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in [("binary", "cannot be read"), (".", "cannot be read")]:
        with pytest.raises(ArgumentError, match=message):
            list(read_trace(tmp_path / name))
    with pytest.raises(ArgumentError, match="there are no steps in it"):
        list(read_trace(write(tmp_path / "empty", [""])))


def test_traffic_keeps_its_limits() -> None:
    lines = make_steps(**TRAFFIC)
    assert lines == make_steps(**TRAFFIC)
    assert lines != make_steps(**TRAFFIC | {"seed": 2})
    for line in lines:
        names = {request.get("adapter") for request in line["requests"]} - {None}
        assert len(names) <= 4
        assert sum(request["tokens"] for request in line["requests"]) <= 40
        assert not names & set(line.get("unload", ()))
    sizes = [request["tokens"] for line in lines for request in line["requests"]]
    assert sizes.count(1) > 20  # decode
    assert max(sizes) > 6  # prompts
    assert any("unload" in line for line in lines)


def test_adapters_are_unloaded_only_after_they_came() -> None:
    seen: set[str] = set()
    for line in make_steps(**TRAFFIC | {"steps": 300, "churn": 1.0}):
        assert set(line.get("unload", ())) <= seen
        seen |= {request["adapter"] for request in line["requests"] if "adapter" in request}


@pytest.mark.parametrize(
    "arguments",
    [("--arrivals", "inf"), ("--exponent", "nan"), ("--churn", "nan"), ("--arrivals", "1e20")],
)
def test_the_tool_refuses_numbers_that_are_none(tmp_path: Path, arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(make_trace, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_the_tool_says_at_once_where_it_cannot_write() -> None:
    result = CliRunner().invoke(make_trace, ["--out", "/nowhere/x"])
    assert result.exit_code == 2
    assert "/nowhere/x" in result.output


def test_popularity_is_zipf() -> None:
    shares = zipf_shares(8, 1.0)
    assert np.isclose(shares.sum(), 1)
    assert np.allclose(shares[0] / shares, np.arange(1, 9))
    assert np.allclose(zipf_shares(4, 0.0), 0.25)


def test_the_tool_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = CliRunner().invoke(make_trace, ["--steps", "12", "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert "12 steps" in result.output
    assert "still waiting" in result.output
    assert [step.step for step in read_trace(path)] == list(range(12))
