"""Packs: what Python and C read is what loading the directories gives; damage is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from host_util import HOSTS, STRICT, build, hollow, write_hollow
from safetensors import safe_open

from cupylora import Arena, LoraLimits, SlotTable, load_adapter, load_model, read_pack, write_pack
from cupylora.adapters import pack_file
from cupylora.adapters.pack_file import is_pack
from cupylora.adapters.packed import pack_adapter
from cupylora.adapters.peft import read_adapter
from cupylora.cli import main
from cupylora.dtypes import DTYPES
from cupylora.errors import (
    AdapterFormatError,
    ArgumentError,
    CapacityError,
    CupyloraError,
)
from cupylora.resources import data_dir
from cupylora.worklists import PACKED, SLOT_ENTRY

MODEL = load_model("tiny-moe")
FOLDERS = {
    "contracts": "demo/contracts-r8",
    "legal": "demo/legal-stacked-r6",
    "support": "demo/support-rslora-r4",
    "down": "adapters/tiny-down-only",
}
HEAD = 16


def adapters() -> list[Any]:
    return [read_adapter(data_dir() / f, MODEL, name=name) for name, f in FOLDERS.items()]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "all.pack"
    write_pack(path, adapters(), MODEL, dtype=request.param)
    return path


def empty_table(dtype: Any) -> SlotTable:
    arena = Arena(1 << 20)
    arena.buffer[...] = 0xAB
    return SlotTable(MODEL, LoraLimits(max_loras=4, max_rank=16), dtype, arena=arena)


def relative(table: SlotTable) -> bytes:
    """Entries with addresses from the arena's start."""
    records = np.array(table.entries).view(SLOT_ENTRY).reshape(table.entries.shape[:2])
    for pointer in ("a_ptr", "b_ptr"):
        records[pointer][records["rank"] != 0] -= np.uint64(table.arena.address)
    return records.tobytes()


def test_a_table_loaded_from_a_pack_is_one_loaded_from_directories(pack: Path) -> None:
    found = read_pack(pack, MODEL)
    by_pack, by_folder = empty_table(found.dtype), empty_table(found.dtype)
    for slot, (packed, folder) in enumerate(zip(found.adapters, FOLDERS.values(), strict=True)):
        by_pack.place(slot, by_pack.store(packed))
        load_adapter(data_dir() / folder, by_folder, slot)
    assert relative(by_pack) == relative(by_folder)
    assert by_pack.arena.used_bytes == by_folder.arena.used_bytes == len(found.blocks)
    np.testing.assert_array_equal(by_pack.arena.buffer, by_folder.arena.buffer)


def test_a_packed_adapter_comes_back_as_it_was(pack: Path) -> None:
    found = read_pack(pack)
    limits = LoraLimits(max_rank=16)
    for packed, adapter in zip(found.adapters, adapters(), strict=True):
        want = pack_adapter(adapter, MODEL, limits, found.dtype, PACKED)
        assert packed.same_content(want)
        one, two = packed.layout, want.layout
        assert (one.name, one.max_rank, one.source) == (two.name, two.max_rank, two.source)


def test_the_safetensors_library_reads_a_pack(pack: Path) -> None:
    found = read_pack(pack)
    with safe_open(pack, "np") as file:
        assert set(file.keys()) == {"head", "entries", "names", "block_sizes", "blocks"}
        blocks = file.get_tensor("blocks")
        assert file.metadata()["format"] == "cupylora-pack"
    np.testing.assert_array_equal(blocks, found.blocks)
    start = 8 + struct.unpack("<Q", pack.read_bytes()[:8])[0]
    assert start % 256 == 0


