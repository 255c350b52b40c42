"""Settings of the interpreter hold while anybody asks for them, and are as before afterwards."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from cupylora.interpreter import no_collection, short_turns

SPANS = [no_collection, short_turns]


def setting(span: object) -> object:
    return gc.isenabled() if span is no_collection else sys.getswitchinterval()


@pytest.mark.parametrize("span", SPANS)
def test_spans_of_two_threads_overlap(span: Callable[[], AbstractContextManager[None]]) -> None:
    before, inside, leave = setting(span), threading.Event(), threading.Event()

    def other() -> None:
        with span():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with span():
        thread.start()
        assert inside.wait(20)
        changed = setting(span)
        assert changed != before
    assert setting(span) == changed  # the other is still inside
    leave.set()
    thread.join(20)
    assert setting(span) == before


@pytest.mark.parametrize("span", SPANS)
def test_it_is_as_before_where_something_fails(
    span: Callable[[], AbstractContextManager[None]],
) -> None:
    before = setting(span)
    with pytest.raises(ValueError, match="x"), span(), span():
        raise ValueError("x")
    assert setting(span) == before


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_turns_that_are_shorter_stay_so() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)
