"""Packed adapters in one file that any host maps and copies: `cupylora pack` and back.

In: adapters of one model, packed (``packed``). Out: a safetensors file, whose tensors lie in this
order, each on a multiple of 256 bytes from the start of the data:

    head         int64 [32]: what C reads in place of the header's JSON (cupylora.h, Packs)
    entries      uint8: records of 48 bytes [adapters, table rows], their addresses relative to
                 ``blocks``; filled up with zeros
    names        uint8: 64 bytes an adapter, UTF-8, filled up with zeros
    block_sizes  int64: of each adapter's blocks, one adapter after the other; filled up with zeros
    blocks       uint8: all blocks in device layout: one copy to an address aligned to 256

The data begin on a multiple of 256 of the file, too. Metadata name the model's modules, dtype and
layout, and hold a digest of all but the head.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cupylora import __version__
from cupylora.adapters.dtypes import not_finite
from cupylora.adapters.factors import Adapter
from cupylora.adapters.packed import (
    BLOCK_ALIGNMENT,
    AdapterLayout,
    PackedAdapter,
    layout_of,
    misfit,
    modules_of,
)
from cupylora.checks import check_type
from cupylora.dtypes import DTYPES, dtype_name, resolve_dtype
from cupylora.errors import AdapterFormatError, ArgumentError, CapacityError
from cupylora.files import fill_from, is_there, named, open_regular, parse_json, reason
from cupylora.host_memory import HostMemory
from cupylora.shapes import MAX_RANK, LoraLimits, ModelShape
from cupylora.text import byte_size, quoted, shown
from cupylora.worklists import PACKED, SLOT_ENTRY, SLOT_ENTRY_BYTES

__all__ = ["NAME_BYTES", "Pack", "is_pack", "read_pack", "write_pack"]

NAME_BYTES = 64
"""Of an adapter's name in a pack, UTF-8."""

_MAGIC, _VERSION, _FORMAT = int.from_bytes(b"CPLAPACK", "little"), 1, "cupylora-pack"
_HEAD = 32
_FIELDS = (
    *("magic", "version", "adapters", "table_rows", "entries_at", "names_at"),
    *("blocks_at", "blocks_bytes", "dtype", "max_rank", "end"),
)
_TENSORS = ("head", "entries", "names", "block_sizes", "blocks")
_LARGEST_HEADER = 16 << 20
_CHECKED = 1 << 22

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Pack:
    """What a pack holds. model: name of the model it was made for; layers and modules: as that had
    them (name, in, out, experts). blocks: of all ``layouts``, one adapter after the other."""

    path: Path
    model: str
    layers: int
    modules: tuple[tuple[str, int, int, int], ...]
    dtype: np.dtype[Any]
    layouts: tuple[AdapterLayout, ...]
    blocks: Bytes

    @property
    def adapters(self) -> tuple[PackedAdapter, ...]:
        """Each adapter as ``pack_adapter`` gives it, for ``SlotTable.store``."""
        ends = np.cumsum([layout.nbytes for layout in self.layouts])
        parts = np.split(self.blocks, ends[:-1])
        return tuple(map(PackedAdapter, self.layouts, map(HostMemory.of, parts)))

    def is_finite(self) -> bool:
        """Whether no value of any adapter is an infinity or NaN."""
        values = self.blocks.view(self.dtype)
        steps = range(0, len(values), _CHECKED)
        return not any(not_finite(values[at : at + _CHECKED]).any() for at in steps)


