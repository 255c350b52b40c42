"""Which LoRA kernel serves a call and in what shape, and that the host side of the fused kernels
repeats what their sources say: the K order, the argument struct, shared memory."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from cuda_text import assign, body, constants, evaluate, layout, methods, source_text
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupylora.compiler.programs import find_program
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.ops import _lora_choice, _lora_fused
from cupylora.ops._lora_call import MAX_SLICES, ROW_INDEX, LoraInputs, pack_slices
from cupylora.ops._lora_choice import (
    FusedShape,
    KernelName,
    Workload,
    choose,
    cluster_shape,
    k_ranges,
    ring_shape,
)
from cupylora.worklists import SLOT_ENTRY_BYTES, TILE_INTS, TILE_ROWS, LoraSlice

SHARED_LIMIT = 227 * 1024
"""Bytes that a block may have from compute capability 9.0 on, its static part included."""

CLUSTERS = (1, 2, 4, 8)
FUSED: tuple[Any, ...] = ("cluster", "ring")
LIMITS = _lora_choice._TILE_ROWS
RANKS = range(1, 65)
RING_SIZES = [
    (tile_rows, max_rank)
    for tile_rows, most in LIMITS["ring"].items()
    for max_rank in range(1, most + 1)
]
"""Rows of a tile and max_rank."""

K_ORDER = source_text("lora/k_order.cuh")
CLUSTER = source_text("lora/cluster.cu")
RING = "\n".join(source_text(f"lora/{n}") for n in ("ring_layout.cuh", "ring.cu"))
STRUCTS = "\n".join(source_text(f"lora/{n}.cuh") for n in ("slot_entry", "items"))
TUNING = {
    name: int(value)
    for name, value in re.findall(r"#define (\w+) (\d+)", source_text("lora/tuning.cuh"))
}
NAMES = constants(
    "\n".join(source_text(f"{n}.cuh") for n in ("ptx/types", "lora/operands", "lora/slow_path"))
    + K_ORDER
    + STRUCTS,
    **TUNING,
)


def work_of(**sizes: Any) -> Workload:
    """A small decode step, apart from ``sizes``."""
    plain: dict[str, Any] = {"rows": 8, "experts": 1, "active": 4, "in_features": 4096}
    plain |= {"widths": (4096,), "max_rank": 16, "tile_rows": 8, "tile_capacity": 8}
    return Workload(**(plain | sizes))


def test_k_is_cut_as_the_kernels_cut_it() -> None:
    order = body(K_ORDER, "explicit KOrder(i32 in_features)")
    for in_features in range(1, 20_001):
        cut = assign(order, {**NAMES, "in_features": in_features})
        ranges = k_ranges(in_features)
        assert ranges == cut["ranges"], in_features
        assert ranges & (ranges - 1) == 0
        assert cut["length"] * ranges >= cut["chunks"] == -(-in_features // 64)
        assert ranges <= cut["chunks"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, "cluster"),
        ({"rows": 0, "tile_capacity": 1}, "cluster"),
        ({"max_rank": 64}, "cluster"),
        ({"max_rank": 65}, "pair"),
        ({"tile_rows": 16}, "ring"),
        ({"tile_rows": 16, "max_rank": 33}, "pair"),
        ({"tile_rows": 64, "max_rank": 1}, "pair"),
        ({"rows": 256, "experts": 128, "active": 16, "tile_capacity": 256}, "ring"),
        ({"rows": 256, "experts": 128, "active": 16, "max_rank": 65}, "pair"),
        ({"tile_capacity": 2**28, "widths": (256,)}, "pair"),
        ({"tile_capacity": 2**28 - 1, "widths": (256,)}, "cluster"),
        ({"tile_capacity": 2**28, "widths": (64, 64, 64, 1)}, "pair"),
    ],
)
def test_kernel_by_sizes(sizes: dict[str, Any], expected: KernelName) -> None:
    work = work_of(**sizes)
    assert choose(work, kernel="auto", hopper=True) == expected
    assert choose(work, kernel="auto", hopper=False) == "pair"
    assert choose(work, kernel="pair", hopper=True) == "pair"
    assert choose(work, kernel="pair", hopper=False) == "pair"


@pytest.mark.parametrize("tile_rows", TILE_ROWS)
@pytest.mark.parametrize("few", [True, False])
def test_a_fused_kernel_serves_what_it_has_an_instance_for(tile_rows: int, few: bool) -> None:
    for max_rank in range(1, 100):
        work = work_of(rows=8 if few else 10**6, tile_rows=tile_rows, max_rank=max_rank)
        fits = {name: max_rank <= LIMITS[name].get(tile_rows, 0) for name in FUSED}
        expected = "cluster" if few and fits["cluster"] else "ring" if fits["ring"] else "pair"
        assert choose(work, kernel="auto", hopper=True) == expected
        for name in FUSED:
            if fits[name]:
                assert choose(work, kernel=name, hopper=True) == name
            else:
                with pytest.raises(ArgumentError, match=f"kernel is '{name}', which takes tiles"):
                    choose(work, kernel=name, hopper=True)


def test_more_bytes_turn_from_the_cluster_to_the_ring() -> None:
    works = [work_of(rows=rows, experts=128, active=16) for rows in range(1, 400)]
    kernels = [choose(work, kernel="auto", hopper=True) for work in works]
    turn = kernels.index("ring")
    assert set(kernels[:turn]) == {"cluster"}
    assert set(kernels[turn:]) == {"ring"}
    assert works[turn - 1].bytes <= _lora_choice.CLUSTER_BYTES < works[turn].bytes


@pytest.mark.parametrize(
    ("kernel", "sizes", "hopper", "text"),
    [
        ("cluster", {}, False, "kernel is 'cluster', which needs compute capability 9.0; use 'pai"),
        ("ring", {}, False, "kernel is 'ring', which needs compute capability 9.0; use 'pair' or"),
        (
            "cluster",
            {"tile_rows": 16},
            True,
            "kernel is 'cluster', which takes tiles of 8 rows and ranks up to 64; this call has "
            "tiles of 16 rows and max_rank 16: use 'pair' or 'auto'",
        ),
        ("cluster", {"max_rank": 65}, True, "this call has tiles of 8 rows and max_rank 65"),
        (
            "ring",
            {"tile_rows": 64, "max_rank": 8},
            True,
            "takes tiles of 8 rows and ranks up to 64 or 16 rows and ranks up to 32",
        ),
        ("ring", {"tile_rows": 64}, True, "; this call has tiles of 64 rows and max_rank 16: use"),
        ("ring", {"tile_rows": 16, "max_rank": 33}, True, "tiles of 16 rows and max_rank 33"),
        ("ring", {"max_rank": 512}, True, "tiles of 8 rows and max_rank 512: use 'pair' or"),
        (
            "ring",
            {"tile_capacity": 2**28},
            True,
            "kernel is 'ring'; the work list is too long for it: use 'pair'",
        ),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(
    kernel: Any, sizes: dict[str, Any], hopper: bool, text: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        choose(work_of(**sizes), kernel=kernel, hopper=hopper)


def test_expected_groups_and_tiles_stay_within_their_bounds() -> None:
    for rows, experts, active in ((0, 1, 1), (1, 1, 1), (7, 128, 16), (5000, 4, 2), (10**6, 1, 1)):
        work = work_of(rows=rows, experts=experts, active=active, tile_capacity=max(1, rows))
        assert 0 <= work.groups <= min(rows, experts * active) + 1e-9
        assert work.groups <= work.tiles + 1e-9 <= max(1, rows) + 1e-6


@st.composite
def workloads(draw: st.DrawFn, tile_rows: tuple[int, ...] = (8,)) -> Workload:
    rows = draw(st.integers(1, 5000))
    height = draw(st.sampled_from(tile_rows))
    features = st.one_of(st.integers(1, 20_000), st.sampled_from((64, 192, 768, 3072, 4096, 14336)))
    widths = st.lists(st.integers(1, 40_000), min_size=1, max_size=MAX_SLICES)
    return Workload(
        rows=rows,
        experts=draw(st.sampled_from((1, 2, 8, 128))),
        active=draw(st.integers(1, 64)),
        in_features=draw(features),
        widths=tuple(draw(widths)),
        max_rank=draw(st.integers(1, LIMITS["ring"][height])),
        tile_rows=height,
        tile_capacity=draw(st.one_of(st.just(1), st.integers(1, rows))),
    )


def check_shape(work: Workload, shape: FusedShape) -> None:
    """What both kernels rely on."""
    ranges = k_ranges(work.in_features)
    assert shape.cluster in CLUSTERS
    assert ranges % shape.cluster == 0
    assert shape.cta_columns > 0
    assert shape.cta_columns % 64 == 0
    parts = first_parts(work, shape)
    most = work.tile_capacity * parts[-1]
    assert 1 <= shape.clusters <= most
    assert shape.clusters * shape.cluster < 2**31
    for part, width in enumerate(work.widths):
        count = parts[part + 1] - parts[part]
        assert count >= 1
        columns = [
            column
            for number in range(count)
            for rank in range(shape.cluster)
            for column in cta_share(width, number, rank, shape)
        ]
        # Each column once, in order, and no part without any.
        assert sum(stop - start for start, stop in columns) == width
        assert columns[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(columns))
        assert cta_share(width, count - 1, 0, shape)


def first_parts(work: Workload, shape: FusedShape) -> list[int]:
    """first_block of SliceColumns: parts before each slice, and of all."""
    slices = [LoraSlice(width) for width in work.widths]
    packed, total = pack_slices(slices, shape.cluster * shape.cta_columns)
    values = struct.unpack(f"{4 * MAX_SLICES + 1}i4x", packed)
    parts = list(values[3 * MAX_SLICES :][: len(slices) + 1])
    assert parts[-1] == total
    return parts


def cta_share(width: int, part: int, rank: int, shape: FusedShape) -> list[tuple[int, int]]:
    """Columns of a CTA (ColumnShare in lora/items.cuh) as a range, if there are any."""
    start = min(width, (part * shape.cluster + rank) * shape.cta_columns)
    stop = min(width, start + shape.cta_columns)
    return [(start, stop)] if stop > start else []


SMS = (1, 16, 78, 114, 132, 144)


# Few row tiles of an adapter of many ranks, but more items than CTAs to share K.
@example(work_of(rows=128, active=1, widths=(800,) * 4, max_rank=64, tile_capacity=32), 132)
@example(work_of(rows=5000, widths=(40_000,), max_rank=64, tile_capacity=5000), 132)
@example(work_of(in_features=1, widths=(1,), max_rank=1, tile_capacity=1), 1)
@given(workloads(), st.sampled_from(SMS))
@settings(max_examples=400, deadline=None)
def test_cluster_shapes_fit_kernel_and_device(work: Workload, sms: int) -> None:
    per_sm = instance_constants(CLUSTER, "ClusterShape", work, STAGES=1)["kBlocksPerSm"]
    shape = cluster_shape(work, sms * per_sm)
    check_shape(work, shape)
    static = 8 * evaluate(re.findall(r"u64 barriers\[(.+)\];", CLUSTER)[0], NAMES)
    assert _lora_fused._cluster_bytes(work, shape) + static <= SHARED_LIMIT


@given(workloads(tuple(LIMITS["ring"])), st.data())
@settings(max_examples=400, deadline=None)
def test_ring_shapes_fit_kernel_and_device(work: Workload, data: st.DataObject) -> None:
    sizes = [size for size in CLUSTERS if size <= k_ranges(work.in_features)]
    clusters = {size: data.draw(st.integers(1, 528 // size), f"of {size}") for size in sizes}
    shape = ring_shape(work, clusters)
    check_shape(work, shape)
    assert shape.clusters <= clusters[shape.cluster]


def test_ring_shapes_do_not_take_a_cluster_larger_than_the_ranges() -> None:
    for in_features in (1, 64, 383, 384, 767, 768, 1536):
        work = work_of(in_features=in_features, widths=(40_000,))
        assert ring_shape(work, {1: 1, 2: 400, 4: 400, 8: 400}).cluster <= k_ranges(in_features)


def instance_constants(text: str, shape: str, work: Workload, **given: int) -> dict[str, int]:
    """Constants of the kernel instance that serves ``work``, from its source."""
    given |= {"MT": int(_lora_fused._rank_tiles(work)), "NT": work.tile_rows // 8}
    own = {**NAMES, **constants(text[: text.index(f"struct {shape}")], **NAMES)}
    return constants(body(text, f"struct {shape}"), **own, **given)


def test_arguments_are_packed_as_the_struct_lies() -> None:
    fields, size = layout(STRUCTS, "DeltaArgs", NAMES)
    names = [field.name for field in fields]
    values, places = unpack_marked(_lora_fused._PACK, len(fields))
    assert len(values) == len(fields)
    assert _lora_fused._PACK.size == size
    assert [f"bytes{size}"] == list(_lora_fused._ARGUMENTS)
    assert places == [(field.offset, field.size) for field in fields]
    assert names[-1] == "slices"
    slices, slices_size = layout(STRUCTS, "SliceColumns", NAMES)
    assert slices_size == len(pack_slices([LoraSlice(1)], 64)[0])
    assert [f.count for f in slices] == [MAX_SLICES] * 3 + [MAX_SLICES + 1]
    assert NAMES["kMaxSlices"] == MAX_SLICES


def unpack_marked(packing: struct.Struct, fields: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """The values of a record in which every byte is 1, and (offset, size) of each."""
    codes = re.findall(r"(\d*)([a-zA-Z])", packing.format.removeprefix("@"))
    one_each = [c for n, c in codes for c in ([f"{n}s"] if c == "s" else [c] * int(n or 1))]
    assert len(one_each) == fields
    ends = [struct.calcsize("@" + "".join(one_each[: i + 1])) for i in range(fields)]
    sizes = [struct.calcsize("@" + code) for code in one_each]
    places = [(end - size, size) for end, size in zip(ends, sizes, strict=True)]
    return list(packing.unpack(b"\1" * packing.size)), places


def fake_array(shape: tuple[int, ...], dtype: str, pointer: int) -> Any:
    return SimpleNamespace(
        shape=shape, dtype=resolve_dtype(dtype), data=SimpleNamespace(ptr=pointer)
    )


def inputs_of(work: Workload, **changes: Any) -> LoraInputs:
    """Operands of a call of these sizes, every address and number another one."""
    routing = SimpleNamespace(
        row_to_pair=fake_array((work.rows,), "float32", 0x3000),
        num_tokens=7,
        top_k=3,
        num_rows=work.rows,
        row_order="k_major",
        start_expert=11,
    )
    segments = SimpleNamespace(
        tiles=fake_array((work.tile_capacity, TILE_INTS), "float32", 0x4000),
        tile_count=fake_array((1,), "float32", 0x5000),
        tile_rows=work.tile_rows,
    )
    given: dict[str, Any] = {
        "x": fake_array((7, work.in_features), "bfloat16", 0x1000),
        "segments": segments,
        "routing": routing,
        "entries": fake_array((len(work.widths), 5, 48), "float32", 0x6000),
        "slices": len(work.widths),
        "max_loras": 5,
        "in_features": work.in_features,
        "max_rank": work.max_rank,
        "x_rows": "token",
        "status": 0x7000,
        "plan_settled": True,
    }
    return LoraInputs(**(given | changes))


def launched(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    work: Workload,
    y: Any,
    slices: list[LoraSlice],
    shape: FusedShape,
    **changes: Any,
) -> tuple[dict[str, Any], SimpleNamespace]:
    """The arguments by the struct's field names, and the launch."""
    made: list[Any] = []

    def enqueue(program, name, types, grid, threads, args, smem, **options) -> None:  # type: ignore[no-untyped-def]
        made.append(SimpleNamespace(**locals()))

    monkeypatch.setattr(_lora_fused, "enqueue", enqueue)
    _lora_fused.run_fused(inputs_of(work, **changes), y, slices, "row", kernel, work, shape)
    (launch,) = made
    names = [field.name for field in layout(STRUCTS, "DeltaArgs", NAMES)[0]]
    return dict(zip(names, _lora_fused._PACK.unpack(launch.args[0]), strict=True)), launch


