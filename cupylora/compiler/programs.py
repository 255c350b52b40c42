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

_BIAS = {"bare": "false", "bias": "true"}

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
    # Loads that a thread has in flight.
    KernelProgram(
        name="stream",
        source="util/stream.cu",
        kernels=instances("read_stream<{unroll}>", unroll=(1, 4, 8)),
    ),
    KernelProgram(
        name="step",
        source="step/pad.cu",
        kernels=_plain("pad_rows"),
    ),
    KernelProgram(
        name="unpack",
        source="adapters/unpack.cu",
        kernels=instances("unpack_factors<{dtype}>", dtype=_DTYPES),
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
    # Threads a pair; columns and rounds (pairs of a block: 32 times both).
    KernelProgram(
        name="plan",
        source="route/plan.cu",
        kernels={
            **_named("rank", instances("plan_rank<{parts}>", parts=(8, 4))),
            **_named(
                "table",
                instances("plan_table<{columns}, {rounds}>", columns=(8,), rounds=(1, 2, 4)),
            ),
            **_named(
                "table",
                instances("plan_table<{columns}, {rounds}>", columns=(16, 32), rounds=(2, 4)),
            ),
        },
    ),
    KernelProgram(
        name="plan_large",
        source="route/plan_large.cu",
        kernels={
            **_named(
                "count", instances("plan_count<{columns}, {rounds}>", columns=(8, 16), rounds=(4,))
            ),
            "place": "plan_place",
        },
    ),
    KernelProgram(
        name="pointers",
        source="route/pointers.cu",
        kernels=_plain(
            "slot_lookup", "pointer_expand", "problem_rows", "problem_runs", "expert_problems"
        ),
    ),
    # The pair: shrink by rank tiles of 16 that go together and rows of a tile's part, expand by the
    # latter; of large batches the expands ("direct", "panel", "stream") by rank steps of 16.
    *(
        KernelProgram(
            name=f"lora_shrink_{dtype}",
            source="lora/shrink.cu",
            kernels=instances(
                f"lora_shrink<{cpp}, {{ranks}}, {{rows}}>",
                ranks=(1, 2, 4),
                rows={"8": 1, "16": 2},
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
    *(
        KernelProgram(
            name=f"lora_shrink_stream_{dtype}",
            source="lora/shrink_stream.cu",
            kernels={
                f"{ranks}_{rows}": f"lora_shrink_stream<{cpp}, {ranks}, {rows}>"
                for ranks, rows in ((1, 16), (1, 32), (2, 16), (2, 32), (4, 16))
            },
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    *(
        KernelProgram(
            name=f"lora_shrink_wide_{dtype}",
            source="lora/shrink_wide.cu",
            kernels={
                f"{ranks}_{rows}": f"lora_shrink_wide<{cpp}, {ranks}, {rows}>"
                for ranks, rows in ((4, 32), (4, 64), (8, 32), (8, 64))
            },
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    *(
        KernelProgram(
            name=f"lora_shrink_group_{dtype}",
            source="lora/shrink_group.cu",
            kernels={f"8_{rows}": f"lora_shrink_group<{cpp}, {rows}>" for rows in (32, 64)},
            min_arch="sm_90a",
            exact_arch=True,
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    *(
        KernelProgram(
            name=f"lora_expand_panel_{dtype}",
            source="lora/expand_panel.cu",
            kernels=instances(f"lora_expand_panel<{cpp}, {{steps}}>", steps=(4,)),
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    *(
        KernelProgram(
            name=f"lora_expand_direct_{dtype}",
            source="lora/expand_direct.cu",
            kernels=instances(f"lora_expand_direct<{cpp}, {{steps}}>", steps=(1, 2)),
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    *(
        KernelProgram(
            name=f"lora_expand_stream_{dtype}",
            source="lora/expand_stream.cu",
            kernels=instances(f"lora_expand_stream<{cpp}, {{steps}}>", steps=(4,)),
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    # The fused delta: by rank tiles of 16, and cluster by chunks in flight, ring by rows of a tile.
    *(
        KernelProgram(
            name=f"lora_cluster_{dtype}",
            source="lora/cluster.cu",
            kernels={
                **instances(
                    f"lora_cluster<{cpp}, 1, {{stages}}>", stages={"1_1": 1, "1_2": 2, "1_4": 4}
                ),
                **instances(f"lora_cluster<{cpp}, {{ranks}}, 1>", ranks={"2_1": 2, "4_1": 4}),
            },
            min_arch="sm_90a",
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    *(
        KernelProgram(
            name=f"lora_ring_{dtype}",
            source="lora/ring.cu",
            kernels={
                **instances(
                    f"lora_ring<{cpp}, {{ranks}}, 1>", ranks={"1_8": 1, "2_8": 2, "4_8": 4}
                ),
                **instances(f"lora_ring<{cpp}, {{ranks}}, 2>", ranks={"1_16": 1, "2_16": 2}),
            },
            min_arch="sm_90a",
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    KernelProgram(
        name="lora_f32",
        source="lora/delta_f32.cu",
        kernels={"shrink": "lora_shrink_f32", "expand": "lora_expand_f32"},
    ),
    # Expand of gate and up with the activation: rows of a tile's part, and "element" for widths or
    # addresses that do not allow 16 bytes at a time.
    *(
        KernelProgram(
            name=f"lora_activation_{dtype}",
            source="lora/expand_activation.cu",
            kernels={
                name: f"lora_expand_activation<{cpp}, {form}>"
                for name, form in {"8": "1, true", "16": "2, true", "element": "1, false"}.items()
            },
            matrix=True,
        )
        for dtype, cpp in _MATRIX_DTYPES.items()
    ),
    KernelProgram(
        name="lora_activation_float32",
        source="lora/expand_activation.cu",
        kernels={
            "vector": "lora_expand_activation_f32<true>",
            "element": "lora_expand_activation_f32<false>",
        },
    ),
    KernelProgram(
        name="lora_finalize",
        source="moe/lora_finalize.cu",
        kernels=instances("lora_finalize<{dtype}>", dtype=_DTYPES),
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
    # 16 bytes at a time, and element by element for widths or addresses that do not allow it;
    # activation and finalize with and without a bias.
    *(
        KernelProgram(
            name=name,
            source="moe/rows.cu",
            kernels={
                **_named("permute", instances(f"permute_rows<{{dtype}}, {way}>", dtype=_DTYPES)),
                **instances(
                    f"{{row_op}}<{{dtype}}, {way}, {{bias}}>",
                    row_op=("activation", "finalize"),
                    bias=_BIAS,
                    dtype=_DTYPES,
                ),
            },
        )
        for name, way in {"rows": "true", "rows_unaligned": "false"}.items()
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
