"""The definition: A = normalize(mask(score(q, k) + bias)), out = dropout(A) @ v, dense, every term, any dtype.

Differentiable any number of times. It stores the whole matrix, so it is for small problems, second derivatives and
for judging the other backends.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend_plan import BackendPlan, Objections
from ..blocks.prepared_call import PreparedCall, prepare
from ..call import Call
from ..terms.scores import grouped_product

name = "reference"


def plan(call: Call) -> BackendPlan | Objections:
    """A plan, always: the reference runs every call."""
    return BackendPlan(name, partial(_run, call))


def _run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and the row statistic, `b h i 1`."""
    assert call.v is not None
    prepared = prepare(call)
    A, statistic = weigh(prepared)
    A = F.dropout(A, call.dropout)
    v = call.v.to(A.dtype)
    if prepared.nonfinite_keys is None:
        out = grouped_product(A, v)
    else:
        out = torch.einsum("b h i j, b h i j e -> b h i e", A, _own(prepared, v))
    return out.to(call.v.dtype), statistic


def weigh(prepared: PreparedCall) -> tuple[Tensor, Tensor | None]:
    """All weights, `b h i j`, and the row statistic."""
    return prepared.normalize.weigh(masked_scores(prepared), prepared.whole)


def masked_scores(prepared: PreparedCall) -> Tensor:
    """All scores with the bias added, `b h i j`, hidden entries at -inf."""
    at = prepared.whole
    s = prepared.score.modify(_scores(prepared), at)
    if prepared.bias is not None:
        s = s + prepared.bias.over(at)
    if prepared.mask is not None:
        s = torch.where(prepared.mask.over(at), s, float("-inf"))
    return s


def _scores(prepared: PreparedCall) -> Tensor:
    if prepared.nonfinite_keys is None:
        return prepared.score.tile(prepared.q, prepared.k)
    b, h, i, j = prepared.shape
    own = _own(prepared, prepared.k)
    rows = [prepared.score.tile(prepared.q[:, :, [r]], own[:, :, r]) for r in range(i)]
    return torch.cat([own.new_zeros(b, h, 0, j), *rows], 2)


def _own(prepared: PreparedCall, x: Tensor) -> Tensor:
    """`b g j d -> b h i j d`: keys or values as each query sees them, the hidden ones zeroed.

    What hidden keys hold, NaN included, then reaches neither a value nor a gradient.
    """
    assert prepared.mask is not None
    visible = prepared.mask.over(prepared.whole).expand(prepared.shape)
    x = x.repeat_interleave(visible.shape[1] // x.shape[1], 1)
    return torch.where(visible[..., None], x[:, :, None], 0.0)
