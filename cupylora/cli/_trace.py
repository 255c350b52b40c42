"""Traffic as JSON Lines: what came to a server step by step, for ``cupylora run --trace``.

A line is one step:
``{"step": 7, "load": ["b"], "unload": ["a"], "requests": [{"tokens": 3, "adapter": "b"}]}``.
``step`` rises; ``load`` and ``unload`` may be left out, and happen before the step, unloads first;
a request's ``adapter`` may be null or left out: no adapter. ``tools/make_trace.py`` writes such
files. In: a file. Out: TraceSteps, read as they are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupylora.errors import ArgumentError
from cupylora.files import reason
from cupylora.text import shown

__all__ = ["TraceStep", "read_trace"]

_KEYS = {"step", "load", "unload", "requests"}
_REQUEST_KEYS = {"tokens", "adapter"}
_LONGEST_LINE = 1 << 20
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class TraceStep:
    """One step. requests: (tokens, adapter's name or None)."""

    step: int
    load: tuple[str, ...]
    unload: tuple[str, ...]
    requests: tuple[tuple[int, str | None], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(tokens for tokens, _ in self.requests)

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters of the requests, each once."""
        return tuple(dict.fromkeys(name for _, name in self.requests if name is not None))


def read_trace(path: Path) -> Iterator[TraceStep]:
    """The steps of a file in order. Raises ArgumentError that names the line that is none."""
    last = -1
    try:
        with path.open(encoding="utf-8") as lines:
            for number in range(1, 1 << 62):
                line = lines.readline(_LONGEST_LINE)
                if not line:
                    break
                if len(line) == _LONGEST_LINE:
                    raise ArgumentError(
                        f"--trace {path}, line {number} has over {_LONGEST_LINE} characters; split "
                        "the step"
                    )
                if not line.strip():
                    continue
                found = _parse(line, f"--trace {path}, line {number}")
                if found.step <= last:
                    raise ArgumentError(
                        f"--trace {path}, line {number}: step {found.step} follows step {last}; "
                        "steps must rise"
                    )
                last = found.step
                yield found
    except UnicodeDecodeError as error:
        raise ArgumentError(f"--trace {path}: cannot be read: it is not UTF-8") from error
    except OSError as error:
        raise ArgumentError(f"--trace {path}: cannot be read: {reason(error)}") from error
    if last < 0:
        raise ArgumentError(f"--trace {path}: there are no steps in it")


def _parse(line: str, where: str) -> TraceStep:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{where}: not a JSON object on a line: {error}") from error
    if not isinstance(found, dict) or not {"step", "requests"} <= found.keys() <= _KEYS:
        raise ArgumentError(
            f"{where}: an object with step and requests, and load and unload if there are any, is "
            "needed"
        )
    return TraceStep(
        _integer(found["step"], 0, 1 << 62, f"{where}: step"),
        _names(found.get("load", []), f"{where}: load"),
        _names(found.get("unload", []), f"{where}: unload"),
        tuple(
            _request(request, f"{where}: requests[{index}]")
            for index, request in enumerate(_items(found["requests"], f"{where}: requests"))
        ),
    )


def _request(value: Any, where: str) -> tuple[int, str | None]:
    if not isinstance(value, dict) or not {"tokens"} <= value.keys() <= _REQUEST_KEYS:
        raise ArgumentError(f"{where}: an object with tokens, and adapter if it has one, is needed")
    name = value.get("adapter")
    if name is not None:
        (name,) = _names([name], f"{where}.adapter")
    return _integer(value["tokens"], 1, _MOST_TOKENS, f"{where}.tokens"), name


def _integer(value: Any, low: int, high: int, where: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ArgumentError(f"{where} is {shown(repr(value))}; an integer from {low} is needed")
    return value


def _items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ArgumentError(f"{where} is a {type(value).__name__}; a list is needed")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    names = _items(value, where)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{where}: {shown(repr(name))} is no adapter's name")
    return tuple(names)