def write_pack(
    path: str | Path,
    adapters: Iterable[Adapter],
    model: ModelShape,
    *,
    dtype: Any = "bfloat16",
    max_rank: int = MAX_RANK,
) -> Pack:
    """Write ``adapters``, for ``model``, to the file ``path``, whole or not at all.

    Adapters are taken one at a time. Returns the pack, its blocks mapped. Raises as
    ``pack_adapter`` does, ArgumentError for none, for two of one name and for a name longer than 64
    bytes, CapacityError where the file cannot be written.
    """
    check_type("model", model, ModelShape)
    limits = LoraLimits(max_rank=max_rank)
    target, kind = Path(os.path.realpath(path)), resolve_dtype(dtype)
    if is_there(target) and not is_pack(target):
        raise ArgumentError(
            f"{named(target)} is there and is no pack; name another file, or remove it yourself"
        )
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as room:
            place = Path(room) / "blocks"
            with place.open("wb") as file:
                made = _pack_all(adapters, model, limits, kind, file)
            blocks = _mapped(place)
            whole = Path(room) / "pack"
            parts = (target, model.name, model.layers, modules_of(model), kind)
            pack = Pack(*parts, tuple(made), blocks)
            _write(whole, pack)
            os.replace(whole, target)
    except OSError as error:
        raise CapacityError(f"{named(target)} cannot be written: {reason(error)}") from error
    return pack


def _mapped(path: Path) -> Bytes:
    """A file's bytes; they stay after its name has gone."""
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def is_pack(path: Path) -> bool:
    """Whether the file at ``path`` says of itself that it is a pack."""
    try:
        with open_regular(path) as file:
            return _metadata(_header(file)[0]).get("format") == _FORMAT
    except (OSError, ValueError):
        return False


def read_pack(path: str | Path, model: ModelShape | None = None) -> Pack:
    """Read a pack; each of its adapters is what ``pack_adapter`` gave, for ``SlotTable.store``.

    model: checked to have the modules that the pack was made for. Raises AdapterFormatError for a
    file that is no pack or damaged, ArgumentError for another model.
    """
    where = Path(path)
    try:
        with open_regular(where) as file:
            pack = _read(where, file)
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else f"lacks {error}"
        raise AdapterFormatError(
            f"{named(where)} is no pack that can be read ({why}); make it again with `cupylora "
            "pack`"
        ) from error
    if model is not None and (pack.layers, pack.modules) != (model.layers, modules_of(model)):
        raise ArgumentError(
            f"pack {named(where)} was made for {shown(pack.model)} with {pack.layers} layers; its "
            f"modules are not those of {shown(model.name)}: pack the adapters for this model"
        )
    return pack


def _pack_all(
    adapters: Iterable[Adapter],
    model: ModelShape,
    limits: LoraLimits,
    dtype: np.dtype[Any],
    file: IO[bytes],
) -> list[AdapterLayout]:
    """The layout of each adapter, whose blocks are written to ``file``."""
    made: list[AdapterLayout] = []
    for adapter in adapters:
        name = adapter.name.encode(errors="replace")
        plain = name.decode() == adapter.name
        if not plain or not 0 < len(name) <= NAME_BYTES or b"\0" in name:
            raise ArgumentError(
                f"adapter {shown(adapter.name)}: a name of 1 to {NAME_BYTES} bytes is needed; "
                "give it one with NAME=DIR"
            )
        if any(other.name == adapter.name for other in made):
            raise ArgumentError(f"two adapters are called {shown(adapter.name)}; rename one")
        layout, blocks = layout_of(adapter, model, limits, dtype, PACKED)
        for block, size in zip(blocks, layout.sizes, strict=True):
            data = block.values(dtype, PACKED)
            file.write(data.data)
            file.write(bytes(size - data.size))
        made.append(layout)
    if not made:
        raise ArgumentError("there is no adapter to pack; name at least one")
    return made


def _write(path: Path, pack: Pack) -> None:
    small = (bytes(_HEAD * 8), _entries(pack), _names(pack), _sizes(pack))
    parts = [*(memoryview(part) for part in small), pack.blocks.data]
    digest = hashlib.sha256()
    places = [0]
    for part in parts:
        places.append(places[-1] + len(part))
    for part in parts[1:]:
        digest.update(part)
    parts[0] = memoryview(_head(pack, places))
    with path.open("wb") as file:
        file.write(_json_header(pack, places, digest.hexdigest()))
        for part in parts:
            file.write(part)


