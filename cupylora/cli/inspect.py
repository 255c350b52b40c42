"""``cupylora inspect``: what an adapter holds, what a model would get of it, and what is wrong.

Options → ``inspect_adapter`` → tables, or a JSON record for programs. Names from files are shown
as the terminal can show them; what a file can make long is cut in tables, and whole in the record.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cupylora import __version__
from cupylora.adapters.inspection import MAX_BYTES, Held, Inspection, Problem, inspect_adapter
from cupylora.adapters.pack_file import is_pack, read_pack
from cupylora.cli._console import OutputConsole
from cupylora.cli._options import STDOUT, GivenPath, dtype_option, max_rank_option
from cupylora.cli._pack_report import pack_problems, pack_record, print_pack
from cupylora.cli._record_file import check_writable, write_record
from cupylora.errors import CupyloraError
from cupylora.files import named
from cupylora.shapes import PRESETS, ModelShape, load_model
from cupylora.text import byte_size, counted, shown

__all__ = ["command"]

_ROWS = 40
"""Of a table: hostile files may make as many as they have tensors."""
_LISTED = 20
_FRAME = 3
"""Characters around a cell."""
_REASON = 14
"""Characters of a line, where there is little room, of why something is not applied."""


@click.command("inspect")
@click.argument("adapter", type=GivenPath(), metavar="DIR")
@click.option(
    "--model",
    metavar="PRESET|CONFIG.JSON",
    help=f"What the adapter is for: one of {', '.join(PRESETS)}, or a Hugging Face config.json. "
    "Without it, DIR's tensors are listed by the pattern of their names, and only what is wrong "
    "with any model is found.",
)
@dtype_option
@max_rank_option
@click.option(
    "--max-bytes",
    type=click.IntRange(min=0),
    default=MAX_BYTES,
    show_default=True,
    metavar="N",
    help="Of tensors; more are refused unread.",
)
@click.option(
    "--values/--no-values",
    default=True,
    help="Read the values too: infinities, and what --dtype cannot hold (default).",
)
@click.option(
    "--links/--no-links",
    default=True,
    help="Whether its files may be links that lead out of DIR (default, with a note). Refuse them "
    "where strangers made DIR.",
)
@click.option(
    "--json",
    "json_file",
    type=GivenPath(),
    metavar="FILE",
    help="Write a record; - writes it to stdout in place of the tables.",
)
@click.pass_context
def command(
    ctx: click.Context, /, adapter: Path, model: str | None, json_file: Path | None, **limits: Any
) -> None:
    """Show what a LoRA adapter holds, what would be applied where, and what is wrong.

    DIR is a directory that peft saved (adapter_config.json with adapter_model.safetensors), a
    .safetensors file with Kohya's names, or a file of `cupylora pack`. Nothing in it is executed,
    no GPU is needed, and (but for packs) memory stays small whatever it claims, so that uploads can
    be checked with it.

    Exit code 0: it would be loaded, 1: it would be refused, for the problems listed, each with what
    to do (also where DIR has no adapter's files); 2: wrong usage, or nothing there.
    """
    check_writable(json_file)
    target = load_model(model) if model is not None else None
    if is_pack(adapter):
        ctx.exit(_show_pack(adapter, target, json_file, limits))
    found = inspect_adapter(adapter, target, **limits)
    try:  # the record first: nothing that happens to the tables shall cost it
        if json_file is not None:
            write_record(json_file, _record(found))
    finally:
        if json_file != STDOUT:
            _print(found, OutputConsole())
    ctx.exit(0 if found.accepted else 1)


def _show_pack(
    path: Path, model: ModelShape | None, json_file: Path | None, limits: Mapping[str, Any]
) -> int:
    """A pack in place of an adapter's tables; returns the exit code."""
    pack, problems = None, list[str]()
    try:
        pack = read_pack(path, model)
        problems = pack_problems(pack, **limits)
    except CupyloraError as error:
        problems = [str(error)]
    record: dict[str, Any] = {} if pack is None else pack_record(pack)
    record |= {"accepted": not problems, "problems": [asdict(Problem(text)) for text in problems]}
    if json_file is not None:
        write_record(json_file, record)
    if json_file != STDOUT:
        if pack is not None:
            print_pack(pack)
        _print_verdict(problems)
    return 1 if problems else 0


def _print_verdict(problems: Sequence[str]) -> None:
    console = OutputConsole()
    for text in problems:
        console.print(f"REFUSED: {text}", markup=False, highlight=False, soft_wrap=True)
    if not problems:
        console.print("ACCEPTED: it would be stored as it is", highlight=False)


def _record(found: Inspection) -> dict[str, Any]:
    """All of it as JSON values."""
    return {
        "cupylora": __version__,
        "adapter": str(found.path),
        "accepted": found.accepted,
        "problems": [asdict(problem) for problem in found.problems],
        "notes": found.notes,
        "model": found.model.name if found.model else None,
        "base_model": found.base_model,
        "peft": found.peft,
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "values_read": found.values_read,
        "dtype": found.dtype,
        "device_bytes": found.device_nbytes,
        "applied": [_renamed(asdict(row)) for row in found.applied],
        "held": [asdict(row) for row in found.held],
    }


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {("bytes" if key == "nbytes" else key): value for key, value in row.items()}


def _print(found: Inspection, console: Console) -> None:
    _say(console, f"Adapter {named(found.path)}", "bold")
    for text in _overview(found):
        _say(console, text)
    if found.held:
        console.print(_held_table(found.held, console.width))
    if found.model and found.applied:
        _say(console, f"Applied to {shown(found.model.name)}, in {found.dtype}", "italic")
        console.print(_applied_table(found))
    elif found.model and found.held:
        _say(console, f"Nothing of it can be applied to {shown(found.model.name)}.")
    problems = [
        problem.text + (f" (and {problem.count - 1} more like it)" if problem.count > 1 else "")
        for problem in found.problems
    ]
    _print_list("Wrong, and what to do", problems, console)
    _print_list("To know", found.notes, console)
    verdict, style = _verdict(found)
    _say(console, verdict, style)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(escape(text), style=style, highlight=False)


def _overview(found: Inspection) -> Iterable[str]:
    if found.tensors:
        yield f"{counted(found.tensors, 'tensor')}, {byte_size(found.nbytes)} in the files"
    if found.base_model:
        yield f"trained on {shown(found.base_model)}"
    if found.peft:
        yield f"written by peft {shown(found.peft)}"


def _table(*columns: str) -> Table:
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _held_table(rows: Sequence[Held], width: int) -> Table:
    """At most ``width`` wide, if that can be: then a factor a line, and names folded at dots."""
    columns, lines = _held_cells(rows)
    if _table_width(columns, lines) > width:
        columns, lines = _held_cells(rows, narrow=True)
        room = width - _table_width(columns[1:], [cells[1:] for cells in lines]) - _FRAME
        for cells in lines:
            cells[0] = _folded(cells[0], room)
    table = _table(*columns)
    for cells in lines:
        table.add_row(*map(escape, cells))
    _add_rest(table, len(rows))
    return table


def _held_cells(rows: Sequence[Held], *, narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """Titles of columns, and rows of cells, the first one a name. narrow: on several lines."""
    scaled = any(row.scales for row in rows)
    faulty = any(row.why_not for row in rows)
    columns = ["module or tensor", "count", "shape", "type"]
    columns += ["scale"] * scaled + ["not applied"] * faulty
    lines = []
    for row in rows[:_ROWS]:
        shapes = [f"{factor} {list(shape)}" for factor, shape in row.shapes.items()]
        text = ("\n" if narrow else ", ").join(shapes).removeprefix("tensor ")
        cells = [shown(row.name), str(row.count), text, row.dtype]
        reason = shown(row.why_not or "-")
        if narrow:
            reason = textwrap.fill(reason, _REASON, break_long_words=False)
        lines.append([*cells, *[_range(row.scales)] * scaled, *[reason] * faulty])
    return columns, lines


def _table_width(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Of a table that breaks no cell."""
    widths = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(columns, *lines, strict=True)
    ]
    return sum(widths) + _FRAME * len(widths) + 1


def _folded(name: str, width: int) -> str:
    """``name`` on lines of at most ``width``, broken behind dots alone."""
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+", name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _applied_table(found: Inspection) -> Table:
    table = _table("module", "layers", "experts", "rank", "scale", "bytes")
    for row in found.applied[:_ROWS]:
        low, high = row.experts
        some = str(low) if low == high else f"{low}-{high}"
        table.add_row(
            escape(shown(row.module)),
            _ranges(row.layers),
            f"{some} of {row.of_experts}" if row.of_experts > 1 else "",
            str(row.rank),
            _range(row.scales),
            byte_size(row.nbytes),
        )
    _add_rest(table, len(found.applied))
    table.add_section()
    table.add_row("all", "", "", "", "", byte_size(found.device_nbytes or 0))
    return table


def _add_rest(table: Table, count: int) -> None:
    if count > _ROWS:
        table.add_row(f"and {count - _ROWS} more rows (--json has them)")


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = values[0], values[-1]
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7`` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _print_list(title: str, items: Sequence[str], console: Console) -> None:
    if not items:
        return
    _say(console, f"{title}:", "bold")
    for number, item in enumerate(items[:_LISTED], 1):
        _say(console, f"{number}. {item}")
    if len(items) > _LISTED:
        _say(console, f"and {len(items) - _LISTED} more (--json has them)")


def _verdict(found: Inspection) -> tuple[str, str]:
    if not found.accepted:
        count = sum(problem.count for problem in found.problems)
        return f"REFUSED: {counted(count, 'problem')}", "bold red"
    unread = "" if found.values_read else " (its values were not read)"
    if found.model is None:
        return f"nothing wrong was found{unread}; --model checks it whole", "bold"
    return f"ACCEPTED: every tensor is applied exactly once{unread}", "bold green"
