"""C chooses as Python does: random calls, planned and enqueued by cupylora.h and by the ops, come
to the same launches, down to the last byte of their arguments."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import Enqueued, FakeArray, install
from host_util import HOSTS, STRICT, FakeDriver, build, hollow, write_hollow

from cupylora import ops
from cupylora.dtypes import DTYPES
from cupylora.errors import ArgumentError
from cupylora.ops import _device, _lora_pair
from cupylora.worklists import (
    SLOT_ENTRY_BYTES,
    TILE_INTS,
    LoraSlice,
    Routing,
    Segments,
    choose_tile_rows,
    segment_capacity,
    tile_capacity,
)

CALLS = 400
"""Of each operation on each device."""

Launch = tuple[str, list[int], bytes]
Call = tuple[list[Any], Callable[[], object]]
"""The line for C, and the call for Python."""

DTYPE_NAMES = list(DTYPES)
ROWS_BY = ("token", "pair", "row")
KERNELS = ("auto", "pair", "cluster", "ring")
KINDS = ("silu", "gelu", "relu2", "swiglu_oai")
LAYOUTS = ("gate_first", "up_first", "interleaved")
BATCH = (
    *("tokens", "top_k", "experts", "start_expert", "max_loras"),
    *("max_active", "max_rank", "tile_rows", "k_major"),
)
DEVICES = {
    "H200-like": {"processors": 132, "blocks": 3, "clusters": {1: 396, 2: 198, 4: 96, 8: 40}},
    "tiny": {"processors": 1, "blocks": 5, "clusters": dict.fromkeys((1, 2, 4, 8), 5)},
    "not Hopper": {
        "processors": 170,
        "blocks": 2,
        "capability": (12, 0),
        "shared": (99 * 1024, 100 * 1024),
    },
}


class Place(FakeArray):
    """A device array that is only an address: what the checks and the packing ask of one."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, address: int) -> None:
        self.flags = types.SimpleNamespace(c_contiguous=True, writeable=True)
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape, dtype=np.int64))
        self.data = types.SimpleNamespace(ptr=address)

    def __len__(self) -> int:
        return self.shape[0]


