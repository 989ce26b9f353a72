"""Decide which of the dims before a matrix are the batch and which are the heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Attributes in which layers keep their number of heads.
HEAD_COUNT_NAMES = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "nheads",
    "heads",
    "num_attention_heads",
    "h",
)
MERGING_NAMES = frozenset(("view", "reshape", "flatten", "cat", "concat"))


class HeadLayout(NamedTuple):
    """A rearrangement of *lead i j to b h i j."""

    lead: torch.Size  # batch dims; the dim `at` are the heads
    at: int

    @classmethod
    def of(cls, lead: Sequence[int], heads: int | None, first: bool) -> HeadLayout:
        """Find the dim of `lead` that are the heads; a single dim is split into batch and heads, or heads `first`.

        If the number of heads is unknown, the heads are the last of several dims, and a single dim has one head.
        """
        if len(lead) < 2:
            heads = heads or 1
            batch = prod(lead) // heads
            return cls(torch.Size((heads, batch) if first else (batch, heads)), 0 if first else 1)
        last = len(lead) - 1
        if heads is None or lead[last] == heads:
            return cls(torch.Size(lead), last)
        for n in range(last):
            if prod(lead[n:]) == heads:  # groups of heads
                return cls(torch.Size((prod(lead[:n]), heads)), 1)
        return cls(torch.Size(lead), next((n for n in (*range(1, last), 0) if lead[n] == heads), last))

    def of_matrices(self, x: Tensor) -> Tensor:
        """Rearrange a tensor that broadcasts to *lead i j, so that it broadcasts to b h i j."""
        if x.ndim <= 2 or (len(self.lead) == 2 and self.at == 1):
            return x
        x = x[(None,) * (len(self.lead) + 2 - x.ndim)]
        if len(self.lead) > 2 and x.shape[:-2].numel() > 1:
            x = x.expand(*self.lead, *x.shape[-2:])
        return x.movedim(self.at, -3).flatten(0, -4)


def to_heads_function(batch_dims: torch.Size, heads: int | None) -> Callable[[Tensor], Tensor]:
    """Return a function that rearranges (*batch_dims, i, e) to (b, h, i, e), given the number of heads if known.

    If it is unknown the heads are the last of several dims; a single dim is the batch, with one head.
    """
    layout = HeadLayout.of(batch_dims, heads, first=False)
    return lambda x: layout.of_matrices(with_batch_dims(x, batch_dims, layout.lead)) if x.ndim > 2 else x[None, None]


def replace_heads(out: Tensor, heads: Tensor, to_heads: Callable[[Tensor], Tensor]) -> Tensor:
    """Return an output whose heads are replaced by `heads`, b h i e; `to_heads(out)` are its own."""
    positions = to_heads(torch.arange(out.numel(), device=out.device).view(out.shape))
    return out.flatten().scatter(0, positions.flatten(), heads.flatten()).view(out.shape)


def head_count(parts: Sequence[tuple[str, nn.Module]], matrices: int) -> int | None:
    """Return the number of heads from an attribute of the running layer, or of its parent; None if unknown.

    It must divide the number of matrices. `parts` are the running modules with their names, the innermost last.
    """
    for name, part in parts[:-3:-1]:
        between = parts[-1][0][len(name) :]
        # A module in a list within `part` may itself be one of its heads.
        if any(step.isdigit() for step in between.split(".")):
            return None
        for attribute in HEAD_COUNT_NAMES:
            heads = getattr(part, attribute, None)
            if isinstance(heads, int) and heads > 0 and matrices % heads == 0:
                return heads
    return None


def merged_batch_dims(args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> tuple[int, int] | None:
    """Return the two batch dims that a call merged into one, the outer first; the inner is 0 for concatenated parts."""
    x = args[0] if args else None
    if isinstance(x, Tensor):
        merges = x.ndim == 4 and not x.is_nested and x.shape[:2].numel() == len(out)
        return (x.shape[0], x.shape[1]) if merges else None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return (len(x), 0) if isinstance(x, (list, tuple)) and dim == 0 else None


def common_batch_dims(left: torch.Size, right: torch.Size) -> torch.Size:
    """Return the broadcast batch dims of two tensors."""
    return left if left == right else torch.broadcast_shapes(left, right)


def with_batch_dims(x: Tensor, batch_dims: torch.Size, lead: torch.Size) -> Tensor:
    """Reshape a tensor that broadcasts to matrices with `batch_dims` to batch dims `lead` of the same matrices."""
    if batch_dims == lead or x.ndim <= 2:
        return x
    last = x.shape[-2:]
    if x.shape[:-2].numel() == 1:
        return x.reshape(*(1 for _ in lead), *last)
    return x.expand(*batch_dims, *last).reshape(*lead, *last)


def permute_batch_dims(x: Tensor, order: Sequence[int]) -> Tensor:
    """Permute the batch dims of matrices."""
    return x.permute(*order, -2, -1)


def as_matrix(x: Tensor) -> Tensor:
    """Return a tensor with at least two dims that broadcasts alike."""
    return x if x.ndim > 1 else x[None]