@pytest.mark.parametrize("kernel", FUSED)
def test_every_argument_is_in_its_field(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_of(rows=21, widths=(192, 100), max_rank=24, in_features=1032)
    shape = FusedShape(4, 128, 77)
    slices = [LoraSlice(192, 8), LoraSlice(100, 210)]
    y = fake_array((21, 320), "bfloat16", 0x2000)
    found, launch = launched(monkeypatch, kernel, work, y, slices, shape)
    packed, _ = pack_slices(slices, 4 * 128)
    expected = {
        "x": 0x1000,
        "ldx": 1032,
        "y": 0x2000,
        "ldy": 320,
        "row_to_pair": 0x3000,
        "tiles": 0x4000,
        "tile_count": 0x5000,
        "entries": 0x6000,
        "status": 0x7000,
        "x_by": ROW_INDEX["token"],
        "y_by": ROW_INDEX["row"],
        "top_k": 3,
        "num_tokens": 7,
        "k_major": 1,
        "num_slices": 2,
        "max_loras": 5,
        "start_expert": 11,
        "in_features": 1032,
        "max_rank": 24,
        "clusters": 77,
        "cta_columns": 128,
        "x_vector": 1,
        "y_access": 1,
        "plan_settled": 1,
        "chain_floats": _lora_fused._chain_floats(work),
        "sum_ranks": 32,
        "slices": packed,
    }
    stages = found.pop("stages")
    assert (stages > 0) == (kernel == "ring")
    assert found == expected
    assert launch.program == f"lora_{kernel}_bfloat16"
    assert launch.name in find_program(launch.program).kernels
    assert launch.types == _lora_fused._ARGUMENTS
    assert launch.grid == (77 * 4,)
    assert launch.options == {"dependent": True, "cluster": (4, 1, 1)}


ACCESS = dict(re.findall(r"k(Y\w+) = (\d)", body(STRUCTS, "enum YAccess")))


@pytest.mark.parametrize(
    ("pointer", "width", "slices", "expected"),
    [
        (0x2000, 320, [LoraSlice(192, 8), LoraSlice(64, 200)], "YPiece"),
        (0x2000, 320, [LoraSlice(192, 8), LoraSlice(60, 200)], "YPair"),
        (0x2000, 320, [LoraSlice(192, 8), LoraSlice(64, 202)], "YPair"),
        (0x2000, 322, [LoraSlice(192, 8)], "YPair"),
        (0x2004, 320, [LoraSlice(192, 8)], "YPair"),
        (0x2000, 320, [LoraSlice(191)], "YPair"),
        (0x2002, 320, [LoraSlice(192, 8)], "YElement"),
        (0x2000, 321, [LoraSlice(192, 8)], "YElement"),
        (0x2000, 320, [LoraSlice(192), LoraSlice(64, 193)], "YElement"),
        (0x2000, 320, [LoraSlice(160, 0, 2), LoraSlice(160, 1, 2)], "YElement"),
    ],
)
def test_y_is_accessed_as_it_lies(
    pointer: int, width: int, slices: list[LoraSlice], expected: str, monkeypatch: Any
) -> None:
    y = fake_array((8, width), "float16", pointer)
    work = work_of(widths=tuple(part.out_features for part in slices))
    found, _ = launched(monkeypatch, "ring", work, y, slices, FusedShape(1, 64, 1))
    assert found["y_access"] == int(ACCESS[expected])


@pytest.mark.parametrize(("pointer", "width"), [(0x1008, 64), (0x1000, 65), (0x1000, 68)])
def test_x_that_is_not_aligned_is_not_read_as_vectors(
    pointer: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(in_features=width, widths=(64,))
    y, x = fake_array((8, 64), "bfloat16", 0x2000), fake_array((7, width), "bfloat16", pointer)
    shape = FusedShape(1, 64, 1)
    found, _ = launched(monkeypatch, "cluster", work, y, [LoraSlice(64)], shape, x=x)
    assert found["x_vector"] == 0


def test_enumerations_agree_with_the_headers() -> None:
    assert {k: int(v) for k, v in ACCESS.items()} == {
        "YElement": _lora_fused._Y_ELEMENT,
        "YPair": _lora_fused._Y_PAIR,
        "YPiece": _lora_fused._Y_PIECE,
    }
    by = re.findall(r"kBy(\w+) = (\d)", body(STRUCTS, "enum RowIndex"))
    assert {name.lower(): int(value) for name, value in by} == ROW_INDEX


def test_records_have_the_sizes_that_shared_memory_is_counted_with() -> None:
    assert layout(STRUCTS, "TileRecord", NAMES)[1] == TILE_INTS * 4
    assert layout(STRUCTS, "SlotEntry", NAMES)[1] == SLOT_ENTRY_BYTES


def test_launch_constants_agree_with_the_sources() -> None:
    cluster, ring = constants(CLUSTER, **NAMES), constants(RING, **NAMES)
    assert cluster["kThreads"] == _lora_fused._CLUSTER_THREADS
    assert cluster["kWarps"] == _lora_fused._CLUSTER_WARPS
    assert cluster["kTokens"] == _lora_fused._TOKENS
    assert ring["kThreads"] == _lora_fused._RING_THREADS
    assert ring["kMaxStages"] >= _lora_fused._RING_STAGES
    assert NAMES["kRankTile"] == _lora_fused._RANK_TILE
    assert NAMES["kChains"] == _lora_fused._CHAINS
    assert NAMES["kChunk"] == _lora_fused._CHUNK
    (barriers,) = re.findall(r"u64 barriers\[(.+)\];", RING)
    # The dynamic part begins on the next 128-byte boundary.
    assert 8 * evaluate(barriers, ring) <= _lora_fused._STATIC_SHARED


@pytest.mark.parametrize("max_rank", RANKS)
def test_shared_memory_of_the_cluster_kernel(max_rank: int) -> None:
    """Cells of the own ranges, two items' incoming sums, B."""
    for in_features, size in ((64, 1), (200, 1), (768, 4), (2880, 2), (14336, 1), (14336, 8)):
        work, shape = work_of(in_features=in_features, max_rank=max_rank), FusedShape(size, 192, 1)
        name = _lora_fused._cluster_kernel(work, shape)
        stages = int(name.partition("_")[2])
        own = instance_constants(CLUSTER, "ClusterShape", work, STAGES=stages)
        assert own["kRanks"] >= max_rank
        order = assign(
            body(K_ORDER, "explicit KOrder(i32 in_features)"), {**NAMES, "in_features": in_features}
        )
        cells = order["ranges"] // size * NAMES["kChains"]
        needed = (cells + 2 * size) * own["kBlock"] * 4 + 192 * max_rank * 2
        assert _lora_fused._cluster_bytes(work, shape) == needed
        # B is the target of a bulk copy.
        assert (needed - 192 * max_rank * 2) % 16 == 0
        assert own["kPitch"] % 4 == 0
        # One chunk in flight serves where no warp has a second one, four where it has as many.
        cells_of_a_warp = -(-cells // constants(CLUSTER, **NAMES)["kWarps"])
        steps = cells_of_a_warp * -(-order["length"] // NAMES["kChains"])
        assert own["kStages"] == 1 or steps > 1
        assert own["kStages"] < 4 or steps >= 4


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"in_features": 14336, "rows": 2, "tile_capacity": 2}, "1_4"),
        # Two of its CTAs share no SM.
        ({"in_features": 14336, "rows": 16, "tile_capacity": 16}, "1_2"),
        ({"in_features": 14336, "rows": 2, "tile_capacity": 2, "max_rank": 32}, "2_1"),
        ({"in_features": 7168, "rows": 2, "tile_capacity": 2}, "1_2"),
        ({"in_features": 4096, "rows": 2, "tile_capacity": 2}, "1_1"),
    ],
)
def test_chunks_in_flight(sizes: dict[str, Any], expected: str) -> None:
    work = work_of(experts=8, active=1, **sizes)
    shape = cluster_shape(work, 264)
    assert shape.cluster == 8
    assert _lora_fused._cluster_kernel(work, shape) == expected


