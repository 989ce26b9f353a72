"""ObservedAttention: one attention call of a model, as q, k, v and terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.call import SLOTS, Call
from ...ops.terms.biases import Bias
from ...ops.terms.masks.mask_algebra import Mask
from ...ops.terms.normalizers import Normalizer, Softmax
from ...ops.terms.scores import Dot, Score
from ...ops.weights import Weights


class ObservedAttention(NamedTuple):
    """One attention call of a model: tensors with dims b h i d, and the terms in the slots of `regard.attend`."""

    q: Tensor  # b h i d
    k: Tensor  # b g j d
    v: Tensor  # b g j e
    score: Score | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    normalize: Normalizer | None = None
    offset: int | None = None  # position of the first query among the keys; None: the last query is at the last key
    statistic: Tensor | None = None  # b h i: log-sum-exp of each row, if the kernel returned it
    version: int | None = None  # version counter of q and k when the model called, if they are read later
    changed: str = ""  # how the model changed the weights after the softmax

    @property
    def first_position(self) -> int:
        """Position of the first query among the keys."""
        return self.k.shape[2] - self.q.shape[2] if self.offset is None else self.offset

    @property
    def weights(self) -> Weights:
        """The weights, detached from autograd."""
        terms: Any = {slot: getattr(self, slot) for slot in (*SLOTS, "offset")}
        return weights_of_observed(self.q.detach(), self.k.detach(), None, **terms)

    def dense(self) -> Tensor:
        """The weights as a tensor, `b h i j`, with the gradients of queries and keys."""
        terms: Any = {slot: getattr(self, slot) for slot in (*SLOTS, "offset")}
        return weights_of_observed(self.q, self.k, None, **terms).dense()


def weights_of_observed(
    q: Tensor,
    k: Tensor,
    heads: list[int] | None,
    *,
    score: Score | None,
    mask: Mask | None,
    bias: Bias | None,
    normalize: Normalizer | None,
    offset: int | None,
    statistic: Tensor | None = None,
) -> Weights:
    """Return the weights of an attention that has run, without validating its arguments again.

    With `heads`, q and k hold these heads only, while the terms still count all heads of the layer.
    """
    call = Call(
        q,
        k,
        None,
        score=score or Dot(),
        mask=mask,
        bias=bias,
        normalize=normalize or Softmax(),
        dropout=0.0,
        offset=k.shape[2] - q.shape[2] if offset is None else offset,
        lead=(q.shape[0],),
        head_ids=None if heads is None else torch.tensor(heads, device=q.device),
    )
    return Weights(call, None if statistic is None else statistic[..., None])
