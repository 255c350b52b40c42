"""Safetensors files read and checked by ourselves: bytes in, named NumPy arrays out.

``peft`` calls ``read_weights`` on an adapter's directory. Own parsing rather than the library's
keeps bfloat16 in NumPy, keeps each file open from its header to its last byte (a file put in its
place meanwhile changes nothing), and lets every refusal say what is wrong where. A file is accepted
only if its header describes its bytes completely: every tensor inside the data, no overlap, no
hole. Headers are judged first, by the caller too, and only then is memory taken for the data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupylora.errors import AdapterFormatError
from cupylora.files import is_there, open_regular, parse_json, read_json, reason
from cupylora.text import byte_size, listed, quoted, shown

__all__ = [
    "INDEX_FILE",
    "LARGEST_JSON",
    "SINGLE_FILE",
    "Shapes",
    "read_safetensors",
    "read_weights",
]

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]
"""The tensors of an adapter by name, before their data is read."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LENGTH_BYTES = 8
LARGEST_JSON = 100_000_000
"""Bytes of a header or an index that are read at most."""
_MAX_DIMENSIONS = 8
SINGLE_FILE = "adapter_model.safetensors"
INDEX_FILE = f"{SINGLE_FILE}.index.json"
_PICKLES = ("adapter_model.bin", "pytorch_model.bin", "adapter_model.pt")


def read_weights(folder: Path, admit: Callable[[Shapes], None]) -> dict[str, Array]:
    """All tensors of an adapter directory: its one weights file, or the shards of its index.

    admit: called with every tensor's name and shape before any data is read; it raises for what the
    caller has no use for. Raises AdapterFormatError for a missing, unreadable or malformed file, an
    incomplete set of shards, or weights that exist as a pickle only.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if is_there(single) and is_there(index):
        raise _error(
            folder, f"holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is stale"
        )
    with ExitStack() as stack:
        if is_there(single):
            files = [_open(single, stack)]
        elif is_there(index):
            files = _open_shards(index, stack)
        else:
            raise _nothing(folder)
        admit({name: span.shape for file in files for name, span in file.spans.items()})
        return {name: tensor for file in files for name, tensor in file.read().items()}


def read_safetensors(path: Path) -> dict[str, Array]:
    """The tensors of one file (float32, float16 or bfloat16), as read-only arrays on one buffer.

    Raises AdapterFormatError naming the file and, where it is one tensor's fault, the tensor.
    """
    with ExitStack() as stack:
        return _open(path, stack).read()


@dataclass(frozen=True)
class _Span:
    """Where a tensor lies, in bytes from the start of the data, and what it is."""

    begin: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _OpenFile:
    """A file whose header is read and checked, placed at the ``size`` bytes of its data."""

    path: Path
    file: FileIO
    spans: dict[str, _Span]
    size: int

    def read(self) -> dict[str, Array]:
        """The tensors, with the file's one data buffer below them."""
        try:
            body = np.fromfile(self.file, dtype=np.uint8, count=self.size)
        except OSError as error:
            raise _error(self.path, f"cannot be read ({reason(error)})") from error
        except MemoryError as error:
            raise _error(
                self.path,
                f"has {byte_size(self.size)} of tensors, more than memory holds; load it where "
                "there is more, or save the adapter again if it should be smaller",
            ) from error
        if body.size != self.size:
            raise _error(self.path, "became shorter while it was read; load it again")
        body.flags.writeable = False
        return {
            name: np.require(
                body[span.begin : span.end].view(span.dtype).reshape(span.shape), requirements="A"
            )
            for name, span in self.spans.items()
        }


def _error(path: Path, problem: str) -> AdapterFormatError:
    where = str(path) if str(path).isprintable() else repr(str(path))
    return AdapterFormatError(f"{where}: {problem}")


def _nothing(folder: Path) -> AdapterFormatError:
    pickles = [name for name in _PICKLES if is_there(folder / name)]
    if not pickles:
        return _error(
            folder,
            f"holds neither {SINGLE_FILE} nor {INDEX_FILE}; give the directory that peft saved",
        )
    return _error(
        folder / pickles[0],
        "is a pickle, which is never opened; save the adapter again as safetensors "
        "(save_pretrained with safe_serialization=True)",
    )


