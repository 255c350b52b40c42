"""Host arrays of other libraries through DLPack: same memory, right values, given back once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from backend_util import jax_on
from dlpack_producer import Producer
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora import ops
from cupylora.backend import NumpyBackend
from cupylora.dtypes import BFLOAT16
from cupylora.errors import ArgumentError
from cupylora.interop import export
from cupylora.interop.convert import borrow
from cupylora.interop.view import ArrayView

DTYPES = (BFLOAT16, *map(np.dtype, ("f2", "f4", "f8", "i1", "i4", "i8", "u1", "u2", "u8", "?")))
READ_ONLY, COPIED = 1, 2


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Views into a buffer: offset to the byte, strided, reversed, broadcast, empty, of no axis."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    steps = [draw(st.sampled_from((1, 2, 3, -1, -2))) for _ in shape]
    whole = [max(1, n) * abs(step) for n, step in zip(shape, steps, strict=True)]
    offset = draw(st.integers(0, 9))  # of bytes: often not aligned to an element
    size = int(np.prod(whole)) * dtype.itemsize
    room = np.arange(offset + size, dtype=np.uint8)
    found = room[offset : offset + size].view(dtype).reshape(whole)
    found = found[(..., *(slice(None, None, step) for step in steps))]
    found = found[(..., *(slice(n) for n in shape))]
    if shape and shape[0] == 1 and draw(st.booleans()):
        found = np.broadcast_to(found, (3, *shape[1:]))
    axes = draw(st.permutations(range(found.ndim)))
    return found.transpose(axes)


@settings(max_examples=300, deadline=None)
@given(arrays(), st.booleans(), st.sampled_from((0, 1, 8)))
def test_any_view_is_seen_where_it_is(array: np.ndarray, versioned: bool, offset: int) -> None:
    producer = Producer(array, versioned=versioned, byte_offset=offset)
    taken = borrow("x", producer, on_device=False)
    assert (taken.dtype, taken.shape) == (array.dtype, array.shape)
    if array.size:
        assert taken.ctypes.data == array.ctypes.data
        used = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
        assert [taken.strides[axis] for axis in used] == [array.strides[axis] for axis in used]
    assert taken.tobytes() == array.tobytes()
    assert taken.flags.c_contiguous == array.flags.c_contiguous
    part = taken[..., :1] if array.ndim else taken
    assert producer.deleted == (0 if array.size else 1)
    del taken
    assert producer.deleted == (0 if array.size else 1), "a view of the view still needs it"
    del part
    assert producer.deleted == 1


@given(arrays(), st.sampled_from([(READ_ONLY, (1, 0)), (COPIED, (1, 1)), (0, (2, 0))]))
@settings(max_examples=50, deadline=None)
def test_what_is_refused_is_given_back_once(array: np.ndarray, says: Any) -> None:
    flags, version = says
    producer = Producer(array, flags=flags, version=version)
    with pytest.raises(ArgumentError, match=r"^y (is exported as|was copied)"):
        borrow("y", producer, on_device=False, written=True)
    assert producer.deleted == 1


def _bf16(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(BFLOAT16)


def test_a_strideless_capsule_is_in_c_order() -> None:
    array = _bf16(3, 4)
    taken = borrow("x", Producer(array, c_order=True), on_device=False)
    assert taken.strides == array.strides
    assert taken.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "knows", [("stream", "max_version", "copy"), ("stream", "max_version"), ("stream",), ()]
)
def test_producers_of_every_age_are_asked_as_they_understand(knows: tuple[str, ...]) -> None:
    producer = Producer(_bf16(2), knows=knows)
    borrow("x", producer, on_device=False)
    assert producer.deleted == 1
    asked = producer.asked[-1]
    assert asked == {
        name: value
        for name, value in {"max_version": (1, 0), "copy": False}.items()
        if name in knows
    }
    read_only = Producer(_bf16(2), knows=knows, flags=READ_ONLY)
    assert borrow("x", read_only, on_device=False).flags.writeable == ("max_version" not in knows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": (2, 0)}, r"x is exported as DLPack 2\.0; 1\.x is understood"),
        ({"flags": COPIED}, "x was copied by its producer"),
        ({"code": 3}, r"x has an element type that is not understood \(DLPack code 3, 16 bits"),
        ({"lanes": 2}, "x has an element type .* 2 lanes"),
        ({"device": (2, 1)}, "x is on CUDA device 1; copy it to the host"),
        ({"device": (13, 0)}, "x is in managed memory of CUDA device 0; copy it to the host"),
        ({"device": (10, 0)}, r"x is on a device of another make \(DLPack type 10"),
        ({"error": BufferError("it needs a gradient")}, "x is a Producer .*it needs a gradient"),
        ({"capsule": 7}, "x: its __dlpack__ gave what is no DLPack capsule, a int"),
    ],
)
def test_refusals_name_argument_reason_and_remedy(options: Any, message: str) -> None:
    producer = Producer(_bf16(4), **options)
    with pytest.raises(ArgumentError, match=message):
        borrow("x", producer, on_device=False)
    assert producer.deleted == len(producer._kept), "every capsule that was given is given back"


def test_a_capsule_is_taken_once() -> None:
    producer = Producer(_bf16(4))
    producer.capsule = producer.export(versioned=True)
    first = borrow("x", producer, on_device=False)
    with pytest.raises(ArgumentError, match="x: its __dlpack__ gave a capsule that was consumed"):
        borrow("x", producer, on_device=False)
    assert producer.deleted == 0, "the first still holds it"
    del first
    assert producer.deleted == 1


def test_pinned_host_memory_is_host_memory() -> None:
    array = _bf16(3)
    taken = borrow("x", Producer(array, device=(3, 0)), on_device=False)
    assert taken.ctypes.data == array.ctypes.data


def test_read_only_memory_may_be_read() -> None:
    taken = borrow("x", Producer(_bf16(3), flags=READ_ONLY), on_device=False)
    assert not taken.flags.writeable


def test_an_array_of_a_library_whose_arrays_never_change_is_no_output() -> None:
    class Array(Producer):
        pass

    Array.__module__ = "jaxlib._jax"
    with pytest.raises(ArgumentError, match="y is an array of jaxlib, which may not be written"):
        borrow("y", Array(_bf16(3)), on_device=False, written=True)
    assert borrow("y", Array(_bf16(3)), on_device=False).shape == (3,)


# --- views by address ----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(arrays())
def test_an_array_view_is_what_lies_there(array: np.ndarray) -> None:
    view = ArrayView(
        array.ctypes.data, array.shape, array.dtype, device="cpu", strides=array.strides
    )
    taken = borrow("x", view, on_device=False)
    assert taken.dtype == array.dtype
    assert taken.tobytes() == array.tobytes()
    if array.size:
        assert taken.ctypes.data == array.ctypes.data


def test_a_view_keeps_its_owner() -> None:
    class Owner:
        pass

    owner, array = Owner(), _bf16(2, 2)
    gone: list[str] = []
    weakref.finalize(owner, gone.append, "gone")
    taken = borrow("x", ArrayView(array.ctypes.data, (2, 2), "bfloat16", "cpu", owner=owner),
                   on_device=False)  # fmt: skip
    del owner
    gc.collect()
    assert not gone
    del taken
    gc.collect()
    assert gone


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pointer": 0}, "ArrayView.pointer is 0; an address"),
        ({"pointer": -8}, "ArrayView.pointer is -8"),
        ({"pointer": None}, "ArrayView.pointer is None; an integer"),
        ({"pointer": True}, "ArrayView.pointer is True; an integer"),
        ({"shape": 3}, "ArrayView.shape is 3; a tuple"),
        ({"shape": (-1,)}, r"ArrayView.shape is \(-1,\); extents of 0 or more"),
        ({"shape": (1.5,)}, r"ArrayView.shape\[0\] is 1.5; an integer"),
        ({"strides": (2,)}, r"ArrayView.strides is \(2,\) for shape \(2, 2\)"),
        ({"dtype": "bf16"}, "ArrayView.dtype is 'bf16'"),
        ({"dtype": None}, "ArrayView.dtype is None"),
        ({"dtype": object}, "ArrayView.dtype is <class 'object'>; a type of numbers"),
        ({"dtype": "V4"}, "ArrayView.dtype is 'V4'"),
        ({"dtype": ">f4"}, "ArrayView.dtype is '>f4'"),
        ({"device": -1}, 'ArrayView.device is -1; "cpu" or a number'),
        ({"device": "cuda"}, "ArrayView.device is 'cuda'; an integer"),
    ],
)
def test_a_view_that_cannot_be_is_refused_by_its_field(fields: Any, message: str) -> None:
    sound = {"pointer": 4096, "shape": (2, 2), "dtype": "f4", "device": "cpu"}
    with pytest.raises(ArgumentError, match=message):
        ArrayView(**(sound | fields))


def test_read_only_and_device_views_are_refused_where_they_cannot_serve() -> None:
    array = _bf16(2)
    fixed = ArrayView(array.ctypes.data, (2,), "bfloat16", "cpu", writable=False)
    with pytest.raises(ArgumentError, match="y is exported as read-only; a writable"):
        borrow("y", fixed, on_device=False, written=True)
    assert not borrow("y", fixed, on_device=False).flags.writeable
    with pytest.raises(ArgumentError, match="y is on CUDA device 0; copy it to the host"):
        borrow("y", ArrayView(4096, (2,), "bfloat16", 0), on_device=False)


# --- through ops ---------------------------------------------------------------------------------


def test_a_result_goes_where_the_caller_says_and_comes_back_as_given() -> None:
    x = np.linspace(-2, 2, 24, dtype=np.float32).astype(BFLOAT16).reshape(3, 8)
    expected = ops.activation(x, kind="silu", gated=True)
    room = np.zeros((3, 4), BFLOAT16)
    source, target = Producer(x), Producer(room)
    assert ops.activation(source, kind="silu", gated=True, out=target) is target
    np.testing.assert_array_equal(room, expected)
    assert (source.deleted, target.deleted) == (1, 1)
    mine = ops.activation(Producer(x), kind="silu", gated=True)
    assert type(mine) is np.ndarray
    np.testing.assert_array_equal(mine, expected)


def test_what_does_not_fit_is_named_and_given_back() -> None:
    x, small, fixed = Producer(_bf16(3, 8)), Producer(_bf16(2, 4)), Producer(_bf16(3, 4), flags=1)
    with pytest.raises(ArgumentError, match=r"out has shape \(2, 4\); \[3, 4\]"):
        ops.activation(x, kind="silu", gated=True, out=small)
    with pytest.raises(ArgumentError, match="out is exported as read-only"):
        ops.activation(x, kind="silu", gated=True, out=fixed)
    turned = Producer(_bf16(8, 3).T)
    with pytest.raises(ArgumentError, match=r"x of shape .* is not C-contiguous"):
        ops.activation(turned, kind="silu", gated=True)
    gc.collect()
    assert (x.deleted, small.deleted, fixed.deleted, turned.deleted) == (2, 1, 1, 1)


def test_arguments_given_twice_or_too_many_are_refused_as_by_any_function() -> None:
    x = Producer(_bf16(3, 8))
    with pytest.raises(TypeError, match="multiple values"):
        ops.activation(x, x=x, kind="silu", gated=True)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        ops.activation(x, x, kind="silu", gated=True)  # type: ignore[misc]


def test_a_backend_views_what_many_calls_are_given() -> None:
    here, array = NumpyBackend(), _bf16(4, 4)
    producer = Producer(array.T)
    view = here.view(producer, "weights")
    assert type(view) is np.ndarray
    assert view.ctypes.data == array.ctypes.data
    assert here.view(view) is view
    with pytest.raises(ArgumentError, match="weights is a list; a NumPy or CuPy array is needed"):
        here.view([1], "weights")
    with pytest.raises(ArgumentError, match="weights is exported as read-only"):
        here.view(Producer(array, flags=1), "weights", writable=True)
    assert producer.deleted == 0
    del view
    assert producer.deleted == 1


# --- out again -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(arrays(), st.booleans())
def test_a_view_exports_what_it_is(array: np.ndarray, versioned: bool) -> None:
    """Read back by the import here, which is tested on a producer by hand."""
    if any(stride % array.itemsize for stride in array.strides):
        return
    view = ArrayView.of(array)
    if not (versioned or array.flags.writeable):
        with pytest.raises(ArgumentError, match=r"read-only, which DLPack before 1\.0 cannot"):
            view.__dlpack__()
        return
    taken = borrow("x", _Other(view, versioned), on_device=False)
    assert (taken.dtype, taken.shape) == (array.dtype, array.shape)
    assert taken.tobytes() == array.tobytes()
    if array.size:
        assert taken.ctypes.data == array.ctypes.data
        assert taken.flags.writeable == array.flags.writeable
    del taken
    assert not export._live


class _Other:
    """A view as another library's array would be."""

    def __init__(self, view: ArrayView, versioned: bool) -> None:
        self.view, self.versioned = view, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.view.__dlpack__(**(options if self.versioned else {}))


