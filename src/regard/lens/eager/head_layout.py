"""Layouts: which of the dims before matrices are the batch and which the heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HEAD_COUNT_NAMES = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "nheads",
    "heads",
    "num_attention_heads",
    "h",
)  # what layers say
MERGING_NAMES = frozenset(("view", "reshape", "flatten", "cat", "concat"))


class HeadLayout(NamedTuple):
    """Makes b h i j of *lead i j."""

    lead: torch.Size  # one dim, or several of which one are the heads
    at: int  # which

    @classmethod
    def of(cls, lead: Sequence[int], heads: int | None, first: bool) -> HeadLayout:
        """The batch dims `lead` with `heads` among them, or within the only one: behind the texts, or `first`.

        Where nobody says how many heads there are it is the last dim, or one head.
        """
        if len(lead) < 2:
            all_, heads = prod(lead), heads or 1
            return cls(torch.Size((heads, all_ // heads) if first else (all_ // heads, heads)), 0 if first else 1)
        last = len(lead) - 1
        if heads is None or lead[last] == heads:
            return cls(torch.Size(lead), last)
        for n in range(last):
            if prod(lead[n:]) == heads:  # groups of heads
                return cls(torch.Size((prod(lead[:n]), heads)), 1)
        return cls(torch.Size(lead), next((n for n in (*range(1, last), 0) if lead[n] == heads), last))

    def of_matrices(self, x: Tensor) -> Tensor:
        """A tensor that broadcasts to *lead i j with dims that broadcast to b h i j."""
        if x.ndim <= 2 or (len(self.lead) == 2 and self.at == 1):
            return x
        x = x[(None,) * (len(self.lead) + 2 - x.ndim)]
        if len(self.lead) > 2 and x.shape[:-2].numel() > 1:
            x = x.expand(*self.lead, *x.shape[-2:])
        return x.movedim(self.at, -3).flatten(0, -4)


def to_heads_function(given: torch.Size, heads: int | None) -> Callable[[Tensor], Tensor]:
    """What makes b h i e of tensors for a kernel with other batch dims, among or within which somebody says heads are.

    Where nobody says they are the last dim, or there is one head: a kernel takes a batch without heads.
    """
    layout = HeadLayout.of(given, heads, first=False)
    return lambda x: layout.of_matrices(with_batch_dims(x, given, layout.lead)) if x.ndim > 2 else x[None, None]


def replace_heads(out: Tensor, heads: Tensor, laid: Callable[[Tensor], Tensor]) -> Tensor:
    """An output with other numbers for its heads, b h i e, which `laid` makes of it."""
    at = laid(torch.arange(out.numel(), device=out.device).view(out.shape))
    return out.flatten().scatter(0, at.flatten(), heads.flatten()).view(out.shape)


def head_count(parts: Sequence[tuple[str, nn.Module]], matrices: int) -> int | None:
    """How many of so many matrices are heads of one text, as the layer under way says, or the one around it.

    `parts` are all that are under way, the innermost last, with their names.
    """
    for name, part in parts[:-3:-1]:
        between = parts[-1][0][len(name) :]
        if any(step.isdigit() for step in between.split(".")):  # one of several that are heads themselves
            return None
        for attribute in HEAD_COUNT_NAMES:
            heads = getattr(part, attribute, None)
            if isinstance(heads, int) and heads > 0 and matrices % heads == 0:
                return heads
    return None


def merged_batch_dims(args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> tuple[int, int] | None:
    """The two batch dims that a call made one, the outer first; of parts it put behind each other the inner is 0."""
    x = args[0] if args else None
    if isinstance(x, Tensor):
        folded = x.ndim == 4 and not x.is_nested and x.shape[:2].numel() == len(out)
        return (x.shape[0], x.shape[1]) if folded else None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return (len(x), 0) if isinstance(x, (list, tuple)) and dim == 0 else None


def common_batch_dims(left: torch.Size, right: torch.Size) -> torch.Size:
    """The batch dims of two tensors together."""
    return left if left == right else torch.broadcast_shapes(left, right)


def with_batch_dims(x: Tensor, given: torch.Size, lead: torch.Size) -> Tensor:
    """A tensor that broadcasts to matrices with batch dims `given`, with others, `lead`, for the same matrices."""
    if given == lead or x.ndim <= 2:
        return x
    last = x.shape[-2:]
    if x.shape[:-2].numel() == 1:
        return x.reshape(*(1 for _ in lead), *last)
    return x.expand(*given, *last).reshape(*lead, *last)


def permute_batch_dims(x: Tensor, order: Sequence[int]) -> Tensor:
    """Matrices with their batch dims in another order."""
    return x.permute(*order, -2, -1)


def as_matrix(x: Tensor) -> Tensor:
    """A tensor that broadcasts to matrices, with two dims at least."""
    return x if x.ndim > 1 else x[None]
