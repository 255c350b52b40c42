"""The tuning script's logic: which forms it tries, how it survives failures, what it launches."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import tune_kernels
from bench_util import EagerGraphs, small
from cuda_text import source_text
from emulator.device import Device
from emulator.lora_cases import check, draw
from kernel_forms import DEFINES, SHIPPED, Form, find_form, form_of, installed
from test_lora_choice import work_of
from tune_kernels import (
    TARGETS,
    PointBench,
    Run,
    Target,
    Worker,
    WorkerLostError,
    named_forms,
    programs_to_compile,
    search,
    table,
)

from cupylora.backend import NumpyBackend
from cupylora.compiler.nvrtc import compile_program
from cupylora.compiler.sources import read_sources
from cupylora.errors import ArgumentError, CompileError
from cupylora.ops import _lora_choice, _lora_fused, _lora_pair
from cupylora.resources import cuda_source_dir

PROGRAMS = ("lora_shrink_bfloat16", "lora_expand_bfloat16")
QUADS = SHIPPED.with_defines(QUADS=1)
DECODE, ONE, MANY, WIDE = (
    next(t for t in TARGETS if t.name == name)
    for name in ("qwen r16 T128/16", "mixtral r16 T1", "qwen r16 T4096/1", "qwen r64 T128/16")
)


def all_forms() -> list[Form]:
    forms = [f for t in TARGETS for f in named_forms(t, ("ring", "cluster")).values()]
    return list(dict.fromkeys([SHIPPED, *forms]))


def test_what_ships_is_what_the_header_says() -> None:
    text = source_text("lora/tuning.cuh")
    assert {n: int(v) for n, v in re.findall(r"#define (\w+) (\d+)", text)} == DEFINES
    assert re.findall(r"#ifndef (\w+)", text) == re.findall(r"#define (\w+)", text)


def test_forms_go_through_json_and_say_what_they_are() -> None:
    for form in all_forms():
        assert form_of(json.loads(json.dumps(asdict(form)))) == form
    texts = [form.text for form in all_forms()]
    assert len(set(texts)) == len(texts)
    assert SHIPPED.text == "shipped"
    assert Form(resident=0.5).with_defines(QUADS=1).text == "QUADS=1,resident=0.5"
    assert QUADS.with_defines(QUADS=0) == SHIPPED


def test_a_form_s_programs_have_names_of_their_own() -> None:
    name = "lora_ring_bfloat16"
    assert SHIPPED.programs() == Form(cluster=2, resident=0.5).programs() == []
    assert find_form(name).name == name
    ring, cluster = (find_form(found) for found in QUADS.programs("float16"))
    assert ring.name == "lora_ring_float16@QUADS=1"
    assert ring.defines == cluster.defines == {"QUADS": "1"}
    assert cluster.kernels == find_form("lora_cluster_float16").kernels
    assert QUADS.suffix("lora_shrink_bfloat16") == ""
    with pytest.raises(CompileError, match="no kernel program"):
        find_form("lora@QUADS=1")


def test_launch_shapes_follow_the_form() -> None:
    work = work_of(rows=1024, experts=128, active=16, tile_capacity=1024, widths=(768, 768))
    clusters = {1: 528, 2: 264, 4: 124}
    with installed(Form(cluster=8, resident=0.5)):
        shape = _lora_fused.ring_shape(work, clusters)
    assert (shape.cluster, shape.clusters) == (4, 62)
    with installed(Form(cluster=1, even=True)):
        shape = _lora_fused.ring_shape(work, clusters)
    rounds = -(-math.ceil(work.tiles * 2) // clusters[1])
    assert shape.clusters == -(-math.ceil(work.tiles * 2) // rounds) < clusters[1]
    with installed(Form(cluster=2, parts=2, resident=0.5)):
        shape = _lora_fused.ring_shape(work, clusters)
    assert (shape.cluster, shape.cta_columns, shape.clusters) == (2, 192, 132)
    assert _lora_fused.ring_shape is _lora_choice.ring_shape


def test_a_form_s_kernel_serves() -> None:
    delta, rows = sys.modules["cupylora.ops.lora_delta"], _lora_pair._STREAM_ROWS
    work, options = work_of(rows=128, max_rank=64, tile_rows=8), {"kernel": "auto", "hopper": True}
    for name, border in (("pair", sys.maxsize), ("large", 0), ("cluster", None), ("ring", None)):
        with installed(Form(kernel=name)):
            assert delta.choose(work, **options) == ("pair" if name == "large" else name)
            assert border in (None, _lora_pair._STREAM_ROWS)
    with installed(Form(kernel="cluster")), pytest.raises(ArgumentError, match="tiles of 64 rows"):
        delta.choose(replace(work, tile_rows=64), **options)
    assert delta.choose is _lora_choice.choose
    assert rows == _lora_pair._STREAM_ROWS


@pytest.mark.parametrize("wide", [4096, 14336])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_the_cluster_kernel_are_equal_and_fit(parts: int, size: int, wide: int) -> None:
    work = work_of(rows=128, in_features=4096, widths=(wide,), max_rank=64, tile_rows=8)
    with installed(Form(kernel="cluster", cluster=size, parts=parts)):
        shape = _lora_fused.cluster_shape(work, 132)
    assert _lora_fused._cluster_bytes(work, shape) <= _lora_choice._SHARED_LIMIT
    made = -(-wide // (size * shape.cta_columns))
    assert made >= parts or shape.cta_columns == 64
    assert abs(wide / (made * size) - shape.cta_columns) <= 64


@pytest.mark.parametrize("size", [None, 1, 2, 4, 8])
@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 4.0])
def test_cluster_shapes_fit_shared_memory(size: int | None, spread: float) -> None:
    for wide, in_features, rank in ((14336, 4096, 16), (4096, 14336, 16), (2048, 768, 64)):
        work = work_of(in_features=in_features, widths=(wide,), max_rank=rank)
        with installed(Form(cluster=size, spread=spread)):
            shape = _lora_fused.cluster_shape(work, 264)
        assert _lora_choice.k_ranges(in_features) % shape.cluster == 0
        assert shape.cta_columns % 64 == 0
        assert _lora_fused._cluster_bytes(work, shape) <= _lora_choice._SHARED_LIMIT


def drive(target: Target, kernels: list[str], cost: Any) -> list[Form]:
    """The forms a search asks for, with ``cost(form)`` as their times."""
    asked, plan = [], search(target, kernels)
    form: Form | None = next(plan)
    while form is not None:
        asked.append(form)
        form = tune_kernels._advance(plan, cost(form))
    return asked


def test_a_search_tries_what_is_named_and_then_walks_to_the_best() -> None:
    def cost(form: Form) -> float | None:
        if form.cluster == 2:
            return None  # fails
        right = form.even + (form.defines == QUADS.defines)
        return 100 - 5 * right - 3 * (form.resident == 0.75) + form.parts

    asked = drive(DECODE, ["ring"], cost)
    assert asked[0] == asked[-1] == SHIPPED
    assert set(named_forms(DECODE, ["ring"]).values()) < set(asked)
    assert replace(QUADS, resident=0.75, even=True) in asked
    assert len(set(asked)) == len(asked) - 1


def test_a_search_ends_where_everything_fails() -> None:
    assert drive(DECODE, ["ring"], lambda _: None)[-1] == SHIPPED
    assert drive(ONE, [], lambda _: 1.0)[-1] == SHIPPED


def test_named_forms_are_those_that_matter_to_a_target() -> None:
    assert "8" in named_forms(MANY, ["ring"])
    assert "8" not in named_forms(DECODE, ["ring"])
    assert "half" not in named_forms(ONE, ["cluster"])
    assert named_forms(ONE, ["pair"]) == {}
    dense = next(t for t in TARGETS if t.name == "4096 r64 T128/1")
    assert {form.kernel for form in named_forms(dense, ["pair"]).values()} == {
        *("cluster", "ring", "pair", "large")
    }
    wide = replace(WIDE, tokens=4096)
    assert "ring" in named_forms(wide, ["pair"])
    assert "ring" not in named_forms(WIDE, ["ring"])


def test_points_of_targets_are_the_bench_s() -> None:
    for target in TARGETS:
        if target.behind:
            continue
        point = target.point()
        assert (point.rank, point.tokens) == (target.rank, target.tokens)
        assert point.out_features == target.width or point.model == target.model
        assert point.active == target.active


def test_what_is_timed_is_compiled_ahead() -> None:
    names = programs_to_compile(TARGETS)
    assert {name for form in all_forms() for name in form.programs()} <= set(names)
    assert len(set(names)) == len(names) < 24
    assert all(find_form(name).kernels for name in names)


class Scripted:
    """A worker that answers from a list; an exception is raised."""

    def __init__(self, answers: Any) -> None:
        self.answers, self.asked, self.stopped = answers, [], False

    def ask(self, form: Form, seconds: float) -> dict[str, Any]:
        self.asked.append(form)
        answer = self.answers(form)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self.stopped = True


def answer(us: float, **changes: Any) -> dict[str, Any]:
    parts = {"parts": [us / 4, us * 3 / 4], "floor_bytes": 42.465e6}
    launches = ["lora_ring_bfloat16 1_8"]
    return {"us": us, "equal": True, "launches": launches, **parts, **changes}


def run_with(answers: Any, path: Path | None = None) -> tuple[Run, list[Scripted]]:
    started: list[Scripted] = []

    def start(target: Target) -> Scripted:
        started.append(Scripted(answers))
        return started[-1]

    run = Run(path, start)
    run.target(DECODE, float("inf"))
    return run, started


def test_a_run_keeps_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    run, (worker,) = run_with(
        lambda form: answer(60.0 if form == Form(resident=0.5) else 70.0), path
    )
    assert worker.stopped
    rows = json.loads(path.read_text())["rows"]
    assert rows == run.rows
    assert [row["form"] for row in rows] == [form.text for form in worker.asked]
    lines = table(run.rows, [DECODE])
    assert "10.00   70.00   60.00   60.00  resident=0.5" in lines[1]
    assert "half 60.00" in lines[-3]
    assert "shipped again +0.0%" in lines[-3]
    assert "half 0.857 (1)" in lines[-1]


def test_a_lost_worker_costs_the_form_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    hung = QUADS

    def answers(form: Form) -> Any:
        return WorkerLostError("no answer") if form == hung else answer(70.0)

    run, workers = run_with(answers)
    assert len(workers) == 2
    assert workers[0].stopped
    assert workers[1].asked[0] == SHIPPED  # what others are compared with
    (row,) = [row for row in run.rows if row["form"] == hung.text]
    assert row["failure"] == "no answer"
    assert "quads bad" in table(run.rows, [DECODE])[-3]
    assert "fail" in capsys.readouterr().out


def test_a_target_whose_worker_is_lost_again_and_again_is_left() -> None:
    _, workers = run_with(lambda f: answer(1.0) if f == SHIPPED else WorkerLostError("died"))
    assert len(workers) == tune_kernels._MOST_LOST
    run, workers = run_with(lambda _: WorkerLostError("died"))
    assert len(workers) == len(run.rows) == 1
    assert "none timed" in table(run.rows, [DECODE])[1]


def test_other_bits_are_told_and_never_the_best() -> None:
    wrong = QUADS
    run, _ = run_with(lambda f: answer(1.0, equal=False) if f == wrong else answer(70.0))
    assert "quads bad" in table(run.rows, [DECODE])[-3]
    assert " 1.00" not in table(run.rows, [DECODE])[1]


def test_time_that_is_over_ends_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_kernels, "_LEAST_SECONDS", 0.0)
    run = Run(None, lambda _: Scripted(lambda _: answer(1.0)))
    run.target(DECODE, float("-inf"))
    assert [row["form"] for row in run.rows] == ["shipped"]


@pytest.mark.parametrize(
    ("program", "seconds", "text"),
    [
        ("print('noise'); input(); print('{\"us\": 1}'); input()", 60, None),
        ("input(); raise SystemExit(3)", 60, "the process ended, code 3"),
        ("import time; time.sleep(60)", 1, "no answer within 1 s"),
    ],
)
def test_a_worker_s_process(program: str, seconds: float, text: str | None) -> None:
    worker = Worker([sys.executable, "-u", "-c", program])
    try:
        if text is None:
            assert worker.ask(SHIPPED, seconds) == {"us": 1}
        else:
            with pytest.raises(WorkerLostError, match=text):
                worker.ask(SHIPPED, seconds)
    finally:
        worker.stop()


@pytest.mark.parametrize("first_only", [False, True])
def test_a_point_is_checked_and_timed(first_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(DECODE, first_only=first_only, max_rank=16 if first_only else None)
    monkeypatch.setattr(Target, "point", lambda _: small("moe"))
    bench = PointBench(NumpyBackend(), EagerGraphs(), target, sets=3)
    for form in (SHIPPED, QUADS, Form(tile_rows=16), SHIPPED):
        result = bench.run(form)
        assert result["equal"]
        assert result["parts"] == [2.0] * (1 if first_only else 2)
        assert 0 < result["error"] < 5e-3
        json.dumps(result)


def test_a_form_with_other_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "point", lambda _: small("moe"))
    bench = PointBench(NumpyBackend(), EagerGraphs(), DECODE, sets=2)
    assert bench.run(SHIPPED)["equal"]
    bench._expected[0][0, 0] ^= 1
    assert not bench.run(QUADS)["equal"]


@pytest.mark.nvrtc
def test_forms_compile() -> None:
    for name in QUADS.programs():
        program = find_form(name)
        chosen = {k: v for k, v in program.kernels.items() if k in ("1_8", "1_4")}
        program = replace(program, kernels=chosen)
        assert compile_program(program, read_sources(program, cuda_source_dir()), "sm_90a").cubin


@pytest.mark.emulated
@pytest.mark.parametrize("kernel", ["ring", "cluster"])
def test_forms_give_the_pair_s_bits(
    kernel: str, emulated: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "find", find_form)
    with installed(QUADS):
        for seed in range(5):
            check(emulated, draw(seed, kernel=kernel, dtype="bfloat16", small=True))
