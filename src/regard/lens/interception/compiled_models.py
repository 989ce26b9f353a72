"""Intercept compiled modules: while a mode is open, a module under torch.compile runs as it is written.

What
    A compiled module keeps the function that runs it compiled in one of its attributes. Within the block a `_Watched`
    stands there. It calls the module as it is written for threads whose calls a mode intercepts, and the compiled
    function for all others.

Lifetimes
    The compiled function is put back when the last mode closes. PyTorch keeps its graphs with it, so the model runs
    after the block what it ran before, and compiles nothing again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_compiling

from ... import torch_internals


class CompiledMode(Protocol):
    """A mode that may intercept the calls of a module."""

    def intercepts(self, module: nn.Module) -> bool:
        """True if calls of the module in this thread are intercepted."""


@contextmanager
def compiled_modules_seen(mode: CompiledMode, modules: Collection[nn.Module]) -> Iterator[None]:
    """Let the mode intercept what these modules run, if they are compiled, within the block."""
    with _LOCK:
        watched = [each for module in modules if (each := _watch(module)) is not None]
        for each in watched:
            each.modes.append(mode)
    try:
        yield
    finally:
        with _LOCK:
            for each in watched:
                each.modes.remove(mode)
                if not each.modes:
                    each.restore()


_LOCK = threading.Lock()


def _watch(module: nn.Module) -> _Watched | None:
    """Return what stands for the compiled function of a module; None if the module is not compiled."""
    if (slot := torch_internals.compiled_slot(module)) is None:
        return None
    attributes, name = slot
    found = attributes[name]
    if not isinstance(found, _Watched):
        found = attributes[name] = _Watched(module, attributes, name)
    return found


class _Watched:
    """A compiled module that runs as it is written for the threads that a mode intercepts."""

    def __init__(self, module: nn.Module, attributes: dict[str, Any], name: str) -> None:
        self.modes: list[CompiledMode] = []
        self._module = torch_internals.original_module(module)
        self._attributes, self._name = attributes, name
        self._compiled: Callable[..., Any] = attributes[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not any(mode.intercepts(self._module) for mode in tuple(self.modes)):
            return self._compiled(*args, **kwargs)
        return torch_internals.run_as_written(self._module, *args, **kwargs)

    def restore(self) -> None:
        """Put the compiled function back, unless the module has been compiled anew."""
        if self._attributes.get(self._name) is self:
            self._attributes[self._name] = self._compiled
