"""On a GPU: other libraries' arrays in and out, in order behind slow producers, and in captures.

CuPy stands for the other library, its arrays wrapped so that nothing but one protocol is left of
them; JAX and PyTorch take part where they are installed with CUDA.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import numpy as np
import pytest
from gpu_util import to_device
from problem_util import random_case
from runtime_util import MODEL, adapter, room

from cupylora import ops, reference, use_stream
from cupylora.backend import open_backend
from cupylora.dtypes import BFLOAT16
from cupylora.errors import ArgumentError, GraphError
from cupylora.interop.convert import borrow
from cupylora.interop.lifetimes import release_finished
from cupylora.interop.view import ArrayView
from cupylora.runtime import LoraRuntime
from cupylora.shapes import LoraLimits

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 64, 256
DELAY_BYTES, DELAY_STEPS = 1 << 30, 100
"""Memsets that take tens of milliseconds together."""


class OnlyDlpack:
    """A CuPy array of which DLPack is left, exported on ``stream``; bfloat16 by an ArrayView."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.array, self.stream = array, stream

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        with self.stream:
            exporter = ArrayView.of(self.array) if self.array.dtype == BFLOAT16 else self.array
            return exporter.__dlpack__(**options)


class OnlyInterface:
    """A CuPy array of which the CUDA array interface is left, written on ``stream``."""

    def __init__(self, array: Any, stream: Any) -> None:
        self._entries = dict(array.__cuda_array_interface__, stream=int(stream.ptr))
        self._kept = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._entries


class Slow:
    """A stream with work of tens of milliseconds ahead of what ``fill`` enqueues."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._ballast = cupy.empty(DELAY_BYTES, np.uint8)
        self.written = cupy.cuda.Event(disable_timing=True)

    def fill(self, array: Any, source: Any) -> None:
        runtime, handle = self._cupy.cuda.runtime, self.stream.ptr
        for _ in range(DELAY_STEPS):
            runtime.memsetAsync(self._ballast.data.ptr, 0, DELAY_BYTES, handle)
        runtime.memcpyAsync(
            array.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, handle
        )
        self.written.record(self.stream)


def _values(dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((ROWS, WIDTH)).astype(dtype)


def _activation(x: Any, **options: Any) -> Any:
    return ops.activation(x, kind="silu", gated=True, **options)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16, np.float32])
def test_memory_is_used_where_it_is(dtype: Any) -> None:
    import cupy

    stream = cupy.cuda.get_current_stream()
    array = open_backend("cuda").asarray(_values(dtype))
    forms = [OnlyDlpack(array, stream), ArrayView(array.data.ptr, array.shape, dtype, 0)]
    if dtype is not BFLOAT16:  # the interface has no name for it
        forms.append(OnlyInterface(array, cupy.cuda.Stream.ptds))
    expected = _activation(array).get()
    for form in forms:
        taken = borrow("x", form, on_device=True)
        assert type(taken) is cupy.ndarray
        assert taken.data.ptr == array.data.ptr
        target = cupy.empty((ROWS, WIDTH // 2), dtype)
        out = OnlyDlpack(target, stream)
        assert _activation(form, out=out) is out
        assert target.get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", [OnlyDlpack, OnlyInterface])
def test_work_waits_for_a_slow_producer_and_the_host_does_not(form: Any) -> None:
    import cupy

    values = _values()
    source, array = cupy.asarray(values), cupy.zeros((ROWS, WIDTH), np.float16)
    out = cupy.empty((ROWS, WIDTH // 2), np.float16)
    _activation(array, out=out)  # loads the kernel
    expected = _activation(source).get()
    ours, slow = cupy.cuda.Stream(non_blocking=True), Slow()
    cupy.cuda.Device().synchronize()
    slow.fill(array, source)
    with use_stream(ours):
        _activation(form(array, slow.stream), out=out)
    assert not slow.written.done, "the call waited for the producer on the host"
    ours.synchronize()
    assert out.get().tobytes() == expected.tobytes()


def test_a_graph_takes_arrays_of_its_own_stream_and_refuses_others() -> None:
    import cupy

    values = _values()
    array, out = cupy.asarray(values), cupy.empty((ROWS, WIDTH // 2), np.float16)
    expected = _activation(array, out=out).get()
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with use_stream(stream):
        stream.begin_capture()
        with pytest.raises(GraphError, match="one of the two is being captured"):
            _activation(OnlyInterface(array, other), out=out)
        _activation(OnlyDlpack(array, other), out=OnlyInterface(out, stream))
        graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert out.get().tobytes() == expected.tobytes()


def test_memory_is_kept_until_the_work_on_it_is_over() -> None:
    import cupy

    array, source = cupy.zeros((ROWS, WIDTH), np.float16), cupy.asarray(_values())
    out = cupy.empty((ROWS, WIDTH // 2), np.float16)
    _activation(array, out=out)
    slow = Slow()
    cupy.cuda.Device().synchronize()
    slow.fill(array, source)
    held: Any = OnlyInterface(array, slow.stream)
    gone = weakref.ref(held)
    with use_stream(slow.stream):
        _activation(held, out=out)
    held = None
    gc.collect()
    assert gone() is not None, "the work has not begun"
    slow.stream.synchronize()
    release_finished()
    gc.collect()
    assert gone() is None


def test_host_memory_and_other_devices_are_refused() -> None:
    import cupy

    routing = to_device(_routing())
    host = np.zeros((20, 8), np.float16)
    with pytest.raises(ArgumentError, match="x is in host memory"):
        ops.permute_rows(ArrayView(host.ctypes.data, (20, 8), "f2", "cpu"), routing)
    pinned = cupy.cuda.alloc_pinned_memory(320)
    entries = {"shape": (20, 8), "typestr": "<f2", "data": (pinned.ptr, False), "version": 3}
    lying = type("Lying", (), {"__cuda_array_interface__": entries})()
    with pytest.raises(ArgumentError, match="x is in host memory, at"):
        ops.permute_rows(lying, routing)


@pytest.mark.multi_gpu
def test_memory_of_another_device_is_refused() -> None:
    import cupy

    with cupy.cuda.Device(1):
        far = cupy.zeros((20, 8), np.float16)
        stream = cupy.cuda.get_current_stream()
    for form in (OnlyDlpack(far, stream), OnlyInterface(far, cupy.cuda.Stream.ptds)):
        with pytest.raises(ArgumentError, match="x is on CUDA device 1, but the current"):
            borrow("x", form, on_device=True)


def _routing() -> Any:
    case = random_case(1, 20, 2, 4, 3)
    return reference.route(case.topk_ids, case.token_to_slot, **case.sizes)  # type: ignore[arg-type]


def _runtime(stream: Any = None) -> LoraRuntime:
    return LoraRuntime(
        MODEL,
        LoraLimits(2, 24),
        dtype="bfloat16",
        max_tokens=4,
        arena_bytes=room(2),
        backend="cuda",
        stream=stream,
    )


NO_ADAPTERS = np.full(4, -1, np.int32)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_runtime_steps_on_a_stream_given_by_number(graphs: bool, closed: bool) -> None:
    """And outlives it: the host destroys its stream before the runtime and its buffers go."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    runtime = _runtime(int(stream.ptr))
    given = cupy.zeros((4, 8), np.float32)
    foreign = OnlyInterface(given, cupy.cuda.Stream.ptds)
    same = runtime.add_buffer("x", (8,), np.float32, array=foreign) is foreign
    assert same
    runtime.set_step(lambda step: step["x"].fill(3))
    if graphs:
        runtime.capture()
    runtime.step(NO_ADAPTERS)
    runtime.synchronize()
    assert (given.get() == 3).all()
    assert int(runtime.recorder.stream.ptr) == stream.ptr
    gone = weakref.ref(foreign)
    del stream, foreign
    runtime.synchronize()
    if closed:
        runtime.close()
    assert gone() is not None
    del runtime
    gc.collect()
    release_finished()
    gc.collect()
    assert gone() is None


