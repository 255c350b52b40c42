"""Other projects' kernels on the same points, on the same device, in the same run.

In: the folder that the peers' ``setup.sh`` has made, and a Python that has torch and Triton. Worker
processes (``_peer_worker``) hold them, so that nothing here needs torch. Before anything is timed
``prepare`` has each peer's outputs checked, which compiles its kernels too, by several workers at
once; a peer that is off on a point, or fails, has no time there. Each point is then timed by one
worker right after ours, while nothing else runs.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cupylora.bench.points import Point
from cupylora.errors import ArgumentError, CupyloraError
from cupylora.text import quoted

__all__ = ["Peers", "serves"]

_HARNESS = ("common.py", "dense.py", "moe.py")
_WORKER = Path(__file__).with_name("_peer_worker.py")
_MOST_WORKERS = 8
_WORKER_BYTES = 8_000_000_000
_TAIL = 4000
_LOOK_SECONDS = 0.5


class _LostError(CupyloraError):
    """A worker has ended."""


class _Worker:
    """One process."""

    def __init__(self, python: str, folder: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        try:
            self._process = subprocess.Popen(
                [python, str(_WORKER), str(folder.resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for us, who end it
            )
        except OSError as error:
            self._log.close()
            raise ArgumentError(f"--peers-python {python}: {error.strerror}") from error

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """An answer. Raises _LostError with the process's last words if it has ended."""
        request = json.dumps({"do": do, **values}) + "\n"
        source, sink = self._process.stdout, self._process.stdin
        line = b""
        if source is not None and sink is not None:
            try:
                sink.write(request.encode())
                sink.flush()
                line = source.readline()
            except OSError:
                line = b""
        if not line.endswith(b"\n"):
            raise _LostError(self._last_words())
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise _LostError(f"it answers {quoted(line)}") from error
        return answer

    def _last_words(self) -> str:
        try:
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - _TAIL))
            lines = self._log.read().decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):  # closed meanwhile, by who ended the process
            return "it was stopped"
        return lines[-1].strip() if lines else "it ended without a word"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


def serves(point: Point) -> bool:
    """Whether the harness has this kind of point: one dense module, a MoE block, or a route, with
    uniform draws."""
    if point.routing != "uniform" or len(point.widths) > 1:
        return False
    return point.kind in ("dense", "moe", "route")


class Peers:
    """The peers' side of a bench; a context manager that ends its processes.

    Raises ArgumentError, before anything is measured, where the folder is none or torch is missing.
    """

    def __init__(self, folder: Path, python: str, say: Callable[[str], None] = lambda _: None):
        missing = [name for name in _HARNESS if not (folder / "harness" / name).is_file()]
        if missing:
            raise ArgumentError(
                f"--peers {folder}: {folder / 'harness' / missing[0]} is not there; give the "
                "folder that the peers' setup.sh has made"
            )
        self._folder, self._python, self._say = folder, python, say
        self.versions: dict[str, str] = {}
        self._bad: dict[tuple[tuple[str | int, ...], str], str] = {}
        self._failed: dict[str, list[str]] = {}
        self._workers: list[_Worker] = []
        self._lost = False

    def __enter__(self) -> Peers:
        try:
            hello = self._new().ask("hello")
        except _LostError as error:
            self._close()
            raise ArgumentError(
                f"--peers: {self._python} cannot run them ({error}); torch, Triton and the "
                "folder's harness are needed (--peers-python names another Python)"
            ) from error
        except BaseException:
            self._close()
            raise
        if not hello.get("device"):
            self._close()
            raise ArgumentError(f"--peers: the torch of {self._python} sees no CUDA device")
        self.versions = hello["versions"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _new(self) -> _Worker:
        worker = _Worker(self._python, self._folder)
        self._workers.append(worker)
        return worker

    def _close(self) -> None:
        while self._workers:
            self._workers.pop().close()

    def prepare(self, points: Sequence[Point], free_bytes: int) -> None:
        """Check every peer on every point, and so compile its kernels."""
        waiting: queue.SimpleQueue[Point] = queue.SimpleQueue()
        served = [point for point in points if serves(point)]
        for point in served:
            waiting.put(point)
        count = max(1, min(_MOST_WORKERS, os.cpu_count() or 1, free_bytes // _WORKER_BYTES))
        count = min(count, len(served))
        workers = [*self._workers, *(self._new() for _ in range(count - len(self._workers)))]
        threads = [
            threading.Thread(target=self._check_all, args=(w, waiting), daemon=True)
            for w in workers
        ]
        for thread in threads:
            thread.start()
        while threads:
            done = len(served) - waiting.qsize()
            self._say(f"checking and compiling the peers' kernels: {done} of {len(served)} points")
            threads[0].join(_LOOK_SECONDS)
            threads = [thread for thread in threads if thread.is_alive()]
        while len(self._workers) > 1:  # one is kept to time them
            self._workers.pop().close()

    def _check_all(self, worker: _Worker, waiting: queue.SimpleQueue[Point]) -> None:
        while True:
            try:
                point = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answer = worker.ask("check", seed=point.seed, **_request(point))
            except ValueError:  # closed meanwhile
                return
            except _LostError as error:
                self._bad[point.key, ""] = f"the process that checked it ended: {error}"
                return
            bad = answer.get("bad", {}) if "error" not in answer else {"": answer["error"]}
            for name, why in bad.items():
                self._bad[point.key, name] = why

    def measure(self, point: Point, bandwidth: float) -> dict[str, float]:
        """Microseconds by peer; none once the worker has been lost."""
        if self._lost or not serves(point) or (point.key, "") in self._bad:
            return {}
        try:
            answer = self._workers[0].ask("time", bandwidth=bandwidth, **_request(point))
        except _LostError as error:
            self._lost = True
            self._failed.setdefault("all peers", []).append(f"their process ended: {error}")
            return {}
        failed = answer.get("failed", {}) if "error" not in answer else {"all": answer["error"]}
        for name, why in failed.items():
            self._failed.setdefault(name, []).append(why)
        times: dict[str, float] = answer.get("us", {})
        return {name: us for name, us in times.items() if (point.key, name) not in self._bad}

    @property
    def remarks(self) -> list[str]:
        """What kept peers from having a time, a line for each."""
        lines = [
            f"{name} failed on {len(reasons)} points, first: {reasons[0]}"
            for name, reasons in self._failed.items()
        ]
        off: dict[str, list[str]] = {}
        for (_, name), why in self._bad.items():
            off.setdefault(name or "all peers", []).append(why)
        lines += [
            f"{name} not timed on {len(reasons)} points, where its check failed, first: "
            f"{reasons[0]}"
            for name, reasons in off.items()
        ]
        return lines


def _request(point: Point) -> dict[str, Any]:
    names = "kind model in_features out_features rank max_loras tokens active experts top_k"
    return {name: getattr(point, name) for name in names.split()}
