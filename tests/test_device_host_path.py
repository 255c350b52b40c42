"""The device ops' host side without a device: checks, argument packing and launch shapes.

Stand-in device arrays carry NumPy memory; launches are recorded instead of made. What is shown is
that every op accepts what its twin accepts, hands each kernel arguments of its declared types, and
refuses what it must before anything is enqueued. What kernels compute is for the gpu and the
emulated tests.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import types
from typing import Any

import numpy as np
import pytest
from fake_device import Enqueued, FakeArray, aligned, fake, install
from problem_util import RoutingCase, hostile_routings, make_case, random_case

from cupylora import ops, reference
from cupylora.compiler.programs import find_program
from cupylora.compiler.sources import read_sources
from cupylora.errors import ArgumentError, CapacityError, GraphError
from cupylora.ops import _device
from cupylora.resources import cuda_source_dir
from cupylora.worklists import MAX_ROWS, ROW_MAJOR, SLOT_ENTRY, TILE_INTS, LoraSlice


@functools.cache
def _waits(program: str, kernel: str) -> bool:
    """Whether a kernel waits for its predecessor itself, as its program's sources say."""
    if program == "pointers":
        return kernel == "expert_problems"
    sources = read_sources(find_program(program), cuda_source_dir())
    own = (text for name, text in sources.headers.items() if name != "ptx/memory.cuh")
    calls = ("wait_for_predecessor();", "predecessor.wait();")
    return any(call in text for text in (sources.text, *own) for call in calls)


