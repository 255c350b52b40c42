"""CUDA source text made fit for a C++ compiler, line for line.

Keywords and built-ins are the business of ``cuda.h``. What remains is text that C++ has no form
for: ``__shared__`` declarations, which become references to the CTA's memory, and asm statements,
which become calls.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from .instructions import function_of

__all__ = ["rewritten"]

_COMMENT = re.compile(r"//[^\n]*")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\[\];")
_STATIC = re.compile(r"__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+([^;]+);")
_DECLARATOR = re.compile(r"(\w+)((?:\[[^\]]+\])*)$")
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def rewritten(text: str, numbers: Iterator[int]) -> str:
    """``text`` for the emulator; ``numbers`` has one for each __shared__ variable of a program."""
    text = _COMMENT.sub("", text)
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emu::dynamic_shared());", text)
    text = _STATIC.sub(lambda found: _variables(*found.groups(), numbers), text)
    return _without_asm(text)


def _variables(type_name: str, declarators: str, numbers: Iterator[int]) -> str:
    made = []
    for declarator in declarators.split(","):
        found = _DECLARATOR.match(declarator.strip())
        if found is None:
            raise ValueError(f"a __shared__ declaration of another form: {declarator!r}")
        name, dimensions = found.groups()
        made.append(f"auto& {name} = emu::shared<{type_name}{dimensions}>({next(numbers)});")
    return " ".join(made)


def _without_asm(text: str) -> str:
    parts, at = [], 0
    while (found := _ASM.search(text, at)) is not None:
        end = _closing(text, found.end())
        statement = text[found.end() : end]
        parts += [text[at : found.start()], _call(statement), "\n" * statement.count("\n")]
        at = end + 1
    return "".join([*parts, text[at:]])


def _closing(text: str, at: int) -> int:
    """Place of the parenthesis that closes the one before ``at``."""
    return next(place for place, char, depth in _outside_strings(text, at) if depth < 0)


def _outside_strings(text: str, at: int) -> Iterator[tuple[int, str, int]]:
    """(place, character, open brackets) of what is in no string."""
    depth = 0
    while at < len(text):
        if text[at] == '"':
            found = _STRING.match(text, at)
            assert found is not None
            at = found.end()
            continue
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text[at], 0)
        yield at, text[at], depth
        at += 1


def _call(statement: str) -> str:
    """The call for what stands between an asm's parentheses."""
    sections = _split(statement, ":")
    ptx = "".join(_STRING.findall(sections[0]))
    operands = itertools.chain.from_iterable(_split(part, ",") for part in sections[1:3])
    values = [_STRING.sub("", operand, count=1).strip() for operand in operands]
    values = [value[1:-1].strip() for value in values if value]  # out of their parentheses
    return f"emu::ptx::{function_of(ptx)}({', '.join(' '.join(v.split()) for v in values)})"


def _split(text: str, separator: str) -> list[str]:
    cuts = [at for at, char, depth in _outside_strings(text, 0) if char == separator and depth == 0]
    starts, ends = [0, *(at + 1 for at in cuts)], [*cuts, len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]
