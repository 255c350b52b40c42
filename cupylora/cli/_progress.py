"""What ``cupylora run`` is doing now, on stderr: a spinner on a terminal, plain lines elsewhere.

In: ``phase`` and ``detail`` calls of the work. Out, where there is no terminal: at most one line a
second, when the phase has changed or the last line is ten seconds old. A run that is over at once
says nothing, so that stderr holds the one line about what is wrong, if something is.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cupylora.cli._streams import echo

__all__ = ["PlainLines", "Reporter", "Spinner", "open_reporter"]

_QUIET_SECONDS = 2.0
_SECONDS_BETWEEN = 10.0
_LOOK_SECONDS = 1.0


class Reporter(ABC):
    """Told what is being done; a context manager around the work."""

    @abstractmethod
    def phase(self, text: str) -> None:
        """A new part of the work begins."""

    @abstractmethod
    def detail(self, text: str) -> None:
        """Where the part stands."""

    @abstractmethod
    def note(self, text: str) -> None:
        """One line to show at once."""

    @abstractmethod
    def __enter__(self) -> Reporter: ...

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class PlainLines(Reporter):
    """Lines by ``write``, from a thread of its own, since a single step may take minutes."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._start = clock()
        self._text, self._new, self._last = "starting", True, self._start - _SECONDS_BETWEEN
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def phase(self, text: str) -> None:
        """Shown at the next look."""
        self._text, self._new = text, True

    def detail(self, text: str) -> None:
        """Shown with the next line that is due."""
        self._text = text

    def note(self, text: str) -> None:
        """Written at once."""
        self._write(text)

    def look(self) -> None:
        """Write a line if one is due."""
        now = self._clock()
        due = self._new or now - self._last >= _SECONDS_BETWEEN
        if due and now - self._start >= _QUIET_SECONDS:
            self._new, self._last = False, now
            self._write(f"{now - self._start:.0f} s: {self._text}")

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            self.look()

    def __enter__(self) -> PlainLines:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()


class Spinner(Reporter):
    """One line on a terminal that changes, and goes when the work is done."""

    def __init__(self, console: Console) -> None:
        dots = "dots" if console.encoding.startswith("utf") else "line"
        columns = (SpinnerColumn(dots), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)

    def phase(self, text: str) -> None:
        """Shown at once, as a detail is."""
        self.detail(text)

    def detail(self, text: str) -> None:
        """Shown at once."""
        self._progress.update(self._task, description=text)

    def note(self, text: str) -> None:
        """Written above the spinner, and stays."""
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Spinner:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def open_reporter() -> Reporter:
    """The one that suits stderr."""
    console = Console(stderr=True)
    if console.is_terminal:
        return Spinner(console)
    return PlainLines(lambda text: echo(f"cupylora: {text}", err=True))
