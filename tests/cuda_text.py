"""What the CUDA sources say of sizes: constants, expressions and struct layouts, read as text.

Enough of C++ to evaluate integer expressions and to lay out plain structs, so that a host side that
repeats them is compared with the sources themselves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupylora.resources import cuda_source_dir

_FUNCTIONS: dict[str, Any] = {
    "min_int": min,
    "max_int": max,
    "ceil_div": lambda a, b: -(-a // b),
    "__clz": lambda value: 32 - int(value).bit_length(),
}
_SIZES = {"u8": 1, "u16": 2, "i32": 4, "u32": 4, "float": 4, "i64": 8, "u64": 8}
_CONSTANT = re.compile(r"\bconstexpr (?:int|i32|u32) (\w+) = ([^;:]+(?: : [^;:]+)*);")
_ASSIGNMENT = re.compile(r"(?:const i32 )?(\w+) = (.+)", re.DOTALL)
_METHOD = re.compile(r"\bi32 (\w+)\(\) const \{\s*return ([^;]+);\s*\}")
_FIELD = re.compile(r"(?:const )?(\w+(?:<\w+>)?) ([*\w\[\] +,]+)")


def source_text(name: str) -> str:
    """A file under cuda_src without its comments."""
    return re.sub(r"//[^\n]*", "", (Path(cuda_source_dir()) / name).read_text())


def evaluate(expression: str, names: Mapping[str, Any]) -> int:
    """Value of a C++ integer expression."""
    return int(eval(_compiled(expression), {"__builtins__": {}}, {**_FUNCTIONS, **names}))


@functools.cache
def _compiled(expression: str) -> Any:
    return compile(_python(expression), expression, "eval")


def constants(text: str, **given: int) -> dict[str, int]:
    """Values of all ``constexpr int`` in order, those of template structs for the ``given``
    parameters; what depends on other parameters is left out."""
    values = dict(given)
    for name, expression in _CONSTANT.findall(text):
        try:
            values[name] = evaluate(expression, values)
        except NameError:
            continue
    return values


def body(text: str, head: str) -> str:
    """What stands between the braces behind the first ``head``."""
    start = text.index("{", text.index(head))
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    raise ValueError(f"{head} is not closed")


def assign(statements: str, names: Mapping[str, Any]) -> dict[str, int]:
    """Runs assignments one after the other; returns what they set."""
    made: dict[str, int] = {}
    for statement in filter(None, map(str.strip, statements.split(";"))):
        match = _ASSIGNMENT.fullmatch(statement)
        assert match, statement
        made[match[1]] = evaluate(match[2], {**names, **made})
    return made


def methods(text: str, names: Mapping[str, Any]) -> dict[str, int]:
    """Values of the methods without arguments that return an expression, in order."""
    made: dict[str, Any] = {}
    for name, expression in _METHOD.findall(text):
        value = evaluate(expression, {**names, **{n: lambda v=v: v for n, v in made.items()}})
        made[name] = value
    return made


@dataclass(frozen=True)
class Field:
    """A struct's field: its place in bytes, and how many of its type there are."""

    name: str
    kind: str
    offset: int
    size: int
    count: int


def layout(text: str, name: str, names: Mapping[str, int]) -> tuple[list[Field], int]:
    """(fields, size) of ``struct name``; the structs it holds stand in ``text`` too."""
    fields, size, _ = _layout(text, name, names)
    return fields, size


def _layout(text: str, name: str, names: Mapping[str, int]) -> tuple[list[Field], int, int]:
    name = name.partition("<")[0]
    head = re.search(rf"struct (?:__align__\((\d+)\) )?{name} \{{", text)
    assert head, f"there is no struct {name}"
    fields: list[Field] = []
    end, most = 0, int(head[1] or 1)
    declarations = body(text, head[0]).replace("* ", " *").split(";")
    for declaration in filter(None, map(str.strip, declarations)):
        match = _FIELD.fullmatch(declaration)
        assert match, declaration
        for item in match[2].split(","):
            place = re.fullmatch(r"\s*(\*?)(\w+)((?:\[[^\]]+\])*)\s*", item)
            assert place, declaration
            kind = "pointer" if place[1] else match[1]
            size, align = _size(text, kind, names)
            count = 1
            for length in re.findall(r"\[([^\]]+)\]", place[3]):
                count *= evaluate(length, names)
            offset = -(-end // align) * align
            fields.append(Field(place[2], kind, offset, size * count, count))
            end, most = offset + size * count, max(most, align)
    return fields, -(-end // most) * most, most


def _size(text: str, kind: str, names: Mapping[str, int]) -> tuple[int, int]:
    if kind == "pointer":
        return 8, 8
    if kind in _SIZES:
        return _SIZES[kind], _SIZES[kind]
    _, size, align = _layout(text, kind, names)
    return size, align


def _python(expression: str) -> str:
    """The expression as Python: integer division, its words for logic, and conditionals."""
    text = re.sub(r"\b(0x[\da-fA-F]+|\d+)u\b", r"\1", expression.replace("\n", " "))
    text = re.sub(r"!(?!=)", " not ", text.replace("/", "//"))
    return _conditional(text.replace("&&", " and ").replace("||", " or "))


def _conditional(text: str) -> str:
    mark = _outside(text, "?")
    if mark < 0:
        return _groups(text)
    otherwise = _outside(text, ":", mark + 1, nested=True)
    parts = text[:mark], text[mark + 1 : otherwise], text[otherwise + 1 :]
    condition, then, other = (_conditional(part.strip()) for part in parts)
    return f"(({then}) if ({condition}) else ({other}))"


def _groups(text: str) -> str:
    """Conditionals within parentheses."""
    result, depth, start = "", 0, 0
    for at, letter in enumerate(text):
        if letter == "(":
            start = at + 1 if depth == 0 else start
            result += "(" if depth == 0 else ""
            depth += 1
        elif letter == ")":
            depth -= 1
            if depth == 0:
                result += ", ".join(map(_conditional, _arguments(text[start:at]))) + ")"
        elif depth == 0:
            result += letter
    return result


def _arguments(text: str) -> list[str]:
    comma = _outside(text, ",")
    return [text] if comma < 0 else [text[:comma], *_arguments(text[comma + 1 :].strip())]


def _outside(text: str, wanted: str, start: int = 0, *, nested: bool = False) -> int:
    """Where ``wanted`` stands outside parentheses (and conditionals if ``nested``), or -1."""
    depth = inner = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0 and text[at] == wanted and inner == 0:
            return at
        if depth == 0 and nested:
            inner += {"?": 1, ":": -1}.get(text[at], 0)
    return -1
