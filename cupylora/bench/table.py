"""Rows as tables: one for each shape, a line for each batch size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cupylora.bench.compare import Comparison
from cupylora.bench.record import Record, Row
from cupylora.text import counted

__all__ = ["PEER_NAMES", "peer_order", "print_comparison", "print_record", "print_summary"]

PEER_NAMES = {
    "vllm_maxloras": "vLLM",
    "vllm_specialised": "vLLM active",
    "sgl_csgmv": "SGL csgmv",
    "sgl_csgmv_graph256": "csgmv 256",
    "sgl_csgmv_chunk128": "csgmv 128",
    "sgl_v2": "SGL v2",
    "sgl_route": "SGL route",
    "cublas_bmm_equal": "cuBLAS equal",
}
"""Peers as tables and plots call them; others keep their names."""

_OWN_WIDTH, _PEER_WIDTH = 64, 12


def print_record(record: Record, console: Console) -> None:
    """Everything that was measured, shape by shape, and what failed."""
    for heading, rows in itertools.groupby(record.rows, key=_heading):
        console.print(escape(heading), style="italic", highlight=False)
        _print_group(list(rows), console)
    bandwidth = record.copy_bytes_per_second
    rate = f"; floor at {bandwidth / 1e12:.2f} TB/s (measured copy)" if bandwidth else ""
    console.print(f"{escape(record.device)}, driver {escape(record.driver)}{rate}", highlight=False)
    for row in record.rows:
        if row.failed:
            text = f"FAILED {row.label}: {row.failed}"
            console.print(text, style="bold red", highlight=False, markup=False)


def _heading(row: Row) -> str:
    return f"{row.suite}: {row.shape}"


def _print_group(rows: Sequence[Row], console: Console) -> None:
    peers = sorted({name for row in rows for name in row.peers_us}, key=peer_order)
    wide = console.width >= _OWN_WIDTH + _PEER_WIDTH * len(peers)
    table = Table()
    for column in ("T", "active", "µs", "spread", "floor", "stream", "floor/µs"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in peers if wide else ():
        table.add_column(PEER_NAMES.get(name, escape(name)), justify="right")
    if peers:
        table.add_column("vs best peer", justify="right")
    for row in rows:
        times = [_us(row.peers_us.get(name)) for name in peers] if wide else []
        table.add_row(*_own_cells(row), *times, *([_best(row, wide)] if peers else []))
    console.print(table)


def peer_order(name: str) -> tuple[int, str]:
    """Sorts peers as PEER_NAMES lists them, others after those."""
    known = list(PEER_NAMES)
    return (known.index(name) if name in known else len(known), name)


def _own_cells(row: Row) -> list[str]:
    cells = [str(row.tokens), str(row.active)]
    if row.us is None:
        return [*cells, "[bold red]FAILED[/]", "", "", "", ""]
    spread = "" if row.spread is None else f"{row.spread:.1%}"
    fraction = "" if row.fraction is None else f"{row.fraction:.2f}"
    return [*cells, _us(row.us), spread, _us(row.floor_us), _us(row.stream_us), fraction]


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _best(row: Row, wide: bool) -> str:
    """How many times our time the best peer's is, and in a narrow table whose it is."""
    best = row.best_peer
    if best is None or not row.us:
        return ""
    name, us = best
    ratio = us / row.us
    text = f"{ratio:.2f}x" if wide else f"{PEER_NAMES.get(name, escape(name))} {ratio:.2f}x"
    return f"[green]{text}[/]" if ratio >= 1 else text


def print_summary(rows: Sequence[Row], console: Console) -> None:
    """Per suite: how near the floor, and how the best peers do."""
    suites = dict.fromkeys(row.suite for row in rows)
    for suite in suites:
        timed = [row for row in rows if row.suite == suite and row.us]
        if not timed:
            continue
        fractions = [row.fraction for row in timed if row.fraction]
        words = [counted(len(timed), "point")]
        if fractions:
            words.append(f"floor/time {_mean(fractions):.2f} (geometric mean)")
        ratios = [row.best_peer[1] / row.us for row in timed if row.best_peer and row.us]
        if ratios:
            ahead = sum(ratio >= 1 for ratio in ratios)
            words.append(
                f"ahead of the best peer on {ahead} of {len(ratios)}, {_mean(ratios):.2f}x its "
                "speed (geometric mean)"
            )
        console.print(f"{suite}: {', '.join(words)}", highlight=False, markup=False)


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def print_comparison(comparison: Comparison, name: str, console: Console) -> None:
    """What changed since another record."""
    if comparison.changed:
        table = Table()
        for column in ("point", "old µs", "new µs", "change"):
            table.add_column(column, justify="left" if column == "point" else "right")
        for change in comparison.changed:
            style = "red" if change.slower else "green"
            table.add_row(
                escape(change.new.label),
                _us(change.old.us),
                _us(change.new.us),
                f"[{style}]{change.ratio - 1:+.1%}[/]",
            )
        console.print(table)
    slower = len(comparison.slower)
    words = (
        f"{slower} slower, {len(comparison.changed) - slower} faster, {comparison.same} the same"
    )
    if comparison.only_new or comparison.only_old:
        words += f"; {comparison.only_new} only here, {comparison.only_old} only there"
    console.print(f"against {name}: {words}", highlight=False, markup=False)
