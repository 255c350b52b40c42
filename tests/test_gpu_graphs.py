"""What only a device shows of graphs: captures by hosts, memory that comes and goes between
replays, threads, and what the driver says."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_util import Harness, Inputs, adapter

from cupylora.backend import CudaBackend, open_backend
from cupylora.errors import GraphError
from cupylora.graphs.buckets import BatchKey, DispatchOptions
from cupylora.graphs.capture import CudaRecorder
from cupylora.graphs.manager import GraphOptions

pytestmark = pytest.mark.gpu

OPTIONS = GraphOptions(dispatch=DispatchOptions((1, 8, 16), specialize_active_loras=True))
FULL = BatchKey(8, num_active_loras=5)


@pytest.fixture
def harness() -> Harness:
    made = Harness(open_backend("cuda"), graphs=OPTIONS)
    for seed in range(4):
        made.runtime.load(f"a{seed}", adapter(seed))
    made.runtime.capture()
    return made


def test_memory_of_others_comes_and_goes_between_replays(harness: Harness) -> None:
    """Blocks of all sizes are taken, filled with NaN and given back."""
    cupy, rng = harness.backend.xp, np.random.default_rng(0)
    inputs = Inputs.random(8, np.resize([0, 1, 2, 3, -1], 8), 1)
    expected = harness.expected(inputs)
    for _ in range(100):
        held = [cupy.full(int(n), np.nan, np.float32) for n in 2 ** rng.integers(4, 24, 12)]
        cupy.cuda.Device().synchronize()
        del held
        cupy.get_default_memory_pool().free_all_blocks()
        for got, want in zip(harness.run(inputs), expected, strict=True):
            assert got.tobytes() == want.tobytes()


def test_other_threads_work_during_a_capture(harness: Harness) -> None:
    cupy = harness.backend.xp
    harness.runtime.release_graphs()
    stop, sums = threading.Event(), []

    def busy() -> None:
        with cupy.cuda.Stream(non_blocking=True):
            while not stop.is_set():
                sums.append(float(cupy.ones(10_000, np.float32).sum()))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert harness.runtime.capture()
    finally:
        stop.set()
        thread.join()
    assert sums
    assert set(sums) == {10_000.0}
    harness.check(Inputs.random(5, np.zeros(5), 0))


@pytest.mark.parametrize("captured", [True, False], ids=["replay", "eager"])
def test_the_first_call_of_a_thread_is_a_step(harness: Harness, captured: bool) -> None:
    """Nothing made the device's context current there before."""
    if not captured:
        harness.runtime.release_graphs()
    inputs = Inputs.random(5, np.resize([0, 1, -1], 5), 0)
    expected = harness.expected(inputs)
    harness.write(inputs)
    harness.read("x")
    steps: list[Any] = []
    thread = threading.Thread(target=lambda: steps.append(harness.runtime.step(inputs.slots)))
    thread.start()
    thread.join()
    assert (steps[0].key is not None) == captured
    for name, want in zip(("y", "out"), expected, strict=True):
        assert harness.read(name, 5).tobytes() == want.tobytes()


def test_more_steps_under_way_than_the_ring_has_places(harness: Harness) -> None:
    """Each finds its own batch, in graphs and eagerly by turns, whatever the host is ahead by."""
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(1, 24, 5 * harness.runtime._fence.depth)]
    slots = harness.runtime.buffers.whole("token_to_slot")
    seen, wanted = [], []
    with harness.on_stream():
        harness.buffers["ids"].fill(0)
        _keep_busy(harness)
        for tokens in sizes:
            batch = rng.integers(-1, 4, tokens).astype(np.int32)
            key = harness.runtime.step(batch).key
            rows = tokens if key is None else key.num_tokens
            seen.append((slots[:rows].copy(), harness.buffers["ids"][:rows].copy()))
            harness.buffers["ids"].fill(0)
            wanted.append((batch, rows - tokens))
        for (got, ids), (batch, padding) in zip(seen, wanted, strict=True):
            host = harness.backend.to_host(got)
            assert host.tolist() == [*batch.tolist(), *[-1] * padding]
            rows = harness.backend.to_host(ids)
            assert (rows[len(batch) :] == -1).all()
            assert (rows[: len(batch)] == 0).all()


