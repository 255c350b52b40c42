"""Kernel parameters and the structs among them, as the CUDA sources declare them.

In: the text of a program (its source and headers). Out: a :class:`Declared` for each parameter or
struct field: name, type, offset and size in bytes. ``manifest`` and ``table`` write them down;
sizes are compared with the cubins' own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from cupylora.errors import ExportError

__all__ = ["Declarations", "Declared", "Struct"]

_SCALARS = {"i32": 4, "u32": 4, "i64": 8, "u64": 8, "float": 4}
_POINTER = "pointer"
_KERNEL = re.compile(
    r"__global__ void\s*(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(([^)]*)\)"
)
_STRUCT = re.compile(r"\bstruct (?:__align__\((\d+)\) )?(\w+) \{")
_CONSTANT = re.compile(r"\bconstexpr (?:int|i32) (\w+) = (\d+);")
_QUALIFIER = re.compile(r"\b(?:const|__restrict__|__grid_constant__)\b")
_ITEM = re.compile(r"(\*?)\s*(\w+)(?:\[([\w +]+)\])?")


@dataclass(frozen=True)
class Declared:
    """A parameter or a field. kind: pointer, i32, u32, i64, u64, float or a struct's name; to: what
    a pointer points at; count: elements of an array, 1 for a plain field."""

    name: str
    kind: str
    offset: int
    size: int
    count: int = 1
    to: str = ""


@dataclass(frozen=True)
class Struct:
    """A struct passed by value; size and alignment in bytes."""

    name: str
    fields: tuple[Declared, ...]
    size: int
    alignment: int


@dataclass
class Declarations:
    """What the files of a program declare; ``structs`` are those asked for so far."""

    texts: Iterable[str]
    structs: dict[str, Struct] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._text = "\n".join(re.sub(r"//[^\n]*", "", text) for text in self.texts)
        self._numbers = {name: int(value) for name, value in _CONSTANT.findall(self._text)}
        self._kernels = dict(_KERNEL.findall(self._text))

    def parameters(self, kernel: str) -> tuple[Declared, ...]:
        """The parameters of the ``__global__`` function ``kernel``.

        Raises ExportError where the sources have no such kernel, or a type that is unknown.
        """
        if kernel not in self._kernels:
            raise ExportError(f"the CUDA sources declare no kernel {kernel!r}")
        declarations = [part.strip() for part in self._kernels[kernel].split(",")]
        return self._laid_out(f"kernel {kernel}", declarations)[0]

    def struct(self, name: str) -> Struct:
        """The struct ``name``. Raises ExportError where it is not declared."""
        if name not in self.structs:
            head = next((m for m in _STRUCT.finditer(self._text) if m[2] == name), None)
            if head is None:
                raise ExportError(f"the CUDA sources declare no type {name!r}")
            members = _members(self._text[head.end() :])
            fields, end, most = self._laid_out(f"struct {name}", members)
            most = max(most, int(head[1] or 1))
            self.structs[name] = Struct(name, fields, _round_up(end, most), most)
        return self.structs[name]

    def _laid_out(
        self, where: str, declarations: Iterable[str]
    ) -> tuple[tuple[Declared, ...], int, int]:
        """The declared one after the other as C lays them out, their end and largest alignment."""
        found: list[Declared] = []
        end, most = 0, 1
        for declaration in declarations:
            kind, items = _split(where, declaration)
            for star, name, length in items:
                own = _POINTER if star else kind
                size, alignment = self._size(own)
                count = self._length(length) if length else 1
                offset = _round_up(end, alignment)
                to = kind if star else ""
                found.append(Declared(name, own, offset, size * count, count, to))
                end, most = offset + size * count, max(most, alignment)
        return tuple(found), end, most

    def _size(self, kind: str) -> tuple[int, int]:
        if kind == _POINTER:
            return 8, 8
        if kind in _SCALARS:
            return _SCALARS[kind], _SCALARS[kind]
        struct = self.struct(kind)
        return struct.size, struct.alignment

    def _length(self, text: str) -> int:
        terms = (term.strip() for term in text.split("+"))
        return sum(int(term) if term.isdecimal() else self._numbers[term] for term in terms)


def _members(text: str) -> list[str]:
    """Declarations of a struct's data members; ``text`` begins behind its opening brace."""
    members, start, depth = [], 0, 0
    for at, letter in enumerate(text):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            start = at + 1
            if depth < 0:
                break
        elif letter == ";" and depth == 0:
            member, start = text[start:at].strip(), at + 1
            if member and "(" not in member and not member.startswith(("static", "using")):
                members.append(member)
    return members


def _split(where: str, declaration: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The type of ``T* a, b[3]`` and, for each item, its star, name and length."""
    text = _QUALIFIER.sub("", declaration).replace("*", " *").strip()
    head = re.match(r"(\w+)\s+(.+)", text, re.DOTALL)
    items = [_ITEM.fullmatch(" ".join(item.split())) for item in head[2].split(",")] if head else []
    if head is None or None in items:
        raise ExportError(f"{where}: {declaration!r} is no declaration that can be described")
    return head[1], [(item[1], item[2], item[3] or "") for item in items if item]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
