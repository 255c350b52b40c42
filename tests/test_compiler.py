"""Sources, cache, compiler and launch storage, all without a device; the last test needs one."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupylora.compiler import (
    ARCHITECTURES,
    PROGRAMS,
    KernelProgram,
    arch_for,
    driver,
    find_program,
    instances,
    load_kernel,
    supports,
)
from cupylora.compiler import cache as cache_module
from cupylora.compiler.cache import CubinCache, cache_dir, cache_key
from cupylora.compiler.check import check_program, problems
from cupylora.compiler.check import main as check_main
from cupylora.compiler.inspection import report
from cupylora.compiler.kernel import Kernel
from cupylora.compiler.nvrtc import Compiled, compile_program, options_for
from cupylora.compiler.sources import read_sources
from cupylora.device import probe
from cupylora.errors import (
    ArgumentError,
    CompileError,
    CupyloraError,
    DeviceUnavailableError,
)

SCALE = KernelProgram("scale", "family/scale.cu", instances("scale<{t}>", t=("float", "double")))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small source folder: scale.cu -> outer.cuh -> inner.cuh, each included from the root."""
    root = tmp_path / "src"
    (root / "family").mkdir(parents=True)
    (root / "inner.cuh").write_text("#pragma once\n__device__ int factor() { return 3; }\n")
    (root / "family/outer.cuh").write_text('#pragma once\n#  include "inner.cuh"\n')
    (root / "family/scale.cu").write_text(
        '#include "family/outer.cuh"\n'
        '#include "inner.cuh"\n'
        "template <typename T> __global__ void scale(T* x) { x[threadIdx.x] *= factor(); }\n"
    )
    return root


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of programs compiled by caches from here on."""
    compiled: list[str] = []

    def counting(program: KernelProgram, *args: Any) -> Compiled:
        compiled.append(program.name)
        return compile_program(program, *args)

    monkeypatch.setattr(cache_module, "compile_program", counting)
    return compiled


# -- declarations and sources --


def test_instances_is_the_product_with_our_names() -> None:
    kernels = instances("gemm<{dtype}, {tile}>", dtype={"float16": "Fp16"}, tile=(8, 16))
    assert kernels == {"float16_8": "gemm<Fp16, 8>", "float16_16": "gemm<Fp16, 16>"}


def test_headers_are_found_transitively_from_the_root(sources: Path) -> None:
    found = read_sources(SCALE, sources)
    assert list(found.headers) == ["family/outer.cuh", "inner.cuh"]


def test_missing_header_names_the_file_that_includes_it(sources: Path) -> None:
    (sources / "inner.cuh").unlink()
    with pytest.raises(CompileError, match=r"family/\w+\.cuh? needs 'inner\.cuh'"):
        read_sources(SCALE, sources)


def test_every_program_is_found_under_a_name_of_its_own() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert all(find_program(program.name) is program for program in PROGRAMS)
    with pytest.raises(CompileError, match=r"no kernel program 'nothing'; there are .*fill"):
        find_program("nothing")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90a"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_arch_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert arch_for(capability) == arch


def test_old_device_is_refused_by_number() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"compute capability 7\.5 is not supported"):
        arch_for((7, 5))


def test_supports_compares_numbers() -> None:
    assert [a for a in ARCHITECTURES if supports(a, "sm_90a")] == ["sm_90a", "sm_100", "sm_120"]


def test_a_program_of_one_architecture_is_built_for_no_other() -> None:
    alone = replace(SCALE, min_arch="sm_90a", exact_arch=True)
    assert [a for a in ARCHITECTURES if alone.built_for(a)] == ["sm_90a"]
    assert [a for a in ARCHITECTURES if SCALE.built_for(a)] == list(ARCHITECTURES)


# -- cache --


def key_of(
    sources: Path, program: KernelProgram = SCALE, arch: str = "sm_80", nvrtc: int = 5
) -> str:
    return cache_key(program, read_sources(program, sources), arch, (13, nvrtc))


def test_key_covers_everything_that_decides_the_cubin(sources: Path) -> None:
    keys = {"as it is": key_of(sources)}
    keys["architecture"] = key_of(sources, arch="sm_90a")
    keys["compiler"] = key_of(sources, nvrtc=6)
    keys["define"] = key_of(sources, KernelProgram("scale", SCALE.source, SCALE.kernels, {"N": 1}))
    keys["kernels"] = key_of(sources, KernelProgram("scale", SCALE.source, {"f": "scale<float>"}))
    for path in ("inner.cuh", "family/scale.cu"):
        text = (sources / path).read_text()
        (sources / path).write_text(text + "// edited\n")
        keys[path] = key_of(sources)
    assert len(set(keys.values())) == len(keys), keys


def test_key_does_not_depend_on_where_the_sources_lie(sources: Path, tmp_path: Path) -> None:
    before = key_of(sources)
    assert key_of(sources.rename(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"CUPYLORA_CACHE_DIR": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"XDG_CACHE_HOME": "/two"}, "/two/cupylora"),
        ({"HOME": "/three"}, "/three/.cache/cupylora"),
    ],
)
def test_cache_folder(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUPYLORA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(folder)


@pytest.mark.nvrtc
def test_second_use_compiles_nothing(
    sources: Path, tmp_path: Path, compilations: list[str]
) -> None:
    first = CubinCache(tmp_path / "cache", sources).get(SCALE, "sm_80")
    second = CubinCache(tmp_path / "cache", sources).get(SCALE, "sm_80")
    assert compilations == ["scale"]
    assert second == first
    assert first.path.read_bytes().startswith(b"\x7fELF")
    assert set(first.lowered) == {"float", "double"}
    assert all(name.encode() in first.path.read_bytes() for name in first.lowered.values())


@pytest.mark.nvrtc
def test_header_edit_compiles_again(sources: Path, tmp_path: Path, compilations: list[str]) -> None:
    cache = CubinCache(tmp_path / "cache", sources)
    before = cache.get(SCALE, "sm_80")
    (sources / "inner.cuh").write_text("#pragma once\n__device__ int factor() { return 4; }\n")
    after = cache.get(SCALE, "sm_80")
    assert compilations == ["scale", "scale"]
    assert after.path.read_bytes() != before.path.read_bytes()


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "damage",
    [
        "torn cubin",
        "no cubin",
        "torn description",
        "foreign json",
        "deep json",
        "other names",
        "fewer kernels",
        "names of no type",
    ],
)
def test_damaged_entry_is_compiled_again(
    damage: str, sources: Path, tmp_path: Path, compilations: list[str]
) -> None:
    cache = CubinCache(tmp_path / "cache", sources)
    good = cache.get(SCALE, "sm_80")
    cubin, description = good.path, good.path.with_suffix("").with_suffix(".json")
    content = cubin.read_bytes()
    if damage == "torn cubin":
        cubin.write_bytes(content[:-7])
    elif damage == "no cubin":
        cubin.unlink()
    elif damage == "torn description":
        description.write_bytes(description.read_bytes()[:-9])
    elif damage == "deep json":
        description.write_text("[" * 200_000)
    elif damage == "other names":
        names = good.lowered["float"], good.lowered["double"]
        swapped = description.read_text().replace(names[0], "@").replace(names[1], names[0])
        description.write_text(swapped.replace("@", names[1]))
    elif damage in ("fewer kernels", "names of no type"):
        fields = json.loads(description.read_text())
        lowered = {"float": good.lowered["float"]} if damage == "fewer kernels" else 5
        fields["lowered"] = lowered
        if isinstance(lowered, dict):
            fields["sha256"] = cache_module._digest(content, lowered, good.log)
        description.write_text(json.dumps(fields))
    else:
        description.write_text(json.dumps(["not", "an", "entry"]))
    again = cache.get(SCALE, "sm_80")
    assert compilations == ["scale", "scale"]
    assert again.path.read_bytes() == content
    assert cache.get(SCALE, "sm_80") == again
    assert compilations == ["scale", "scale"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_a_folder_in_an_entrys_place(
    suffix: str, sources: Path, tmp_path: Path, compilations: list[str]
) -> None:
    """It is left alone; the kernels go to a temporary folder."""
    cache = CubinCache(tmp_path / "cache", sources)
    good = cache.get(SCALE, "sm_80")
    content = good.path.read_bytes()
    place = good.path if suffix == ".cubin" else good.path.with_suffix("").with_suffix(suffix)
    place.unlink()
    (place / "of the user").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=r"cannot be written .*CUPYLORA_CACHE_DIR"):
        again = cache.get(SCALE, "sm_80")
    assert again.path.read_bytes() == content
    assert again.lowered == good.lowered
    assert not again.path.is_relative_to(tmp_path)
    assert cache.get(SCALE, "sm_80") == again
    assert compilations == ["scale", "scale"]
    assert (place / "of the user").is_dir()


@pytest.mark.parametrize("folder", ["~nosuchuser/x", "~nosuchuser"])
def test_cache_in_no_home_directory(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYLORA_CACHE_DIR", folder)
    monkeypatch.chdir(tmp_path)
    assert cache_dir() is None
    assert probe().cache_folder is None
    with pytest.warns(RuntimeWarning, match=r"no home directory.*set CUPYLORA_CACHE_DIR"):
        cache = CubinCache(cache_dir(), tmp_path)
    assert cache.folder.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arch", ["", "sm_80,", "foo", "sm_", "80", "sm_80;sm_90a"])
def test_check_refuses_other_architectures(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupylora.compiler.check._run", None)
    result = CliRunner().invoke(check_main, ["--arch", arch])
    assert result.exit_code == 2
    assert f"--arch {arch!r}: use sm_80, sm_90a, sm_100, sm_120" in result.output


@pytest.mark.nvrtc
def test_writing_leaves_only_whole_entries(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    CubinCache(folder, sources).get(SCALE, "sm_80")
    assert sorted(path.suffix for path in folder.iterdir()) == [".cubin", ".json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "entry"
    path.write_bytes(b"old")

    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        cache_module._replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.nvrtc
@pytest.mark.slow
def test_processes_share_a_cache_folder(sources: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from cupylora.compiler.cache import CubinCache\n"
        "from cupylora.compiler import KernelProgram\n"
        "p = KernelProgram('scale', 'family/scale.cu', {'f': 'scale<float>'})\n"
        "e = CubinCache(Path(sys.argv[1]), Path(sys.argv[2])).get(p, 'sm_80')\n"
        "print(e.path.name, e.lowered['f'])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(sources)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    outputs = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(outputs) == 1


@pytest.mark.nvrtc
def test_unwritable_folder_falls_back_with_a_warning(sources: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match=r"cannot be written .*CUPYLORA_CACHE_DIR") as caught:
        cache = CubinCache(blocked / "cache", sources)
    assert len(caught) == 1
    assert cache.folder.is_dir()
    assert not cache.folder.is_relative_to(tmp_path)
    assert cache.get(SCALE, "sm_80").path.parent == cache.folder


# -- compiler --


@pytest.mark.nvrtc
def test_error_shows_file_line_options_and_log(sources: Path) -> None:
    (sources / "inner.cuh").write_text("#pragma once\n\n__device__ int factor() { return bad; }\n")
    program = KernelProgram("scale", SCALE.source, SCALE.kernels, {"WIDTH": 8})
    with pytest.raises(CompileError) as caught:
        compile_program(program, read_sources(program, sources), "sm_90a")
    message = str(caught.value)
    assert "'scale' did not compile" in message
    assert "at inner.cuh, line 3" in message
    assert "--gpu-architecture=sm_90a --std=c++17" in message
    assert "-DWIDTH=8" in message
    assert 'identifier "bad" is undefined' in message


@pytest.mark.nvrtc
def test_unknown_kernel_expression_is_a_compile_error(sources: Path) -> None:
    program = KernelProgram("scale", SCALE.source, {"x": "nothing<float>"})
    with pytest.raises(CompileError, match="did not compile"):
        compile_program(program, read_sources(program, sources), "sm_80")


@pytest.mark.nvrtc
def test_defines_reach_the_source(sources: Path) -> None:
    (sources / "family/scale.cu").write_text(
        '#if WIDTH != 8\n#error "wrong width"\n#endif\nextern "C" __global__ void plain() {}\n'
    )
    good = KernelProgram("scale", SCALE.source, {"plain": "plain"}, {"WIDTH": 8})
    compiled = compile_program(good, read_sources(good, sources), "sm_80")
    assert compiled.lowered == {"plain": "plain"}
    bad = KernelProgram("scale", SCALE.source, {"plain": "plain"}, {"WIDTH": 4})
    with pytest.raises(CompileError, match="wrong width"):
        compile_program(bad, read_sources(bad, sources), "sm_80")


def test_ieee_arithmetic_is_kept() -> None:
    assert not {o for o in options_for(SCALE, "sm_80") if "fast" in o or "ftz" in o}


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fill_compiles_without_spills(arch: str) -> None:
    outcome = check_program(find_program("fill"), arch)
    assert problems(outcome) == []
    assert [kernel.kernel for kernel in outcome.kernels] == ["bfloat16", "float16", "float32"]
    assert all(4 <= kernel.registers <= 64 for kernel in outcome.kernels)


# -- check: what has to fail does --

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[95 - i];
}
"""


