"""Heads removed for good: their rows leave the projections to queries, keys and values, their columns that of outputs.

    W_q' = the rows of W_q of the heads that stay        W_o' = the columns of W_o of the heads that stay

Key heads are removed with the last query head that reads them. If the query heads that stay do not share the key heads
evenly, `RepeatedHeads` gives each query head a copy of its keys; the weights hold them once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RepeatedHeads(nn.Linear):
    """x W^T + b; the features of each head are repeated for every query head that reads them.

    >>> layer = RepeatedHeads(nn.Linear(8, 6), heads=[0, 0, 1])
    >>> layer(torch.randn(2, 8)).shape, layer.weight.shape
    (torch.Size([2, 9]), torch.Size([6, 8]))
    """

    index: Tensor

    def __init__(self, linear: nn.Linear, heads: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.heads = tuple(heads)

    def forward(self, input: Float[Tensor, "*b in_features"]) -> Float[Tensor, "*b out"]:
        own = super().forward(input).unflatten(-1, (max(self.heads) + 1, -1))
        return torch.cat([own[..., head, :] for head in self.heads], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={list(self.heads)}"


def keep_output_heads(linear: Any, heads: Sequence[int], width: int) -> None:
    """Remove the rows of all other heads from a projection; a head has `width` rows."""
    index = feature_index(heads, width, linear.weight.device)
    _replace(linear, "weight", linear.weight.index_select(0, index))
    if linear.bias is not None:
        _replace(linear, "bias", linear.bias.index_select(0, index))
    linear.out_features = len(index)


def keep_input_heads(linear: Any, heads: Sequence[int], width: int) -> None:
    """Remove the columns of all other heads from the output projection; a head has `width` columns."""
    index = feature_index(heads, width, linear.weight.device)
    _replace(linear, "weight", linear.weight.index_select(1, index))
    linear.in_features = len(index)


def keep_key_heads(linear: nn.Linear, heads: int, kept: Sequence[int], width: int) -> tuple[nn.Linear, int]:
    """Return a projection to the key heads that some kept query head reads, and how many heads it gives.

    `heads` is the number of query heads before, and `width` that of a key head.
    """
    own = linear.heads if isinstance(linear, RepeatedHeads) else range(linear.out_features // width)
    read = [own[head * len(own) // heads] for head in kept]
    used = sorted(set(read))
    if isinstance(linear, RepeatedHeads):
        plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        plain.weight, plain.bias = linear.weight, linear.bias
        plain.train(linear.training)
        linear = plain
    keep_output_heads(linear, used, width)
    if len(set(Counter(read).values())) == 1:
        return linear, len(used)
    repeated = RepeatedHeads(linear, [used.index(head) for head in read])
    return repeated.train(linear.training), len(read)


def feature_index(heads: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Return the features of some heads, in their order.

    >>> feature_index([0, 2], 3, torch.device("cpu"))
    tensor([0, 1, 2, 6, 7, 8])
    """
    first = torch.tensor(list(heads), device=device)[:, None] * width
    return (first + torch.arange(width, device=device)).flatten()


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter that learns as the one before."""
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=getattr(module, name).requires_grad))
