"""What ``cupylora run`` says on stderr while it works."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from click.testing import CliRunner

from cupylora.cli import _progress, _setup, main
from cupylora.cli._progress import PlainLines, open_reporter
from cupylora.cli._setup import RunOptions, prepare_run


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_when_the_phase_changes_and_every_ten_seconds() -> None:
    lines: list[str] = []
    clock = Clock()
    report = PlainLines(lines.append, clock)
    report.phase("making base weights")
    for second in range(1, 24):
        clock.now = 100.0 + second
        if second == 5:
            report.phase("timing steps")
        if second == 9:
            report.detail("step 3 of 10 done")
        report.look()
    assert lines == [
        "2 s: making base weights",
        "5 s: timing steps",
        "15 s: step 3 of 10 done",
    ]


def test_what_is_over_at_once_says_nothing() -> None:
    lines: list[str] = []
    clock = Clock()
    report = PlainLines(lines.append, clock)
    report.phase("starting")
    clock.now += 1.9
    report.look()
    assert lines == []
    report.note("a note")
    assert lines == ["a note"]


def test_lines_come_while_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the thread, without the work calling anything; it ends with the block."""
    for name in ("_LOOK_SECONDS", "_QUIET_SECONDS", "_SECONDS_BETWEEN"):
        monkeypatch.setattr(_progress, name, 0.001)
    lines: list[str] = []
    written = threading.Event()

    def write(text: str) -> None:
        lines.append(text)
        written.set()

    report = PlainLines(write)
    report.phase("one long step")
    with report:
        assert written.wait(10)
    assert lines[0].endswith(" s: one long step")
    assert not report._thread.is_alive()


def test_a_run_tells_its_phases_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Told(PlainLines):
        def phase(self, text: str) -> None:
            told.append(text)

        def detail(self, text: str) -> None:
            told.append(text)

    monkeypatch.setattr("cupylora.cli.run.open_reporter", lambda: Told(told.append))
    arguments = ["run", "--backend", "numpy", "--steps", "2", "--layers", "1"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    expected = [
        "reading adapter contracts-r8",
        "loading adapters into slots",
        "making base weights",
        "timing steps",
        "step 1 of 2 done",
        "step 2 of 2 done",
        "checking against the float64 oracle",
        "checked layer 1 of 1",
    ]
    assert [text for text in told if text in expected] == expected


def test_a_spinner_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert isinstance(open_reporter(), PlainLines)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with open_reporter() as report:
        assert not isinstance(report, PlainLines)
        report.phase("timing steps")
        report.note("a note")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["10 steps through 2 layers with 295 kB of base weights and ", "--layers 1 "]),
        ({"layers": 1}, ["10 steps through 1 layer ", "--steps 1 "]),
        ({"layers": 1, "steps": 1, "lora_only": True}, ["1 step through 1 layer with ", "CPU"]),
    ],
)
def test_much_work_for_a_cpu_is_announced(
    options: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    chosen = RunOptions(backend="numpy", **options)
    prepare_run(chosen, lambda _: None, notes.append)
    assert notes == []
    monkeypatch.setattr(_setup, "_LONG_READS", 1)
    prepare_run(chosen, lambda _: None, notes.append)
    assert len(notes) == 1
    assert all(word in notes[0] for word in words), notes
    assert ("base weights" in notes[0]) == (not chosen.lora_only)