@pytest.mark.nvrtc
def test_check_fails_on_spills(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "family/scale.cu").write_text(SPILLING)
    monkeypatch.setattr("cupylora.compiler.check.cuda_source_dir", lambda: sources)
    program = KernelProgram("spilling", SCALE.source, {"spilling": "spilling"})
    (problem,) = problems(check_program(program, "sm_90a"))
    assert problem.startswith("spilling for sm_90a: kernel spilling spills ")


@pytest.mark.nvrtc
def test_check_fails_on_matrix_kernel_without_tensor_cores(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupylora.compiler.check.cuda_source_dir", lambda: sources)
    program = KernelProgram("scale", SCALE.source, SCALE.kernels, matrix=True)
    assert problems(check_program(program, "sm_80")) == [
        f"scale for sm_80: kernel {name} has no tensor-core instruction" for name in SCALE.kernels
    ]


MATRIX = """
extern "C" __global__ void product(float* d, const unsigned* a) {
  float* c = d + 4 * threadIdx.x;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]));
}
extern "C" __global__ void other(float* d) { d[0] *= 2; }
"""


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensor_core_instructions_are_counted_per_kernel(
    arch: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "family/scale.cu").write_text(MATRIX)
    monkeypatch.setattr("cupylora.compiler.check.cuda_source_dir", lambda: sources)
    kernels = instances("{name}", name=("product", "other"))
    outcome = check_program(KernelProgram("mma", SCALE.source, kernels, matrix=True), arch)
    assert {k.kernel: k.matrix_instructions for k in outcome.kernels} == {"product": 1, "other": 0}
    assert problems(outcome) == [f"mma for {arch}: kernel other has no tensor-core instruction"]


def test_log_that_tells_nothing_is_an_error() -> None:
    with pytest.raises(CompileError, match="does not tell kernel 'f'"):
        report(Compiled(b"", {"f": "_Z1f"}, "ptxas info: all is well"), disassemble=False)


# -- launches --


class RecordingDriver:
    """Stands for libcuda: keeps what a launch would hand to the driver."""

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.attributes: list[tuple[int, int]] = []
        self.status = 0
        self.parameters: list[tuple[int, int]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:  # noqa: N802
        config = config._obj
        pointers = list(parameters._obj)
        self.launches.append(
            SimpleNamespace(
                grid=tuple(config.grid),
                block=tuple(config.block),
                shared=config.shared_bytes,
                stream=config.stream,
                attributes=[
                    (config.attributes[i].id, tuple(config.attributes[i].value[:3]))
                    for i in range(config.num_attributes)
                ],
                bytes_at=lambda i, size: ctypes.string_at(pointers[i], size),
            )
        )
        return self.status

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: Any) -> int:  # noqa: N802
        self.attributes.append((attribute.value, value.value))
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:  # noqa: N802
        if index.value >= len(self.parameters):
            return 1
        offset._obj.value, size._obj.value = self.parameters[index.value]
        return 0

    def cuGetErrorName(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def cuGetErrorString(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"invalid argument"
        return 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recording = RecordingDriver()
    monkeypatch.setattr(driver, "library", lambda: recording)
    return recording


TYPES = ("i32", "ptr", "f32", "bytes12", "i64")
PLACES = [(0, 4), (8, 8), (16, 4), (24, 12), (40, 8)]


def test_call_hands_over_shape_and_arguments(recorder: RecordingDriver) -> None:
    recorder.parameters = PLACES
    launch = Kernel("family/kernel", 77).prepare(TYPES)
    launch(5, (7, 8, 9), (32, 2, 1), 1000, (-3, 2**64 - 5, 1.5, b"twelve bytes", -(2**40)))
    (got,) = recorder.launches
    assert (got.grid, got.block, got.shared, got.stream) == ((7, 8, 9), (32, 2, 1), 1000, 5)
    assert got.attributes == []
    assert got.bytes_at(0, 4) == struct.pack("<i", -3)
    assert got.bytes_at(1, 8) == struct.pack("<Q", 2**64 - 5)
    assert got.bytes_at(2, 4) == struct.pack("<f", 1.5)
    assert got.bytes_at(3, 12) == b"twelve bytes"
    assert got.bytes_at(4, 8) == struct.pack("<q", -(2**40))


def test_run_repeats_with_changed_arguments(recorder: RecordingDriver) -> None:
    recorder.parameters = [(0, 8), (8, 4)]
    launch = Kernel("family/kernel", 77).prepare(("ptr", "i32"))
    launch.configure((4, 1, 1), (64, 1, 1))
    launch.set(0, 0xABCDEF)
    launch.set(1, 10)
    launch.run(1)
    launch.set(1, 11)
    launch.run(2)
    first, second = recorder.launches
    assert (first.grid, first.stream, second.grid, second.stream) == ((4, 1, 1), 1, (4, 1, 1), 2)
    assert second.bytes_at(0, 8) == struct.pack("<Q", 0xABCDEF)
    assert second.bytes_at(1, 4) == struct.pack("<i", 11)


def test_cluster_and_dependent_launch_attributes(recorder: RecordingDriver) -> None:
    launch = Kernel("family/kernel", 77).prepare((), cluster=(16, 1, 1), pdl=True)
    launch(0, (16, 1, 1), (32, 1, 1), 0, ())
    assert recorder.launches[0].attributes == [(4, (16, 1, 1)), (6, (1, 0, 0))]
    assert recorder.attributes == [(14, 1)]  # more than eight blocks is not portable


def test_shared_memory_is_allowed_once(recorder: RecordingDriver) -> None:
    launch = Kernel("family/kernel", 77).prepare(())
    for size in (0, 8, 100_000, 90_000, 200_000):
        launch(0, (1, 1, 1), (32, 1, 1), size, ())
    assert recorder.attributes == [(8, 8), (8, 100_000), (8, 200_000)]


def test_failed_launch_names_kernel_shape_and_reason(recorder: RecordingDriver) -> None:
    launch = Kernel("family/kernel", 77).prepare(())
    recorder.status = 1
    with pytest.raises(CupyloraError, match=r"family/kernel with grid \(0, 1, 1\).*INVALID_VALUE"):
        launch(0, (0, 1, 1), (32, 1, 1), 0, ())


@pytest.mark.parametrize(
    "types", [("ptr", "i32"), (*TYPES, "i32"), ("i32", "i32", "f32", "bytes12", "i64")]
)
def test_parameters_must_be_the_kernels_own(
    types: tuple[str, ...], recorder: RecordingDriver
) -> None:
    recorder.parameters = PLACES
    with pytest.raises(ArgumentError, match="family/kernel does not take parameters"):
        Kernel("family/kernel", 77).prepare(types)


def test_unknown_parameter_type(recorder: RecordingDriver) -> None:
    with pytest.raises(ArgumentError, match="'int' is unknown; use one of ptr"):
        Kernel("family/kernel", 77).prepare(("int",))


def test_launch_structures_have_the_drivers_layout() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimZ, config.blockDimY = 11, 12, 13
    config.sharedMemBytes, config.hStream = 14, bindings.CUstream(0x1234567890)
    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y = 8, 2
    dependent = bindings.CUlaunchAttribute()
    dependent.id = (
        bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    )
    dependent.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute, dependent], 2
    ours = driver.LaunchConfig.from_address(int(config.getPtr()))
    assert (ours.grid[0], ours.grid[2], ours.block[1]) == (11, 12, 13)
    assert (ours.shared_bytes, ours.stream, ours.num_attributes) == (14, 0x1234567890, 2)
    assert ours.attributes[0].id == driver.CLUSTER_DIMENSION
    assert tuple(ours.attributes[0].value[:2]) == (8, 2)
    assert ours.attributes[1].id == driver.PROGRAMMATIC_STREAM_SERIALIZATION
    assert ours.attributes[1].value[0] == 1


# -- on the device --


def expected_fill(count: int, seed: int, scale: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    uniform = (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return uniform * np.float32(scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fill_kernel_equals_its_definition(dtype: str) -> None:
    import cupy
    import ml_dtypes

    numpy_type = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    count = 100_003
    out = cupy.zeros(count * numpy_type.itemsize + 16, dtype=np.uint8)
    launch = load_kernel("fill", dtype).prepare(("ptr", "u64", "u64", "f32"))
    stream = cupy.cuda.get_current_stream().ptr
    launch(stream, (13, 1, 1), (256, 1, 1), 0, (out.data.ptr, count, 41, 0.37))
    got = cupy.asnumpy(out)
    assert not got[-16:].any()
    want = expected_fill(count, 41, 0.37).astype(numpy_type)
    assert got[:-16].tobytes() == want.tobytes()
    assert abs(want.astype(np.float64)).max() > 0.36


@pytest.mark.nvrtc
def test_two_processes_that_compile_at_a_time_keep_their_own(tmp_path: Path, sources: Path) -> None:
    """Names of kernels may hold a process's number, so each entry stays with its own cubin."""
    one, two = (CubinCache(tmp_path, sources) for _ in range(2))
    compiled = compile_program(SCALE, read_sources(SCALE, sources), "sm_80")
    first = one._store("ab" * 32, compiled)
    other = replace(compiled, cubin=compiled.cubin + b"!")
    second = two._store("ab" * 32, other)
    assert first.path.read_bytes() == compiled.cubin
    assert second.path.read_bytes() == other.cubin
    found = one._read("ab" * 32, SCALE)
    assert found is not None
    assert found.path == second.path
