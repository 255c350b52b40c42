"""Which captured graph serves a batch: token buckets, active-LoRA cases, and a key of both.

A graph is captured for a number of tokens (the *bucket*: smaller batches are padded to it) and for
the most groups of rows that a batch may have (the *case*). A group is the rows of one adapter, or
the rows of no adapter where they stand beside others. Case 0 is the batch without any adapter: its
graph holds no LoRA kernel. What another case changes is grid capacity and the choice of kernels;
a larger case serves a smaller batch with the same result.

In: tokens and groups of a batch, and which keys have a graph. Out: the key to replay, or None for
an eager step, and counts of both. Plain Python, no device.

The cases are those of vLLM's ``cudagraph_specialize_lora`` and ``specialize_active_lora``; the
count of groups is its own: rows of no adapter beside adapters are one group more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from cupylora.checks import INT32, check_array, check_int, check_max_loras, check_type
from cupylora.errors import ArgumentError
from cupylora.interop.convert import borrow
from cupylora.text import counted
from cupylora.worklists import MAX_ROWS

__all__ = [
    "DEFAULT_TOKEN_BUCKETS",
    "BatchKey",
    "Choice",
    "DispatchCounts",
    "DispatchOptions",
    "Dispatcher",
    "EagerReason",
    "count_active_loras",
    "lora_cases",
]

DEFAULT_TOKEN_BUCKETS = (1, 2, 4, *range(8, 513, 8))
"""1, 2, 4, then every multiple of 8 up to 512."""

EagerReason = Literal[
    "no tokens",
    "more tokens than any bucket",
    "no graph",
    "captured by it",
    "its capture failed",
    "graphs are off",
]
"""Why a batch was served without a graph; "by it": it was the first of a key captured lazily."""


@dataclass(frozen=True, slots=True)
class BatchKey:
    """What a graph was captured for.

    num_tokens: rows of x, padding included. num_active_loras: the case. num_reqs and uniform (every
    request has equally many tokens) matter to hosts whose own nodes depend on them; a graph that
    does not carry them has None and False, the *relaxed* form.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    num_active_loras: int = 0

    def relaxed(self) -> BatchKey:
        """This key without ``num_reqs`` and ``uniform``; the case stays."""
        return replace(self, num_reqs=None, uniform=False)


@dataclass(frozen=True)
class DispatchOptions:
    """Which graphs there are.

    token_buckets: rising; a larger batch is served eagerly. None: DEFAULT_TOKEN_BUCKETS as far as
    the steps' size goes, and that size itself where it is smaller than the last.
    specialize_lora: a case 0 of its own, without LoRA kernels; off: batches without adapters take
    the graphs of the others.
    specialize_active_loras: cases for few adapters too, not only for most; needs specialize_lora.
    prune: leave out the cases that no batch of a bucket can have.
    """

    token_buckets: tuple[int, ...] | None = None
    specialize_lora: bool = True
    specialize_active_loras: bool = False
    prune: bool = True

    def __post_init__(self) -> None:
        for switch in ("specialize_lora", "specialize_active_loras", "prune"):
            check_type(switch, getattr(self, switch), bool)
        if self.specialize_active_loras and not self.specialize_lora:
            raise ArgumentError(
                "specialize_active_loras needs specialize_lora, which is off; turn both on or "
                "both off"
            )
        buckets = self.token_buckets
        if buckets is None:
            return
        if not isinstance(buckets, tuple) or not buckets:
            raise ArgumentError(f"token_buckets is {buckets!r}; a tuple of numbers is needed")
        for index, bucket in enumerate(buckets):
            check_int(f"token_buckets[{index}]", bucket, 1, MAX_ROWS)
        for before, after in pairwise(buckets):
            if after <= before:
                raise ArgumentError(f"token_buckets: {after} follows {before}; they must rise")

    def buckets(self, max_tokens: int) -> tuple[int, ...]:
        """The buckets of steps of up to ``max_tokens`` tokens. Raises ArgumentError for larger."""
        most = check_int("max_tokens", max_tokens, 1, MAX_ROWS)
        if self.token_buckets is None:
            fitting = tuple(n for n in DEFAULT_TOKEN_BUCKETS if n <= most)
            return (
                fitting
                if most >= DEFAULT_TOKEN_BUCKETS[-1]
                else tuple(dict.fromkeys((*fitting, most)))
            )
        if self.token_buckets[-1] > most:
            raise ArgumentError(
                f"token_buckets: {self.token_buckets[-1]} is more than the {most} tokens of the "
                "largest step; leave it out or raise max_tokens"
            )
        return self.token_buckets

    def cases(self, max_loras: int) -> tuple[int, ...]:
        """The cases of a runtime of ``max_loras`` slots, rising."""
        if not self.specialize_lora:
            return (check_max_loras(max_loras) + 1,)
        return lora_cases(max_loras, self.specialize_active_loras)


