"""Scores divided by a temperature: the same kind of score with other numbers, so that its kernels still run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...ops.terms.coordinates import look_up
from ...ops.terms.scores import Additive, Bilinear, Cosine, Dot, FunctionScore, Location, Score


def with_temperature(score: Score | None, inverse: float | Tensor, width: int) -> Score:
    """Return the score times a number, or times one number per head; `width` is that of the queries.

    >>> with_temperature(None, 0.5, 64)
    Dot(scale=0.0625)
    """
    match score:
        case None:
            return Dot(scale=width**-0.5 * inverse)
        case Dot(cap=None):
            return Dot(scale=(width**-0.5 if score.scale is None else score.scale) * inverse)
        case Dot(cap=float() | int() as cap) if not isinstance(inverse, Tensor):
            # c tanh(s / c) / T is c' tanh(s' / c') with c' = c / T and s' = s / T
            return Dot((width**-0.5 if score.scale is None else score.scale) * inverse, cap * inverse)
        case Cosine():
            return Cosine(score.temperature / inverse)
        case Bilinear():
            return Bilinear(_times(score.w, inverse, 3))
        case Location():
            return Location(_times(score.w, inverse, 3))
        case Additive():
            return Additive(_times(score.u, inverse, 2))
        case FunctionScore():
            return Score.of(_scaling_function(score.fn.fn, inverse), score.score)
        case _:
            return Score.of(_scaling_function(None, inverse), score)


def _times(x: Tensor, inverse: float | Tensor, dims: int) -> Tensor:
    """Return a tensor times one number per head; its first dim is heads if it has `dims` dims."""
    if not isinstance(inverse, Tensor):
        return x * inverse
    return (x if x.ndim == dims else x[None]) * inverse.to(x.dtype).view(-1, *[1] * (dims - 1))


def _scaling_function(fn: Callable[..., Tensor] | None, inverse: float | Tensor) -> Callable[..., Tensor]:
    def scale_score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        factor: Any = look_up(inverse, h) if isinstance(inverse, Tensor) else inverse
        return (s if fn is None else fn(s, b, h, i, j)) * factor

    return scale_score
