"""Handle SIGTERM and SIGINT at the end of a training step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HANDLED = (signal.SIGTERM, signal.SIGINT)


class Interruption(BaseException):
    """Raised by `Signals.at_once` to interrupt work that need not be finished."""


class Signals:
    """While open, the first SIGTERM or SIGINT is stored in `received`; the next one has its default effect.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Callable[..., Any] | int | None] = {}
        self._raising = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in HANDLED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal inside the block raise `Interruption` immediately."""
        self._raising = True
        try:
            if self.received:
                raise Interruption
            yield
        finally:
            self._raising = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()
        if self._raising:
            raise Interruption
