"""cupylora.h compiles without a warning as C and as C++, in every form that a host may use it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from host_util import HOSTS, ROOT, STRICT, build, compiler, hollow, write_hollow

from cupylora.compiler.arch import ARCHITECTURES
from cupylora.export.manifest import ABI
from cupylora.resources import include_dir

IMPLEMENTATION = '#define CUPYLORA_IMPLEMENTATION\n#include "cupylora.h"\n'
STANDARDS = {
    "gcc": ("-std=c99", "-std=c11", "-std=c17"),
    "g++": ("-std=c++11", "-std=c++17", "-std=c++20"),
}
EVERY = [(tool, standard) for tool, standards in STANDARDS.items() for standard in standards]
USE = """
typedef struct CUstream_st* CUstream;
typedef unsigned long long CUdeviceptr;
#include "cupylora.h"

int use(const cupylora_op* op, CUstream stream, CUdeviceptr x, const cupylora_lists* lists);
int use(const cupylora_op* op, CUstream stream, CUdeviceptr x, const cupylora_lists* lists) {
  return (int)cupylora_enqueue_activation(op, stream, x, 0, lists, x, NULL);
}
"""


def include_of(folder: Path, archs: Sequence[str] = ARCHITECTURES) -> str:
    """-I of the headers of an export for ``archs``."""
    built = [item for arch in archs for item in hollow(arch)]
    return f"-I{write_hollow(folder / 'export', built) / 'include'}"


def compile_only(tool: str, flags: Sequence[str], text: str, folder: Path) -> str:
    """What the compiler has to say of ``text``: nothing where all is well."""
    source = folder / f"unit{'.c' if tool == 'gcc' else '.cpp'}"
    source.write_text(text)
    command = [compiler(tool), *flags, *STRICT, "-c", str(source), "-o", str(folder / "unit.o")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(("tool", "standard"), EVERY)
def test_it_compiles_as_strict_c_and_cpp(tool: str, standard: str, tmp_path: Path) -> None:
    # Once with the optimiser's warnings too.
    how = "-O2" if standard == STANDARDS[tool][0] else "-fsyntax-only"
    flags = (standard, how, include_of(tmp_path))
    for text in (IMPLEMENTATION, '#include "cupylora.h"\n', USE):
        assert compile_only(tool, flags, text, tmp_path) == ""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_for_any_architectures_that_were_exported(arch: str, tmp_path: Path) -> None:
    flags = ("-std=c99", "-fsyntax-only", include_of(tmp_path, [arch]))
    assert compile_only("gcc", flags, IMPLEMENTATION, tmp_path) == ""


def test_warnings_that_few_ask_for(tmp_path: Path) -> None:
    more = ("-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wcast-qual", "-Wundef")
    flags = ("-std=c99", *more, include_of(tmp_path))
    assert compile_only("gcc", flags, IMPLEMENTATION, tmp_path) == ""


@pytest.mark.parametrize("name", ["ARGS", "PARAMS", "POINTERS"])
def test_a_kernel_of_more_arguments_than_there_is_room_for_is_seen(
    name: str, tmp_path: Path
) -> None:
    include = include_of(tmp_path)
    table = Path(include.removeprefix("-I")) / "cupylora_table.h"
    define = f"#define CUPYLORA_MOST_{name} "
    more, count = re.subn(rf"{define}\d+", f"{define}321", table.read_text())
    assert count == 1
    table.write_text(more)
    said = compile_only("gcc", ("-std=c99", include), IMPLEMENTATION, tmp_path)
    assert "more arguments than cupylora_launch has room for" in said


def test_a_warning_would_be_seen(tmp_path: Path) -> None:
    text = IMPLEMENTATION + "static int unused;\n"
    assert "unused" in compile_only("gcc", ("-std=c99", include_of(tmp_path)), text, tmp_path)


@pytest.mark.parametrize(("first", "second"), [("gcc", "g++"), ("g++", "gcc")])
def test_units_of_both_languages_link(first: str, second: str, tmp_path: Path) -> None:
    include = include_of(tmp_path)
    objects = []
    for tool, text in ((first, IMPLEMENTATION), (second, USE)):
        folder = tmp_path / tool
        folder.mkdir()
        standard = STANDARDS[tool][0]
        assert compile_only(tool, (standard, include), text, folder) == ""
        objects.append(folder / "unit.o")
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include "cupylora.h"\n'
        "int main() {\n"
        "  cupylora* c = nullptr;\n"
        "  return cupylora_open(nullptr, &c, nullptr) == CUPYLORA_BAD_ARGUMENT ? 0 : 1;\n"
        "}\n"
    )
    program = build("g++", ("-std=c++17", include), [main, *objects], tmp_path / "main")
    assert subprocess.run([str(program)], check=False).returncode == 0


def test_headers_of_different_exports_do_not_compile(tmp_path: Path) -> None:
    include = include_of(tmp_path)
    table = Path(include.removeprefix("-I")) / "cupylora_table.h"
    text = table.read_text()
    assert f"#define CUPYLORA_TABLE_ABI {ABI}\n" in text
    table.write_text(text.replace("TABLE_ABI 1", "TABLE_ABI 2"))
    said = compile_only("gcc", ("-std=c99", include), IMPLEMENTATION, tmp_path)
    assert "are of different exports" in said


def toolkit() -> Path:
    """The folder of the CUDA toolkit's cuda.h; skips the test where there is none."""
    roots = sorted(Path("/usr/local").glob("cuda*"))
    for root in (Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *roots):
        if (root / "include" / "cuda.h").is_file():
            return root / "include"
    pytest.skip("there is no CUDA toolkit with a cuda.h")


def test_what_is_declared_of_the_driver_is_what_cuda_h_has(tmp_path: Path) -> None:
    flags = ("-std=c++17", f"-isystem{toolkit()}", include_of(tmp_path))
    assert compile_only("g++", flags, (HOSTS / "driver_types.cpp").read_text(), tmp_path) == ""


@pytest.mark.parametrize("program", ["mixed_moe", "enqueue_cost"])
def test_the_hosts_compile_with_the_toolkit(program: str, tmp_path: Path) -> None:
    cpp = ROOT / "tools" / "hosts" / "cpp"
    flags = ("-std=c++17", f"-isystem{toolkit()}", f"-I{cpp}", include_of(tmp_path))
    assert compile_only("g++", flags, (cpp / f"{program}.cpp").read_text(), tmp_path) == ""


def test_abi_and_sizes() -> None:
    header = (include_dir() / "cupylora.h").read_text()
    assert re.search(rf"^#define CUPYLORA_ABI {ABI}$", header, re.M)
    for path in include_dir().iterdir():
        assert len(path.read_text().splitlines()) <= 1000, path


def test_no_function_of_the_runtime_and_no_exception_is_named() -> None:
    for path in include_dir().iterdir():
        assert not re.search(r"\bcuda[A-Z]|\bthrow\b|\bcuStreamSync|\bcuCtxSync", path.read_text())


def test_enqueue_allocates_nothing() -> None:
    """From the first enqueue on, no function that takes memory or waits is called."""
    header = (include_dir() / "cupylora.h").read_text()
    enqueueing = header[header.index("/* --- Enqueueing") : header.index("/* --- Packs")]
    assert not re.search(r"\b(malloc|calloc|realloc|free|fopen|dlsym)\b", enqueueing)
    assert set(re.findall(r"driver\.(\w+)\(", enqueueing)) == {"launch"}
