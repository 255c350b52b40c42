"""What a C host can get wrong is a status with words, never a crash: missing and odd arguments,
sizes out of range, folders, contexts and devices that do not fit."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from host_util import HOSTS, STRICT, FakeDriver, build, hollow, write_hollow

BAD_ARGUMENT, TOO_SMALL, BAD_EXPORT, NO_DEVICE, DRIVER = range(1, 6)
CHECKS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    made = FakeDriver(tmp_path_factory.mktemp("driver"), hollow())
    write_hollow(made.folder / "export", made.built)
    made.make()
    return made


def host(driver: FakeDriver, name: str, checks: Sequence[str] = CHECKS) -> Path:
    """A host program of tests/hosts, built once."""
    out = driver.folder / name
    if not out.exists():
        include = f"-I{driver.folder / 'export' / 'include'}"
        build("gcc", ("-std=c99", *STRICT, *checks, include), [HOSTS / f"{name}.c"], out)
    return out


NULLS = {
    "open-no-context": (NO_DEVICE, "no CUDA context is current in this thread"),
    "open-null": (BAD_ARGUMENT, "folder is NULL"),
    "open-nowhere": (BAD_ARGUMENT, "out is NULL"),
    "open-missing": (BAD_EXPORT, "/nowhere/sm_90a/sort.cubin cannot be read"),
    "open": (0, ""),
    "open-silent": (BAD_EXPORT, ""),
    "bytes-null": (BAD_ARGUMENT, "batch is NULL"),
    "bytes-nowhere": (BAD_ARGUMENT, "bytes is NULL"),
    "at-null": (BAD_ARGUMENT, "address is 0"),
    "at-nowhere": (BAD_ARGUMENT, "lists is NULL"),
    "at": (0, ""),
    "plan-closed": (BAD_ARGUMENT, "is NULL"),
    "plan-no-batch": (BAD_ARGUMENT, "is NULL"),
    "plan-no-op": (BAD_ARGUMENT, "op is NULL"),
    "plan-no-delta": (BAD_ARGUMENT, "is NULL"),
    "plan-empty-delta": (BAD_ARGUMENT, "delta->in_features is 0; 1 to"),
    "plan-no-activation": (BAD_ARGUMENT, "is NULL"),
    "plan-empty-activation": (BAD_ARGUMENT, "activation->hidden is 0"),
    "plan-no-finalize": (BAD_ARGUMENT, "is NULL"),
    "plan-empty-finalize": (BAD_ARGUMENT, "finalize->hidden is 0"),
    "unplanned-lists": (BAD_ARGUMENT, "op is not planned"),
    "unplanned-delta": (BAD_ARGUMENT, "op is not planned"),
    "plan-wide-delta": (BAD_ARGUMENT, "slice 0 ends behind the 8 columns of y"),
    "failed-plan": (BAD_ARGUMENT, "op is not planned"),
    "null-op": (BAD_ARGUMENT, "op is not planned"),
    "plan": (0, ""),
    "other-op": (BAD_ARGUMENT, "or for another operation"),
    "no-lists": (BAD_ARGUMENT, "lists is NULL"),
    "no-ids": (BAD_ARGUMENT, "topk_ids is 0 or not aligned to 4 bytes"),
    "odd-ids": (BAD_ARGUMENT, "topk_ids is 0 or not aligned to 4 bytes"),
    "odd-status": (BAD_ARGUMENT, "status is not aligned"),
    "silent": (BAD_ARGUMENT, ""),
    "odd-tiles": (BAD_ARGUMENT, "address 8 of lists is 0 or not aligned to 16 bytes"),
    "null-list": (BAD_ARGUMENT, "address 6 of lists is 0"),
    "pack-null": (BAD_ARGUMENT, "file or pack is NULL"),
    "pack-nowhere": (BAD_ARGUMENT, "file or pack is NULL"),
    "entry-none": (BAD_ARGUMENT, "adapter is 0; 0 to -1 is needed"),
    "entry-null": (BAD_ARGUMENT, "pack or record is NULL"),
}


def test_what_is_missing_is_told(driver: FakeDriver) -> None:
    done = driver.run([host(driver, "host_nulls"), driver.folder / "export"])
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, find = done.stdout.splitlines()
    assert find == "find -1"
    assert {line.split(" ")[0] for line in lines} == NULLS.keys()
    for line in lines:
        name, status, text = line.split(" ", 2)
        wanted, words = NULLS[name]
        assert int(status) == wanted, line
        assert words in text, line
        assert text or not words
    assert not driver.log.exists()


LISTS = [256 * i for i in range(1, 10)]
BATCH = {
    "tokens": 600,
    "top_k": 8,
    "experts": 128,
    "start_expert": 0,
    "max_loras": 16,
    "max_active": 0,
    "max_rank": 16,
    "tile_rows": 0,
    "k_major": 0,
}
DELTA = {
    "dtype": 0,
    "in_features": 64,
    "max_rank": 16,
    "y_width": 96,
    "x_rows": 0,
    "y_rows": 1,
    "plan_settled": 0,
    "kernel": 0,
}
ADDRESSES = {"x": 4096, "y": 4096, "entries": 4096, "workspace": 4096}
REST = {"bytes": 1 << 40, "status": 4096}
SLICES = [(48, 0, 1), (48, 48, 1)]


def delta_line(slices: Sequence[tuple[int, ...]] = SLICES, **changes: int) -> str:
    """A delta's line for host_calls, with some numbers changed. max_rank is the delta's where it
    is called ``delta_max_rank``, the batch's as ``batch_max_rank``."""
    given = {**ADDRESSES, **REST}
    groups = {"batch_": dict(BATCH), "delta_": dict(DELTA), "": given}
    for key, value in changes.items():
        for prefix, group in groups.items():
            name = key.removeprefix(prefix)
            if name in group and (key.startswith(prefix) or key != "max_rank"):
                group[name] = value
    batch, delta, _ = groups.values()
    parts = [len(slices), *(n for part in slices[:8] for n in part)]
    numbers = [*batch.values(), *LISTS, *delta.values(), *parts, *given.values()]
    return " ".join(map(str, ["delta", *numbers]))


