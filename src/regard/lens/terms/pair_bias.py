"""PairBias: a number for the pairs of some queries and some keys, in memory linear in the sequence."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...checks import check_broadcast, check_tensor
from ...ops.shape import Sizes
from ...ops.terms.biases import Bias
from ...ops.terms.coordinates import Coordinates
from ...ops.terms.term import term


@term
class PairBias(Bias):
    """queries[b, row] * keys[b, j] * heads[h]: each tensor broadcasts.

    >>> import torch
    >>> bias = PairBias(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 0.0, 2.0]]), torch.ones(1))
    >>> bias(*(torch.tensor(x) for x in (0, 0, 1, 2)))
    tensor(2.)
    """

    queries: Tensor
    keys: Tensor
    heads: Tensor

    reads_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("queries", "keys", "heads"):
            check_tensor(f"PairBias {name}", getattr(self, name))

    def check(self, sizes: Sizes) -> None:
        check_broadcast("PairBias queries", self.queries, {"b": sizes.b, "i": sizes.i})
        check_broadcast("PairBias keys", self.keys, {"b": sizes.b, "j": sizes.j})
        check_broadcast("PairBias heads", self.heads, {"h": sizes.h})

    def over(self, at: Coordinates) -> Tensor:
        keys = at.slice_of(self.keys, "bj") * at.slice_of(self.heads, "h")
        return (at.slice_of(self.queries, "bi") * keys).to(at.dtype)