class Draw:
    """Random calls: small and large, aligned and not. Each method is an operation."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.at = 0x1000
        self.tile_rows = 8
        """Of the last batch."""

    def array(self, shape: tuple[int, ...], dtype: Any, *, shift: bool = False) -> Place:
        """At an address of its own, off a 16-byte boundary at times if ``shift``."""
        self.at += 0x10000
        off = self.pick.choice([0, 0, 1, 2, 4]) if shift else 0
        return Place(shape, dtype, self.at + off * np.dtype(dtype).itemsize)

    def size(self, *ranges: tuple[int, int]) -> int:
        return self.pick.randint(*self.pick.choice(ranges))

    def batch(self) -> types.SimpleNamespace:
        experts = self.pick.choice([1, 1, 4, 8, 64, 128, 256, 2048])
        tokens = self.size((0, 4), (1, 64), (16, 260), (1, 600), (500, 5000), (5000, 90_000))
        top_k = 1 if experts == 1 else self.pick.choice([1, 2, 4, 8])
        loras = self.pick.choice([1, 4, 16, 64, 400, 4096])
        if self.pick.random() < 0.3:  # where two ways to make the lists are about as quick
            tokens = self.pick.randint(129, 256) // top_k
            loras = max(1, self.pick.randint(100, 3000) // experts - 1)
        max_rank = self.pick.choice([1, 4, 8, 16, 17, 32, 33, 48, 64, 65, 100, 256, 512])
        tile_rows = self.pick.choice([0, 0, 8, 16, 32, 64])
        if self.pick.random() < 0.1:  # where many rows share an adapter of many ranks
            tokens = self.pick.randint(10_000, 90_000) // top_k
            max_rank, tile_rows = self.pick.choice([33, 48, 64, 128]), self.pick.choice([0, 32, 64])
        return types.SimpleNamespace(
            tokens=tokens,
            top_k=top_k,
            experts=experts,
            start_expert=self.pick.choice([0, 0, 7]),
            max_loras=loras,
            max_active=self.pick.choice([0, 0, 1, 3, 16]),
            max_rank=max_rank,
            tile_rows=tile_rows,
            k_major=int(self.pick.random() < 0.3),
        )

    def routed(
        self, b: types.SimpleNamespace | None = None
    ) -> tuple[types.SimpleNamespace, Routing, Segments, list[int]]:
        """A batch, random where it is not given, its lists, and both as numbers for C."""
        b = b or self.batch()
        rows = b.tokens * b.top_k
        room = segment_capacity(rows, b.experts, b.max_loras)
        height = b.tile_rows or choose_tile_rows(
            rows, b.experts, max_active=b.max_active, max_rank=b.max_rank
        )
        self.tile_rows = height
        i32, i64 = np.int32, np.int64
        places = [self.array((rows,), i32), self.array((rows,), i32)]
        places += [self.array((b.experts + 1,), i64), self.array((room + 1,), i32)]
        places += [self.array((room,), i32), self.array((room,), i32)]
        places += [self.array((1,), i32), self.array((1,), i32)]
        places += [self.array((tile_capacity(rows, room, height), TILE_INTS), i32)]
        order: Any = "k_major" if b.k_major else "token_major"
        routing = Routing(
            *places[:3], b.tokens, b.top_k, b.experts, b.start_expert, row_order=order
        )
        count, tile_count, tiles = places[6:]
        segments = Segments(*places[3:6], count, tiles, tile_count, height, b.max_loras)
        numbers = [getattr(b, name) for name in BATCH] + [p.data.ptr for p in places]
        return b, routing, segments, numbers

    def lists(self) -> Call:
        b, routing, segments, numbers = self.routed()
        ids = self.array((b.tokens, b.top_k), np.int32)
        slots = self.array((b.tokens,), np.int32)
        work, status = self.array((1 << 40,), np.uint8), self.array((1,), np.int32)
        after = [p.data.ptr for p in (ids, slots, work)] + [1 << 40, status.data.ptr]
        return ["lists", *numbers, *after], lambda: ops.plan(
            ids,
            slots,
            num_experts=b.experts,
            max_loras=b.max_loras,
            tile_rows=segments.tile_rows,
            max_active=b.max_active or None,
            start_expert=b.start_expert,
            row_order=routing.row_order,
            out=(routing, segments),
            workspace=work,
            status=status,
        )

    def slices(self) -> tuple[list[LoraSlice], int]:
        if self.pick.random() < 0.2:
            width = self.size((1, 3000))
            return [LoraSlice(width, 0, 2), LoraSlice(width, 1, 2)], 2 * width
        made, at, step = [], 0, self.pick.choice([1, 2, 8])
        for _ in range(self.pick.choice([1, 1, 2, 3, 8])):
            width = self.size((1, 200), (64, 4096), (64, 30_000)) // step * step or step
            made.append(LoraSlice(width, at))
            at += width + self.pick.choice([0, 0, 8, 3, -width % 8])
        return made, at + self.pick.choice([0, 0, 5, -at % 8])

    def delta(self) -> Call:
        dtype = self.pick.choice([0, 0, 0, 1, 2])
        features = self.size((1, 300), (64, 8192), (1, 20_000)) // self.pick.choice([1, 8]) or 8
        kernel = self.pick.choice([0] * 6 + [1, 2, 3])
        return self.delta_of(self.batch(), dtype, features, *self.slices(), kernel)

    def delta_of(
        self,
        b: types.SimpleNamespace,
        dtype: int,
        features: int,
        slices: list[LoraSlice],
        width: int,
        kernel: int = 0,
    ) -> Call:
        """A call of these sizes; the rest is random."""
        b, routing, segments, numbers = self.routed(b)
        kind = DTYPES[DTYPE_NAMES[dtype]]
        rows = b.tokens * b.top_k
        x_rows, y_rows = self.pick.randrange(3), self.pick.choice([1, 2])
        settled = self.pick.randrange(2)
        length = b.tokens if x_rows == 0 else rows
        x = self.array((length, features), kind, shift=True)
        y = self.array((rows, width), kind, shift=True)
        entries = self.array((len(slices), b.max_loras, SLOT_ENTRY_BYTES), np.uint8)
        work, status = self.array((1 << 50,), np.uint8), self.array((1,), np.int32)
        numbers += [dtype, features, b.max_rank, width, x_rows, y_rows, settled, kernel]
        numbers += [len(slices)]
        for part in slices:
            numbers += [part.out_features, part.y_column, part.y_stride]
        numbers += [p.data.ptr for p in (x, y, entries, work)] + [1 << 50, status.data.ptr]
        by: Any = ROWS_BY
        return ["delta", *numbers], lambda: ops.lora_delta(
            x,
            y,
            segments,
            routing,
            entries,
            slices,
            in_features=features,
            max_rank=b.max_rank,
            x_rows=by[x_rows],
            y_rows=by[y_rows],
            workspace=work,
            status=status,
            kernel=KERNELS[kernel],  # type: ignore[arg-type]
            max_active=b.max_active or None,
            plan_settled=bool(settled),
        )

    def activation(self) -> Call:
        b, routing, _, numbers = self.routed()
        dtype, kind, layout = (self.pick.randrange(n) for n in (3, 4, 3))
        gated = 1 if kind == 3 else self.pick.randrange(2)
        hidden, bias = self.size((1, 100), (8, 3000)), self.pick.randrange(2)
        by, rows = self.pick.choice([1, 2]), b.tokens * b.top_k
        element, width = DTYPES[DTYPE_NAMES[dtype]], hidden * (1 + gated)
        x = self.array((rows, width), element, shift=True)
        out = self.array((rows, hidden), element, shift=self.pick.random() < 0.2)
        added = self.array((b.experts, width), element) if bias else None
        numbers += [dtype, kind, gated, layout, hidden, bias, by]
        numbers += [x.data.ptr, 0 if added is None else added.data.ptr, out.data.ptr]
        names: Any = (KINDS[kind], LAYOUTS[layout], ROWS_BY[by])
        return ["activation", *numbers], lambda: ops.activation(
            x,
            kind=names[0],
            gated=bool(gated),
            layout=names[1],
            bias=added,
            routing=routing,
            rows=names[2],
            out=out,
        )

    def finalize(self) -> Call:
        b, routing, _, numbers = self.routed()
        dtype, bias, by = self.pick.randrange(3), self.pick.randrange(2), self.pick.choice([1, 2])
        hidden, rows = self.size((1, 100), (8, 3000)), b.tokens * b.top_k
        element = DTYPES[DTYPE_NAMES[dtype]]
        y = self.array((rows, hidden), element, shift=True)
        weights = self.array((b.tokens, b.top_k), np.float32)
        out = self.array((b.tokens, hidden), element)
        added = self.array((b.experts, hidden), element) if bias else None
        rest = self.array((b.tokens, hidden), element, shift=True)
        residual = rest if self.pick.random() < 0.5 else None
        places = [y, weights, added, residual, out]
        numbers += [dtype, hidden, bias, by, *(0 if p is None else p.data.ptr for p in places)]
        rows_by: Any = ROWS_BY[by]
        return ["finalize", *numbers], lambda: ops.finalize(
            y, weights, routing, y_rows=rows_by, bias=added, residual=residual, out=out
        )


@dataclass
class Launched:
    """What ops launch, and the bytes of workspace that a LoRA delta asked for last."""

    launches: list[Launch] = field(default_factory=list)
    scratch: int = 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> Iterator[Launched]:
    """On a device as the driver has it."""
    made = Launched()

    def enqueue(*args: Any, **options: Any) -> None:
        launch = Enqueued(*args, **options)
        sizes = [launch.grid[0], launch.threads, launch.smem, launch.cluster_size]
        made.launches.append((launch.name, [*sizes, int(launch.dependent)], launch.packed()))

    def scratch(given: Any, size: int, needed_by: str) -> Any:
        made.scratch = size
        return _device.workspace(given, size, needed_by)

    install(
        monkeypatch,
        lambda array: array,
        enqueue=enqueue,
        current_device=lambda: 0,
        is_hopper=lambda: driver.capability[0] == 9,
        resident_blocks=lambda *_: driver.processors * driver.blocks,
        active_clusters=lambda *args: driver.clusters[args[4]],
        shared_limit=lambda: driver.shared[0],
        shared_memory=lambda: driver.shared,
    )
    monkeypatch.setattr(_lora_pair, "scratch", scratch)
    from cupylora.ops import _lora_fused

    _lora_fused._settings.cache_clear()
    yield made
    _lora_fused._settings.cache_clear()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """An export's folder and a host built with it, by architecture."""
    made = {}
    for arch in ("sm_90a", "sm_120"):
        folder = tmp_path_factory.mktemp(arch)
        export = write_hollow(folder / "export", hollow(arch))
        flags = ("-std=c99", "-O1", *STRICT, f"-I{export / 'include'}")
        host = build("gcc", flags, [HOSTS / "host_calls.c"], folder / "host_calls")
        made[arch] = (export, host)
    return made


