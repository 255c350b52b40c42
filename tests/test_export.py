"""What `cupylora export` writes: whole or not at all, as its schema says, and usable by Python
without a compiler."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from host_util import HOSTS, STRICT, FakeDriver, build, described, hollow
from schema_util import faults

from cupylora.cli import main
from cupylora.compiler import cache, exported, loader
from cupylora.compiler.exported import ExportedKernels, current_export, use_export
from cupylora.compiler.programs import PROGRAMS, find_program
from cupylora.errors import CompileError, CupyloraError, ExportError
from cupylora.export import choice, folder, manifest, meanings
from cupylora.export.cubin import parameter_places
from cupylora.export.declarations import Declarations
from cupylora.export.folder import export_kernels
from cupylora.export.rules import RULES

SOME = ("fill", "plan", "lora_cluster_bfloat16")
"""Programs that are quick to compile, for one architecture."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of SOME, made through the command line."""
    out = tmp_path_factory.mktemp("export") / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "PROGRAMS", tuple(map(find_program, SOME)))
        done = CliRunner().invoke(
            main, ["export", "--arch", "sm_90a,sm_80", "--out", str(out), "--workers", "1"]
        )
    assert done.exit_code == 0, done.output
    assert "sm_90a" in done.output
    return out


@pytest.fixture
def mine(written: Path, tmp_path: Path) -> Path:
    """A copy of the export that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "mine"))


@pytest.fixture(autouse=True)
def no_export_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYLORA_EXPORT_DIR", raising=False)
    monkeypatch.setattr(exported, "_chosen", [])


def edit(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# --- The manifest


@pytest.mark.nvrtc
def test_a_manifest_is_what_its_schema_says(written: Path) -> None:
    made = json.loads((written / "manifest.json").read_text())
    schema = json.loads((written / "manifest.schema.json").read_text())
    assert schema == manifest.schema()
    assert faults(schema, made, schema) == []


BREAKS: dict[str, Any] = {
    "format": lambda m: m.update(format=2),
    "unknown key": lambda m: m.update(more=1),
    "no kernels": lambda m: m.update(kernels=[]),
    "a missing digest": lambda m: m["programs"][0].pop("sha256"),
    "a digest of another form": lambda m: m["programs"][0].update(sha256="ff"),
    "a negative offset": lambda m: m["structs"]["DeltaArgs"]["fields"][0].update(offset=-1),
    "a rule that is a number": lambda m: m["functions"]["finalize"]["launch"].update(block=64),
    "an empty meaning": lambda m: m["functions"]["finalize"]["arguments"][0].update(meaning=""),
    "a type that is not served": lambda m: m["kernels"][0].update(dtypes=["int8"]),
    "a grid in three parts": lambda m: m["functions"]["finalize"]["launch"]["grid"].append("1"),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", BREAKS)
def test_the_schema_finds_what_is_wrong(name: str, written: Path) -> None:
    schema = manifest.schema()
    broken = copy.deepcopy(json.loads((written / "manifest.json").read_text()))
    BREAKS[name](broken)
    assert faults(schema, broken, schema)


@pytest.mark.nvrtc
def test_a_manifest_names_every_kernel_and_file(written: Path) -> None:
    made = json.loads((written / "manifest.json").read_text())
    assert {(p["name"], p["arch"]) for p in made["programs"]} == {
        *((name, "sm_90a") for name in SOME),
        ("fill", "sm_80"),
        ("plan", "sm_80"),
    }
    for program in made["programs"]:
        data = (written / program["file"]).read_bytes()
        assert len(data) == program["bytes"]
        assert f"{manifest.fnv1a(data):016x}" == program["fnv1a"]
        home = (program["name"], program["arch"])
        own = [k for k in made["kernels"] if (k["program"], k["arch"]) == home]
        assert [k["name"] for k in own] == list(find_program(program["name"]).kernels)
        places = parameter_places(data)
        for kernel in own:
            arguments = made["functions"][kernel["function"]]["arguments"]
            found = [(a["offset"], a["size"]) for a in arguments]
            assert places[kernel["mangled"]] == found


@pytest.mark.nvrtc
def test_parameters_that_a_cubin_has_otherwise_stop_an_export(written: Path) -> None:
    [fill, plan] = (p for p in hollow() if p.program.name in ("fill", "plan"))
    cubin = (written / "sm_90a" / "plan.cubin").read_bytes()
    entry = ExportedKernels(written).get(plan.program, "sm_90a")
    right = manifest.Built(plan.program, "sm_90a", cubin, entry.lowered)
    assert manifest.make_manifest([right], (13, 0))
    wrong = manifest.Built(fill.program, "sm_90a", cubin, {"bfloat16": entry.lowered["rank_8"]})
    with pytest.raises(ExportError, match="its sources declare"):
        manifest.make_manifest([wrong], (13, 0))


def test_every_function_has_a_rule_and_every_argument_a_meaning() -> None:
    found = described()
    assert found.functions.keys() == RULES.keys()
    for program in PROGRAMS:
        for kernel in program.kernels:
            assert manifest.function_of(program, kernel) in found.functions
    for name, items in found.functions.items():
        assert all(meanings.meaning(name, item.name) for item in items)
    for name, struct in found.structs.items():
        assert all(meanings.meaning(name, item.name) for item in struct.fields)
    with pytest.raises(ExportError, match=r"'nothing', which export/meanings\.py"):
        meanings.meaning("lora_shrink", "nothing")


def test_no_meaning_is_left_of_arguments_that_are_gone() -> None:
    found = described()
    owners = {**found.functions, **{name: s.fields for name, s in found.structs.items()}}
    used = {item.name for items in owners.values() for item in items}
    for key in meanings.MEANINGS:
        owner, _, name = key.rpartition(".")
        if owner:
            assert name in {item.name for item in owners[owner]}, key
        else:
            assert name in used, key


def test_a_constant_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupylora.ops import _lora_choice

    assert choice.choice()["CLUSTER_BYTES"] == _lora_choice.CLUSTER_BYTES
    assert choice.choice()["RING_LIMITS"] == ((8, 64), (16, 32))
    monkeypatch.setattr(_lora_choice, "CLUSTER_BYTES", 7.5)
    assert choice.choice()["CLUSTER_BYTES"] == 7.5
    monkeypatch.delattr(_lora_choice, "_B_LIMIT")
    with pytest.raises(ExportError, match="_lora_choice has no _B_LIMIT"):
        choice.choice()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "kernel"),
        ("__global__ void kernel(Unknown x) {}", "kernel"),
        ("__global__ void kernel(void (*f)(i32)) {}", "kernel"),
    ],
)
def test_declarations_that_cannot_be_described_are_refused(text: str, name: str) -> None:
    with pytest.raises(ExportError):
        Declarations([text]).parameters(name)


def test_a_file_that_is_no_cubin_is_refused() -> None:
    for data in (b"", b"\x7fELF", b"\x7fELF" + bytes(60), bytes(200)):
        with pytest.raises(ExportError, match="is no cubin"):
            parameter_places(data)


# --- In place, whole


@pytest.mark.nvrtc
@pytest.mark.parametrize("former", [False, True])
def test_an_interrupted_export_leaves_what_was_there(
    former: bool, written: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = mine if former else mine.parent / "new"
    before = sorted(p.name for p in mine.parent.iterdir())
    monkeypatch.setattr(folder, "PROGRAMS", (find_program("fill"),))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("_write_json", "c_table"):
        with monkeypatch.context() as patch:
            patch.setattr(folder, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                folder.export_kernels(["sm_90a"], out, workers=1)
        assert sorted(p.name for p in mine.parent.iterdir()) == before
        assert (mine / "manifest.json").read_bytes() == (written / "manifest.json").read_bytes()
    folder.export_kernels(["sm_90a"], out, workers=1)
    assert [p["name"] for p in json.loads((out / "manifest.json").read_text())["programs"]] == [
        "fill"
    ]
    assert not list(mine.parent.glob(".*"))


def die(name: str, arch: str) -> None:
    os._exit(1)


@pytest.mark.nvrtc
def test_a_worker_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_compile", die)
    with pytest.raises(CompileError, match="use fewer --workers"):
        folder.export_kernels(["sm_90a"], tmp_path / "out", workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nvrtc
def test_what_is_no_export_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    for out in (tmp_path, tmp_path / "kept"):
        with pytest.raises(ExportError, match="is there and is no export"):
            folder.export_kernels(["sm_90a"], out)
    assert (tmp_path / "kept").read_text() == "mine"


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["export", "--arch", "sm_70", "--out", str(tmp_path / "x")])
    assert done.exit_code == 2
    assert "use sm_80, sm_90a, sm_100, sm_120" in done.output


# --- Into C


@pytest.mark.nvrtc
def test_c_opens_what_was_exported(written: Path, tmp_path: Path) -> None:
    """Real cubins and mangled names; what they launch is for the tests of hosts."""
    opened = ExportedKernels(written)
    built = []
    for program in map(find_program, SOME):
        entry = opened.get(program, "sm_90a")
        built.append(manifest.Built(program, "sm_90a", entry.path.read_bytes(), entry.lowered))
    driver = FakeDriver(tmp_path, built)
    flags = ("-std=c99", *STRICT, f"-I{written / 'include'}")
    host = build("gcc", flags, [HOSTS / "host_calls.c"], tmp_path / "host_calls")
    lists = [256 * i for i in range(1, 10)]
    numbers = [4, 2, 8, 0, 4, 0, 16, 0, 0, *lists, 256, 256, 256, 256, 256]
    done = driver.run([host, written], "lists " + " ".join(map(str, numbers)))
    assert (done.returncode, done.stdout) == (0, "0 0 \n"), done.stderr
    [(kernel, shape, _)] = driver.launches()
    assert (kernel, shape) == ("plan/rank_8", [1, 256, 0, 1, 1])


# --- Back into Python


@pytest.mark.nvrtc
def test_python_loads_from_an_export_without_a_compiler(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Module:
        def __init__(self, path: str) -> None:
            opened.append(path)

        def get_function(self, lowered: str) -> Any:
            return types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=len(lowered)))

    device = types.SimpleNamespace(compute_capability="90")
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        Device=lambda: device,
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
        driver=types.SimpleNamespace(CUDADriverError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, RawModule=Module))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setenv("CUPYLORA_EXPORT_DIR", str(written))
    kernel = loader.load_kernel("plan", "rank_8")
    assert opened == [str(written / "sm_90a" / "plan.cubin")]
    entry = ExportedKernels(written).get(find_program("plan"), "sm_90a")
    assert kernel.function == len(entry.lowered["rank_8"])
    with pytest.raises(ExportError, match="no program 'rows' for sm_90a"):
        loader.load_kernel("rows", "permute_bfloat16")


@pytest.mark.nvrtc
def test_what_was_chosen_comes_before_the_environment(
    written: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert current_export() is None
    monkeypatch.setenv("CUPYLORA_EXPORT_DIR", str(written))
    assert getattr(current_export(), "folder", None) == written
    use_export(mine)
    assert getattr(current_export(), "folder", None) == mine
    with pytest.raises(ExportError):
        use_export(mine / "include")
    assert getattr(current_export(), "folder", None) == mine
    use_export(None)
    assert getattr(current_export(), "folder", None) == written


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(format=9), "has format 9; this cupylora needs 1"),
        (lambda m: m.update(cupylora="0.0.9"), "has cupylora '0.0.9'; this cupylora needs"),
        (lambda m: m["programs"][0].update(sha256="0" * 64), "is not the file that was exported"),
        (lambda m: m["programs"][0].update(source_sha256="0"), "was made from other sources"),
        (lambda m: m["programs"][0].update(file="../sm_80/fill.cubin"), "damaged at 'programs'"),
        (lambda m: m["programs"][0].pop("file"), "damaged at 'programs'"),
        (lambda m: m["programs"][0].pop("sha256"), "is not the file that was exported"),
        (lambda m: m["programs"][0].pop("source_sha256"), "was made from other sources"),
        (lambda m: m.update(kernels=[]), "damaged at 'kernels'"),
        (lambda m: m["kernels"][0].update(mangled=5), "damaged at 'kernels'"),
        (lambda m: m["kernels"][0].update(name=[1]), "damaged at 'kernels'"),
        (lambda m: m.update(programs=[3]), "damaged at 'programs'"),
        (lambda m: m.pop("programs"), "damaged at 'programs'"),
        (lambda m: m.update(kernels=3), "damaged at 'kernels'"),
        (lambda m: m.update(programs=[]), "no program 'fill' for sm_90a; it is for sm_80, sm_90a"),
    ],
)
def test_an_export_that_does_not_fit_is_refused_by_name(change: Any, text: str, mine: Path) -> None:
    edit(mine / "manifest.json", change)
    with pytest.raises(ExportError, match=re.escape(text)) as caught:
        ExportedKernels(mine).get(find_program("fill"), "sm_90a")
    assert isinstance(caught.value, CupyloraError)
    assert "export" in str(caught.value)


@pytest.mark.nvrtc
def test_an_edited_cubin_is_refused(mine: Path) -> None:
    path = mine / "sm_90a" / "fill.cubin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ExportError, match=r"fill\.cubin is not the file that was exported"):
        ExportedKernels(mine).get(find_program("fill"), "sm_90a")


@pytest.mark.nvrtc
def test_sources_that_changed_since_are_seen(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "options_for", lambda program, arch: ("--fmad=false",))
    with pytest.raises(ExportError, match="was made from other sources"):
        ExportedKernels(mine).get(find_program("fill"), "sm_90a")


def test_a_folder_that_is_no_export_is_refused(tmp_path: Path) -> None:
    for text in (None, "", "[]", '{"format": 1}'):
        if text is not None:
            (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ExportError, match=r"manifest\.json|has cupylora None"):
            ExportedKernels(tmp_path)


@pytest.mark.nvrtc
def test_doctor_says_where_kernels_come_from(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for folder_, words in (
        ("", "none, kernels are compiled here (CUPYLORA_EXPORT_DIR)"),
        (str(written), f"{written} (CUPYLORA_EXPORT_DIR)"),
        (str(written / "include"), "cannot be used: "),
    ):
        monkeypatch.setenv("CUPYLORA_EXPORT_DIR", folder_)
        done = CliRunner().invoke(main, ["doctor"])
        assert done.exit_code == 0
        [line] = [line for line in done.output.splitlines() if line.startswith("exported kernels")]
        assert words in line


@pytest.mark.parametrize("extra", ["thesis.txt", "include.txt"])
@pytest.mark.parametrize("manifest", ['{"name": "My PWA"}', "no JSON", None])
def test_a_folder_of_somebody_elses_is_left_alone(
    extra: str, manifest: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    (folder / extra).write_text("mine")
    with pytest.raises(ExportError, match="is there and is no export"):
        export_kernels(["sm_80"], folder)
    assert (folder / extra).read_text() == "mine"


def test_what_is_no_path_of_an_export() -> None:
    for wrong in (5, b"x", [1]):
        with pytest.raises(ExportError, match="the path of an export is needed"):
            use_export(wrong)  # type: ignore[arg-type]
