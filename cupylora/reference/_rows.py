"""What several ops derive from a routing: each valid row's pair, token and expert, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cupylora.checks import check_routing
from cupylora.errors import ArgumentError
from cupylora.worklists import Routing

__all__ = ["RowIndex", "ValidRows", "valid_rows"]

RowIndex = Literal["token", "pair", "row"]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ValidRows:
    """Pair, token and local expert of each row that is not a ghost, int64 each."""

    pair: Index
    token: Index
    expert: Index

    def __len__(self) -> int:
        return len(self.pair)

    def index(self, by: RowIndex) -> Index:
        """Where each row lies in an array laid out by token, pair or row."""
        if by == "row":
            return np.arange(len(self), dtype=np.int64)
        return self.token if by == "token" else self.pair


def valid_rows(routing: Any) -> ValidRows:
    """The rows of ``routing`` below its last offset, whoever made it.

    Raises ArgumentError naming the field where an array has the wrong type or shape, the offsets do
    not rise from 0, or a row's pair is not one of the batch.
    """
    check_routing(routing, on_device=False)
    experts = _experts(routing)
    pairs = _pairs(routing)
    return ValidRows(pairs, _tokens(pairs, routing), experts)


def _experts(routing: Routing) -> Index:
    offsets = routing.expert_first_token_offset
    sizes = np.diff(offsets)
    if offsets[0] != 0 or (sizes < 0).any() or offsets[-1] > routing.num_rows:
        raise ArgumentError(
            f"routing.expert_first_token_offset goes from {offsets[0]} to {offsets[-1]}"
            + (" and falls in between" if (sizes < 0).any() else "")
            + f"; it must rise from 0 to at most {routing.num_rows}, tokens times top_k"
        )
    experts: Index = np.repeat(np.arange(routing.num_experts, dtype=np.int64), sizes)
    return experts


def _pairs(routing: Routing) -> Index:
    valid = int(routing.expert_first_token_offset[-1])
    pairs: Index = routing.row_to_pair[:valid].astype(np.int64)
    bad = (pairs < 0) | (pairs >= routing.num_rows)
    if bad.any():
        row = int(np.argmax(bad))
        raise ArgumentError(
            f"routing.row_to_pair[{row}] is {pairs[row]}; a valid row's pair is "
            f"0 to {routing.num_rows - 1}"
        )
    return pairs


def _tokens(pairs: Index, routing: Routing) -> Index:
    if routing.row_order == "k_major":
        return pairs % max(1, routing.num_tokens)
    return pairs // routing.top_k
