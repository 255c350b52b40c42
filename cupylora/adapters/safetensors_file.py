"""Safetensors files read and checked by ourselves: bytes in, named NumPy arrays out.

``peft`` calls ``read_weights`` on an adapter's directory. Own parsing rather than the library's
keeps bfloat16 in NumPy, reads each file once (a file replaced under our feet cannot change what was
checked), and lets every refusal say what is wrong where. A file is accepted only if its header
describes its bytes completely: every tensor inside the data, no overlap, no hole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupylora.errors import AdapterFormatError

__all__ = ["read_safetensors", "read_weights"]

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
_SINGLE = "adapter_model.safetensors"
_INDEX = "adapter_model.safetensors.index.json"
_PICKLES = ("adapter_model.bin", "pytorch_model.bin", "adapter_model.pt")


def read_weights(folder: Path) -> dict[str, Array]:
    """All tensors of an adapter directory: its one weights file, or the shards of its index.

    Raises AdapterFormatError for a missing, unreadable or malformed file, an incomplete set of
    shards, or weights that exist as a pickle only.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file() and index.is_file():
        raise _error(folder, f"holds both {_SINGLE} and {_INDEX}; remove the one that is stale")
    if single.is_file():
        return read_safetensors(single)
    if index.is_file():
        return _read_shards(index)
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if not pickles:
        raise _error(folder, f"holds neither {_SINGLE} nor {_INDEX}")
    raise _error(
        folder / pickles[0],
        "is a pickle, which is never opened; save the adapter again as safetensors "
        "(save_pretrained with safe_serialization=True)",
    )


def read_safetensors(path: Path) -> dict[str, Array]:
    """The tensors of one file (float32, float16 or bfloat16), as read-only arrays on one buffer.

    Raises AdapterFormatError naming the file and, where it is one tensor's fault, the tensor.
    """
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise AdapterFormatError(f"{path}: cannot be read ({error})") from error
    data.flags.writeable = False
    header, start = _header(path, data)
    body = data[start:]
    spans = {name: _span(path, name, entry) for name, entry in header.items()}
    _check_cover(path, spans.items(), body.size)
    return {
        name: np.require(body[begin:end].view(dtype).reshape(shape), requirements="A")
        for name, (begin, end, dtype, shape) in spans.items()
    }


_Span = tuple[int, int, np.dtype[Any], tuple[int, ...]]


def _error(path: Path, problem: str) -> AdapterFormatError:
    return AdapterFormatError(f"{path}: {problem}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys: of two tensors of one name, one would be lost."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _parse_json(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{path}: {what} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _error(path, f"{what} is a JSON {type(value).__name__}; an object is needed")
    return value


def _header(path: Path, data: Array) -> tuple[dict[str, Any], int]:
    """The header's tensors, and where the data starts."""
    if data.size < _LENGTH_BYTES:
        raise _error(
            path, f"has {data.size} bytes; a safetensors file starts with an 8-byte length"
        )
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    room = data.size - _LENGTH_BYTES
    if length > min(room, _MAX_HEADER):
        raise _error(path, f"its header should be {length} bytes long, but {room} bytes follow")
    start = _LENGTH_BYTES + length
    header = _parse_json(path, data[_LENGTH_BYTES:start].tobytes(), "its header")
    header.pop("__metadata__", None)
    return header, start


def _naturals(value: Any) -> list[int] | None:
    """``value`` if it is a list of whole numbers from 0 on."""
    fits = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return value if fits else None


def _span(path: Path, name: str, entry: Any) -> _Span:
    """Byte range, dtype and shape of one tensor, consistent among themselves."""
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets = _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _error(path, f"tensor {name}: shape and data_offsets must be lists of whole numbers")
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        known = ", ".join(_DTYPES)
        raise _error(
            path, f"tensor {name} has dtype {fields.get('dtype')!r}; convert it to {known}"
        )
    begin, end = offsets
    size = math.prod(shape) * dtype.itemsize
    if end - begin != size or not size:
        raise _error(
            path, f"tensor {name} of shape {shape} needs {size} bytes, not [{begin}, {end})"
        )
    return begin, end, dtype, tuple(shape)


def _check_cover(path: Path, spans: Iterable[tuple[str, _Span]], size: int) -> None:
    """The tensors fill the data from its first byte to its last, each byte once."""
    at = 0
    for name, (begin, end, _, _) in sorted(spans, key=lambda item: item[1][:2]):
        if end > size:
            raise _error(path, f"tensor {name} ends at byte {end} of {size}: the file is cut short")
        if begin != at:
            kind = "overlaps" if begin < at else "leaves a gap after"
            raise _error(path, f"tensor {name} at byte {begin} {kind} the tensor that ends at {at}")
        at = end
    if at != size:
        raise _error(path, f"{size - at} bytes after the last tensor belong to none")


def _read_shards(index: Path) -> dict[str, Array]:
    try:
        text = index.read_bytes()
    except OSError as error:
        raise AdapterFormatError(f"{index}: cannot be read ({error})") from error
    names = _parse_json(index, text, "the index").get("weight_map")
    if not isinstance(names, dict) or not names:
        raise _error(index, "has no weight_map that names the tensors")
    tensors: dict[str, Array] = {}
    for shard in sorted({str(name) for name in names.values()}):
        if Path(shard).name != shard:
            raise _error(index, f"shard {shard!r} is not a file name of this directory")
        path = index.parent / shard
        if not path.is_file():
            raise _error(index, f"shard {shard} is missing")
        found = read_safetensors(path)
        listed = {name for name, place in names.items() if place == shard}
        if listed != found.keys():
            odd = ", ".join(sorted(listed ^ found.keys()))
            raise _error(path, f"differs from its index in these tensors: {odd}")
        tensors.update(found)
    return tensors
