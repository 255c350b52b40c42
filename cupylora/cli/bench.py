"""``cupylora bench``: times of the LoRA kernels on this GPU, beside floors and other kernels.

Options -> points (``bench.points``) -> rows (``bench.session``), saved one by one -> tables, a
picture, a comparison. With ``--from`` the rows come from a file, and no GPU is needed.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from cupylora.bench.compare import compare_rows
from cupylora.bench.identity import PointId
from cupylora.bench.machine import empty_record
from cupylora.bench.peers import Peers
from cupylora.bench.plot import plot_record, require_plotting
from cupylora.bench.points import ACTIVE, LINEAR, SUITES, TOKENS, Point, model_points, suite_points
from cupylora.bench.record import Record, Row, read_record, require_writable, write_record
from cupylora.bench.session import Outcome, run_points
from cupylora.bench.table import print_comparison, print_record, print_summary
from cupylora.cli._console import OutputConsole
from cupylora.cli._options import STDOUT, GivenPath
from cupylora.cli._progress import Reporter, open_reporter
from cupylora.device import DeviceInfo, DeviceState, probe
from cupylora.errors import ArgumentError, DeviceUnavailableError
from cupylora.shapes import MAX_LORAS, PRESETS, ModelShape, ModuleShape, load_model
from cupylora.text import counted, quoted

__all__ = ["command"]

_DEFAULT_SUITE = "moe"
_MOST_DIGITS = 7

Named = TypeVar("Named", bound=PointId)


def _integers(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Integers from 1 on, by commas."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    good = all(part.isdecimal() and len(part) <= _MOST_DIGITS for part in parts)
    if not good or not all(int(part) for part in parts):
        raise click.BadParameter(f"{quoted(value)}: integers from 1 on, by commas, are needed")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class BenchOptions:
    """The options as click gives them."""

    suite: str | None
    model: str | None
    ranks: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    active: tuple[int, ...] | None
    max_loras: int | None
    peers: Path | None
    peers_python: str
    json_file: Path | None
    plot: Path | None
    saved: Path | None
    compare: Path | None
    budget: float | None


@click.command("bench")
@click.option(
    "--suite",
    type=click.Choice(SUITES),
    help="A list of points; the options below then choose among them.  [default: moe, or the "
    "points of --model]",
)
@click.option(
    "--model",
    metavar="PRESET|CONFIG.JSON|INxOUT",
    help=f"One of {', '.join(PRESETS)}, a config.json, or a dense module such as 4096x14336.",
)
@click.option("--rank", "ranks", callback=_integers, metavar="R[,R...]", help="[default: 16]")
@click.option(
    "--tokens",
    callback=_integers,
    metavar="T[,T...]",
    help=f"Batch sizes.  [default: {','.join(map(str, TOKENS))}]",
)
@click.option(
    "--active",
    callback=_integers,
    metavar="A[,A...]",
    help=f"Adapters in the batch, at most T.  [default: {','.join(map(str, ACTIVE))}]",
)
@click.option(
    "--max-loras",
    type=click.IntRange(1, MAX_LORAS),
    metavar="N",
    help="Adapter slots.  [default: 16 with experts, 64 without]",
)
@click.option(
    "--peers",
    type=GivenPath(),
    metavar="DIR",
    help="Time vLLM's, SGLang's and cuBLAS's kernels in the same run; DIR as their setup.sh made "
    "it. Needs torch and Triton.",
)
@click.option(
    "--peers-python",
    default=sys.executable,
    metavar="EXE",
    help="The Python that has torch.  [default: this one]",
)
@click.option(
    "--json",
    "json_file",
    type=GivenPath(),
    metavar="FILE",
    help="Write the record, anew and whole after every point.",
)
@click.option(
    "--plot",
    type=GivenPath(),
    metavar="FILE.png",
    help="Draw time against tokens (needs matplotlib: the extra `plot`).",
)
@click.option(
    "--from",
    "saved",
    type=GivenPath(),
    metavar="FILE.json",
    help="Show, draw or compare a saved record; measures nothing, needs no GPU.",
)
@click.option(
    "--compare",
    type=GivenPath(),
    metavar="OLD.json",
    help="Show what changed since: by over 3 % and over both spreads. Slower ones: exit code 1.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Begin no new point after so long.",
)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Time the LoRA kernels on this GPU.

    Each point is timed as CUDA graphs over rotating inputs of 200 MB, beside the time that its
    bytes take at the measured copy bandwidth (floor) and as plain reads (stream). A point whose
    output is off a float32 reference is shown as FAILED. Exit code 0: all is well, 1: a point
    failed or, with --compare, became slower, 2: wrong usage or input, or no GPU, 130: interrupted
    (what was measured is shown and saved).
    """
    options = BenchOptions(**values)
    _check_files(options)
    old = None if options.compare is None else read_record(options.compare)
    if options.saved is not None:
        record, outcome = _saved(options), Outcome()
    else:
        record, outcome = _measured(options)
    code = _show(options, record, outcome, old)
    if outcome.interrupted:
        raise KeyboardInterrupt
    ctx.exit(code)


def _check_files(options: BenchOptions) -> None:
    """Refuse now what would only fail once everything has been measured."""
    if options.saved is not None and (options.json_file or options.peers or options.budget):
        raise ArgumentError("--from measures nothing: leave out --json, --peers and --budget")
    if options.json_file is not None:
        if options.json_file == STDOUT:
            raise ArgumentError(
                "--json -: the record is written anew after each point: name a file"
            )
        require_writable("--json", options.json_file)
    if options.plot is not None:
        require_plotting(options.plot)
        require_writable("--plot", options.plot)


