"""DeviceStatus: what is reported is forgotten, and nothing else."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from cupylora.errors import ArgumentError
from cupylora.ops.status import DeviceStatus
from cupylora.worklists import STATUS_BAD_RANK, STATUS_BAD_SLOT, STATUS_CAPACITY


class PinnedMemory(bytearray):
    """Stands in for CuPy's pinned memory."""

    ptr = 4096


class RaisedMeanwhile(np.ndarray):
    """Flags of a device that meets another fault just when a first one is being forgotten."""

    def __setitem__(self, place: Any, value: Any) -> None:
        np.ndarray.__setitem__(self, 3, 1)
        super().__setitem__(place, value)


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> DeviceStatus:
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(alloc_pinned_memory=PinnedMemory)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return DeviceStatus()


def word(status: DeviceStatus) -> np.ndarray:
    """The flags as device code and int32 [1] arrays have them."""
    return status._flags.view(np.int32)


def test_faults_are_reported_once(status: DeviceStatus) -> None:
    status.check()
    word(status)[0] = STATUS_BAD_SLOT | STATUS_BAD_RANK
    with pytest.raises(ArgumentError, match=r"slot >= max_loras.*; a slot entry held a rank"):
        status.check()
    assert word(status)[0] == 0
    status.check()


def test_a_fault_raised_during_the_check_is_reported_by_the_next(status: DeviceStatus) -> None:
    word(status)[0] = STATUS_BAD_RANK
    status._flags = status._flags.view(RaisedMeanwhile)
    with pytest.raises(ArgumentError, match="a slot entry held a rank") as first:
        status.check()
    assert "more segments" not in str(first.value)
    assert np.asarray(status._flags).view(np.int32)[0] == STATUS_CAPACITY
    status._flags = np.asarray(status._flags)
    with pytest.raises(ArgumentError, match="more segments"):
        status.check()
    status.check()
