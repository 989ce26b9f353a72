"""Effects of heads: numbers that a user measured for each head, such as the loss without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layer_names import list_names, own_name, shown_name

Effects = dict[str, dict[str, Tensor]]  # float64 `h` by layer, by the name of the effect


def checked_effects(name: str, scores: object) -> dict[str, Tensor]:
    """Return the scores of each layer's heads as float64 tensors `h`."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"an effect needs a name that says what it is, got {name!r}")
    if not isinstance(scores, Mapping):
        hint = "pass what importance or ablation_importance returned"
        raise TypeError(
            f"scores must be a map from layers to a number for each head, got {type(scores).__name__}; {hint}"
        )
    found = {}
    for layer, values in scores.items():
        x = torch.as_tensor(values).detach().double().cpu()
        if x.ndim != 1:
            raise ValueError(
                f"the scores of {shown_name(layer)!r} must be one number a head, got shape {tuple(x.shape)}"
            )
        found[own_name(layer)] = x
    return found


def effect_mismatch(name: str, scores: Mapping[str, Tensor], heads: Mapping[str, Sequence[int]]) -> str | None:
    """Return a warning if an effect fits no layer, or lacks heads; `heads` are the head numbers by layer."""
    if heads and not scores.keys() & heads.keys():
        return f"the effect {name!r} is of {list_names(scores)}, which are not on the tape; it has {list_names(heads)}"
    for layer, numbers in heads.items():
        if layer in scores and max(numbers, default=-1) >= len(scores[layer]):
            return (
                f"the effect {name!r} has {len(scores[layer])} numbers for {shown_name(layer)!r}, which has head "
                f"{max(numbers)}; pass a number for each head of the layer"
            )
    return None


def effects_of_heads(effects: Effects, layer: str, heads: Sequence[int]) -> dict[str, list[float]]:
    """Return, by the name of each effect, the number of each of some heads of a layer; NaN if it is not known."""
    found: dict[str, list[float]] = {}
    for name, scores in effects.items():
        if layer in scores:
            x = scores[layer].tolist()
            found[name] = [x[head] if head < len(x) else float("nan") for head in heads]
    return found


def from_lists(source: Any) -> Effects:
    """Read effects from a file's JSON."""
    return {
        str(name): {
            str(layer): torch.tensor([float(x) for x in values], dtype=torch.float64) for layer, values in by.items()
        }
        for name, by in source.items()
    }
