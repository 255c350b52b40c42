"""Puts cupylora's ops into the peers' benchmark harness: ``OURS=tools/peers_adaptor.py``.

The harness hands over torch tensors and captures our callables, on torch's stream, into one CUDA
graph. Weights are packed into the layout of an adapter's device room beforehand, as loading would;
routes are built outside the timed callables, as the peers' are. torch is needed here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import torch

from cupylora import ops
from cupylora.ops.lora_delta import lora_workspace_bytes
from cupylora.worklists import PACKED, SLOT_ENTRY, LoraSlice, choose_tile_rows

_BF16 = np.dtype(ml_dtypes.bfloat16)


def as_cupy(tensor: torch.Tensor, dtype: Any = _BF16) -> Any:
    """A CuPy view of a contiguous torch tensor (DLPack has no ml_dtypes)."""
    size = tensor.numel() * tensor.element_size()
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), size, tensor)
    return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))


def pack(a: torch.Tensor) -> torch.Tensor:
    """[..., r, K] -> the same bytes per matrix as swizzled chunks of 64 (adapters.packing)."""
    *lead, rank, width = a.shape
    pieces = a.reshape(-1, rank, width // 64, 8, 8).permute(0, 2, 1, 3, 4)
    row = torch.arange(rank, device=a.device)[:, None]
    source = torch.arange(8, device=a.device)[None, :] ^ (row & 7)
    swizzled = torch.gather(pieces, 3, source[None, None, :, :, None].expand(pieces.shape))
    return swizzled.contiguous().reshape(*lead, rank, width)


def entries(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Any:
    """Slot entries of slices with packed A [slots, (E,) r, K] and B [slots, (E,) N, r]."""
    table = np.zeros((len(a), a[0].shape[0]), SLOT_ENTRY)
    for row, (shrink, expand) in enumerate(zip(a, b, strict=True)):
        for slot in range(shrink.shape[0]):
            entry = table[row, slot]
            entry["a_ptr"], entry["b_ptr"] = shrink[slot].data_ptr(), expand[slot].data_ptr()
            if shrink.dim() == 4:
                entry["a_expert_stride"] = shrink.stride(1) * 2
                entry["b_expert_stride"] = expand.stride(1) * 2
            entry["rank"], entry["scale"], entry["a_layout"] = shrink.shape[-2], 1.0, PACKED
    return cupy.asarray(table.view(np.uint8).reshape(*table.shape, SLOT_ENTRY.itemsize))


def on_torch_stream(call: Callable[[], None]) -> Callable[[], None]:
    """Enqueue on torch's current stream."""

    def run() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            call()

    return run


class Route:
    """Routing and segments of one rotating set, for a batch of up to ``active`` adapters."""

    def __init__(
        self, topk: Any, slots: Any, experts: int, max_loras: int, *, active: int, rank: int
    ) -> None:
        rows = topk.shape[0] * topk.shape[1]
        # A captured graph knows how many adapters its batches hold to the next power of two.
        self.max_active = min(max_loras, 1 << (active - 1).bit_length())
        self.routing, self.segments = ops.plan(
            topk,
            slots,
            num_experts=experts,
            max_loras=max_loras,
            tile_rows=choose_tile_rows(rows, experts, max_active=self.max_active, max_rank=rank),
        )


def delta(route: Route, x: Any, y: Any, table: Any, slices: Any, rank: int, **rows: str) -> Any:
    """A callable that adds one module group's delta, with its own workspace."""
    width = x.shape[1]
    size = lora_workspace_bytes(route.routing.num_rows, len(slices), width, rank, x.dtype)
    workspace = cupy.empty(size, np.uint8)
    return on_torch_stream(
        lambda: ops.lora_delta(
            x,
            y,
            route.segments,
            route.routing,
            table,
            slices,
            in_features=width,
            max_rank=rank,
            workspace=workspace,
            max_active=route.max_active,
            plan_settled=True,
            **rows,
        )
    )


def dense(case: dict[str, Any], m: Any) -> tuple[list[Any], dict[str, Any]]:
    """One dense module: y += (x Aᵀ) Bᵀ for every rotating set."""
    calls = []
    m.packed = [pack(a) for a in m.pool.A[: len(m.x)]]
    slots = as_cupy(m.map, np.int32)
    topk = cupy.zeros((case["T"], 1), np.int32)
    route = Route(topk, slots, 1, case["ml"], active=case["act"], rank=case["r"])
    slices = (LoraSlice(case["N"]),)
    for i in range(len(m.x)):
        table = entries([m.packed[i]], [m.pool.B[i]])
        x, y = as_cupy(m.x[i]), as_cupy(m.y[i])
        calls.append(delta(route, x, y, table, slices, case["r"], x_rows="token"))
    return calls, {"tile_rows": route.segments.tile_rows}


def moe(case: dict[str, Any], pool: Any, sets: Any) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Gate and up in one call, down in another, for every rotating set."""
    if not hasattr(pool, "packed13"):
        pool.packed13 = [pack(a) for a in pool.A13]
        pool.packed2 = pack(pool.A2)
    first = entries(pool.packed13, pool.B13)
    down = entries([pool.packed2], [pool.B2])
    loras, experts, rank = pool.A2.shape[:3]
    width, hidden = pool.A2.shape[3], pool.B2.shape[2]
    slices = (LoraSlice(width, 0), LoraSlice(width, width))
    calls13, calls2 = [], []
    for s in sets:
        topk, slots = as_cupy(s.topk, np.int32), as_cupy(s.map, np.int32)
        route = Route(topk, slots, experts, loras, active=case["act"], rank=rank)
        x13, y13, x2, y2 = map(as_cupy, (s.x13, s.y13, s.x2, s.y2))
        calls13.append(delta(route, x13, y13, first, slices, rank, x_rows="token"))
        calls2.append(delta(route, x2, y2, down, (LoraSlice(hidden),), rank, x_rows="pair"))
    return calls13, calls2, {"tile_rows": route.segments.tile_rows}
