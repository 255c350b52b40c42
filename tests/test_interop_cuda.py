"""Device arrays of other libraries, on a stand-in for CuPy: addresses, refusals, order, lifetimes.

What events do on a GPU is for the gpu tests; here it is that they are recorded and waited for where
they must be, that nothing of it happens in a capture, and that the host waits nowhere.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dlpack_producer import Producer
from fake_cuda import FakeCuda, Interface, describe, own
from fake_device import FakeArray, fake
from problem_util import random_case

from cupylora import ops, reference
from cupylora.device import DeviceState, probe
from cupylora.dtypes import BFLOAT16
from cupylora.errors import ArgumentError, DeviceUnavailableError, GraphError
from cupylora.graphs.capture import CudaRecorder
from cupylora.graphs.fence import CudaFence
from cupylora.interop import events, lifetimes
from cupylora.interop.convert import borrow, lives_on_device
from cupylora.interop.streams import as_stream, stream_handle, use_stream
from cupylora.interop.view import ArrayView

LEGACY, PER_THREAD, OURS, THEIRS = 1, 2, 0xA0, 0xB0
CUDA, PINNED, MANAGED = 2, 3, 13


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda().installed() as made:
        yield made
        for stream in made.streams.values():
            stream.busy = False
        made.capturing.clear()
        lifetimes.release_finished()
        assert not any(lifetimes._held.values())
        assert made.wrong == []


def _take(value: Any, *, written: bool = False, name: str = "x") -> Any:
    return borrow(name, value, on_device=True, written=written)


def _array(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


# --- what is seen --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (_array(3, 4), {}),
        (_array(3, 4), {"strides": ...}),
        (_array(3, 4), {"strides": (8, 2)}),
        (_array(6, 4)[::2], {}),
        (_array(6, 4)[::-1], {}),
        (np.broadcast_to(_array(1, 4), (3, 4)), {}),
        (_array(3, 4, dtype=np.int32).T, {}),
        (_array(3, 4), {"version": 2, "stream": ...}),
        (_array(2, 0, 3), {"data": (0, False)}),
    ],
)
def test_an_interface_is_seen_where_it_is(array: Any, says: Any, cuda: FakeCuda) -> None:
    taken = _take(describe(array, **says))
    assert type(taken) is FakeArray, "the backend's own type"
    assert (taken.shape, taken.dtype) == (array.shape, array.dtype)
    assert taken.flags.c_contiguous == array.flags.c_contiguous
    if array.size:
        assert taken.data.ptr == array.ctypes.data
        np.testing.assert_array_equal(taken.host, array)
    assert cuda.log == []


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"mask": object()}, "x has a mask"),
        (
            {"stream": 0},
            "x: its __cuda_array_interface__ has stream 0, which the interface forbids",
        ),
        ({"stream": -1}, "x: .* has stream -1"),
        ({"typestr": "<V2"}, "x: .* typestr '<V2', which names no number type .* DLPack"),
        ({"typestr": ">f2"}, "x: .* typestr '>f2'"),
        ({"typestr": "|O"}, r"x: .* typestr '\|O'"),
        ({"typestr": "what"}, "x: .* typestr 'what'"),
        ({"data": (0, False)}, r"x: .* shape \(3, 4\) at address 0"),
        ({"shape": (-1, 4)}, r"x: .* shape \(-1, 4\)"),
        ({"strides": (2,)}, r"x: .* strides \(2,\) for shape \(3, 4\)"),
        ({"shape": ...}, "x: its __cuda_array_interface__ is not of version 2 or 3"),
        ({"data": 4096}, "x: its __cuda_array_interface__ is not of version 2 or 3"),
    ],
)
def test_entries_that_cannot_be_taken_are_named(says: Any, message: str, cuda: FakeCuda) -> None:
    with pytest.raises(ArgumentError, match=message):
        _take(describe(_array(3, 4), **says))
    assert cuda.log == []


def test_an_object_without_the_entries_it_promises_is_refused(cuda: FakeCuda) -> None:
    class Host:
        """As an array on the host of a library that can have both."""

        @property
        def __cuda_array_interface__(self) -> Any:
            raise AttributeError("it is on the CPU")

    with pytest.raises(ArgumentError, match=r"x is a Host that shows no .*it is on the CPU"):
        _take(Host())


def test_dlpack_without_a_device_needs_the_interface_beside_it(cuda: FakeCuda) -> None:
    class Half:
        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("it must not be asked")

    class Both(Half):
        __cuda_array_interface__ = describe(_array(2)).__cuda_array_interface__

    assert _take(Both()).shape == (2,)
    for on_device in (True, False):
        with pytest.raises(ArgumentError, match="x is a Half that does not tell its device"):
            borrow("x", Half(), on_device=on_device)


def test_protocols_of_an_instance_count_too(cuda: FakeCuda) -> None:
    class Loose:
        pass

    loose, array = Loose(), _array(2, 2)
    loose.__cuda_array_interface__ = describe(array).__cuda_array_interface__  # type: ignore[attr-defined]
    assert borrow("kind", Loose(), on_device=True).__class__ is Loose, "no array: left alone"
    assert _take(loose).data.ptr == array.ctypes.data


def test_memory_elsewhere_is_refused(cuda: FakeCuda) -> None:
    array = _array(3, 4)
    at = array.ctypes.data
    for kind in (0, 1):  # not registered, or pinned
        cuda.memory[at] = (kind, 0)
        with pytest.raises(ArgumentError, match=r"x is in host memory, at 0x\w+; copy it to the d"):
            _take(describe(array))
    cuda.memory[at] = (2, 1)
    with pytest.raises(ArgumentError, match="x is on CUDA device 1, but the current device is 0"):
        _take(describe(array))
    cuda.memory[at] = (3, 1)  # managed memory is seen from every device
    assert _take(describe(array)).data.ptr == at
    for device, message in (
        ((CUDA, 1), r"on CUDA device 1, but the current .* \(with cupy.cuda.Device\(1\)\)"),
        ((1, 0), "in host memory; copy it to the device first"),
        ((PINNED, 0), "in pinned host memory; copy it to the device first"),
        ((10, 0), "on a device of another make"),
    ):
        producer = Producer(array, device=device)
        with pytest.raises(ArgumentError, match=message):
            _take(producer)
        assert not producer.asked, "refused before it exports anything"
    with pytest.raises(ArgumentError, match="x is in host memory; copy it to the device"):
        _take(ArrayView(at, (3, 4), "f2", "cpu"))
    with pytest.raises(ArgumentError, match="x is on CUDA device 3, but"):
        _take(ArrayView(at, (3, 4), "f2", 3))
    for sound in (Producer(array, device=(CUDA, 0)), Producer(array, device=(MANAGED, 5))):
        assert _take(sound).data.ptr == at


def test_read_only_memory_is_no_output(cuda: FakeCuda) -> None:
    array = _array(3, 4)
    fixed = (
        describe(array, data=(array.ctypes.data, True)),
        Producer(array, device=(CUDA, 0), flags=1),
        ArrayView(array.ctypes.data, (3, 4), "f2", 0, writable=False),
    )
    for value in fixed:
        with pytest.raises(ArgumentError, match="y is exported as read-only; a writable array"):
            _take(value, written=True, name="y")
        assert _take(value).data.ptr == array.ctypes.data


def test_elements_across_their_size_are_refused(cuda: FakeCuda) -> None:
    room = np.zeros(9, np.uint8)
    with pytest.raises(ArgumentError, match=r"x starts at address .* no multiple of the 2 bytes"):
        _take(describe(room, data=(room.ctypes.data + 1, False), typestr="<f2", shape=(4,)))


def test_bfloat16_comes_through_dlpack_and_views(cuda: FakeCuda) -> None:
    array = _array(3, 4, dtype=BFLOAT16)
    for value in (
        Producer(array, device=(CUDA, 0)),
        Producer(array, device=(CUDA, 0), versioned=False),
        ArrayView(array.ctypes.data, (3, 4), "bfloat16", 0),
    ):
        taken = _take(value)
        assert (taken.dtype, taken.data.ptr) == (BFLOAT16, array.ctypes.data)


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "told"), [(0, LEGACY), (PER_THREAD, PER_THREAD), (OURS, OURS)])
def test_a_producer_is_told_where_work_will_go(ours: int, told: int, cuda: FakeCuda) -> None:
    producer = Producer(_array(2), device=(CUDA, 0))
    with cuda.stream(ours):
        _take(producer)
    assert producer.asked == [{"max_version": (1, 0), "copy": False, "stream": told}]


@pytest.mark.parametrize("theirs", [LEGACY, PER_THREAD, THEIRS])
def test_work_waits_for_what_an_interface_says_it_is_written_on(
    theirs: int, cuda: FakeCuda
) -> None:
    on = {LEGACY: 0}.get(theirs, theirs)
    array = _array(2)
    with cuda.stream(OURS):
        taken = [_take(describe(array, stream=theirs))]
        taken.append(_take(ArrayView(array.ctypes.data, (2,), "f2", 0, stream=theirs)))
    assert cuda.log == [("record", on), ("wait", OURS, on)] * 2


def test_a_stream_does_not_wait_for_itself(cuda: FakeCuda) -> None:
    taken = []
    for ours, theirs in ((OURS, OURS), (0, LEGACY), (LEGACY, LEGACY)):
        with cuda.stream(ours):
            taken.append(_take(describe(_array(2), stream=theirs)))
    assert cuda.log == []


def test_nothing_is_waited_for_in_a_capture(cuda: FakeCuda) -> None:
    class JaxArray(Producer):
        pass

    JaxArray.__module__ = "jaxlib._jax"
    cuda.capturing = {OURS}
    with cuda.stream(OURS):
        plain = Producer(_array(2), device=(CUDA, 0))
        _take(plain)
        assert plain.asked[0]["stream"] == -1
        jax = JaxArray(_array(2), device=(CUDA, 0))
        _take(jax)
        assert "stream" not in jax.asked[0]
        _take(describe(_array(2), stream=OURS))
        for value in (
            describe(_array(2), stream=THEIRS),
            describe(_array(2), stream=LEGACY),
            ArrayView(_array(2).ctypes.data, (2,), "f2", 0, stream=THEIRS),
        ):
            with pytest.raises(GraphError, match=r"x is written on another .* before the cap"):
                _take(value)
    assert cuda.log == []


def test_a_wait_for_someone_elses_capture_is_refused(cuda: FakeCuda) -> None:
    cuda.capturing = {THEIRS}
    with cuda.stream(OURS), pytest.raises(GraphError, match="one of the two is being captured"):
        _take(describe(_array(2), stream=THEIRS))
    assert cuda.log == []


# --- lifetimes -----------------------------------------------------------------------------------


def test_memory_is_kept_until_work_on_it_is_over(cuda: FakeCuda) -> None:
    producer = Producer(_array(2), device=(CUDA, 0))
    with cuda.stream(OURS) as ours:
        ours.busy = True
        taken = _take(producer)
        del taken
        assert cuda.log == [("record", OURS)]
        assert producer.deleted == 0, "what was enqueued still reads it"
        lifetimes.release_finished()
        assert producer.deleted == 0
        ours.busy = False
        lifetimes.release_finished()
        assert producer.deleted == 1


def test_other_arrays_taken_meanwhile_let_go_of_what_is_over(cuda: FakeCuda) -> None:
    first, second = (Producer(_array(2), device=(CUDA, 0)) for _ in range(2))
    with cuda.stream(OURS) as ours, cuda.stream(THEIRS) as theirs:
        theirs.busy = True
        taken = _take(first)
        del taken
        assert first.deleted == 0
        theirs.busy, ours.busy = False, True
        keeps = _take(second)
        assert (first.deleted, second.deleted) == (1, 0)
        del keeps
        assert second.deleted == 1, "its stream had nothing left to do"


def test_memory_is_given_back_once_whatever_threads_do(cuda: FakeCuda) -> None:
    made: list[Producer] = []

    def work(number: int) -> None:
        draw, views, stream = random.Random(number), [], cuda.stream(OURS + number % 2)
        for _ in range(150):
            producer = Producer(_array(2), device=(CUDA, 0))
            made.append(producer)
            stream.busy = draw.random() < 0.5
            views.append(_take(producer))
            if len(views) > 4:
                del views[draw.randrange(4)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for stream in cuda.streams.values():
        stream.busy = False
    lifetimes.release_finished()
    assert [producer.deleted for producer in made] == [1] * 600


def test_only_what_was_asked_is_let_go(cuda: FakeCuda) -> None:
    """While one looks whether the first is free, another one lets it go, and comes to the next."""
    dropped: list[str] = []

    class Kept:
        def __init__(self, name: str, free: bool) -> None:
            self.name, self.free, self.asked = name, free, False

        def is_free(self) -> bool:
            if not self.asked:
                self.asked = True
                lifetimes.release_finished()
            return self.free

        def drop(self) -> None:
            dropped.append(self.name)

    waiting: Any = deque([Kept("first", True), Kept("second", False), Kept("third", True)])
    lifetimes._held[0] = waiting
    lifetimes.release_finished()
    assert set(dropped) <= {"first", "third"}
    assert "second" in {kept.name for kept in waiting}
    waiting.clear()


def test_an_interfaces_object_is_kept_as_well(cuda: FakeCuda) -> None:
    value: Interface | None = describe(_array(2))
    gone = weakref.ref(value)
    with cuda.stream(OURS) as ours:
        ours.busy = True
        taken = _take(value)
        value = None
        del taken
        gc.collect()
        assert gone() is not None
        ours.busy = False
        lifetimes.release_finished()
        gc.collect()
        assert gone() is None


def test_streams_do_not_hold_up_one_another(cuda: FakeCuda) -> None:
    first, second = (Producer(_array(2), device=(CUDA, 0)) for _ in range(2))
    with cuda.stream(OURS) as ours:
        ours.busy = True
        _take(first)
    with cuda.stream(THEIRS):
        _take(second)
    assert (first.deleted, second.deleted) == (0, 1)


def test_events_are_used_again(cuda: FakeCuda) -> None:
    for _ in range(5):
        _take(Producer(_array(2), device=(CUDA, 0)))
    assert len(events._events[0]) == 1


def test_no_event_joins_a_capture(cuda: FakeCuda) -> None:
    """It could not be asked afterwards; what was enqueued before the capture is still guarded."""
    producer = Producer(_array(2), device=(CUDA, 0))
    with cuda.stream(OURS) as ours:
        taken = _take(producer)
        cuda.capturing = {OURS}
        del taken
        lifetimes.release_finished()
        assert cuda.log == []
        assert producer.deleted == 0
        cuda.capturing, ours.busy = set(), True
        lifetimes.release_finished()
        assert cuda.log == [("record", OURS)]
        assert producer.deleted == 0
        ours.busy = False
        lifetimes.release_finished()
        assert producer.deleted == 1


def test_what_is_refused_after_its_export_is_given_back_at_once(cuda: FakeCuda) -> None:
    room = np.zeros(9, np.uint8)
    crooked = room[1:].view(np.float16)
    producer = Producer(crooked, device=(CUDA, 0))
    with pytest.raises(ArgumentError, match="no multiple"):
        _take(producer)
    gc.collect()
    assert producer.deleted == 1


# --- streams that are gone before views are ------------------------------------------------------


@pytest.fixture(params=["number", "protocol"])
def theirs(request: pytest.FixtureRequest) -> Any:
    """A stream of the host's; with an object, its library destroys it though the object lives."""
    return THEIRS if request.param == "number" else _Protocol((0, THEIRS))


