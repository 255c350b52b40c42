"""Weights of a point's adapters on a backend, and the slot entries that point at them.

A pool holds ``max_loras`` adapters of one module group for as many layers as the sets of a dense
point need (each set reads a layer of its own), or one MoE block's, as the peers' harness does. A is
made as it lies in an adapter's room, packed: its values are random, so that their order is as good
as any, and ``check`` reads them back through that layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupylora.backend import ArrayBackend
from cupylora.bench.points import Point
from cupylora.dtypes import BFLOAT16
from cupylora.errors import CapacityError
from cupylora.ops.fill_uniform import fill_uniform
from cupylora.text import byte_size
from cupylora.worklists import PACKED, SLOT_ENTRY, Array

__all__ = ["DTYPE", "MOST_BYTES", "Factors", "Pool", "Pools", "free_unused", "random_array", "trim"]

DTYPE: np.dtype[Any] = BFLOAT16

MOST_BYTES = 60_000_000_000
"""Device memory that a pool may take."""

_MUCH_BYTES = 8_000_000_000

_UNIT_SCALE = math.sqrt(3.0)
"""Half-width of a uniform distribution of standard deviation 1."""


def random_array(backend: ArrayBackend, shape: tuple[int, ...], seed: int, deviation: float) -> Any:
    """A new array of DTYPE, uniform around 0 with this standard deviation."""
    return fill_uniform(backend.empty(shape, DTYPE), seed, deviation * _UNIT_SCALE)


@dataclass(frozen=True)
class Factors:
    """One module's factors for every layer, slot and expert.

    a: [layers, slots, E, r, in], packed per [r, in] block. b: [layers, slots, E, out, r].
    """

    a: Array
    b: Array

    @property
    def in_features(self) -> int:
        """Columns of x."""
        return int(self.a.shape[4])

    @property
    def out_features(self) -> int:
        """Columns of the delta."""
        return int(self.b.shape[3])

    def records(self, backend: ArrayBackend, layer: int) -> np.ndarray[Any, Any]:
        """Slot entries [slots] of one layer, scale 1."""
        _, slots, experts, rank, _ = self.a.shape
        table = np.zeros(slots, SLOT_ENTRY)
        for role, factor in (("a", self.a), ("b", self.b)):
            block = factor.shape[3] * factor.shape[4] * DTYPE.itemsize
            first = backend.address(factor) + layer * slots * experts * block
            table[f"{role}_ptr"] = first + np.arange(slots, dtype=np.uint64) * experts * block
            table[f"{role}_expert_stride"] = block if experts > 1 else 0
        table["rank"], table["scale"], table["a_layout"] = rank, 1.0, PACKED
        return table


@dataclass(frozen=True)
class Pool:
    """Factors of modules and their entries.

    entries: uint8 [layers, modules, slots, 48], so that one layer's are what ``lora_delta`` takes
    for all of ``modules``, or for neighbours among them.
    """

    modules: tuple[Factors, ...]
    entries: Array
    layers: int


@dataclass
class Pools:
    """Makes pools and keeps the last, since neighbouring points share one."""

    backend: ArrayBackend
    most_bytes: int = MOST_BYTES
    _key: tuple[Any, ...] = ()
    _pool: Pool | None = field(default=None, repr=False)

    def get(self, point: Point, modules: Sequence[tuple[int, int]], layers: int = 1) -> Pool:
        """A pool of modules (in, out) with at least so many layers.

        Raises CapacityError, with bytes, where it would take more than ``most_bytes`` or is free.
        """
        key = (tuple(modules), point.experts, point.rank, point.max_loras)
        if self._pool is None or key != self._key or self._pool.layers < layers:
            self.drop()
            self._pool, self._key = self._make(point, modules, layers), key
        return self._pool

    def drop(self) -> None:
        """Let go of the pool."""
        self._pool, self._key = None, ()
        free_unused(self.backend)

    def _make(self, point: Point, modules: Sequence[tuple[int, int]], layers: int) -> Pool:
        blocks = layers * point.max_loras * point.experts
        widths = sum(a + b for a, b in modules)
        needed = blocks * point.rank * widths * DTYPE.itemsize
        room = min(self.most_bytes, self.backend.free_bytes())
        if needed > room:
            raise CapacityError(
                f"the adapters of {layers} layers take {byte_size(needed)}, {byte_size(room)} are "
                "to be had; use fewer slots (--max-loras) or a smaller rank"
            )
        made = tuple(
            _factors(self.backend, point, size, layers, 100 + 2 * index)
            for index, size in enumerate(modules)
        )
        records = [[m.records(self.backend, layer) for m in made] for layer in range(layers)]
        table = np.array(records).view(np.uint8)
        shape = (layers, len(made), point.max_loras, SLOT_ENTRY.itemsize)
        return Pool(made, self.backend.asarray(table.reshape(shape)), layers)


def _factors(
    backend: ArrayBackend, point: Point, size: tuple[int, int], layers: int, seed: int
) -> Factors:
    in_features, out_features = size
    lead, rank = (layers, point.max_loras, point.experts), point.rank
    return Factors(
        random_array(backend, (*lead, rank, in_features), seed, in_features**-0.5),
        random_array(backend, (*lead, out_features, rank), seed + 1, rank**-0.5),
    )


def trim(backend: ArrayBackend) -> None:
    """``free_unused`` where it is much: small pieces are had again sooner if they are kept."""
    if backend.on_device and backend.xp.get_default_memory_pool().free_bytes() > _MUCH_BYTES:
        free_unused(backend)


def free_unused(backend: ArrayBackend) -> None:
    """Give memory that no array holds back to the device."""
    if backend.on_device:
        backend.synchronize()
        backend.xp.get_default_memory_pool().free_all_blocks()
