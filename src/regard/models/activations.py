"""Activations by name, for configs: a name is looked up here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

Name = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": Tensor.tanh,
}


def activation(name: Name) -> Callable[[Tensor], Tensor]:
    """The function of this name."""
    if name not in get_args(Name):
        raise ValueError(f"activation must be one of {', '.join(get_args(Name))}, got {name!r}")
    return _ACTIVATIONS[name]
