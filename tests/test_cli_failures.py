"""How the command line ends when its surroundings fail: always a line and a code, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cupylora.cli import main

RUN = ("run", "--backend", "numpy", "--layers", "1", "--steps", "1", "--tokens", "8")
INSPECT = ("inspect", Path(__file__).parent / "data/demo/contracts-r8", "--model", "tiny-moe")
LONG = "x" * 5000


def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own."""
    command = [sys.executable, "-c", "from cupylora.cli import main; main()"]
    options.setdefault("stdout", subprocess.PIPE)
    # Whoever runs the tests in the background may have left SIGINT ignored, which is inherited.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen([*command, *map(str, arguments)], stderr=subprocess.PIPE, **options)


def finish(process: subprocess.Popen[bytes], encoding: str = "utf-8") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()  # where it did not end
    return process.returncode, (out or b"").decode(encoding), err.decode(encoding)


def one_line(text: str) -> str:
    assert text.startswith("cupylora: "), text
    assert text.count("\n") == 1, text
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", LONG), "too long"),
        (("--model", f"{LONG}/config.json"), "too long"),
        (("--adapter", LONG), "xxx"),
        (("--adapter", f"a={LONG}"), "xxx"),
        (("--json", LONG), "--json"),
        (("--json", f"{LONG}/x.json"), "--json"),
        (("--rank", "9" * 5000), "1 to 512"),
    ],
)
def test_names_that_no_file_can_have(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(main, [*RUN, *arguments])
    assert result.exit_code == 2, result.output
    assert words in one_line(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("option", ["--model", "--adapter", "--json"])
def test_folders_that_cannot_be_looked_into(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user without the right to; the tests may run as one who has every right."""
    closed, real = tmp_path / "closed", os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    result = CliRunner().invoke(main, [*RUN, option, str(closed / "inner" / "file")])
    assert result.exit_code == 2, result.output
    line = one_line(result.stderr)
    assert "Permission denied" in line or "no such directory" in line or "neither a preset" in line
    assert str(closed) in line


@pytest.mark.parametrize("there", [True, False])
def test_a_record_s_file_is_tried_before_the_run(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "run.json"
    if there:
        record.write_text("old")
    monkeypatch.setattr("cupylora.cli.run.prepare_run", None)
    with monkeypatch.context() as context:

        def denied(*_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(record))

        context.setattr(Path, "open", denied)
        result = CliRunner().invoke(main, [*RUN, "--json", str(record)])
    assert result.exit_code == 2
    assert "--json: Permission denied" in one_line(result.stderr)
    assert isinstance(CliRunner().invoke(main, [*RUN, "--json", str(record)]).exception, TypeError)
    assert record.exists() == there
    assert not there or record.read_text() == "old"


@pytest.mark.parametrize("arguments", [RUN, ("--help",)], ids=str)
def test_a_closed_stdout(arguments: tuple[str, ...]) -> None:
    code, _, err = finish(start(*arguments, preexec_fn=lambda: os.close(1)))
    assert code == 2
    assert "standard output is closed" in one_line(err)


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("Unable to allocate 7 GiB")], ids=str)
def test_memory_that_is_not_there(error: MemoryError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("cupylora.cli.run.time_steps", fails)
    result = CliRunner().invoke(main, RUN)
    assert result.exit_code == 2
    line = one_line(result.stderr)
    assert "not enough memory" in line
    assert str(error) in line


@pytest.mark.parametrize(
    "arguments", [RUN, INSPECT, ("kernels",), ("doctor",), ("--help",)], ids=str
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """And the record, written first, is whole."""
    record = tmp_path / "run.json"
    extra = ("--json", record) if arguments is RUN else ()
    with Path("/dev/full").open("wb") as full:
        code, _, err = finish(start(*arguments, *extra, stdout=full))
    assert code == 2
    assert "No space left on device" in one_line(err)
    if extra:
        assert json.loads(record.read_text())["passed"] is True


def test_a_record_that_cannot_be_written_leaves_the_tables() -> None:
    code, out, err = finish(start(*RUN, "--json", "/dev/full"))
    assert code == 2
    assert "--json /dev/full: cannot be written" in one_line(err)
    assert "PASS" in out


@pytest.mark.parametrize("arguments", [RUN, INSPECT, ("kernels", "--all"), ("doctor",)], ids=str)
def test_a_reader_that_has_gone_away(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(*arguments, stdout=write)
    os.close(write)
    assert finish(process) == (141, "", "")


def test_interrupt() -> None:
    process = start(*RUN[:3], "--steps", 1_000_000)
    assert process.stderr is not None
    assert process.stderr.readline()  # it is at work: the first line comes after two seconds
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert err.splitlines()[-1] == "cupylora: interrupted"
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    "arguments", [RUN, INSPECT, ("kernels",), ("doctor",), ("--help",)], ids=str
)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_stdout_lacks(arguments: tuple[str, ...], encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "100"}
    code, out, err = finish(start(*arguments, env=environment), encoding)
    assert (code, err) == (0, "")
    if arguments is RUN:
        assert (" us" if encoding == "ascii" else " µs") in out
        assert "+---" in out or "|--" in out
        assert "PASS" in out


def test_characters_that_stderr_lacks() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    code, _, err = finish(start(*RUN, "--model", "µ-model→é", env=environment), "ascii")
    assert code == 2
    assert "u-model->\\xe9" in one_line(err)


def test_names_that_are_no_text() -> None:
    """Bytes that are not UTF-8 come back as they may be shown, whatever stdout's encoding."""
    code, _, err = finish(start(*RUN, "--adapter", os.fsdecode(b"x=/no/\xff")))
    assert code == 2
    assert "no such directory" in one_line(err)


@pytest.mark.parametrize("home", ["unknown user", "none"])
def test_doctor_without_a_home_directory(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if home == "none":

        def no_home(path: Path) -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "expanduser", no_home)
        for name in ("HOME", "CUPYLORA_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv("CUPYLORA_CACHE_DIR", "~nosuchuser/x")
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "a temporary folder each time" in result.output
