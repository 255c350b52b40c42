"""A point on a backend: calls to time, the bytes they must move, and the check of what they leave.

Every part of a workload has one call per rotating set; the sets' inputs lie apart, their scratch is
shared, as layers share it. All memory is allocated here, so that the calls can be captured. Dense
sets read a layer of their own and share one batch; with experts each set is a batch of its own, and
all read one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.backend import ArrayBackend
from cupylora.bench.calls import (
    Lists,
    add_delta,
    delta_workspace,
    make_lists,
    relist,
    relist_workspace,
)
from cupylora.bench.check import AllOf, Check, DeltaCheck, sample_rows
from cupylora.bench.draws import Draw, draw_batch
from cupylora.bench.floors import part_bytes, set_count
from cupylora.bench.list_check import ListCheck
from cupylora.bench.points import Point
from cupylora.bench.pools import DTYPE, Pool, Pools, random_array
from cupylora.bench.step_check import StepCheck
from cupylora.layers.dense import DenseLora, dense_needs
from cupylora.layers.moe import MoeLora, moe_needs
from cupylora.layers.plan import BatchPlan
from cupylora.layers.workspace import Workspace
from cupylora.shapes import ModuleShape, MoeShape
from cupylora.worklists import Array, LoraSlice

__all__ = ["Workload", "make_workload"]

Call = Callable[[], Any]

_ALIGNMENT = 256 // DTYPE.itemsize
"""Elements: each set's arrays start at a multiple, as arrays of their own would."""


_ENDS = "the first and the last set"


@dataclass(frozen=True)
class Workload:
    """parts: per timed graph its calls, one a set. nbytes: per part of the floor, the mean over the
    sets. check: of some sets' outputs after each graph was launched once. kept: what the calls and
    entries only point at."""

    parts: tuple[tuple[Call, ...], ...]
    nbytes: tuple[float, ...]
    check: Check
    kept: tuple[Any, ...] = ()

    @property
    def sets(self) -> int:
        """Rotating input sets."""
        return len(self.parts[0])


def make_workload(
    backend: ArrayBackend, point: Point, pools: Pools, sets: int | None = None
) -> Workload:
    """The workload of a point; ``sets``: other than ``set_count`` says.

    Raises CapacityError where its weights do not fit.
    """
    count = sets or set_count(point)
    if point.kind == "dense":
        return _dense(backend, point, pools, count)
    if point.kind == "route":
        return _route(backend, point, count)
    if point.kind == "moe":
        return _moe(backend, point, pools, count)
    if point.moe is not None:
        return _moe_step(backend, point, point.moe, pools, count)
    return _dense_step(backend, point, pools, count)