def test_a_view_outlives_a_stream_that_was_lent(theirs: Any, cuda: FakeCuda) -> None:
    producer = Producer(_array(2), device=(CUDA, 0))
    with use_stream(theirs):
        taken = _take(producer)
    assert cuda.log == [("record", THEIRS)], "while the stream is there"
    cuda.destroy(THEIRS)
    del taken
    assert producer.deleted == 1
    assert cuda.log == [("record", THEIRS)]


def test_what_is_enqueued_in_later_blocks_is_waited_for_too(cuda: FakeCuda) -> None:
    producer = Producer(_array(2), device=(CUDA, 0))
    with use_stream(THEIRS):
        taken = _take(producer)
    with use_stream(THEIRS):
        cuda.log.append(("launch", "with the view", ()))
    assert cuda.log[-1] == ("record", THEIRS)
    cuda.stream(THEIRS).busy = True
    del taken
    lifetimes.release_finished()
    assert producer.deleted == 0
    cuda.destroy(THEIRS)
    lifetimes.release_finished()
    assert producer.deleted == 1


def test_a_view_that_goes_in_a_block_is_marked_there(theirs: Any, cuda: FakeCuda) -> None:
    producer = Producer(_array(2), device=(CUDA, 0))
    with use_stream(theirs):
        taken = _take(producer)
        cuda.stream(THEIRS).busy = True
        del taken
        assert cuda.log == [("record", THEIRS)]
    assert cuda.log == [("record", THEIRS)], "nobody is left who would ask"
    cuda.destroy(THEIRS)
    lifetimes.release_finished()
    assert producer.deleted == 1


