"""Which adapter each token has and which experts it chooses, as the peers' harness draws them.

In: a point and a set's number. Out: host arrays. Active adapters sit in random slots; each has at
least one token, the others are drawn. Up to 128 tokens they come in random order (decode), above
that in one run per adapter (prefill). Experts are the k largest of uniform numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.bench.points import Point

__all__ = ["Draw", "draw_batch"]

_MIXED_TOKENS = 128
"""Up to this many tokens a batch mixes its adapters."""


@dataclass(frozen=True)
class Draw:
    """slots: int32 [T]. experts: int32 [T, k], distinct in a row. weights: float32 [T, k]."""

    slots: npt.NDArray[np.int32]
    experts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    @property
    def pairs(self) -> int:
        """Distinct (adapter, expert) pairs that have rows: the weights a batch reads."""
        number = int(self.experts.max(initial=0)) + 1
        return len(np.unique(self.slots[:, None].astype(np.int64) * number + self.experts))


def draw_batch(point: Point, number: int = 0) -> Draw:
    """Set ``number`` of a point."""
    rng = np.random.default_rng(point.seed + number)
    slots = _slots(point, rng)
    experts = _experts(point, rng)
    logits = rng.random(experts.shape, dtype=np.float32)
    weights = np.exp(logits)
    weights /= weights.sum(axis=1, keepdims=True)
    return Draw(slots, experts, weights)


def _slots(point: Point, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    places = rng.permutation(point.max_loras)[: point.active]
    more = point.tokens - point.active
    if point.routing == "zipf":
        share = 1 / np.arange(1, point.active + 1)
        drawn: npt.NDArray[Any] = rng.choice(point.active, more, p=share / share.sum())
    else:
        drawn = rng.integers(0, point.active, more)
    pick = np.concatenate([np.arange(point.active), drawn])
    pick = rng.permutation(pick) if point.tokens <= _MIXED_TOKENS else np.sort(pick)
    slots: npt.NDArray[np.int32] = places[pick].astype(np.int32)
    return slots


def _experts(point: Point, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    if point.experts == 1:
        return np.zeros((point.tokens, 1), np.int32)
    scores = rng.random((point.tokens, point.experts), dtype=np.float32)
    if point.routing == "hot-expert":
        scores[:, rng.integers(point.experts)] = 2.0
    best = np.argpartition(-scores, point.top_k - 1, axis=1)[:, : point.top_k]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
    chosen: npt.NDArray[np.int32] = np.take_along_axis(best, order, axis=1).astype(np.int32)
    return chosen
