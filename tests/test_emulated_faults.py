"""Faults planted in copies of the sources: each must be found, and as what it is.

A replacement whose text the sources no longer hold fails its test, so that none goes stale unseen.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator.build import Builder
from emulator.device import Device, Schedule
from emulator.lora_cases import check, draw
from problem_util import random_case, random_module
from test_emulated_gemm import Problems
from test_emulated_rows import EmulatedPlace
from test_lora_finalize import check as check_finalize
from test_plan_op import assert_same_plan, twin

from cupylora import ops
from cupylora.compiler.programs import find_program
from cupylora.compiler.sources import KernelProgram
from cupylora.resources import cuda_source_dir

pytestmark = pytest.mark.emulated

MOST_CASES = 80
TILE_ROWS = 8


def _programs(*names: str, of: str = "") -> tuple[KernelProgram, ...]:
    """The programs with those of their kernels whose names end in ``of``: less to compile."""
    found = map(find_program, names)
    return tuple(
        replace(p, kernels={k: e for k, e in p.kernels.items() if k.endswith(of)}) for p in found
    )


CLUSTER = _programs("lora_cluster_bfloat16")
RING = _programs("lora_ring_bfloat16", of=f"_{TILE_ROWS}")
SHRINK = _programs("lora_shrink_bfloat16", of=f"_{TILE_ROWS}")
STREAMS = _programs(
    "lora_shrink_stream_bfloat16", "lora_expand_direct_bfloat16", "lora_expand_stream_bfloat16"
)
TOGETHER = (*STREAMS, *_programs("lora_shrink_wide_bfloat16", "lora_expand_panel_bfloat16"))
GROUP = (*TOGETHER, *_programs("lora_shrink_group_bfloat16"))
TOGETHER_ROWS = 32
"""Of a tile, from which on the shrink takes many ranks together."""


def _delta(
    kernel: str, first: int = 100, *, small: bool = True, tile_rows: int = TILE_ROWS
) -> Callable[[Device], None]:
    """Drawn batches from seed ``first`` on, one of the first of which shows the fault. small: of
    few features."""
    options: dict[str, Any] = {"kernel": kernel, "dtype": "bfloat16", "tile_rows": tile_rows}

    def trigger(device: Device) -> None:
        for seed in range(first, first + MOST_CASES):
            check(device, draw(seed, small=small, **options))

    return trigger


def _plan(device: Device) -> None:
    case = random_case(9, 60, 8, 8, 4)
    args = (device.array(case.topk_ids), device.array(case.token_to_slot))
    assert_same_plan(ops.plan(*args, **case.sizes), twin(case))  # type: ignore[arg-type]


def _plan_of_few(device: Device) -> None:
    case = random_case(9, 60, 8, 64, 4)
    case = replace(case, max_loras=64)
    args = (device.array(case.topk_ids), device.array(case.token_to_slot))
    assert_same_plan(ops.plan(*args, **case.sizes, max_active=4), twin(case))  # type: ignore[arg-type]


def _route(device: Device) -> None:
    case = random_case(1, 300, 8, 128, 16)
    ops.route(device.array(case.topk_ids), device.array(case.token_to_slot), **case.sizes)  # type: ignore[arg-type]


def _finalize(device: Device) -> None:
    case = random_case(4, 20, 3, 6, 3)
    module = random_module(np.random.default_rng(4), (16, 3, 8), 72, 136, 6, "bfloat16")
    check_finalize("", case, module, "bfloat16", place=EmulatedPlace(True, device=device))


def _gemm(device: Device) -> None:
    device.blocks = 2
    problems = Problems(device, [(40, 300, 200)], "bfloat16", "bfloat16", 0)
    ops.grouped_gemm(problems.list, dtype="bfloat16", max_m=16)
    problems.check("bfloat16", 0)


@dataclass(frozen=True)
class Fault:
    """``old`` of a source becomes ``new``; what ``trigger`` runs is then said to be ``message``.

    programs: those made of the source that it runs.
    """

    programs: tuple[KernelProgram, ...]
    source: str
    old: str
    new: str
    message: str
    trigger: Callable[[Device], Any]


FAULTS = {
    "cluster: no barrier between items": Fault(
        CLUSTER,
        "lora/cluster.cu",
        "if (round > 0) __syncthreads();",
        "",
        "race:",
        _delta("cluster"),
    ),
    "cluster: no proxy fence": Fault(
        CLUSTER,
        "lora/cluster.cu",
        "if (round > 0) fence_async_proxy();",
        "",
        r"without fence\.proxy\.async",
        _delta("cluster", 108),
    ),
    "cluster: stores into CTAs that have not begun": Fault(
        CLUSTER,
        "lora/cluster.cu",
        "if (round == 0) cluster_wait();",
        "",
        "may not be initialised yet",
        _delta("cluster"),
    ),
    "cluster: x before the kernel ahead has ended": Fault(
        CLUSTER,
        "lora/cluster.cu",
        "    if (args.plan_settled && round == 0) {\n"
        "      wait_for_predecessor();\n"
        "      release_successor();\n"
        "    }\n"
        "    ahead",
        "    ahead",
        r"before griddepcontrol\.wait",
        _delta("cluster"),
    ),
    "ring: a stage released before its warp has read it": Fault(
        RING,
        "lora/ring_consumer.cuh",
        "void release() {\n    __syncwarp();",
        "void release() {",
        "race: write after read",
        _delta("ring"),
    ),
    "ring: sums read before they have come": Fault(
        RING,
        "lora/ring_consumer.cuh",
        "mbarrier_wait(arrived, turns >> 2 & 1);",
        "",
        "race:",
        _delta("ring"),
    ),
    "ring: stages that are not released": Fault(
        RING,
        "lora/ring_consumer.cuh",
        "if (in_stage == share.per_warp - 1 || last) release();",
        "if (in_stage == share.per_warp - 1) release();",
        "deadlock|fetched by a bulk copy after",
        _delta("ring", 113),
    ),
    "ring: sums in another order": Fault(
        RING,
        "lora/ring_consumer.cuh",
        "add_chains(p[0], p[block], p[2 * block], p[3 * block])",
        "add_chains(p[block], p[2 * block], p[0], p[3 * block])",
        "not the pair's",
        _delta("ring", 103),
    ),
    "shrink: one buffer for the chains": Fault(
        SHRINK, "lora/shrink.cu", "buffer ^= 1;", "", "race:", _delta("stream")
    ),
    "streams: a slot released before its warp has read it": Fault(
        STREAMS,
        "ptx/slot_ring.cuh",
        "    __syncwarp();\n    if (threadIdx.x % kWarp == 0)",
        "    if (threadIdx.x % kWarp == 0)",
        "race: write after read",
        _delta("stream"),
    ),
    "stream shrink: a slot used before all lanes' copies have come": Fault(
        STREAMS,
        "lora/shrink_stream.cu",
        "wait_async<kAhead - 1>();\n    __syncwarp();",
        "wait_async<kAhead - 1>();",
        "race:",
        _delta("stream"),
    ),
    "stream shrink: sums in the place of levels that are still read": Fault(
        STREAMS,
        "lora/shrink_stream.cu",
        "  __syncwarp();  // every lane has read",
        "  // every lane has read",
        "race:",
        _delta("stream", small=False),
    ),
    "stream shrink: sums added before all warps have theirs": Fault(
        STREAMS,
        "lora/shrink_stream.cu",
        "if (warp < shares) publish<MT, R>(place, sum, rows);\n    __syncthreads();",
        "if (warp < shares) publish<MT, R>(place, sum, rows);",
        "race:",
        _delta("stream"),
    ),
    "stream shrink: sums of an item replaced while they are added": Fault(
        STREAMS,
        "lora/shrink_stream.cu",
        "    __syncthreads();  // the places are free again\n",
        "",
        "race: write after read",
        _delta("stream"),
    ),
    "wide shrink: a slot used before all warps' copies have come": Fault(
        TOGETHER,
        "lora/shrink_wide.cu",
        "wait_async<kAhead - 1>();\n    __syncthreads();",
        "wait_async<kAhead - 1>();",
        "race:",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "wide shrink: the list of chunks read before it is complete": Fault(
        TOGETHER,
        "lora/shrink_wide.cu",
        "  list_chunks<kThreads>(chunks, order);\n  __syncthreads();",
        "  list_chunks<kThreads>(chunks, order);",
        "race:|unset shared memory",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "warpgroup shrink: barriers not fenced for bulk copies": Fault(
        GROUP,
        "lora/shrink_group.cu",
        "    fence_mbarrier_init();  // for the bulk copies\n",
        "",
        "without fence.mbarrier_init",
        _delta("stream", first=270, tile_rows=TOGETHER_ROWS),
    ),
    "warpgroup shrink: words of x not fenced for the product": Fault(
        GROUP,
        "lora/shrink_group.cu",
        "      fence_async_proxy();\n      __syncwarp();",
        "      __syncwarp();",
        "a product of generic writes without fence",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "warpgroup shrink: a slot announced before all lanes have stored": Fault(
        GROUP,
        "lora/shrink_group.cu",
        "      fence_async_proxy();\n      __syncwarp();",
        "      fence_async_proxy();",
        "race:",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "warpgroup shrink: a slot handed back before its products are done": Fault(
        GROUP,
        "lora/shrink_group.cu",
        "    wgmma_wait(acc);\n    ring.release();",
        "    ring.release();\n    wgmma_wait(acc);",
        "race:",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "warpgroup shrink: products that nobody waits for": Fault(
        GROUP,
        "lora/shrink_group.cu",
        "    wgmma_wait(acc);\n    ring.release();",
        "    ring.release();",
        "elements are not the pair's|without wgmma.fence",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "warpgroup shrink: h written while the kernel ahead runs": Fault(
        GROUP,
        "lora/shrink_group.cu",
        "    predecessor.wait();\n    float sum",
        "    float sum",
        "kernel ahead",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "panels: terms replaced while they are read": Fault(
        TOGETHER,
        "lora/expand_panel.cu",
        "      __syncthreads();  // no warp reads the terms",
        "      // no warp reads the terms",
        "race:",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "panels: terms read before they are complete": Fault(
        TOGETHER,
        "lora/expand_panel.cu",
        "      __syncthreads();  // the terms and rows",
        "      // the terms and rows",
        "race:",
        _delta("stream", tile_rows=TOGETHER_ROWS),
    ),
    "plan: counts read before they are complete": Fault(
        _programs("plan"),
        "route/plan.cuh",
        "  __syncthreads();\n  if (warp >= kColumns) return;",
        "  if (warp >= kColumns) return;",
        "race:",
        _plan,
    ),
    "plan: marks of slots read before they are complete": Fault(
        _programs("plan"),
        "route/plan.cu",
        "mark_slot(marks, sizes, inputs[r].slot);\n    __syncthreads();",
        "mark_slot(marks, sizes, inputs[r].slot);",
        "race:",
        _plan_of_few,
    ),
    "sort: turns that are not waited for": Fault(
        _programs("sort"),
        "route/sort.cu",
        "next[digit] += __popc(peers);\n    __syncthreads();",
        "next[digit] += __popc(peers);",
        "race:",
        _route,
    ),
    "finalize: products read before they are complete": Fault(
        _programs("lora_finalize"),
        "moe/lora_finalize.cu",
        "last - following, 0);\n      __syncthreads();",
        "last - following, 0);",
        "race:|unset shared memory",
        _finalize,
    ),
    "gemm: a stage filled while it is read": Fault(
        _programs("gemm_bfloat16"),
        "gemm/grouped.cu",
        "      wait_async<Shape::kStages - 2>();\n      __syncthreads();",
        "      wait_async<Shape::kStages - 2>();",
        "race:",
        _gemm,
    ),
}


def _plant(fault: Fault, folder: Path) -> Builder:
    """A builder of the faulty sources; it has built the programs."""
    shutil.copytree(cuda_source_dir(), folder)
    text = (folder / fault.source).read_text()
    assert fault.old in text, f"{fault.source} no longer holds {fault.old!r}"
    (folder / fault.source).write_text(text.replace(fault.old, fault.new))
    builder = Builder(folder)
    for program in fault.programs:
        builder.library(program)
    return builder


@pytest.fixture(scope="module")
def planted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Builder]]]:
    """Builders of the faults that tests are asked for, made two at a time beside the tests."""
    items = (getattr(item, "callspec", None) for item in request.session.items)
    asked = {spec.params.get("fault") for spec in items if spec is not None}
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(_plant, fault, folder / str(place))
            for place, (name, fault) in enumerate(FAULTS.items())
            if name in asked
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, planted: dict[str, Future[Builder]]) -> None:
    faulty = {program.name: program for program in FAULTS[fault].programs}
    device = Device(
        planted[fault].result(),
        schedule=Schedule(pause=2_000),
        find=lambda name: faulty.get(name) or find_program(name),
    )
    with device.installed(), pytest.raises(AssertionError, match=FAULTS[fault].message):
        FAULTS[fault].trigger(device)
