"""requests_to_tokens: each token gets its request's slot; a bad request is named, no write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupylora.errors import ArgumentError
from cupylora.reference.requests_to_tokens import CONTEXT, GENERATION, requests_to_tokens


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 9), st.integers(-3, 4))))
def test_matches_plain_repetition(requests: list[tuple[int, int, int]]) -> None:
    expected: list[int] = []
    for kind, length, slot in requests:
        expected += [max(slot, -1)] * (1 if kind == GENERATION else length)
    types, lengths, slots = np.array(requests, np.int32).reshape(-1, 3).T.copy()
    got = requests_to_tokens(types, lengths, slots, len(expected), 5)
    assert got.dtype == np.int32
    assert got.tolist() == expected


def test_writes_into_out() -> None:
    out = np.full(4, 99, np.int32)
    got = requests_to_tokens(_ints(0, 1), _ints(3, 50), _ints(2, -1), 4, 3, out=out)
    assert got is out
    assert out.tolist() == [2, 2, 2, -1]


@pytest.mark.parametrize(
    ("types", "lengths", "slots", "tokens", "message"),
    [
        (_ints(0, 2), _ints(1, 1), _ints(0, 0), 2, "request 1 has type 2"),
        (_ints(0, -1), _ints(1, 1), _ints(0, 0), 2, "request 1 has type -1"),
        (_ints(0, 0, 0), _ints(2, -3, 2), _ints(0, 0, 0), 1, "request 1 has context length -3"),
        (_ints(1, 1), _ints(0, -1), _ints(0, 0), 2, "request 1 has context length -1"),
        (_ints(0, 1), _ints(1, 0), _ints(0, 4), 2, "request 1 has slot 4"),
        (_ints(0, 0, 1), _ints(2, 2, 0), _ints(0, 0, 0), 3, "request 1 ends at token 4"),
        (_ints(0, 1), _ints(2, 0), _ints(0, 0), 4, "request 1, the last, ends at token 3"),
        (_ints(), _ints(), _ints(), 4, "no request ends at token 0"),
        (_ints(0, 0), _ints(2**31 - 1, 2**31 - 1), _ints(0, 0), 4, "request 0 ends at token 2147"),
    ],
)
def test_errors_name_the_request_and_write_nothing(
    types: np.ndarray, lengths: np.ndarray, slots: np.ndarray, tokens: int, message: str
) -> None:
    out = np.full(tokens, 99, np.int32)
    with pytest.raises(ArgumentError, match=message):
        requests_to_tokens(types, lengths, slots, tokens, 4, out=out)
    assert (out == 99).all()


def test_arguments_are_checked_by_name() -> None:
    good = _ints(0)
    with pytest.raises(ArgumentError, match="context_lengths has dtype int64; int32"):
        requests_to_tokens(good, good.astype(np.int64), good, 0, 1)
    with pytest.raises(ArgumentError, match=r"request_slots has shape \(2,\); \[1\]"):
        requests_to_tokens(good, good, _ints(0, 0), 0, 1)
    with pytest.raises(ArgumentError, match=r"out has shape \(3,\); \[1\]"):
        requests_to_tokens(good, _ints(1), good, 1, 1, out=_ints(0, 0, 0))


def test_request_types_are_the_documented_numbers() -> None:
    assert (CONTEXT, GENERATION) == (0, 1)