def test_a_block_elsewhere_may_still_use_what_goes_here(cuda: FakeCuda) -> None:
    producer = Producer(_array(2), device=(CUDA, 0))
    with use_stream(THEIRS):
        taken = _take(producer)
    with use_stream(THEIRS):
        with use_stream(OURS):  # as another thread, where THEIRS is not the current stream
            del taken
            assert producer.deleted == 0
        assert ("record", THEIRS) not in cuda.log[1:]
    lifetimes.release_finished()
    assert cuda.log[1:] == [("record", THEIRS)]
    assert producer.deleted == 1
    cuda.destroy(THEIRS)


def test_without_a_block_memory_stays_until_its_stream_is_in_use_again(cuda: FakeCuda) -> None:
    """The host makes the stream CuPy's current one itself: nobody tells us when it ends."""
    producer = Producer(_array(2), device=(CUDA, 0))
    with cuda.from_external(_Protocol((0, THEIRS))):
        taken = _take(producer)
    del taken
    lifetimes.release_finished()
    assert (producer.deleted, cuda.log) == (0, [])
    with cuda.from_external(_Protocol((0, THEIRS))):
        _take(describe(_array(2)))
        assert producer.deleted == 1
    cuda.destroy(THEIRS)


def test_blocks_that_nobody_asks_about_leave_no_events(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(THEIRS)
    for _ in range(3):
        with use_stream(THEIRS), recorder.active():
            pass
    with use_stream(cuda.stream(OURS)):
        taken = _take(Producer(_array(2), device=(CUDA, 0)))
    assert cuda.log == []
    del taken


def test_a_block_that_ends_in_a_capture_leaves_no_event(cuda: FakeCuda) -> None:
    producer = Producer(_array(2), device=(CUDA, 0))
    with use_stream(THEIRS):
        taken = _take(producer)
    with use_stream(THEIRS):
        cuda.capturing = {THEIRS}
    del taken
    assert producer.deleted == 0, "the block before says nothing of this one's work"
    cuda.capturing = set()
    with use_stream(THEIRS):
        lifetimes.release_finished()
    assert producer.deleted == 1
    cuda.destroy(THEIRS)


def test_steps_buffers_outlive_a_stream_that_was_lent(cuda: FakeCuda) -> None:
    """Taken in one block, used in eager steps, let go when the host has torn down everything."""
    recorder, fence = CudaRecorder(THEIRS), CudaFence(THEIRS)
    producer = Producer(_array(2), device=(CUDA, 0))
    with recorder.active():
        kept = [_take(producer)]
    with recorder.active():
        fence.submit()
    cuda.stream(THEIRS).busy = True
    cuda.destroy(THEIRS)
    fence.wait(1)
    assert fence.finished() == 1
    del recorder, fence
    kept.clear()
    assert producer.deleted == 1


def test_an_export_outlives_the_stream_that_it_was_made_on(cuda: FakeCuda) -> None:
    array = _array(2)
    with use_stream(THEIRS):
        view = ArrayView.of(own(array))
        assert stream_handle("stream", view.stream) == THEIRS
        view.__dlpack__(stream=THEIRS)
        assert cuda.log == [], "the same stream"
        view.__dlpack__(stream=OURS)
        assert cuda.log == [("record", THEIRS), ("wait", OURS, THEIRS)]
        cuda.log.clear()
    cuda.destroy(THEIRS)
    view.__dlpack__(stream=OURS)
    assert cuda.log == [("record", THEIRS), ("wait", OURS, THEIRS)], "recorded when the block ended"
    cuda.capturing = {OURS}
    with pytest.raises(GraphError, match="the view is written on another stream"):
        view.__dlpack__(stream=OURS)


def test_a_fence_is_asked_while_another_thread_captures(cuda: FakeCuda) -> None:
    fence = CudaFence(cuda.stream(OURS), depth=2)
    cuda.elsewhere, cuda.stream(OURS).busy = True, True
    for _ in range(3):  # the last one waits for the first
        fence.submit()
    cuda.stream(OURS).busy = True
    assert fence.finished() < 3
    fence.wait(3)
    assert fence.finished() == 3
    assert cuda.wrong == []


# --- streams -------------------------------------------------------------------------------------


class _Protocol:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


class _Attribute:
    __cuda_stream__ = (0, 0x70)


class _Torch:
    cuda_stream = 0x80


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0x60, 0x60),
        (np.int64(0x61), 0x61),
        (0, 0),
        (_Protocol((0, 0x62)), 0x62),
        (_Attribute(), 0x70),
        (_Torch(), 0x80),
    ],
)
def test_streams_of_every_form(stream: Any, handle: int, cuda: FakeCuda) -> None:
    assert stream_handle("stream", stream) == handle
    assert as_stream("stream", stream) == cuda.stream(handle)


