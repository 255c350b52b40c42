"""Peers beside the bench: a made-up harness, run as the real one is, in processes of its own."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_util import FakeMeasurer
from click.testing import CliRunner

from cupylora.bench.peers import Peers, _Worker, serves
from cupylora.bench.points import Point, suite_points
from cupylora.bench.record import read_record
from cupylora.bench.session import run_points
from cupylora.cli import bench, main
from cupylora.device import DeviceState, probe
from cupylora.errors import ArgumentError

MODULES = {
    "torch": """
        from types import SimpleNamespace
        __version__ = "2.0"
        nothing = lambda *_: None
        cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda _: "Some GPU",
                               synchronize=nothing, empty_cache=nothing)
    """,
    "triton": "__version__ = '3.0'",
    "common": "import os; assert 'OURS' not in os.environ; print('noise')",
    "dense": """
        import os
        K = 0
        def check(c, seed, only=None):
            err = 0.5 if c["T"] == 8 else 1e-3
            return [dict(c, peer="good", err=1e-3), dict(c, peer="off", err=err, info="too far")]
        def time_all(rows, bw, cs, only=None, deadline=None):
            c, = cs
            if c["T"] == 512: os._exit(3)
            if c["T"] == 128: raise RuntimeError("no such shape")
            rows.add(**c, peer="good", us=K + c["N"] / 1e6, info="")
            rows.add(**c, peer="off", us=2.0)
            rows.add(**c, peer="broken", us=float("nan"), info="it broke")
    """,
    "moe": """
        MODELS, ML = {"gpt-oss-20b": dict(H=1)}, 0
        class Pool:
            made = 0
            def __init__(self, model, r): Pool.made += 1
        def check(c, pool, seed):
            assert isinstance(pool, Pool)
            return [dict(c, peer="sgl_v2", err13=1e-3, err2=1e-3)]
        def time_all(rows, bw, cs, deadline=None):
            c, = cs
            d = MODELS[c["model"]]
            rows.add(**c, peer="sgl_v2", us=1000 * d["H"] + ML + Pool.made / 100)
    """,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "harness").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "harness" / f"{name}.py").write_text(textwrap.dedent(text))
    return tmp_path


def dense(tokens: int) -> Point:
    return next(p for p in suite_points("dense") if p.tokens == tokens)


def moe(model: str) -> Point:
    return next(p for p in suite_points("moe") if p.model == model)


def test_which_points_the_harness_has() -> None:
    assert all(serves(p) for s in ("dense", "moe", "prefill", "route") for p in suite_points(s))
    assert not any(serves(p) for p in suite_points("step"))
    shapes = suite_points("shapes")
    assert {p.routing for p in shapes if not serves(p)} == {"hot-expert", "zipf"}
    assert not serves(replace(dense(1), widths=(4096, 1024)))


def test_peers_are_timed_for_our_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "/somewhere")
    with Peers(folder, sys.executable) as peers:
        assert peers.versions == {"torch": "2.0", "triton": "3.0"}
        assert peers.measure(dense(1), 4e12) == {"good": 4096 + 0.004096, "off": 2.0}
        # A model of the harness keeps its sizes there; another one brings its own.
        assert peers.measure(moe("gpt-oss-20b"), 4e12) == {"sgl_v2": 1016.0}
        assert peers.measure(moe("deepseek-v3"), 4e12) == {"sgl_v2": 7168016.0}
        assert peers.measure(suite_points("step")[0], 4e12) == {}
        assert peers.remarks == ["broken failed on 1 points, first: it broke"]


def test_peers_are_checked_before(folder: Path) -> None:
    said: list[str] = []
    points = [dense(1), dense(8), dense(32), moe("gpt-oss-20b"), suite_points("step")[0]]
    with Peers(folder, sys.executable, said.append) as peers:
        peers.prepare(points, 10**11)
        assert "of 4 points" in said[-1]
        assert len(peers._workers) == 1
        assert peers.measure(dense(8), 4e12) == {"good": 4096 + 0.004096}
        assert set(peers.measure(dense(32), 4e12)) == {"good", "off"}
        (line,) = [line for line in peers.remarks if line.startswith("off ")]
        assert "its check failed, first: relative error [0.5]: too far" in line


def test_a_check_that_ends_its_process_is_none_passed(folder: Path) -> None:
    harness = folder / "harness" / "dense.py"
    harness.write_text(harness.read_text().replace("def check(c, seed, only=None):", '''
def check(c, seed, only=None):
    if c["T"] == 32: os._exit(3)'''))  # fmt: skip
    with Peers(folder, sys.executable) as peers:
        peers.prepare([dense(32)], 10**11)
        assert peers.measure(dense(32), 4e12) == {}
        assert any("the process that checked it ended" in line for line in peers.remarks)


def test_peers_that_fail_cost_only_their_own_times(folder: Path) -> None:
    with Peers(folder, sys.executable) as peers:
        assert peers.measure(dense(128), 4e12) == {}
        assert set(peers.measure(dense(32), 4e12)) == {"good", "off"}
        assert "all failed on 1 points, first: RuntimeError: no such shape" in peers.remarks


def test_peers_whose_process_ends_are_left_out_from_there(folder: Path) -> None:
    with Peers(folder, sys.executable) as peers:
        points = [dense(1), dense(512), dense(32)]
        rows = run_points(points, FakeMeasurer(), peers).rows
        assert [bool(row.peers_us) for row in rows] == [True, False, False]
        assert all(row.us for row in rows)
        assert any("their process ended: noise" in line for line in peers.remarks)


def running(peers: Peers) -> list[int]:
    return [worker._process.pid for worker in peers._workers]


def test_no_process_is_left(folder: Path) -> None:
    with Peers(folder, sys.executable) as peers:
        peers.measure(dense(1), 4e12)
        pids = running(peers)
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_interruption_of_the_checks_ends_them(folder: Path) -> None:
    (folder / "harness" / "dense.py").write_text("import time\ndef check(*_): time.sleep(60)\n")
    pids: list[int] = []

    def stop(_: str) -> None:
        pids.extend(running(peers))
        raise KeyboardInterrupt

    start = time.monotonic()
    peers = Peers(folder, sys.executable, stop)
    with pytest.raises(KeyboardInterrupt), peers:
        peers.prepare([dense(1), dense(8)], 10**11)
    assert pids
    assert time.monotonic() - start < 30
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_was_stopped_has_no_last_words(folder: Path) -> None:
    worker = _Worker(sys.executable, folder)
    worker.close()
    assert worker._last_words() == "it was stopped"


@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        ("torch", "raise ImportError('no torch here')", "no torch here"),
        (
            "torch",
            "from types import SimpleNamespace\n__version__ = '2'\n"
            "cuda = SimpleNamespace(is_available=lambda: False)",
            "sees no CUDA device",
        ),
    ],
)
def test_without_torch_it_is_said_at_once(module: str, text: str, words: str, folder: Path) -> None:
    (folder / "harness" / f"{module}.py").write_text(text)
    with pytest.raises(ArgumentError, match=words), Peers(folder, sys.executable):
        pass


def test_folders_and_pythons_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is not there"):
        Peers(tmp_path / "none", sys.executable)
    with (
        pytest.raises(ArgumentError, match="--peers-python /no/python"),
        Peers(folder, "/no/python"),
    ):
        pass


def test_the_command_puts_them_into_the_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = replace(probe(), state=DeviceState.READY, name="Some GPU")
    monkeypatch.setattr(bench, "_require_gpu", lambda: ready)
    monkeypatch.setattr(bench, "_open_measurer", FakeMeasurer)
    monkeypatch.setattr(bench, "_free_bytes", lambda: 10**11)
    arguments: list[Any] = ["bench", "--suite", "moe", "--tokens", "1", "--peers", folder]
    result = CliRunner().invoke(main, [*map(str, arguments), "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    record = read_record(tmp_path / "r.json")
    assert record.versions["torch"] == "2.0"
    assert all(set(row.peers_us) == {"sgl_v2"} for row in record.rows)
    assert "SGL v2" in result.stdout