@pytest.fixture(params=DEVICES)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> FakeDriver:
    options: dict[str, Any] = dict(DEVICES[request.param])
    arch = "sm_120" if "capability" in options else "sm_90a"
    return FakeDriver(tmp_path, hollow(arch), **options)


def compare(
    calls: Iterable[Call],
    driver: FakeDriver,
    launched: Launched,
    programs: dict[str, tuple[Path, Path]],
) -> set[str]:
    """Make the calls in Python and in C, which must launch the same; the kernels that served."""
    export, host = programs[driver.built[0].arch]
    lines, expected = [], []
    for line, call in calls:
        lines.append(" ".join(map(str, line)))
        before, launched.scratch = len(launched.launches), 0
        try:
            call()
        except ArgumentError:
            expected.append((1, 0, []))
        else:
            expected.append((0, launched.scratch, launched.launches[before:]))
    done = driver.run([host, export], "\n".join(lines))
    assert done.returncode == 0, done.stdout + done.stderr
    answers = done.stdout.splitlines()
    got = iter(driver.launches())
    for line, answer, (status, scratch, launches) in zip(lines, answers, expected, strict=True):
        assert answer.split(" ")[0] == str(status), (line, answer)
        for launch in launches:
            assert next(got) == launch, (line, answer)
        if line.startswith("delta") and launches:
            assert answer.split(" ")[1] == str(scratch), (line, answer)
    assert next(got, None) is None
    return {name for _, _, launches in expected for name, _, _ in launches}


