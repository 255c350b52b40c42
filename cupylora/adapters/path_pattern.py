"""Keys of rank_pattern and alpha_pattern: regular expressions from a file, matched in bounded time.

``peft_config`` asks a :class:`PathPattern` whether it matches a module's path, as peft does: from
the start of the path or after one of its dots, to the path's end. Python's ``re`` backtracks, so
that one hostile key could take years. Here a key becomes its positions (single characters and
classes) with the positions that may stand before each (Glushkov's automaton), and all ways to match
are followed at once: a path costs at most its length times the key's, whatever the key.

Read: plain characters, ``.``, classes, escapes (``\\.``, ``\\d``, ``\\w``, ...), groups, ``|``,
``*``, ``+``, ``?``, ``{m,n}``, ``^`` and ``$``. Refused: whatever needs more than that
(backreferences, lookarounds, ``\\b``, flags), and keys of over 256 characters or positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cupylora.text import quoted

__all__ = ["LONGEST_KEY", "PathPattern"]

LONGEST_KEY = 256
"""Characters of a key, and atoms it may have once counted repeats are written out."""

_DEEPEST = 20
_CACHED = 1 << 14
_START, _END = "^", "$"
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]")
_ESCAPE = re.compile(r"\\(?:[dDwWsS]|[^a-zA-Z0-9])")
_REPEAT = re.compile(r"[*+?]|\{([0-9]{1,3})?(?:(,)([0-9]{1,3})?)?\}")


class PathPattern:
    """One key. Raises ValueError, saying what is not read, for a key outside the above."""

    def __init__(self, key: str) -> None:
        parser = _Parser(key)
        whole = parser.parse()
        self._atoms, self._before = parser.atoms, parser.before
        self._first = whole.first
        self._last = self._past(_END, whole.last)
        self._masks: dict[str, int] = {}
        self._steps: dict[tuple[int, str], tuple[int, int]] = {}

    def matches(self, path: str) -> bool:
        """Whether the key matches all of ``path``, or all that follows one of its dots."""
        # Backwards, since most paths differ from a key in their last characters already.
        wanted = self._last
        for at in range(len(path) - 1, -1, -1):
            standing, wanted = self._step(wanted, path[at])
            if not standing:
                return False
            if standing & self._first and (at == 0 or path[at - 1] == "."):
                return True
        starts = self._past(_START, wanted) & self._first
        return any(self._atoms[i] == _START for i in _indices(starts))

    def _step(self, wanted: int, character: str) -> tuple[int, int]:
        """Positions of ``wanted`` at which ``character`` may stand, and those before these."""
        known = self._steps.get((wanted, character))
        if known is None:
            standing = wanted & self._mask(character)
            known = standing, self._preceding(standing)
            if len(self._steps) >= _CACHED:
                self._steps.clear()
            self._steps[wanted, character] = known
        return known

    def _mask(self, character: str) -> int:
        """All positions at which ``character`` may stand."""
        mask = self._masks.get(character)
        if mask is None:
            mask = _bits(i for i, atom in enumerate(self._atoms) if _fits(atom, character))
            self._masks[character] = mask
        return mask

    def _past(self, anchor: str, wanted: int) -> int:
        """``wanted`` and what may precede it across any ``anchor``, which take no room."""
        anchors, before = _bits(i for i, atom in enumerate(self._atoms) if atom == anchor), 0
        while wanted != before:
            before, wanted = wanted, wanted | self._preceding(wanted & anchors)
        return wanted

    def _preceding(self, positions: int) -> int:
        result = 0
        for i in _indices(positions):
            result |= self._before[i]
        return result


@lru_cache(1 << 14)
def _fits(atom: str, character: str) -> bool:
    """Whether ``atom`` is an expression of ``character``; an anchor is of none."""
    return atom not in (_START, _END) and re.fullmatch(atom, character) is not None


def _bits(indices: Iterator[int]) -> int:
    return sum(1 << i for i in indices)


def _indices(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


@dataclass(frozen=True)
class _Part:
    """Some of a key: the positions it can begin and end at (as bits), and if it can be empty."""

    first: int = 0
    last: int = 0
    empty: bool = True


class _Parser:
    """Key → ``atoms`` (by position, the expression of one character) and ``before`` (by position,
    as bits, the positions that may stand directly before it)."""

    def __init__(self, key: str) -> None:
        if len(key) > LONGEST_KEY:
            raise ValueError(f"it has {len(key)} characters; at most {LONGEST_KEY} are read")
        self.key = key
        self.at = 0
        self.count = 0
        self.depth = 0
        self.atoms: list[str] = []
        self.before: list[int] = []

    def parse(self) -> _Part:
        whole = self._branches()
        if self.at < len(self.key):
            raise ValueError(f"the ) at {self.at} closes nothing")
        return whole

    def _next(self) -> str:
        return self.key[self.at : self.at + 1]

    def _branches(self) -> _Part:
        part = self._sequence()
        while self._next() == "|":
            self.at += 1
            other = self._sequence()
            part = _Part(
                part.first | other.first, part.last | other.last, part.empty or other.empty
            )
        return part

    def _sequence(self) -> _Part:
        part = _Part()
        while self._next() not in ("", "|", ")"):
            part = self._joined(part, self._repeated())
        return part

    def _joined(self, left: _Part, right: _Part) -> _Part:
        self._follow(left, right)
        return _Part(
            left.first | (right.first if left.empty else 0),
            right.last | (left.last if right.empty else 0),
            left.empty and right.empty,
        )

    def _follow(self, left: _Part, right: _Part) -> None:
        for i in _indices(right.first):
            self.before[i] |= left.last

    def _repeated(self) -> _Part:
        """An atom with the repeat behind it, if any; a counted one is written out."""
        start = self.at
        part = self._atom()
        found = _REPEAT.match(self.key, self.at)
        if not found:
            return part
        end = found.end() + (self.key[found.end() : found.end() + 1] == "?")  # lazy: matches alike
        if self.key[end : end + 1] in ("*", "+", "?", "{"):
            raise ValueError(f"{quoted(self.key[self.at : end + 1])} at {self.at} is no repeat")
        if self.key[start] in (_START, _END):
            raise ValueError(f"the {found[0]} at {self.at} repeats nothing")
        least, most = _bounds(found)
        result = _Part()
        for number in range(least + 1 if most is None else most):
            copy = self._again(start) if number else part
            if number >= least:
                copy = _Part(copy.first, copy.last, empty=True)
                if most is None:
                    self._follow(copy, copy)
            result = self._joined(result, copy)
        self.at = end
        return result

    def _again(self, start: int) -> _Part:
        """One more copy of the atom at ``start``."""
        self.at = start
        return self._atom()

    def _atom(self) -> _Part:
        self.count += 1
        if self.count > LONGEST_KEY:
            raise ValueError(f"its repeats make more than {LONGEST_KEY} atoms")
        character = self._next()
        if character == "(":
            return self._group()
        if character in ("*", "+", "?", "{"):
            raise ValueError(f"the {character} at {self.at} repeats nothing")
        text = character
        for opener, pattern in (("[", _CLASS), ("\\", _ESCAPE)):
            if character == opener:
                found = pattern.match(self.key, self.at)
                if not found:
                    raise ValueError(f"what begins with {character} at {self.at} is not read")
                text = found[0]
        self.at += len(text)
        if len(text) == 1 and character not in (".", _START, _END):
            text = re.escape(text)
        _check_atom(text)
        self.atoms.append(text)
        self.before.append(0)
        bit = 1 << len(self.atoms) - 1
        return _Part(bit, bit, empty=False)

    def _group(self) -> _Part:
        start = self.at
        self.at += 3 if self.key.startswith("(?:", start) else 1
        if self._next() == "?":
            raise ValueError(f"the group {quoted(self.key[start : start + 4])} is not read")
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(f"its groups nest more than {_DEEPEST} deep")
        part = self._branches()
        self.depth -= 1
        if self._next() != ")":
            raise ValueError(f"the ( at {start} is not closed")
        self.at += 1
        return part


def _check_atom(text: str) -> None:
    """Raise ValueError for a class that Python does not take (``[z-a]``)."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{quoted(text)}: {error.msg}") from error


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    """Least and most times of a repeat; None: no limit."""
    simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if found[0] in simple:
        return simple[found[0]]
    low, comma, high = found.groups()
    least = int(low or 0)
    most = int(high) if high else None if comma else least
    if not (low or high) or (most is not None and most < least):
        raise ValueError(f"{found[0]} is no repeat")
    return least, most
