"""The manifest's launch rules are what the ops launch: each expression, evaluated over a launch's
own arguments, gives that launch's grid, block, cluster and shared memory."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_device import Enqueued, fake, install
from host_util import described
from late_device import LateBackend, LateStream
from problem_util import make_case, random_case
from test_host_choice import Draw, large_calls

from cupylora import ops, reference
from cupylora.compiler.programs import find_program
from cupylora.dtypes import DTYPES
from cupylora.export.declarations import Declared
from cupylora.export.manifest import function_of
from cupylora.export.rules import FUNCTIONS, RULES, SYMBOLS
from cupylora.graphs import staging
from cupylora.graphs.buffers import StepBuffers
from cupylora.graphs.fence import DirectFence
from cupylora.ops import _device
from cupylora.ops._lora_choice import k_ranges
from cupylora.worklists import SLOT_ENTRY_BYTES

RESIDENT = 400
_CODES = {"pointer": "Q", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "float": "f"}
_WORDS: dict[str, Any] = {
    "min": min,
    "max": max,
    "ceil_div": lambda a, b: -(-a // b),
    "round_up": lambda a, b: -(-a // b) * b,
    "ceil_pow2": lambda a: 1 << (a - 1).bit_length(),
    "log2": lambda a: a.bit_length() - 1,
    "pick": lambda condition, a, b: a if condition else b,
    "k_ranges": k_ranges,
}


def read(items: Sequence[Declared], data: bytes, offset: int = 0) -> dict[str, Any]:
    """Values of parameters and of the fields in them, by name."""
    found: dict[str, Any] = {}
    for item in items:
        at = offset + item.offset
        if item.kind in described().structs:
            found |= read(described().structs[item.kind].fields, data, at)
        else:
            values = struct.unpack_from(f"{item.count}{_CODES[item.kind]}", data, at)
            found[item.name] = values[0] if item.count == 1 else values
    return found


class Launches:
    """What ops launch, each held against its rule. known: sizes of the call that is being made,
    which a rule may name."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.seen: set[str] = set()
        self.scratch = 0
        """Bytes of workspace that the op asked for last."""
        self.measured: set[str] = set()

    def enqueue(self, *args: Any, **options: Any) -> None:
        launch = Enqueued(*args, **options)
        found = find_program(launch.program)
        function = function_of(found, launch.kernel)
        rule = RULES[function]
        names: dict[str, Any] = {**_WORDS, **self.known, "resident": RESIDENT}
        names |= read(described().functions[function], launch.packed())
        names["cluster"] = launch.cluster_size
        names["keys"] = names.get("num_experts", 0) * names.get("digits", 0)
        if "first_block" in names:
            names["column_blocks"] = names["first_block"][names["num_slices"]]
        inside = found.kernels[launch.kernel].partition("<")[2].rstrip(">").split(",")
        numbers = [int(text) for text in inside if text.strip().isdecimal()]
        names |= {f"t{i}": number for i, number in enumerate(numbers)}
        for name, expression in {**rule.where, "block": rule.block}.items():
            names[name] = evaluate(expression, names)
        whole = (*launch.grid, 1)[:2]
        got = [evaluate(e, names) for e in (rule.grid, rule.grid_y, rule.shared, rule.cluster)]
        assert got == [*whole, launch.smem, names["cluster"]], (function, got, launch, names)
        assert (names["block"], rule.dependent) == (launch.threads, launch.dependent), function
        if rule.workspace and self.scratch:
            sizes = [evaluate(e, names) for e in rule.workspace.values()]
            assert sum(sizes) == self.scratch, (function, sizes, self.scratch)
            self.measured.add(function)
        if rule.max_rank and "max_rank" in names:
            assert names["max_rank"] <= evaluate(rule.max_rank, names)
        self.seen.add(function)


