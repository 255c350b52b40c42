"""A list of GEMM problems in device memory, worked off by one persistent kernel (gemm/).

In: GemmProblems of ``build_problems`` or ``expert_problems``. Out: the D matrices, in place. A
first launch counts the output tiles, since sizes and their number are device data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupylora import reference
from cupylora.checks import check_choice, check_gemm_problems, check_int
from cupylora.dtypes import FLOAT32, dtype_name, resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.ops._device import (
    GEMM_PROBLEMS,
    address,
    device_op,
    enqueue,
    output,
    pack_problems,
    resident_blocks,
)
from cupylora.worklists import Array, GemmProblems

__all__ = ["grouped_gemm"]

_TILES = (GEMM_PROBLEMS, "i32", "i32", "i32", "i32", "ptr")
_GEMM = (GEMM_PROBLEMS, "i32", "ptr", "i32")
_TILE_N, _TILE_K = 128, 64
_F32_TILE, _F32_THREADS = 64, 256


@device_op(reference.grouped_gemm)
def grouped_gemm(
    problems: GemmProblems,
    *,
    dtype: Any,
    out_dtype: Any = None,
    beta: int = 0,
    max_m: int | None = None,
    tile_start: Array | None = None,
) -> None:
    capacity = check_gemm_problems(problems, on_device=True)
    dtype = resolve_dtype(dtype)
    out_dtype = dtype if out_dtype is None else resolve_dtype(out_dtype, "out_dtype")
    check_choice("beta", beta, (0, 1))
    if out_dtype not in (dtype, FLOAT32):
        raise ArgumentError(f"out_dtype is {out_dtype}; {dtype} or float32 is needed")
    if max_m is not None:
        check_int("max_m", max_m, 0)
    tile_m, tile_n, threads, stages = _tile(dtype, max_m)
    tiles = output("tile_start", tile_start, (capacity + 1,), np.int32)
    packed = pack_problems(problems, count=True)
    enqueue(
        "gemm_tiles",
        "gemm_tiles",
        _TILES,
        (1,),
        1024,
        (packed, capacity, tile_m, tile_n, beta, address(tiles)),
        dependent=True,
    )
    program, kernel, smem = "gemm_f32", "grouped_gemm_f32", 0
    if dtype != FLOAT32:
        kind = "float" if out_dtype == FLOAT32 else "same"
        program, kernel = f"gemm_{dtype_name(dtype)}", f"{kind}_{tile_m}"
        smem = stages * (tile_m + _TILE_N) * _TILE_K * 2
    grid = resident_blocks(program, kernel, threads, smem)
    args = (packed, capacity, address(tiles), beta)
    enqueue(program, kernel, _GEMM, (grid,), threads, args, smem, dependent=True)


def _tile(dtype: np.dtype[Any], max_m: int | None) -> tuple[int, int, int, int]:
    """(rows, columns, threads, stages) of the output tile for problems of ``max_m`` rows."""
    if dtype == FLOAT32:
        return _F32_TILE, _F32_TILE, _F32_THREADS, 0
    if max_m is not None and max_m <= 16:
        return 16, _TILE_N, 128, 4
    if max_m is not None and max_m <= 256:
        return 64, _TILE_N, 128, 4
    return 128, _TILE_N, 128, 3
