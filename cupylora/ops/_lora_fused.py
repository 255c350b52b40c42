"""The one-node LoRA deltas: lora/cluster.cu for little work, lora/ring.cu for many weights.

In: checked :class:`LoraInputs`, y, and the kernel that was chosen. Out: one launch. Both kernels
take the same arguments (DeltaArgs of lora/items.cuh) and need no workspace.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cupylora.dtypes import dtype_name
from cupylora.ops._device import (
    active_clusters,
    address,
    current_device,
    enqueue,
    resident_blocks,
    vector_aligned,
)
from cupylora.ops._lora_call import ROW_INDEX, LoraInputs, pack_slices, vector_columns
from cupylora.ops._lora_choice import (
    FusedShape,
    Workload,
    cluster_shape,
    cluster_sum_bytes,
    k_ranges,
    ring_shape,
)
from cupylora.reference._rows import RowIndex
from cupylora.worklists import SLOT_ENTRY_BYTES, TILE_INTS, Array, LoraSlice

__all__ = ["run_fused"]

_ARGUMENTS = ("bytes280",)
_PACK = struct.Struct("@QqQqQQQQQ18i136s")
_CLUSTER_THREADS = 256
_RING_THREADS = 160
_RING_STAGES = 6
_FEW_STAGES = 4
_DEEP_STEPS, _DEEP_CTAS = 4, 64
"""Of the cluster kernel's instance with four chunks in flight: steps of a warp, so that it has as
many chunks, and CTAs: one takes an SM's registers, and of 128 in clusters of 8 some wait for a
place, which costs more than the instance gains. These leave half of an H200 to the node behind."""

_STATIC_SHARED = 128
_RANK_TILE = 16
_SHARED_PER_SM = 228 * 1024
_SHARED_PER_BLOCK = 1024
_CHAINS = 4
_CHUNK = 64
_CLUSTER_WARPS = 8
_TOKENS = 8
_Y_ELEMENT, _Y_PAIR, _Y_PIECE = 0, 1, 2


def run_fused(
    inputs: LoraInputs,
    y: Array,
    slices: Sequence[LoraSlice],
    y_rows: RowIndex,
    kernel: Literal["cluster", "ring"],
    work: Workload,
    shape: FusedShape | None = None,
) -> None:
    """Enqueue the delta; ``shape`` overrides the one that the sizes ask for."""
    dtype = dtype_name(y.dtype)
    device = None if shape else current_device()
    made = _settings(device, work, dtype, kernel, shape)
    shape = made.shape
    packed, _ = pack_slices(slices, shape.cluster * shape.cta_columns)
    routing = inputs.routing
    record = _PACK.pack(
        address(inputs.x),
        inputs.in_features,
        address(y),
        y.shape[1],
        address(routing.row_to_pair),
        address(inputs.segments.tiles),
        address(inputs.segments.tile_count),
        address(inputs.entries),
        inputs.status,
        ROW_INDEX[inputs.x_rows],
        ROW_INDEX[y_rows],
        routing.top_k,
        max(1, routing.num_tokens),
        int(routing.row_order == "k_major"),
        inputs.slices,
        inputs.max_loras,
        routing.start_expert,
        inputs.in_features,
        inputs.max_rank,
        shape.clusters,
        shape.cta_columns,
        int(vector_aligned(inputs.x)),
        _y_access(y, slices),
        int(inputs.plan_settled),
        made.stages,
        made.chain_floats,
        made.ranks,
        packed,
    )
    enqueue(
        made.program,
        made.kernel,
        _ARGUMENTS,
        (shape.clusters * shape.cluster,),
        made.threads,
        (record,),
        made.smem,
        dependent=True,
        cluster=(shape.cluster, 1, 1),
    )


@dataclass(frozen=True)
class _Settings:
    """What a launch takes beside addresses, of one call's sizes."""

    program: str
    kernel: str
    shape: FusedShape
    threads: int
    smem: int
    stages: int
    chain_floats: int
    ranks: int


@functools.lru_cache(maxsize=4096)
def _settings(
    device: int | None,  # noqa: ARG001 - a key of the cache: devices differ in size
    work: Workload,
    dtype: str,
    kernel: Literal["cluster", "ring"],
    shape: FusedShape | None,
) -> _Settings:
    if kernel == "cluster":
        shape = shape or _cluster_shape(work, dtype)
        smem = _cluster_bytes(work, shape)
        threads, name, stages = _CLUSTER_THREADS, _cluster_kernel(work, shape), 0
    else:
        shape = shape or _ring_shape(work, dtype)
        stages, smem = _ring_room(work, shape.cluster)
        threads = _RING_THREADS
        name = f"{_rank_tiles(work)}_{work.tile_rows}"
    return _Settings(
        program=f"lora_{kernel}_{dtype}",
        kernel=name,
        shape=shape,
        threads=threads,
        smem=smem,
        stages=stages,
        chain_floats=_chain_floats(work),
        ranks=int(_rank_tiles(work)) * _RANK_TILE,
    )


