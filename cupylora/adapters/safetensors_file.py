"""Safetensors files read and checked by ourselves: bytes in, named NumPy arrays out.

``peft`` and ``inspection`` open an adapter's files here (``open_weights``). Own parsing rather than
the library's keeps bfloat16 in NumPy, keeps each file open from its header to its last byte (a file
put in its place meanwhile changes nothing), and lets every refusal say what is wrong where. A file
is accepted only if its header describes its bytes completely: every tensor inside the data, no
overlap, no hole. Headers are judged first, by the caller too, and only then is memory taken for
data. The format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupylora.errors import AdapterFormatError
from cupylora.files import fill_from, is_there, named, open_regular, parse_json, read_json, reason
from cupylora.text import byte_size, listed, quoted, shown

__all__ = [
    "INDEX_FILE",
    "LARGEST_JSON",
    "MOST_TENSORS",
    "SINGLE_FILE",
    "SUFFIX",
    "TensorInfo",
    "WeightFiles",
    "open_weights",
    "read_safetensors",
]

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_SCALAR_DTYPES = {**_DTYPES, "F64": np.dtype(np.float64), "I64": np.dtype(np.int64)}
"""Of tensors of one element, as an alpha is: torch makes int64 of a whole number."""

_LENGTH_BYTES = 8
LARGEST_JSON = 32_000_000
"""Bytes of an index, and of all headers of an adapter, that are read: some 200,000 tensors."""
MOST_TENSORS = 400_000
"""That an index may name: more than headers of LARGEST_JSON hold."""
_MOST_SHARDS = 256
"""Each is kept open while the adapter is read."""
_MAX_DIMENSIONS = 8
SUFFIX = ".safetensors"
SINGLE_FILE = f"adapter_model{SUFFIX}"
INDEX_FILE = f"{SINGLE_FILE}.index.json"
_PICKLES = ("adapter_model.bin", "pytorch_model.bin", "adapter_model.pt")


class TensorInfo(NamedTuple):
    """What a header tells of a tensor: bytes from the start of the file's data, dtype and shape."""

    begin: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.begin


