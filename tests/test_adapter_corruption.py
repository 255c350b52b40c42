"""Files that were damaged or made to harm: a whole adapter, or AdapterFormatError; nothing else.

Whatever the bytes are: memory stays small, the slot that was to be replaced serves on, bit for bit,
and ``inspect_adapter`` accepts exactly what a load accepts.
"""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapter_files as files
import numpy as np
import pytest
from adapter_files import write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from cupylora.adapters.factors import synthetic_adapter
from cupylora.adapters.inspection import inspect_adapter
from cupylora.adapters.loading import load_adapter
from cupylora.adapters.slots import Arena, SlotTable
from cupylora.errors import AdapterFormatError
from cupylora.shapes import LoraLimits

TOY = files.model()
MOE = TOY.moe
SINGLE, INDEX = "adapter_model.safetensors", "adapter_model.safetensors.index.json"
SHARDS = ("adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors")
MOST_MEMORY = 3 << 20
"""Bytes that judging a file of a few kilobytes may take."""


def tensors() -> files.Tensors:
    """Dense, by expert and stacked: every form in one adapter."""
    factors = files.expert_factors(MOE, 4)
    dense = files.dense(4, TOY.modules[0], "layers.0.self_attn.q_proj")
    return dense | files.per_expert(factors, 0, only=(0, 3)) | files.stacked(MOE, factors, 1)


WHOLE = save({name: np.ascontiguousarray(t) for name, t in tensors().items()})
CONFIG = json.dumps({**files.CONFIG, "peft_version": "0.21.2", "rank_pattern": {"q_proj": 4}})


