"""Arrays of a step that stay where they are: a captured graph uses them at every replay.

Each is as large as the largest bucket needs; a step works on views of its first tokens. The host
writes a batch's values into them before the step (``x``, router choices), all but
``token_to_slot``, which comes from host memory through ``staging``. Rows beyond the batch's own are
padding: where a buffer has a ``pad`` value they are set to it again before every step, so that no
graph sees the rows of a batch before.

In: shapes, once. Out: views, and where padding lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cupylora.backend import ArrayBackend, total_bytes
from cupylora.checks import check_array, check_choice, check_int, check_type
from cupylora.dtypes import DTYPES
from cupylora.errors import ArgumentError, GraphError
from cupylora.interop.convert import borrow
from cupylora.worklists import MAX_ROWS, Array

__all__ = ["BATCH_HEAD", "PAD_RUN", "StepBuffers", "StepViews"]

SLOTS = "token_to_slot"

BATCH_HEAD = 4
"""int32 before the slots, of which the first is the batch's tokens: 16 bytes, so that the slots
stay aligned."""

Pad = Literal[-1, 0]
"""Value of padding rows: -1 in integers ("no adapter", "no expert"), or 0 in anything."""

PAD_RUN = np.dtype([("rows", "u8"), ("row_bytes", "u8"), ("word", "u8")])
"""A buffer's rows, or those of one of its layers, whose padding is set: PadRun of step/pad.cu."""


@dataclass(frozen=True)
class _Buffer:
    """token_axis: 0, or 1 behind a leading axis (layers). pad: of padding rows, if anything."""

    array: Array
    token_axis: int
    pad: Pad | None

    def view(self, tokens: int) -> Array:
        return self.array[:tokens] if self.token_axis == 0 else self.array[:, :tokens]

    @property
    def row_bytes(self) -> int:
        shape: tuple[int, ...] = self.array.shape[self.token_axis + 1 :]
        return math.prod(shape) * int(self.array.dtype.itemsize)


class StepViews(Mapping[str, Array]):
    """The buffers' first ``num_tokens`` tokens, by name. Views are made once and kept."""

    def __init__(self, buffers: Mapping[str, _Buffer], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._buffers = buffers
        self._views: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        found = self._views.get(name)
        if found is None:
            if name not in self._buffers:
                known = ", ".join(self._buffers)
                raise ArgumentError(f"the step has no buffer {name!r}; it has {known}")
            found = self._views[name] = self._buffers[name].view(self.num_tokens)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)


