"""Checks and times forms of the LoRA kernels beside the shipped one, on the current GPU.

``PYTHONPATH=$PWD:$PWD/tools python3 tools/tune_kernels.py --seconds 300 --json tune.json``. What is
timed are the batches that miss their bars (``TARGETS``): rotating input sets in one CUDA graph, the
median replay over the number of sets, as ``cupylora bench`` does. A form's outputs must be the
shipped form's bit for bit, and within the bench's bounds of a float32 reference.

Each target has a process of its own. One that dies or does not answer costs the form that it was
asked for, not the run; results are written as they come. After the named forms of a target its
settings are changed one at a time from the best of them, as long as its share of the time lasts.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from kernel_forms import DEFINES, SHIPPED, Form, find_form, form_of, installed

from cupylora.backend import ArrayBackend
from cupylora.bench.points import Point, suite_points
from cupylora.bench.pools import Pools
from cupylora.bench.timing import Graphs
from cupylora.bench.workloads import Workload, make_workload
from cupylora.ops import _lora_fused

ARCH = "sm_90a"
_GAIN = 0.996
"""A round of changes is followed by another if it leaves at most this share of the time."""

_BYTES_PER_US = 4.2465e6
"""Of a copy on an H200, read and written."""

_MANY_TOKENS = 1024
_FEW_ROWS = 130
"""Up to so many a round of the ring may leave many CTAs without an item."""

_REPLAYS = 9
_BEHIND_REPLAYS = 101
_FIRST_SECONDS = 90.0
_ANSWER_SECONDS = 25.0
_COMPILE_SECONDS = 110.0
_LEAST_SECONDS = 8.0
"""Of a target, once its process has started."""

_MOST_LOST = 4


@dataclass(frozen=True)
class Target:
    """A batch, with microseconds as they were and as they should be.

    max_rank: that the runtime allows, if not the adapters' own. first_only: gate and up alone.
    behind: dense, float16, behind a library GEMM that does not let its successor start early.
    width: of a dense module, 4096 wide on its other side.
    """

    name: str
    now: float
    bar: float
    model: str = ""
    rank: int = 16
    tokens: int = 1
    active: int = 1
    max_rank: int | None = None
    first_only: bool = False
    behind: bool = False
    width: int = 0

    @property
    def wide(self) -> bool:
        """Whether the ring's instance of four rank tiles serves."""
        return (self.max_rank or self.rank) > 32

    @property
    def few(self) -> bool:
        """Whether a batch has few rows, and so row tiles."""
        return not self.behind and self.point().rows <= _FEW_ROWS

    def point(self) -> Point:
        """The bench's point; its adapters have ``rank``."""
        sizes: dict[str, Any] = {"tokens": self.tokens, "active": self.active}
        sizes |= {"out_features": self.width} if self.width else {"model": self.model}
        suite = suite_points("dense" if self.width else "moe")
        found = [p for p in suite if all(getattr(p, k) == sizes[k] for k in sizes)]
        same = [p for p in found if p.rank == self.rank]
        return same[0] if same else replace(found[0], rank=self.rank)