def _rank_tiles(work: Workload) -> str:
    """16-rank tiles that the kernel instance has room for."""
    return "1" if work.max_rank <= 16 else "2" if work.max_rank <= 32 else "4"


def _y_access(y: Array, slices: Sequence[LoraSlice]) -> int:
    """YAccess of lora/items.cuh."""
    if vector_columns(y, slices) and all(part.out_features % 8 == 0 for part in slices):
        return _Y_PIECE
    pairs = (
        address(y) % 4 == 0
        and y.shape[1] % 2 == 0
        and all(part.y_stride == 1 and part.y_column % 2 == 0 for part in slices)
    )
    return _Y_PAIR if pairs else _Y_ELEMENT


def _cluster_shape(work: Workload, dtype: str) -> FusedShape:
    kernel = f"{_rank_tiles(work)}_1"
    blocks = resident_blocks(f"lora_cluster_{dtype}", kernel, _CLUSTER_THREADS)
    return cluster_shape(work, blocks)


def _cluster_bytes(work: Workload, shape: FusedShape) -> int:
    """Sums, and B of the CTA's columns."""
    return cluster_sum_bytes(work, shape.cluster) + shape.cta_columns * work.max_rank * 2


def _cluster_kernel(work: Workload, shape: FusedShape) -> str:
    """The instance whose warps have their chunks in flight together, if there is one."""
    ranges = k_ranges(work.in_features)
    chunks = -(-work.in_features // _CHUNK)
    cells = ranges // shape.cluster * _CHAINS
    steps = -(-cells // _CLUSTER_WARPS) * -(-chunks // ranges // _CHAINS)
    tiles = _rank_tiles(work)
    if tiles != "1":
        return f"{tiles}_1"
    if steps >= _DEEP_STEPS and shape.clusters * shape.cluster <= _DEEP_CTAS:
        return "1_4"
    return "1_1" if steps == 1 else "1_2"


def _ring_shape(work: Workload, dtype: str) -> FusedShape:
    name = f"{_rank_tiles(work)}_{work.tile_rows}"
    found = {}
    for size in (1, 2, 4, 8):
        if size <= k_ranges(work.in_features):
            _, smem = _ring_room(work, size)
            found[size] = active_clusters(f"lora_ring_{dtype}", name, _RING_THREADS, smem, size)
    return ring_shape(work, found)


def _chain_floats(work: Workload) -> int:
    """Room for the chains' sums of one range at whatever rank an adapter has: four chains of 16 or
    32 ranks (above, one warp has all chains), each token's ranks padded."""
    row = 16 + 2 if work.max_rank <= _RANK_TILE else 32 + 4
    return work.tile_rows * _CHAINS * row


def _ring_blocks(work: Workload) -> int:
    """CTAs that an SM's registers hold, as RingShape in lora/ring_layout.cuh has it."""
    share = int(_rank_tiles(work)) * (work.tile_rows // _TOKENS)
    return {1: 4, 2: 3}.get(share, 2)


def _ring_room(work: Workload, cluster: int) -> tuple[int, int]:
    """Stages and bytes of a CTA: as many stages, with their headers, as leave room for the lists
    ahead, the chains' sums of two ranges, the incoming sums of two items, and the other CTAs that
    the registers allow an SM."""
    rows = work.tile_rows
    weights = 16384 if work.max_rank > 2 * _RANK_TILE else 8192
    stage = weights + rows * (512 + 16) + 48 + rows * 8
    lists = 3 * TILE_INTS * 4 + 2 * SLOT_ENTRY_BYTES + 2 * 4 * rows
    sums = 2 * cluster * rows * int(_rank_tiles(work)) * _RANK_TILE
    rest = lists + (2 * _chain_floats(work) + sums) * 4
    most = _ring_blocks(work)
    for blocks in range(most, 0, -1):
        room = _SHARED_PER_SM // blocks - _SHARED_PER_BLOCK - _STATIC_SHARED - rest
        if room >= (_FEW_STAGES if weights == 8192 and rows == _TOKENS else 3) * stage:
            break
    stages = min(_RING_STAGES, room // stage)
    return stages, stages * stage + rest