def test_an_exported_array_lives_as_long_as_its_importer() -> None:
    array = np.zeros((2, 3), np.float32)
    array[...] = [[0, 1, 2], [3, 4, 5]]
    address = array.ctypes.data
    imported = np.from_dlpack(ArrayView.of(array[:, ::-1]))  # type: ignore[arg-type]
    gone = weakref.ref(array)
    expected = array[:, ::-1].tobytes()
    del array
    gc.collect()
    assert gone() is not None
    assert imported.ctypes.data == address + 8
    assert imported.tobytes() == expected
    del imported
    gc.collect()
    assert gone() is None


def test_a_capsule_that_nobody_takes_is_given_back() -> None:
    capsules = [ArrayView.of(_bf16(3)).__dlpack__(max_version=v) for v in (None, (1, 0))]
    assert len(export._live) == 2
    del capsules
    assert not export._live


def test_a_view_is_exported_where_it_is_or_not_at_all() -> None:
    view = ArrayView.of(_bf16(3))
    for options in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="exported where it is, without a copy"):
            view.__dlpack__(**options)
    with pytest.raises(ArgumentError, match=r"complex64 .* has no form in DLPack"):
        ArrayView.of(np.zeros(2, np.complex64)).__dlpack__()


# --- frameworks, where they are installed --------------------------------------------------------


