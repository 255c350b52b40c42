"""Garbage is not collected while anybody asks for that, and is again afterwards."""

from __future__ import annotations

import gc
import threading

import pytest

from cupylora.collection import no_collection


def test_spans_of_two_threads_overlap() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_collection():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with no_collection():
        thread.start()
        assert inside.wait(20)
        assert not gc.isenabled()
    assert not gc.isenabled()  # the other is still inside
    leave.set()
    thread.join(20)
    assert gc.isenabled()


def test_it_is_as_before_afterwards() -> None:
    with pytest.raises(ValueError, match="x"), no_collection(), no_collection():
        raise ValueError("x")
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