FAULTS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 0, ""),
    ({"tokens": -1}, BAD_ARGUMENT, "batch->tokens is -1; 0 to"),
    ({"top_k": 0}, BAD_ARGUMENT, "batch->top_k is 0; 1 to"),
    ({"tokens": 2**31 - 1, "top_k": 2**31 - 1}, BAD_ARGUMENT, "the batch has over 2147481600"),
    ({"experts": 0}, BAD_ARGUMENT, "batch->experts is 0; 1 to 2048"),
    ({"experts": 2049}, BAD_ARGUMENT, "batch->experts is 2049"),
    ({"start_expert": -3}, BAD_ARGUMENT, "batch->start_expert is -3"),
    ({"max_loras": 0}, BAD_ARGUMENT, "batch->max_loras is 0; 1 to 4096"),
    ({"max_loras": 4097}, BAD_ARGUMENT, "batch->max_loras is 4097"),
    ({"max_active": -1}, BAD_ARGUMENT, "batch->max_active is -1"),
    ({"batch_max_rank": 513}, BAD_ARGUMENT, "batch->max_rank is 513; 1 to 512"),
    ({"tile_rows": 7}, BAD_ARGUMENT, "batch->tile_rows is 7; 8, 16, 32, 64 or 0"),
    ({"k_major": 2}, BAD_ARGUMENT, "batch->k_major is 2; 0 to 1"),
    ({"dtype": 3}, BAD_ARGUMENT, "dtype is 3; 0 to 2"),
    ({"in_features": 0}, BAD_ARGUMENT, "delta->in_features is 0"),
    ({"delta_max_rank": 0}, BAD_ARGUMENT, "delta->max_rank is 0; 1 to 512"),
    ({"delta_max_rank": 513}, BAD_ARGUMENT, "delta->max_rank is 513"),
    ({"in_features": 2**31 - 1}, BAD_ARGUMENT, "is more than the kernels address"),
    ({"x_rows": 3}, BAD_ARGUMENT, "delta->x_rows is 3; 0 to 2"),
    ({"y_rows": 0}, BAD_ARGUMENT, "delta->y_rows is 0; 1 to 2"),
    ({"kernel": 4}, BAD_ARGUMENT, "delta->kernel is 4; 0 to 3"),
    (
        {"kernel": 2, "tile_rows": 64},
        BAD_ARGUMENT,
        "cannot serve bfloat16, tiles of 64",
    ),
    ({"kernel": 3, "dtype": 2}, BAD_ARGUMENT, "this kernel cannot serve float32"),
    ({"plan_settled": 2}, BAD_ARGUMENT, "delta->plan_settled is 2"),
    ({"slices": []}, BAD_ARGUMENT, "delta->num_slices is 0; 1 to 8"),
    ({"slices": [(1, 0, 1)] * 9}, BAD_ARGUMENT, "delta->num_slices is 9"),
    ({"slices": [(0, 0, 1)]}, BAD_ARGUMENT, r"delta->slices\[i\].out_features is 0"),
    ({"slices": [(96, 1, 1)]}, BAD_ARGUMENT, "slice 0 ends behind the 96 columns of y"),
    ({"slices": [(49, 0, 2)]}, BAD_ARGUMENT, "slice 0 ends behind the 96 columns of y"),
    ({"slices": [(50, 0, 1), (48, 48, 1)]}, BAD_ARGUMENT, "slices 0 and 1 of y share columns"),
    ({"slices": [(48, 0, 2), (48, 0, 2)]}, BAD_ARGUMENT, "slices 0 and 1 of y share columns"),
    ({"slices": [(48, 0, 2), (48, 1, 2)]}, 0, ""),
    ({"x": 0}, BAD_ARGUMENT, "x is 0 or not aligned to 2 bytes"),
    ({"y": 4097}, BAD_ARGUMENT, "y is 0 or not aligned to 2 bytes"),
    ({"x": 4098, "dtype": 2}, BAD_ARGUMENT, "x is 0 or not aligned to 4 bytes"),
    ({"entries": 4104}, BAD_ARGUMENT, "entries is 0 or not aligned to 16 bytes"),
    ({"kernel": 1, "workspace": 0}, BAD_ARGUMENT, "workspace is 0 or not aligned to 16 bytes"),
    ({"kernel": 1, "bytes": 100}, TOO_SMALL, r"the workspace has 100 bytes; \d+ are needed"),
    ({"status": 3}, BAD_ARGUMENT, "status is not aligned to 4 bytes"),
    ({"tokens": 0}, 0, ""),
]


