"""CUDA events that are used again, by device: one is made where none is free.

For marks that are recorded, waited for on the device or asked, and forgotten.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

__all__ = ["put_event_back", "take_event"]

_events: dict[int, deque[Any]] = {}
"""By device: events that may be recorded anew. A wait enqueued on one keeps what it waits for."""


def take_event(device: int) -> Any:
    """An event of a device to record; ``put_event_back`` when nobody asks it any more."""
    import cupy

    with contextlib.suppress(KeyError, IndexError):
        return _events[device].pop()
    with cupy.cuda.Device(device):
        return cupy.cuda.Event(disable_timing=True)


def put_event_back(device: int, event: Any) -> None:
    """It may be recorded for something else now."""
    _events.setdefault(device, deque()).append(event)
