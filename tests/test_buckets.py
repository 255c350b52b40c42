"""Token buckets and active-LoRA cases: every batch finds a key that covers it, the smallest there
is, and what was chosen is counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupylora.errors import ArgumentError
from cupylora.graphs.buckets import (
    DEFAULT_TOKEN_BUCKETS,
    BatchKey,
    Dispatcher,
    DispatchOptions,
    count_active_loras,
    lora_cases,
)

SPECIALIZED = {"specialize_lora": True, "specialize_active_loras": True}
SWITCHES = [
    pytest.param(SPECIALIZED, id="specialised"),
    pytest.param({"specialize_active_loras": False}, id="with and without LoRA"),
    pytest.param({"specialize_lora": False}, id="one case"),
]


def dispatcher(max_loras: int, *buckets: int, captured: bool = True, **options: Any) -> Dispatcher:
    """With all its keys captured."""
    made = Dispatcher(max_loras, DispatchOptions(buckets or DEFAULT_TOKEN_BUCKETS, **options))
    for key in made.all_keys() if captured else ():
        made.add(key)
    return made


def key(tokens: int, active: int, **fields: Any) -> BatchKey:
    return BatchKey(tokens, num_active_loras=active, **fields)


def smallest(keys: Iterable[BatchKey], tokens: int, active: int) -> BatchKey | None:
    """Of those that cover a batch."""
    covering = (k for k in keys if k.num_tokens >= tokens and k.num_active_loras >= active)
    return min(covering, key=lambda k: (k.num_tokens, k.num_active_loras), default=None)


def test_default_buckets() -> None:
    assert DEFAULT_TOKEN_BUCKETS[:6] == (1, 2, 4, 8, 16, 24)
    assert DEFAULT_TOKEN_BUCKETS[-2:] == (504, 512)
    assert len(DEFAULT_TOKEN_BUCKETS) == 67


@pytest.mark.parametrize(
    ("max_tokens", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (21, (1, 2, 4, 8, 16, 21)),
        (512, DEFAULT_TOKEN_BUCKETS),
        (4096, DEFAULT_TOKEN_BUCKETS),
    ],
)
def test_default_buckets_follow_the_largest_step(max_tokens: int, buckets: tuple[int, ...]) -> None:
    assert Dispatcher(4, max_tokens=max_tokens).buckets == buckets
    assert DispatchOptions().buckets(max_tokens) == buckets


@pytest.mark.parametrize(
    ("max_loras", "specialized"),
    [
        (1, (0, 1, 2)),
        (2, (0, 1, 2, 3)),
        (3, (0, 1, 2, 4)),
        (4, (0, 1, 2, 4, 5)),
        (7, (0, 1, 2, 4, 8)),
        (16, (0, 1, 2, 4, 8, 16, 17)),
        (64, (0, 1, 2, 4, 8, 16, 32, 64, 65)),
    ],
)
def test_cases(max_loras: int, specialized: tuple[int, ...]) -> None:
    assert lora_cases(max_loras, True) == specialized
    assert lora_cases(max_loras, False) == (0, max_loras + 1)
    assert DispatchOptions(specialize_lora=False).cases(max_loras) == (max_loras + 1,)
    assert DispatchOptions(**SPECIALIZED).cases(max_loras) == specialized
    assert DispatchOptions().cases(max_loras) == (0, max_loras + 1)


def test_four_slots_and_two_buckets_are_ten_keys() -> None:
    made = dispatcher(4, 1, 8, captured=False, **SPECIALIZED)
    every = made.all_keys(prune=False)
    assert len(every) == len(set(every)) == 10
    assert every[0] == key(8, 5)  # most work first
    assert every[-1] == key(1, 0)
    assert set(made.all_keys()) == {
        key(1, 0),
        key(1, 1),
        *(key(8, case) for case in (0, 1, 2, 4, 5)),
    }


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("buckets", [DEFAULT_TOKEN_BUCKETS, (1, 2, 4, 8, 16, 24, 70)])
def test_every_batch_is_covered(switches: dict[str, bool], buckets: tuple[int, ...]) -> None:
    """Every max_loras 1 to 64, every number of tokens, of adapters, with and without base rows,
    where only the keys are captured that a batch can need."""
    for max_loras in range(1, 65):
        made = dispatcher(max_loras, *buckets, **switches)
        for tokens in range(1, buckets[-1] + 1):
            for active in range(min(tokens, max_loras + 1) + 1):
                found = made.dispatch(tokens, active)
                assert found is not None
                assert found.num_tokens >= tokens
                assert found.num_active_loras >= active
                if made.options.specialize_lora:
                    assert (found.num_active_loras == 0) == (active == 0)


@pytest.mark.parametrize("switches", SWITCHES)
def test_the_smallest_key_is_taken(switches: dict[str, bool]) -> None:
    made = dispatcher(6, 1, 3, 9, **switches)
    for tokens in range(1, 10):
        for active in range(min(tokens, 7) + 1):
            fitting = [
                k
                for k in made.all_keys()
                if k.num_tokens >= tokens and k.num_active_loras >= active
            ]
            smallest = min(fitting, key=lambda k: (k.num_tokens, k.num_active_loras))
            assert made.dispatch(tokens, active) == smallest


@given(
    adapters=st.integers(0, 64),
    base=st.integers(0, 4),
    repeats=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_groups_are_distinct_adapters_and_base_rows_beside_them(
    adapters: int, base: int, repeats: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    used = rng.permutation(64)[:adapters]
    slots = np.concatenate([np.tile(used, repeats), -rng.integers(1, 9, base)]).astype(np.int32)
    groups = adapters + (1 if adapters and base else 0)
    assert count_active_loras(rng.permutation(slots)) == groups
    if 0 < len(slots) <= 512:
        found = dispatcher(64, **SPECIALIZED).dispatch(len(slots), groups)
        assert found is not None
        assert found.num_active_loras >= groups


@pytest.mark.parametrize("adapters", [1, 2, 4, 8])
def test_base_rows_beside_a_power_of_two_of_adapters_are_not_forgotten(adapters: int) -> None:
    made = dispatcher(8, 16, **SPECIALIZED)
    alone = np.arange(adapters, dtype=np.int32)
    mixed = np.append(alone, np.int32(-1))
    cases = []
    for slots in (alone, mixed):
        found = made.dispatch(len(slots), count_active_loras(slots))
        assert found is not None
        cases.append(found.num_active_loras)
    assert cases[0] == adapters
    assert cases[1] > adapters


def test_counting_does_not_take_padding_or_device_arrays() -> None:
    assert count_active_loras(np.zeros(0, np.int32)) == 0
    assert count_active_loras(np.full(5, -1, np.int32)) == 0
    with pytest.raises(ArgumentError, match=r"token_to_slot has dtype int64; int32 is needed"):
        count_active_loras(np.zeros(3, np.int64))
    with pytest.raises(ArgumentError, match=r"token_to_slot has shape \(1, 3\)"):
        count_active_loras(np.zeros((1, 3), np.int32))


def test_what_no_graph_serves_is_eager_and_counted() -> None:
    made = dispatcher(4, 1, 8)
    assert made.dispatch(9, 3) is None
    assert made.dispatch(100, 0) is None
    assert made.dispatch(0, 0) is None
    assert made.ideal(9, 3) is None
    assert made.ideal(0, 0) is None
    for k in made.all_keys():
        made.remove(k)
    assert made.dispatch(5, 1) is None
    counts = made.counts()
    assert counts.eager == {"no tokens": 1, "more tokens than any bucket": 2, "no graph": 1}
    assert (counts.hits, counts.tokens, counts.padding) == ({}, 0, 0)
    assert counts.padding_share == 0.0


def test_hits_and_padding_are_counted_by_key() -> None:
    made = dispatcher(4, 1, 8, **SPECIALIZED)
    for tokens, active in [(1, 1), (5, 2), (5, 3), (8, 0), (8, 5), (3, 2)]:
        made.dispatch(tokens, active)
    counts = made.counts()
    expected = {(1, 1): 1, (8, 2): 2, (8, 4): 1, (8, 0): 1, (8, 5): 1}
    assert counts.hits == {key(*k): n for k, n in expected.items()}
    assert (counts.tokens, counts.padding) == (30, 11)
    assert counts.padding_share == 11 / 41
    made.reset_counts()
    assert made.counts().hits == {}
    assert counts.hits[key(8, 2)] == 2  # a snapshot


@given(
    max_loras=st.integers(1, 9),
    buckets=st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True),
    data=st.data(),
)
def test_where_keys_were_dropped_the_next_larger_one_serves(
    max_loras: int, buckets: list[int], data: st.DataObject
) -> None:
    made = dispatcher(max_loras, *sorted(buckets), captured=False, **SPECIALIZED)
    captured = data.draw(st.sets(st.sampled_from(made.all_keys(prune=False))))
    for k in captured:
        made.add(k)
    tokens = data.draw(st.integers(1, made.largest_bucket))
    active = data.draw(st.integers(0, min(tokens, max_loras + 1)))
    assert made.dispatch(tokens, active) == smallest(captured, tokens, active)
    assert all((k in made) == (k in captured) for k in made.all_keys(prune=False))


def test_a_key_of_requests_serves_only_them_and_goes_first() -> None:
    made = dispatcher(4, 4, 8, **SPECIALIZED)
    decode = key(8, 2, num_reqs=4, uniform=True)
    made.add(decode)
    made.add(key(8, 5, num_reqs=4, uniform=True))
    made.add(decode)  # once more changes nothing
    assert decode.relaxed() == key(8, 2)
    assert decode in made
    assert made.dispatch(8, 1, num_reqs=4, uniform=True) == decode
    assert made.dispatch(7, 2, num_reqs=4, uniform=True) == decode
    assert made.dispatch(8, 3, num_reqs=4, uniform=True) == key(8, 5, num_reqs=4, uniform=True)
    assert made.dispatch(8, 2, num_reqs=4) == key(8, 2)
    assert made.dispatch(8, 2, num_reqs=3, uniform=True) == key(8, 2)
    assert made.dispatch(8, 2) == key(8, 2)
    assert made.dispatch(4, 2, num_reqs=4, uniform=True) == key(4, 2)
    made.remove(decode)
    assert decode not in made
    assert made.dispatch(8, 1, num_reqs=4, uniform=True) == key(8, 5, num_reqs=4, uniform=True)


def test_keys_are_values() -> None:
    with pytest.raises(FrozenInstanceError):
        key(8, 1).num_tokens = 4  # type: ignore[misc]
    assert key(8, 1, num_reqs=8, uniform=True).relaxed() == BatchKey(8, None, False, 1)
    assert "x" not in dispatcher(4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_buckets": ()}, r"token_buckets is \(\); a tuple of numbers is needed"),
        ({"token_buckets": [1, 2]}, r"token_buckets is \[1, 2\]; a tuple of numbers is needed"),
        ({"token_buckets": (1, 0)}, r"token_buckets\[1\] is 0; 1 to \d+ is needed"),
        ({"token_buckets": (1, 8, 4)}, r"token_buckets: 4 follows 8; they must rise"),
        ({"token_buckets": (1, 1)}, r"token_buckets: 1 follows 1; they must rise"),
        ({"token_buckets": (1, 2.0)}, r"token_buckets\[1\]"),
        ({"specialize_lora": 1}, r"specialize_lora is a int; a bool is needed"),
        (
            {"specialize_lora": False, "specialize_active_loras": True},
            r"specialize_active_loras needs specialize_lora, which is off",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DispatchOptions(**options)


def test_batches_and_keys_that_cannot_be_are_refused() -> None:
    made = dispatcher(4, 1, 8)
    refused = [
        (lambda: made.dispatch(3, 4), r"num_active_loras is 4; a batch of 3 tokens .* has 0 to 3"),
        (lambda: made.dispatch(8, 6), r"num_active_loras is 6; .* in 4 slots has 0 to 5"),
        (lambda: made.dispatch(-1, 0), r"num_tokens is -1"),
        (lambda: made.dispatch(8, -1), r"num_active_loras is -1"),
        (lambda: made.dispatch(2.0, 1), r"num_tokens is .*2\.0"),  # type: ignore[arg-type]
        (lambda: made.add(key(4, 5)), r"is not of the token buckets \(1, 8\) and cases \(0, 5\)"),
        (lambda: made.add(key(8, 2)), r"is not of the token buckets"),
        (lambda: made.add((8, 5)), r"key is a tuple; a BatchKey is needed"),  # type: ignore[arg-type]
        (lambda: made.remove(key(8, 5, num_reqs=1)), r"has no graph"),
        (lambda: Dispatcher(0), r"max_loras is 0"),
    ]
    for call, message in refused:
        with pytest.raises(ArgumentError, match=message):
            call()
    assert made.counts().eager == {}