def test_sizes_and_addresses_out_of_range_are_refused(driver: FakeDriver) -> None:
    lines = [delta_line(**changes) for changes, _, _ in FAULTS]
    program = host(driver, "host_calls")
    done = driver.run([program, driver.folder / "export"], "\n".join(lines))
    assert done.returncode == 0, done.stdout + done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == len(FAULTS)
    for answer, (changes, status, words) in zip(answers, FAULTS, strict=True):
        got, _, text = answer.split(" ", 2)
        assert (int(got), bool(re.search(words, text))) == (status, True), (changes, answer)
        assert bool(text) == (status != 0), answer
    # What was refused has launched nothing, and of no tokens there is nothing to do.
    good = [changes for changes, status, _ in FAULTS if status == 0 and changes != {"tokens": 0}]
    launches = driver.launches()
    driver.log.unlink()
    driver.run([program, driver.folder / "export"], "\n".join(delta_line(**one) for one in good))
    assert len(good) == 2
    assert driver.launches() == launches
    driver.log.unlink()


@pytest.mark.parametrize("kernel", range(4))
@pytest.mark.parametrize("dtype", [0, 2])
def test_the_largest_sizes_are_reckoned_without_overflow(
    dtype: int, kernel: int, driver: FakeDriver
) -> None:
    """Of y alone there are 2^64 bytes, so only the arithmetic can be tried; UBSan watches it."""
    most = 2**31 - 1
    sizes = {"tokens": 2147481600, "top_k": 1, "in_features": 65536, "delta_max_rank": 1}
    line = delta_line([(most, 0, 1)], **sizes, y_width=most, dtype=dtype, kernel=kernel, bytes=0)
    done = driver.run([host(driver, "host_calls"), driver.folder / "export"], line)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split(" ")[0]) in {TOO_SMALL, BAD_ARGUMENT}, done.stdout


def test_the_file_that_is_missing_is_named_whatever_its_folder(
    driver: FakeDriver, tmp_path: Path
) -> None:
    folder = tmp_path / ("deep" * 30)
    done = driver.run([host(driver, "host_calls"), folder])
    assert done.stdout.startswith(f"{BAD_EXPORT} 0 ")
    assert "/sm_90a/" in done.stdout
    assert ".cubin cannot be read; cubins and headers have to be of one export" in done.stdout