_QWEN, _MIXTRAL, _DEEPSEEK, _OSS = "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"
TARGETS = (
    Target("qwen r16 T32/16", 26, 24, _QWEN, tokens=32, active=16),
    Target("qwen r16 T128/16", 73.3, 69, _QWEN, tokens=128, active=16),
    Target("gpt-oss r16 T32/4", 22, 22, _OSS, tokens=32, active=4),
    Target("mixtral r16 T32/4", 24.6, 22, _MIXTRAL, tokens=32, active=4),
    Target("mixtral r16 T1", 8.28, 7, _MIXTRAL),
    Target("deepseek r16 T1", 8.37, 7.5, _DEEPSEEK),
    Target("behind GEMM T1", 4.71, 3.4, behind=True),
    Target("behind GEMM T32/16", 6.14, 4.5, tokens=32, active=16, behind=True),
    Target("qwen r16 T4096/1", 244, 190, _QWEN, tokens=4096),
    Target("qwen r16 T4096/16", 334, 290, _QWEN, tokens=4096, active=16),
    Target("mixtral r16 T4096/16", 523, 440, _MIXTRAL, tokens=4096, active=16),
    Target("qwen r64 T4096/16", 1028, 720, _QWEN, rank=64, tokens=4096, active=16),
    Target("qwen r64 T4096/1", 493, 369, _QWEN, rank=64, tokens=4096),
    Target("4096 r64 T4096/4", 71.6, 58.2, rank=64, tokens=4096, active=4, width=4096),
    Target("14336 r64 T4096/4", 154.6, 129.6, rank=64, tokens=4096, active=4, width=14336),
    Target("qwen r8 of 64 T1", 3.98, 3.5, _QWEN, 8, max_rank=64, first_only=True),
    Target("qwen r8 of 64 T32/16", 20.2, 12, _QWEN, 8, 32, 16, max_rank=64, first_only=True),
    Target("qwen r8 of 64 T128/16", 66.2, 29.9, _QWEN, 8, 128, 16, max_rank=64, first_only=True),
    Target("qwen r64 T128/16", 231, 220, _QWEN, rank=64, tokens=128, active=16),
    Target("4096 r64 T1", 3.9, 2.9, rank=64, width=4096),
    Target("4096 r64 T8/1", 5.0, 3.3, rank=64, tokens=8, width=4096),
    Target("4096 r64 T32/1", 5.9, 4.1, rank=64, tokens=32, width=4096),
    Target("4096 r64 T32/16", 10.0, 8.3, rank=64, tokens=32, active=16, width=4096),
    Target("4096 r64 T128/1", 15.0, 6.3, rank=64, tokens=128, width=4096),
    Target("4096 r64 T128/16", 11.9, 9.7, rank=64, tokens=128, active=16, width=4096),
    Target("4096 r64 T128/64", 28.8, 22.5, rank=64, tokens=128, active=64, width=4096),
    Target("14336 r64 T1", 4.2, 3.5, rank=64, width=14336),
    Target("14336 r64 T8/4", 8.5, 5.8, rank=64, tokens=8, active=4, width=14336),
    Target("14336 r64 T32/1", 10.6, 5.7, rank=64, tokens=32, width=14336),
    Target("14336 r64 T32/4", 14.0, 7.8, rank=64, tokens=32, active=4, width=14336),
    Target("14336 r64 T128/1", 17.7, 12.9, rank=64, tokens=128, width=14336),
    Target("4096 r16 T8/1", 3.2, 2.6, tokens=8, width=4096),
    Target("4096 r16 T128/1", 5.2, 3.8, tokens=128, width=4096),
    Target("14336 r16 T32/1", 5.7, 3.7, tokens=32, width=14336),
)


# Which forms are tried.


def _form(defines: dict[str, int] | None = None, **shape: Any) -> Form:
    return Form(**shape).with_defines(**(defines or {}))


_SHAPES = {f"C{size}": _form(cluster=size) for size in (1, 2, 4, 8)}
_CUT = {
    f"C{size}P{parts}": _form(cluster=size, parts=parts)
    for size, parts in ((1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4), (8, 2))
}
_RING = {
    "quads": _form({"QUADS": 1}),
    "half": _form(resident=0.5),
    "most": _form(resident=0.75),
    "even": _form(even=True),
}
_CLUSTER = {
    "quads": _form({"QUADS": 1}),
    "fewer": _form(spread=0.5),
    "more": _form(spread=2.0),
}
_MANY = {"8": _form(tile_rows=8), "8+quads": _form({"QUADS": 1}, tile_rows=8)}
_DENSE = {
    **{
        f"C{size}P{parts}": _form(kernel="cluster", cluster=size, parts=parts, tile_rows=8)
        for size in (8, 4, 2)
        for parts in (1, 2, 4)
    },
    **{f"ring{size}": _form(kernel="ring", cluster=size, tile_rows=8) for size in (1, 2, 4, 8)},
    **{f"pair{rows}": _form(kernel="pair", tile_rows=rows) for rows in (8, 16)},
    **{f"large{rows}": _form(kernel="large", tile_rows=rows) for rows in (16, 32, 64)},
}
"""Of a dense module's small batches: each kernel."""

_WIDE_MANY = {
    "ring": _form(tile_rows=8),
    "ring+quads": _form({"QUADS": 1}, tile_rows=8),
    "rows32": _form(tile_rows=32),
}


def named_forms(target: Target, kernels: Iterable[str]) -> dict[str, Form]:
    """The forms that differ from the shipped one for a target that these kernels serve, those made
    for such targets first."""
    used = set(kernels) & {"ring", "cluster"}
    many = target.tokens >= _MANY_TOKENS
    if target.width and not many:
        return _DENSE
    if target.wide and many:
        return _WIDE_MANY
    forms: dict[str, Form] = {}
    if "ring" in used:
        forms |= _MANY if many else {}
        forms |= _CUT if target.few else {}
        forms |= _RING
    if "cluster" in used:
        forms |= _CLUSTER
    return forms | (_SHAPES if used else {})


