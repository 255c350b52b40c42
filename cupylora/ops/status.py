"""The error-flag word that device work sets where the host could not check beforehand.

A kernel that meets a slot or rank that does not exist treats it as 'no adapter' and sets a bit
here. The word is pinned host memory, so looking at it costs no synchronisation: a call reports what
work before it has met so far.
"""

from __future__ import annotations

import numpy as np

from cupylora.errors import ArgumentError
from cupylora.worklists import (
    STATUS_BAD_LAYOUT,
    STATUS_BAD_RANK,
    STATUS_BAD_SLOT,
    STATUS_CAPACITY,
)

__all__ = ["DeviceStatus"]

_MEANING = {
    STATUS_BAD_SLOT: "token_to_slot or a tile held a slot >= max_loras; its rows ran without an "
    "adapter",
    STATUS_BAD_RANK: "a slot entry held a rank below 0 or above max_rank; it ran as rank 0",
    STATUS_BAD_LAYOUT: "a slot entry held A in another layout than the caller asked for; "
    "it ran as rank 0 (SlotTable(..., a_layout=ROW_MAJOR) makes a table for general GEMMs)",
    STATUS_CAPACITY: "the rows made more segments or problems than there was room for, and the "
    "last of them were left out (raise max_segments or max_problems), or a batch had more adapters "
    "than max_active said, and rows of the last of them ran without one",
}


class DeviceStatus:
    """One pinned word, passed to device ops as ``status``; ``check`` raises what they found."""

    def __init__(self) -> None:
        import cupy

        self._memory = cupy.cuda.alloc_pinned_memory(4)
        # Each fault has a byte of its own, which the device only ever sets.
        self._flags = np.frombuffer(self._memory, np.uint8, 4)
        self._flags[:] = 0
        self._all = self._flags.view(np.uint32).data  # read in a fraction of an array's time
        self.device_pointer = int(self._memory.ptr)

    def check(self) -> None:
        """Raise ArgumentError for the faults seen by finished device work, and forget them.

        Only what is reported is forgotten: a fault that running work meets meanwhile stays for the
        next call.
        """
        if not self._all[0]:
            return
        seen = [place for place in range(len(self._flags)) if self._flags[place]]
        for place in seen:
            self._flags[place] = 0
        found = "; ".join(_MEANING[1 << 8 * place] for place in seen)
        raise ArgumentError(f"an earlier call's device work reports: {found}")
