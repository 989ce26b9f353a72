"""Where the numbers of a model stop being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def first_non_finite(model: nn.Module, forwards: Sequence[Callable[[], Any]]) -> tuple[int | None, str]:
    """The first thing that is not finite, in words, and which of the forward passes it comes up in.

    Weights are looked at first, then what each pass puts through the modules, then the gradients at hand, which are
    of all passes together.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return None, f"the weight {name} is not finite"
    for number, forward in enumerate(forwards):
        if words := _watched(model, forward):
            return number, words
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return None, f"the loss is finite, the gradient of {name} is not"
    return None, "everything is finite when computed again in this process"


def _watched(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The first module that is given or gives something not finite."""
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
        return "every module's output is finite, the loss made of them is not"
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
