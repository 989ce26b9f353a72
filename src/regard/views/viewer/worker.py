"""Worker: one thread that computes all answers. Requests come first, background jobs run a step at a time in between.

One thread bounds memory by what a single answer takes, and answers do not slow each other down. PyTorch spreads each
answer over the cores.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, TypeVar

T = TypeVar("T")

MAX_BACKGROUND_JOBS = 32  # beyond it, the least recently requested job is dropped


class Closed(Exception):
    """The worker was closed before it computed the answer."""


class Worker:
    """A thread that runs functions: those of `do` as soon as possible, jobs of `schedule` step by step in between.

    The job that was scheduled last runs first.
    """

    def __init__(self) -> None:
        self._urgent: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._background: OrderedDict[Hashable, Iterator[Any]] = OrderedDict()
        self._failures: dict[Hashable, Exception] = {}
        self._progress: dict[Hashable, float] = {}
        self._changed = Condition()
        self._open = True
        self._thread = Thread(target=self._work, name="regard-worker", daemon=True)
        self._thread.start()

    def do(self, fn: Callable[[], T]) -> Future[T]:
        """Queue a function and return the future of its result."""
        future: Future[T] = Future()
        with self._changed:
            if not self._open:
                raise Closed("the worker is closed")
            self._urgent.append((future, fn))
            self._changed.notify()
        return future

    def schedule(self, key: Hashable, steps: Callable[[], Iterator[Any]]) -> float | None:
        """Start a background job of many steps, or move it to the front; raise its error if it failed before.

        A job that yields floats reports the share that is done: the latest one is returned, None if there is none.
        """
        with self._changed:
            if key in self._failures:
                raise self._failures.pop(key)
            if key not in self._background:
                self._background[key] = steps()
                self._progress.pop(key, None)
            self._background.move_to_end(key)
            while len(self._background) > MAX_BACKGROUND_JOBS:
                self._background.popitem(last=False)
            self._changed.notify()
            return self._progress.get(key)

    def close(self) -> None:
        """Finish the current step, drop all jobs and fail all waiting futures with `Closed`."""
        with self._changed:
            self._open = False
            self._background.clear()
            for future, _ in self._urgent:
                if future.set_running_or_notify_cancel():
                    future.set_exception(Closed("the worker is closed"))
            self._urgent.clear()
            self._changed.notify()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._open and not self._urgent and not self._background:
                    self._changed.wait()
                if not self._open:
                    return
                urgent = self._urgent.popleft() if self._urgent else None
                key, steps = (
                    (None, None) if urgent or not self._background else next(reversed(self._background.items()))
                )
            if urgent is not None:
                self._answer(*urgent)
            elif steps is not None:
                self._step(key, steps)

    @staticmethod
    def _answer(future: Future[Any], fn: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = fn()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _step(self, key: Hashable, steps: Iterator[Any]) -> None:
        try:
            done = next(steps)
        except StopIteration:
            self._drop(key)
        except Exception as error:
            self._drop(key, error)
        else:
            if isinstance(done, float):
                with self._changed:
                    self._progress[key] = done

    def _drop(self, key: Hashable, error: Exception | None = None) -> None:
        with self._changed:
            self._background.pop(key, None)
            self._progress.pop(key, None)
            if error is not None:
                self._failures[key] = error


class ResponseCache:
    """Cache of responses of at most `limit` bytes; the least recently used one is evicted first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._held: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable) -> bytes | None:
        """Return a cached response, or None."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: Hashable, value: bytes) -> bytes:
        """Cache a response and return it."""
        self.size += len(value) - len(self._held.pop(key, b""))
        self._held[key] = value
        while self.size > self.limit:
            self.size -= len(self._held.popitem(last=False)[1])
        return value
