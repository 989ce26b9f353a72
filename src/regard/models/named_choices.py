"""Activations, norms and positions by name, for configs: the only place where such a name is looked up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_choice
from ..nn import LearnedPositions, RMSNorm, Rotary, ShawBias, Sinusoidal, T5Bias
from ..nn.norms import Norm
from ..ops.terms.biases import Alibi

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
NormName = Literal["layer", "rms"]
Positions = Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "t5", "shaw", "alibi", "none"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": Tensor.tanh,
}
_NORMS: dict[str, type[nn.LayerNorm] | type[RMSNorm]] = {"layer": nn.LayerNorm, "rms": RMSNorm}


def activation_named(name: Activation) -> Callable[[Tensor], Tensor]:
    """Return the activation function of this name."""
    check_choice("activation", name, Activation)
    return _ACTIVATIONS[name]


def norm_named(name: NormName, *, eps: float) -> Norm:
    """Return a function from a width to the norm of this name."""
    return partial(_NORMS[name], eps=eps)


def added_positions(name: Positions, dim: int, *, longest: int) -> nn.Module | None:
    """Return the module whose vectors are added to embeddings, None if positions enter in attention or not at all."""
    match name:
        case "sinusoidal":
            return Sinusoidal(dim)
        case "sinusoidal_halves":
            return Sinusoidal(dim, layout="halves")
        case "learned":
            return LearnedPositions(longest, dim)
        case _:
            return None


def relative_positions(
    name: Positions, heads: int, head_dim: int, *, reach: int, base: float, bidirectional: bool
) -> dict[str, Any]:
    """Return the argument of `Attention` that compares positions, `rotary` or `bias`; {} if none does."""
    match name:
        case "rotary":
            return {"rotary": Rotary(head_dim, base=base)}
        case "t5":
            return {"bias": T5Bias(heads, bidirectional=bidirectional)}
        case "shaw":
            return {"bias": ShawBias(head_dim, reach=reach)}
        case "alibi":
            return {"bias": Alibi(heads)}
        case _:
            return {}