def _activation(x: Any, **options: Any) -> Any:
    return ops.activation(x, kind="silu", gated=True, **options)


def test_pytorch_on_the_host() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    x, out = torch.randn(4, 64).bfloat16(), torch.empty(4, 32, dtype=torch.bfloat16)
    seen = borrow("x", x, on_device=False)
    assert (seen.dtype, seen.ctypes.data) == (BFLOAT16, x.data_ptr())
    expected = _activation(seen)
    assert _activation(x, out=out) is out
    assert out.view(torch.int16).numpy().tobytes() == expected.tobytes()
    back = torch.from_dlpack(ArrayView.of(expected))
    assert (back.dtype, back.data_ptr()) == (torch.bfloat16, expected.ctypes.data)
    for wrong, message in (
        (x.float().requires_grad_(), "require gradient.*or an ArrayView"),
        (torch.randn(64, 4).t(), "not C-contiguous"),
        (torch.empty(4, 64, device="meta"), "does not tell its device"),
    ):
        with pytest.raises(ArgumentError, match=f"x .*{message}"):
            _activation(wrong)


def test_jax_on_the_host() -> None:
    with jax_on("cpu") as jax:
        x = jax.numpy.ones((4, 64), BFLOAT16) * 3
        seen = borrow("x", x, on_device=False)
        assert (seen.dtype, seen.ctypes.data) == (BFLOAT16, x.unsafe_buffer_pointer())
        expected = _activation(seen)
        assert _activation(x).tobytes() == expected.tobytes()
        back = jax.dlpack.from_dlpack(ArrayView.of(expected))
        assert back.dtype == BFLOAT16
        assert np.asarray(back).tobytes() == expected.tobytes()
        with pytest.raises(
            ArgumentError, match=r"out is an array of jax.*, which may not be written"
        ):
            _activation(x, out=jax.numpy.zeros((4, 32), BFLOAT16))


