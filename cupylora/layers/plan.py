"""A batch's work lists, in memory that is allocated once.

``BatchPlan.update`` sorts a batch's rows and cuts them into segments and tiles for the layers. A
dense layer is the case of one expert and top-1: one plan per batch serves all dense layers. A MoE
layer has its own routing, so a plan is updated per layer (layers run in order on one stream, which
lets them share it). In: ``token_to_slot`` and ``topk_ids``. Out: Routing and Segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupylora.backend import ArrayBackend
from cupylora.checks import (
    INT32,
    check_array,
    check_choice,
    check_int,
    check_max_loras,
    check_routing,
    check_type,
)
from cupylora.errors import ArgumentError, CapacityError
from cupylora.interop.convert import borrow
from cupylora.ops.build_segments import build_segments
from cupylora.ops.plan import plan, plan_workspace_bytes
from cupylora.shapes import MAX_EXPERTS, MAX_RANK
from cupylora.worklists import (
    MAX_ROWS,
    TILE_INTS,
    Array,
    Routing,
    RowOrder,
    Segments,
    choose_tile_rows,
    segment_capacity,
    tile_capacity,
)

__all__ = ["BatchPlan"]

_EMPTY = "the plan holds no batch yet; call update first"
_FAILED = "the plan holds no batch, since its last update or adopt failed; call update first"


@dataclass(frozen=True)
class _Lists:
    """Everything for batches of one size: views of the plan's buffers."""

    routing: Routing
    segments: Segments
    all_to_one: Array


@dataclass(frozen=True)
class _Batch:
    """What the plan holds. lists: None where no list was needed."""

    tokens: int
    active: int | None
    lists: tuple[Routing, Segments] | None


