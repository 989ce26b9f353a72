"""Compare the weights that multiply the values with the softmax of the scores: unchanged, scaled, masked or other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.terms.coordinates import Point
from ...ops.terms.normalizers import Normalizer, SinkSoftmax
from ..interception.kernel_call import KernelCall
from ..terms.changed_weights import Given

ROUNDING_UNITS = 128  # units in the last place of float32 and float64 that weights may differ by
HALF_ROUNDING_UNITS = 1


class WeightChange(NamedTuple):
    """The change of a softmax: none, or `softmax(scores without hidden) * factor`, or another if there is no factor."""

    is_none: bool
    factor: Tensor | None = None  # broadcasts to b h i j
    hidden: Tensor | None = None  # b h i j: True for keys that the softmax weighs and the final weights do not

    @classmethod
    def of(cls, found: Tensor, logits: Tensor, normalize: Normalizer | None) -> WeightChange:
        """Return the change from the softmax of logits, `b h i j`, or another normalizer, to the weights found."""
        kind = min((found.dtype, logits.dtype), key=lambda dtype: dtype.itemsize)
        tolerance = torch.finfo(kind).eps * (HALF_ROUNDING_UNITS if kind.itemsize <= 2 else ROUNDING_UNITS)
        weights, found = _weigh(logits, normalize).nan_to_num(), found.to(logits.dtype).nan_to_num()
        largest = found.abs().amax(-1, keepdim=True)

        def is_close(other: Tensor) -> bool:
            return bool(((found - other).abs() <= tolerance * largest).all())

        if is_close(weights):
            return cls(True)
        total = found.sum(-1, keepdim=True)
        visible = found != 0
        hidden = ~visible & (weights > tolerance * weights.amax(-1, keepdim=True))
        is_masked = bool(hidden.any())
        seen = torch.where(visible, weights, 0.0) if is_masked else weights
        share = seen / seen.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        if is_close(share * total) and not (is_masked and isinstance(normalize, SinkSoftmax)):
            if normalize is not None:  # its rows need not sum to 1
                sums = seen.sum(-1, keepdim=True)
                total = total / torch.where(sums == 0, 1.0, sums)
            total = torch.where(visible.any(-1, keepdim=True), total, 1.0)
            return cls(False, _without_equal_dims(total, tolerance), ~visible if is_masked else None)
        received = weights.sum(-2, keepdim=True)
        per_key = found.sum(-2, keepdim=True) / torch.where(received == 0, 1.0, received)
        return cls(False, _without_equal_dims(per_key, tolerance) if is_close(weights * per_key) else None)


def given_call(found: Tensor, v: Tensor, changes: Sequence[str]) -> KernelCall:
    """Return the call whose weights are given, `b h i j`: its queries and keys are zeros."""
    b, h, i, j = found.shape
    q, k = v.new_zeros(b, h, i, 1), v.new_zeros(b, h, j, 1)
    return KernelCall(
        q=q, k=k, v=v, normalize=Given(found.detach().nan_to_num()), changed=", ".join(changes) or "changed"
    )


def _weigh(logits: Tensor, normalize: Normalizer | None) -> Tensor:
    if normalize is None:
        return logits.softmax(-1)
    b, h, i, j = (torch.arange(n, device=logits.device) for n in logits.shape)
    at = Point(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j, dtype=logits.dtype)
    return normalize.weigh(logits, at)[0]


def _without_equal_dims(x: Tensor, tolerance: float) -> Tensor:
    """Return x with dims of equal numbers narrowed to 1; numbers close to 1 become 1."""
    x = torch.where((x - 1).abs() <= tolerance, 1.0, x)
    for dim in range(x.ndim):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and bool(((x - first).abs() <= tolerance * x.abs().amax()).all()):
            x = first
    return x.clone()
