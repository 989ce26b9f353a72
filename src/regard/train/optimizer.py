"""AdamW over a model's parameters, and its moments by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import AdamW

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


def moments(optimizer: AdamW, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state under the names `optimizer.<what>.<parameter>`."""
    return {
        f"optimizer.{what}.{plain(name)}": x
        for name, parameter in model.named_parameters()
        for what, x in optimizer.state.get(parameter, {}).items()
    }


def put_moments(values: Mapping[str, Tensor], optimizer: AdamW, model: nn.Module, *, source: str) -> None:
    """Restore the optimizer's state from what `moments` returned; raises `CheckpointError` if that does not fit."""
    named = {plain(name): parameter for name, parameter in model.named_parameters()}
    for key, x in values.items():
        what, _, name = plain(key).removeprefix("optimizer.").partition(".")
        if name not in named or (what != "step" and x.shape != named[name].shape):
            raise CheckpointError(
                f"{source} holds {key!r}, which does not fit the model; build the model from its config.json"
            )
        parameter = named[name]
        optimizer.state[parameter][what] = x.to(parameter.device) if what == "step" else alike(x, parameter)


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


def set_rate(optimizer: AdamW, rate: float) -> None:
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