def test_default_streams_by_number(cuda: FakeCuda) -> None:
    assert as_stream("stream", LEGACY) is as_stream("stream", 0) is cuda.stream(0)
    assert as_stream("stream", PER_THREAD) is cuda.stream(PER_THREAD)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (None, "stream is None; a CUDA stream is needed"),
        ("default", "stream is 'default'; a CUDA stream"),
        (-1, "stream is -1; a CUDA"),
        (True, "stream is True; a CUDA"),
        (1.0, "stream is 1.0; a CUDA"),
        (_Protocol((1, 0x62)), r"stream is a _Protocol whose __cuda_stream__ gives \(1, 98\)"),
        (_Protocol(7), "stream is a _Protocol whose __cuda_stream__ gives 7"),
        (_Protocol((0, "a")), "stream is <.*_Protocol .*>; a CUDA stream is needed"),
    ],
)
def test_what_is_no_stream_is_refused(stream: Any, message: str, cuda: FakeCuda) -> None:
    with pytest.raises(ArgumentError, match=message):
        as_stream("stream", stream)


def test_ops_go_to_the_stream_in_use(cuda: FakeCuda) -> None:
    assert cuda.current.ptr == 0
    producer = Producer(_array(2), device=(CUDA, 0))
    with use_stream(_Protocol((0, THEIRS))):
        assert cuda.current.ptr == THEIRS
        with use_stream(OURS):
            _take(producer)
        assert cuda.current.ptr == THEIRS
    assert producer.asked[0]["stream"] == OURS
    with pytest.raises(ArgumentError, match="stream is 'fast'"), use_stream("fast"):
        pass
    assert cuda.current.ptr == 0


