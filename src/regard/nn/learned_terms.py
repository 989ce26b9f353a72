"""Learned terms: modules that own the parameters of a term and return the term, and the slots of a layer for them."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import nn

from ..checks import check_int, check_number
from ..ops.terms.normalizers import SinkSoftmax
from ..ops.terms.scores import Cosine, Dot
from ..ops.terms.term import Term

TermT = TypeVar("TermT", bound=Term)


class LearnedDot(nn.Module):
    """q . k * scale with a learned positive scale, the inverse temperature, for each head.

    >>> LearnedDot(8, scale=0.125)()
    Dot(scale=float32[8])
    """

    def __init__(self, heads: int, *, scale: float) -> None:
        super().__init__()
        self.log_scale = _log_per_head("scale", heads, scale)

    def forward(self) -> Dot:
        return Dot(scale=self.log_scale.exp())


class LearnedCosine(nn.Module):
    """cos(q, k) / temperature with a learned positive temperature for each head (Liu et al. 2022, eq. 2)."""

    def __init__(self, heads: int, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.log_temperature = _log_per_head("temperature", heads, temperature)

    def forward(self) -> Cosine:
        return Cosine(self.log_temperature.exp())


class LearnedSink(nn.Module):
    """Softmax with one learned logit per head besides those of the keys, which takes weight from them; 0 at first."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        check_int("heads", heads, least=1)
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self) -> SinkSoftmax:
        return SinkSoftmax(self.sink)


def slot(name: str, value: Any, kind: type[TermT]) -> TermT | nn.Module | None:
    """Check and return the value of a slot: a term of numbers, or a module that owns the tensors of the term."""
    if value is not None and not isinstance(value, (kind, nn.Module)):
        raise TypeError(
            f"{name} must be a {kind.__name__} term or a module that returns one, got {value!r}; "
            "pass the mask of a single call to forward"
        )
    if isinstance(value, Term) and value.tensors():
        raise ValueError(
            f"{name}={value!r} holds tensors, which a layer would neither move nor save; "
            "pass a module that owns them and returns the term, or a mask to forward"
        )
    return value


def fill(value: TermT | nn.Module | None) -> Any:
    """Return the term of a slot for this call: the term itself, or the result of the module."""
    return value() if isinstance(value, nn.Module) else value


def _log_per_head(name: str, heads: int, value: float) -> nn.Parameter:
    check_int("heads", heads, least=1)
    check_number(name, value, above=0)
    return nn.Parameter(torch.full((heads,), math.log(value)))
