"""Decide which of the dims before a matrix are the batch and which are the heads, by evidence.

What counts, in this order: the layout that the caller gave; heads that were seen to be split off the features of a
projection (`dim_origins.py`); the batch size of the inputs of the running layers, with their number of heads. That a
number of heads divides the number of matrices is no evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .dim_origins import FEATURES, LEARNED, PRESUMED, REPEATED, ROWS, Dim, kinds_of
from .given_layout import GivenLayout, LayoutMismatch

# Attributes in which layers keep their number of heads.
HEAD_COUNT_NAMES = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "nheads",
    "heads",
    "num_attention_heads",
    "head_num",
    "num_head",
    "h",
)


class HeadLayout(NamedTuple):
    """A rearrangement of *lead i j to b h i j."""

    lead: torch.Size  # batch dims; the dim `at` are the heads
    at: int

    @classmethod
    def one_head(cls, lead: Sequence[int]) -> HeadLayout:
        """Return the layout in which all matrices are of the batch, with one head each."""
        return cls(torch.Size((prod(lead), 1)), 1)

    @classmethod
    def of(cls, lead: Sequence[int], heads: int | None) -> HeadLayout:
        """Find the dim of `lead`, of at least two, that are the heads; the last if their number is unknown."""
        last = len(lead) - 1
        if heads is None or lead[last] == heads:
            return cls(torch.Size(lead), last)
        for n in range(last):
            if prod(lead[n:]) == heads:  # groups of heads
                return cls(torch.Size((prod(lead[:n]), heads)), 1)
        return cls(torch.Size(lead), next((n for n in (*range(1, last), 0) if lead[n] == heads), last))

    @classmethod
    def from_origins(cls, dims: Sequence[Dim]) -> HeadLayout | None:
        """Return the layout in which the features among the factors of the batch dims are heads.

        None if there are none, or if they are in several places.
        """
        kinds = kinds_of(dims)
        heads = next(({kind} for kind in (FEATURES, PRESUMED, LEARNED) if kind in kinds), None)
        if heads is None:
            return None
        runs: list[tuple[bool, int]] = []
        for dim in dims:
            repeated = {REPEATED} if not heads.isdisjoint(factor.kind for factor in dim) else set()
            for kind, size in dim:
                counts_heads = kind in heads | repeated
                if runs and runs[-1][0] == counts_heads:
                    size *= runs.pop()[1]
                runs.append((counts_heads, size))
        if sum(counts_heads for counts_heads, _ in runs) > 1:
            return None
        at = next(n for n, (counts_heads, _) in enumerate(runs) if counts_heads)
        sizes = [size for _, size in runs]
        return cls(torch.Size(sizes if len(sizes) > 1 else (1, *sizes)), at if len(sizes) > 1 else 1)

    def of_matrices(self, x: Tensor) -> Tensor:
        """Rearrange a tensor that broadcasts to *lead i j, so that it broadcasts to b h i j."""
        if x.ndim <= 2 or (len(self.lead) == 2 and self.at == 1):
            return x
        x = x[(None,) * (len(self.lead) + 2 - x.ndim)]
        if len(self.lead) > 2 and x.shape[:-2].numel() > 1:
            x = x.expand(*self.lead, *x.shape[-2:])
        return x.movedim(self.at, -3).flatten(0, -4)


class LayerEvidence(NamedTuple):
    """Evidence for the choice between batch and heads in the running layer."""

    heads: int | None = None  # an attribute of the layer or of its parent
    inputs: tuple[torch.Size, ...] = ()  # shape of the first tensor given to the layer, then to each layer around it
    given: GivenLayout | None = None  # what the caller of `capture` said


class HeadChoice(NamedTuple):
    """A layout, and the reason why it is a guess."""

    layout: HeadLayout
    guess: str | None = None


def choose_layout(
    lead: Sequence[int], dims: Sequence[Dim] | None, evidence: LayerEvidence, finer: Sequence[int] | None = None
) -> HeadChoice:
    """Choose the layout of matrices with batch dims `lead`, whose origins are `dims` if they are known.

    `finer` are batch dims that the same matrices had along the way, if those were more. Raises `LayoutMismatch` if the
    given layout does not fit.
    """
    if prod(lead) <= 1 and evidence.given is None:
        return HeadChoice(HeadLayout.one_head(lead))
    known = dims is not None and [prod(factor.size for factor in dim) for dim in dims] == list(lead)
    if evidence.given is not None:
        return HeadChoice(_given_layout(lead, dims if known else None, evidence.given, evidence))
    if dims is not None and known:
        if (layout := HeadLayout.from_origins(dims)) is not None:
            return HeadChoice(layout)
        if finer is None and kinds_of(dims) == {ROWS}:
            return HeadChoice(HeadLayout.one_head(lead))
        parts = [factor.size for dim in dims for factor in dim]
        lead = parts if len(parts) > len(lead) else lead
    lead = finer if finer is not None and len(finer) > len(lead) else lead
    return _choose_one_dim(prod(lead), evidence) if len(lead) < 2 else _choose_dims(lead, evidence)


def _choose_one_dim(matrices: int, evidence: LayerEvidence) -> HeadChoice:
    """Choose between batch and folded heads for one batch dim, by the batch size of the layers under way."""
    batch, heads = HeadLayout.one_head((matrices,)), evidence.heads
    for dim in (0, 1):  # batch first, then batch second
        sizes = [shape[dim] for shape in evidence.inputs if len(shape) == 3 or (not dim and len(shape) > 1)]
        if heads is not None and any(size * heads == matrices for size in sizes):
            return HeadChoice(HeadLayout(torch.Size((matrices // heads, heads)), 1))
        if matrices in sizes:
            return HeadChoice(batch)
    if heads == matrices:
        return HeadChoice(HeadLayout(torch.Size((1, heads)), 1), f"its {matrices} matrices are as many as its heads")
    return HeadChoice(batch, f"its {matrices} matrices are taken for {matrices} texts with one head each")


def _choose_dims(lead: Sequence[int], evidence: LayerEvidence) -> HeadChoice:
    """Choose the dim of the heads among several."""
    heads, sizes = evidence.heads, {shape[0] for shape in evidence.inputs if len(shape) > 1}
    layout = HeadLayout.of(lead, heads)
    if sum(size > 1 for size in lead) < 2:  # the position of the only one decides
        return HeadChoice(layout)
    if len(lead) == 2 and lead[0] != lead[1]:
        if heads in lead:
            return HeadChoice(layout)
        if lead[1] in sizes and lead[0] not in sizes:
            return HeadChoice(HeadLayout(torch.Size(lead), 0))
        if lead[0] in sizes:
            return HeadChoice(layout)
    elif heads is not None and (list(lead).count(heads) == 1 or layout.lead[layout.at] == heads != lead[layout.at]):
        return HeadChoice(layout)
    shown = " x ".join(map(str, lead))
    return HeadChoice(layout, f"of its batch dims {shown} dim {layout.at} is taken for the heads")


def _given_layout(
    lead: Sequence[int], dims: Sequence[Dim] | None, given: GivenLayout, evidence: LayerEvidence
) -> HeadLayout:
    """Return the layout that the caller gave."""
    if given.is_batch:
        return HeadLayout.one_head(lead)
    if not given.is_folded:
        if len(lead) != 2:
            raise LayoutMismatch(f"layout={given} has two batch dims, but its matrices have {len(lead)}")
        return HeadLayout(torch.Size(lead), given.at)
    matrices, heads = prod(lead), given.heads
    if len(lead) > 2 or (len(lead) == 2 and 1 not in lead):
        raise LayoutMismatch(f"layout={given} has one batch dim, but its matrices have {len(lead)}")
    if heads is None and dims is not None and (layout := HeadLayout.from_origins(dims)) is not None:
        heads = layout.lead[layout.at]
    if heads is None:
        heads = evidence.heads
    if heads is None or matrices % heads:
        known = "their number is unknown" if heads is None else f"{matrices} matrices are no multiple of {heads} heads"
        raise LayoutMismatch(f"layout={given} has folded heads, but {known}; pass {given.example!r}")
    return HeadLayout(torch.Size((matrices // heads, heads) if given.at else (heads, matrices // heads)), given.at)


def to_heads_function(batch_dims: torch.Size, layout: HeadLayout) -> Callable[[Tensor], Tensor]:
    """Return a function that rearranges (*batch_dims, i, e) to (b, h, i, e)."""
    return lambda x: layout.of_matrices(with_batch_dims(x, batch_dims, layout.lead)) if x.ndim > 2 else x[None, None]


def replace_heads(out: Tensor, heads: Tensor, to_heads: Callable[[Tensor], Tensor]) -> Tensor:
    """Return an output whose heads are replaced by `heads`, b h i e; `to_heads(out)` are its own."""
    positions = to_heads(torch.arange(out.numel(), device=out.device).view(out.shape))
    return out.flatten().scatter(0, positions.flatten(), heads.flatten()).view(out.shape)


def head_count(parts: Sequence[tuple[str, nn.Module]]) -> int | None:
    """Return the number of heads from an attribute of the running layer, or of its parent; None if unknown.

    `parts` are the running modules with their names, the innermost last.
    """
    for name, part in parts[:-3:-1]:
        between = parts[-1][0][len(name) :]
        # A module in a list within `part` may itself be one of its heads.
        if any(step.isdigit() for step in between.split(".")):
            return None
        kind: type = type(part)
        is_plain = kind.__getattr__ is nn.Module.__getattr__  # type: ignore[attr-defined]
        for attribute in HEAD_COUNT_NAMES:
            if is_plain and not (attribute in part.__dict__ or hasattr(kind, attribute)):
                continue  # a failed lookup in a module takes long
            heads = getattr(part, attribute, None)
            if isinstance(heads, int) and heads > 0:
                return heads
    return None


def common_batch_dims(first: torch.Size, *others: torch.Size) -> torch.Size:
    """Return the broadcast batch dims of tensors."""
    return first if all(each == first for each in others) else torch.broadcast_shapes(first, *others)


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