def test_without_a_device_its_arrays_and_streams_are_refused_with_what_is_missing() -> None:
    if probe().state is DeviceState.READY:
        pytest.skip("there is a device")
    for call in (
        lambda: use_stream(7).__enter__(),
        lambda: ops.activation(describe(_array(2, 4)), kind="silu", gated=True),
        lambda: ops.activation(ArrayView(4096, (2, 4), "f2", 0), kind="silu", gated=True),
    ):
        with pytest.raises(DeviceUnavailableError, match="the cuda backend is not ready"):
            call()


@pytest.mark.parametrize("made", [CudaRecorder, CudaFence])
def test_steps_take_streams_of_every_form_and_keep_them(made: Any, cuda: FakeCuda) -> None:
    stream: Any = _Protocol((0, THEIRS))
    gone = weakref.ref(stream)
    user = made(stream)
    held = user.stream if made is CudaRecorder else user._stream
    assert held == cuda.stream(THEIRS)
    stream = None
    gc.collect()
    assert gone() is not None, "its library would destroy it"
    with pytest.raises(ArgumentError, match="stream is 'fast'; a CUDA stream is needed"):
        made("fast")


@pytest.mark.parametrize("default", [0, LEGACY, PER_THREAD, _Protocol((0, LEGACY))])
def test_default_streams_are_not_for_captures(default: Any, cuda: FakeCuda) -> None:
    with pytest.raises(GraphError, match="default stream"):
        CudaRecorder(default)


