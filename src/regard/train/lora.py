"""LoRA: train a low-rank change of the attention projections, and nothing else (Hu et al. 2022).

A projection W x becomes W x + scale B A x, with A of `rank` rows and B of `rank` columns; only A and B are trained. The
model of a checkpoint is merged, W + scale B A under the usual names; `training.safetensors` holds W, A and B to resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import plain

PROJECTIONS = ("query", "key", "value", "out")
SCALE = 2.0
PARTS = ("weight", "lora_down", "lora_up")
PREFIX = "lora."


class LoraLinear(nn.Linear):
    """x (W + scale B A)^T + b; W and b are frozen."""

    lora_down: nn.Parameter
    lora_up: nn.Parameter
    plain_class: type

    def forward(self, x: Tensor) -> Tensor:
        """Multiply without forming the merged matrix."""
        return F.linear(x, self.weight, self.bias) + SCALE * F.linear(F.linear(x, self.lora_down), self.lora_up)


def add_lora(model: nn.Module, *, rank: int) -> list[str]:
    """Freeze the model and add LoRA of this rank to its attention projections; return their names.

    >>> from regard.nn import Attention
    >>> layer = Attention(8, heads=2)
    >>> add_lora(layer, rank=2)
    ['query', 'key', 'value', 'out']
    >>> [name for name, x in layer.named_parameters() if x.requires_grad][:2]
    ['query.lora_down', 'query.lora_up']

    The projections are the linear layers named query, key, value and out of modules that have a query and a key. B
    begins at 0, so the model computes what it did before.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    found = _projections(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention projections, linear layers named query and key, for LoRA; leave "
            "it out"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in found.values():
        layer.plain_class, layer.__class__ = type(layer), LoraLinear
        down = torch.empty(rank, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
        layer.lora_down = nn.Parameter(nn.init.kaiming_uniform_(down, a=math.sqrt(5)))
        layer.lora_up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
    return list(found)


def merge_lora(model: nn.Module) -> None:
    """Replace W by W + scale B A in place, and make the layers plain linear layers again."""
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.weight.copy_(merged_weight(layer.weight, layer.lora_down, layer.lora_up))
            del layer.lora_down, layer.lora_up
            layer.__class__ = layer.plain_class


def merged_weight(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return W + scale B A, computed in float64."""
    return (weight.double() + SCALE * (up.double() @ down.double())).to(weight.dtype)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with LoRA, by name."""
    return {plain(name): module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def split_lora(weights: Mapping[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of the merged model, and W, A and B of each layer with LoRA, under names with `PREFIX`."""
    merged, parts = dict(weights), dict[str, Tensor]()
    for name in lora_layers(model):
        stem = f"{name}." if name else ""
        weight, down, up = (merged.pop(f"{stem}{part}") for part in PARTS)
        parts |= {f"{PREFIX}{stem}{part}": x for part, x in zip(PARTS, (weight, down, up), strict=True)}
        merged[f"{stem}weight"] = merged_weight(weight, down, up)
    return merged, parts


def join_lora(merged: Mapping[str, Tensor], training: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the model with LoRA, from what `split_lora` returned."""
    parts = {name.removeprefix(PREFIX): x for name, x in training.items() if name.startswith(PREFIX)}
    return {**merged, **parts}


def _projections(model: nn.Module) -> dict[str, Any]:
    """Return the plain linear layers that project to queries, keys, values and outputs of attention, by name."""
    found = {}
    for name, module in model.named_modules():
        parts = {part: getattr(module, part, None) for part in PROJECTIONS}
        if not all(isinstance(parts[part], nn.Linear) for part in ("query", "key")):
            continue
        for part, layer in parts.items():
            if isinstance(layer, nn.Linear) and not isinstance(layer, LoraLinear):
                found[f"{name}.{part}" if name else part] = layer
    return found