def lora_cases(max_loras: int, specialize: bool) -> tuple[int, ...]:
    """Numbers of groups that graphs are captured for, rising.

    0 and ``max_loras`` + 1 (all slots, and rows of no adapter beside them); with ``specialize`` the
    powers of two up to ``max_loras`` between them: 4 slots have 0, 1, 2, 4, 5.
    """
    most = check_max_loras(max_loras)
    check_type("specialize", specialize, bool)
    powers = (1 << n for n in range(most.bit_length())) if specialize else ()
    return (0, *powers, most + 1)


def count_active_loras(token_to_slot: Any) -> int:
    """Groups of a batch: its distinct adapters, plus one if rows of no adapter are beside them.

    token_to_slot: int32 [T] on the host, without padding; negative: no adapter. A batch without
    any adapter has 0. Raises ArgumentError for anything else.
    """
    token_to_slot = borrow("token_to_slot", token_to_slot, on_device=False)
    check_array("token_to_slot", token_to_slot, dtype=INT32, shape=(None,), on_device=False)
    slots = np.unique(token_to_slot)
    adapters = int(np.count_nonzero(slots >= 0))
    return adapters + (0 < adapters < len(slots))


@dataclass(frozen=True)
class DispatchCounts:
    """What a dispatcher chose. hits: batches by the key that served them; eager: by reason.

    tokens and padding: rows of batches served by a graph, and rows added to fill their buckets.
    """

    hits: Mapping[BatchKey, int]
    eager: Mapping[EagerReason, int]
    tokens: int
    padding: int

    @property
    def padding_share(self) -> float:
        """Padding among all rows that graphs were replayed on; 0 where there were none."""
        rows = self.tokens + self.padding
        return self.padding / rows if rows else 0.0


_Exact = tuple[int, int | None, bool]
"""Of a key that is not relaxed: bucket, num_reqs, uniform."""


@dataclass(slots=True)
class Choice:
    """A key that has a graph, and how often it was taken: counted here, since hashing a key costs
    as much as the look-up. graph: what was given to ``Dispatcher.add`` with it."""

    key: BatchKey
    hits: int = 0
    graph: Any = None


_Table = list[list[Choice | None]]


