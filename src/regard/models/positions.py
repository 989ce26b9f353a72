"""Positions of a Transformer by name: those added to its embeddings, and those its attention compares."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from ..nn import LearnedPositions, Rotary, ShawBias, Sinusoidal, T5Bias
from ..ops.terms.biases import Alibi

Positions = Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "t5", "shaw", "alibi", "none"]


def added_positions(name: Positions, dim: int, *, longest: int) -> nn.Module | None:
    """What is added to embeddings, a module of positions; None under the other names."""
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
    """What `Attention` compares i and j by, its `rotary` or its `bias`; nothing under the other names."""
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