@pytest.mark.parametrize("operation", ["lists", "delta", "activation", "finalize"])
def test_c_launches_what_python_launches(
    operation: str,
    driver: FakeDriver,
    launched: Launched,
    programs: dict[str, tuple[Path, Path]],
) -> None:
    draw = Draw(11)
    calls = (getattr(draw, operation)() for _ in range(CALLS))
    served = {name.rpartition("/")[0] for name in compare(calls, driver, launched, programs)}
    assert served >= PROGRAMS[operation] - (HOPPER if driver.capability[0] != 9 else set())


WIDE = ("wide_{}/4_32", "wide_{}/4_64", "wide_{}/8_64")


def large_calls() -> Iterator[Call]:
    """Deltas of large batches: each size that a rule asks for, and the one next to it."""
    draw, pair = Draw(17), _lora_pair
    sizes = (pair._STREAM_ROWS * 2, pair._WIDE_ROWS - 1, pair._WIDE_ROWS, 3 * pair._WIDE_ROWS)
    ranks = (pair._WIDE_RANK - 1, pair._WIDE_RANK, pair._STREAM_RANK, pair._STREAM_RANK + 1, 128)
    longest = pair._MOST_CHUNKS * pair._CHUNK
    features = (64, 1536, 4096, 65_536, 66_560, longest, longest + 1)
    for rows, rank, width, height, count, less in itertools.product(
        sizes, ranks, features, (16, 32, 64), (1, 2, 3), (0, 1)
    ):
        batch = types.SimpleNamespace(
            tokens=rows,
            top_k=1,
            experts=1,
            start_expert=0,
            max_loras=4,
            max_active=0,
            max_rank=rank,
            tile_rows=height,
            k_major=0,
        )
        columns = -(-pair._PANEL_ELEMENTS // rows) - less
        parts = [columns - 100 * (count - 1), *[100] * (count - 1)]
        starts = itertools.accumulate([0, *parts[:-1]])
        slices = [LoraSlice(part, at) for part, at in zip(parts, starts, strict=True)]
        yield draw.delta_of(batch, draw.pick.choice([0, 1]), width, slices, columns)


def test_c_chooses_as_python_does_at_the_limits_of_large_batches(
    driver: FakeDriver, launched: Launched, programs: dict[str, tuple[Path, Path]]
) -> None:
    served = compare(large_calls(), driver, launched, programs)
    hopper = driver.capability[0] == 9
    more = ("group_{}/8_32", "group_{}/8_64") if hopper else ("wide_{}/8_32",)
    for dtype in ("bfloat16", "float16"):
        assert served >= {f"lora_shrink_{name.format(dtype)}" for name in (*WIDE, *more)}
        for name in ("shrink_stream", "expand", "expand_direct", "expand_stream", "expand_panel"):
            assert any(found.startswith(f"lora_{name}_{dtype}/") for found in served), name


HOPPER = {"lora_cluster_bfloat16", "lora_ring_bfloat16"}
PROGRAMS = {
    "lists": {"plan", "plan_large", "sort", "segments"},
    "delta": {
        *HOPPER,
        "lora_f32",
        *(f"lora_{half}_bfloat16" for half in ("shrink", "expand")),
        *(f"lora_{half}_stream_bfloat16" for half in ("shrink", "expand")),
        *("lora_shrink_wide_bfloat16", "lora_expand_panel_bfloat16"),
    },
    "activation": {"rows", "rows_unaligned"},
    "finalize": {"rows", "rows_unaligned"},
}
"""What the calls must have reached, so that a comparison of nothing cannot pass."""