def _arrays(backend: ArrayBackend, count: int, shape: tuple[int, int], seed: int) -> list[Array]:
    """``count`` arrays of random numbers of standard deviation 1, in one piece of memory."""
    size = shape[0] * shape[1]
    pitch = -(-size // _ALIGNMENT) * _ALIGNMENT
    memory = random_array(backend, (count * pitch,), seed, 1.0)
    return [memory[i * pitch : i * pitch + size].reshape(shape) for i in range(count)]


def _ends(count: int) -> tuple[int, ...]:
    """The sets that are checked: the first and the last of the rotation."""
    return (0, count - 1) if count > 1 else (0,)


def _starts(widths: Sequence[int]) -> list[int]:
    return [int(start) for start in np.cumsum([0, *widths[:-1]])]


def _dense(backend: ArrayBackend, point: Point, pools: Pools, count: int) -> Workload:
    pool = pools.get(point, [(point.in_features, n) for n in point.widths], count)
    draw = draw_batch(point)
    lists = _device_lists(backend, point, draw)
    x = _arrays(backend, count, (point.tokens, point.in_features), 1)
    y = _arrays(backend, count, (point.tokens, point.out_features), 2)
    columns = _starts(point.widths)
    slices = tuple(LoraSlice(n, at) for n, at in zip(point.widths, columns, strict=True))
    scratch = delta_workspace(
        backend, point.rows, len(slices), point.in_features, point.rank, DTYPE
    )
    calls = tuple(
        partial(
            add_delta,
            backend,
            x[i],
            y[i],
            lists,
            pool.entries[i],
            slices,
            rank=point.rank,
            x_rows="token",
            workspace=scratch,
            max_active=point.lora_case,
        )
        for i in range(count)
    )
    checks = [
        _delta_check(backend, point, draw, pool, slice(None), (x[i], y[i]), columns, i)
        for i in _ends(count)
    ]
    return Workload((calls,), part_bytes(point, point.active), AllOf(checks, _ENDS), (pool,))


def _device_lists(backend: ArrayBackend, point: Point, draw: Draw) -> Lists:
    ids, slots = backend.asarray(draw.experts), backend.asarray(draw.slots)
    return make_lists(
        backend,
        ids,
        slots,
        point.experts,
        point.max_loras,
        max_active=point.lora_case,
        rank=point.rank,
    )


def _delta_check(
    backend: ArrayBackend,
    point: Point,
    draw: Draw,
    pool: Pool,
    modules: slice,
    arrays: tuple[Array, Array],
    columns: Sequence[int],
    layer: int,
    *,
    by_token: bool = True,
) -> DeltaCheck:
    """The check of one set's y, whose rows are pairs; x's are tokens, or pairs too."""
    x, y = arrays
    rows = sample_rows(point.rows, point.seed)
    return DeltaCheck(
        backend,
        x,
        y,
        pool.modules[modules],
        columns,
        rows,
        rows // point.top_k if by_token else rows,
        _blocks(point, draw, rows),
        layer,
    )


def _blocks(point: Point, draw: Draw, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    slots = draw.slots[pairs // point.top_k].astype(np.int64)
    return slots * point.experts + draw.experts.reshape(-1)[pairs]


def _moe_modules(point: Point) -> list[tuple[int, int]]:
    hidden, wide = point.in_features, point.out_features
    return [(hidden, wide), (hidden, wide), (wide, hidden)]


def _mean_bytes(point: Point, draws: Sequence[Draw]) -> tuple[float, ...]:
    parts = np.array([part_bytes(point, draw.pairs) for draw in draws])
    return tuple(parts.mean(axis=0).tolist())


def _moe(backend: ArrayBackend, point: Point, pools: Pools, count: int) -> Workload:
    hidden, wide, rows = point.in_features, point.out_features, point.rows
    pool = pools.get(point, _moe_modules(point))
    draws = [draw_batch(point, i) for i in range(count)]
    lists = [_device_lists(backend, point, draw) for draw in draws]
    shapes = ((point.tokens, hidden), (rows, 2 * wide), (rows, wide), (rows, hidden))
    x, y, x2, y2 = (_arrays(backend, count, shape, i + 1) for i, shape in enumerate(shapes))
    common: dict[str, Any] = {"rank": point.rank, "max_active": point.lora_case}
    first_room = delta_workspace(backend, rows, 2, hidden, point.rank, DTYPE)
    down_room = delta_workspace(backend, rows, 1, wide, point.rank, DTYPE)
    first_slices, down_slices = (LoraSlice(wide, 0), LoraSlice(wide, wide)), (LoraSlice(hidden),)
    entries = pool.entries[0]
    first = tuple(
        partial(
            add_delta,
            backend,
            x[i],
            y[i],
            lists[i],
            entries[:2],
            first_slices,
            x_rows="token",
            workspace=first_room,
            **common,
        )
        for i in range(count)
    )
    down = tuple(
        partial(
            add_delta,
            backend,
            x2[i],
            y2[i],
            lists[i],
            entries[2:],
            down_slices,
            x_rows="pair",
            workspace=down_room,
            **common,
        )
        for i in range(count)
    )
    checks = []
    for i in _ends(count):
        make = partial(_delta_check, backend, point, draws[i], pool)
        checks.append(make(slice(0, 2), (x[i], y[i]), (0, wide), 0))
        arrays = (x2[i], y2[i])
        checks.append(make(slice(2, 3), arrays, (0,), 0, by_token=False))
    check = AllOf(checks, f"gate and up, and of down, of {_ENDS}")
    return Workload((first, down), _mean_bytes(point, draws), check, (pool,))


def _route(backend: ArrayBackend, point: Point, count: int) -> Workload:
    draws = [draw_batch(point, i) for i in range(count)]
    inputs = [(backend.asarray(d.experts), backend.asarray(d.slots)) for d in draws]
    lists = [
        make_lists(
            backend,
            *arrays,
            point.experts,
            point.max_loras,
            max_active=point.lora_case,
            rank=point.rank,
        )
        for arrays in inputs
    ]
    room = relist_workspace(backend, lists[0])
    calls = tuple(
        relist(backend, *arrays, made, room, point.lora_case)
        for arrays, made in zip(inputs, lists, strict=True)
    )
    last = _ends(count)[-1]
    return Workload(
        (calls,), _mean_bytes(point, draws), ListCheck(backend, point, draws[last], lists[last])
    )


def _moe_step(
    backend: ArrayBackend, point: Point, moe: MoeShape, pools: Pools, count: int
) -> Workload:
    pool = pools.get(point, _moe_modules(point))
    sizes: dict[str, Any] = {"max_tokens": point.tokens, "max_rank": point.rank, "dtype": DTYPE}
    room = Workspace(backend, [moe_needs(backend, moe, **sizes, base=False, outputs=False)])
    layer = MoeLora(moe, pool.entries[0], room, max_rank=point.rank, dtype=DTYPE)
    plan = _plan(backend, point)
    draws = [draw_batch(point, i) for i in range(count)]
    shapes = (
        (point.tokens, moe.hidden),
        (point.rows, moe.first_width),
        (point.rows, moe.hidden),
        (point.tokens, moe.hidden),
    )
    x, y, y2, out = (_arrays(backend, count, shape, i + 1) for i, shape in enumerate(shapes))

    def step(i: int, slots: Array, ids: Array, weights: Array) -> None:
        plan.update(slots, ids)
        layer.add_first(x[i], y[i], plan)
        hidden = layer.activate(y[i], plan)
        layer.add_down(hidden, y2[i], plan)
        layer.finalize(y2[i], weights, plan, out=out[i])

    batches = [tuple(map(backend.asarray, (d.slots, d.experts, d.weights))) for d in draws]
    calls = tuple(partial(step, i, *batch) for i, batch in enumerate(batches))
    last = _ends(count)[-1]
    check = StepCheck(backend, moe, draws[last], pool, x[last], y[last], y2[last], out[last])
    return Workload((calls,), _mean_bytes(point, draws), check, (pool,))


def _plan(backend: ArrayBackend, point: Point) -> BatchPlan:
    return BatchPlan(
        backend,
        max_tokens=point.tokens,
        max_loras=point.max_loras,
        experts=point.experts,
        top_k=point.top_k,
        max_active=point.lora_case,
        max_rank=point.rank,
    )


def _dense_step(backend: ArrayBackend, point: Point, pools: Pools, count: int) -> Workload:
    """The lists, modules that share x in one operation, and the module that follows them."""
    second = point.second or (point.out_features, point.in_features)
    sizes = [*((point.in_features, n) for n in point.widths), second]
    pool = pools.get(point, sizes, count)
    shapes = [ModuleShape(f"m{i}", *size) for i, size in enumerate(sizes)]
    groups = (shapes[:-1], shapes[-1:])
    limits: dict[str, Any] = {"max_tokens": point.tokens, "max_rank": point.rank, "dtype": DTYPE}
    room = Workspace(backend, [dense_needs(backend, group, **limits) for group in groups])
    plan = _plan(backend, point)
    draw = draw_batch(point)
    slots = backend.asarray(draw.slots)
    widths = (point.in_features, point.out_features, *second)
    x, y, x2, y2 = (_arrays(backend, count, (point.tokens, n), i) for i, n in enumerate(widths))
    made: dict[str, Any] = {"max_rank": point.rank, "dtype": DTYPE}

    def step(i: int, first: DenseLora, last: DenseLora) -> None:
        plan.update(slots)
        first.add(x[i], y[i], plan)
        last.add(x2[i], y2[i], plan)

    calls = tuple(
        partial(
            step,
            i,
            DenseLora(groups[0], pool.entries[i][:-1], room, **made),
            DenseLora(groups[1], pool.entries[i][-1:], room, **made),
        )
        for i in range(count)
    )
    checks = []
    for i in _ends(count):
        make = partial(_delta_check, backend, point, draw, pool)
        columns = _starts(point.widths)
        checks.append(make(slice(0, -1), (x[i], y[i]), columns, i))
        checks.append(make(slice(-1, None), (x2[i], y2[i]), (0,), i))
    check = AllOf(checks, f"both outputs of {_ENDS}")
    return Workload((calls,), part_bytes(point, point.active), check, (pool,))