def _saved(options: BenchOptions) -> Record:
    record = read_record(options.saved or Path())
    rows = _chosen(record.rows, options)
    if record.rows and not rows:
        raise ArgumentError(f"--from {options.saved}: none of its rows is what was asked for")
    return replace(record, rows=tuple(rows))


def _points(options: BenchOptions) -> list[Point]:
    if options.suite is None and options.model is not None:
        return model_points(
            _model(options.model),
            options.ranks or (16,),
            options.tokens or TOKENS,
            options.active or ACTIVE,
            options.max_loras,
        )
    suite = options.suite or _DEFAULT_SUITE
    points = _chosen(suite_points(suite), replace(options, suite=None))
    if not points:
        raise ArgumentError(
            f"suite {suite} has no such point; leave --suite out to measure any point of --model"
        )
    return points


def _model(name: str) -> ModelShape:
    sizes = name.split("x")
    if len(sizes) == 2 and all(part.isdecimal() and len(part) <= _MOST_DIGITS for part in sizes):
        in_features, out_features = map(int, sizes)
        module = ModuleShape(LINEAR, in_features, out_features)
        return ModelShape(LINEAR, 1, in_features, ((module,),), None)
    return load_model(name)


def _chosen(points: Sequence[Named], options: BenchOptions) -> list[Named]:
    """Those of ``points`` that the options do not rule out."""
    suite = None if options.suite in (None, "all") else options.suite
    return [
        p
        for p in points
        if (suite is None or p.suite == suite)
        and (options.model is None or _names(options.model, p))
        and (options.ranks is None or p.rank in options.ranks)
        and (options.tokens is None or p.tokens in options.tokens)
        and (options.active is None or p.active in options.active)
        and (options.max_loras is None or p.max_loras == options.max_loras)
    ]


def _names(model: str, point: PointId) -> bool:
    """Whether a point is one of ``model``'s, by its name or its sizes."""
    sizes = f"{point.in_features}x{point.out_features}"
    return model in (point.model, point.model.partition(" ")[0], sizes)


def _measured(options: BenchOptions) -> tuple[Record, Outcome]:
    started = time.monotonic()
    points = _points(options)
    info = _require_gpu()
    with open_reporter() as report, _peers(options, report) as peers:
        report.phase("measuring the copy bandwidth")
        measurer = _open_measurer()
        record = empty_record(info, measurer.bandwidth)
        if peers is not None:
            record = replace(record, versions={**record.versions, **peers.versions})
            report.phase("checking the peers")
            peers.prepare(points, _free_bytes())
        keeper = _Keeper(record, options.json_file, report)
        report.phase("measuring")
        outcome = run_points(
            points,
            measurer,
            peers,
            keep=keeper.keep,
            say=report.detail,
            seconds=(options.budget or math.inf) - (time.monotonic() - started),
        )
        for remark in peers.remarks if peers is not None else ():
            report.note(f"peers: {remark}")
    return replace(record, rows=tuple(outcome.rows)), outcome


def _require_gpu() -> DeviceInfo:
    """What there is. Raises DeviceUnavailableError, with what is missing, where it is no GPU."""
    info = probe()
    if info.state is not DeviceState.READY:
        install = f"; {info.remedy}" if info.state is DeviceState.CUPY_MISSING else ""
        raise DeviceUnavailableError(
            f"bench needs a GPU ({info.state.value}): {info.detail}{install}; `cupylora doctor` "
            "looks closer, --from FILE.json shows saved results anywhere"
        )
    return info


def _open_measurer() -> Any:
    """Imported here: reading saved records needs none of it."""
    from cupylora.bench.measure import open_measurer

    return open_measurer()


def _free_bytes() -> int:
    from cupylora.backend import CudaBackend

    return CudaBackend().free_bytes()


@contextlib.contextmanager
def _peers(options: BenchOptions, report: Reporter) -> Iterator[Peers | None]:
    if options.peers is None:
        yield None
        return
    report.phase("starting the peers")
    with Peers(options.peers, options.peers_python, report.detail) as peers:
        yield peers


class _Keeper:
    """Saves the record after every point. A file that can no longer be written costs no result: it
    is said, and the measuring goes on."""

    def __init__(self, record: Record, path: Path | None, report: Reporter) -> None:
        self._record, self._path, self._report = record, path, report

    def keep(self, rows: Sequence[Row]) -> None:
        """Write all rows so far."""
        if self._path is None:
            return
        try:
            write_record(self._path, replace(self._record, rows=tuple(rows)))
        except ArgumentError as error:
            self._path = None
            self._report.note(f"{error}; what is measured from here on is only shown")


def _show(options: BenchOptions, record: Record, outcome: Outcome, old: Record | None) -> int:
    """Tables, picture and comparison; the exit code that the rows call for."""
    console = OutputConsole()
    print_record(record, console)
    print_summary(record.rows, console)
    if outcome.left:
        left = counted(outcome.left, "point")
        console.print(f"not measured: {left}, as {outcome.why}", highlight=False)
    code = 1 if any(row.failed for row in record.rows) else 0
    if old is not None:
        comparison = compare_rows(old.rows, record.rows)
        name = f"{options.compare} ({old.device}, {old.date})"
        print_comparison(comparison, name, console)
        code = 1 if comparison.slower else code
    if options.plot is not None and any(row.us for row in record.rows):
        plot_record(record, options.plot)
    return code
