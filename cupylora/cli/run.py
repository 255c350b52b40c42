"""``cupylora run``: a mixed batch of adapters through a model's layers, timed and checked.

Options → ``_setup`` (adapters, slots, stack, batch) → ``_measure`` (timed steps) → ``_check``
(float64 oracle) → ``_serve`` (graphs, traces) → ``_report`` (tables, JSON).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupylora.cli._check import check_stack
from cupylora.cli._console import OutputConsole
from cupylora.cli._measure import copy_bandwidth, memory, time_steps
from cupylora.cli._options import STDOUT, GivenPath
from cupylora.cli._progress import open_reporter
from cupylora.cli._record_file import check_writable, write_record
from cupylora.cli._report import Record, make_record, print_record
from cupylora.cli._serve import serve
from cupylora.cli._setup import RunOptions, Say, prepare_run
from cupylora.dtypes import DTYPES
from cupylora.shapes import MAX_LORAS, PRESETS

__all__ = ["command"]

MAX_TOKENS = 1 << 20
"""Far beyond any batch that fits; keeps a slip of the keyboard from becoming a memory error."""


class _Integer(click.IntRange):
    """Calls what it needs an integer, not an integer range."""

    name = "integer"


@click.command("run")
@click.option(
    "--model",
    default="tiny-moe",
    show_default=True,
    metavar="PRESET|CONFIG.JSON",
    help=f"One of {', '.join(PRESETS)}, or a Hugging Face config.json (MoE or dense).",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="[NAME=]DIR",
    help="A PEFT adapter directory (or a .safetensors file with Kohya's names), called by its own "
    "name if no other is given; repeatable. Default: for tiny-moe the shipped examples, for other "
    "models 4 synthetic adapters.",
)
@click.option(
    "--synthetic-adapters",
    "synthetic",
    type=_Integer(0, MAX_LORAS),
    metavar="N",
    help="Add N random adapters, in place of the shipped examples.",
)
@click.option(
    "--rank",
    "ranks",
    metavar="R[,R...]",
    help="Ranks of random adapters, taken in turn.  [default: 16]",
)
@click.option("--layers", type=_Integer(min=1), help="First layers only.  [default: all]")
@click.option("--tokens", type=_Integer(1, MAX_TOKENS), default=128, show_default=True)
@click.option("--steps", type=_Integer(min=1), default=10, show_default=True)
@click.option(
    "--base-share",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="Part of the tokens that have no adapter.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--seed", type=_Integer(min=0), default=0, show_default=True)
@click.option(
    "--backend", type=click.Choice(["auto", "cuda", "numpy"]), default="auto", show_default=True
)
@click.option(
    "--max-loras",
    type=_Integer(1, MAX_LORAS),
    help="Adapter slots.  [default: one per adapter]",
)
@click.option("--lora-only", is_flag=True, help="No base expert weights: their outputs are given.")
@click.option(
    "--graphs/--no-graphs",
    default=None,
    help="Serve the steps from captured CUDA graphs too (on numpy: the same dispatch, no graphs).  "
    "[default: with CUDA, or a trace]",
)
@click.option(
    "--specialize-active-loras/--no-specialize-active-loras",
    default=False,
    show_default=True,
    help="A graph for each power of two of active adapters, not one for any number.",
)
@click.option(
    "--buckets",
    metavar="T[,T...]",
    help="Tokens that graphs are captured for.  [default: 1, 2, 4, 8, 16, 24, ... up to the "
    "largest step or 512]",
)
@click.option(
    "--trace",
    type=GivenPath(str),
    metavar="FILE",
    help="Replay traffic (JSON Lines; see tools/make_trace.py) through graphs; adapters that it "
    "names and --adapter does not give are random ones. With --no-graphs every step is eager.",
)
@click.option("--check/--no-check", default=True, help="Compare with a float64 oracle (default).")
@click.option(
    "--json",
    "json_file",
    type=GivenPath(),
    metavar="FILE",
    help="Write a record; - writes it to stdout in place of the tables.",
)
@click.pass_context
def command(ctx: click.Context, /, check: bool, json_file: Path | None, **values: Any) -> None:
    """Run a mixed batch of adapters through a model's layers.

    Each layer adds LoRA to the attention projections (on given inputs) and to the experts, whose
    block is computed whole; in a model without experts, to the MLP's projections on given inputs.
    Exit code 0: the outputs agree with a float64 oracle (or were not checked), 1: they do not, 2:
    wrong usage or input, too little memory, or output that cannot be written.
    """
    check_writable(json_file)
    record = _run(RunOptions(**values), check)
    try:  # the record first: nothing that happens to the tables shall cost it
        if json_file is not None:
            write_record(json_file, record)
    finally:
        if json_file != STDOUT:
            print_record(record, OutputConsole())
    if record["passed"] is False:
        ctx.exit(1)


def _run(options: RunOptions, check: bool) -> Record:
    with open_reporter() as report:
        setup = prepare_run(options, report.phase, report.note)
        report.phase("timing steps")
        timing = time_steps(setup, _Counter(report.detail, f"step {{}} of {options.steps} done"))
        held = memory(setup)
        findings = None
        if check:
            report.phase("checking against the float64 oracle")
            done = f"checked layer {{}} of {setup.model.layers}"
            findings = check_stack(
                setup.stack,
                setup.batch,
                setup.adapters,
                timing.output,
                _Counter(report.detail, done),
            )
        served = None  # after the check, since a trace moves adapters to other slots
        if setup.options.graphs or options.trace is not None:
            served = serve(setup, check, report.phase, report.detail)
        bandwidth = copy_bandwidth(setup.backend)
    return make_record(setup, timing, held, bandwidth, findings, served)


class _Counter:
    """Says a text with a number that rises at each call."""

    def __init__(self, say: Say, text: str) -> None:
        self.say, self.text, self.count = say, text, 0

    def __call__(self) -> None:
        self.count += 1
        self.say(self.text.format(self.count))