def _head(pack: Pack, places: Sequence[int]) -> bytes:
    """The head of a pack whose tensors begin at ``places``, the last of which is their end."""
    values = {
        "magic": _MAGIC,
        "version": _VERSION,
        "adapters": len(pack.layouts),
        "table_rows": len(pack.layouts[0].records),
        "entries_at": places[1],
        "names_at": places[2],
        "blocks_at": places[4],
        "blocks_bytes": len(pack.blocks),
        "dtype": list(DTYPES).index(dtype_name(pack.dtype)),
        "max_rank": max(adapter.max_rank for adapter in pack.layouts),
        "end": places[5],
    }
    head = np.zeros(_HEAD, np.int64)
    head[: len(_FIELDS)] = [values[name] for name in _FIELDS]
    return head.tobytes()


def _json_header(pack: Pack, places: Sequence[int], digest: str) -> bytes:
    """The safetensors header, filled up so that the data begin on a multiple of 256."""
    kinds = {"head": ("I64", 8), "block_sizes": ("I64", 8)}
    header: dict[str, Any] = {"__metadata__": _describe(pack, digest)}
    for name, begin, end in zip(_TENSORS, places, places[1:], strict=False):
        kind, itemsize = kinds.get(name, ("U8", 1))
        shape = [(end - begin) // itemsize]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % BLOCK_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _describe(pack: Pack, digest: str) -> dict[str, str]:
    adapters = [
        {"name": a.name, "max_rank": a.max_rank, "blocks": len(a.sizes), "source": a.source}
        for a in pack.layouts
    ]
    content = {
        "dtype": dtype_name(pack.dtype),
        "model": pack.model,
        "layers": pack.layers,
        "modules": pack.modules,
        "adapters": adapters,
    }
    return {
        "format": _FORMAT,
        "version": str(_VERSION),
        "cupylora": __version__,
        "content": json.dumps(content),
        "sha256": digest,
    }


def _entries(pack: Pack) -> bytes:
    """Records whose addresses are relative to the file's blocks."""
    every = []
    start = 0
    for adapter in pack.layouts:
        places = np.cumsum([start, *adapter.sizes]).astype(np.uint64)
        records = adapter.records.copy()
        used = records["rank"] != 0
        for pointer in ("a_ptr", "b_ptr"):
            records[pointer][used] = places[adapter.records[pointer][used].astype(np.intp)]
        every.append(records)
        start += adapter.nbytes
    return _filled(np.concatenate(every).tobytes())


def _names(pack: Pack) -> bytes:
    return _filled(b"".join(a.name.encode().ljust(NAME_BYTES, b"\0") for a in pack.layouts))


def _sizes(pack: Pack) -> bytes:
    return _filled(np.array([s for a in pack.layouts for s in a.sizes], np.int64).tobytes())


def _filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK_ALIGNMENT)


def _header(file: Any) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the data begin. Raises ValueError."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER):
        raise ValueError("it has no safetensors header")
    return parse_json(file.read(length)), 8 + length


def _metadata(header: Mapping[str, Any]) -> Mapping[str, Any]:
    found = header.get("__metadata__")
    return found if isinstance(found, dict) else {}


def _read(path: Path, file: Any) -> Pack:
    header, start = _header(file)
    metadata = _metadata(header)
    if (metadata.get("format"), metadata.get("version")) != (_FORMAT, str(_VERSION)):
        raise ValueError(
            f"its format is {quoted(metadata.get('format'))}, version "
            f"{quoted(metadata.get('version'))}; {_FORMAT} of version {_VERSION} is needed"
        )
    size = os.fstat(file.fileno()).st_size - start
    try:
        data = np.empty(size, np.uint8)
    except MemoryError:
        raise ValueError(f"its {byte_size(size)} are more than memory holds") from None
    if not fill_from(file, start, memoryview(data.data)):
        raise ValueError("it is cut short")
    parts = _parts(header, data)
    digest = hashlib.sha256()
    for name in _TENSORS[1:]:
        digest.update(parts[name].data)
    if digest.hexdigest() != metadata["sha256"]:
        raise ValueError("its content is not what its digest says: it is damaged")
    pack = _assembled(path, metadata, parts)
    places = [0]
    for name in _TENSORS:
        places.append(places[-1] + len(parts[name]))
    if parts["head"].tobytes() != _head(pack, places) or parts["names"].tobytes() != _names(pack):
        raise ValueError("its head or its names are not those of its metadata")
    return pack


