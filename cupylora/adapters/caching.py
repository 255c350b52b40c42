"""Adapters that serve, copied to the host cache behind the back of loads and steps.

    load: files --> blocks on the device --> serves
                    store.expect --> CacheWriter.begin ... store.receive --> the host cache

A load does not wait for its copy, nor for the memory that is pinned for it. The copy's source stays
where it is meanwhile (``BlockReader``), and whoever looks the name up in the cache waits.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager

from cupylora.adapters.store import AdapterStore, Arrival

__all__ = ["CacheWriter"]


class CacheWriter:
    """Receives for ``store`` in a thread of its own, one adapter at a time.

    entering: the context of the copies, such as a device and a stream. Methods may be called from
    any thread but this one.
    """

    def __init__(
        self, store: AdapterStore, entering: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._store, self._entering = store, entering
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Arrival] = deque()
        self._under_way: set[Future[None]] = set()
        self._lock = threading.Lock()

    def begin(self, arrival: Arrival) -> None:
        """Receive it, and return at once. Where this fails, it is closed or received all the
        same."""
        try:
            self._waiting.append(arrival)
            self._submit()
        except BaseException:
            with contextlib.suppress(ValueError):  # the thread has it already
                self._waiting.remove(arrival)
                arrival.close()
            raise

    def _submit(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="cupylora-cache")
            task = self._thread.submit(_receive, self._store, self._entering, self._waiting)
            task.add_done_callback(_forget_frames)
            self._under_way = {one for one in self._under_way if not _is_over(one)} | {task}

    def finish(self) -> bool:
        """Wait for all that was begun. False: there was nothing to wait for."""
        with self._lock:
            tasks = [task for task in self._under_way if not task.done()]
        wait_for(tasks)
        return bool(tasks)

    def close(self) -> None:
        """Wait for all that was begun, and end the thread. Raises what went wrong."""
        with self._lock:
            thread, self._thread = self._thread, None
            tasks, self._under_way = self._under_way, set()
        if thread is not None:
            thread.shutdown()
        for task in tasks:
            task.result()


def _receive(
    store: AdapterStore,
    entering: Callable[[], AbstractContextManager[object]],
    waiting: deque[Arrival],
) -> None:
    """The first that waits; there is none where ``begin`` took it back."""
    try:
        arrival = waiting.popleft()
    except IndexError:
        return
    with entering():
        store.receive(arrival)


def _forget_frames(task: Future[None]) -> None:
    """What failed is told at the end; what it had in hand then, such as memory, goes now."""
    error = task.exception()
    if error is not None:
        traceback.clear_frames(error.__traceback__)


def _is_over(task: Future[None]) -> bool:
    """Whether nobody needs to know of it any more."""
    return task.done() and task.exception() is None
