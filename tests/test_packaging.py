"""What a newcomer gets: files resolve, imports are light, the declared version is the real one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cupylora
from cupylora import resources
from cupylora.compiler import PROGRAMS
from cupylora.errors import CupyloraError

ROOT = Path(__file__).resolve().parent.parent


def test_resources_resolve() -> None:
    assert all((resources.cuda_source_dir() / program.source).is_file() for program in PROGRAMS)
    assert resources.data_dir().is_dir()


def test_installed_files_come_before_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cupylora"
    monkeypatch.setattr(resources, "_PACKAGE", package)
    with pytest.raises(CupyloraError, match="_cuda_src"):
        resources.cuda_source_dir()
    (tmp_path / "cuda_src").mkdir()
    assert resources.cuda_source_dir() == tmp_path / "cuda_src"
    (package / "_cuda_src").mkdir(parents=True)
    assert resources.cuda_source_dir() == package / "_cuda_src"


def test_import_loads_neither_cupy_nor_cuda() -> None:
    script = (
        "import sys, cupylora, cupylora.compiler, cupylora.device\n"
        "print([m for m in ('cupy', 'cuda.bindings', 'torch') if m in sys.modules])\n"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert output.decode().strip() == "[]"


def test_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == cupylora.__version__
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {target.split("/")[1] for target in shipped.values()} == {"_cuda_src", "_data"}
    assert all((ROOT / source).is_dir() for source in shipped)