def _parts(header: Mapping[str, Any], data: Bytes) -> dict[str, Bytes]:
    """The tensors' bytes; raises ValueError unless they lie as ``write_pack`` lays them."""
    parts: dict[str, Bytes] = {}
    at = 0
    for name in _TENSORS:
        begin, end = header[name]["data_offsets"]
        if begin != at or type(end) is not int or not at <= end <= len(data):
            raise ValueError(f"tensor {name} does not lie where it should")
        parts[name], at = data[begin:end], end
    if at != len(data):
        raise ValueError(f"its tensors end at byte {at} of {len(data)}")
    return parts


def _assembled(path: Path, metadata: Mapping[str, Any], parts: Mapping[str, Bytes]) -> Pack:
    content = parse_json(str(metadata["content"]).encode())
    dtype, described = resolve_dtype(content["dtype"]), content["adapters"]
    modules = tuple((str(n), int(i), int(o), int(e)) for n, i, o, e in content["modules"])
    layers = int(content["layers"])
    rows = layers * len(modules)
    size = len(described) * rows * SLOT_ENTRY_BYTES
    if not described or not rows or size > len(parts["entries"]):
        raise ValueError("its entries are not those of its model")
    records = parts["entries"][:size].view(SLOT_ENTRY)
    sizes = parts["block_sizes"].view(np.int64)
    layouts = []
    first = begin = 0
    for index, entry in enumerate(described):
        own = sizes[first : first + int(entry["blocks"])].tolist()
        end = begin + sum(own)
        whole = all(size > 0 and size % BLOCK_ALIGNMENT == 0 for size in own)
        if len(own) != entry["blocks"] or not whole or end > len(parts["blocks"]):
            raise ValueError(f"the blocks of adapter {index} do not lie within it")
        numbered = _numbered(records[index * rows : (index + 1) * rows], own, begin)
        layout = AdapterLayout(
            str(entry["name"]),
            tuple(own),
            numbered,
            int(entry["max_rank"]),
            dtype,
            PACKED,
            str(entry["source"]),
        )
        wrong = misfit(layout, modules)
        if wrong:
            raise ValueError(wrong)
        layouts.append(layout)
        first, begin = first + len(own), end
    if begin != len(parts["blocks"]):
        raise ValueError("it has blocks of no adapter")
    names = [layout.name for layout in layouts]
    if "" in names or len(set(names)) < len(names) or any("\0" in own for own in names):
        raise ValueError("two of its adapters have one name, or one has none")
    name = str(content["model"])
    return Pack(path, name, layers, modules, dtype, tuple(layouts), parts["blocks"])


def _numbered(
    records: npt.NDArray[np.void], sizes: Sequence[int], begin: int
) -> npt.NDArray[np.void]:
    """Records with numbers of blocks for relative addresses. Raises ValueError for others."""
    starts = np.cumsum([begin, *sizes[:-1]]).astype(np.uint64)
    made = records.copy()
    used = made["rank"] != 0
    for pointer in ("a_ptr", "b_ptr"):
        places = records[pointer][used]
        numbers = np.searchsorted(starts, places)
        within = numbers < len(sizes)
        if not within.all() or (starts[numbers] != places).any():
            raise ValueError("an entry points at no block")
        made[pointer][used] = numbers
    return made
