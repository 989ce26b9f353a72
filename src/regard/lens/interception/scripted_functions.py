"""Observe functions of `torch.jit.script`, which run outside Python: their Python original runs beside them.

Every scripted function of a process is called through one method of its class. It is replaced while a mode is open, so
that a function which was scripted a moment ago, or which a cache holds, is observed too.

The model goes on with the output of the scripted function. The original runs again on the same arguments, without
gradients, first unseen to compare its output, then seen. A function that writes to its arguments, or whose output the
original does not reproduce (dropout), is not observed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import torch_internals
from ...ops.torch_state import in_functorch
from ..recording.store import version_of
from .patching import inactive

WRITES = re.compile(r"aten::\w+_\(")  # functions of TorchScript that write in place
PRODUCTS = ("matmul", "bmm", "mm(", "einsum", "scaled_dot_product_attention", "linear")
WEIGHTS = ("softmax", "_softmax", "scaled_dot_product_attention")
TOLERANCE = 1e-4


class ScriptMode(Protocol):
    """A mode that observes what Python code computes."""

    is_observer: bool  # it never changes an output

    @property
    def is_inside(self) -> bool:
        """True if a layer of the model is under way in this thread."""

    @property
    def keeps_gradients(self) -> bool:
        """True if the gradients of the outputs are kept, which only the tensors of the model have."""

    def is_followed(self, x: Any) -> bool:
        """Return whether a tensor is scores, weights, or a function of them."""

    def follow_as(self, x: Tensor, same: Tensor) -> None:
        """Follow a tensor as another one with the same values."""

    def note_script(self) -> None:
        """Note that the running layer attends in a scripted function, whose original cannot be observed."""

    def quiet(self) -> AbstractContextManager[None]:
        """Observe nothing within the block."""


@contextmanager
def scripts_observed(mode: ScriptMode) -> Iterator[None]:
    """Let the mode observe every scripted function that its model calls within the block."""
    with _LOCK:
        _MODES.append(mode)
        torch.jit.ScriptFunction.__call__ = _observed_call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _LOCK:
            _MODES.remove(mode)
            if not _MODES:
                torch.jit.ScriptFunction.__call__ = _CALL  # type: ignore[method-assign]


_CALL = torch.jit.ScriptFunction.__call__
_LOCK = threading.Lock()
_MODES: list[ScriptMode] = []


def _observed_call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the call of a scripted function: run it, and let the modes with a layer under way observe it."""
    inside = [] if is_compiling() else [mode for mode in tuple(_MODES) if mode.is_inside]
    if not inside:
        return _CALL(scripted, *args, **kwargs)
    with ExitStack() as stack:
        for mode in inside:
            if not mode.is_observer or mode.keeps_gradients:
                stack.enter_context(inactive(mode))
        return _run_script(scripted, args, kwargs, [mode for mode in inside if mode.is_observer])


def _run_script(scripted: Any, args: Sequence[Any], kwargs: dict[str, Any], modes: Sequence[ScriptMode]) -> Any:
    """Run a scripted function and return its output; let the modes observe its Python original."""
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    versions = [None if in_functorch() else version_of(x) for x in inputs]
    out, graph = _CALL(scripted, *args, **kwargs), str(scripted.inlined_graph) if modes else ""
    is_followed = any(mode.is_followed(x) for mode in modes for x in inputs)
    if not is_followed and not any(f"aten::{name}" in graph for name in PRODUCTS):
        return out
    observers = [mode for mode in modes if not mode.keeps_gradients]
    is_hidden = in_functorch() or versions != [version_of(x) for x in inputs]
    is_hidden = is_hidden or (None in versions and WRITES.search(graph) is not None)
    again = None if is_hidden else _observed_output(scripted, args, kwargs, out, observers)
    for mode in modes:
        if again is None or mode not in observers:
            if is_followed or any(f"aten::{name}" in graph for name in WEIGHTS):
                mode.note_script()
        elif isinstance(out, Tensor):
            mode.follow_as(out, again)
    return out


def _observed_output(
    scripted: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, modes: Sequence[ScriptMode]
) -> Any:
    """Return the output of the Python original, which the modes observe; None if it is another one."""
    original: Callable[..., Any] | None = getattr(scripted, torch_internals.SCRIPT_ORIGINAL, None)
    if original is None or not modes:
        return None
    devices = [x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_cuda]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode.quiet())
                is_same = _is_close(original(*args, **kwargs), out)
            return original(*args, **kwargs) if is_same else None
    except Exception:  # TorchScript and Python differ in places, which the model must not notice
        return None


def _is_close(x: Any, y: Any) -> bool:
    """Whether two outputs hold the same numbers, up to rounding."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and torch.allclose(x.float(), y.float(), TOLERANCE, TOLERANCE, equal_nan=True)
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)) and len(x) == len(y):
        return all(map(_is_close, x, y))
    return bool(type(x) is type(y) and not isinstance(x, (tuple, list)) and x == y)
