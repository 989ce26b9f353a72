"""Torch function modes that step off their stack, for a while or for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode


def is_on(mode: Any) -> bool:
    """Is it on the stack of this thread?"""
    return mode in _get_current_function_mode_stack()


def withdraw(mode: Any) -> list[Any]:
    """Take a mode off the stack; return those above it, which stay."""
    later: list[Any] = []
    while (top := _pop_mode()) is not mode:
        later.insert(0, top)
    for each in later:
        _push_mode(each)
    return later


@contextmanager
def aside(mode: Any) -> Iterator[None]:
    """As if there were no such mode: a compiled function would be compiled anew for one."""
    if not is_on(mode):
        yield
        return
    later = withdraw(mode)
    try:
        yield
    finally:
        for _ in later:
            _pop_mode()
        for each in (mode, *later):
            _push_mode(each)
