"""Desk: one thread that does all the computing, what somebody waits for first, the rest in steps between.

One thread, so that memory is bounded by what one answer takes and answers do not slow each other down; PyTorch spreads
each over the cores by itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, TypeVar

T = TypeVar("T")

WAITING = 32  # works that may lie behind; the one asked for longest ago is dropped for another


class Closed(Exception):
    """Nothing more will be done."""


class Desk:
    """`do` is done as soon as possible; `later` when nobody waits, the work asked for last first."""

    def __init__(self) -> None:
        self._urgent: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._behind: OrderedDict[Hashable, Iterator[Any]] = OrderedDict()
        self._failures: dict[Hashable, Exception] = {}
        self._progress: dict[Hashable, float] = {}
        self._changed = Condition()
        self._open = True
        self._thread = Thread(target=self._work, name="regard-desk", daemon=True)
        self._thread.start()

    def do(self, fn: Callable[[], T]) -> Future[T]:
        """The result of a function, to be waited for."""
        future: Future[T] = Future()
        with self._changed:
            if not self._open:
                raise Closed("the desk is closed")
            self._urgent.append((future, fn))
            self._changed.notify()
        return future

    def later(self, key: Hashable, steps: Callable[[], Iterator[Any]]) -> float | None:
        """Work of many steps under a name that is worked on once; asked again, it comes first, or raises as it did.

        A step that yields a number says what share is done, and that is returned.
        """
        with self._changed:
            if key in self._failures:
                raise self._failures.pop(key)
            if key not in self._behind:
                self._behind[key] = steps()
                self._progress.pop(key, None)
            self._behind.move_to_end(key)
            while len(self._behind) > WAITING:
                self._behind.popitem(last=False)
            self._changed.notify()
            return self._progress.get(key)

    def close(self) -> None:
        """Finish the step at hand and let the rest go."""
        with self._changed:
            self._open = False
            self._behind.clear()
            for future, _ in self._urgent:
                if future.set_running_or_notify_cancel():
                    future.set_exception(Closed("the desk is closed"))
            self._urgent.clear()
            self._changed.notify()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._open and not self._urgent and not self._behind:
                    self._changed.wait()
                if not self._open:
                    return
                urgent = self._urgent.popleft() if self._urgent else None
                key, steps = (None, None) if urgent or not self._behind else next(reversed(self._behind.items()))
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
            self._behind.pop(key, None)
            self._progress.pop(key, None)
            if error is not None:
                self._failures[key] = error


class Shelf:
    """Answers that were made, up to so many bytes; the one not asked for longest goes first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._held: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable) -> bytes | None:
        """An answer, if it is still there."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: Hashable, value: bytes) -> bytes:
        """Keep an answer."""
        self.size += len(value) - len(self._held.pop(key, b""))
        self._held[key] = value
        while self.size > self.limit:
            self.size -= len(self._held.popitem(last=False)[1])
        return value
