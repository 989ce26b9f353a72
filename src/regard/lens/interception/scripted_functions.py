"""Observe functions of `torch.jit.script`, which run outside Python: their Python original runs beside them.

The model goes on with the output of the scripted function. The original runs again on the same arguments, without
gradients, first unseen to compare its output, then seen. A function that writes to its arguments, or whose output the
original does not reproduce (dropout), is not observed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from ... import torch_internals
from ..recording.store import version_of

WRITES = re.compile(r"aten::\w+_\(")  # functions of TorchScript that write in place
PRODUCTS = ("matmul", "bmm", "mm(", "einsum", "scaled_dot_product_attention", "linear")
WEIGHTS = ("softmax", "_softmax", "scaled_dot_product_attention")
TOLERANCE = 1e-4


class ScriptMode(Protocol):
    """A mode that observes what Python code computes."""

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


def original_of(value: Any) -> Callable[..., Any] | None:
    """Return the Python function that a scripted function was made of; None for other values."""
    if not isinstance(value, torch.jit.ScriptFunction):
        return None
    original: Callable[..., Any] | None = getattr(value, torch_internals.SCRIPT_ORIGINAL, None)
    return original


def run_script(scripted: Any, args: Sequence[Any], kwargs: dict[str, Any], modes: Sequence[ScriptMode]) -> Any:
    """Run a scripted function and return its output; let the modes observe its Python original."""
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    versions = [version_of(x) for x in inputs]
    out, graph = scripted(*args, **kwargs), str(scripted.inlined_graph) if modes else ""
    is_followed = any(mode.is_followed(x) for mode in modes for x in inputs)
    if not is_followed and not any(f"aten::{name}" in graph for name in PRODUCTS):
        return out
    writes = versions != [version_of(x) for x in inputs] or (None in versions and WRITES.search(graph))
    observers = [mode for mode in modes if not mode.keeps_gradients]
    again = None if writes else _observed_output(scripted, args, kwargs, out, observers)
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
    original = original_of(scripted)
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