def test_a_view_outlives_the_stream_that_it_was_taken_on() -> None:
    import cupy

    array, out = cupy.asarray(_values()), cupy.empty((ROWS, WIDTH // 2), np.float16)
    expected = _activation(array).get()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    held: Any = OnlyInterface(array, cupy.cuda.Stream.ptds)
    gone = weakref.ref(held)
    with use_stream(int(stream.ptr)):
        kept = open_backend("cuda").view(held)
        _activation(kept, out=out)
        result = ArrayView.of(out)
    held = None
    stream.synchronize()
    del stream
    assert _activation(result).shape == (ROWS, WIDTH // 4), "waits for no stream that is gone"
    assert out.get().tobytes() == expected.tobytes()
    del kept
    release_finished()
    gc.collect()
    assert gone() is None


def test_a_load_voids_no_capture_of_another_thread() -> None:
    import cupy

    runtime = _runtime()
    runtime.set_step(lambda _: None)
    runtime.load("a", adapter(0))  # loads kernels
    stream, array = cupy.cuda.Stream(non_blocking=True), cupy.zeros(16, np.uint8)
    runtime.step(NO_ADAPTERS)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        array.data.memset_async(7, 16, stream)
        runtime.load_async("b", adapter(1)).result(60)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert (array.get() == 7).all()
    runtime.close()


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_a_framework(library: str) -> None:
    """In by DLPack, bfloat16 too; results out by DLPack, both ways without a copy."""
    pytest.importorskip(library)
    framework = importlib.import_module({"torch": "torch", "jax": "jax.numpy"}[library])
    values = _values(np.float32)
    try:
        x = _framework_array(library, values)
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"{library} has no CUDA here: {error}")
    here = open_backend("cuda")
    expected = _activation(here.asarray(values.astype(BFLOAT16))).get()
    taken = here.view(x)
    address = x.data_ptr() if library == "torch" else x.unsafe_buffer_pointer()
    assert taken.data.ptr == address
    made = _activation(x)
    assert made.get().tobytes() == expected.tobytes()
    back = framework.from_dlpack(ArrayView.of(made))
    address = back.data_ptr() if library == "torch" else back.unsafe_buffer_pointer()
    assert address == made.data.ptr
    if library == "torch":
        out = framework.empty((ROWS, WIDTH // 2), dtype=framework.bfloat16, device="cuda")
        with use_stream(framework.cuda.current_stream()):
            assert _activation(x, out=out) is out
        assert out.view(framework.int16).cpu().numpy().tobytes() == expected.tobytes()
    else:
        with pytest.raises(ArgumentError, match="out is an array of jax"):
            _activation(x, out=x[:, : WIDTH // 2])


def _framework_array(library: str, values: np.ndarray) -> Any:
    if library == "torch":
        torch = importlib.import_module("torch")
        return torch.from_numpy(values).to("cuda", torch.bfloat16)
    jax = importlib.import_module("jax")
    return jax.device_put(values.astype(BFLOAT16), jax.devices("gpu")[0])
