"""Seeded inputs of a whole stack: which token has which adapter, routes, activations.

Router choices and slots are made on the host, activations by ``fill_uniform`` where they are used,
so that both backends see the same values. In: sizes and a seed. Out: a StackBatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.backend import ArrayBackend, total_bytes
from cupylora.checks import check_int
from cupylora.dtypes import resolve_dtype
from cupylora.errors import ArgumentError
from cupylora.ops.fill_uniform import fill_uniform
from cupylora.shapes import ModelShape, MoeShape
from cupylora.worklists import Array

__all__ = ["StackBatch", "StackInputs", "make_batch", "mixed_slots"]

_Y_SCALE = 0.5
_SEED_STEP = 1_000_003


@dataclass(frozen=True)
class StackInputs:
    """What every layer of a stack reads and writes, on its backend.

    x: [T, H], the first layer's input. dense_x, dense_y: per dense group its input [T, in] and the
    base outputs [T, sum of widths] that deltas are added to, the same arrays in every layer.
    token_to_slot: int32 [T]. topk_ids, topk_weights: per layer int32 and float32 [T, k].
    """

    x: Array
    dense_x: tuple[Array, ...]
    dense_y: tuple[Array, ...]
    token_to_slot: Array
    topk_ids: tuple[Array, ...]
    topk_weights: tuple[Array, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_to_slot.shape[0])


@dataclass(frozen=True)
class StackBatch(StackInputs):
    """One batch made from ``seed``, and its routes on the host.

    slots: int32 [T]. ids, weights: [layers, T, k].
    """

    slots: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    seed: int

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays on the backend."""
        routes = (self.token_to_slot, *self.topk_ids, *self.topk_weights)
        return total_bytes((self.x, *self.dense_x, *self.dense_y, *routes))

    def reset(self) -> None:
        """Fill x and the dense inputs and outputs anew with the seed's values."""
        fill_uniform(self.x, _SEED_STEP * self.seed, 1.0)
        for index, x in enumerate(self.dense_x):
            fill_uniform(x, _SEED_STEP * self.seed + 2 * index + 1, 1.0)
            self.reset_y(index)

    def reset_y(self, group: int) -> None:
        """Fill one dense group's base outputs anew."""
        fill_uniform(self.dense_y[group], _SEED_STEP * self.seed + 2 * group + 2, _Y_SCALE)


def mixed_slots(tokens: int, adapters: int, base_share: float, seed: int) -> npt.NDArray[np.int32]:
    """Slots [tokens] in random order: ``base_share`` of them -1, the others shared out evenly.

    With no adapters all are -1. Raises ArgumentError for a share outside 0 to 1.
    """
    if not 0 <= base_share <= 1:
        raise ArgumentError(f"base_share is {base_share}; 0 to 1 is needed")
    slots = np.full(tokens, -1, np.int32)
    served = tokens - round(base_share * tokens) if adapters else 0
    slots[:served] = np.arange(served) % max(1, adapters)
    return np.random.default_rng(seed).permutation(slots)


def make_batch(
    model: ModelShape,
    backend: ArrayBackend,
    slots: npt.NDArray[np.int32],
    *,
    dtype: Any,
    seed: int = 0,
) -> StackBatch:
    """A batch of ``len(slots)`` tokens for ``model``, activations uniform in [-1, 1)."""
    dtype, tokens = resolve_dtype(dtype), check_int("len(slots)", len(slots), 0)
    ids, weights = _routes(model, tokens, seed)
    widths = [
        (group[0].in_features, sum(m.out_features for m in group)) for group in model.dense_groups
    ]
    batch = StackBatch(
        x=backend.empty((tokens, model.hidden), dtype),
        dense_x=tuple(backend.empty((tokens, width), dtype) for width, _ in widths),
        dense_y=tuple(backend.empty((tokens, width), dtype) for _, width in widths),
        token_to_slot=backend.asarray(slots),
        topk_ids=tuple(backend.asarray(layer) for layer in ids),
        topk_weights=tuple(backend.asarray(layer) for layer in weights),
        slots=slots,
        ids=ids,
        weights=weights,
        seed=seed,
    )
    batch.reset()
    return batch


def _routes(
    model: ModelShape, tokens: int, seed: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Every layer's router output: the top-k of random logits, softmax over those chosen."""
    moe = model.moe
    if moe is None:
        empty = np.zeros((model.layers, tokens, 1))
        return empty.astype(np.int32), empty.astype(np.float32)
    if moe.top_k > moe.experts:
        raise ArgumentError(f"model {model.name}: top-{moe.top_k} of {moe.experts} experts")
    rng = np.random.default_rng([seed, 1])
    routes = [_route(moe, tokens, rng) for _ in range(model.layers)]
    return np.stack([ids for ids, _ in routes]), np.stack([weights for _, weights in routes])


def _route(
    moe: MoeShape, tokens: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    logits = rng.standard_normal((tokens, moe.experts))
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : moe.top_k]
    chosen = np.exp(np.take_along_axis(logits, ids, axis=1))
    weights = chosen / chosen.sum(axis=1, keepdims=True)
    return ids.astype(np.int32), weights.astype(np.float32)
