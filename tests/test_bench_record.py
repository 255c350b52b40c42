"""Rows from points, records on disk, and what changed between two of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from bench_util import FakeMeasurer, make_record, make_row

from cupylora.bench import record as records
from cupylora.bench.check import OffReferenceError
from cupylora.bench.compare import compare_rows
from cupylora.bench.points import suite_points
from cupylora.bench.record import Row, read_record, require_writable, write_record
from cupylora.bench.session import run_points
from cupylora.errors import ArgumentError, CapacityError

POINTS = suite_points("moe")[:6]
"""Tokens 1, 8, 8, 32, 32, 32."""

RESULTS = sorted((Path(__file__).resolve().parent.parent / "tools" / "results").glob("*.json"))


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [
        make_row(POINTS[0], peers_us={"sgl_v2": 19.4}, parts_us=(6.0, 4.0), sets=88, error=1.7e-3),
        make_row(POINTS[1], us=None, spread=None, floor_us=None, stream_us=None, failed="off"),
    ]
    record = make_record(rows)
    write_record(tmp_path / "r.json", record)
    assert read_record(tmp_path / "r.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_file_has_the_fields_that_programs_read(tmp_path: Path) -> None:
    write_record(tmp_path / "r.json", make_record([make_row()]))
    values = json.loads((tmp_path / "r.json").read_text())
    assert {"device", "driver", "versions", "date", "rows"} <= values.keys()
    expected = "suite model in_features out_features rank max_loras tokens active us spread"
    assert {*expected.split(), "floor_us", "stream_us", "peers_us"} <= values["rows"][0].keys()


def test_only_the_fields_everyone_writes_are_needed(tmp_path: Path) -> None:
    """What others made without our further fields is read, and matched with ours."""
    row = asdict(make_row())
    further = ("kind", "routing", "peers_us", "parts_us", "bytes", "sets", "error", "checked")
    values = asdict(make_record([])) | {
        "rows": [{k: v for k, v in row.items() if k not in (*further, "failed")} | {"note": 1}]
    }
    del values["copy_bytes_per_second"]
    (tmp_path / "r.json").write_text(json.dumps(values))
    read = read_record(tmp_path / "r.json")
    assert read.rows[0].key == make_row().key
    assert read.copy_bytes_per_second is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"us": "3"}, r"rows\[0\]: us is '3'; a finite number"),
        ({"us": True}, "us is True"),
        ({"us": -1.0}, "us is -1.0"),
        ({"us": math.nan}, "us is nan"),
        ({"tokens": 1.5}, "tokens is 1.5; an integer"),
        ({"tokens": None}, "tokens is None"),
        ({"model": 3}, "model is 3; a string"),
        ({"peers_us": {"a": None}}, "an object of finite numbers"),
        ({"parts_us": 3}, "a list of finite numbers"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    values = asdict(make_record([])) | {"rows": [asdict(make_row()) | change]}
    (tmp_path / "r.json").write_text(json.dumps(values))
    with pytest.raises(ArgumentError, match=words):
        read_record(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read: not valid JSON"),
        ("[]", "an object is needed"),
        ("{}", "rows is None"),
        ('{"rows": [3]}', r"rows\[0\] is 3"),
        ('{"rows": []}', "device is missing"),
        ('{"rows": [{"suite": "moe"}]}', r"rows\[0\]: model is missing"),
    ],
)
def test_other_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ArgumentError, match=words):
        read_record(tmp_path / "r.json")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="No such file"):
        read_record(Path("/nowhere/r.json"))


def test_kept_results_can_be_read() -> None:
    """Those of tools/results, if there are any: whole, each point once, none of them failed."""
    for path in RESULTS:
        rows = read_record(path).rows
        assert rows, path
        assert len({(row.suite, *row.key) for row in rows}) == len(rows), path
        assert not [row.failed for row in rows if row.failed], path


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_record(path, make_record([make_row()]))
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(records.os, "fsync", full)
        with pytest.raises(ArgumentError, match="No space left"):
            write_record(path, make_record([]))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real" / "r.json")
    require_writable("--json", link)
    write_record(link, make_record([make_row()]))
    assert link.is_symlink()
    assert read_record(tmp_path / "real" / "r.json").rows


@pytest.mark.parametrize("name", ["", "none/r.json", "x" * 300])
def test_places_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--json"):
        require_writable("--json", tmp_path / name)


def test_what_is_no_file_is_not_replaced() -> None:
    with pytest.raises(ArgumentError, match="not a file in a folder"):
        require_writable("--json", Path("/dev/null"))


def test_each_point_becomes_a_row_and_is_kept_at_once() -> None:
    kept: list[int] = []
    said: list[str] = []
    outcome = run_points(
        POINTS, FakeMeasurer(), keep=lambda rows: kept.append(len(rows)), say=said.append
    )
    assert kept == [1, 2, 3, 4, 5, 6]
    assert [row.key for row in outcome.rows] == [point.key for point in POINTS]
    assert outcome.rows[0].us == 10.1
    assert outcome.rows[0].fraction == pytest.approx(0.25)
    assert (outcome.left, outcome.interrupted) == (0, False)
    assert said[3] == (
        "point 4 of 6: moe: qwen3-30b-a3b 2048x768, rank 16, 16 slots, 32 tokens, 1 active"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OffReferenceError("output off"), "output off"),
        (CapacityError("too\nlarge"), "too large"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("cudaErrorIllegalAddress"), "RuntimeError: cudaErrorIllegalAddress"),
    ],
)
def test_a_point_that_fails_says_why_and_the_rest_goes_on(error: Exception, words: str) -> None:
    outcome = run_points(POINTS, FakeMeasurer({8: error}))
    assert [row.failed for row in outcome.rows] == ["", words, words, "", "", ""]
    assert [row.us is None for row in outcome.rows] == [False, True, True, False, False, False]


def test_a_lost_device_ends_it() -> None:
    measurer = FakeMeasurer({8: RuntimeError("lost")})
    measurer.alive = False
    outcome = run_points(POINTS, measurer)
    assert len(outcome.rows) == 2
    assert outcome.left == 4
    assert "does not answer" in outcome.why


def test_an_interruption_keeps_what_there_is() -> None:
    kept: list[int] = []
    measurer = FakeMeasurer({32: KeyboardInterrupt()})
    outcome = run_points(POINTS, measurer, keep=lambda rows: kept.append(len(rows)))
    assert outcome.interrupted
    assert len(outcome.rows) == kept[-1] == 3
    assert outcome.left == 3


def test_no_new_point_after_the_time_allowed() -> None:
    now = iter([0.0, 0.0, 4.0, 9.9, 10.0, 11.0])
    outcome = run_points(POINTS, FakeMeasurer(), seconds=10, clock=lambda: next(now))
    assert len(outcome.rows) == 3
    assert outcome.left == 3
    assert "--budget" in outcome.why


def test_peers_stand_beside_what_they_serve() -> None:
    class Some:
        def measure(self, point: Any, bandwidth: float) -> dict[str, float]:
            assert bandwidth == 4e12
            return {"sgl_v2": 19.43219, "cublas_bmm_equal": 1.0} if point.tokens == 1 else {}

    rows = run_points(POINTS, FakeMeasurer({8: CapacityError("no")}), Some()).rows
    assert rows[0].peers_us == {"sgl_v2": 19.432, "cublas_bmm_equal": 1.0}
    assert rows[0].best_peer == ("sgl_v2", 19.432)
    assert [dict(row.peers_us) for row in rows[1:]] == [{}] * 5
    assert rows[1].best_peer is None


def changed(old_us: float, new_us: float, old: float = 0.01, new: float = 0.01) -> float | None:
    """The ratio that a comparison reports for one row, if any."""
    comparison = compare_rows([make_row(us=old_us, spread=old)], [make_row(us=new_us, spread=new)])
    assert comparison.same == (not comparison.changed)
    return comparison.changed[0].ratio if comparison.changed else None


def test_a_change_is_beyond_both_spreads_and_three_percent() -> None:
    assert changed(10, 10.2) is None
    assert changed(10, 10.29) is None
    assert changed(10, 10.4) == pytest.approx(1.04)
    assert changed(10, 9.6) == pytest.approx(0.96)
    assert changed(10, 10.4, old=0.05) is None
    assert changed(10, 10.4, new=0.05) is None
    assert changed(10, 10.6, old=0.05, new=0.02) == pytest.approx(1.06)


def test_a_comparison_matches_rows_whatever_their_suite_and_order() -> None:
    old = [make_row(p, us=10.0) for p in POINTS]
    new = [replace(make_row(p, us=10.0), suite="prefill") for p in reversed(POINTS)]
    new[0], new[1] = replace(new[0], us=20.0), replace(new[1], us=5.0)
    failed = make_row(POINTS[0], us=None, failed="off")
    comparison = compare_rows([*old[:-1], failed][1:], new)
    assert [change.ratio for change in comparison.changed] == [0.5]
    assert (comparison.same, comparison.only_old, comparison.only_new) == (3, 0, 2)
    full = compare_rows(old, new)
    assert [change.ratio for change in full.changed] == [2.0, 0.5]
    assert [change.slower for change in full.changed] == [True, False]
    assert len(full.slower) == 1


def test_rows_of_different_draws_are_different() -> None:
    zipf: Row = make_row(routing="zipf")
    assert compare_rows([make_row()], [zipf]).only_new == 1
