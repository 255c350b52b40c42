"""Which kernel serves a call of ``lora_delta``, and in what shape: by sizes known at capture, never
by the batch's content.

In: the sizes of a call (:class:`Workload`). Out: a kernel name, and for the fused kernels how many
CTAs share an item and how its columns are cut (:class:`FusedShape`). No choice changes a result:
the order of every sum follows from K alone (lora/k_order.cuh).

The rule, measured on an H200 (4.3 TB/s):

* A node that moves up to ``CLUSTER_BYTES`` is bound by latency: the cluster kernel.
* More bytes in small tiles: the ring, which keeps the memory busy.
* The pair: tiles and ranks that the others have no instance for (``_TILE_ROWS``), so ranks above
  64, large tiles of ranks above 32, and devices other than of compute capability 9.x.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from cupylora.errors import ArgumentError

__all__ = [
    "Choice",
    "FusedShape",
    "KernelName",
    "Workload",
    "choose",
    "cluster_shape",
    "cluster_sum_bytes",
    "k_ranges",
    "ring_shape",
]

KernelName = Literal["pair", "cluster", "ring"]
Choice = Literal["auto", "pair", "cluster", "ring"]

CLUSTER_BYTES = 9.5e6
_TILE_ROWS = {"cluster": {8: 64}, "ring": {8: 64, 16: 32}}
"""Rows of a tile -> largest max_rank, for each fused kernel."""

_ITEMSIZE = 2
_ITEM_LIMIT = 2**30
_MAX_CLUSTER = 8
_RANGE_FEATURES, _MOST_RANGES = 192, 16
"""Of K: features that a range has at least, and ranges, as KOrder in lora/k_order.cuh has them."""

_SHORT_SHARE, _LONG_SHARE = 512, 768
"""Of K that a CTA of the cluster kernel has: up to so much it is not cut further; from so much on
it is cut even if that takes the whole device."""

_START_BYTES = 16 * 1024
_COLUMN_STEP = 64
_B_BYTES = 16 * 1024
"""Of B that a CTA of the cluster kernel expands; from here on more CTAs gain nothing."""

_B_LIMIT = 96 * 1024
"""Of B in its shared memory at a time."""

_SHARED_LIMIT = 226 * 1024
"""Dynamic shared memory that a CTA may have, less what the kernel declares."""


@dataclass(frozen=True)
class Workload:
    """Sizes of one call. rows: R; active: most distinct adapters; widths: out_features of the
    slices; tile_capacity: room of the tile list."""

    rows: int
    experts: int
    active: int
    in_features: int
    widths: tuple[int, ...]
    max_rank: int
    tile_rows: int
    tile_capacity: int

    @property
    def groups(self) -> float:
        """Expected number of (expert, adapter) groups, if rows fall on all of them alike."""
        places = max(1, self.experts * self.active)
        return places * (1 - (1 - 1 / places) ** self.rows)

    @property
    def tiles(self) -> float:
        """Expected number of row tiles."""
        groups = self.groups
        return min(self.tile_capacity, groups + (self.rows - groups) / self.tile_rows)

    @property
    def bytes(self) -> float:
        """Expected bytes: every group's factors once, x once, y read and written."""
        width = sum(self.widths)
        factors = self.groups * self.max_rank * (self.in_features * len(self.widths) + width)
        return _ITEMSIZE * (factors + self.rows * (self.in_features + 2 * width))


@dataclass(frozen=True)
class FusedShape:
    """cluster: CTAs per item; cta_columns: columns of a slice that one of them expands; clusters:
    in the grid."""

    cluster: int
    cta_columns: int
    clusters: int