# --- through ops ---------------------------------------------------------------------------------


def test_ops_hand_kernels_the_addresses_they_were_given(cuda: FakeCuda) -> None:
    case = random_case(1, 20, 2, 4, 3)
    routing = fake(reference.route(case.topk_ids, case.token_to_slot, **case.sizes))  # type: ignore[arg-type]
    x, out = _array(20, 8, dtype=BFLOAT16), _array(40, 8, dtype=BFLOAT16)
    source, target = (Producer(a, device=(CUDA, 0)) for a in (x, out))
    assert ops.permute_rows(source, routing, out=target) is target
    _, _, arguments = cuda.log[0]
    assert (arguments[0], arguments[-1]) == (x.ctypes.data, out.ctypes.data)
    made = ops.permute_rows(describe(_array(20, 8)), routing)
    assert type(made) is FakeArray


def test_the_first_argument_decides_where_all_have_to_be(cuda: FakeCuda) -> None:
    case = random_case(1, 20, 2, 4, 3)
    ids, slots = case.topk_ids, case.token_to_slot
    for value, expected in (
        (describe(ids), True),
        (Producer(ids), False),
        (Producer(ids, device=(CUDA, 0)), True),
        (ArrayView(4096, (1,), "i4", 0), True),
    ):
        assert lives_on_device("ids", value) == expected
    with pytest.raises(ArgumentError, match="token_to_slot is in host memory; copy it to the dev"):
        ops.route(describe(ids), Producer(slots), **case.sizes)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="token_to_slot is a host array; a device array"):
        ops.route(describe(ids), slots, **case.sizes)  # type: ignore[arg-type]
    assert not [entry for entry in cuda.log if entry[0] == "launch"]