def evaluate(expression: str, names: dict[str, Any]) -> int:
    value = eval(expression, {"__builtins__": {}}, names)
    assert isinstance(value, int), expression
    return value


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    install(
        monkeypatch,
        fake,
        enqueue=made.enqueue,
        current_device=lambda: 0,
        is_hopper=lambda: True,
        resident_blocks=lambda *_: RESIDENT,
        active_clusters=lambda *args: 256 // args[4],
        shared_limit=lambda: 227 * 1024,
        shared_memory=lambda: (227 * 1024, 228 * 1024),
    )

    def scratch(given: Any, size: int, needed_by: str) -> Any:
        made.scratch = size
        return _device.workspace(given, size, needed_by)

    for name in ("_lora_pair", "plan", "route", "build_segments"):
        monkeypatch.setattr(sys.modules[f"cupylora.ops.{name}"], "scratch", scratch)
    return made


def test_rules_of_the_operations_that_c_has(launches: Launches) -> None:
    draw = Draw(5)
    for _ in range(1500):
        for operation in (draw.lists, draw.delta, draw.activation, draw.finalize):
            line, call = operation()
            kind, tokens, top_k, experts, _, loras, *_ = line
            rows = tokens * top_k
            segments = max(1, min(rows, experts * (loras + 1)))
            height = draw.tile_rows
            launches.known = {
                "rows": rows,
                "tile_rows": height,
                "tile_capacity": max(1, min(rows, segments + rows // height)),
                "max_loras": loras,
            }
            if kind == "delta" and line[26] != 0:
                continue  # a kernel that was asked for and may not be able to
            launches.scratch = 0
            call()
    assert launches.measured == {
        *("plan_count", "digit_histogram", "digit_scatter", "segment_counts"),
        *(
            "lora_shrink",
            "lora_shrink_stream",
            "lora_shrink_wide",
            "lora_shrink_f32",
            "lora_shrink_group",
        ),
    }
    assert launches.seen >= {
        *("plan_rank", "plan_table", "plan_count", "plan_place", "segment_counts", "segment_fill"),
        *("route_rank", "digit_histogram", "digit_scan", "digit_scatter", "activation"),
        *("lora_shrink", "lora_expand", "lora_shrink_stream", "lora_expand_stream", "finalize"),
        *("lora_cluster", "lora_ring", "lora_shrink_f32", "lora_expand_f32"),
        *("lora_shrink_wide", "lora_shrink_group", "lora_expand_direct", "lora_expand_panel"),
    }


def test_rules_at_the_limits_of_large_batches(launches: Launches) -> None:
    for line, call in large_calls():
        rows, _, experts, _, loras, _, _, height = line[1:9]
        tiles = max(1, min(rows, experts * (loras + 1) + rows // height))
        launches.known = {"rows": rows, "tile_rows": height, "tile_capacity": tiles}
        call()
    assert launches.seen >= {
        *("lora_shrink_stream", "lora_shrink_wide", "lora_shrink_group"),
        *("lora_expand", "lora_expand_direct", "lora_expand_panel", "lora_expand_stream"),
    }


@pytest.mark.parametrize("tokens", [3, 900])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_of_the_other_operations(dtype: str, tokens: int, launches: Launches) -> None:
    case = random_case(1, tokens, 2, 8, 4)
    routing = reference.route(case.topk_ids, case.token_to_slot, **case.sizes)  # type: ignore[arg-type]
    segments = reference.build_segments(routing, case.token_to_slot, max_loras=4)
    rows, tiles = tokens * 2, len(segments.tiles)
    launches.known = {"rows": rows, "tile_rows": 8, "tile_capacity": tiles, "num_slices": 2}
    launches.known["itemsize"] = DTYPES[dtype].itemsize
    here, list_of = fake(routing), fake(segments)

    def array(*shape: int, kind: Any = DTYPES[dtype]) -> Any:
        return fake(np.zeros(shape, kind))

    table = fake(np.zeros((3, 4, SLOT_ENTRY_BYTES), np.uint8))
    ops.fill_uniform(array(tokens, 70_000), 1, 1.0)
    ops.permute_rows(array(tokens, 136), here)
    lora: dict[str, Any] = {"in_features": 64, "max_rank": 16}
    gated: dict[str, Any] = {"kind": "silu", "gated": True}
    first = (array(tokens, 64), array(rows, 144), list_of, here, table[:2])
    ops.lora_activation(*first, **lora, **gated)
    weights = array(tokens, 2, kind=np.float32)
    launches.known["num_slices"] = 1
    ops.lora_finalize(array(rows, 64), array(rows, 720), weights, list_of, here, table[2:], **lora)
    token_lora = ops.slot_lookup(fake(case.token_to_slot), table)
    row_lora = ops.pointer_expand(here, token_lora)
    sizes: dict[str, Any] = {"x_ptr": 16, "h_ptr": 32, "y_ptr": 48, "itemsize": 2, **lora}
    for together in (True, False):
        ops.build_problems(row_lora, here, 1, out_features=8, aggregate=together, **sizes)
    widths = {"in_features": 64, "out_features": 8}
    problems = ops.expert_problems(here, x_ptr=16, w_ptr=16, y_ptr=16, itemsize=2, **widths)
    for most in (None, 16, 200):
        ops.grouped_gemm(problems, dtype=dtype, max_m=most)
    gemm = "grouped_gemm_f32" if dtype == "float32" else "grouped_gemm"
    activation = f"lora_expand_activation{'_f32' * (dtype == 'float32')}"
    assert launches.seen >= {
        *("fill_uniform", "permute_rows", "lora_finalize", "slot_lookup", "pointer_expand"),
        *("problem_rows", "problem_runs", "expert_problems", "gemm_tiles", gemm, activation),
    }


@pytest.mark.parametrize("row_bytes", [1, 32, 4096])
def test_padding_is_set_by_the_rule(
    row_bytes: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "enqueue", launches.enqueue)
    monkeypatch.setattr(staging, "load_kernel", lambda *_: None)
    monkeypatch.setattr(staging, "as_stream", lambda _, stream: stream)
    buffers = StepBuffers(LateBackend(), 512)
    buffers.add("wide", (row_bytes,), np.int8, layers=3, pad=-1)
    buffers.add("narrow", (1,), np.int8, pad=0)
    made = staging.make_staging(buffers, LateStream(), DirectFence())
    launches.known = {"num_runs": 4, "most_row_bytes": row_bytes}
    for rows in (2, 8, 511, 512):
        made.pad(rows)
    assert launches.seen == {"pad_rows"}


def test_rules_use_the_notation_that_the_manifest_explains() -> None:
    """Names are symbols, functions, arguments, template numbers or explained by the rule itself."""
    assert _WORDS.keys() == FUNCTIONS.keys()
    for function, rule in RULES.items():
        own = {item.name for item in described().functions[function]}
        for struct_ in described().structs.values():
            own |= {item.name for item in struct_.fields}
        known = {*SYMBOLS, *FUNCTIONS, *own, *rule.where, "t0", "t1"}
        texts = (rule.grid, rule.grid_y, rule.block, rule.shared, rule.cluster, rule.max_rank)
        for text in (*texts, *rule.where.values(), *rule.workspace.values()):
            assert set(re.findall(r"[a-z_]\w*", text)) <= known, (function, text)


def test_a_launch_that_is_not_by_the_rule_is_seen(launches: Launches) -> None:
    launches.known = {"rows": 8, "tile_rows": 8, "tile_capacity": 8}
    case = make_case("one", np.zeros((8, 1)), np.zeros(8), 1, 1)
    ops.plan(fake(case.topk_ids), fake(case.token_to_slot), **case.sizes)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="digit_scan"):
        launches.enqueue(
            "sort", "digit_scan", ("ptr", "i32", "i32", "ptr"), (2,), 256, (0, 8, 1, 0)
        )
