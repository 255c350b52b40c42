"""Outputs (allocated or the caller's) and the error-flag word, for every op of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupylora.checks import check_array
from cupylora.errors import ArgumentError
from cupylora.worklists import STATUS_BAD_RANK, STATUS_BAD_SLOT

__all__ = ["checked_ranks", "checked_slots", "output_array"]

Array = npt.NDArray[Any]


def output_array(
    name: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any] | type
) -> npt.NDArray[Any]:
    """``out`` once checked, or zeros of that shape and dtype where it is None."""
    if out is None:
        return np.zeros(shape, dtype)
    check_array(name, out, dtype=np.dtype(dtype), shape=shape, writable=True, on_device=False)
    return np.asarray(out)


def checked_slots(
    token_to_slot: Array, max_loras: int, status: Array | None
) -> npt.NDArray[np.int64]:
    """Slot of each token, -1 for no adapter.

    A slot >= max_loras raises ArgumentError naming the token; with ``status`` it sets the bit
    STATUS_BAD_SLOT there and counts as no adapter.
    """
    slots = np.maximum(token_to_slot.astype(np.int64), -1)
    bad = slots >= max_loras
    if not bad.any():
        return slots
    if status is None:
        token = int(np.argmax(bad))
        raise ArgumentError(
            f"token_to_slot[{token}] is {slots[token]}; there are {max_loras} slots "
            f"(0 to {max_loras - 1}, negative for no adapter)"
        )
    status[0] |= STATUS_BAD_SLOT
    slots[bad] = -1
    return slots


def checked_ranks(
    ranks: Array, max_rank: int, status: Array | None, where: str
) -> npt.NDArray[np.int32]:
    """Copy of int32 ``ranks``, each within 0 to max_rank.

    Another rank raises ArgumentError with its place (``where`` names the axes); with ``status`` it
    sets the bit STATUS_BAD_RANK there and counts as 0.
    """
    bad = (ranks < 0) | (ranks > max_rank)
    checked = np.where(bad, 0, ranks).astype(np.int32)
    if not bad.any():
        return checked
    if status is None:
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ArgumentError(
            f"rank {int(ranks[place])} at {where} {list(place)} is out of range; "
            f"0 to max_rank={max_rank} is needed"
        )
    status[0] |= STATUS_BAD_RANK
    return checked