@pytest.mark.parametrize(
    ("capability", "text"),
    [
        ((7, 5), "compute capability 7.5 is not supported; 8.x, 9.x, 10.x or 12.x is"),
        ((10, 0), "the export has no kernels for sm_100; export with --arch sm_100"),
    ],
)
def test_a_device_that_was_not_exported_for_is_named(
    capability: tuple[int, int], text: str, driver: FakeDriver, tmp_path: Path
) -> None:
    other = FakeDriver(tmp_path, driver.built, capability=capability)
    done = other.run([host(driver, "host_calls"), driver.folder / "export"])
    assert done.returncode == 1
    assert done.stdout == f"{NO_DEVICE} 0 {text}\n"


def test_cubins_of_another_export_are_refused(driver: FakeDriver, tmp_path: Path) -> None:
    other = write_hollow(tmp_path / "other", driver.built)
    program = host(driver, "host_calls")
    assert driver.run([program, other]).returncode == 0
    path = other / "sm_90a" / "rows.cubin"
    for data in (path.read_bytes()[:-1], path.read_bytes() + b"x", b"\x7fELFrowt"):
        path.write_bytes(data)
        done = driver.run([program, other])
        assert done.returncode == 1
        assert done.stdout.startswith(f"{BAD_EXPORT} 0 ")
        assert "is not what cupylora_table.h names; cubins and headers have to be" in done.stdout


def test_what_the_driver_refuses_is_passed_on(driver: FakeDriver, tmp_path: Path) -> None:
    less = [item for item in driver.built if item.program.name != "plan"]
    other = FakeDriver(tmp_path, less)
    done = other.run([host(driver, "host_calls"), driver.folder / "export"])
    assert done.returncode == 1
    text = f"{DRIVER} 0 plan/rank_8 failed: CUDA_ERROR_NOT_FOUND (status 500)\n"
    assert done.stdout == text


def test_without_a_driver_it_says_so(driver: FakeDriver, tmp_path: Path) -> None:
    program = tmp_path / "open"
    source = tmp_path / "open.c"
    source.write_text(
        "#define CUPYLORA_IMPLEMENTATION\n"
        '#include "cupylora.h"\n'
        "int main(void) {\n"
        "  cupylora* c;\n"
        "  cupylora_error error;\n"
        '  cupylora_open(".", &c, &error);\n'
        "  puts(error.text);\n"
        "  return (int)error.status;\n"
        "}\n"
    )
    include = f"-I{driver.folder / 'export' / 'include'}"
    build("gcc", ("-std=c99", *STRICT, *CHECKS, include), [source], program)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
        assert done.returncode == NO_DEVICE, done.stderr
        assert done.stdout == "libcuda.so.1 cannot be loaded\n"
    else:
        pytest.skip("there is a driver")


def test_threads_share_what_was_opened_and_planned(driver: FakeDriver, tmp_path: Path) -> None:
    own = FakeDriver(tmp_path, driver.built)
    own.make()
    include = (f"-I{driver.folder / 'export' / 'include'}", f"-L{tmp_path}", "-l:libcuda.so.1")
    flags = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", *STRICT)
    source = HOSTS / "host_threads.cpp"
    program = build("g++", flags, [source], tmp_path / "host_threads", include)
    done = own.run([program, driver.folder / "export"])
    assert done.returncode == 0, done.stdout + done.stderr
    launches = own.launches()
    assert len(launches) == 6 * 50 * 3
    assert len({launch[0] for launch in launches}) == 3
    by_bytes = Counter((kernel, args) for kernel, _, args in launches)
    # Of each thread its own arguments, whole, as often as it enqueued them.
    assert sorted(by_bytes.values()) == [50] * 18


def test_rows_that_cannot_be_counted_are_refused(driver: FakeDriver) -> None:
    batch = {**BATCH, "tokens": 2**28, "top_k": 4, "experts": 8}
    sizes = [0, 0, 1, 0, 200_000, 0, 1, 4096, 0, 4096]
    line = " ".join(map(str, ["activation", *batch.values(), *LISTS, *sizes]))
    done = driver.run([host(driver, "host_calls"), driver.folder / "export"], line)
    text = "1073741824 rows of 200000 columns are more than the kernels count"
    assert done.stdout == f"{BAD_ARGUMENT} 0 {text}\n"