_Axes = tuple[tuple[str, tuple[Any, ...]], ...]
_FUSED_AXES: _Axes = (("cluster", (None, 1, 2, 4, 8)), ("QUADS", (0, 1)))
_RING_AXES: _Axes = (("parts", (1, 2, 4)), ("resident", (1.0, 0.75, 0.5)), ("even", (False, True)))
_CLUSTER_AXES: _Axes = (("spread", (1.0, 0.5, 2.0, 4.0)),)
_ROWS_AXES: _Axes = (("tile_rows", (8, 16)),)


def _axes(target: Target, used: set[str]) -> _Axes:
    """Settings that matter to a target, with their values."""
    axes = _FUSED_AXES if used else ()
    if "ring" in used:
        axes += _RING_AXES
        axes += _ROWS_AXES if target.tokens >= _MANY_TOKENS and not target.wide else ()
    return axes + (_CLUSTER_AXES if "cluster" in used else ())


def _with(form: Form, name: str, value: Any) -> Form:
    return form.with_defines(**{name: value}) if name in DEFINES else replace(form, **{name: value})


def search(target: Target, kernels: Sequence[str]) -> Generator[Form, float | None, None]:
    """Forms to time, each sent back its microseconds (None: it failed): the named ones, then one
    setting after the other of the best so far, round by round, as long as that gains."""
    found: dict[Form, float | None] = {SHIPPED: None}
    found[SHIPPED] = yield SHIPPED
    for form in named_forms(target, kernels).values():
        if form not in found:
            found[form] = yield form
    before = math.inf
    while (us := found[_best(found)]) is not None and us < _GAIN * before:
        before = us
        for name, values in _axes(target, set(kernels)):
            best = _best(found)
            for form in (_with(best, name, value) for value in values):
                if form not in found:
                    found[form] = yield form
    yield SHIPPED


def _best(found: dict[Form, float | None]) -> Form:
    timed = {form: us for form, us in found.items() if us is not None}
    return min(timed, key=lambda form: timed[form]) if timed else SHIPPED


# On the device.


@dataclass
class Outputs:
    """The sets whose outputs are compared, and what they held at first."""

    calls: list[Callable[[], Any]]
    y: list[Any]
    held: list[Any]

    @classmethod
    def of(cls, work: Workload) -> Outputs:
        """The first and the last set of each part."""
        calls = [part[i] for part in work.parts for i in sorted({0, len(part) - 1})]
        y = [call.args[2] for call in calls]  # type: ignore[attr-defined]
        return cls(calls, y, [array.view("uint16").copy() for array in y])

    def restore(self) -> None:
        """Put back what the arrays held."""
        for array, held in zip(self.y, self.held, strict=True):
            array.view("uint16")[...] = held

    def bits(self) -> list[Any]:
        """Copies of the arrays as they are."""
        return [array.view("uint16").copy() for array in self.y]


@dataclass
class PointBench:
    """A target that is a point of the bench, on a backend."""

    backend: ArrayBackend
    graphs: Graphs
    target: Target
    sets: int | None = None
    _made: dict[tuple[int | None, bool], tuple[Workload, Outputs]] = field(default_factory=dict)
    _expected: list[Any] = field(default_factory=list)
    _error: float | None = None

    def run(self, form: Form) -> dict[str, Any]:
        """Check and time a form; the first is the one that others are compared with."""
        with installed(form), self.graphs.active():
            work, outputs = self._workload(form.tile_rows, form.kernel == "large")
            launches: list[str] = []
            outputs.restore()
            work.check.before()
            with _recorded(launches):
                for call in outputs.calls:
                    call()
            self.backend.synchronize()
            self.backend.check_status()
            equal = self._compare(outputs)
            error = self._error
            if not equal or error is None:
                error = self._off_reference(work)
            self._error = self._error or error
            parts = work.parts[:1] if self.target.first_only else work.parts
            captured = [self.graphs.capture(part) for part in parts]
            times = [self.graphs.time(graph, work.sets, _REPLAYS) for graph in captured]
        us = sum(t.median for t in times)
        return {
            "us": us,
            "parts": [t.median for t in times],
            "spread": sum(t.high - t.low for t in times) / us,
            "equal": equal,
            "error": error,
            "floor_bytes": sum(work.nbytes[: len(parts)]),
            "sets": work.sets,
            "launches": list(dict.fromkeys(launches)),
        }

    def _workload(self, tile_rows: int | None, large: bool) -> tuple[Workload, Outputs]:
        """For forms that want the same lists and workspace."""
        if (tile_rows, large) not in self._made:
            self._made.clear()  # one at a time has room
            point = self.target.point()
            work = make_workload(self.backend, point, Pools(self.backend), self.sets)
            if self.target.max_rank is not None:
                rank = self.target.max_rank
                parts = tuple(tuple(partial(c, rank=rank) for c in part) for part in work.parts)
                work = replace(work, parts=parts)
            self.backend.synchronize()
            self._made[tile_rows, large] = work, Outputs.of(work)
        return self._made[tile_rows, large]

    def _off_reference(self, work: Workload) -> float:
        """Error against the float32 reference; equal bits have an equal one."""
        verdict = work.check.after()
        verdict.require()
        return verdict.error

    def _compare(self, outputs: Outputs) -> bool:
        bits = outputs.bits()
        if not self._expected:
            self._expected = bits
        return all(bool((a == b).all()) for a, b in zip(bits, self._expected, strict=True))