def _keep_busy(harness: Harness) -> None:
    """Tens of milliseconds of the stream's time: what comes behind is enqueued long before."""
    memory = harness.backend.xp.empty(1 << 30, np.uint8)
    for _ in range(50):
        memory.data.memset_async(0, memory.nbytes)


@pytest.mark.parametrize("numbered", [True, False], ids=["with a number", "without"])
def test_a_failure_between_copy_and_launch_reaches_no_other_step(
    numbered: bool, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is enqueued, the launch is not; the steps behind find their own batches."""
    runtime, rng = harness.runtime, np.random.default_rng(1)
    slots, seen, wanted = runtime.buffers.whole("token_to_slot"), [], []

    def refused() -> None:
        raise GraphError("the driver refuses")

    def interrupted() -> int:
        raise KeyboardInterrupt

    with harness.on_stream():
        _keep_busy(harness)
        for number in range(3 * runtime._fence.depth):
            if number % 20 == 7:
                with monkeypatch.context() as patch:
                    patch.setattr(runtime.recording(FULL), "launch", refused)
                    if not numbered:
                        patch.setattr(runtime._fence, "submit", interrupted)
                    with pytest.raises(GraphError if numbered else KeyboardInterrupt):
                        runtime.step(np.resize(np.array([0, 1, 2, 3, -1], np.int32), 8))
            batch = rng.integers(-1, 4, int(rng.integers(1, 17))).astype(np.int32)
            runtime.step(batch)
            seen.append(slots[: len(batch)].copy())
            wanted.append(batch.tolist())
        assert [harness.backend.to_host(got).tolist() for got in seen] == wanted
    harness.check(Inputs.random(8, np.resize([2, 3, -1], 8), 1))


def test_steps_of_two_threads_find_their_own_batches(harness: Harness) -> None:
    runtime, failures = harness.runtime, []
    slots = runtime.buffers.whole("token_to_slot")

    def work(seed: int) -> None:
        rng, seen = np.random.default_rng(seed), []
        for _ in range(3 * runtime._fence.depth):
            batch = rng.integers(-1, 4, int(rng.integers(1, 17))).astype(np.int32)
            with runtime._lock, harness.on_stream():
                runtime.step(batch)
                seen.append((slots[: len(batch)].copy(), batch.tolist()))
        with harness.on_stream():
            failures.extend(b for got, b in seen if harness.backend.to_host(got).tolist() != b)

    with harness.on_stream():
        _keep_busy(harness)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runtime._fence.enqueued == 6 * runtime._fence.depth
    assert failures == []


def test_a_graph_launched_by_hand_works_on_the_batch_sent_last(harness: Harness) -> None:
    harness.run(Inputs.random(5, np.resize([0, 1, -1], 5), 0))
    slots = harness.runtime.buffers.whole("token_to_slot")
    with harness.on_stream():
        harness.buffers["ids"].fill(0)
    harness.runtime.recording(FULL).launch()
    with harness.on_stream():
        assert harness.backend.to_host(slots[:8]).tolist() == [0, 1, -1, 0, 1, -1, -1, -1]
    assert harness.read("ids", 8).tolist() == [[0] * 3] * 5 + [[-1] * 3] * 3
    harness.check(Inputs.random(8, np.resize([2, 3, -1], 8), 1))


def test_a_node_sets_padding_only_where_there_is_some(harness: Harness) -> None:
    def pads(tokens: int) -> list[int]:
        keys = [graph.key for graph in harness.runtime.captured if graph.key.num_tokens == tokens]
        names = [harness.runtime.recording(key).kernel_names() for key in keys]
        return [sum("pad_rows" in name for name in several) for several in names]

    assert set(pads(1)) == {0}
    assert set(pads(8)) == set(pads(16)) == {1}


def test_a_graph_can_be_looked_into(harness: Harness, tmp_path: Path) -> None:
    recording = harness.runtime.recording(FULL)
    names = recording.kernel_names()
    assert 0 < len(names) <= recording.nodes
    assert any("lora" in name for name in names)
    recording.write_dot(tmp_path / "graph.dot")
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    with pytest.raises(GraphError, match=r"writing .* to .* failed"):
        recording.write_dot(tmp_path / "no" / "graph.dot")
    harness.runtime.release_graphs()
    with pytest.raises(GraphError, match=r"was destroyed"):
        recording.launch()
    recording.destroy()


def test_the_legacy_default_stream_is_for_eager_steps(harness: Harness) -> None:
    cupy = harness.backend.xp
    with pytest.raises(GraphError, match=r"legacy default stream cannot be captured; give a str"):
        CudaRecorder(cupy.cuda.Stream.null)
    inputs = Inputs.random(6, np.resize([0, 1, -1], 6), 0)
    put = harness.backend.asarray
    harness.dense_plan.update(put(inputs.slots))
    y = put(inputs.y)
    harness.dense.add(put(inputs.x), y, harness.dense_plan)
    assert harness.backend.to_host(y).tobytes() == harness.expected(inputs)[0].tobytes()


def test_an_allocation_inside_a_capture_is_refused_and_named() -> None:
    recorder = CudaRecorder()
    cupy = CudaBackend().xp
    kept = cupy.zeros(1 << 10, np.float32)  # the pool has room, which would hide the fault
    del kept
    with pytest.raises(GraphError, match=r"4096 bytes were asked of CuPy while the test was captu"):
        recorder.record(lambda: cupy.zeros(1 << 10, np.float32), "the test")
    made = recorder.record(lambda: None, "nothing")
    made.launch()
    recorder.stream.synchronize()


def test_a_host_captures_layers_itself(harness: Harness) -> None:
    """On the host's own stream, without the runtime's graphs."""
    cupy, inputs = harness.backend.xp, Inputs.random(8, np.resize([0, 1, 2, 3, -1], 8), 1)
    expected = harness.expected(inputs)[0]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        slots, x, y = map(harness.backend.asarray, (inputs.slots, inputs.x, inputs.y))
        fresh = y.copy()
        stream.synchronize()
        stream.begin_capture()
        harness.dense_plan.update(slots)
        harness.dense.add(x, y, harness.dense_plan)
        graph = stream.end_capture()
        for _ in range(3):
            harness.backend.copy(y, fresh)
            graph.launch(stream)
            stream.synchronize()
            assert harness.backend.to_host(y).tobytes() == expected.tobytes()


FIRST_CALL = """
    import sys
    import cupy, numpy as np
    import cupylora
    from cupylora import ops
    from cupylora.errors import GraphError

    if sys.argv[1] == "prepared":
        cupylora.prepare(["fill"])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.zeros(1000, np.float32)
        stream.synchronize()
        stream.begin_capture()
        try:
            ops.fill_uniform(array, 7, 1.0)
        except GraphError as error:
            print("refused:", error)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    print("filled" if float(abs(array).max()) > 0.5 else "empty")
"""


@pytest.mark.parametrize("how", ["prepared", "not prepared"])
def test_the_first_call_of_a_process_inside_a_capture(how: str) -> None:
    """It works where kernels were loaded before, else it is refused and the capture stays valid."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FIRST_CALL), how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    if how == "prepared":
        assert run.stdout == "filled\n"
    else:
        assert "refused: kernel program 'fill' is not loaded yet" in run.stdout
        assert "cupylora.prepare() before the capture" in run.stdout
        assert run.stdout.endswith("empty\n")


def test_steps_allocate_nothing(harness: Harness) -> None:
    cupy = harness.backend.xp
    batches: list[Any] = [
        np.resize(np.array(slots, np.int32), tokens)
        for tokens, slots in [(1, [0]), (5, [1, -1]), (8, [0, 1, 2, 3, -1]), (16, [-1])]
    ]
    for slots in batches:
        harness.runtime.step(slots)
    harness.runtime.synchronize()
    pool = cupy.get_default_memory_pool()
    before = (pool.used_bytes(), pool.total_bytes())
    for number in range(1000):
        harness.runtime.step(batches[number % 4])
    harness.runtime.synchronize()
    assert (pool.used_bytes(), pool.total_bytes()) == before
    assert harness.runtime.counts().eager == {}
