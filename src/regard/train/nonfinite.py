"""Find the first non-finite tensor of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def first_non_finite(model: nn.Module, forwards: Sequence[Callable[[], Any]]) -> tuple[int | None, str]:
    """Return the number of the forward pass, or None, and a description of the first non-finite tensor.

    Weights are checked first, then the inputs and outputs of the modules in each pass, then the gradients, which are
    sums over all passes.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return None, f"the weight {name} is not finite"
    for number, forward in enumerate(forwards):
        if words := _first_non_finite_module(model, forward):
            return number, words
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return None, f"the loss is finite, but the gradient of {name} is not"
    return None, "all tensors are finite when recomputed in this process"


def _first_non_finite_module(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Describe the first module with a non-finite input or output, None if there is none."""
    found: list[str] = []
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}

    def watch(module: nn.Module, given: Any, result: Any) -> None:
        if not found and not _finite(given):
            found.append(f"the input of {names[module]} is not finite")
        elif not found and not _finite(result):
            found.append(f"{names[module]} is the first module whose output is not finite")

    hooks = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        with torch.no_grad():
            loss = forward()
    finally:
        for hook in hooks:
            hook.remove()
    if not found and not _finite(loss):
        return "every module's output is finite, but the loss is not"
    return found[0] if found else None


def _finite(value: Any) -> bool:
    return all(bool(x.isfinite().all()) for x in _tensors(value) if x.is_floating_point())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))