class BatchPlan:
    """Work lists for batches of up to ``max_tokens`` tokens.

    experts: local experts (1 and ``top_k`` 1: a dense layer's plan); start_expert: the first one's
    global id. row_order: how pairs are numbered. any_order: make room for rows in any order, which
    ``adopt`` needs; rows sorted here form fewer segments. max_active and max_rank: most adapters of
    a batch (default: few) and their largest rank, by which tiles are cut: speed only.

    A call that refuses its arguments by their dtype, shape or place leaves the plan as it was. One
    that fails later has begun to write over the batch before: the plan is empty then.
    """

    def __init__(
        self,
        backend: ArrayBackend,
        *,
        max_tokens: int,
        max_loras: int,
        experts: int = 1,
        top_k: int = 1,
        start_expert: int = 0,
        row_order: RowOrder = "token_major",
        any_order: bool = False,
        max_active: int | None = None,
        max_rank: int = 16,
    ) -> None:
        check_type("backend", backend, ArrayBackend)
        check_type("any_order", any_order, bool)
        self.backend = backend
        self.max_tokens = check_int("max_tokens", max_tokens, 1)
        self.max_loras = check_max_loras(max_loras)
        self.experts = check_int("experts", experts, 1, MAX_EXPERTS)
        self.top_k = check_int("top_k", top_k, 1)
        self.start_expert = check_int("start_expert", start_expert, 0)
        check_choice("row_order", row_order, ("token_major", "k_major"))
        self.row_order: RowOrder = row_order
        self.any_order = any_order
        self.max_active = 1 if max_active is None else check_int("max_active", max_active, 0)
        self.max_rank = check_int("max_rank", max_rank, 1, MAX_RANK)
        rows = self.max_tokens * self.top_k
        check_int("max_tokens * top_k", rows, 1, MAX_ROWS)
        room = self._segment_room(rows)
        self._row_to_pair = backend.empty(rows, np.int32)
        self._pair_to_row = backend.empty(rows, np.int32)
        self._offsets = backend.zeros(experts + 1, np.int64)
        self._start = backend.empty(room + 1, np.int32)
        self._expert, self._slot = (backend.empty(room, np.int32) for _ in range(2))
        self._count, self._tile_count = (backend.zeros(1, np.int32) for _ in range(2))
        self._tiles = backend.empty((tile_capacity(rows, room, 8), TILE_INTS), np.int32)
        dense = experts == 1 and top_k == 1 and start_expert == 0
        self._all_to_one = backend.zeros((max_tokens, 1), np.int32) if dense else None
        self._scratch = self._make_scratch(rows)
        self._lists: dict[tuple[int, int], _Lists] = {}
        self._batch: _Batch | None = None
        self._why_empty = _EMPTY

    @property
    def routing(self) -> Routing:
        """The current batch's rows. Raises ArgumentError where there is no batch, or no list of it
        (a dense plan's where ``active`` is 0)."""
        return self._made()[0]

    @property
    def segments(self) -> Segments:
        """The current batch's segments and tiles. Raises ArgumentError as ``routing`` does."""
        return self._made()[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the current batch."""
        return self._current().tokens

    @property
    def num_rows(self) -> int:
        """Rows of the current batch, T·k."""
        return self._current().tokens * self.top_k

    @property
    def active(self) -> int | None:
        """What ``update`` was told of the current batch's adapters; 0: it has none."""
        return self._current().active

    def _current(self) -> _Batch:
        if self._batch is None:
            raise ArgumentError(self._why_empty)
        return self._batch

    def _made(self) -> tuple[Routing, Segments]:
        lists = self._current().lists
        if lists is None:
            raise ArgumentError("the batch has no adapter (active is 0), so no lists were made")
        return lists

    def update(
        self,
        token_to_slot: Array,
        topk_ids: Array | None = None,
        *,
        active: int | None = None,
    ) -> None:
        """Make the lists of a batch; nothing is allocated once its number of tokens has come up.

        token_to_slot: int32 [T], negative for no adapter. topk_ids: int32 [T, top_k] global expert
        ids; left out in a dense plan. active: most adapters that the batch has, groups of rows of
        no adapter counted or not, if known: for speed, but a promise, since adapters beyond it may
        not be applied. 0: no row has an adapter, so that layers enqueue nothing for LoRA, and a
        dense plan nothing at all.

        Raises ArgumentError for arrays that do not fit, on NumPy also for a slot >= max_loras (on
        CUDA the next call reports it) and for a row with an adapter where ``active`` is 0;
        CapacityError for more than max_tokens tokens, on NumPy also for more adapters than
        ``active`` (on CUDA the next call reports those that ran without their adapter).
        """
        self.backend.check_status()
        token_to_slot, tokens = self._check_slots(token_to_slot)
        if active is not None:
            active = check_int("active", active, 0)
        if topk_ids is None and self._all_to_one is None:
            raise ArgumentError(f"topk_ids is missing; a plan of {self.experts} experts needs them")
        lists = self._of(tokens, active)
        ids = lists.all_to_one if topk_ids is None else self._ours("topk_ids", topk_ids)
        shape = (tokens, self.top_k)
        check_array("topk_ids", ids, dtype=INT32, shape=shape, on_device=self.backend.on_device)
        if active == 0 and not self.backend.on_device and (token_to_slot >= 0).any():
            raise ArgumentError("active is 0, but token_to_slot has rows with an adapter")
        if active == 0 and topk_ids is None:
            self._batch = _Batch(tokens, active, None)
            return
        self._drop()
        made = plan(
            ids,
            token_to_slot,
            num_experts=self.experts,
            max_loras=self.max_loras,
            tile_rows=lists.segments.tile_rows,
            max_active=active,
            start_expert=self.start_expert,
            row_order=self.row_order,
            out=(lists.routing, lists.segments),
            workspace=self._scratch,
            status=self.backend.status,
        )
        self._batch = _Batch(tokens, active, made)

    def adopt(self, routing: Routing, token_to_slot: Array) -> None:
        """Take another stack's row order, sorted by expert at least, instead of making one.

        ``routing``'s sizes must be this plan's, and its arrays stay the caller's. Needs a plan with
        ``any_order``. Raises as ``update`` does.
        """
        self.backend.check_status()
        if not self.any_order:
            raise ArgumentError("this plan has room for its own order only; make it with any_order")
        routing = self._ours("routing", routing)
        check_routing(routing, on_device=self.backend.on_device)
        for field, needed in (
            ("num_experts", self.experts),
            ("top_k", self.top_k),
            ("start_expert", self.start_expert),
            ("row_order", self.row_order),
        ):
            got = getattr(routing, field)
            if got != needed:
                raise ArgumentError(f"routing.{field} is {got}; this plan's is {needed}")
        token_to_slot, tokens = self._check_slots(token_to_slot)
        if routing.num_tokens != tokens:
            raise ArgumentError(
                f"routing.num_tokens is {routing.num_tokens}; token_to_slot has {tokens}"
            )
        segments = self._of(tokens, None).segments
        self._drop()
        made = build_segments(
            routing,
            token_to_slot,
            max_loras=self.max_loras,
            tile_rows=segments.tile_rows,
            max_segments=segments.expert.shape[0],
            out=segments,
            workspace=self._scratch,
            status=self.backend.status,
        )
        self._batch = _Batch(tokens, None, (routing, made))

    def _drop(self) -> None:
        """No batch, until the lists that are written from here on are complete."""
        self._batch, self._why_empty = None, _FAILED

    def _ours(self, name: str, value: Any) -> Any:
        return borrow(name, value, on_device=self.backend.on_device)

    def _check_slots(self, token_to_slot: Array) -> tuple[Array, int]:
        """The array to work with, and its number of tokens."""
        on_device = self.backend.on_device
        token_to_slot = self._ours("token_to_slot", token_to_slot)
        check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(None,), on_device=on_device)
        tokens = int(token_to_slot.shape[0])
        if tokens > self.max_tokens:
            raise CapacityError(
                f"token_to_slot has {tokens} tokens; this plan has room for {self.max_tokens}"
            )
        return token_to_slot, tokens

    def _make_scratch(self, rows: int) -> Array | None:
        if not self.backend.on_device:
            return None
        size = plan_workspace_bytes(rows, self.experts, self.max_loras)
        return self.backend.empty(size, np.dtype(np.uint8))

    def _segment_room(self, rows: int) -> int:
        if self.any_order:
            return max(1, rows)
        return segment_capacity(rows, self.experts, self.max_loras)

    def _of(self, tokens: int, active: int | None) -> _Lists:
        tile_rows = choose_tile_rows(
            tokens * self.top_k,
            self.experts,
            max_active=self.max_active if active is None else active,
            max_rank=self.max_rank,
        )
        lists = self._lists.get((tokens, tile_rows))
        if lists is None:
            lists = self._lists[tokens, tile_rows] = self._views(tokens, tile_rows)
        return lists

    def _views(self, tokens: int, tile_rows: int) -> _Lists:
        rows = tokens * self.top_k
        room = self._segment_room(rows)
        routing = Routing(
            self._row_to_pair[:rows],
            self._pair_to_row[:rows],
            self._offsets,
            num_tokens=tokens,
            top_k=self.top_k,
            num_experts=self.experts,
            start_expert=self.start_expert,
            row_order=self.row_order,
        )
        segments = Segments(
            self._start[: room + 1],
            self._expert[:room],
            self._slot[:room],
            self._count,
            self._tiles[: tile_capacity(rows, room, tile_rows)],
            self._tile_count,
            tile_rows,
            self.max_loras,
        )
        ids = None if self._all_to_one is None else self._all_to_one[:tokens]
        return _Lists(routing, segments, ids)