@dataclass
class BehindBench:
    """A target behind a library GEMM; torch makes the GEMM, whose calls can be captured."""

    target: Target
    _calls: Any = None
    _expected: Any = None

    def run(self, form: Form) -> dict[str, Any]:
        """Check and time a form; the first is the one that others are compared with."""
        import measure

        if self._calls is None:
            self._calls = measure.behind_calls(self.target.tokens, self.target.active)
        gemms, both, outputs = self._calls
        launches: list[str] = []
        with installed(form):
            with _recorded(launches):
                for call in both:
                    call()
            bits = [y.clone() for y in outputs]
            alone = measure.torch_graph_us(gemms, _BEHIND_REPLAYS)
            together = measure.torch_graph_us(both, _BEHIND_REPLAYS)
        self._expected = self._expected or bits
        equal = all(a.equal(b) for a, b in zip(bits, self._expected, strict=True))
        us = 2 * together - alone
        return {
            "us": us,
            "parts": [us],
            "spread": 0.0,
            "equal": equal,
            "error": 0.0,
            "floor_bytes": 0.0,
            "sets": len(outputs),
            "launches": list(dict.fromkeys(launches)),
        }


class _recorded:  # noqa: N801 - used as a context
    """Within, launches of the fused kernels are noted: program, instance, CTAs, cluster, bytes."""

    def __init__(self, launches: list[str]) -> None:
        self._launches = launches
        self._plain = _lora_fused.enqueue

    def __enter__(self) -> None:
        _lora_fused.enqueue = self._note  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        _lora_fused.enqueue = self._plain

    def _note(self, program: str, kernel: str, *rest: Any, **options: Any) -> None:
        _types, grid, _threads, _args, smem = rest[:5]
        size = options["cluster"][0]
        self._launches.append(f"{program} {kernel} grid {grid[0]} cluster {size} smem {smem}")
        self._plain(program, kernel, *rest, **options)


def kernels_in(launches: Iterable[str]) -> list[str]:
    """ "ring" and "cluster", those that were launched."""
    return [kernel for kernel in ("ring", "cluster") if any(f"_{kernel}_" in x for x in launches)]


def serve(target: Target) -> None:
    """A target's process: a form a line comes in, a result a line goes out."""
    from cupylora.backend import CudaBackend
    from cupylora.bench.timing import CudaGraphs

    backend = CudaBackend()
    bench: Any = (
        BehindBench(target) if target.behind else PointBench(backend, CudaGraphs(backend), target)
    )
    for line in sys.stdin:
        try:
            result = bench.run(form_of(json.loads(line)))
        except Exception as error:
            result = {"failure": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(result), flush=True)
        if "failure" in result:
            backend.synchronize()  # a device that is lost ends the process


class WorkerLostError(Exception):
    """A target's process died or did not answer."""


class Worker:
    """A target's process, from outside."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def ask(self, form: Form, seconds: float) -> dict[str, Any]:
        """The result of a form; raises WorkerLostError after so many seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(form)) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=max(1.0, seconds))
        except (OSError, queue.Empty) as error:
            raise WorkerLostError(f"no answer within {seconds:.0f} s") from error
        if not line:
            raise WorkerLostError(f"the process ended, code {self._process.wait()}")
        return dict(json.loads(line))

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


# The run.


