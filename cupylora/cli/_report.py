"""What ``cupylora run`` tells: a machine-readable record, and tables printed from it."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cupylora import __version__
from cupylora.cli._check import Finding
from cupylora.cli._measure import Memory, Timing, floor_bytes
from cupylora.cli._serve import Served
from cupylora.cli._setup import RunSetup
from cupylora.device import probe
from cupylora.text import byte_size, counted, shown

__all__ = ["make_record", "print_record"]

Record = dict[str, Any]


def make_record(
    setup: RunSetup,
    timing: Timing,
    memory: Memory,
    bandwidth: float | None,
    findings: Sequence[Finding] | None,
    served: Served | None = None,
) -> Record:
    """Everything a run found, as JSON values. ``passed`` is None where nothing was compared."""
    verdicts = [] if findings is None else [f.passed for f in findings]
    if served is not None and served.differing is not None:
        verdicts.append(served.differing == 0)
    return {
        "cupylora": __version__,
        "options": asdict(setup.options),
        "device": _device(setup),
        "model": _model(setup),
        "adapters": _adapters(setup),
        "rows": _rows(setup),
        "step_seconds": dict(zip(("median", "min"), timing.step, strict=True)),
        "stages": _stages(setup, timing, bandwidth),
        "copy_bytes_per_second": bandwidth,
        "memory": asdict(memory),
        "check": None if findings is None else [_finding(f) for f in findings],
        "serving": None if served is None else _serving(served),
        "passed": all(verdicts) if verdicts else None,
    }


def _serving(served: Served) -> Record:
    counts, host = served.counts, served.host_seconds
    median, high = (float(np.quantile(host, q)) if len(host) else 0.0 for q in (0.5, 0.9))
    return {
        "graphs": len(served.graphs),
        "graph_nodes": sum(graph.nodes for graph in served.graphs),
        "graph_bytes": sum(graph.nbytes for graph in served.graphs),
        "capture_seconds": served.capture_seconds,
        "steps": len(host),
        "tokens": served.tokens,
        "host_seconds": {"median": median, "p90": high},
        "hits": [
            {"tokens": key.num_tokens, "active_loras": key.num_active_loras, "steps": steps}
            for key, steps in sorted(
                counts.hits.items(), key=lambda hit: (hit[0].num_tokens, hit[0].num_active_loras)
            )
        ],
        "eager": dict(counts.eager),
        "padding_share": counts.padding_share,
        "loads": served.loads,
        "unloads": served.unloads,
        "differing_steps": served.differing,
    }


def _device(setup: RunSetup) -> Record:
    info = probe()
    if setup.backend.on_device:
        return {"backend": "cuda", "name": info.name, "arch": info.arch, "memory": info.memory}
    return {"backend": "numpy", "name": platform.processor() or platform.machine()}


def _model(setup: RunSetup) -> Record:
    model, stack = setup.model, setup.stack
    return {
        "name": model.name,
        "layers": model.layers,
        "dense_groups": [
            [f"{m.name} {m.in_features}->{m.out_features}" for m in group]
            for group in model.dense_groups
        ],
        "moe": asdict(model.moe) if model.moe else None,
        "dtype": str(stack.dtype),
        "tokens": setup.batch.num_tokens,
        "max_loras": setup.table.limits.max_loras,
        "max_rank": setup.table.limits.max_rank,
    }


def _adapters(setup: RunSetup) -> list[Record]:
    found = []
    for slot, (adapter, info) in enumerate(zip(setup.adapters, setup.table.slots, strict=False)):
        scales = sorted({round(f.scale, 6) for f in adapter.factors.values()})
        found.append(
            {
                "slot": slot,
                "name": adapter.name,
                "source": adapter.source,
                "ranks": list(adapter.ranks),
                "scales": scales,
                "bytes": info.arena_bytes if info else 0,
            }
        )
    return found


def _rows(setup: RunSetup) -> list[Record]:
    """Tokens and routed rows (of one layer) per adapter, those of none first."""
    batch, model = setup.batch, setup.model
    top_k = model.moe.top_k if model.moe else 1
    names = ["(no adapter)", *(adapter.name for adapter in setup.adapters)]
    counts = np.bincount(batch.slots + 1, minlength=len(names)).tolist()
    return [
        {"adapter": name, "tokens": tokens, "rows": tokens * top_k}
        for name, tokens in zip(names, counts, strict=False)
    ]


def _stages(setup: RunSetup, timing: Timing, bandwidth: float | None) -> list[Record]:
    needed = floor_bytes(setup)
    found = []
    for name, (median, least) in timing.stages.items():
        size = needed.get(name)
        floor = size / bandwidth if size is not None and bandwidth else None
        found.append(
            {
                "stage": name,
                "median_seconds": median,
                "min_seconds": least,
                "bytes": size,
                "floor_seconds": floor,
            }
        )
    return found


def _finding(finding: Finding) -> Record:
    passed = finding.passed if finding.rows else None
    values = asdict(finding) | {"row_bound": finding.row_bound, "passed": passed}
    # JSON has no infinity and no NaN.
    return {k: _json_number(v) if isinstance(v, float) else v for k, v in values.items()}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def print_record(record: Record, console: Console) -> None:
    """Tables of a record."""
    for table in (
        _overview(record),
        _adapter_table(record),
        _stage_table(record),
        _memory_table(record),
    ):
        _print(table, console)
    if record["serving"] is not None:
        _print(_hit_table(record["serving"]), console)
        console.print(_serving_lines(record), highlight=False)
    if record["check"] is None:
        console.print("not checked (--no-check)")
        return
    _print(_check_table(record), console)
    worst = "PASS" if record["passed"] else "FAIL"
    style = "bold green" if record["passed"] else "bold red"
    console.print(f"{worst}: {_verdict(record)}", style=style, highlight=False)


def _print(table: Table, console: Console) -> None:
    """A table below its title, which may be wider."""
    title, table.title = table.title, None
    console.print(title, style="italic", highlight=False)
    console.print(table)


def _verdict(record: Record) -> str:
    compared = [c for c in record["check"] if c["passed"] is not None]
    failed = [c for c in compared if not c["passed"]]
    if not failed and not record["passed"]:
        return (
            "steps through graphs differ from eager ones; the other comparisons keep their bounds"
        )
    if not failed:
        bare = all(rows["tokens"] == 0 for rows in record["rows"][1:])
        rest = "; no row had an adapter, so no delta was compared" if bare else ""
        return f"all {len(compared)} comparisons with the float64 oracle keep their bounds{rest}"
    first = failed[0]
    return (
        f"{len(failed)} of {len(compared)} comparisons exceed their bounds; first: layer "
        f"{first['layer']}, {first['what']}, error {_error(first['error'])} (bound "
        f"{_error(first['bound'])}), worst row {_error(first['worst_row'])} (bound "
        f"{_error(first['row_bound'])})"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, show_header=bool(columns))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _overview(record: Record) -> Table:
    device, model = record["device"], record["model"]
    table = _table("cupylora run")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    name = f"{device['backend']}: {device['name']}"
    table.add_row("device", escape(name + (f" ({device['arch']})" if "arch" in device else "")))
    given = record["options"]["lora_only"] and model["moe"]
    lora_only = ", no base expert weights" if given else ""
    table.add_row(
        "model", escape(f"{shown(model['name'])}, {counted(model['layers'], 'layer')}{lora_only}")
    )
    for group in model["dense_groups"]:
        table.add_row("dense", escape(", ".join(group)))
    if moe := model["moe"]:
        table.add_row(
            "experts",
            f"{moe['experts']}, top-{moe['top_k']}, H {moe['hidden']}, I {moe['intermediate']}, "
            f"{moe['activation']}, {'gated' if moe['gated'] else 'plain'}",
        )
    table.add_row("batch", f"{counted(model['tokens'], 'token')}, {model['dtype']}")
    table.add_row("slots", f"{model['max_loras']}, ranks up to {model['max_rank']}")
    return table


def _adapter_table(record: Record) -> Table:
    table = _table("Adapters", "adapter", "slot", "rank", "scale", "bytes", "tokens", "rows/layer")
    details = [None, *record["adapters"]]
    for rows, adapter in zip(record["rows"], details, strict=True):
        cells = ["", "", "", ""]
        if adapter is not None:
            ranks, scales = adapter["ranks"], adapter["scales"]
            cells = [
                str(adapter["slot"]),
                _range(ranks),
                _range(scales),
                byte_size(adapter["bytes"]),
            ]
        table.add_row(
            escape(shown(rows["adapter"])), *cells, str(rows["tokens"]), str(rows["rows"])
        )
    return table


def _stage_table(record: Record) -> Table:
    on_device = record["copy_bytes_per_second"] is not None
    extra = ("bytes", "floor", "median/floor") if on_device else ()
    layers, steps = record["model"]["layers"], record["options"]["steps"]
    title = f"Time per step ({counted(layers, 'layer')}, {counted(steps, 'eager step')})"
    if on_device:
        title += f"; floor at {record['copy_bytes_per_second'] / 1e12:.2f} TB/s (measured copy)"
    table = _table(title, "stage", "median", "min", *extra)
    for stage in record["stages"]:
        cells = [_time(stage["median_seconds"]), _time(stage["min_seconds"])]
        if on_device:
            cells += _floor_cells(stage)
        table.add_row(stage["stage"], *cells)
    step = record["step_seconds"]
    table.add_section()
    table.add_row("step", _time(step["median"]), _time(step["min"]), *("" for _ in extra))
    return table


def _floor_cells(stage: Record) -> list[str]:
    if not stage["floor_seconds"]:
        return ["", "", ""]
    ratio = stage["median_seconds"] / stage["floor_seconds"]
    return [byte_size(stage["bytes"]), _time(stage["floor_seconds"]), f"{ratio:.1f}"]


def _memory_table(record: Record) -> Table:
    memory = record["memory"]
    table = _table("Memory", "what", "bytes")
    for key in ("base_weights", "adapters", "workspace", "inputs"):
        table.add_row(key.replace("_", " "), byte_size(memory[key]))
    if memory["beyond_weights"] is not None:
        table.add_section()
        table.add_row("device memory beyond weights", byte_size(memory["beyond_weights"]))
    return table


def _hit_table(serving: Record) -> Table:
    """Steps by the graph that served them, and those that ran eagerly by reason."""
    table = _table("Steps by graph", "tokens", "adapters, up to", "steps")
    for hit in serving["hits"]:
        table.add_row(str(hit["tokens"]), str(hit["active_loras"]), str(hit["steps"]))
    if serving["eager"]:
        table.add_section()
    for reason, steps in serving["eager"].items():
        table.add_row("eager", reason, str(steps))
    return table


def _serving_lines(record: Record) -> str:
    serving, host = record["serving"], record["serving"]["host_seconds"]
    on_device = record["device"]["backend"] == "cuda"
    if on_device:
        captured = (
            f"{counted(serving['graphs'], 'graph')} captured in "
            f"{_time(serving['capture_seconds'])}, {counted(serving['graph_nodes'], 'node')}, "
            f"{byte_size(serving['graph_bytes'])}"
        )
    else:
        captured = f"{counted(serving['graphs'], 'key')}, without graphs on numpy"
    work = "host" if on_device else "in"
    compared = {None: "not compared with eager steps", 0: "every step has the bits of an eager one"}
    differing = serving["differing_steps"]
    return (
        f"{captured}; {counted(serving['tokens'], 'token')} in "
        f"{counted(serving['steps'], 'step')}, "
        f"{serving['padding_share']:.0%} padding; {work} {_time(host['median'])} a step "
        f"(90 %: {_time(host['p90'])}); {counted(serving['loads'], 'load')}, "
        f"{counted(serving['unloads'], 'unload')}; "
        + compared.get(differing, f"{differing} steps DIFFER from eager ones")
    )


def _check_table(record: Record) -> Table:
    """Per kind of comparison, the worst over the layers."""
    table = _table(
        "Check against float64 (largest over the layers; relative)",
        "comparison",
        "rows",
        "error",
        "bound",
        "max row",
        "row bound",
        "result",
    )
    kinds: dict[str, list[Record]] = {}
    for check in record["check"]:
        kinds.setdefault(check["what"], []).append(check)
    for what, checks in kinds.items():
        rows = sum(c["rows"] for c in checks)
        errors = [max(float(c[key]) for c in checks) for key in ("error", "worst_row")]
        error, worst = map(_error, errors) if rows else ("-", "-")
        table.add_row(
            what,
            str(rows),
            error,
            _error(checks[0]["bound"]),
            worst,
            _error(checks[0]["row_bound"]),
            _result(checks),
        )
    return table


def _result(checks: Sequence[Record]) -> str:
    passed = [c["passed"] for c in checks if c["passed"] is not None]
    if not passed:
        return "no rows"
    return "pass" if all(passed) else "FAIL"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = values[0], values[-1]
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"


def _time(seconds: float) -> str:
    for unit, length in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * length:
            return f"{seconds / length:.{1 if unit == 'µs' else 2}f} {unit}"
    return f"{seconds:.2f} s"


def _error(value: float | str) -> str:
    number = float(value)
    return "exact" if number == 0 else f"{number:.1e}"