@dataclasses.dataclass
class Recorder:
    """Launches by kernel; packing the arguments as the launch would proves they fit its types."""

    launched: list[str] = dataclasses.field(default_factory=list)

    def enqueue(self, *args: Any, **options: Any) -> None:
        launch = Enqueued(*args, **options)
        assert launch.kernel in find_program(launch.program).kernels
        assert len(launch.types) == len(launch.args)
        launch.packed()
        for kind, value in zip(launch.types, launch.args, strict=True):
            if kind.startswith("bytes"):
                assert len(value) == int(kind.removeprefix("bytes"))
        assert all(1 <= size < 2**31 for size in launch.grid)
        assert 0 <= launch.smem <= 227 * 1024
        assert launch.dependent == _waits(launch.program, launch.kernel)
        self.launched.append(launch.name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    install(
        monkeypatch,
        fake,
        enqueue=made.enqueue,
        resident_blocks=lambda *_: 400,
        shared_limit=lambda: 227 * 1024,
        is_hopper=lambda: False,
        shared_memory=lambda: (227 * 1024, 228 * 1024),
    )
    return made


def test_nothing_is_allocated_inside_a_capture(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and scratch are the caller's there: what a pool gave it would take back."""
    case = random_case(1, 9000, 1, 8, 4)  # too many rows for the route that needs no scratch
    ids, slots = fake(case.topk_ids), fake(case.token_to_slot)
    routing = ops.route(ids, slots, **case.sizes)
    scratch = fake(np.empty(ops.route_workspace_bytes(9000, 8, 4), np.uint8))
    launched = len(recorder.launched)
    monkeypatch.setattr(_device, "in_capture", lambda: True)
    with pytest.raises(GraphError, match=r"row_to_pair would be allocated while .* with out="):
        ops.route(ids, slots, **case.sizes, workspace=scratch)
    with pytest.raises(GraphError, match=r"the workspace would be allocated .* with workspace="):
        ops.route(ids, slots, **case.sizes, out=routing)
    assert len(recorder.launched) == launched
    ops.route(ids, slots, **case.sizes, out=routing, workspace=scratch)
    assert len(recorder.launched) > launched


def _routing(case: RoutingCase) -> Any:
    return reference.route(case.topk_ids, case.token_to_slot, **case.sizes)  # type: ignore[arg-type]


CASES = [*hostile_routings(), random_case(1, 1200, 8, 128, 16), random_case(2, 9000, 1, 1, 4)]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_lists_are_made_from_every_routing(case: RoutingCase, recorder: Recorder) -> None:
    slots = fake(case.token_to_slot)
    routing = ops.route(fake(case.topk_ids), slots, **case.sizes)  # type: ignore[arg-type]
    big = case.topk_ids.size > 2048
    assert recorder.launched[0] == ("sort/digit_histogram" if big else "sort/route_rank")
    segments = ops.build_segments(routing, slots, max_loras=case.max_loras)
    assert segments.max_loras == case.max_loras
    assert recorder.launched[-1] == "segments/segment_fill"
    table = fake(np.zeros((2, case.max_loras, 48), np.uint8))
    tokens = ops.slot_lookup(slots, table)
    rows = ops.pointer_expand(routing, tokens)
    sizes: dict[str, Any] = {"x_ptr": 16, "h_ptr": 32, "y_ptr": 2**63, "itemsize": 2}
    sizes |= {"in_features": 64, "out_features": 8, "max_rank": 16}
    for aggregate in (True, False):
        for splitk in (None, 2):
            ops.build_problems(rows, routing, 1, **sizes, aggregate=aggregate, splitk_slices=splitk)
    again = ops.route(fake(case.topk_ids), slots, **case.sizes, out=routing)  # type: ignore[arg-type]
    assert again.row_to_pair is routing.row_to_pair


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_plan_is_enqueued_for_every_routing(case: RoutingCase, recorder: Recorder) -> None:
    args, sizes = (fake(case.topk_ids), fake(case.token_to_slot)), dict(case.sizes)
    made = ops.plan(*args, **sizes)  # type: ignore[arg-type]
    launches = ["plan_large/count_16_4", "plan_large/place"]
    small = case.topk_ids.size <= 4096
    assert small or recorder.launched == launches
    assert len(recorder.launched) == (1 if small else 2)
    again = ops.plan(*args, **sizes, out=made)  # type: ignore[arg-type]
    assert again == made
    recorder.launched.clear()
    ops.plan(*args, **sizes, fused=False)  # type: ignore[arg-type]
    assert recorder.launched[-1] == "segments/segment_fill"


def test_what_is_known_of_a_plan_goes_with_it(recorder: Recorder) -> None:
    known = sys.modules["cupylora.ops.plan"]._fits
    case = random_case(7, 30, 8, 128, 16)
    args, sizes = (fake(case.topk_ids), fake(case.token_to_slot)), dict(case.sizes)
    out: Any = ops.plan(*args, **sizes)  # type: ignore[arg-type]
    before = len(known)
    ops.plan(*args, **sizes, out=out)  # type: ignore[arg-type]
    assert len(known) == before + 1
    other = (out[0], dataclasses.replace(out[1], tile_rows=16))
    for changes, message in (
        ({"out": other}, "out.tile_rows is 16; 8 is needed"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": np.ones(2)}, "num_experts is array"),
    ):
        options = {**sizes, "out": out, **changes}
        _refused(recorder, message, functools.partial(ops.plan, *args, **options))
    del out, other, options, changes
    gc.collect()
    assert len(known) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tokens", [0, 1, 40, 3000])
@pytest.mark.parametrize("max_rank", [1, 16, 17, 64, 512])
def test_a_whole_layer_is_enqueued(
    dtype: str, tokens: int, max_rank: int, recorder: Recorder
) -> None:
    from cupylora.dtypes import resolve_dtype

    kind = resolve_dtype(dtype)
    case = random_case(3, tokens, 2, 4, 3)
    routing, slots = fake(_routing(case)), fake(case.token_to_slot)
    segments = ops.build_segments(routing, slots, max_loras=3, tile_rows=16)
    x, y = fake(np.zeros((tokens, 100), kind)), fake(np.zeros((2 * tokens, 61), kind))
    entries = fake(np.zeros((2, 3, 48), np.uint8))
    slices = [LoraSlice(20, 1), LoraSlice(40, 21)]
    before = len(recorder.launched)
    size = ops.lora_workspace_bytes(2 * tokens, 2, 100, max_rank, kind)
    ops.lora_delta(
        x,
        y,
        segments,
        routing,
        entries,
        slices,
        in_features=100,
        max_rank=max_rank,
        workspace=fake(np.zeros(size, np.uint8)),
    )
    assert len(recorder.launched) - before == (2 if tokens else 0)
    permuted = ops.permute_rows(x, routing)
    ops.activation(permuted, kind="silu", gated=True, routing=routing, rows="row")
    weights = fake(np.zeros((tokens, 2), np.float32))
    ops.finalize(y, weights, routing)
    lists = (segments, routing)
    before = len(recorder.launched)
    sizes = {"in_features": 100, "max_rank": max_rank}
    ops.lora_activation(
        x,
        fake(np.zeros((2 * tokens, 122), kind)),
        *lists,
        entries,
        kind="silu",
        gated=True,
        **sizes,
    )
    wide = fake(np.zeros((2 * tokens, 100), kind))
    ops.lora_finalize(wide, y, weights, *lists, entries[:1], **sizes)
    assert len(recorder.launched) - before == (4 if tokens else 0)
    problems = ops.expert_problems(
        routing, x_ptr=0, w_ptr=0, y_ptr=0, itemsize=2, in_features=8, out_features=8
    )
    for max_m in (None, 16, 64, 4096):
        ops.grouped_gemm(problems, dtype=dtype, max_m=max_m)
    ops.fill_uniform(permuted, 3, 1.0)


@pytest.mark.parametrize("tile_rows", [32, 64])
@pytest.mark.parametrize("max_rank", [33, 64, 128])
def test_a_large_batch_is_enqueued(max_rank: int, tile_rows: int, recorder: Recorder) -> None:
    tokens, width, kind = 16_384, 2048, np.dtype(np.float16)
    case = random_case(3, tokens, 1, 1, 3)
    routing, slots = fake(_routing(case)), fake(case.token_to_slot)
    segments = ops.build_segments(routing, slots, max_loras=3, tile_rows=tile_rows)
    x, y = fake(np.zeros((tokens, 104), kind)), fake(np.zeros((tokens, width), kind))
    entries = fake(np.zeros((1, 3, 48), np.uint8))
    sizes: dict[str, Any] = {"in_features": 104, "max_rank": max_rank}
    before = len(recorder.launched)
    ops.lora_delta(x, y, segments, routing, entries, [LoraSlice(width)], **sizes)
    expand = "panel_float16/4" if tile_rows == 64 else "stream_float16/4"
    assert recorder.launched[before:] == [
        f"lora_shrink_wide_float16/{4 if max_rank <= 64 else 8}_{tile_rows}",
        f"lora_expand_{expand if max_rank <= 64 else 'float16/16'}",
    ]


def _refused(recorder: Recorder, message: str, call: Any, error: type = ArgumentError) -> None:
    before = list(recorder.launched)
    with pytest.raises(error, match=message):
        call()
    assert recorder.launched == before


def test_what_would_fault_or_mix_tenants_is_refused(recorder: Recorder) -> None:
    case = random_case(4, 10, 2, 4, 8)
    routing, slots = fake(_routing(case)), fake(case.token_to_slot)
    segments = ops.build_segments(routing, slots, max_loras=8)
    kind = np.dtype(np.float16)
    x, y = fake(np.zeros((10, 64), kind)), fake(np.zeros((20, 8), kind))

    def delta(loras: int = 8, shift: int = 0, **changes: Any) -> None:
        room = aligned(np.zeros(loras * 48 + shift, np.uint8))
        entries = FakeArray(room[shift:].reshape(1, loras, 48))
        sizes = {"in_features": 64, "max_rank": 16} | changes
        ops.lora_delta(x, y, segments, routing, entries, [LoraSlice(8)], **sizes)

    delta()
    _refused(recorder, "built for 8 slots; entries have 4", lambda: delta(4))
    _refused(recorder, "entries does not start on a 16-byte", lambda: delta(shift=8))
    small = fake(np.zeros(16, np.uint8))
    _refused(recorder, "lora_workspace_bytes", lambda: delta(workspace=small), CapacityError)
    _refused(recorder, "max_rank is 513", lambda: delta(max_rank=513))
    table = FakeArray(aligned(np.zeros(8 * 48 + 8, np.uint8))[8:].reshape(1, 8, 48))
    _refused(recorder, "table does not start", lambda: ops.slot_lookup(slots, table))
    wide = {"in_features": 2**24, "max_rank": 512}
    tall = fake(np.lib.stride_tricks.as_strided(np.zeros(1, kind), (0, 2**24)))
    empty = make_case("", np.zeros((0, 2)), [], 4, 8)
    no_rows = fake(_routing(empty))
    none = ops.build_segments(no_rows, fake(empty.token_to_slot), max_loras=8)
    entries = fake(np.zeros((1, 8, 48), np.uint8))
    target = fake(np.zeros((0, 8), kind))
    _refused(
        recorder,
        "more than the kernels address",
        lambda: ops.lora_delta(tall, target, none, no_rows, entries, [LoraSlice(8)], **wide),  # type: ignore[arg-type]
    )


def test_problem_lists_have_room_for_every_row(recorder: Recorder) -> None:
    case = random_case(5, 10, 2, 4, 2)
    routing = fake(_routing(case))
    table = np.zeros((1, 2), SLOT_ENTRY)
    table["a_layout"] = ROW_MAJOR
    tokens = ops.slot_lookup(fake(case.token_to_slot), fake(table.view(np.uint8).reshape(1, 2, 48)))
    rows = ops.pointer_expand(routing, tokens)
    sizes: dict[str, Any] = {"x_ptr": 0, "h_ptr": 0, "y_ptr": 0, "itemsize": 2}
    sizes |= {"in_features": 64, "out_features": 8, "max_rank": 16}
    _refused(
        recorder,
        "max_problems is 19; at least 20",
        lambda: ops.build_problems(rows, routing, 0, **sizes, max_problems=19),
    )
    ops.build_problems(rows, routing, 0, **sizes, max_problems=20)


def test_rows_are_counted_in_32_bits(recorder: Recorder) -> None:
    ids = FakeArray(np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**28, 8), (0, 0)))
    ids.flags = types.SimpleNamespace(c_contiguous=True)  # type: ignore[assignment]
    slots = FakeArray(np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**28,), (0,)))
    slots.flags = types.SimpleNamespace(c_contiguous=True)  # type: ignore[assignment]
    _refused(
        recorder,
        f"topk_ids.size is {2**31}; 0 to {MAX_ROWS}",
        lambda: ops.route(ids, slots, num_experts=8, max_loras=2),
    )


def test_unaligned_tiles_are_refused(recorder: Recorder) -> None:
    case = random_case(6, 10, 1, 1, 2)
    routing, slots = fake(_routing(case)), fake(case.token_to_slot)
    segments = ops.build_segments(routing, slots, max_loras=2)
    room = aligned(np.zeros(segments.tiles.size + 1, np.int32))
    moved = dataclasses.replace(segments, tiles=FakeArray(room[1:].reshape(-1, TILE_INTS)))
    _refused(
        recorder,
        "out.tiles does not start on a 16-byte boundary",
        lambda: ops.build_segments(routing, slots, max_loras=2, out=moved),
    )


def test_status_is_an_address_or_none(recorder: Recorder) -> None:
    word = fake(np.zeros(1, np.int32))
    assert _device.status_pointer(None) == 0
    assert _device.status_pointer(word) == word.data.ptr
    with pytest.raises(ArgumentError, match="status"):
        _device.status_pointer(fake(np.zeros(2, np.int32)))
