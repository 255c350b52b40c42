"""Bytes that an operation cannot do without, by its parts.

Each distinct A and B once, x once, y read and written once, in bfloat16; of work lists, what is
read and written. A part is what one operation of the point does: one for dense modules, two (gate
and up, then down) for experts, five for the chain of a MoE layer.
"""

from __future__ import annotations

from cupylora.bench.points import Point

__all__ = ["FOOTPRINT", "expected_pairs", "part_bytes", "set_count"]

FOOTPRINT = 200e6
"""Bytes that one round through all sets touches: over three times the L2 of an H200."""

_ITEM = 2
_INT = 4


_MOST_DENSE, _MOST = 500, 128
_ROUTES, _FEW_ROUTES, _ROUTED_TOKENS = 40, 4, 16384


def set_count(point: Point) -> int:
    """Rotating input sets, so that they touch FOOTPRINT bytes: at least 2, at most 500 (dense) or
    128 (others), as in the peers' harness; 4 to 40 for routes, which stay in the L2 anyway."""
    if point.kind == "route":
        return max(_FEW_ROUTES, min(_ROUTES, _ROUTED_TOKENS // point.tokens))
    most = _MOST_DENSE if point.kind == "dense" else _MOST
    needed = -(-FOOTPRINT // sum(part_bytes(point, expected_pairs(point))))
    return int(max(2, min(most, needed)))


def expected_pairs(point: Point) -> float:
    """Distinct (adapter, expert) pairs that uniform draws give in the mean; a dense batch's are its
    active adapters."""
    if point.experts == 1:
        return point.active
    possible = point.active * point.experts
    return float(possible * (1 - (1 - 1 / possible) ** point.rows))


def part_bytes(point: Point, pairs: float) -> tuple[float, ...]:
    """Bytes of each part of ``point`` in a batch of so many distinct (adapter, expert) pairs."""
    if point.kind == "route":
        return (_list_bytes(point),)
    dense = _dense_bytes(point, point.in_features, point.widths, pairs)
    if point.kind == "dense":
        return (dense,)
    if point.kind == "moe":
        return (_first_bytes(point, pairs), _down_bytes(point, pairs))
    if point.moe is not None:
        return _layer_bytes(point, pairs)
    chain = (_list_bytes(point), dense)
    if point.second is None:
        return chain
    in_features, out_features = point.second
    return (*chain, _dense_bytes(point, in_features, (out_features,), pairs))


def _dense_bytes(point: Point, in_features: int, widths: tuple[int, ...], active: float) -> float:
    """Bytes of the deltas of dense modules that share x."""
    wide = sum(widths)
    factors = active * point.rank * (len(widths) * in_features + wide)
    return _ITEM * (factors + point.tokens * (in_features + 2 * wide))


def _first_bytes(point: Point, pairs: float) -> float:
    hidden, wide = point.in_features, point.out_features
    factors = pairs * point.rank * 2 * (hidden + wide)
    return _ITEM * (factors + point.tokens * hidden + 2 * point.rows * 2 * wide)


def _down_bytes(point: Point, pairs: float) -> float:
    hidden, wide = point.in_features, point.out_features
    factors = pairs * point.rank * (hidden + wide)
    return _ITEM * (factors + point.rows * wide + 2 * point.rows * hidden)


def _layer_bytes(point: Point, pairs: float) -> tuple[float, ...]:
    """Lists, gate and up, activation, down, weighted sum."""
    activation = _ITEM * point.rows * 3 * point.out_features
    total = _ITEM * (point.rows + point.tokens) * point.in_features + _INT * point.rows
    first, down = _first_bytes(point, pairs), _down_bytes(point, pairs)
    return (_list_bytes(point), first, activation, down, total)


def _list_bytes(point: Point) -> float:
    """Expert ids and slots read; both orders of the rows and the experts' offsets written."""
    ids = point.rows if point.experts > 1 else 0
    return _INT * (ids + point.tokens + 2 * point.rows) + 8 * (point.experts + 1)
