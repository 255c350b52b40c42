"""A call of ``lora_delta`` on the device that tests repeat with every kernel and every shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from chain_util import to_rows
from gpu_util import DeviceMemory, shifted_copy, to_device, to_host
from problem_util import (
    ModuleWeights,
    RoutingCase,
    bits_of,
    build_entries,
    comparable_rows,
    expert_order,
    pair_deltas,
    random_values,
)

from cupylora import ops, reference
from cupylora.dtypes import resolve_dtype
from cupylora.ops._lora_call import lora_inputs
from cupylora.ops._lora_choice import FusedShape, k_ranges
from cupylora.ops._lora_fused import run_fused
from cupylora.ops.lora_delta import _workload, lora_workspace_bytes
from cupylora.worklists import LoraSlice, Routing

FUSED = ("cluster", "ring")
CLUSTER_ROWS = 8
"""Rows of the only tiles that the cluster kernel takes."""


@dataclass(frozen=True)
class Shifts:
    """Elements that each operand starts beyond an aligned address."""

    a: int = 0
    b: int = 0
    x: int = 0
    y: int = 0


@dataclass
class Batch:
    """What a call takes. x: [T, K], its rows by token. y0: [R, width], its rows by pair.

    The device has both in the orders that ``x_rows`` and ``y_rows`` say; row orders that have
    ghosts hold NaN in them.
    """

    case: RoutingCase
    modules: list[ModuleWeights]
    dtype: str
    max_rank: int
    slices: Sequence[LoraSlice] = ()
    width: int = 0
    tile_rows: int = 8
    packed: bool = True
    shifts: Shifts = field(default_factory=Shifts)
    x_rows: Any = "token"
    y_rows: Any = "pair"
    row_order: Any = "token_major"
    foreign: bool = False
    x: Any = None
    y0: Any = None

    def __post_init__(self) -> None:
        if not self.slices:
            ends = np.cumsum([0, *(module.out_features for module in self.modules)]).tolist()
            self.slices = [
                LoraSlice(m.out_features, at) for m, at in zip(self.modules, ends, strict=False)
            ]
        last = max(p.y_column + (p.out_features - 1) * p.y_stride for p in self.slices)
        self.width = max(self.width, last + 1)
        rng = np.random.default_rng(1)
        if self.x is None:
            features = self.modules[0].in_features
            self.x = random_values(rng, (len(self.case.topk_ids), features), self.dtype)
        self.delta = self._delta()
        if self.y0 is None:
            self.y0 = comparable_rows(rng, self.delta, self.dtype)
        self._upload()

    def _delta(self) -> np.ndarray:
        """Float64 [R, width]: what is added to y, by pair."""
        delta = np.zeros((self.case.topk_ids.size, self.width))
        for part, module in zip(self.slices, self.modules, strict=True):
            delta[:, columns_of(part)] = pair_deltas(self.case, self.x, module, self.row_order)
        return delta

    def _upload(self) -> None:
        routing = reference.route(
            self.case.topk_ids,
            self.case.token_to_slot,
            row_order=self.row_order,
            **self.case.sizes,  # type: ignore[arg-type]
        )
        self.host_routing: Routing = expert_order(routing, 3) if self.foreign else routing
        size = resolve_dtype(self.dtype).itemsize
        # Factors come in turn: A, B, A, B, ...
        memories = [DeviceMemory(shift * size) for shift in (self.shifts.a, self.shifts.b)]
        turns = itertools.cycle(memories)
        entries = build_entries(self.modules, lambda v: next(turns).upload(v), packed=self.packed)
        self.entries, self._memories = to_device(entries), memories
        self.routing = to_device(self.host_routing)
        self.segments = ops.build_segments(
            self.routing,
            to_device(self.case.token_to_slot),
            max_loras=self.case.max_loras,
            tile_rows=self.tile_rows,
        )
        self.device_x = shifted_copy(self._x_as_given(), self.shifts.x)
        self.device_y0 = shifted_copy(self._y_as_given(), self.shifts.y)

    def _x_as_given(self) -> np.ndarray:
        if self.x_rows == "token":
            return np.asarray(self.x)
        tokens, top_k = self.case.topk_ids.shape
        pairs = np.arange(tokens * top_k)
        by_pair = self.x[pairs % tokens if self.row_order == "k_major" else pairs // top_k]
        return by_pair if self.x_rows == "pair" else to_rows(by_pair, self.host_routing)

    def _y_as_given(self) -> np.ndarray:
        return self.y0 if self.y_rows == "pair" else to_rows(self.y0, self.host_routing)

    def by_pair(self, y: np.ndarray) -> np.ndarray:
        """y as the call left it -> rows by pair; those that are not ours as they were."""
        if self.y_rows == "pair":
            return y
        valid = int(self.host_routing.expert_first_token_offset[-1])
        out = np.array(self.y0)
        out[self.host_routing.row_to_pair[:valid]] = y[:valid]
        return out

    @property
    def workspace(self) -> Any:
        """For the pair, so that it can be captured."""
        import cupy

        if not hasattr(self, "_workspace"):
            features = self.modules[0].in_features
            sizes = (self.case.topk_ids.size, len(self.slices), features, self.max_rank)
            self._workspace = cupy.empty(lora_workspace_bytes(*sizes, self.dtype), np.uint8)
        return self._workspace

    def fresh_y(self) -> Any:
        """A copy of y on the device, at the same alignment."""
        y = shifted_copy(np.zeros_like(self.y0), self.shifts.y)
        y.view(np.uint16)[...] = self.device_y0.view(np.uint16)
        return y

    def enqueue(
        self,
        y: Any,
        kernel: Any,
        shape: FusedShape | None = None,
        *,
        x: Any = None,
        settled: bool = False,
        status: Any = None,
    ) -> None:
        """The call into ``y``; with ``shape`` in that shape."""
        x = self.device_x if x is None else x
        features = self.modules[0].in_features
        sizes: dict[str, Any] = {"in_features": features, "max_rank": self.max_rank}
        sizes |= {"x_rows": self.x_rows, "status": status, "plan_settled": settled}
        lists = (self.segments, self.routing, self.entries)
        if shape is None:
            more: dict[str, Any] = {"y_rows": self.y_rows, "kernel": kernel}
            more |= {"workspace": self.workspace}
            ops.lora_delta(x, y, *lists, list(self.slices), **sizes, **more)
            return
        inputs = lora_inputs(x, *lists, len(self.slices), **sizes)
        work = _workload(inputs, self.slices, None)
        run_fused(inputs, y, self.slices, self.y_rows, kernel, work, shape)

    def run(self, kernel: Any, shape: FusedShape | None = None, **options: Any) -> np.ndarray:
        """y after the call."""
        y = self.fresh_y()
        self.enqueue(y, kernel, shape, **options)
        return np.asarray(to_host(y))

    def run_behind_writer(self, kernel: Any, shape: FusedShape | None = None) -> np.ndarray:
        """y after the call, with x and y written by the kernel directly ahead, which lets it start
        at once and takes its time."""
        y, x = self.fresh_y(), shifted_copy(self._x_as_given(), self.shifts.x)
        x.view(np.uint16).fill(0xFFFF)  # NaN
        y.view(np.uint16).fill(0xFFFF)
        write(((self.device_x, x), (self.device_y0, y)))
        self.enqueue(y, kernel, shape, x=x, settled=True)
        return np.asarray(to_host(y))

    def variants(self) -> Iterator[tuple[Any, FusedShape]]:
        """(kernel, shape): clusters of every size; CTAs with several items, and many without any;
        CTAs with few columns, and some without any."""
        kernels = FUSED if self.tile_rows == CLUSTER_ROWS else ("ring",)
        ranges = k_ranges(self.modules[0].in_features)
        sizes = [size for size in (1, 2, 4, 8) if size <= ranges]
        for kernel, size in itertools.product(kernels, sizes):
            for columns, clusters in ((64, 3), (64, 300), (256, 2), (256, 40)):
                yield kernel, FusedShape(size, columns, clusters)


def columns_of(part: LoraSlice) -> slice:
    """Columns of y that belong to a slice."""
    last = part.y_column + (part.out_features - 1) * part.y_stride
    return slice(part.y_column, last + 1, part.y_stride)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: Any = "") -> None:
    """Equal bit for bit."""
    np.testing.assert_array_equal(bits_of(actual), bits_of(expected), err_msg=str(what))


def check_variants(batch: Batch) -> np.ndarray:
    """All kernels and shapes leave the same bits in y, which are returned."""
    expected = batch.run("pair")
    for kernel, shape in batch.variants():
        assert_same_bits(batch.run(kernel, shape), expected, (kernel, shape))
    return expected


_WRITER = r"""
extern "C" __global__ void late_copy(const unsigned short* from, unsigned short* to, long long n,
                                     const unsigned short* from2, unsigned short* to2,
                                     long long n2, long long cycles) {
  asm volatile("griddepcontrol.launch_dependents;");
  const long long start = clock64(), step = (long long)gridDim.x * blockDim.x;
  while (clock64() - start < cycles) {
  }
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (long long i = first; i < n; i += step) to[i] = from[i];
  for (long long i = first; i < n2; i += step) to2[i] = from2[i];
}
"""


@cache
def _writer() -> Any:
    import cupy

    return cupy.RawKernel(_WRITER, "late_copy")


def write(copies: Sequence[tuple[Any, Any]], cycles: int = 20_000) -> None:
    """One kernel that copies 2-byte elements, for one or two pairs of arrays. The kernel behind it
    may start at once; the copies come ``cycles`` later."""
    bits = [array.view(np.uint16) for pair in copies for array in pair]
    sizes = [np.int64(source.size) for source in bits[::2]]
    if len(copies) == 1:
        bits, sizes = bits * 2, [*sizes, np.int64(0)]
    (source, target, source2, target2), (n, n2) = bits, sizes
    _writer()((8,), (256,), (source, target, n, source2, target2, n2, np.int64(cycles)))


def replays(step: Callable[[], None], before: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Captures ``step`` once it has run eagerly, and yields after a replay behind each of
    ``before``, with the stream synchronised."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for prepare in before:
            prepare()
            graph.launch(stream)
            stream.synchronize()
            yield
