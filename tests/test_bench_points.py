"""Which points the bench has, what their batches hold and what they must move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupylora.bench.draws import draw_batch
from cupylora.bench.floors import expected_pairs, part_bytes, set_count
from cupylora.bench.points import SUITES, Point, model_points, suite_points
from cupylora.errors import ArgumentError
from cupylora.shapes import PRESETS, load_model

_H200_COPY = 4246.5e9
"""Bytes a second, measured once on an H200 beside the floors below."""


def point_of(suite: str, **values: object) -> Point:
    found = [p for p in suite_points(suite) if all(getattr(p, k) == v for k, v in values.items())]
    assert len(found) == 1, found
    return found[0]


def test_the_lists_have_the_harness_s_lengths_and_corners() -> None:
    counts = {suite: len(suite_points(suite)) for suite in SUITES}
    assert counts["dense"] == 4 * 20 + 2 * 13
    assert counts["moe"] == 5 * 15
    dense = suite_points("dense")
    shapes = {(p.out_features, p.rank, p.max_loras) for p in dense}
    assert shapes == {(n, r, 64) for n in (4096, 14336) for r in (16, 64)} | {
        (4096, r, 8) for r in (16, 64)
    }
    assert {p.active for p in dense if p.tokens == 32 and p.max_loras == 64} == {1, 4, 16, 32}
    assert {p.active for p in dense if p.tokens == 4096} == {1, 4, 16, 64}
    assert max(p.tokens for p in dense if p.max_loras == 8) == 512
    moe = suite_points("moe")
    assert [(p.model, p.rank) for p in moe if p.tokens == 1] == [
        ("qwen3-30b-a3b", 16),
        ("qwen3-30b-a3b", 64),
        ("mixtral-8x7b", 16),
        ("gpt-oss-20b", 16),
        ("deepseek-v3", 16),
    ]
    assert {p.max_loras for p in moe} == {16}
    assert [p.seed for p in (dense[0], dense[-1], moe[0], moe[-1])] == [1000, 1105, 5000, 12400]


@pytest.mark.parametrize("suite", SUITES)
def test_every_point_can_be(suite: str) -> None:
    points = suite_points(suite)
    assert len({p.key for p in points}) == len(points)
    for p in points:
        assert 1 <= p.active <= min(p.tokens, p.max_loras)
        assert p.active <= p.lora_case <= p.max_loras
        assert 2 <= set_count(p) <= 500
        assert all(size > 0 for size in part_bytes(p, expected_pairs(p)))


def test_all_has_every_point_once() -> None:
    every = {p.key for suite in SUITES[:-1] for p in suite_points(suite)}
    assert {p.key for p in suite_points("all")} == every
    prefill = suite_points("prefill")
    assert {p.tokens for p in prefill} == {512, 2048, 4096}
    assert [p.tokens for p in suite_points("all") if p.suite == "prefill"] == [2048] * 31


@pytest.mark.parametrize(
    ("values", "pairs", "us"),
    [
        ({"model": "qwen3-30b-a3b", "rank": 16, "tokens": 1, "active": 1}, 8, 0.54),
        ({"model": "qwen3-30b-a3b", "rank": 16, "tokens": 32, "active": 16}, 244, 16.52),
        ({"model": "qwen3-30b-a3b", "rank": 64, "tokens": 4096, "active": 16}, 2048, 647.93),
        ({"model": "mixtral-8x7b", "rank": 16, "tokens": 4096, "active": 1}, 8, 319.40),
        ({"model": "gpt-oss-20b", "rank": 16, "tokens": 1, "active": 1}, 4, 0.56),
        ({"model": "deepseek-v3", "rank": 16, "tokens": 512, "active": 1}, 256, 102.47),
    ],
)
def test_moe_floors_are_those_measured_beside_the_peers(
    values: dict[str, object], pairs: int, us: float
) -> None:
    floor = sum(part_bytes(point_of("moe", **values), pairs)) / _H200_COPY * 1e6
    assert floor == pytest.approx(us, rel=5e-3, abs=6e-3)


@pytest.mark.parametrize(
    ("width", "rank", "tokens", "active", "us"),
    [
        (4096, 16, 1, 1, 0.068),
        (14336, 64, 512, 1, 8.46),
        (14336, 64, 512, 64, 43.46),
        (14336, 64, 4096, 16, 72.10),
    ],
)
def test_dense_floors_are_those_measured_beside_the_peers(
    width: int, rank: int, tokens: int, active: int, us: float
) -> None:
    values = {"out_features": width, "rank": rank, "tokens": tokens, "active": active}
    (size,) = part_bytes(point_of("dense", max_loras=64, **values), active)
    assert size / _H200_COPY * 1e6 == pytest.approx(us, rel=5e-3, abs=6e-4)


def test_modules_that_share_x_read_it_once() -> None:
    one, three = (
        part_bytes(replace(point_of("dense", out_features=4096, rank=16, max_loras=64,
                                    tokens=8, active=4), widths=widths), 4)[0]
        for widths in ((4096,), (1024, 1024, 2048))
    )  # fmt: skip
    assert three - one == 2 * 2 * 4 * 16 * 4096  # two more A for each of four adapters


def test_a_chain_s_parts_add_up() -> None:
    chain = next(p for p in suite_points("step") if p.tokens == 32 and p.moe is not None)
    moe = point_of("moe", model=chain.model, rank=16, tokens=32, active=16)
    parts = part_bytes(chain, 244)
    assert len(parts) == 5
    assert (parts[1], parts[3]) == part_bytes(moe, 244)
    dense = next(p for p in suite_points("step") if p.tokens == 32 and p.moe is None)
    assert len(part_bytes(dense, 16)) == 3


def test_sets_touch_over_200_megabytes_where_they_may_be_that_many() -> None:
    for p in suite_points("all"):
        touched = set_count(p) * sum(part_bytes(p, expected_pairs(p)))
        assert touched >= 200e6 or set_count(p) in (128, 500) or p.kind == "route"


def test_every_active_adapter_has_a_token_and_no_other() -> None:
    for p in suite_points("all"):
        draw = draw_batch(p)
        slots = set(draw.slots.tolist())
        assert len(slots) == p.active
        assert slots <= set(range(p.max_loras))
        assert draw.slots.shape == (p.tokens,)
        assert draw.experts.shape == (p.tokens, p.top_k)
        assert draw.experts.min() >= 0
        assert draw.experts.max() < p.experts
        assert all(len(set(row)) == p.top_k for row in draw.experts[:16].tolist())
        np.testing.assert_allclose(draw.weights.sum(axis=1), 1, rtol=1e-5)


def test_decode_mixes_adapters_and_prefill_keeps_each_together() -> None:
    values = {"out_features": 4096, "rank": 16, "max_loras": 64, "active": 16}
    for tokens, runs in ((128, False), (512, True)):
        slots = draw_batch(point_of("dense", tokens=tokens, **values)).slots
        assert (np.count_nonzero(np.diff(slots)) == 15) == runs


def test_draws_are_the_same_again_and_others_in_other_sets() -> None:
    p = point_of("moe", model="qwen3-30b-a3b", rank=16, tokens=32, active=16)
    first, again, other = draw_batch(p, 0), draw_batch(p, 0), draw_batch(p, 1)
    assert np.array_equal(first.experts, again.experts)
    assert np.array_equal(first.slots, again.slots)
    assert not np.array_equal(first.experts, other.experts)


def test_pairs_are_counted_as_expected() -> None:
    """On average, uniform draws give what the number of sets is planned with."""
    for model, tokens, active in (("qwen3-30b-a3b", 128, 16), ("deepseek-v3", 32, 4)):
        p = point_of("moe", model=model, rank=16, tokens=tokens, active=active)
        mean = np.mean([draw_batch(p, i).pairs for i in range(20)])
        assert mean == pytest.approx(expected_pairs(p), rel=0.05)


def test_hot_expert_and_zipf() -> None:
    shapes = suite_points("shapes")
    hot = draw_batch(next(p for p in shapes if p.routing == "hot-expert" and p.tokens == 512))
    counts = np.bincount(hot.experts.reshape(-1))
    assert counts.max() == 512
    assert np.sort(counts)[-2] < 100
    zipf = draw_batch(next(p for p in shapes if p.routing == "zipf" and p.tokens == 512))
    shares = np.sort(np.bincount(zipf.slots))[::-1]
    assert shares[0] > 100 > 30 > shares[15] >= 1


def test_points_of_a_model() -> None:
    points = model_points(load_model("mixtral-8x7b"), [8, 16], [1, 4], [1, 4], None)
    assert [(p.rank, p.tokens, p.active) for p in points] == [
        (8, 1, 1),
        (8, 4, 1),
        (8, 4, 4),
        (16, 1, 1),
        (16, 4, 1),
        (16, 4, 4),
    ]
    assert {(p.in_features, p.out_features, p.experts, p.max_loras) for p in points} == {
        (4096, 14336, 8, 16)
    }


def test_points_of_a_dense_model_are_its_groups() -> None:
    model = replace(PRESETS["qwen3-30b-a3b"], moe=None)
    points = model_points(model, [16], [8], [100, 2], None)
    assert [(p.model, p.widths, p.max_loras) for p in points] == [
        ("qwen3-30b-a3b q+k+v", (4096, 512, 512), 100),
        ("qwen3-30b-a3b o", (2048,), 100),
    ]


@pytest.mark.parametrize(
    ("ranks", "tokens", "active", "slots", "words"),
    [
        ([513], [1], [1], None, "--rank 513"),
        ([8], [2**21], [1], None, "--tokens 2097152"),
        ([8], [4], [8], 4, "--active 8, --max-loras 4"),
        ([8], [4], [8], None, "--active 8: at most as many adapters as tokens"),
        ([8], [9000], [5000], None, "--active 5000"),
    ],
)
def test_points_that_cannot_be(
    ranks: list[int], tokens: list[int], active: list[int], slots: int | None, words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        model_points(load_model("tiny-moe"), ranks, tokens, active, slots)