# --- producers that lie ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"device_type": 2}, "its capsule says"),
        ({"ndim": 33}, "33 dimensions"),
        ({"ndim": 100_000_000}, "100000000 dimensions"),
        ({"ndim": -3}, "-3 dimensions"),
        ({"shape": 0}, "shape at 0x0"),
        ({"byte_offset": 2**64 - 8}, "leads beyond all addresses"),
    ],
)
def test_capsules_that_say_what_cannot_be(lies: dict[str, int], message: str) -> None:
    producer = Producer(_bf16(3, 4), lies=lies)
    with pytest.raises(ArgumentError, match=message):
        borrow("x", producer, on_device=False)
    assert producer.deleted == 1


@pytest.mark.parametrize("kind", ["shape", "strides"])
def test_sizes_beyond_all_addresses(kind: str) -> None:
    array = _bf16(2, 4)
    address = array.ctypes.data
    far = {"shape": (2**62, 4), "strides": (2**62, 2)}[kind]
    shape, strides = (far, None) if kind == "shape" else ((5, 4), far)
    with pytest.raises(ArgumentError, match="beyond all addresses"):
        ArrayView(address, shape, "bfloat16", "cpu", strides)
    with pytest.raises(ArgumentError, match="at most 32"):
        ArrayView(address, (1,) * 33, "bfloat16", "cpu")
    with pytest.raises(ArgumentError, match="beyond all addresses"):
        ArrayView(2**64, (1,), "bfloat16", "cpu")
    with pytest.raises(ArgumentError, match="beyond all addresses"):
        ArrayView(address, (3,), "bfloat16", "cpu", (-(2**61),))
    assert ArrayView(address + 6, (4,), "bfloat16", "cpu", (-2,)).shape == (4,)
    for device in (2**40, -1, True, np.array([1, 2])):
        with pytest.raises(ArgumentError, match=r"ArrayView\.device"):
            ArrayView(address, (1,), "bfloat16", device)
    with pytest.raises(ArgumentError, match="array is a list"):
        ArrayView.of([1, 2])


class Odd:
    """Somebody else's class, whose every answer is an exception."""

    __module__ = None  # type: ignore[assignment]

    @property
    def __dlpack__(self) -> Any:
        raise RuntimeError("no")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("never")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("cannot say")


def test_exceptions_of_producers_become_ours() -> None:
    for value in (
        Odd(),
        Producer(_bf16(2), error=UnspeakableError()),
        Producer(_bf16(2), capsule=object()),
    ):
        with pytest.raises(ArgumentError):
            borrow("x", value, on_device=False)


def test_arrays_that_may_not_change_are_viewed_read_only() -> None:
    """JAX's capsules do not say it."""
    kind = type("Array", (Producer,), {"__module__": "jaxlib.xla_extension"})
    array = np.zeros((2, 8), np.float32)
    view = NumpyBackend().view(kind(array))
    assert not view.flags.writeable
    x = np.ones((2, 16), np.float32)
    with pytest.raises(ArgumentError, match="read-only"):
        ops.activation(x, kind="silu", gated=True, out=view)
    assert not array.any()
