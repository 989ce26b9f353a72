"""The optimizer of a run, AdamW or another of PyTorch, and its state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import torch_internals
from .checkpoint import plain
from .failures import CheckpointError
from .recipe import Recipe


def adamw(model: nn.Module, recipe: Recipe) -> AdamW:
    """Return a fused AdamW (Loshchilov & Hutter 2019) with weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model must have parameters that require a gradient, got none")
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=recipe.rate(1), betas=recipe.betas, eps=recipe.eps, fused=True)


def make_optimizer(model: nn.Module, recipe: Recipe, given: Callable[[nn.Module], Optimizer] | None) -> Optimizer:
    """Return the optimizer that the user's function returns for the model, or AdamW; raise if it needs a closure."""
    optimizer = adamw(model, recipe) if given is None else given(model)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, LBFGS):
        raise TypeError("LBFGS calls the model several times a step, which fit does not; use another optimizer")
    return optimizer


def make_scheduler(optimizer: Optimizer, given: Callable[[Optimizer], LRScheduler] | None) -> LRScheduler | None:
    """Return the scheduler that the user's function returns for the optimizer, None without a function."""
    if given is None:
        return None
    scheduler = given(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"scheduler must return a torch.optim.lr_scheduler, got {type(scheduler).__name__}")
    return scheduler


def optimizer_numbers(optimizer: Optimizer, scheduler: LRScheduler | None, model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint holds of an optimizer beside tensors: settings of its groups, numbers, the scheduler."""
    return {
        "class": type(optimizer).__name__,
        "groups": [_numbers(group) for group in optimizer.param_groups],
        "state": {
            plain(name): numbers
            for name, parameter in model.named_parameters()
            if (numbers := _numbers(optimizer.state.get(parameter, {})))
        },
        "scheduler": None if scheduler is None else _numbers(scheduler.state_dict()),
    }


def put_numbers(
    values: Mapping[str, Any], optimizer: Optimizer, scheduler: LRScheduler | None, model: nn.Module, *, source: str
) -> None:
    """Restore what `optimizer_numbers` returned; raise if the optimizer or the scheduler is another."""
    if values["class"] != type(optimizer).__name__ or len(values["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"{source} was saved with the optimizer {values['class']} of {len(values['groups'])} groups, got "
            f"{type(optimizer).__name__} of {len(optimizer.param_groups)}; use the same"
        )
    if (values["scheduler"] is None) != (scheduler is None):
        how = "without" if values["scheduler"] is None else "with"
        raise ValueError(f"{source} was saved {how} a scheduler; use the same")
    for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
        group.update({key: tuple(x) if isinstance(group.get(key), tuple) else x for key, x in saved.items()})
    for name, parameter in model.named_parameters():
        if plain(name) in values["state"]:
            optimizer.state[parameter].update(values["state"][plain(name)])
    if scheduler is not None:
        scheduler.load_state_dict({**scheduler.state_dict(), **values["scheduler"]})


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can hold: numbers, texts, and lists of them; NaN and infinity are left out."""
    return {key: x for key, x in values.items() if key != "params" and _is_plain(x)}


def _is_plain(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return all(map(_is_plain, x))
    if isinstance(x, float):
        return math.isfinite(x)
    return x is None or isinstance(x, (bool, int, str))


def moments(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state under the names `optimizer.<what>.<parameter>`."""
    return {
        f"optimizer.{what}.{plain(name)}": x
        for name, parameter in model.named_parameters()
        for what, x in optimizer.state.get(parameter, {}).items()
        if isinstance(x, Tensor)
    }


def put_moments(values: Mapping[str, Tensor], optimizer: Optimizer, model: nn.Module, *, source: str) -> None:
    """Restore the optimizer's state from what `moments` returned; raises `CheckpointError` if that does not fit."""
    named = {plain(name): parameter for name, parameter in model.named_parameters()}
    for key, x in values.items():
        what, _, name = plain(key).removeprefix("optimizer.").partition(".")
        is_adamw = isinstance(optimizer, AdamW) and what != "step"  # the state of others may have other shapes
        if name not in named or (is_adamw and x.shape != named[name].shape):
            raise CheckpointError(
                f"{source} holds {key!r}, which does not fit the model; build the model from its config.json"
            )
        parameter = named[name]
        same = x.shape == parameter.shape and what != "step"
        optimizer.state[parameter][what] = alike(x, parameter) if same else x.to(parameter.device)


def whole(x: Tensor) -> Tensor:
    """Return the full tensor, gathered from all processes if it is sharded."""
    return x.full_tensor() if isinstance(x, Shared) else x


def alike(x: Tensor, parameter: Tensor) -> Tensor:
    """Return a full tensor on the device, and with the sharding, of a parameter."""
    x = x.to(parameter.device)
    if not isinstance(parameter, Shared):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, parameter.device_mesh, parameter.placements)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def scale(gradients: list[Tensor], by: float) -> None:
    """Multiply all gradients in place."""
    if gradients and by != 1.0:
        torch_internals.multiply_all_(gradients, by)


@runtime_checkable
class Shared(Protocol):
    """A sharded tensor: a DTensor, whose import is slow and avoided without need."""

    device_mesh: Any
    placements: Any

    def full_tensor(self) -> Tensor: ...
