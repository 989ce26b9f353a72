"""SIGTERM and SIGINT, noted and obeyed at the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HEARD = (signal.SIGTERM, signal.SIGINT)


class Interruption(BaseException):
    """Raised by `Signals.at_once` in the middle of work that need not be finished."""


class Signals:
    """While open, the first SIGTERM or SIGINT is noted in `received`; the next acts as if nobody listened.

    Outside the main thread, where Python delivers no signals, nothing is heard.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Callable[..., Any] | int | None] = {}
        self._raising = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in HEARD}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises `Interruption` rather than wait."""
        self._raising = True
        try:
            if self.received:
                raise Interruption
            yield
        finally:
            self._raising = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()
        if self._raising:
            raise Interruption
