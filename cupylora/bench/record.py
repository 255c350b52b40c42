"""A bench's result as JSON: what the device was, and a row for each point.

In: rows as they are measured. Out: a file that is whole after every point, and the same read back,
with every field's type checked. Fields whose default stands here may be missing
in a file, and of a row also ``kind`` (then it is the suite's name) and ``routing`` (uniform).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cupylora.bench.identity import PointId
from cupylora.errors import ArgumentError
from cupylora.files import read_json, reason
from cupylora.text import quoted

__all__ = ["Record", "Row", "read_record", "require_writable", "write_record"]

_LARGEST = 64 << 20
_UNROUTED = "cublas"
"""Batched GEMMs on equal groups that lie together: a reference, not a way to serve a batch."""


@dataclass(frozen=True)
class Row(PointId):
    """One point's result.

    us: microseconds, null where the point failed, and ``failed`` says why. spread: of the replays,
    (90th - 10th percentile) / median. floor_us, stream_us: see ``measure.Measured``. peers_us: of
    other projects' kernels, by name. parts_us: of gate and up, and of down. bytes: of the floor.
    sets: rotating input sets. error: relative, over the rows that ``checked`` names.
    """

    us: float | None
    spread: float | None
    floor_us: float | None
    stream_us: float | None
    peers_us: Mapping[str, float] = field(default_factory=dict)
    parts_us: tuple[float, ...] = ()
    bytes: float | None = None
    sets: int | None = None
    error: float | None = None
    checked: str = ""
    failed: str = ""

    @property
    def fraction(self) -> float | None:
        """floor / time."""
        return self.floor_us / self.us if self.us and self.floor_us is not None else None

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """Name and time of the fastest peer that serves any batch."""
        routed = {n: us for n, us in self.peers_us.items() if not n.startswith(_UNROUTED)}
        if not routed:
            return None
        name = min(routed, key=routed.__getitem__)
        return name, routed[name]


@dataclass(frozen=True)
class Record:
    """device: its name. driver: its version. versions: of packages. date: ISO 8601, UTC.
    copy_bytes_per_second: the copy bandwidth that the floors go by, measured in the same run."""

    device: str
    driver: str
    versions: Mapping[str, str]
    date: str
    rows: tuple[Row, ...] = ()
    copy_bytes_per_second: float | None = None


def write_record(path: Path, record: Record) -> None:
    """Write all of it, so that the file holds the old or the new record whole at any moment.

    Raises ArgumentError where it cannot be written.
    """
    text = json.dumps(asdict(record), indent=1, allow_nan=False) + "\n"
    target = path.resolve()
    new = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, target)
    except OSError as error:
        raise ArgumentError(f"--json {path}: cannot be written ({error.strerror})") from error
    finally:
        new.unlink(missing_ok=True)


def require_writable(option: str, path: Path) -> None:
    """Raise ArgumentError unless a file could be put at ``path``."""
    try:
        folder = path.resolve().parent
        if not folder.is_dir() or (path.exists() and not path.is_file()):
            raise ArgumentError(f"{option} {path}: not a file in a folder that exists")
        trial = folder / f".{path.name}.{os.getpid()}.part"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ArgumentError(f"{option}: {error.strerror}: {path}") from error


def read_record(path: Path) -> Record:
    """A record from a file. Raises ArgumentError, naming the file and the field, for any other."""
    try:
        values = read_json(path, _LARGEST)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: cannot be read: {reason(error)}") from error
    rows = values.get("rows")
    if not isinstance(rows, list):
        raise ArgumentError(f"{path}: rows is {quoted(rows)}; a list is needed")
    parsed = tuple(_row(f"{path}: rows[{index}]", row) for index, row in enumerate(rows))
    return Record(**_fields(Record, str(path), values, skip=("rows",)), rows=parsed)


def _row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise ArgumentError(f"{where} is {quoted(values)}; an object is needed")
    known = {"kind": values.get("suite"), "routing": "uniform"}
    return Row(**_fields(Row, where, known | values))


def _fields(
    kind: type, where: str, values: Mapping[str, Any], skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The dataclass's fields out of ``values``, whose other keys are passed over."""
    found = {}
    for f in fields(kind):
        if f.name in skip:
            continue
        if f.name not in values:
            if f.default is MISSING and f.default_factory is MISSING:
                raise ArgumentError(f"{where}: {f.name} is missing")
            continue
        read, need = _READERS[str(f.type)]
        value = read(values[f.name])
        if value is _WRONG:
            raise ArgumentError(f"{where}: {f.name} is {quoted(values[f.name])}; {need} is needed")
        found[f.name] = value
    return found


_WRONG = object()


def _is_number(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and math.isfinite(value) and value >= 0


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else _WRONG


def _whole(value: Any) -> Any:
    return value if type(value) is int and value >= 0 else _WRONG


def _whole_or_none(value: Any) -> Any:
    return None if value is None else _whole(value)


def _number_or_none(value: Any) -> Any:
    return value if value is None or _is_number(value) else _WRONG


def _numbers(value: Any) -> Any:
    fits = isinstance(value, list) and all(map(_is_number, value))
    return tuple(value) if fits else _WRONG


def _named_numbers(value: Any) -> Any:
    return value if isinstance(value, dict) and all(map(_is_number, value.values())) else _WRONG


def _named_texts(value: Any) -> Any:
    fits = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    return value if fits else _WRONG


_READERS: dict[str, tuple[Any, str]] = {
    "str": (_text, "a string"),
    "int": (_whole, "an integer of at least 0"),
    "int | None": (_whole_or_none, "an integer of at least 0, or null,"),
    "float | None": (_number_or_none, "a finite number of at least 0, or null,"),
    "tuple[float, ...]": (_numbers, "a list of finite numbers"),
    "Mapping[str, float]": (_named_numbers, "an object of finite numbers"),
    "Mapping[str, str]": (_named_texts, "an object of strings"),
}
