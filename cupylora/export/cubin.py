"""What a cubin itself says of its kernels' parameters.

In: a cubin's bytes (an ELF file). Out: for each kernel, the (offset, size) of every parameter in
bytes. ``manifest`` compares it with what the CUDA sources declare, so that a manifest cannot
describe another kernel than the one that lies beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cupylora.errors import ExportError

__all__ = ["Place", "parameter_places"]

Place = tuple[int, int]
"""(offset, size) of a parameter, in bytes."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_PARAMETER = struct.Struct("<IHHI")
_INFO = ".nv.info."
_SIZED, _KPARAM_INFO = 4, 0x17
"""How an attribute of .nv.info is stored (4: with its length), and the one that is a parameter."""

_SIZE_SHIFT = 18
"""A parameter's size stands above its alignment, space and bank."""


def parameter_places(cubin: bytes) -> dict[str, list[Place]]:
    """By mangled name, the places of each kernel's parameters in order.

    Raises ExportError for bytes that are no cubin.
    """
    try:
        return {
            name.removeprefix(_INFO): _places(data)
            for name, data in _sections(cubin)
            if name.startswith(_INFO)
        }
    except (struct.error, ValueError, IndexError) as error:
        raise ExportError(f"a compiled program is no cubin that can be read: {error}") from error


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    fields = _HEADER.unpack_from(cubin)
    if not fields[0].startswith(b"\x7fELF"):
        raise ValueError("it does not begin as an ELF file")
    start, count, names = fields[6], fields[12], fields[13]
    rows = [_SECTION.unpack_from(cubin, start + i * _SECTION.size) for i in range(count)]
    strings = cubin[rows[names][4] :]
    for row in rows:
        name = strings[row[0] : strings.index(b"\0", row[0])].decode()
        yield name, cubin[row[4] : row[4] + row[5]]


def _places(data: bytes) -> list[Place]:
    found: dict[int, Place] = {}
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _SIZED:
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, bits = _PARAMETER.unpack_from(data, at)
            found[ordinal] = (offset, bits >> _SIZE_SHIFT)
        at += size
    return [found[i] for i in range(len(found))]