def test_the_one_in_host_memory_is_named_where_others_are_on_a_device(cuda: FakeCuda) -> None:
    case = random_case(1, 20, 2, 4, 3)
    ids, slots = case.topk_ids, case.token_to_slot
    host = reference.route(ids, slots, **case.sizes)  # type: ignore[arg-type]
    x, routing = _array(20, 8), fake(host)
    for first in (x, ArrayView(x.ctypes.data, (20, 8), "f2", "cpu"), Producer(x)):
        with pytest.raises(
            ArgumentError,
            match=r"^x is in host memory, but routing.row_to_pair is on a device; copy x to the de",
        ):
            ops.permute_rows(first, routing)
    for there in (own(slots), describe(slots), Producer(slots, device=(CUDA, 0))):
        with pytest.raises(ArgumentError, match="topk_ids is in host memory, but token_to_slot is"):
            ops.route(topk_ids=ids, token_to_slot=there, **case.sizes)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^x has shape"):
        ops.permute_rows(x[0], host)
    assert cuda.log == []


def test_bundles_of_foreign_arrays_are_taken_apart_and_come_back_as_given(cuda: FakeCuda) -> None:
    case = random_case(1, 20, 2, 4, 3)
    host = reference.route(case.topk_ids, case.token_to_slot, **case.sizes)  # type: ignore[arg-type]
    arrays = {f: getattr(host, f) for f in ("row_to_pair", "pair_to_row")}
    foreign = dataclasses.replace(host, **{f: describe(a) for f, a in arrays.items()},
                                  expert_first_token_offset=describe(
                                      host.expert_first_token_offset))  # fmt: skip
    ids, slots = own(case.topk_ids), own(case.token_to_slot)
    assert ops.route(ids, slots, **case.sizes, out=foreign) is foreign  # type: ignore[arg-type]
    _, _, arguments = cuda.log[0]
    assert arguments[8:10] == tuple(a.ctypes.data for a in arrays.values())
    fixed = dataclasses.replace(
        foreign, row_to_pair=describe(host.row_to_pair, data=(host.row_to_pair.ctypes.data, True))
    )
    with pytest.raises(ArgumentError, match=r"out.row_to_pair is exported as read-only"):
        ops.route(ids, slots, **case.sizes, out=fixed)  # type: ignore[arg-type]