# --- C


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C program that opens packs, with the checks that the compiler can add."""
    folder = tmp_path_factory.mktemp("reader")
    export = write_hollow(folder / "export", hollow())
    checks = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    flags = ("-std=c99", *STRICT, *checks, f"-I{export / 'include'}")
    return build("gcc", flags, [HOSTS / "host_pack.c"], folder / "host_pack")


def run_reader(reader: Path, path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(reader), str(path), "0x7f0000000000"]
    options: dict[str, Any] = {"text": True, "errors": "replace", "check": False}
    return subprocess.run(command, capture_output=True, **options)


def test_c_makes_the_rows_of_a_table(pack: Path, reader: Path) -> None:
    found = read_pack(pack)
    head, *lines = run_reader(reader, pack).stdout.splitlines()
    kind = list(DTYPES.values()).index(found.dtype)
    rows = MODEL.layers * len(MODEL.modules)
    assert head == f"4 {rows} 8 {kind} {len(found.blocks)} 1"
    begin = 0x7F0000000000
    for line, adapter in zip(lines, found.layouts, strict=True):
        name, data = line.split(" ")
        assert name == adapter.name
        starts = np.cumsum([begin, *adapter.sizes]).astype(np.uint64)
        want = adapter.records.copy()
        used = want["rank"] != 0
        for pointer in ("a_ptr", "b_ptr"):
            want[pointer][used] = starts[adapter.records[pointer][used].astype(int)]
        want["generation"][used] = 7
        assert bytes.fromhex(data) == want.tobytes()
        begin += adapter.nbytes


@pytest.mark.parametrize("pack", ["bfloat16"], indirect=True)
def test_damaged_packs_are_refused_by_both(pack: Path, reader: Path, tmp_path: Path) -> None:
    whole = pack.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    pick = random.Random(3)
    damaged = [whole[:n] for n in (0, 7, 8, 100, start, start + 8, start + 300, len(whole) - 1)]
    damaged += [b"\xff" * 8 + whole[8:], whole + b"\0"]
    for value in (-1, 1 << 62, 3, 255):
        for field in range(HEAD):
            at = start + 8 * field
            damaged.append(whole[:at] + struct.pack("<q", value) + whole[at + 8 :])
    for _ in range(60):
        at = pick.randrange(8, start + 3000)
        damaged.append(whole[:at] + bytes([whole[at] ^ 1 << pick.randrange(8)]) + whole[at + 1 :])
    path, refused_by_python, refused_by_c = tmp_path / "damaged.pack", 0, 0
    for data in damaged:
        path.write_bytes(data)
        try:
            read_pack(path, MODEL)
        except (AdapterFormatError, ArgumentError):
            refused_by_python += 1
        done = run_reader(reader, path)
        assert done.returncode in (0, 1), done.stderr
        refused_by_c += done.returncode
    assert refused_by_python > 100
    assert refused_by_c > 40


# --- Refusals


def rewritten(pack: Path, change: Any) -> bytes:
    """The pack with its records changed, and a digest that agrees."""
    data = bytearray(pack.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    begin, end = header["entries"]["data_offsets"]
    start = 8 + length
    count = (end - begin) // 48
    records = np.frombuffer(bytes(data[start + begin :][: count * 48]), SLOT_ENTRY).copy()
    change(records[: len(MODEL.modules) * MODEL.layers])
    data[start + begin : start + begin + count * 48] = records.tobytes()
    old = header["__metadata__"]["sha256"].encode()
    new = hashlib.sha256(data[start + begin :]).hexdigest().encode()
    data[8:start] = data[8:start].replace(old, new)
    return bytes(data)


CHANGES: dict[str, Any] = {
    "nothing": lambda r: None,
    "a larger rank": lambda r: r["rank"].__setitem__(0, 64),
    "a negative rank": lambda r: r["rank"].__setitem__(0, -8),
    "an address between blocks": lambda r: r["a_ptr"].__setitem__(0, 256 * 3 + 16),
    "an address behind all": lambda r: r["b_ptr"].__setitem__(0, 1 << 40),
    "a stride of its own": lambda r: r["a_expert_stride"].__setitem__(4, 16),
    "another block": lambda r: r["a_ptr"].__setitem__(4, r["a_ptr"][0]),
    "a scale that is none": lambda r: r["scale"].__setitem__(0, np.nan),
    "another layout": lambda r: r["a_layout"].__setitem__(0, 0),
}


@pytest.mark.parametrize("pack", ["bfloat16"], indirect=True)
@pytest.mark.parametrize("name", CHANGES)
def test_records_that_would_lead_a_kernel_astray_are_refused(
    name: str, pack: Path, tmp_path: Path
) -> None:
    (tmp_path / "changed").write_bytes(rewritten(pack, CHANGES[name]))
    if name == "nothing":
        assert len(read_pack(tmp_path / "changed", MODEL).adapters) == 4
        return
    with pytest.raises(AdapterFormatError, match="an entry"):
        read_pack(tmp_path / "changed", MODEL)


@pytest.mark.parametrize("value", ["[]", "{", '{"dtype": 3}', "[" * 100_000])
def test_metadata_of_another_form_are_refused(value: str, pack: Path, tmp_path: Path) -> None:
    data = pack.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["content"] = value
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (tmp_path / "changed").write_bytes(whole)
    with pytest.raises(AdapterFormatError, match="is no pack that can be read"):
        read_pack(tmp_path / "changed")


def test_content_that_is_not_its_digests_is_refused(pack: Path, tmp_path: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[-300] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with pytest.raises(AdapterFormatError, match="content is not what its digest says"):
        read_pack(tmp_path / "flipped")


@pytest.mark.parametrize("name", ["", "x" * 65, "nul\0"])
def test_names_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    adapter = dataclasses.replace(adapters()[0], name=name)
    with pytest.raises(ArgumentError, match="a name of 1 to 64 bytes is needed"):
        write_pack(tmp_path / "pack", [adapter], MODEL)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_packed_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    first = adapters()[0]
    write_pack(path, [first], MODEL)
    before = path.read_bytes()
    for bad, most, error in (
        ([], 16, ArgumentError),
        ([first, first], 16, ArgumentError),
        ([first], 4, CapacityError),
    ):
        with pytest.raises(error):
            write_pack(path, bad, MODEL, max_rank=most)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["pack"]
    with pytest.raises(CapacityError, match="cannot be written"):
        write_pack(tmp_path / "no" / "pack", [first], MODEL)


def test_an_interrupted_pack_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pack_file, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_pack(tmp_path / "pack", adapters(), MODEL)
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused(pack: Path) -> None:
    with pytest.raises(ArgumentError, match="its modules are not those of mixtral-8x7b"):
        read_pack(pack, load_model("mixtral-8x7b"))
    table = SlotTable(MODEL, LoraLimits(max_rank=16), "float16", arena=Arena(1 << 20))
    with pytest.raises(CupyloraError, match="pack it for this table"):
        table.store(read_pack(pack).adapters[0])


# --- The command line


def test_pack_and_inspect_tell_what_is_in_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path, record = tmp_path / "all.pack", tmp_path / "record.json"
    folders = [f"{name}={data_dir() / folder}" for name, folder in FOLDERS.items()]
    command = ["pack", *folders, "--model", "tiny-moe", "--out", str(path)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert is_pack(path)
    assert not is_pack(data_dir() / FOLDERS["legal"] / "adapter_model.safetensors")
    shown = CliRunner().invoke(main, ["inspect", str(path), "--json", str(record)])
    assert shown.exit_code == 0
    assert shown.output.startswith(done.output)
    assert "ACCEPTED" in shown.output
    found = json.loads(record.read_text())
    assert [a["name"] for a in found["adapters"]] == list(FOLDERS)
    assert found["bytes"] == sum(a["bytes"] for a in found["adapters"])
    quiet = CliRunner().invoke(main, ["inspect", str(path), "--json", "-"])
    assert json.loads(quiet.output) == found
    wrong = CliRunner().invoke(main, ["inspect", str(path), "--model", "mixtral-8x7b"])
    assert wrong.exit_code == 1
    assert "pack the adapters for this model" in wrong.output
    for limits, words in (
        (("--max-rank", "2"), "at most 2 is taken"),
        (("--max-bytes", "1"), "at most 1 B are taken"),
        (("--dtype", "float32"), "is packed as bfloat16, not float32"),
    ):
        refused = CliRunner().invoke(main, ["inspect", str(path), *limits])
        assert refused.exit_code == 1
        assert f"REFUSED: has an adapter of rank {8}" in refused.output or words in refused.output
    path.write_bytes(path.read_bytes()[:-1])
    damaged = CliRunner().invoke(main, ["inspect", str(path), "--json", "-"])
    assert damaged.exit_code == 1
    assert not json.loads(damaged.output)["accepted"]


def test_pack_refuses_what_is_no_adapter(tmp_path: Path) -> None:
    command = ["pack", str(tmp_path), "--model", "tiny-moe", "--out", str(tmp_path / "x")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_what_is_there_and_is_no_pack_is_left_alone(tmp_path: Path) -> None:
    first = adapters()[0]
    other = tmp_path / "adapter_model.safetensors"
    other.write_bytes(b"mine")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (other, fifo, tmp_path):
        with pytest.raises(ArgumentError, match="is there and is no pack"):
            write_pack(path, [first], MODEL)
    assert other.read_bytes() == b"mine"
    assert fifo.is_fifo()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    write_pack(link, [first], MODEL)
    assert link.is_symlink()
    assert is_pack(tmp_path / "real")


def test_a_file_is_read_whole_however_little_a_call_gives(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the system gives at most 2 GiB."""

    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1000]], at))
    assert len(read_pack(pack, MODEL).adapters) == len(FOLDERS)


