"""Timed steps of a setup, the bytes they must move, and the memory they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.adapters.factors import Adapter
from cupylora.backend import ArrayBackend, StageClock
from cupylora.cli._check import step_outputs
from cupylora.cli._setup import RunSetup
from cupylora.layers.stack import STACK_STAGES
from cupylora.shapes import ModuleShape, MoeShape

__all__ = ["Memory", "Timing", "copy_bandwidth", "floor_bytes", "memory", "time_steps"]

_COPY_BYTES = 256 << 20
_COPIES = 10

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Timing:
    """Median and least seconds over the steps, by stage (all layers of a step together)."""

    stages: Mapping[str, tuple[float, float]]
    step: tuple[float, float]
    output: Array = field(repr=False)
    """The last step's ``step_outputs``."""


def time_steps(setup: RunSetup, step_done: Callable[[], None]) -> Timing:
    """One step to warm up, then the timed ones, eager, each on the same inputs."""
    stack, batch, backend = setup.stack, setup.batch, setup.backend
    stack.step(batch)
    backend.synchronize()
    clock = StageClock(backend)
    output = batch.x
    for _ in range(setup.options.steps):
        batch.reset()
        clock.start()
        output = stack.step(batch, clock.lap)
        backend.synchronize()
        step_done()
    stages, steps = clock.seconds()
    backend.check_status()
    ordered = {name: _summary(stages[name]) for name in STACK_STAGES if name in stages}
    return Timing(ordered, _summary(steps), step_outputs(stack, batch, output))


def _summary(seconds: list[float]) -> tuple[float, float]:
    return statistics.median(seconds), min(seconds)


@dataclass(frozen=True)
class Memory:
    """Bytes. beyond_weights: all that CuPy's pool holds but the weights; None on NumPy."""

    base_weights: int
    adapters: int
    workspace: int
    inputs: int
    beyond_weights: int | None


def memory(setup: RunSetup) -> Memory:
    """What is held now."""
    held = setup.backend.held_bytes()
    return Memory(
        base_weights=setup.stack.weight_bytes,
        adapters=setup.weight_bytes - setup.stack.weight_bytes,
        workspace=setup.stack.workspace.nbytes,
        inputs=setup.batch.nbytes,
        beyond_weights=None if held is None else held - setup.weight_bytes,
    )


def copy_bandwidth(backend: ArrayBackend) -> float | None:
    """Bytes per second, read and written, of a large copy on the device; None on NumPy."""
    if not backend.on_device:
        return None
    source, target = (backend.zeros(_COPY_BYTES, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(_COPIES):
        start = backend.mark()
        backend.xp.copyto(target, source)
        end = backend.mark()
        backend.synchronize()
        seconds.append(backend.seconds_between(start, end))
    return 2 * _COPY_BYTES / statistics.median(seconds)


def floor_bytes(setup: RunSetup) -> dict[str, int]:
    """Bytes that a step's stages cannot do without, over all layers.

    Each distinct A and B once, x once (by token where a projection reads it so, else by row), y
    read and written once; base weights of the experts chosen once, their outputs written once.
    """
    total: dict[str, int] = {}
    for layer in range(setup.model.layers):
        for stage, count in _layer_bytes(setup, layer).items():
            total[stage] = total.get(stage, 0) + count
    return total


def _layer_bytes(setup: RunSetup, layer: int) -> dict[str, int]:
    counts = _Counts(setup, layer)
    found = {"dense deltas": sum(map(counts.dense, setup.model.dense_groups))}
    moe = setup.model.moe
    if moe is not None:
        found |= counts.moe(moe)
        if not setup.options.lora_only:
            found |= counts.base(moe)
    return found


class _Counts:
    """Bytes of one layer's stages."""

    def __init__(self, setup: RunSetup, layer: int) -> None:
        self.adapters, self.layer = setup.adapters, layer
        self.size = setup.stack.dtype.itemsize
        self.slots, self.ids = setup.batch.slots, setup.batch.ids[layer]

    def dense(self, group: tuple[ModuleShape, ...]) -> int:
        present = np.unique(self.slots[self.slots >= 0]).tolist()
        factors = sum(self._factors(self.adapters[slot], group, 1) for slot in present)
        tokens = int((self.slots >= 0).sum())
        width = group[0].in_features + 2 * sum(m.out_features for m in group)
        return factors + tokens * width * self.size

    def moe(self, moe: MoeShape) -> dict[str, int]:
        *first, down = moe.modules
        served = self.slots >= 0
        first_bytes = down_bytes = 0
        for slot in np.unique(self.slots[served]).tolist():
            experts = len(np.unique(self.ids[self.slots == slot]))
            first_bytes += self._factors(self.adapters[slot], first, experts)
            down_bytes += self._factors(self.adapters[slot], (down,), experts)
        tokens = int(served.sum())
        rows = tokens * self.ids.shape[1]
        first_values = tokens * moe.hidden + 2 * rows * moe.first_width
        down_values = rows * (moe.intermediate + 2 * moe.hidden)
        return {
            "MoE first delta": first_bytes + first_values * self.size,
            "down delta": down_bytes + down_values * self.size,
        }

    def base(self, moe: MoeShape) -> dict[str, int]:
        experts, (tokens, top_k) = len(np.unique(self.ids)), self.ids.shape
        rows = tokens * top_k
        first = experts * moe.first_width * moe.hidden
        first += tokens * moe.hidden + rows * moe.first_width
        down = experts * moe.hidden * moe.intermediate + rows * (moe.intermediate + moe.hidden)
        return {"MoE first base": first * self.size, "down base": down * self.size}

    def _factors(self, adapter: Adapter, modules: Iterable[ModuleShape], experts: int) -> int:
        """Bytes of an adapter's distinct factors of ``modules``, for so many experts."""
        elements: dict[tuple[str, int], int] = {}
        for module in modules:
            factors = adapter.factors.get((self.layer, module.name))
            for role, array in (("a", factors.a), ("b", factors.b)) if factors else ():
                used = experts if len(array) > 1 else 1
                elements[role, id(array)] = used * (array.size // len(array))
        return sum(elements.values()) * self.size