class StepBuffers:
    """Named arrays for up to ``max_tokens`` tokens, ``token_to_slot`` among them from the start.

    Once ``seal`` was called (something was captured), no buffer can be added: graphs hold
    addresses, and sizes were decided with what there was.
    """

    def __init__(self, backend: ArrayBackend, max_tokens: int) -> None:
        check_type("backend", backend, ArrayBackend)
        self.backend = backend
        self.max_tokens = check_int("max_tokens", max_tokens, 1, MAX_ROWS)
        self._buffers: dict[str, _Buffer] = {}
        self._views: dict[int, StepViews] = {}
        self._sealed = False
        self.batch = backend.zeros((BATCH_HEAD + max_tokens,), np.int32)
        """The batch's head and ``token_to_slot`` behind it: one copy brings both."""
        self.batch.fill(-1)
        self._buffers[SLOTS] = _Buffer(self.batch[BATCH_HEAD:], 0, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return total_bytes(buffer.array for buffer in self._buffers.values())

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        layers: int | None = None,
        pad: Pad | None = None,
        array: Array | None = None,
    ) -> Array:
        """A new buffer [max_tokens, *shape], or [layers, max_tokens, *shape]; returns all of it.

        pad: what padding rows are set to before each step, -1 (integers only) or 0; None: they
        keep what they hold. That is also what the buffer holds at first, zeros without ``pad``.
        array: memory of the host's own to be the buffer, of any library, C-contiguous, writable
        and of that very shape; it keeps what it holds, is kept as long as the buffers, and must not
        move. Raises ArgumentError for a name that is taken, an array or a pad that cannot be,
        GraphError once sealed, CapacityError where there is no memory.
        """
        check_type("name", name, str)
        self.require_open(f"buffer {name!r}")
        if name in self._buffers:
            raise ArgumentError(f"the step has a buffer {name!r} already")
        if not isinstance(shape, tuple):
            raise ArgumentError(
                f"shape is {shape!r}; a tuple is needed, of what follows the tokens, such as (64,)"
            )
        for index, extent in enumerate(shape):
            check_int(f"shape[{index}]", extent, 1)
        kind = _numeric(dtype)
        check_choice("pad", pad, (None, -1, 0))
        if isinstance(pad, float) or (pad == -1 and kind.kind != "i"):
            raise ArgumentError(f"pad is {pad} for buffer {name!r} of {kind}; use 0 or None")
        leading = () if layers is None else (check_int("layers", layers, 1),)
        whole = (*leading, self.max_tokens, *shape)
        made = self._new(whole, kind, pad) if array is None else self._given(array, whole, kind)
        self._buffers[name] = _Buffer(made, len(leading), pad)
        self._views.clear()
        return made if array is None else array

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[Any], pad: Pad | None) -> Array:
        made = self.backend.zeros(shape, dtype)
        if pad == -1:
            made.fill(-1)
        return made

    def _given(self, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        on_device = self.backend.on_device
        taken = borrow("array", array, on_device=on_device, written=True)
        check_array("array", taken, dtype=dtype, shape=shape, writable=True, on_device=on_device)
        return taken

    def views(self, num_tokens: int) -> StepViews:
        """The first ``num_tokens`` tokens of every buffer."""
        found = self._views.get(num_tokens)
        if found is None:
            check_int("num_tokens", num_tokens, 1, self.max_tokens)
            found = self._views[num_tokens] = StepViews(self._buffers, num_tokens)
        return found

    def whole(self, name: str) -> Array:
        """All of a buffer."""
        return self._buffers[name].array

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._buffers)

    def pad(self, num_tokens: int, bucket: int) -> None:
        """In host memory, set rows ``num_tokens`` to ``bucket`` of the buffers that have a ``pad``
        to it, but for ``token_to_slot``."""
        for buffer in self._padded():
            rows = buffer.array.swapaxes(0, buffer.token_axis)
            rows[num_tokens:bucket] = buffer.pad

    def pad_runs(self) -> npt.NDArray[Any]:
        """PAD_RUN of what ``pad`` sets, for the kernel that does so."""
        runs = [run for buffer in self._padded() for run in self._runs(buffer)]
        return np.array(runs, PAD_RUN)

    def seal(self) -> None:
        """Refuse to grow from now on."""
        self._sealed = True

    def unseal(self) -> None:
        """No graph holds these addresses any more."""
        self._sealed = False

    def require_open(self, what: str) -> None:
        """Raise GraphError if sealed. what: that which would grow."""
        if self._sealed:
            raise GraphError(
                f"{what} cannot be made or grow: graphs were captured with the memory there is; "
                "make it before the first capture, or call release_graphs() first"
            )

    def _padded(self) -> list[_Buffer]:
        return [b for name, b in self._buffers.items() if b.pad is not None and name != SLOTS]

    def _runs(self, buffer: _Buffer) -> Iterator[tuple[int, int, int]]:
        row, first = buffer.row_bytes, self.backend.address(buffer.array)
        word = 0xFFFFFFFF if buffer.pad else 0
        for layer in range(buffer.array.shape[0] if buffer.token_axis else 1):
            yield first + layer * self.max_tokens * row, row, word


def _numeric(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype of numbers, those of ml_dtypes included. Raises ArgumentError for any other."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"dtype is {dtype!r}, which is none: {error}") from error
    if dtype is None or kind.kind not in "biufV" or kind.type is np.void:
        raise ArgumentError(f"dtype is {dtype!r}; one of numbers is needed")
    return kind
