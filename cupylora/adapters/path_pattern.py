"""Keys of rank_pattern and alpha_pattern: regular expressions from a file, matched in bounded time.

``peft_config`` asks a :class:`PatternTable` which key of a setting is the first to match a module's
path, as peft matches: from the start of the path or after one of its dots, to the path's end.
Python's ``re`` backtracks, so that one hostile key could take years. Here a key
becomes its positions (single characters and classes) with the positions that may stand before each
(Glushkov's automaton), and all ways to match, of many keys together, are followed at once: a path
costs at most its length times the keys', whatever they are. Keys that are paths need none of that:
the table looks them up.

Read: plain characters, ``.``, classes, escapes (``\\.``, ``\\d``, ``\\w``, ...), groups (named ones
too), ``|``, ``*``, ``+``, ``?``, ``{m,n}``, ``^`` and ``$``. Refused: whatever needs more than that
(backreferences, lookarounds, ``\\b``, flags), and keys of over 4096 characters or positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cupylora.text import quoted

__all__ = ["LONGEST_KEY", "PatternTable", "TooMuchWorkError"]

LONGEST_KEY = 4096
"""Characters of a key, and atoms it may have once counted repeats are written out."""

_MOST_KEYS = 4096
"""Keys of one setting that are expressions, and forms of those that are paths."""
_MOST_ATOMS = 1 << 18
"""Of all expressions of one setting."""

_DEEPEST = 20
_TOGETHER = 1 << 12
"""Atoms from which on a group of expressions takes no further one."""
_MOST_STEPS, _CACHED = 1 << 14, 1 << 25
"""Steps that a group keeps: so many, and so many times its atoms, at most."""
_MOST_WORK = 1 << 24
"""Positions that one setting may follow, over all modules: some seconds."""
_PATH = re.compile(r"(?:[\w.-]|\\\.)+")
_GROUP = re.compile(r"\((?:\?:|\?P<(?P<name>[^\W\d]\w*)>)?")
_START, _END = "^", "$"
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]")
_ESCAPE = re.compile(r"\\(?:[dDwWsS]|[^a-zA-Z0-9])")
_REPEAT = re.compile(r"[*+?]|\{([0-9]{1,3})?(?:(,)([0-9]{1,3})?)?\}")


class TooMuchWorkError(Exception):
    """The modules asked for and the keys together take too long."""


@dataclass
class _Work:
    """What matching has cost so far: positions followed."""

    done: int = 0

    def add(self, positions: int) -> None:
        self.done += positions
        if self.done > _MOST_WORK:
            raise TooMuchWorkError


class PatternTable:
    """The keys of one setting, in the file's order: the first that matches counts.

    ``first`` and ``unmatched`` raise TooMuchWorkError where they have taken too long, all calls
    together.
    """

    def __init__(self) -> None:
        self._count = self._atoms = 0
        self._work = _Work()
        self._expressions: list[tuple[int, _Parser]] = []
        self._groups: list[_Group] | None = None
        # Keys that are paths by their length, then by the places of their dots, which match any
        # character: the key without them → its number.
        self._paths: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        self._forms = 0
        self._unused: set[int] = set()
        self._asked: dict[tuple[str, ...], None] = {}

    def add(self, key: str) -> None:
        """Give ``key`` the next number. Raises ValueError if it cannot be read."""
        if len(key) > LONGEST_KEY:
            raise ValueError(f"it has {len(key)} characters; at most {LONGEST_KEY} are read")
        if _PATH.fullmatch(key):
            self._add_path(key)
        else:
            expression = _Parser(key)
            self._expressions.append((self._count, expression))
            self._atoms += len(expression.atoms)
            self._groups = None
        if len(self._expressions) + self._forms > _MOST_KEYS or self._atoms > _MOST_ATOMS:
            raise ValueError(
                f"with those before it, it is beyond what is read ({_MOST_KEYS} expressions, "
                f"{_MOST_ATOMS} positions)"
            )
        self._unused.add(self._count)
        self._count += 1

    def _add_path(self, key: str) -> None:
        text = key.replace("\\.", "\n")  # a literal dot; no key that is a path has a newline
        wild = tuple(i for i, character in enumerate(text) if character == ".")
        forms = self._paths.setdefault(len(text), {})
        self._forms += wild not in forms
        forms.setdefault(wild, {})[text.replace("\n", ".")] = self._count

    def first(self, paths: tuple[str, ...]) -> int | None:
        """The number of the first key that matches any of ``paths``, names of one module."""
        if not self._count:
            return None
        if self._groups is None:
            self._groups = _grouped(self._expressions, self._work)
        self._asked[paths] = None
        found = {number for path in paths for number in self._found(path)}
        self._unused -= found
        best = min(found, default=self._count)
        for group in self._groups:
            if group.numbers[0] > best:
                break
            for path in paths:
                matching = group.matching(path)
                self._unused.difference_update(matching)
                best = min(best, *matching, self._count)
        return best if best < self._count else None

    def _found(self, path: str) -> Iterator[int]:
        """The keys that are paths and match ``path``."""
        start = 0
        while True:
            end = path[start:]
            for wild, numbers in self._paths.get(len(end), {}).items():
                characters = list(end)
                for i in wild:
                    if characters[i] != "\n":
                        characters[i] = "."
                number = numbers.get("".join(characters))
                if number is not None:
                    yield number
            start = path.find(".", start) + 1
            if not start:
                return

    def unmatched(self) -> list[int]:
        """The numbers of the keys that match none of the modules asked for."""
        for group in self._groups or ():
            for paths in self._asked:
                if self._unused.isdisjoint(group.numbers):
                    break
                for path in paths:
                    self._unused.difference_update(group.matching(path))
        return sorted(self._unused)


def _grouped(expressions: Iterable[tuple[int, _Parser]], work: _Work) -> list[_Group]:
    groups: list[_Group] = []
    for number, expression in expressions:
        if not groups or groups[-1].atoms >= _TOGETHER:
            groups.append(_Group(work))
        groups[-1].add(number, expression)
    return groups


class _Group:
    """Keys matched together: their positions one after the other, with bits to match."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self.numbers: list[int] = []
        self._owners: list[int] = []
        self._atoms: list[str] = []
        self._before: list[int] = []
        self._first = self._last = 0
        self._wanted: int | None = None
        self._masks: dict[str, int] = {}
        self._steps: dict[tuple[int, str], tuple[int, int]] = {}
        self._matching: dict[int, tuple[int, ...]] = {}

    @property
    def atoms(self) -> int:
        """How many positions it has."""
        return len(self._atoms)

    def add(self, number: int, key: _Parser) -> None:
        """Before anything is matched."""
        shift = self.atoms
        self.numbers.append(number)
        self._owners += [number] * len(key.atoms)
        self._atoms += key.atoms
        self._before += [before << shift for before in key.before]
        self._first |= key.whole.first << shift
        self._last |= key.whole.last << shift

    def matching(self, path: str) -> tuple[int, ...]:
        """The numbers of the keys that match all of ``path``, or all after one of its dots."""
        starts = self._starts(path)
        known = self._matching.get(starts)
        if known is None:
            known = tuple({self._owners[i] for i in _indices(starts)})
            self._keep(self._matching, starts, known)
        return known

    def _starts(self, path: str) -> int:
        """The positions at which the matches begin."""
        if self._wanted is None:
            self._wanted = self._past(_END, self._last)
        # Backwards, since most paths differ from a key in their last characters already.
        wanted, starts = self._wanted, 0
        for at in range(len(path) - 1, -1, -1):
            standing, wanted = self._step(wanted, path[at])
            if not standing:
                return starts
            if at == 0 or path[at - 1] == ".":
                starts |= standing & self._first
        anchored = self._past(_START, wanted) & self._first
        return starts | (anchored & self._anchors(_START))

    def _keep(self, known: dict[Any, Any], key: Any, value: Any) -> None:
        if len(known) >= min(_MOST_STEPS, _CACHED // (self.atoms + 1)):
            known.clear()
        known[key] = value

    def _step(self, wanted: int, character: str) -> tuple[int, int]:
        """Positions of ``wanted`` at which ``character`` may stand, and those before these."""
        known = self._steps.get((wanted, character))
        if known is None:
            standing = wanted & self._mask(character)
            known = standing, self._preceding(standing)
            self._keep(self._steps, (wanted, character), known)
        return known

    def _mask(self, character: str) -> int:
        """All positions at which ``character`` may stand."""
        mask = self._masks.get(character)
        if mask is None:
            mask = _bits(i for i, atom in enumerate(self._atoms) if _fits(atom, character))
            self._masks[character] = mask
            self._work.add(self.atoms)
        return mask

    def _past(self, anchor: str, wanted: int) -> int:
        """``wanted`` and what may precede it across any ``anchor``, which take no room."""
        anchors, before = self._anchors(anchor), 0
        while wanted != before:
            before, wanted = wanted, wanted | self._preceding(wanted & anchors)
        return wanted

    def _anchors(self, anchor: str) -> int:
        if anchor * 2 not in self._masks:  # no single character
            self._masks[anchor * 2] = _bits(i for i, a in enumerate(self._atoms) if a == anchor)
        return self._masks[anchor * 2]

    def _preceding(self, positions: int) -> int:
        self._work.add(1 + positions.bit_count())
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
        self.names: dict[str, int] = {}
        self.whole = self._parsed()

    def _parsed(self) -> _Part:
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
        found = _GROUP.match(self.key, start)
        self.at = found.end() if found else start
        if self._next() == "?":
            raise ValueError(f"the group {quoted(self.key[start : start + 4])} is not read")
        name = found["name"] if found else None
        if name and self.names.setdefault(name, start) != start:
            raise ValueError(f"two groups are named {quoted(name)}")
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