def ring_share(work: Workload, rank: int) -> dict[str, int]:
    """RankShare of an adapter of ``rank``, in the instance that serves ``work``."""
    text = body(RING, "struct RankShare")
    names: dict[str, Any] = {**TUNING, "MT": int(_lora_fused._rank_tiles(work)), "rank": rank}
    made = assign(body(text, "explicit RankShare(i32 rank)"), names)
    return {**made, **methods(text, {**names, **made})}


@pytest.mark.parametrize(("tile_rows", "max_rank"), RING_SIZES)
def test_shared_memory_of_the_ring(tile_rows: int, max_rank: int) -> None:
    """Stages with their headers, lists ahead, chains' sums of two ranges, two items' incoming
    sums."""
    work = work_of(tile_rows=tile_rows, max_rank=max_rank)
    own = instance_constants(RING, "RingShape", work)
    assert own["kTokens"] == tile_rows
    assert own["kBlocksPerSm"] == _lora_fused._ring_blocks(work)
    names = {**NAMES, "TOKENS": own["kTokens"]}
    _, header = layout(RING, "Header", names)
    _, lists = layout(STRUCTS + RING, "ListsAhead", names)
    chain_floats = _lora_fused._chain_floats(work)
    sum_ranks = own["MT"] * NAMES["kRankTile"]
    for size in CLUSTERS:
        stages, nbytes = _lora_fused._ring_room(work, size)
        sums = 2 * size * own["kTokens"] * sum_ranks
        needed = stages * (own["kStageBytes"] + header) + lists + 4 * (2 * chain_floats + sums)
        assert nbytes == needed
        assert 2 <= stages <= own["kMaxStages"]
        assert nbytes + _lora_fused._STATIC_SHARED <= SHARED_LIMIT
    # Vectors of floats behind what precedes them.
    assert header % 16 == lists % 16 == 4 * chain_floats % 16 == 0
    for rank in {1, 16, 17, 32, 33, max_rank} & set(range(1, max_rank + 1)):
        share = ring_share(work, rank)
        assert rank <= share["ranks"] <= sum_ranks
        if share["ways"] > 1:
            # The chains' sums meet in shared memory.
            assert NAMES["kChains"] * own["kTokens"] * share["pitch"] <= chain_floats