def k_ranges(in_features: int) -> int:
    """Ranges that K is cut into, as KOrder in lora/k_order.cuh does: a power of two up to 16."""
    return min(_MOST_RANGES, 1 << (max(1, in_features // _RANGE_FEATURES).bit_length() - 1))


@functools.lru_cache(maxsize=4096)
def choose(work: Workload, *, kernel: Choice, hopper: bool) -> KernelName:
    """The kernel for ``work``; a ``kernel`` other than "auto" asks for that one.

    Raises ArgumentError where the kernel asked for cannot serve.
    """
    if kernel == "pair":
        return "pair"
    if kernel != "auto":
        _check_possible(work, kernel, hopper)
        return kernel
    if not hopper or not _numbered(work):
        return "pair"
    if work.bytes <= CLUSTER_BYTES and _takes("cluster", work):
        return "cluster"
    return "ring" if _takes("ring", work) else "pair"


def _takes(kernel: Literal["cluster", "ring"], work: Workload) -> bool:
    return work.max_rank <= _TILE_ROWS[kernel].get(work.tile_rows, 0)


def _numbered(work: Workload) -> bool:
    """Whether 32 bits number the items, however the columns are cut."""
    parts = sum(-(-width // _COLUMN_STEP) for width in work.widths)
    return work.tile_capacity * parts < _ITEM_LIMIT


def _check_possible(work: Workload, kernel: Literal["cluster", "ring"], hopper: bool) -> None:
    if not hopper:
        raise ArgumentError(
            f"kernel is {kernel!r}, which needs compute capability 9.0; use 'pair' or 'auto'"
        )
    if not _takes(kernel, work):
        limits = " or ".join(
            f"{rows} rows and ranks up to {r}" for rows, r in _TILE_ROWS[kernel].items()
        )
        raise ArgumentError(
            f"kernel is {kernel!r}, which takes tiles of {limits}; this call has tiles of "
            f"{work.tile_rows} rows and max_rank {work.max_rank}: use 'pair' or 'auto'"
        )
    if not _numbered(work):
        raise ArgumentError(f"kernel is {kernel!r}; the work list is too long for it: use 'pair'")


def cluster_shape(work: Workload, blocks: int) -> FusedShape:
    """Shape of the latency kernel on a device that holds ``blocks`` of its CTAs at a time.

    K is shared until a CTA has at most 512 of it, as long as half of the device holds all items
    (the other half is for the node behind, which starts early), or all of it while a share is long.
    Then columns are cut until a CTA has ``_B_BYTES`` of B.
    """
    items = max(1.0, work.tiles) * len(work.widths)
    cluster, most_ranges = 1, min(_MAX_CLUSTER, k_ranges(work.in_features))
    while cluster < most_ranges:
        share = work.in_features / cluster
        room = blocks if share > _LONG_SHARE else blocks / 2
        if share <= _SHORT_SHARE or items * 2 * cluster > room:
            break
        cluster *= 2
    column_bytes = work.max_rank * _ITEMSIZE
    wanted = math.ceil(max(work.widths) * column_bytes / (cluster * _B_BYTES))
    parts = max(1, min(wanted, int(blocks / 2 / (items * cluster))))
    room = min(_B_LIMIT, _SHARED_LIMIT - cluster_sum_bytes(work, cluster))
    fit = max(_COLUMN_STEP, room // column_bytes // _COLUMN_STEP * _COLUMN_STEP)
    columns = min(fit, _cut(max(work.widths), cluster * parts))
    most = work.tile_capacity * _parts(work.widths, cluster * columns)
    return FusedShape(cluster, columns, max(1, min(most, 4 * blocks // cluster)))


def cluster_sum_bytes(work: Workload, cluster: int) -> int:
    """Shared memory of a cluster kernel's CTA for sums: its share of the cells (range, chain), and
    the incoming sums of two items; 8 tokens each, their ranks padded by 4 floats."""
    tiles = 1 if work.max_rank <= 16 else 2 if work.max_rank <= 32 else 4
    blocks = k_ranges(work.in_features) // cluster * 4 + 2 * cluster
    return blocks * 8 * (tiles * 16 + 4) * 4


def ring_shape(work: Workload, clusters_of: dict[int, int]) -> FusedShape:
    """Shape of the ring; ``clusters_of`` says for each cluster size how many the device holds.

    Items go round the clusters, so the time is rounds times what one takes: its share of the bytes,
    and a start that costs as much as ``_START_BYTES`` would.
    """
    slices = len(work.widths)
    items = math.ceil(max(1.0, work.tiles) * slices)
    weights = work.max_rank * (work.in_features + sum(work.widths) / slices) * _ITEMSIZE
    best = min(
        (size for size in clusters_of if size <= k_ranges(work.in_features)),
        key=lambda size: -(-items // clusters_of[size]) * (1 / size + _START_BYTES / weights),
    )
    columns = _cut(max(work.widths), best)
    most = work.tile_capacity * _parts(work.widths, best * columns)
    return FusedShape(best, columns, max(1, min(most, clusters_of[best])))


def _cut(width: int, parts: int) -> int:
    """Columns of each of ``parts`` parts, in whole steps."""
    return -(-width // (parts * _COLUMN_STEP)) * _COLUMN_STEP


def _parts(widths: tuple[int, ...], columns: int) -> int:
    return sum(-(-width // columns) for width in widths)
