"""Checks that the layers share, made before anything is enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupylora.backend import ArrayBackend
from cupylora.checks import check_array, check_int, check_type
from cupylora.errors import ArgumentError
from cupylora.interop.convert import borrow
from cupylora.interop.kinds import OWN_TYPES
from cupylora.layers.plan import BatchPlan
from cupylora.shapes import MAX_RANK
from cupylora.worklists import Array

__all__ = ["ArrayChecks", "check_items", "check_plan", "check_sizes"]


def check_items(name: str, value: Any) -> Sequence[Any]:
    """``value`` is a list or a tuple, which can be looked at more than once."""
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"{name} is a {type(value).__name__}; a list or tuple is needed")
    return value


def check_sizes(max_tokens: Any, max_rank: Any) -> None:
    """What a layer's workspace is sized for."""
    check_int("max_tokens", max_tokens, 0)
    check_int("max_rank", max_rank, 1, MAX_RANK)


class ArrayChecks:
    """``check_array`` for one layer: arrays of its dtype unless said otherwise, where it lives.

    Each returns the array to work with: a view of ours of one that is another library's.
    """

    def __init__(self, backend: ArrayBackend, dtype: np.dtype[Any]) -> None:
        self._on_device, self._dtype = backend.on_device, dtype

    def read(
        self, name: str, array: Array, *shape: int | None, dtype: np.dtype[Any] | None = None
    ) -> Array:
        """``array`` is C-contiguous and of ``shape``."""
        return self._check(name, array, shape, dtype, writable=False)

    def read_if(self, name: str, array: Array | None, *shape: int | None) -> Array | None:
        """The same for one that may be left out."""
        return None if array is None else self._check(name, array, shape, None, writable=False)

    def written(self, name: str, array: Array, *shape: int | None) -> Array:
        """The same as ``read``, of the layer's dtype and writable."""
        return self._check(name, array, shape, None, writable=True)

    def _check(
        self,
        name: str,
        array: Array,
        shape: tuple[int | None, ...],
        dtype: np.dtype[Any] | None,
        *,
        writable: bool,
    ) -> Array:
        if type(array) not in OWN_TYPES:
            array = borrow(name, array, on_device=self._on_device, written=writable)
        check_array(
            name,
            array,
            dtype=dtype or self._dtype,
            shape=shape,
            writable=writable,
            on_device=self._on_device,
        )
        return array


def check_plan(plan: BatchPlan, max_loras: int) -> None:
    """A plan made for this layer's slots."""
    check_type("plan", plan, BatchPlan)
    if plan.max_loras != max_loras:
        raise ArgumentError(
            f"plan is made for {plan.max_loras} slots, but the layer's entries have {max_loras}"
        )