@pytest.mark.parametrize(("tile_rows", "max_rank"), RING_SIZES)
def test_a_stage_holds_what_goes_into_it(tile_rows: int, max_rank: int) -> None:
    work = work_of(tile_rows=tile_rows, max_rank=max_rank)
    own = instance_constants(RING, "RingShape", work)
    for rank in {1, 16, 17, 32, 33, 48, 63, max_rank} & set(range(1, max_rank + 1)):
        share = ring_share(work, rank)
        assert share["tiles"] * share["ways"] == own["kConsumers"] == NAMES["kChains"]
        assert share["stage_chunks"] * NAMES["kChunkBytes"] * rank <= own["kWeightBytes"]
        assert share["stage_columns"] * 2 * share["ranks"] <= own["kWeightBytes"]
        assert share["stage_chunks"] * NAMES["kChunkBytes"] <= own["kRowBytes"]
        assert share["stage_columns"] * 2 <= own["kRowBytes"]
        assert share["stage_columns"] % 64 == 0
        # A stage's chunks are whole rounds of the chains, or a divisor of one.
        assert NAMES["kChains"] % share["stage_chunks"] == 0
    # A's swizzle flips address bits 4 to 6; rows are targets of bulk copies.
    assert own["kStageBytes"] % 128 == own["kWeightBytes"] % 128 == 0
    assert own["kRowPitch"] % 16 == 0
    assert own["kRowPitch"] >= own["kRowBytes"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_instance_that_is_asked_for_exists(dtype: str) -> None:
    cluster = find_program(f"lora_cluster_{dtype}").kernels
    ring = find_program(f"lora_ring_{dtype}").kernels
    for max_rank in RANKS:
        for in_features in (1, 64, 768, 1000, 4096, 20_000):
            work = work_of(in_features=in_features, max_rank=max_rank)
            for size, count in product(CLUSTERS, (1, 100)):
                if size <= k_ranges(in_features):
                    shape = FusedShape(size, 64, count)
                    assert _lora_fused._cluster_kernel(work, shape) in cluster
    for tile_rows, max_rank in RING_SIZES:
        tiles = _lora_fused._rank_tiles(work_of(tile_rows=tile_rows, max_rank=max_rank))
        assert int(tiles) * 16 >= max_rank
        assert f"{tiles}_{tile_rows}" in ring
    assert LIMITS["cluster"] == {constants(CLUSTER, **NAMES)["kTokens"]: RANKS[-1]}


def test_names_of_kernels_are_those_of_the_choice() -> None:
    assert set(get_args(KernelName)) == {"pair", *FUSED}


def test_bytes_grow_with_every_size() -> None:
    work = work_of(rows=100, experts=8, widths=(512, 256))
    for change in (
        {"rows": 200},
        {"experts": 16},
        {"active": 8},
        {"in_features": 5000},
        {"widths": (512, 257)},
        {"max_rank": 17},
    ):
        assert replace(work, **change).bytes > work.bytes  # type: ignore[arg-type]
    assert math.isfinite(work.bytes)
    assert np.isclose(replace(work, rows=1).groups, 1)