def test_a_table_of_another_model_refuses_a_packed_adapter(pack: Path) -> None:
    """As many rows, but other widths: kernels would read behind the blocks."""
    wide = dataclasses.replace(
        MODEL,
        dense_groups=tuple(
            tuple(dataclasses.replace(m, in_features=1024 * m.in_features) for m in group)
            for group in MODEL.dense_groups
        ),
    )
    found = read_pack(pack)
    table = SlotTable(wide, LoraLimits(2, 16), found.dtype, arena=Arena(1 << 20))
    with pytest.raises(ArgumentError, match=r"is not of model tiny-moe .*larger than its block"):
        table.store(found.adapters[0])
    assert table.arena.used_bytes == 0


def test_values_that_are_not_finite_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    found = write_pack(path, adapters()[:1], MODEL)
    assert found.is_finite()
    blocks = np.array(found.blocks)
    blocks[:2] = (0x80, 0x7F)  # an infinity of bfloat16
    assert not dataclasses.replace(found, blocks=blocks).is_finite()


@pytest.mark.parametrize("name", ["", "x" * 65, "a\0b", "\udcff"])
def test_names_that_a_pack_cannot_hold(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="1 to 64 bytes"):
        write_pack(tmp_path / "pack", [dataclasses.replace(adapters()[0], name=name)], MODEL)


def test_c_finds_names_whole(reader: Path, tmp_path: Path) -> None:
    path = tmp_path / "pack"
    names = ["n" * 64, "n" * 63, "n"]
    write_pack(path, [dataclasses.replace(adapters()[0], name=name) for name in names], MODEL)
    _, *lines = run_reader(reader, path).stdout.splitlines()
    assert [line.split(" ")[0] for line in lines] == names
