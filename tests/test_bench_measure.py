"""A point's way to its measurement, on NumPy: what is called, checked and refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_util import EagerGraphs, OneStream, numpy_measurer, small

from cupylora import ops
from cupylora.adapters.packing import unpack_a
from cupylora.backend import NumpyBackend
from cupylora.bench import calls, list_check, stream, workloads
from cupylora.bench.check import (
    ERROR_LIMIT,
    OffReferenceError,
    Verdict,
    delta_rows,
    judge,
    sample_rows,
    to_float32,
)
from cupylora.bench.measure import GraphMeasurer
from cupylora.bench.points import model_points
from cupylora.bench.pools import DTYPE, Pools
from cupylora.bench.stream import ReadStream
from cupylora.bench.timing import CudaGraphs, summarise
from cupylora.errors import CapacityError
from cupylora.shapes import MoeShape, load_model

KINDS = ("dense", "moe", "route", "moe step", "dense step")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "active"), [(1, 1), (12, 3), (200, 4)])
def test_every_kind_of_point_is_measured(kind: str, tokens: int, active: int) -> None:
    point = small(kind, tokens=tokens, active=active)
    measured = numpy_measurer().measure(point)
    parts = 2 if kind == "moe" else 1
    assert measured.parts_us == (2.0,) * parts
    assert measured.us == 2.0 * parts
    assert measured.spread == pytest.approx(0.15)
    assert measured.sets == 3
    assert measured.floor_us == pytest.approx(measured.nbytes / 1e6)
    assert measured.stream_us == pytest.approx(measured.nbytes / 1e3)
    assert measured.error <= 5e-3
    assert (measured.error > 0) == (kind != "route")
    compared = tokens if kind == "moe step" else point.rows
    assert f"{compared} " in measured.checked


@pytest.mark.parametrize(
    "changes",
    [{"gate_up_layout": "interleaved", "activation": "swiglu_oai"}, {"gate_up_layout": "up_first"}],
)
def test_a_chain_is_checked_in_its_model_s_layout(changes: dict[str, Any]) -> None:
    moe = replace(MoeShape(128, 80, 8, 2), **changes)
    assert numpy_measurer().measure(small("moe step", moe=moe)).error < 5e-3


def test_points_of_a_config_are_measured() -> None:
    for point in model_points(load_model("tiny-moe"), [8], [4], [2], None):
        assert numpy_measurer().measure(point).error < 3e-3


def break_deltas(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change`` see y after each delta that the bench times."""

    def broken(x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
        before = y.copy()
        ops.lora_delta(x, y, *args, **kwargs)
        change(before, y)

    monkeypatch.setattr(calls, "lora_delta", broken)


def one_row_left_out(before: Any, y: Any) -> None:
    y[-1] = before[-1]


def one_column_nan(before: Any, y: Any) -> None:
    y[3, 5] = np.nan


def a_tenth_too_little(before: Any, y: Any) -> None:
    y[...] = (y.astype(np.float32) * 0.9 + before.astype(np.float32) * 0.1).astype(y.dtype)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("change", [one_row_left_out, one_column_nan, a_tenth_too_little])
def test_wrong_outputs_are_refused(kind: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_deltas(monkeypatch, change)
    with pytest.raises(OffReferenceError, match=r"limit 0\.012.*checked all"):
        numpy_measurer().measure(small(kind))


def test_a_set_s_output_in_another_s_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workloads.add_delta

    def other(backend: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
        real(backend, x, np.zeros_like(y), *args, **kwargs)

    monkeypatch.setattr(workloads, "add_delta", other)
    with pytest.raises(OffReferenceError):
        numpy_measurer().measure(small("dense"))


@pytest.mark.parametrize("kind", ["moe step", "dense step"])
def test_wrong_chains_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in ("dense", "moe"):
        monkeypatch.setattr(f"cupylora.layers.{layer}.lora_delta", lambda *_, **__: None)
    with pytest.raises(OffReferenceError):
        numpy_measurer().measure(small(kind))


def test_wrong_lists_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = list_check.reference.route

    def other(ids: Any, slots: Any, **kwargs: Any) -> Any:
        return real(ids[:, ::-1].copy(), slots, **kwargs)

    monkeypatch.setattr(list_check.reference, "route", other)
    with pytest.raises(OffReferenceError, match="the lists of 96 rows"):
        numpy_measurer().measure(small("route"))


def test_lists_that_are_not_made_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "relist", lambda *_: lambda: None)
    with pytest.raises(OffReferenceError):
        numpy_measurer().measure(small("route"))


def test_the_deltas_are_told_the_case_of_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def listening(*args: Any, **kwargs: Any) -> None:
        told.append({k: kwargs.pop(k) for k in ("max_active", "plan_settled")})
        ops.lora_delta(*args, **kwargs)

    monkeypatch.setattr(calls, "lora_delta", listening)
    numpy_measurer().measure(small("dense", max_loras=8, active=5))
    assert told
    assert all(hints == {"max_active": 8, "plan_settled": True} for hints in told)


@pytest.mark.parametrize("wide", [48, 64, 100, 192])
@pytest.mark.parametrize("rank", [1, 8, 12])
def test_the_reference_reads_packed_factors(wide: int, rank: int) -> None:
    backend = NumpyBackend()
    point = small("moe", rank=rank)
    (factors,) = Pools(backend).get(point, [(wide, 40)], 2).modules
    blocks = np.array([0, 31, 9, 9, 17])
    x = np.random.default_rng(0).standard_normal((5, wide)).astype(np.float32)
    got = delta_rows(backend, x, factors, blocks, 1)
    for row, block in enumerate(blocks):
        slot, expert = divmod(int(block), point.experts)
        a = unpack_a(factors.a[1, slot, expert]).astype(np.float64)
        b = factors.b[1, slot, expert].astype(np.float64)
        np.testing.assert_allclose(got[row], b @ (a @ x[row]), rtol=1e-4, atol=1e-4)


def test_widening_is_exact() -> None:
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    got = to_float32(NumpyBackend(), bits.view(DTYPE))
    np.testing.assert_array_equal(got, bits.view(DTYPE).astype(np.float32))


def test_sampled_rows() -> None:
    assert sample_rows(5, 1).tolist() == [0, 1, 2, 3, 4]
    rows = sample_rows(1000, 1)
    assert len(set(rows.tolist())) == 64
    assert (rows[0], rows[-1]) == (0, 999)


def test_a_verdict_keeps_both_limits() -> None:
    want = np.ones((100, 4), np.float32)
    Verdict(ERROR_LIMIT, 4 * ERROR_LIMIT, "").require()
    for got in (want * 1.013, np.where(np.arange(100)[:, None] == 7, want * 1.05, want)):
        with pytest.raises(OffReferenceError):
            judge([(got, want)], "").require()
    for bad in (np.nan, np.inf):
        with pytest.raises(OffReferenceError):
            judge([(np.where(np.arange(100)[:, None] == 7, bad, want), want)], "").require()
    assert judge([(want, want)], "").error == 0


def test_pools_are_shared_by_neighbours_and_bounded() -> None:
    pools = Pools(NumpyBackend())
    point = small("dense")
    modules = [(100, 64), (100, 32)]
    first = pools.get(point, modules, 4)
    assert pools.get(replace(point, tokens=3), modules, 2) is first
    assert pools.get(point, modules, 5) is not first
    assert pools.get(replace(point, rank=4), modules, 5).modules[0].a.shape == (5, 4, 1, 4, 100)
    with pytest.raises(CapacityError, match=r"--max-loras"):
        Pools(NumpyBackend(), most_bytes=1000).get(point, modules, 4)


def test_a_measurer_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = numpy_measurer()
    with monkeypatch.context() as context:
        break_deltas(context, one_row_left_out)
        with pytest.raises(OffReferenceError):
            measurer.measure(small("dense"))
    assert measurer.usable()
    measurer.measure(small("dense"))


def test_a_lost_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(NumpyBackend):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    measurer = GraphMeasurer(Lost(), EagerGraphs(), OneStream(), 1e12, sets=2)
    with pytest.raises(RuntimeError):
        measurer.measure(small("dense"))
    assert not measurer.usable()


def test_times_are_median_and_tenths() -> None:
    times = summarise([0.9, 1.1, 1.0, 1.2, 5.0, 1.0, 1.0, 1.1, 1.0, 1.0, 0.5], 10)
    assert (times.median, times.low, times.high) == pytest.approx((100, 90, 120))


# --- the CUDA side, with CuPy's names made up -------------------------------------------------


class FakeStream:
    """Records what is asked of CuPy's stream and graph."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_capture(self) -> None:
        self.log.append("begin")

    def end_capture(self) -> Any:
        self.log.append("end")
        return SimpleNamespace(
            upload=lambda _: self.log.append("upload"), launch=lambda _: self.log.append("launch")
        )

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.fixture
def cuda() -> tuple[CudaGraphs, list[str]]:
    log: list[str] = []
    event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
    module = SimpleNamespace(
        Stream=lambda non_blocking: FakeStream(log),
        Event=lambda: event,
        get_elapsed_time=lambda *_: 1.5,
    )
    return CudaGraphs(SimpleNamespace(xp=SimpleNamespace(cuda=module))), log  # type: ignore[arg-type]


def test_a_graph_is_captured_whole(cuda: tuple[CudaGraphs, list[str]]) -> None:
    graphs, log = cuda
    graph = graphs.capture([lambda: log.append("call")] * 2)
    assert log == ["begin", "call", "call", "end", "upload"]
    times = graphs.time(graph, 2, 7)
    assert log[5:] == ["launch", "launch", "wait"] + ["launch"] * 8  # 12 ms are reached at 8
    assert times.median == 750.0


def test_a_failed_capture_is_closed(cuda: tuple[CudaGraphs, list[str]]) -> None:
    graphs, log = cuda

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphs.capture([fails])
    assert log == ["begin", "end"]


def test_the_stream_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its region, every byte of a part, and each size once."""
    backend, graphs = NumpyBackend(), EagerGraphs()
    monkeypatch.setattr(stream, "_REGION_BYTES", 1 << 20)
    launched: list[tuple[str, int, int, int]] = []

    def enqueue(program: str, kernel: str, types: Any, grid: Any, threads: int, args: Any) -> None:
        assert program == "stream"
        assert len(types) == len(args)
        launched.append((kernel, grid[0], args[0], args[1] * 16))

    monkeypatch.setattr(stream, "enqueue", enqueue)
    reads = ReadStream(backend, graphs, 132)
    first = backend.address(reads._region)
    assert reads.us([2.0 + 300 * 1024, 5000.0]) == 2.0
    assert all(first <= at and at + size <= first + (1 << 20) for _, _, at, size in launched)
    nodes = [call.args[1] for call in graphs.captured[-1].calls]
    assert nodes[:2] == [300 * 1024, 4992]
    assert len(nodes) == 2 * 500
    count = len(graphs.captured)
    reads.us([2.0 + 300 * 1024, 5000.0])
    assert len(graphs.captured) == count
    assert reads.us([float(4 << 20)]) == pytest.approx(2.0 * 4)  # four times the region


def test_launch_shapes_do_not_exceed_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_REGION_BYTES", 1 << 20)
    reads = ReadStream(NumpyBackend(), EagerGraphs(), 132)
    assert list(reads._candidates(4096)) == [(132, 1)]
    many = list(reads._candidates(64 << 20))
    assert len(many) == len(set(many)) == 15
    assert (2112, 8) in many


def test_active_streams_are_left_again(cuda: tuple[CudaGraphs, list[str]]) -> None:
    graphs, _ = cuda
    with contextlib.suppress(ValueError), graphs.active():
        raise ValueError
    graphs.capture([])