class Dispatcher:
    """Chooses, among the keys that have a graph, the one that serves a batch.

    max_loras: slots of the runtime. max_tokens: of its largest step. At first no key has a graph;
    ``add`` and ``remove`` say what was captured and dropped. The choice is two lookups in a table,
    made anew after those.
    """

    def __init__(
        self,
        max_loras: int,
        options: DispatchOptions | None = None,
        *,
        max_tokens: int = DEFAULT_TOKEN_BUCKETS[-1],
    ) -> None:
        options = DispatchOptions() if options is None else options
        check_type("options", options, DispatchOptions)
        self.options = options
        self.max_loras = check_max_loras(max_loras)
        self.buckets = options.buckets(max_tokens)
        self.cases = options.cases(max_loras)
        self._bucket_of = _next_index(self.buckets)
        self._case_of = _next_index(self.cases)
        self._relaxed: set[BatchKey] = set()
        self._exact: dict[_Exact, list[int]] = {}
        self._table: _Table = []
        self._choices: dict[BatchKey, Choice] = {}
        self.reset_counts()

    @property
    def largest_bucket(self) -> int:
        """Tokens of the largest batch that a graph may serve."""
        return self.buckets[-1]

    def all_keys(self, prune: bool | None = None) -> tuple[BatchKey, ...]:
        """Every relaxed key, in the order of capture: most tokens first, then most groups.

        prune: None takes the options' choice. A batch has at most as many groups as tokens, so the
        cases of a bucket beyond the first that covers all its tokens cannot occur.
        """
        prune = self.options.prune if prune is None else prune
        return tuple(
            BatchKey(bucket, num_active_loras=case)
            for bucket in reversed(self.buckets)
            for case in reversed(self.cases)
            if not prune or case <= self._largest_case(bucket)
        )

    def ideal(self, num_tokens: int, num_active_loras: int) -> BatchKey | None:
        """The smallest key that covers a batch, captured or not; None: larger than every bucket.

        Raises ArgumentError for a number of groups that a batch cannot have.
        """
        self._check_batch(num_tokens, num_active_loras)
        if not 0 < num_tokens <= self.largest_bucket:
            return None
        bucket = self.buckets[self._bucket_of[num_tokens]]
        return BatchKey(bucket, num_active_loras=self.cases[self._case_of[num_active_loras]])

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, BatchKey):
            return False
        return key in self._relaxed or key.num_active_loras in self._exact.get(_exact(key), ())

    def check_key(self, key: BatchKey) -> None:
        """Raise ArgumentError unless ``key`` is of these buckets and cases."""
        check_type("key", key, BatchKey)
        if key.num_tokens not in self.buckets or key.num_active_loras not in self.cases:
            raise ArgumentError(
                f"{key} is not of the token buckets {_some(self.buckets)} and cases {self.cases}"
            )

    def add(self, key: BatchKey, graph: Any = None) -> None:
        """``key`` has a graph now. Raises ArgumentError if it is none of these buckets and cases.

        A key with ``num_reqs`` or ``uniform`` serves batches of just those.
        """
        self.check_key(key)
        self._choice(key).graph = graph
        if key == key.relaxed():
            self._relaxed.add(key)
            self._table = []
        elif key not in self:
            cases = self._exact.setdefault(_exact(key), [])
            cases.insert(bisect_left(cases, key.num_active_loras), key.num_active_loras)

    def remove(self, key: BatchKey) -> None:
        """``key`` has no graph any more. Raises ArgumentError if it had none."""
        if key not in self:
            raise ArgumentError(f"{key} has no graph")
        self._choice(key).graph = None
        if key in self._relaxed:
            self._relaxed.remove(key)
            self._table = []
        else:
            self._exact[_exact(key)].remove(key.num_active_loras)

    def dispatch(
        self,
        num_tokens: int,
        num_active_loras: int,
        *,
        num_reqs: int | None = None,
        uniform: bool = False,
    ) -> BatchKey | None:
        """The key whose graph serves this batch, or None: serve it eagerly. Counts the choice.

        num_tokens: without padding; num_active_loras: as ``count_active_loras`` counts. A key for
        just these ``num_reqs`` and ``uniform`` goes first, then the smallest bucket and in it the
        smallest case that covers the batch; where that key was dropped, the next larger one.
        Raises ArgumentError as ``ideal`` does.
        """
        choice = self.choose(num_tokens, num_active_loras, num_reqs=num_reqs, uniform=uniform)
        return None if choice is None else choice.key

    def choose(
        self,
        num_tokens: int,
        num_active_loras: int,
        *,
        num_reqs: int | None = None,
        uniform: bool = False,
    ) -> Choice | None:
        """``dispatch``, with the graph."""
        self._check_batch(num_tokens, num_active_loras)
        if not 0 < num_tokens <= self.buckets[-1]:
            self.count_eager("more tokens than any bucket" if num_tokens else "no tokens")
            return None
        bucket = self._bucket_of[num_tokens]
        choice = None
        if self._exact and (num_reqs is not None or uniform):
            choice = self._find_exact(bucket, num_active_loras, num_reqs, uniform)
        if choice is None:
            table = self._table or self._make_table()
            choice = table[bucket][self._case_of[num_active_loras]]
        if choice is None:
            self.count_eager("no graph")
            return None
        choice.hits += 1
        self._tokens += num_tokens
        self._padding += choice.key.num_tokens - num_tokens
        return choice

    def count_eager(self, reason: EagerReason) -> None:
        """A batch was served eagerly without being dispatched."""
        self._eager[reason] = self._eager.get(reason, 0) + 1

    def counts(self) -> DispatchCounts:
        """What has been chosen since the start or the last ``reset_counts``."""
        hits = {key: choice.hits for key, choice in self._choices.items() if choice.hits}
        return DispatchCounts(hits, dict(self._eager), self._tokens, self._padding)

    def reset_counts(self) -> None:
        """Begin to count anew."""
        for choice in self._choices.values():
            choice.hits = 0
        self._eager: dict[EagerReason, int] = {}
        self._tokens = self._padding = 0

    def _largest_case(self, bucket: int) -> int:
        """The smallest case that covers ``bucket`` groups, or the largest there is."""
        return self.cases[self._case_of[min(bucket, self.cases[-1])]]

    def _choice(self, key: BatchKey) -> Choice:
        return self._choices.setdefault(key, Choice(key))

    def _find_exact(
        self, bucket: int, active: int, num_reqs: int | None, uniform: bool
    ) -> Choice | None:
        tokens = self.buckets[bucket]
        cases = self._exact.get((tokens, num_reqs, uniform), [])
        at = bisect_left(cases, active)
        if at == len(cases):
            return None
        return self._choice(BatchKey(tokens, num_reqs, uniform, cases[at]))

    def _make_table(self) -> _Table:
        """Per bucket and case the captured key to take: that one, else the next larger case of the
        bucket, else what the next larger bucket takes."""
        larger: list[Choice | None] = [None] * len(self.cases)
        table = []
        for bucket in reversed(self.buckets):
            row = list(larger)
            above: Choice | None = None
            for index in reversed(range(len(self.cases))):
                key = BatchKey(bucket, num_active_loras=self.cases[index])
                above = self._choice(key) if key in self._relaxed else above
                row[index] = above or larger[index]
            table.append(row)
            larger = row
        self._table = table[::-1]
        return self._table

    def _check_batch(self, num_tokens: int, active: int) -> None:
        if type(num_tokens) is not int or type(active) is not int or num_tokens < 0:
            check_int("num_tokens", num_tokens, 0)
            check_int("num_active_loras", active, 0)
        if not 0 <= active <= num_tokens or active > self.max_loras + 1:
            raise ArgumentError(
                f"num_active_loras is {active}; a batch of {counted(num_tokens, 'token')} in "
                f"{counted(self.max_loras, 'slot')} has 0 to {min(num_tokens, self.max_loras + 1)}"
            )


def _exact(key: BatchKey) -> _Exact:
    return key.num_tokens, key.num_reqs, key.uniform


def _next_index(values: Sequence[int]) -> list[int]:
    """For every number up to the last of the rising ``values``: index of the first covering it."""
    found: list[int] = []
    for index, value in enumerate(values):
        found += [index] * (value + 1 - len(found))
    return found


def _some(values: Sequence[int]) -> str:
    if len(values) <= 8:
        return str(tuple(values))
    return f"({', '.join(map(str, values[:4]))} ... {values[-1]})"