@dataclass
class Run:
    """Results of all targets as they come; ``path``: where they are kept."""

    path: Path | None
    start: Callable[[Target], Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    compiled: dict[str, str] = field(default_factory=dict)

    def target(self, target: Target, deadline: float) -> None:
        """Try a target's forms until they are through or time is."""
        worker, first = self._started(target)
        self._keep(target, SHIPPED, first)
        if worker is None:
            return
        if not first.get("equal"):
            worker.stop()
            return
        deadline = max(deadline, time.monotonic() + _LEAST_SECONDS)
        plan = search(target, kernels_in(first["launches"]))
        next(plan)
        form = _advance(plan, first["us"])
        lost = 0
        while form is not None and worker is not None and time.monotonic() < deadline:
            try:
                result = worker.ask(form, _ANSWER_SECONDS)
            except WorkerLostError as error:
                worker.stop()
                lost += 1
                result = {"failure": str(error)}
                worker, _ = self._started(target) if lost < _MOST_LOST else (None, {})
            self._keep(target, form, result)
            form = _advance(plan, result["us"] if result.get("equal") else None)
        if worker is not None:
            worker.stop()

    def _started(self, target: Target) -> tuple[Any, dict[str, Any]]:
        """A process that has run the shipped form, which it compares others with, and that result;
        None where there is none to be had."""
        worker = self.start(target)
        try:
            return worker, worker.ask(SHIPPED, _FIRST_SECONDS)
        except WorkerLostError as error:
            worker.stop()
            return None, {"failure": str(error)}

    def _keep(self, target: Target, form: Form, result: dict[str, Any]) -> None:
        self.rows.append({"target": target.name, "form": form.text, **result})
        us = f"{result['us']:8.2f}" if "us" in result else "    fail"
        bad = "" if result.get("equal", True) else " BITS DIFFER"
        why = result.get("failure", "")
        print(f"{target.name:24}{us} {form.text}{bad} {why}", flush=True)
        self.save()

    def save(self) -> None:
        """Write all that is known."""
        if self.path is None:
            return
        content = {
            "targets": [asdict(target) for target in TARGETS],
            "compiled": self.compiled,
            "rows": self.rows,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(part, self.path)


def _advance(plan: Generator[Form, float | None, None], us: float | None) -> Form | None:
    try:
        return plan.send(us)
    except StopIteration:
        return None


def table(rows: Sequence[dict[str, Any]], targets: Sequence[Target] = TARGETS) -> list[str]:
    """A line of times for each target, one of its named forms, and what each of these does over
    all targets."""
    heads = ("was", "bar", "floor", "shipped", "best", "nodes")
    lines = [f"{'us':22}" + "".join(f"{head:>8}" for head in heads)]
    forms = [""]
    for target in targets:
        own = [row for row in rows if row["target"] == target.name]
        good = [row for row in own if row.get("equal")]
        if not good:
            lines.append(f"{target.name:22}{target.now:8.2f}{target.bar:8.2f}  none timed")
            continue
        numbers, best = _summary(target, good)
        lines.append(target.name.ljust(22) + "".join(f"{n:8.2f}" for n in numbers) + f"  {best}")
        forms.append(f"{target.name}: {_cells(target, own)}")
    return [*lines, *forms, "", f"against the shipped form: {_over_targets(rows, targets)}"]


def _over_targets(rows: Sequence[dict[str, Any]], targets: Sequence[Target]) -> str:
    """Named forms by the geometric mean of their times over the shipped form's, and of how many
    targets."""
    ratios: dict[str, list[float]] = {}
    for target in targets:
        own = [row for row in rows if row["target"] == target.name]
        timed = {row["form"]: row["us"] for row in own if row.get("equal")}
        kernels = kernels_in([x for row in own for x in row.get("launches", ())])
        for name, form in named_forms(target, kernels).items():
            if form.text in timed and SHIPPED.text in timed:
                ratios.setdefault(name, []).append(timed[form.text] / timed[SHIPPED.text])
    means = {name: statistics.geometric_mean(found) for name, found in ratios.items()}
    ordered = sorted(means, key=lambda name: means[name])
    return ", ".join(f"{name} {means[name]:.3f} ({len(ratios[name])})" for name in ordered)


def _summary(target: Target, good: Sequence[dict[str, Any]]) -> tuple[list[float], str]:
    """Microseconds: as they were, the bar, the bytes' floor, the shipped form, the best form, the
    best of each node together; and the best form."""
    shipped = [row["us"] for row in good if row["form"] == SHIPPED.text]
    best = min(good, key=lambda row: row["us"])
    nodes = zip(*(row["parts"] for row in good), strict=True)
    numbers = [
        target.now,
        target.bar,
        good[0]["floor_bytes"] / _BYTES_PER_US,
        statistics.fmean(shipped or [float("nan")]),
        best["us"],
        sum(map(min, nodes)),
    ]
    return numbers, best["form"]


def _cells(target: Target, own: Sequence[dict[str, Any]]) -> str:
    """Each named form's time; "-": not reached, "bad": it failed or gave other bits."""
    timed = {row["form"]: f"{row['us']:.2f}" if row.get("equal") else "bad" for row in own}
    kernels = kernels_in([x for row in own for x in row.get("launches", ())])
    named = named_forms(target, kernels).items()
    cells = [f"{name} {timed.get(form.text, '-')}" for name, form in named]
    shipped = [row["us"] for row in own if row["form"] == SHIPPED.text and row.get("equal")]
    again = f"; shipped again {shipped[-1] / shipped[0] - 1:+.1%}" if len(shipped) > 1 else ""
    return ", ".join(cells) + again


def compile_form(name: str) -> str:
    """Compile a program into the cache; what its kernels take: registers, spilled bytes."""
    from cupylora.compiler.cache import default_cache
    from cupylora.compiler.inspection import report
    from cupylora.compiler.nvrtc import Compiled

    entry = default_cache().get(find_form(name), ARCH)
    made = Compiled(entry.path.read_bytes(), entry.lowered, entry.log)
    kernels = report(made, disassemble=False)
    return ", ".join(f"{k.kernel}: {k.registers} regs {k.spills} spilled" for k in kernels)


def programs_to_compile(targets: Sequence[Target]) -> list[str]:
    """Programs of the shipped and the named forms; a search comes to no others."""
    plain = ["fill", "sort", "segments", "plan", "plan_large", "stream"]
    pair = ("ring", "cluster", "shrink", "expand", "shrink_stream", "expand_stream")
    pair += ("shrink_wide", "shrink_group", "expand_direct", "expand_panel")
    plain += [f"lora_{kernel}_bfloat16" for kernel in pair] + ["lora_cluster_float16"]
    both = ("ring", "cluster")
    named = [form for target in targets for form in named_forms(target, both).values()]
    dtypes = ("bfloat16", "float16")  # the latter behind a GEMM
    own = [name for form in named for dtype in dtypes for name in form.programs(dtype)]
    return list(dict.fromkeys([*plain, *own]))


def _command(target: Target) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--serve", target.name]


@click.command()
@click.option("--seconds", type=float, default=300.0, show_default=True, help="For all targets.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Keep results here.")
@click.option("--only", multiple=True, help="Targets whose names contain this.")
@click.option("--serve", "served", hidden=True, help="Be the process of this target.")
def main(seconds: float, path: Path | None, only: Sequence[str], served: str | None) -> None:
    """Time forms of the fused LoRA kernels and print one table."""
    if served is not None:
        serve(next(target for target in TARGETS if target.name == served))
        return
    targets = [t for t in TARGETS if not only or any(text in t.name for text in only)]
    run = Run(path, lambda target: Worker(_command(target)))
    begin = time.monotonic()
    pool = ProcessPoolExecutor(os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn"))
    jobs = {pool.submit(compile_form, name): name for name in programs_to_compile(targets)}
    wait(jobs, timeout=_COMPILE_SECONDS)
    print(f"{len(jobs)} programs after {time.monotonic() - begin:.0f} s", flush=True)
    for index, target in enumerate(targets):
        _note_compiled(run, jobs)
        left = begin + seconds - time.monotonic()
        run.target(target, time.monotonic() + left / (len(targets) - index))
    _note_compiled(run, jobs)
    run.save()
    pool.shutdown(wait=False, cancel_futures=True)
    failed = [f"{name}: {text[:200]}" for name, text in run.compiled.items() if "FAILED" in text]
    print("\n".join([*failed[:8], "", *table(run.rows, targets)]), flush=True)
    os._exit(0)  # compilers that still run are of no use any more


def _note_compiled(run: Run, jobs: dict[Future[str], str]) -> None:
    for job, name in jobs.items():
        if name in run.compiled or not job.done() or job.cancelled():
            continue
        error = job.exception()
        run.compiled[name] = job.result() if error is None else f"FAILED {error}"


if __name__ == "__main__":
    main()