def test_scratch_and_the_error_word_may_be_foreign(cuda: FakeCuda) -> None:
    case = random_case(1, 9000, 1, 8, 4)
    ids, slots = describe(case.topk_ids), describe(case.token_to_slot)
    size = ops.route_workspace_bytes(9000, 8, 4)
    room, word = np.zeros(size + 16, np.uint8), np.zeros(1, np.int32)
    room = room[-room.ctypes.data % 16 :][:size]
    signed = describe(room.view(np.int8))  # as a Buffer of cuda.core
    ops.route(ids, slots, **case.sizes, workspace=signed, status=describe(word))  # type: ignore[arg-type]
    _, kernel, arguments = cuda.log[0]
    assert kernel == "sort/digit_histogram"
    assert room.ctypes.data in arguments
    assert arguments[-1] == word.ctypes.data
    fixed = describe(word, data=(word.ctypes.data, True))
    with pytest.raises(ArgumentError, match="status is exported as read-only"):
        ops.route(ids, slots, **case.sizes, workspace=describe(room), status=fixed)  # type: ignore[arg-type]


def test_a_view_on_a_device_has_its_consumer_wait(cuda: FakeCuda) -> None:
    array = _array(2)
    view = ArrayView(array.ctypes.data, (2,), "f2", 0, stream=THEIRS)
    assert view.__dlpack_device__() == (CUDA, 0)
    view.__dlpack__(stream=OURS)
    assert cuda.log == [("record", THEIRS), ("wait", OURS, THEIRS)]
    view.__dlpack__(stream=-1)
    with cuda.stream(THEIRS):
        of_ours = ArrayView.of(own(array[::-1]))
    assert (of_ours.pointer, of_ours.strides, of_ours.device) == (array.ctypes.data + 2, (-2,), 0)
    assert of_ours.stream is cuda.stream(THEIRS), "where it was made"
    ArrayView(array.ctypes.data, (2,), "f2", 0).__dlpack__(stream=OURS)
    assert len(cuda.log) == 2
