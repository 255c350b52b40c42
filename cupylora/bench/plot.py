"""Rows as a picture: time against tokens, a panel for each shape and class of active adapters."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupylora.bench.record import Record, Row
from cupylora.bench.table import PEER_NAMES, peer_order
from cupylora.errors import ArgumentError

__all__ = ["FORMATS", "active_class", "arranged", "panels", "plot_record", "require_plotting"]

FORMATS = (".png", ".svg", ".pdf")

_CLASSES = (1, 4, 16, 64)
_COLUMNS = 4
_PANEL = (3.0, 2.3)
_DPI = 110
_HEADER = 1.0

# Okabe and Ito's colours, which people of any colour vision can tell apart; markers tell them too.
_OWN = {"color": "#D55E00", "marker": "o", "linewidth": 2.2, "markersize": 5, "zorder": 5}
_PEER_STYLES = {
    "vllm_maxloras": ("#0072B2", "s"),
    "vllm_specialised": ("#56B4E9", "D"),
    "sgl_csgmv": ("#009E73", "^"),
    "sgl_csgmv_graph256": ("#009E73", "v"),
    "sgl_csgmv_chunk128": ("#009E73", "<"),
    "sgl_v2": ("#CC79A7", "P"),
    "sgl_route": ("#CC79A7", "P"),
    "cublas_bmm_equal": ("#E69F00", "X"),
}
_OTHER_STYLE = ("#999999", ".")
_FLOOR = {"color": "black", "linestyle": "--", "linewidth": 1.0}
_STREAM = {"color": "black", "linestyle": ":", "linewidth": 1.0}


def require_plotting(path: Path) -> None:
    """Raise ArgumentError, before anything is measured, where ``path`` could not be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(f"--plot {path}: a name that ends in {', '.join(FORMATS)} is needed")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib: pip install 'cupylora[plot]'")


def active_class(active: int) -> str:
    """Which panel of a shape a row stands in: ``"1"``, ``"2-4"``, ``"5-16"``, ``"17-64"``, ..."""
    low = 1
    for high in _CLASSES:
        if active <= high:
            return str(high) if low == high else f"{low}-{high}"
        low = high + 1
    return f"over {_CLASSES[-1]}"


def _class(row: Row) -> str:
    """One for all chains and routes: each batch size of theirs has one number of adapters."""
    return active_class(row.active) if row.kind in ("dense", "moe") else ""


def panels(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(shape, class of active adapters) -> its rows that have a time, by tokens."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.us:
            found.setdefault((row.shape, _class(row)), []).append(row)
    for members in found.values():
        members.sort(key=lambda row: (row.tokens, row.active))
    return found


def plot_record(record: Record, path: Path) -> None:
    """Draw the record into ``path``. Raises ArgumentError where nothing in it has a time, or the
    file cannot be written."""
    require_plotting(path)
    found = panels(record.rows)
    if not found:
        raise ArgumentError(f"--plot {path}: no point has a time to be drawn")
    figure = _draw(found, record)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise ArgumentError(f"--plot {path}: cannot be written ({error.strerror})") from error


def _draw(found: dict[tuple[str, str], list[Row]], record: Record) -> Any:
    """The figure; made without pyplot, so that no display and no global state is touched."""
    figures = importlib.import_module("matplotlib.figure")
    lines = arranged(list(found))
    columns = max(map(len, lines))
    height = _PANEL[1] * len(lines) + _HEADER
    figure = figures.Figure(figsize=(max(8.0, _PANEL[0] * columns), height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - _HEADER / height))
    spots = figure.subplots(len(lines), columns, squeeze=False)
    entries: dict[str, Any] = {}
    for line, keys in enumerate(lines):
        for column, spot in enumerate(spots[line]):
            if column < len(keys):
                entries |= _draw_panel(spot, found[keys[column]])
                spot.set_title(_panel_title(*keys[column]), fontsize=7)
            else:
                spot.set_axis_off()
    figure.suptitle(f"Time (µs) against tokens, {record.device}", y=1 - 0.05 / height, fontsize=11)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.3 / height),
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    return figure


def arranged(keys: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Panels by lines: the classes of one shape side by side, shapes of a single one together."""
    shapes: dict[str, list[tuple[str, str]]] = {}
    for key in keys:
        shapes.setdefault(key[0], []).append(key)
    lines = [sorted(line, key=_class_order) for line in shapes.values() if len(line) > 1]
    single = [line[0] for line in shapes.values() if len(line) == 1]
    columns = max((len(line) for line in lines), default=min(_COLUMNS, len(single)))
    return lines + [single[i : i + columns] for i in range(0, len(single), columns)]


def _class_order(key: tuple[str, str]) -> int:
    digits = re.sub(r"\D.*", "", key[1].removeprefix("over "))
    return int(digits or 0)


def _panel_title(shape: str, active: str) -> str:
    name, _, rest = shape.partition(", ")
    if not active:
        return f"{name}\n{rest}"
    return f"{name}\n{rest}, {active} active {'adapter' if active == '1' else 'adapters'}"


def _draw_panel(spot: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Draw one panel; its lines by their names in the legend."""
    entries = {}
    for name, values, style in _lines(rows):
        points = [(row.tokens, value) for row, value in zip(rows, values, strict=True) if value]
        if points:
            (entries[name],) = spot.plot(*zip(*points, strict=True), **style)
    tokens = sorted({row.tokens for row in rows})
    spot.set_xscale("log", base=2)
    spot.set_yscale("log")
    spot.set_xticks(tokens, [str(count) for count in tokens])
    spot.minorticks_off()
    low, high = spot.get_ylim()
    marks = [m for m in _marks(low, high) if low <= m <= high]
    spot.set_yticks(marks, [f"{mark:g}" for mark in marks])
    spot.tick_params(labelsize=7)
    spot.set_ylabel("µs", fontsize=7)
    spot.set_xlabel("tokens", fontsize=7)
    spot.grid(alpha=0.25, linewidth=0.5)
    return entries


def _marks(low: float, high: float) -> list[float]:
    """Round numbers about the range of a logarithmic axis: 1, 2 and 5 times powers of ten, or those
    powers alone where that would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 3 else (1,)
    return [step * 10.0**power for power in powers for step in steps]


def _lines(rows: Sequence[Row]) -> list[tuple[str, list[float | None], dict[str, Any]]]:
    """(name, a value for each row, style) of all that a panel shows."""
    lines: list[tuple[str, list[float | None], dict[str, Any]]] = [
        ("byte floor", [row.floor_us for row in rows], _FLOOR),
        ("n-node stream", [row.stream_us for row in rows], _STREAM),
    ]
    peers = dict.fromkeys(name for row in rows for name in row.peers_us)
    for name in sorted(peers, key=peer_order):
        color, marker = _PEER_STYLES.get(name, _OTHER_STYLE)
        style = {"color": color, "marker": marker, "linewidth": 1.2, "markersize": 4}
        values = [row.peers_us.get(name) for row in rows]
        lines.append((PEER_NAMES.get(name, name), values, style))
    lines.append(("cupylora", [row.us for row in rows], _OWN))
    return lines
