"""The equation for one tile, in Python: A = normalize(mask(score(q, k) + bias)).

The reference backend writes it for the whole matrix; everything else that evaluates it in Python calls this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..terms.biases import Bias
from ..terms.coordinates import Block, Coordinates
from ..terms.masks.mask_algebra import Mask
from ..terms.normalizers import Normalizer
from ..terms.scores import Additive, Score
from .additive_blocks import additive_scores


class Terms(Protocol):
    """The four terms of an attention: a `Call` or a `PreparedCall`."""

    @property
    def score(self) -> Score: ...
    @property
    def mask(self) -> Mask | None: ...
    @property
    def bias(self) -> Bias | None: ...
    @property
    def normalize(self) -> Normalizer: ...


@dataclass(frozen=True)
class PlannedBlock:
    """A block, and the slice of its keys for which the mask is evaluated entry by entry; None if it sees them all."""

    block: Block
    masked: slice | None


def tile_weights(
    terms: Terms, planned: PlannedBlock, q: Tensor, k: Tensor, statistic: Tensor | None, *, finite: bool = True
) -> Tensor:
    """The weights `b h i j` of any tile from the statistic `b h i 1` of its rows, None if the normalizer needs none.

    q `b h i d` and k `b g j d` are the tile's part of the tensors that `Score.prepare` returned.
    """
    return terms.normalize.map(tile_scores(terms, planned, q, k, finite=finite), statistic, planned.block)


def tile_scores(
    terms: Terms,
    planned: PlannedBlock,
    q: Tensor,
    k: Tensor,
    *,
    finite: bool = True,
    additive: Callable[[Tensor, Tensor, Tensor], Tensor] = additive_scores,
) -> Tensor:
    """The scores of a block with the bias added, hidden entries at -inf.

    `additive` computes additive scores. `finite` says that every score is finite: then the mask is added, which is
    faster than a masked fill, but NaN and Inf would survive it.
    """
    score = terms.score
    s = additive(q, k, score.u.to(q.dtype)) if isinstance(score, Additive) else score.tile(q, k)
    return add_bias_and_mask(terms, planned, score.modify(s, planned.block), finite=finite)


def add_bias_and_mask(terms: Terms, planned: PlannedBlock, s: Tensor, *, finite: bool = True) -> Tensor:
    """Scores with the bias added, hidden entries at -inf."""
    block = planned.block
    if terms.bias is not None:
        s = s + terms.bias.over(block)
    if terms.mask is None or planned.masked is None:
        return s
    if not finite:
        return torch.where(terms.mask.over(block), s, -math.inf)
    # In place, unseen by autograd: adding a constant changes no gradient, and no backward reads these scores.
    visible = terms.mask.over(_narrow_keys(block, planned.masked))
    s.detach()[..., planned.masked] += additive_mask(visible, s.dtype)
    return s


def normalize_tile(terms: Terms, at: Coordinates, s: Tensor, statistic: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores to weights, by the row statistic if it is known."""
    if statistic is None:
        return terms.normalize.weigh(s, at)
    return terms.normalize.map(s, statistic, at), statistic


def entry_weights(terms: Terms, at: Coordinates, s: Tensor, statistic: Tensor | None) -> Tensor:
    """The weights of single entries from their scores before bias and mask, and from the statistic of their rows."""
    if terms.bias is not None:
        s = s + terms.bias.over(at)
    if terms.mask is not None:
        s = torch.where(terms.mask.over(at), s, -math.inf)
    return terms.normalize.map(s, statistic, at)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where True, -inf where False: far cheaper to add than a masked fill."""
    return 1 - visible.to(dtype).reciprocal()  # 1 - 1/1 is 0, 1 - 1/0 is -inf


def additive_tile(terms: Terms, block: Block, dtype: torch.dtype, *, masked: bool = True) -> Tensor | None:
    """The bias of a block, -inf where the mask hides: `b|1 h|1 i j`. None if there is nothing to add.

    PyTorch's kernels take this in place of a bias and a mask.
    """
    added = None if terms.bias is None else terms.bias.over(block).to(dtype)
    if masked and terms.mask is not None:
        hidden = additive_mask(terms.mask.over(block), dtype)
        added = hidden if added is None else added + hidden
    if added is None:
        return None
    added = added[(None,) * (4 - added.ndim)]
    return added.expand(-1, -1, block.row.numel(), block.j.numel())


def _narrow_keys(block: Block, part: slice) -> Block:
    if isinstance(block.cols, Tensor):
        return replace(block, cols=block.cols[part])
    return replace(block, cols=slice(block.cols.start + part.start, block.cols.start + part.stop))
