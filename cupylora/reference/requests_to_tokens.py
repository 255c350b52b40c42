"""Requests -> one adapter slot per token: the first step of a batch, on the host.

In: per request its type, context length and slot. Out: ``token_to_slot``, which ``route``,
``build_segments`` and ``slot_lookup`` take.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupylora.checks import INT32, check_array, check_int, check_max_loras
from cupylora.errors import ArgumentError
from cupylora.reference._output import output_array
from cupylora.worklists import Array

__all__ = ["CONTEXT", "GENERATION", "requests_to_tokens"]

CONTEXT, GENERATION = 0, 1
"""Request types: a prompt of context_length tokens, or one generated token."""


def requests_to_tokens(
    request_types: Array,
    context_lengths: Array,
    request_slots: Array,
    num_tokens: int,
    max_loras: int,
    *,
    out: Array | None = None,
) -> Array:
    """Slot of every token, int32 [num_tokens], -1 for no adapter.

    request_types: int32 [n], CONTEXT (0) or GENERATION (1).
    context_lengths: int32 [n], tokens of a context request; not used for a generation request,
    which has one token, but never negative.
    request_slots: int32 [n], below max_loras; negative for no adapter.

    Raises ArgumentError naming the request for an invalid type, a negative length, a slot >=
    max_loras, or when the requests have more or fewer tokens than ``num_tokens``. Nothing is
    written then.
    """
    num_tokens = check_int("num_tokens", num_tokens, 0)
    max_loras = check_max_loras(max_loras)
    check_array("request_types", request_types, dtype=INT32, shape=(None,), on_device=False)
    shape = request_types.shape
    check_array("context_lengths", context_lengths, dtype=INT32, shape=shape, on_device=False)
    check_array("request_slots", request_slots, dtype=INT32, shape=shape, on_device=False)
    _check_requests(request_types, context_lengths, request_slots, max_loras)
    lengths = np.where(request_types == GENERATION, 1, context_lengths).astype(np.int64)
    _check_total(lengths, num_tokens)
    result = output_array("out", out, (num_tokens,), INT32)
    result[:] = np.repeat(np.maximum(request_slots, -1), lengths)
    return result


def _check_requests(
    types: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    max_loras: int,
) -> None:
    for bad, values, what, needed in (
        (
            (types != CONTEXT) & (types != GENERATION),
            types,
            "type",
            "0 (context) or 1 (generation)",
        ),
        (lengths < 0, lengths, "context length", "0 or more"),
        (slots >= max_loras, slots, "slot", f"a slot below max_loras={max_loras}, or -1,"),
    ):
        if bad.any():
            request = int(np.argmax(bad))
            raise ArgumentError(
                f"request {request} has {what} {values[request]}; {needed} is needed"
            )


def _check_total(lengths: npt.NDArray[np.int64], num_tokens: int) -> None:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if total > num_tokens:
        request = int(np.argmax(ends > num_tokens))
        raise ArgumentError(
            f"request {request} ends at token {ends[request]}, but the batch has {num_tokens} "
            f"tokens; the requests have {total} in all"
        )
    if total < num_tokens:
        last = f"request {len(lengths) - 1}, the last, ends" if len(lengths) else "no request ends"
        raise ArgumentError(
            f"{last} at token {total}, but the batch has {num_tokens} tokens; every token needs "
            "a request"
        )