class WeightFiles:
    """The weight files of one adapter: open, their headers checked, their data not read yet.

    ``tensors``: by name, what the headers tell of each.
    """

    def __init__(self, files: Iterable[_OpenFile]) -> None:
        self._files = tuple(files)
        self._home = {
            name: number for number, file in enumerate(self._files) for name in file.tensors
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for file in self._files for name, info in file.tensors.items()
        }

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return tuple(file.path for file in self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of all data."""
        return sum(file.size for file in self._files)

    def read(self) -> dict[str, Array]:
        """All tensors, read-only, those of a file on one buffer.

        Raises AdapterFormatError where a file cannot be read or memory does not hold it.
        """
        return {name: tensor for file in self._files for name, tensor in file.read().items()}

    def pieces(self, name: str, nbytes: int) -> Iterator[Array]:
        """Tensor ``name`` flat, in pieces of at most ``nbytes`` (at least one element) each."""
        return self._files[self._home[name]].pieces(self.tensors[name], nbytes)

    def place_of(self, name: str) -> tuple[int, int]:
        """Number of the file in ``paths`` that holds tensor ``name``, and where its data begins."""
        return self._home[name], self.tensors[name].begin

    def read_into(self, number: int, begin: int, target: npt.NDArray[np.uint8]) -> None:
        """Fill ``target`` with the data of file ``number`` from byte ``begin`` on.

        Raises AdapterFormatError where the file cannot be read or has become shorter.
        """
        self._files[number].read_into(begin, target)

    def scalar(self, name: str) -> float:
        """The value of tensor ``name``, which has one element."""
        [piece] = self.pieces(name, self.tensors[name].nbytes)
        return float(piece[0])


@contextmanager
def open_weights(path: Path) -> Iterator[WeightFiles]:
    """The weights of an adapter: a directory's one file or the shards of its index, or ``path``.

    Raises AdapterFormatError for a missing, unreadable or malformed file, an incomplete set of
    shards, or weights that exist as a pickle only.
    """
    with ExitStack() as stack:
        yield WeightFiles(_open_all(path, stack))


def _open_all(path: Path, stack: ExitStack) -> list[_OpenFile]:
    if path.suffix == SUFFIX and not path.is_dir():
        return [_open(path, stack)]
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if is_there(single) and is_there(index):
        raise _error(
            path, f"holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is stale"
        )
    if is_there(single):
        return [_open(single, stack)]
    if is_there(index):
        return _open_shards(index, stack)
    raise _nothing(path)


def read_safetensors(path: Path) -> dict[str, Array]:
    """The tensors of one file (float32, float16 or bfloat16), as read-only arrays on one buffer.

    Raises AdapterFormatError naming the file and, where it is one tensor's fault, the tensor.
    """
    with ExitStack() as stack:
        return _open(path, stack).read()


@dataclass(frozen=True)
class _OpenFile:
    """A file whose header is read and checked; its ``size`` bytes of data begin at ``start``."""

    path: Path
    file: FileIO
    tensors: dict[str, TensorInfo]
    start: int
    size: int

    def read(self) -> dict[str, Array]:
        """The tensors, with the file's one data buffer below them."""
        body = self._bytes(0, self.size)
        body.flags.writeable = False
        return {
            name: np.require(
                body[info.begin : info.end].view(info.dtype).reshape(info.shape), requirements="A"
            )
            for name, info in self.tensors.items()
        }

    def pieces(self, info: TensorInfo, nbytes: int) -> Iterator[Array]:
        """A tensor, flat, ``nbytes`` (or one element) at a time."""
        step = max(1, nbytes // info.dtype.itemsize) * info.dtype.itemsize
        for begin in range(info.begin, info.end, step):
            yield self._bytes(begin, min(step, info.end - begin)).view(info.dtype)

    def read_into(self, begin: int, target: npt.NDArray[np.uint8]) -> None:
        """Fill ``target`` with the data from ``begin`` on."""
        try:
            whole = fill_from(self.file, self.start + begin, memoryview(target.data))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if not whole:
            raise _error(self.path, "became shorter while it was read; load it again")

    def _bytes(self, begin: int, size: int) -> Array:
        """``size`` bytes of the data from ``begin`` on, in memory of their own."""
        try:
            body = np.empty(size, np.uint8)
        except MemoryError as error:
            raise _error(
                self.path,
                f"has {byte_size(size)} of tensors, more than memory holds; load it where "
                "there is more, or save the adapter again if it should be smaller",
            ) from error
        self.read_into(begin, body)
        return body


def _error(path: Path, problem: str) -> AdapterFormatError:
    return AdapterFormatError(f"{named(path)}: {problem}")


def _broken(path: Path, problem: str) -> AdapterFormatError:
    return _error(path, f"{problem}; the file is damaged or half written: copy or save it again")


def _unreadable(path: Path, error: OSError | ValueError) -> AdapterFormatError:
    return _error(path, f"cannot be read ({reason(error)}); copy it there, readable for this user")


def _nothing(folder: Path) -> AdapterFormatError:
    pickles = [name for name in _PICKLES if is_there(folder / name)]
    if not pickles:
        return _error(
            folder,
            f"holds neither {SINGLE_FILE} nor {INDEX_FILE}; give the directory that peft saved, "
            "with its adapter_config.json",
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
        raise _unreadable(path, error) from error
    tensors = {name: _info(path, name, entry) for name, entry in header.items()}
    _check_cover(path, tensors.items(), size)
    return _OpenFile(path, file, tensors, length - size, size)


def _header(path: Path, file: FileIO, size: int) -> tuple[dict[str, Any], int]:
    """The header's tensors, and how many bytes of data follow."""
    if size < _LENGTH_BYTES:
        raise _broken(
            path, f"has {size} bytes, but a safetensors file starts with an 8-byte length"
        )
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    room = size - _LENGTH_BYTES
    if length > min(room, LARGEST_JSON):
        raise _broken(
            path,
            f"its header should be {length} bytes long, but {room} bytes follow, and at most "
            f"{LARGEST_JSON} are read",
        )
    try:
        header = parse_json(file.read(length))
    except ValueError as error:
        raise _broken(path, f"its header is {error}") from error
    header.pop("__metadata__", None)
    return header, room - length


def _naturals(value: Any) -> list[int] | None:
    """``value`` if it is a list of whole numbers from 0 on."""
    fits = isinstance(value, list) and {*map(type, value)} <= {int} and min(value, default=0) >= 0
    return value if fits else None


def _info(path: Path, name: str, entry: Any) -> TensorInfo:
    """Byte range, dtype and shape of one tensor, consistent among themselves."""
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets = _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _broken(
            path, f"{_tensor(name)}: shape and data_offsets must be lists of whole numbers"
        )
    if len(shape) > _MAX_DIMENSIONS:
        raise _error(
            path,
            f"{_tensor(name)} has {len(shape)} dimensions; factors have 2 or 3, so convert it",
        )
    elements = math.prod(shape)
    known_dtypes = _SCALAR_DTYPES if elements == 1 else _DTYPES
    dtype = known_dtypes.get(str(fields.get("dtype")))
    if dtype is None:
        known = ", ".join(_DTYPES)
        raise _error(
            path, f"{_tensor(name)} has dtype {quoted(fields.get('dtype'))}; convert it to {known}"
        )
    begin, end = offsets
    size = elements * dtype.itemsize
    if end - begin != size:
        raise _broken(
            path,
            f"{_tensor(name)} of shape {quoted(shape)} needs {quoted(size)} bytes, not "
            f"[{quoted(begin)}, {quoted(end)})",
        )
    return TensorInfo(begin, end, dtype, tuple(shape))


def _tensor(name: str) -> str:
    """For messages."""
    return f"tensor {shown(name)}"


def _check_cover(path: Path, tensors: Iterable[tuple[str, TensorInfo]], size: int) -> None:
    """The tensors fill the data from its first byte to its last, each byte once."""
    at = 0
    for name, span in sorted(tensors, key=lambda item: (item[1].begin, item[1].end)):
        if span.end > size or span.begin != at:
            raise _broken(path, _uncovered(name, span, at, size))
        at = span.end
    if at != size:
        raise _broken(path, f"{size - at} bytes after the last tensor belong to none")


def _uncovered(name: str, span: TensorInfo, at: int, size: int) -> str:
    """Why a tensor cannot follow one that ends at ``at`` in ``size`` bytes of data."""
    where, begin, end = _tensor(name), quoted(span.begin), quoted(span.end)
    if span.end > size:
        return f"{where} ends at byte {end} of {size}: the file is cut short"
    kind = "overlaps" if span.begin < at else "leaves a gap after"
    return f"{where} at byte {begin} {kind} the tensor that ends at {at}"


def _open_shards(index: Path, stack: ExitStack) -> list[_OpenFile]:
    try:
        names = read_json(index, LARGEST_JSON, MOST_TENSORS).get("weight_map")
    except (OSError, ValueError) as error:
        raise _broken(index, f"the index cannot be read: {reason(error)}") from error
    if not isinstance(names, dict) or not names:
        raise _broken(index, "has no weight_map that names the tensors")
    tensors: dict[str, set[str]] = {}
    for name, shard in names.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise _broken(index, f"shard {quoted(shard)} is not a file name of this directory")
        tensors.setdefault(shard, set()).add(name)
    if len(tensors) > _MOST_SHARDS:
        raise _error(
            index,
            f"names {len(tensors)} shards; at most {_MOST_SHARDS} are read, so save it in fewer",
        )
    files = []
    for shard in sorted(tensors):
        files.append(_open_shard(index, shard, tensors[shard], stack))
        if sum(file.start for file in files) > LARGEST_JSON:
            raise _error(
                index,
                f"the headers of its shards have over {byte_size(LARGEST_JSON)}, more than is "
                "read; save the adapter again with fewer, larger tensors",
            )
    return files


def _open_shard(index: Path, shard: str, names: set[str], stack: ExitStack) -> _OpenFile:
    path = index.parent / shard
    if not is_there(path):
        raise _error(index, f"shard {shown(shard)} is missing; copy it beside the index")
    found = _open(path, stack)
    odd = sorted(names ^ found.tensors.keys())
    if odd:
        raise _broken(path, f"differs from its index in these tensors: {listed(map(shown, odd))}")
    return found