def _open(path: Path, stack: ExitStack) -> _OpenFile:
    """Open a file until ``stack`` ends, and check its header against its length."""
    try:
        file = stack.enter_context(open_regular(path))
        length = os.fstat(file.fileno()).st_size
        header, size = _header(path, file, length)
    except (OSError, ValueError) as error:
        raise _error(path, f"cannot be read ({reason(error)})") from error
    spans = {name: _span(path, name, entry) for name, entry in header.items()}
    _check_cover(path, spans.items(), size)
    return _OpenFile(path, file, spans, size)


def _header(path: Path, file: FileIO, size: int) -> tuple[dict[str, Any], int]:
    """The header's tensors, and how many bytes of data follow."""
    if size < _LENGTH_BYTES:
        raise _error(path, f"has {size} bytes; a safetensors file starts with an 8-byte length")
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    room = size - _LENGTH_BYTES
    if length > min(room, LARGEST_JSON):
        raise _error(
            path,
            f"its header should be {length} bytes long, but {room} bytes follow, and at most "
            f"{LARGEST_JSON} are read",
        )
    try:
        header = parse_json(file.read(length))
    except ValueError as error:
        raise _error(path, f"its header is {error}") from error
    header.pop("__metadata__", None)
    return header, room - length


def _naturals(value: Any) -> list[int] | None:
    """``value`` if it is a list of whole numbers from 0 on."""
    fits = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return value if fits else None


def _span(path: Path, name: str, entry: Any) -> _Span:
    """Byte range, dtype and shape of one tensor, consistent among themselves."""
    where = f"tensor {shown(name)}"
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets = _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _error(path, f"{where}: shape and data_offsets must be lists of whole numbers")
    if len(shape) > _MAX_DIMENSIONS:
        raise _error(
            path, f"{where} has {len(shape)} dimensions; factors have 2 or 3, so convert it"
        )
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        known = ", ".join(_DTYPES)
        raise _error(
            path, f"{where} has dtype {quoted(fields.get('dtype'))}; convert it to {known}"
        )
    begin, end = offsets
    size = math.prod(shape) * dtype.itemsize
    if end - begin != size or not size:
        raise _error(
            path,
            f"{where} of shape {quoted(shape)} needs {quoted(size)} bytes, not "
            f"[{quoted(begin)}, {quoted(end)})",
        )
    return _Span(begin, end, dtype, tuple(shape))


def _check_cover(path: Path, spans: Iterable[tuple[str, _Span]], size: int) -> None:
    """The tensors fill the data from its first byte to its last, each byte once."""
    at = 0
    for name, span in sorted(spans, key=lambda item: (item[1].begin, item[1].end)):
        where, begin, end = f"tensor {shown(name)}", quoted(span.begin), quoted(span.end)
        if span.end > size:
            raise _error(path, f"{where} ends at byte {end} of {size}: the file is cut short")
        if span.begin != at:
            kind = "overlaps" if span.begin < at else "leaves a gap after"
            raise _error(path, f"{where} at byte {begin} {kind} the tensor that ends at {at}")
        at = span.end
    if at != size:
        raise _error(path, f"{size - at} bytes after the last tensor belong to none")


def _open_shards(index: Path, stack: ExitStack) -> list[_OpenFile]:
    try:
        names = read_json(index, LARGEST_JSON).get("weight_map")
    except (OSError, ValueError) as error:
        raise _error(index, f"the index cannot be read: {reason(error)}") from error
    if not isinstance(names, dict) or not names:
        raise _error(index, "has no weight_map that names the tensors")
    tensors: dict[str, set[str]] = {}
    for name, shard in names.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise _error(index, f"shard {quoted(shard)} is not a file name of this directory")
        tensors.setdefault(shard, set()).add(name)
    return [_open_shard(index, shard, tensors[shard], stack) for shard in sorted(tensors)]


def _open_shard(index: Path, shard: str, names: set[str], stack: ExitStack) -> _OpenFile:
    path = index.parent / shard
    if not is_there(path):
        raise _error(index, f"shard {shown(shard)} is missing; copy it beside the index")
    found = _open(path, stack)
    odd = sorted(names ^ found.spans.keys())
    if odd:
        raise _error(path, f"differs from its index in these tensors: {listed(map(shown, odd))}")
    return found
