"""Scratch memory of layers: allocated once, for the largest need, and shared by all of them.

Layers run one after the other on one stream, so that a buffer serves each in turn. What a layer
needs follows from its shape (``needs`` of the layer modules); a path that nobody declares gets no
memory. In: needs by buffer name. Out: views of the sizes that a call has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cupylora.backend import ArrayBackend, total_bytes
from cupylora.checks import check_type
from cupylora.errors import CapacityError
from cupylora.ops.lora_delta import lora_workspace_bytes
from cupylora.worklists import Array

__all__ = ["Needs", "Workspace", "lora_needs"]

Needs = Mapping[str, tuple[int, "np.dtype[Any]"]]
"""Buffer name -> (elements, dtype)."""

LORA_BUFFER = "lora"


class Workspace:
    """Named buffers, each as large as the largest of ``needs`` and never moved.

    Views of a (name, shape) are kept, so that asking again makes nothing new.
    """

    def __init__(self, backend: ArrayBackend, needs: Iterable[Needs]) -> None:
        check_type("backend", backend, ArrayBackend)
        sizes: dict[str, tuple[int, np.dtype[Any]]] = {}
        for need in needs:
            for name, (size, dtype) in need.items():
                sizes[name] = (max(size, sizes.get(name, (0, dtype))[0]), dtype)
        self.backend = backend
        self._buffers = {
            name: backend.empty(size, dtype) for name, (size, dtype) in sizes.items() if size
        }
        self._views: dict[tuple[str, tuple[int, ...]], Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return total_bytes(self._buffers.values())

    def view(self, name: str, shape: tuple[int, ...]) -> Array:
        """The first elements of buffer ``name`` as ``shape``, C-contiguous; content undefined.

        Raises CapacityError if the workspace was made without such a need.
        """
        key = (name, shape)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._make(name, shape)
        return found

    def _make(self, name: str, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        have = 0 if buffer is None else buffer.shape[0]
        if buffer is None or have < size:
            raise CapacityError(
                f"workspace buffer {name!r} has {have} elements, {size} are needed; make the "
                "Workspace from the needs of every layer that uses it, for as many tokens"
            )
        return buffer[:size].reshape(shape)

    def lora(self) -> Array | None:
        """The buffer that ``lora_delta`` takes as its workspace; None on NumPy."""
        return self._buffers.get(LORA_BUFFER)


def lora_needs(
    backend: ArrayBackend,
    max_rows: int,
    slices: int,
    in_features: int,
    max_rank: int,
    dtype: np.dtype[Any],
) -> Needs:
    """What ``lora_delta`` needs at any number of rows up to ``max_rows``."""
    if not backend.on_device:
        return {}
    size = lora_workspace_bytes(max(1, max_rows), slices, in_features, max_rank, dtype)
    return {LORA_BUFFER: (size, np.dtype(np.uint8))}
