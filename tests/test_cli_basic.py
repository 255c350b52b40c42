"""The command line apart from ``run``: help, doctor, kernels, and how errors end."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from cupylora import __version__
from cupylora.cli import main
from cupylora.compiler import ARCHITECTURES, PROGRAMS
from cupylora.errors import ArgumentError
from cupylora.resources import cuda_source_dir


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def test_help_lists_commands_without_loading_them() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.output for name in ("run", "doctor", "kernels"))
    script = (
        "import sys; from click.testing import CliRunner; from cupylora.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print([m for m in ('cupy', 'cuda.bindings', 'rich', 'numpy') if m in sys.modules])\n"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert output.decode().strip() == "[]"


def test_it_is_a_module_too() -> None:
    command = [sys.executable, "-m", "cupylora", "--version"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout == f"cupylora, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("inspect", ""), "DIR"),
        (("inspect", "x", "--json", ""), "--json"),
        (("export", "--out", ""), "--out"),
        (("pack", "x", "--model", "tiny-moe", "--out", ""), "--out"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(arguments: tuple[str, ...], what: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{what}': a path is needed, and it is empty" in result.stderr


def test_version() -> None:
    assert __version__ in CliRunner().invoke(main, ["--version"]).output


def test_doctor_tells_state_architectures_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYLORA_CACHE_DIR", "/some/where")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert ", ".join(ARCHITECTURES) in result.output
    assert "/some/where" in result.output
    assert "--backend auto uses " in result.output
    assert ("Remedy: " in result.output) == ("auto uses numpy" in result.output)


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/kernels"])
def test_doctor_tells_of_a_cache_that_cannot_be(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYLORA_CACHE_DIR", folder)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert f"a temporary folder each time, as {folder} cannot be written" in result.output


def test_doctor_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "cuda-bindings is not installed; install the compiler with cupylora[cuda13]" in (
        result.output
    )


def test_kernels_lists_every_kernel() -> None:
    result = CliRunner().invoke(main, ["kernels", "--all"])
    assert result.exit_code == 0, result.output
    for program in PROGRAMS:
        assert program.source in result.output
        assert all(kernel in result.output for kernel in program.kernels)
    assert "fill_uniform" not in result.output
    assert f"in {len(PROGRAMS)} programs" in result.output


@pytest.mark.parametrize("arguments", [["kernels"], ["kernels", "--all"], ["doctor"]], ids=str)
def test_listings_fit_80_columns(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is one word stays on one line, however long."""
    cache = "/a/folder/whose/name/goes/on" * 4
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CUPYLORA_CACHE_DIR", cache)
    lines = CliRunner().invoke(main, arguments).output.splitlines()
    paths = (cache, str(cuda_source_dir()))
    assert all(len(line) <= 80 or any(path in line for path in paths) for line in lines), lines
    if arguments == ["doctor"]:
        assert any(cache in line for line in lines)
    else:
        words = " ".join(lines).split()
        assert all(program.name in words and program.source in words for program in PROGRAMS)


def test_a_narrow_terminal_costs_kernels_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = CliRunner().invoke(main, ["kernels"]).output.splitlines()
    assert "…" not in "".join(lines)
    rows = [line for line in lines if line.startswith("│ fill ")]
    assert len(rows) == 1
    assert len(rows[0].split("│")[4].strip()) > 1  # of the architecture


def test_kernels_without_all_only_counts_them() -> None:
    lines = CliRunner().invoke(main, ["kernels"]).output.splitlines()
    rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    assert [row[0].strip() for row in rows] == [program.name for program in PROGRAMS]
    assert [int(row[2]) for row in rows] == [len(program.kernels) for program in PROGRAMS]


def test_own_errors_end_with_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cupylora.cli.run")

    @click.command("run")
    def command() -> None:
        raise ArgumentError("--tokens is -1; give at least 0")

    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupylora.cli.run", module)
    result = CliRunner().invoke(main, ["run"])
    assert result.exit_code == 2
    assert result.stderr == "cupylora: --tokens is -1; give at least 0\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "path"),
    [(["nothing"], "cupylora"), (["doctor", "--nothing"], "cupylora doctor")],
)
def test_wrong_usage_ends_with_one_line_and_code_2(arguments: list[str], path: str) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="cupylora")
    assert result.exit_code == 2
    assert result.stderr.startswith("cupylora: ")
    assert result.stderr.endswith(f"(see {path} --help)\n")
    assert result.stderr.count("\n") == 1
