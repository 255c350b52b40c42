"""What is measured: points, and the suites they stand in.

A point is one batch shape of one operation. ``dense`` and ``moe`` are the lists of the peers'
harness, in its order and with its seeds' numbers; points that share weights stand together, so that
a pool is made once for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cupylora.bench.identity import Kind, PointId, RoutingDraw
from cupylora.errors import ArgumentError
from cupylora.shapes import MAX_LORAS, MAX_RANK, PRESETS, ModelShape, MoeShape

__all__ = [
    "LINEAR",
    "SUITES",
    "TOKENS",
    "Point",
    "model_points",
    "suite_points",
]

SUITES = ("dense", "moe", "prefill", "route", "step", "shapes", "all")

TOKENS = (1, 8, 32, 128, 512, 4096)
ACTIVE = (1, 4, 16)

LINEAR = "linear"
"""The model name of a dense module that stands for itself."""

_K = 4096
_DENSE_SLOTS, _MOE_SLOTS = 64, 16
_MOE_MODELS = (
    ("qwen3-30b-a3b", 16),
    ("qwen3-30b-a3b", 64),
    ("mixtral-8x7b", 16),
    ("gpt-oss-20b", 16),
    ("deepseek-v3", 16),
)
_STEP_MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
_ROUTE_TOP_K = 8

_OTHER_MODELS = {"qwen3-235b-a22b": MoeShape(4096, 1536, 128, 8)}
"""Of suite ``shapes`` alone."""


@dataclass(frozen=True)
class Point(PointId):
    """A point, with what it takes to make its batch.

    widths: columns of each dense module that shares x. experts, top_k: of the routing, 1 for dense.
    moe: the block, for a chain of a MoE layer. second: (in, out) of a dense module that follows in
    a dense chain. seed: of the draws; no part of what a point is.
    """

    widths: tuple[int, ...] = ()
    experts: int = 1
    top_k: int = 1
    moe: MoeShape | None = None
    second: tuple[int, int] | None = None
    seed: int = field(default=0, compare=False)

    @property
    def rows(self) -> int:
        """Rows after routing, T·k."""
        return self.tokens * self.top_k

    @property
    def lora_case(self) -> int:
        """The case of active adapters that a captured graph would be chosen by: 1, 2, 4, ..."""
        return min(1 << (self.active - 1).bit_length(), self.max_loras)


def suite_points(suite: str) -> list[Point]:
    """The points of a suite; of ``all``, each once."""
    if suite == "all":
        return _distinct(p for name in SUITES[:-1] for p in suite_points(name))
    try:
        return _MAKERS[suite]()
    except KeyError:
        raise ArgumentError(f"--suite is {suite!r}; use one of {', '.join(SUITES)}") from None


def model_points(
    model: ModelShape,
    ranks: Sequence[int],
    tokens: Sequence[int],
    active: Sequence[int],
    max_loras: int | None,
) -> list[Point]:
    """Points of one model: its MoE block, or where it has none each group of dense modules.

    Combinations of more active adapters than tokens are left out. Raises ArgumentError where none
    is left, and for more active adapters than ``max_loras`` slots.
    """
    slots = max_loras or max(_MOE_SLOTS if model.moe else _DENSE_SLOTS, *active)
    _check_sizes(ranks, tokens, active, slots)
    shapes = _shapes_of(model)
    points = [
        replace(shape, rank=rank, max_loras=slots, tokens=count, active=loras)
        for shape in shapes
        for rank in ranks
        for count in tokens
        for loras in active
        if loras <= count
    ]
    if not points:
        raise ArgumentError(
            f"--active {min(active)}: at most as many adapters as tokens ({max(tokens)}) can be "
            "active"
        )
    return _distinct(points)


def _check_sizes(
    ranks: Iterable[int], tokens: Iterable[int], active: Iterable[int], slots: int
) -> None:
    if slots > MAX_LORAS or max(active) > slots:
        raise ArgumentError(
            f"--active {max(active)}, --max-loras {slots}: at most {MAX_LORAS} slots are possible, "
            "and no more adapters can be active than there are slots"
        )
    for name, values, most in (("--rank", ranks, MAX_RANK), ("--tokens", tokens, 1 << 20)):
        for value in values:
            if not 1 <= value <= most:
                raise ArgumentError(f"{name} {value}: 1 to {most} is needed")


def _shapes_of(model: ModelShape) -> list[Point]:
    if model.moe is not None:
        return [_moe("point", model.name, model.moe, 1, 1, 1)]
    return [
        _dense(
            "point",
            group[0].in_features,
            tuple(m.out_features for m in group),
            1,
            1,
            1,
            1,
            model=_group_name(model, index),
        )
        for index, group in enumerate(model.dense_groups)
    ]


def _group_name(model: ModelShape, index: int) -> str:
    if model.name == LINEAR:
        return LINEAR
    names = "+".join(m.name.removesuffix("_proj") for m in model.dense_groups[index])
    return f"{model.name} {names}"


def _distinct(points: Iterable[Point]) -> list[Point]:
    found: dict[tuple[Any, ...], Point] = {}
    for point in points:
        found.setdefault(point.key, point)
    return list(found.values())


def _dense(
    suite: str,
    in_features: int,
    widths: tuple[int, ...],
    rank: int,
    max_loras: int,
    tokens: int,
    active: int,
    *,
    model: str = LINEAR,
    routing: RoutingDraw = "uniform",
    seed: int = 0,
) -> Point:
    return Point(
        suite,
        "dense",
        model,
        in_features,
        sum(widths),
        rank,
        max_loras,
        tokens,
        active,
        routing,
        widths=widths,
        seed=seed,
    )


def _moe(
    suite: str,
    model: str,
    moe: MoeShape,
    rank: int,
    tokens: int,
    active: int,
    *,
    kind: Kind = "moe",
    routing: RoutingDraw = "uniform",
    seed: int = 0,
) -> Point:
    return Point(
        suite,
        kind,
        model,
        moe.hidden,
        moe.intermediate,
        rank,
        _MOE_SLOTS,
        tokens,
        active,
        routing,
        experts=moe.experts,
        top_k=moe.top_k,
        moe=moe,
        seed=seed,
    )


def _preset_moe(name: str) -> MoeShape:
    moe = _OTHER_MODELS.get(name) or PRESETS[name].moe
    if moe is None:
        raise ArgumentError(f"model {name} has no experts")
    return moe


def _dense_suite() -> list[Point]:
    shapes = [
        (width, rank, slots, tokens, active)
        for width in (4096, 14336)
        for rank in (16, 64)
        for slots in ((64, 8) if width == _K else (64,))
        for tokens in (TOKENS if slots == _DENSE_SLOTS else TOKENS[:-1])
        for active in _dense_active(tokens, slots)
    ]
    return [
        _dense("dense", _K, (width,), rank, slots, tokens, active, seed=1000 + index)
        for index, (width, rank, slots, tokens, active) in enumerate(shapes)
    ]


def _dense_active(tokens: int, slots: int) -> list[int]:
    wanted = {*ACTIVE, min(tokens, 64)} if slots == _DENSE_SLOTS else {1, 4, 8}
    return sorted(a for a in wanted if a <= min(tokens, slots))


def _moe_suite() -> list[Point]:
    shapes = [
        (model, rank, tokens, active)
        for model, rank in _MOE_MODELS
        for tokens in TOKENS
        for active in ACTIVE
        if active <= tokens
    ]
    return [
        _moe("moe", model, _preset_moe(model), rank, tokens, active, seed=5000 + 100 * index)
        for index, (model, rank, tokens, active) in enumerate(shapes)
    ]


def _prefill_suite() -> list[Point]:
    """Of both lists T = 512 and 4096, and 2048 as 4096 is."""
    points = []
    for point in (*_dense_suite(), *_moe_suite()):
        if point.tokens in (512, 4096):
            points.append(replace(point, suite="prefill"))
        if point.tokens == 4096:
            points.append(replace(point, suite="prefill", tokens=2048, seed=point.seed + 50))
    return points


def _route_suite() -> list[Point]:
    return [
        Point(
            "route",
            "route",
            f"top-{_ROUTE_TOP_K} of {experts} experts",
            0,
            0,
            0,
            _MOE_SLOTS,
            tokens,
            min(tokens, _MOE_SLOTS),
            "uniform",
            experts=experts,
            top_k=_ROUTE_TOP_K,
            seed=9000,
        )
        for experts in (128, 256)
        for tokens in TOKENS
    ]


def _step_suite() -> list[Point]:
    points = []
    for name in _STEP_MODELS:
        qkv, (o,) = PRESETS[name].dense_groups
        for tokens in TOKENS:
            active = min(tokens, _MOE_SLOTS)
            points.append(
                _moe("step", name, _preset_moe(name), 16, tokens, active, kind="step", seed=11_000)
            )
        for tokens in TOKENS:
            widths = tuple(m.out_features for m in qkv)
            dense = _dense(
                "step",
                qkv[0].in_features,
                widths,
                16,
                _MOE_SLOTS,
                tokens,
                min(tokens, _MOE_SLOTS),
                model=f"{name} q+k+v and o",
                seed=12_000,
            )
            second = (o.in_features, o.out_features)
            points.append(replace(dense, kind="step", second=second))
    return points


def _shapes_suite() -> list[Point]:
    """Beyond the harness's lists: other ranks, batch sizes, widths, draws and models."""
    qwen = "qwen3-30b-a3b"
    moe: list[tuple[str, int, int, int, RoutingDraw]] = [
        *((qwen, r, t, a, "uniform") for r in (8, 32, 128) for t, a in ((1, 1), (32, 4), (512, 4))),
        *((qwen, 16, t, a, "uniform") for t in (16, 64, 256, 2048) for a in (1, 16)),
        *((qwen, 16, t, 4, "hot-expert") for t in (32, 128, 512)),
        *((qwen, 16, t, 16, "zipf") for t in (32, 128, 512)),
        *(("qwen3-235b-a22b", 16, t, a, "uniform") for t, a in ((1, 1), (32, 4), (128, 16))),
    ]
    dense: list[tuple[int, int, int, int, int, RoutingDraw]] = [
        *(
            (_K, 4096, r, t, a, "uniform")
            for r in (8, 32, 128)
            for t, a in ((1, 1), (32, 4), (512, 4))
        ),
        *((_K, 4096, 16, t, a, "uniform") for t in (16, 64, 256, 2048) for a in (4, 16)),
        *((_K, 4096, 16, t, 16, "zipf") for t in (128, 512)),
        *((_K, 1024, 16, t, a, "uniform") for t, a in ((1, 1), (32, 4), (512, 4))),
        *((14336, 4096, 16, t, a, "uniform") for t, a in ((1, 1), (32, 4), (512, 4))),
    ]
    return [
        *(
            _dense("shapes", k, (n,), r, _DENSE_SLOTS, t, a, routing=draw, seed=20_000 + index)
            for index, (k, n, r, t, a, draw) in enumerate(dense)
        ),
        *(
            _moe("shapes", m, _preset_moe(m), r, t, a, routing=draw, seed=30_000 + 100 * index)
            for index, (m, r, t, a, draw) in enumerate(moe)
        ),
    ]


_MAKERS = {
    "dense": _dense_suite,
    "moe": _moe_suite,
    "prefill": _prefill_suite,
    "route": _route_suite,
    "step": _step_suite,
    "shapes": _shapes_suite,
}