def put(folder: Path, config: bytes = CONFIG.encode(), **contents: bytes) -> Path:
    """A directory of just these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(config)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def sharded(folder: Path, first: bytes, second: bytes, index: bytes) -> Path:
    return put(folder, **dict(zip((*SHARDS, INDEX), (first, second, index), strict=True)))


class Slot:
    """A table whose slot 0 serves another adapter."""

    def __init__(self) -> None:
        self.table = SlotTable(TOY, LoraLimits(1, 8), np.float32, arena=Arena(1 << 18))
        self.table.arena.buffer[:] = 0xFF
        self.table.load(0, synthetic_adapter(TOY, 3, seed=1))
        self.before = self.state()

    def state(self) -> tuple[bytes, bytes, Any]:
        table = self.table
        return table.entries.tobytes(), table.arena.buffer.tobytes(), table.slots

    def judge(self, folder: Path) -> str:
        """Try to load: "" where that went well, else why not. Everything else fails the test."""
        tracemalloc.start()
        try:
            load_adapter(folder, self.table, 0)
            why = ""
        except AdapterFormatError as error:
            why = str(error)
            assert self.state() == self.before
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MOST_MEMORY
        return why


def check(folder: Path) -> str:
    """What both ways of reading make of the adapter: "" where they accept it."""
    why = Slot().judge(folder)
    found = inspect_adapter(folder, TOY, dtype=np.float32)
    assert found.accepted == (not why), (why, found.problems)
    for problem in found.problems:
        assert problem.text.isprintable()
        assert "; " in problem.text, "says what is wrong, but not what to do"
    inspect_adapter(folder)
    return why


def test_the_whole_files_are_accepted(tmp_path: Path) -> None:
    assert check(put(tmp_path, **{SINGLE: WHOLE})) == ""
    assert check(sharded(tmp_path, *halves())) == ""


def halves() -> tuple[bytes, bytes, bytes]:
    """Two shards and their index."""
    items = sorted(tensors().items())
    parts = [dict(items[::2]), dict(items[1::2])]
    places = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
    shards = [save({n: np.ascontiguousarray(t) for n, t in part.items()}) for part in parts]
    return shards[0], shards[1], json.dumps({"weight_map": places}).encode()


Change = Callable[[bytes], bytes]


@st.composite
def changes(draw: st.DrawFn, size: int) -> Change:
    """Cut, flip, overwrite, insert, drop or repeat some of ``size`` bytes."""
    at = draw(st.integers(0, size - 1))
    kind = draw(st.sampled_from(["cut", "flip", "set", "insert", "drop", "repeat", "swap"]))
    if kind == "cut":
        return lambda data: data[:at]
    if kind == "flip":
        bit = draw(st.integers(0, 7))
        return lambda data: data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    length = draw(st.integers(1, 64))
    if kind in ("set", "insert"):
        new = draw(st.binary(min_size=1, max_size=16))
        skip = len(new) if kind == "set" else 0
        return lambda data: data[:at] + new + data[at + skip :]
    if kind == "drop":
        return lambda data: data[:at] + data[at + length :]
    if kind == "repeat":
        return lambda data: data[: at + length] + data[at:]
    other = draw(st.integers(0, size - 1))
    low, high = sorted((at, other))
    part = slice(high, high + length)
    return lambda data: data[:low] + data[part] + data[low + len(data[part]) :]


@settings(max_examples=120, deadline=None)
@given(change=changes(len(WHOLE)))
def test_damaged_weights(change: Change, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    check(put(folder, **{SINGLE: change(WHOLE)}))


HEADER = json.loads(WHOLE[8 : 8 + int.from_bytes(WHOLE[:8], "little")])
NAMES = sorted(set(HEADER) - {"__metadata__"})
NUMBERS = st.integers(-(2**63), 2**65) | st.integers(-100, 5000) | st.sampled_from([2**31, 2**62])
ODD = st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.lists(NUMBERS, max_size=3)


@st.composite
def headers(draw: st.DrawFn) -> dict[str, Any]:
    """The header with one or two of its tensors telling other things: overlaps, holes, sizes."""
    header: dict[str, Any] = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(NAMES))
        kind = draw(st.sampled_from(["offsets", "shape", "dtype", "name", "gone", "twin", "odd"]))
        entry = header.get(name)
        if not isinstance(entry, dict):
            continue
        if kind == "offsets":
            offsets = list(HEADER[name]["data_offsets"])
            offsets[draw(st.integers(0, 1))] = draw(NUMBERS)
            entry["data_offsets"] = offsets
        elif kind == "shape":
            entry["shape"] = draw(st.lists(NUMBERS, max_size=4))
        elif kind == "dtype":
            entry["dtype"] = draw(st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "I64", "x"]))
        elif kind == "name":
            end = draw(st.text(max_size=3))
            header[draw(st.sampled_from([*NAMES, f"{name}{end}", end]))] = header.pop(name)
        elif kind == "gone":
            del header[name]
        elif kind == "twin":
            header[f"{name}2"] = entry
        else:
            header[name] = draw(ODD | st.fixed_dictionaries({"shape": ODD, "data_offsets": ODD}))
    return header


@settings(max_examples=200, deadline=None)
@given(header=headers(), length=st.none() | st.integers(0, 2**64 - 1))
def test_headers_that_lie(
    header: dict[str, Any], length: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    body = WHOLE[8 + int.from_bytes(WHOLE[:8], "little") :]
    folder = tmp_path_factory.getbasetemp() / "lies"
    check(put(folder, **{SINGLE: size.to_bytes(8, "little") + text + body}))


@settings(max_examples=80, deadline=None)
@given(change=changes(len(CONFIG)))
def test_damaged_configs(change: Change, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "configs"
    check(put(folder, change(CONFIG.encode()), **{SINGLE: WHOLE}))


@settings(max_examples=80, deadline=None)
@given(which=st.integers(0, 2), data=st.data())
def test_damaged_shards(
    which: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    parts = list(halves())
    parts[which] = data.draw(changes(len(parts[which])))(parts[which])
    check(sharded(tmp_path_factory.getbasetemp() / "shards", *parts))


SHARD_NAMES = st.sampled_from(
    [*SHARDS, SINGLE, "", ".", "..", "/etc/passwd", "../x", "a/b", "adapter_config.json", "\0", "é"]
)


@settings(max_examples=60, deadline=None)
@given(places=st.dictionaries(st.sampled_from([*NAMES, "x"]), SHARD_NAMES | ODD, max_size=4))
def test_indices_that_lie(places: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second, index = halves()
    weight_map = json.loads(index)["weight_map"] | places
    text = json.dumps({"weight_map": weight_map}).encode()
    folder = sharded(tmp_path_factory.getbasetemp() / "indices", first, second, text)
    truth = weight_map == json.loads(index)["weight_map"]
    assert (check(folder) == "") == truth


def test_no_path_leads_out_of_the_directory(tmp_path: Path) -> None:
    """The index names a whole adapter that lies elsewhere; it is not even opened."""
    elsewhere = put(tmp_path / "secret", **{SINGLE: WHOLE})
    for target in (f"../secret/{SINGLE}", str(elsewhere / SINGLE), f"./../secret/{SINGLE}"):
        index = json.dumps({"weight_map": dict.fromkeys(NAMES, target)}).encode()
        folder = put(tmp_path / "upload", **{INDEX: index})
        assert "is not a file name of this directory" in check(folder)


JSON_BOMBS = {
    "lists": b'{"a":[' + b"[]," * 3_000_000 + b"[]]}",
    "objects": b'{"a":[' + b"{}," * 3_000_000 + b"{}]}",
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(2_200_000)) + b"}",
    "depth": b"[" * 1_000_000,
    "number": b'{"a":' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("kind", JSON_BOMBS)
@pytest.mark.parametrize("place", ["header", "index", "config"])
def test_json_that_would_fill_memory(kind: str, place: str, tmp_path: Path) -> None:
    text = JSON_BOMBS[kind]
    if place == "header":
        folder = put(tmp_path, **{SINGLE: len(text).to_bytes(8, "little") + text})
    elif place == "index":
        folder = put(tmp_path, **{INDEX: text})
    else:
        folder = put(tmp_path, text, **{SINGLE: WHOLE})
    start = time.perf_counter()
    tracemalloc.start()
    try:
        found = inspect_adapter(folder, TOY)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text) + MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 5
    assert not found.accepted
    assert len(found.problems[0].text) < 1000 + len(str(folder))


def test_a_header_of_very_many_tensors(tmp_path: Path) -> None:
    """Each of size 0, so that the file needs no data for them."""
    entry = '":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(f'"{i:x}{entry}' for i in range(300_000)) + "}").encode()
    folder = put(tmp_path, **{SINGLE: len(text).to_bytes(8, "little") + text})
    start = time.perf_counter()
    assert "are read" in inspect_adapter(folder).problems[0].text
    assert time.perf_counter() - start < 5


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    """Half a terabyte that takes no room on disk, in tensors that the model could have."""
    rank, wide = 512, files.model(hidden=1 << 20, intermediate=1 << 20, experts=256)
    name = "layers.0.mlp.experts.down_proj.lora_"
    size = 256 * rank * (1 << 20) * 4
    header = {
        f"{name}A": {"dtype": "F32", "shape": [256, rank, 1 << 20], "data_offsets": [0, size]},
        f"{name}B": {
            "dtype": "F32",
            "shape": [256, 1 << 20, rank],
            "data_offsets": [size, 2 * size],
        },
    }
    text = json.dumps(header).encode()
    folder = write(tmp_path, {}, r=rank)
    with (folder / SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * size)
    start = time.perf_counter()
    found = inspect_adapter(folder, wide)
    assert time.perf_counter() - start < 2
    assert not found.values_read
    assert "at most 64 GB are taken" in found.problems[0].text
