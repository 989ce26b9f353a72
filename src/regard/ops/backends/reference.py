"""The definition: A = normalize(mask(score(q, k) + bias)), out = dropout(A) @ v, dense, every term, any dtype.

Differentiable any number of times. It stores the whole matrix, so it is for small problems, second derivatives and
for judging the other backends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Call
from ..place import Block
from ..problem import Problem, prepare
from ..scores import grouped_product

name = "reference"


def objections(call: Call) -> list[str]:
    """What keeps this backend from running the call: nothing."""
    return []


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The output and the row statistic, `b h i 1`."""
    assert call.v is not None
    A, statistic = matrix(call)
    A = F.dropout(A, call.dropout)
    v = call.v.to(A.dtype)
    if prepare(call).garbage is None:
        out = grouped_product(A, v)
    else:
        out = torch.einsum("b h i j, b h i j e -> b h i e", A, _own(v, _visible(call)))
    return out.to(call.v.dtype), statistic


def matrix(call: Call) -> tuple[Tensor, Tensor | None]:
    """All weights, `b h i j`, and the row statistic."""
    problem = prepare(call)
    at = problem.whole()
    s = _scores(problem, call)
    if problem.bias is not None:
        s = s + problem.bias.over(at)
    if problem.mask is not None:
        s = torch.where(problem.mask.over(at), s, float("-inf"))
    return problem.normalize.weigh(s, at)


def _scores(problem: Problem, call: Call) -> Tensor:
    if problem.garbage is None:
        return problem.score.tile(problem.q, problem.k)
    # Each query gets keys of its own, those hidden from it zeroed: what they held reaches neither value nor gradient.
    own = _own(problem.k, _visible(call))
    b, h, i, j, _ = own.shape
    rows = [problem.score.tile(problem.q[:, :, [r]], own[:, :, r]) for r in range(i)]
    return torch.cat([own.new_zeros(b, h, 0, j), *rows], 2)


def _own(x: Tensor, visible: Tensor) -> Tensor:
    """`b g j d, b h i j -> b h i j d`: keys or values as each query sees them."""
    x = x.repeat_interleave(visible.shape[1] // x.shape[1], 1)
    return torch.where(visible[..., None], x[:, :, None], 0.0)


def _visible(call: Call) -> Tensor:
    assert call.mask is not None
    at: Block = prepare(call).whole()
    return call.mask.over(at).expand(call.shape)
