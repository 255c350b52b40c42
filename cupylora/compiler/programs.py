"""Every kernel program there is: the one list that loading, checks and listings go by.

A family in ``cuda_src`` has one or more entries. Kernels of one entry are compiled together at the
first use of any of them, so variants rarely needed together belong in entries of their own.
"""

from __future__ import annotations

from cupylora.compiler.sources import KernelProgram, instances
from cupylora.errors import CompileError

__all__ = ["PROGRAMS", "find_program"]

# Our dtype names -> the C++ types of ptx/types.cuh.
_DTYPES = {"bfloat16": "Bf16", "float16": "Fp16", "float32": "float"}

_MATRIX_DTYPES = {"bfloat16": "Bf16", "float16": "Fp16"}


def _named(prefix: str, kernels: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}_{name}": expression for name, expression in kernels.items()}


def _plain(*names: str) -> dict[str, str]:
    return {name: name for name in names}


PROGRAMS: tuple[KernelProgram, ...] = (
    KernelProgram(
        name="fill",
        source="util/fill.cu",
        kernels=instances("fill_uniform<{dtype}>", dtype=_DTYPES),
    ),
    KernelProgram(
        name="sort",
        source="route/sort.cu",
        kernels=_plain("route_rank", "digit_histogram", "digit_scan", "digit_scatter"),
    ),
    KernelProgram(
        name="segments",
        source="route/segments.cu",
        kernels=_plain("segment_counts", "segment_fill"),
    ),
    KernelProgram(
        name="pointers",
        source="route/pointers.cu",
        kernels=_plain(
            "slot_lookup", "pointer_expand", "problem_rows", "problem_runs", "expert_problems"
        ),
    ),
    # Shrink: <rank tiles of 16>_<rows of a tile>; expand: rows of a tile's part.
    *(
        KernelProgram(
            name=f"lora_shrink_{dtype}",
            source="lora/shrink.cu",
            kernels=instances(
                f"lora_shrink<{cpp}, {{ranks}}, {{rows}}>",
                ranks=(1, 2, 4),
                rows={"8": 1, "16": 2, "32": 4},
            ),
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    *(
        KernelProgram(
            name=f"lora_expand_{dtype}",
            source="lora/expand.cu",
            kernels=instances(f"lora_expand<{cpp}, {{rows}}>", rows={"8": 1, "16": 2}),
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    KernelProgram(
        name="lora_f32",
        source="lora/delta_f32.cu",
        kernels={"shrink": "lora_shrink_f32", "expand": "lora_expand_f32"},
    ),
    KernelProgram(
        name="gemm_tiles",
        source="gemm/tiles.cu",
        kernels=_plain("gemm_tiles"),
    ),
    # <type of D>_<rows of an output tile>.
    *(
        KernelProgram(
            name=f"gemm_{dtype}",
            source="gemm/grouped.cu",
            kernels=instances(
                f"grouped_gemm<{cpp}, {{out}}, {{rows}}>",
                out={"same": cpp, "float": "float"},
                rows=(16, 64, 128),
            ),
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    KernelProgram(
        name="gemm_f32",
        source="gemm/grouped_f32.cu",
        kernels=_plain("grouped_gemm_f32"),
    ),
    KernelProgram(
        name="rows",
        source="moe/rows.cu",
        kernels={
            **_named("permute", instances("permute_rows<{dtype}>", dtype=_DTYPES)),
            **_named("activation", instances("activation<{dtype}>", dtype=_DTYPES)),
            **_named("finalize", instances("finalize<{dtype}>", dtype=_DTYPES)),
        },
    ),
)

_BY_NAME = {program.name: program for program in PROGRAMS}


def find_program(name: str) -> KernelProgram:
    """The program of this name; raises CompileError listing the names there are."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise CompileError(
            f"there is no kernel program {name!r}; there are {', '.join(_BY_NAME)}"
        ) from None
