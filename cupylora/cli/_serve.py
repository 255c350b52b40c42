"""The serving part of ``cupylora run``: the stack's step through graphs, or a trace of traffic.

In: a RunSetup. Out: a Served: which graph took which step, what ran eagerly and why, what a step
cost the host, and whether replays gave the bits of eager steps on copies. On NumPy the same
dispatch runs without graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.cli._setup import RunSetup
from cupylora.graphs.buckets import DispatchCounts, DispatchOptions
from cupylora.graphs.manager import CapturedGraph, GraphOptions, Step
from cupylora.layers.batch import StackInputs, make_batch
from cupylora.layers.stack_buffers import add_stack_buffers, stack_inputs
from cupylora.runtime import LoraRuntime
from cupylora.text import counted

__all__ = ["Served", "serve"]

_LAYERED = ("topk_ids", "topk_weights")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Served:
    """What serving found.

    graphs: those captured. host_seconds: of every step, what ``LoraRuntime.step`` took. tokens: of
    all steps. loads, unloads: of adapters, while serving. differing: steps whose outputs were not,
    bit for bit, those of an eager step; None: not compared.
    """

    graphs: tuple[CapturedGraph, ...]
    capture_seconds: float
    counts: DispatchCounts
    host_seconds: npt.NDArray[np.float64]
    tokens: int
    loads: int
    unloads: int
    differing: int | None


def serve(setup: RunSetup, check: bool, say: Say, detail: Say) -> Served:
    """Capture, then replay the trace, or the batch as often as steps were asked for."""
    server = _Server(setup)
    start = time.perf_counter()
    graphs: tuple[CapturedGraph, ...] = ()
    if server.runtime.graph_options.enabled:
        say("capturing graphs")
        graphs = server.runtime.capture(
            progress=lambda _, left: detail(f"{counted(left, 'graph')} to go")
        )
    seconds = time.perf_counter() - start
    say("replaying the trace" if setup.trace else "serving steps")
    if setup.trace:
        for number, step in enumerate(setup.trace):
            server.change_adapters(step.unload, (*step.load, *step.names), step.names)
            names = [name for _, name in step.requests]
            lengths = [tokens for tokens, _ in step.requests]
            slots = server.runtime.slots_of(names)
            server.step(np.repeat(slots, np.array(lengths, np.int64)), check)
            detail(f"step {number + 1} of {len(setup.trace)} done")
    else:
        for number in range(setup.options.steps):
            server.step(setup.batch.slots, check)
            detail(f"step {number + 1} of {setup.options.steps} done")
    server.runtime.synchronize()
    return Served(
        graphs,
        seconds,
        server.runtime.counts(),
        np.array(server.host_seconds),
        server.tokens,
        server.loads,
        server.unloads,
        server.differing if check else None,
    )


class _Server:
    """The setup's stack behind a LoraRuntime, with the rows of one seeded batch as its traffic."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup, self.stack, self.backend = setup, setup.stack, setup.backend
        tokens = setup.stack.max_tokens
        self.runtime = LoraRuntime.of_table(
            setup.table, setup.backend, max_tokens=tokens, graphs=_graph_options(setup)
        )
        self._on_stream = self.runtime.on_stream
        with self._on_stream():
            empty = np.full(tokens, -1, np.int32)
            dtype = setup.stack.dtype
            self.rows = make_batch(
                setup.model, setup.backend, empty, dtype=dtype, seed=setup.options.seed
            )
        add_stack_buffers(self.runtime.add_buffer, setup.model, setup.stack.dtype)
        self.runtime.add_buffer("out", (setup.model.hidden,), setup.stack.dtype)
        self.runtime.set_step(self._step_function)
        self.host_seconds: list[float] = []
        self.tokens = self.loads = self.unloads = self.differing = 0

    def change_adapters(
        self, unload: tuple[str, ...], load: tuple[str, ...], keep: tuple[str, ...]
    ) -> None:
        """Before a step: adapters that go, and those it needs that are not there."""
        for name in unload:
            if name in self.runtime.loaded:
                self.runtime.unload(name)
                self.unloads += 1
        for name in dict.fromkeys(load):
            if name not in self.runtime.loaded:
                self.runtime.load(name, self.setup.known[name], keep=keep)
                self.loads += 1

    def step(self, slots: npt.NDArray[np.int32], check: bool) -> None:
        """One step of as many tokens as ``slots`` has, timed on the host; compared if ``check``."""
        tokens = len(slots)
        self._write(tokens)
        start = time.perf_counter()
        self.runtime.step(slots)
        self.host_seconds.append(time.perf_counter() - start)
        self.tokens += tokens
        if check and tokens:
            with self._on_stream():
                served = self._outputs(self.runtime.buffers.views(tokens))
                self.differing += served != self._eagerly(slots)

    def _step_function(self, step: Step) -> None:
        inputs = stack_inputs(step, self.setup.model)
        self.backend.copy(step["out"], self.stack.step(inputs, active=step.active))

    def _write(self, tokens: int) -> None:
        """The first ``tokens`` rows of the traffic into the buffers."""
        if not tokens:
            return
        views, rows = self.runtime.buffers.views(tokens), self.rows
        with self._on_stream():
            copy = self.backend.copy
            copy(views["x"], rows.x[:tokens])
            for name in _LAYERED:
                for layer, array in enumerate(getattr(rows, name)):
                    copy(views[name][layer], array[:tokens])
            for kind in ("dense_x", "dense_y"):
                for group, array in enumerate(getattr(rows, kind)):
                    copy(views[f"{kind}{group}"], array[:tokens])

    def _eagerly(self, slots: npt.NDArray[np.int32]) -> bytes:
        """Outputs of an eager step on copies, which knows nothing of buckets and cases."""
        rows, tokens = self.rows, len(slots)
        copies = StackInputs(
            rows.x[:tokens].copy(),
            tuple(x[:tokens].copy() for x in rows.dense_x),
            tuple(y[:tokens].copy() for y in rows.dense_y),
            self.backend.asarray(slots),
            tuple(ids[:tokens].copy() for ids in rows.topk_ids),
            tuple(weights[:tokens].copy() for weights in rows.topk_weights),
        )
        out = self.stack.step(copies)
        return b"".join(self._host(array) for array in (out, *copies.dense_y))

    def _outputs(self, views: Any) -> bytes:
        dense = (views[f"dense_y{group}"] for group in range(len(self.rows.dense_y)))
        return b"".join(self._host(array) for array in (views["out"], *dense))

    def _host(self, array: Any) -> bytes:
        return self.backend.to_host(array).tobytes()


def _graph_options(setup: RunSetup) -> GraphOptions:
    specialize = setup.options.specialize_active_loras
    dispatch = DispatchOptions(setup.buckets, specialize_active_loras=specialize)
    return GraphOptions(enabled=setup.options.graphs is not False, dispatch=dispatch)
