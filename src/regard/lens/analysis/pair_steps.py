"""One weight step by step: the products of query and key by dimension, their sum, the bias, the mask, the softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import check_int
from ...ops.call import Call
from ...ops.terms.coordinates import Block
from ...ops.terms.scores import Additive, Bilinear, Cosine, Dot, Location, Score, product_of, select_heads
from ...ops.weights import Weights
from .head_measures import check_weights


class PairSteps(NamedTuple):
    """The steps from a query and a key to their weight, all in float64.

    `score` comes after scale, cap and function, `total` after the bias as well; a hidden pair has the weight 0.
    `statistic` is the number of the row that the normalizer needs: for a softmax the log-sum-exp of its totals.
    """

    formula: str  # names of the terms: "q_d k_d"; empty if the score is no sum over dimensions
    terms: Tensor | None  # d
    scale: float | None  # a factor of the sum of the terms; None if the terms hold it
    score: float
    bias: float | None
    total: float
    visible: bool
    statistic: float | None
    weight: float


@torch.no_grad()
def pair_steps(A: Weights, query: int, key: int, *, head: int = 0, batch: int = 0) -> PairSteps:
    """Return how the weight of one query and one key comes about, from the captured queries, keys and terms.

    >>> from regard import weights
    >>> q, k = torch.tensor([[[[3.0, 1.0, 0.0, 0.0]]]]), torch.eye(2, 4)[None, None]
    >>> steps = pair_steps(weights(q, k), query=0, key=0)
    >>> steps.formula, steps.terms.tolist(), steps.scale, steps.score
    ('q_d k_d', [3.0, 0.0, 0.0, 0.0], 0.5, 1.5)
    >>> round(steps.statistic, 4), round(steps.weight, 4)  # log(e^1.5 + e^0.5), exp(1.5 - 1.8133)
    (1.8133, 0.7311)

    Queries and keys are those that the attention got, after rotary embeddings and norms. The row of the query is
    recomputed, which takes O(n) time.
    """
    check_weights(A)
    for name, value, n in zip(("batch", "head", "query", "key"), (batch, head, query, key), A.call.shape, strict=True):
        check_int(name, value)
        if not 0 <= value < n:
            raise IndexError(f"{name} must be from 0 to {n - 1}, got {value}")
    part = [slice(n, n + 1) for n in (batch, head, query)]
    call = A.call.select(*part)
    call = replace(call, q=call.q.double(), k=call.k.double(), lead=(1,))
    row, block = Weights(call), replace(call.whole(), cols=slice(key, key + 1))
    numbers = call.whole().h.flatten()
    formula, terms, scale = _terms(product_of(call.score), call, key, numbers)
    score = _score(call.score, call, key, block, numbers)
    bias = None if call.bias is None else float(call.bias.over(block))
    visible = call.mask is None or bool(call.mask.over(block))
    statistic = row.statistic
    return PairSteps(
        formula,
        terms,
        scale,
        score,
        bias,
        score + (bias or 0.0),
        visible,
        None if statistic is None else float(statistic),
        float(row[0, 0, 0, key]),
    )


def _terms(score: Score, call: Call, key: int, numbers: Tensor) -> tuple[str, Tensor | None, float | None]:
    """Return the formula of the terms that a score sums over dimensions, the terms, and the scale of their sum."""
    q, k = call.q[0, 0, 0], call.k[0, 0, key]
    prepared, keys = score.prepare(call.q, call.k, numbers)
    match score:
        case Dot():
            scale = q.shape[-1] ** -0.5 if score.scale is None else _number(score.scale, numbers)
            return "q_d k_d", q * k, scale
        case Cosine():
            unit = F.normalize(q, dim=-1) * F.normalize(k, dim=-1)
            return "q_d k_d / (|q| |k|)", unit, 1 / _number(score.temperature, numbers)
        case Bilinear():
            return "(q w)_d k_d", prepared[0, 0, 0] * k, None
        case Location():
            return "q_d w_jd", q * keys[0, 0, key], None
        case Additive():
            u = select_heads(score.u, 2, numbers).double()
            return "u_d tanh(q_d + k_d)", u.view(-1) * torch.tanh(q + k), None
        case _:
            return "", None, None


def _number(x: float | Tensor, numbers: Tensor) -> float:
    return float(select_heads(x, 1, numbers)) if isinstance(x, Tensor) else float(x)


def _score(score: Score, call: Call, key: int, block: Block, numbers: Tensor) -> float:
    """Return the score of the pair before bias and mask."""
    if isinstance(score, Additive):
        score = Additive(select_heads(score.u, 2, numbers))
    q, k = score.prepare(call.q, call.k, numbers)
    return float(score.modify(score.tile(q, k[:, :, key : key + 1]), block))
