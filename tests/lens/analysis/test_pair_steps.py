"""The steps of one weight, beside the formulas written out in float64."""

import math

import pytest
import torch

from regard import (
    Additive,
    Alibi,
    Bilinear,
    Causal,
    Cosine,
    Dot,
    Location,
    Score,
    Sigmoid,
    SinkSoftmax,
    weights,
)
from regard.lens.analysis.pair_steps import pair_steps

H, N, D = 4, 9, 6
torch.manual_seed(0)
Q, K = torch.randn(2, 2, H, N, D)
K = K[:, :2]
W, U, TEMPERATURE = torch.randn(H, D, D), torch.randn(H, D), torch.rand(H) + 0.5
PLACES = torch.randn(H, N, D)


def written_out(score, q, k, head, j):
    """The formula, its terms and the scale, as one would write them."""
    match score:
        case Dot(scale=None):
            return "q_d k_d", q * k, D**-0.5
        case Dot():
            return "q_d k_d", q * k, float(score.scale[head])
        case Cosine():
            return "q_d k_d / (|q| |k|)", q * k / q.norm() / k.norm(), 1 / float(TEMPERATURE[head])
        case Bilinear():
            return "(q w)_d k_d", (q @ W[head].double()) * k, None
        case Location():
            return "q_d w_jd", q * PLACES[head, j].double(), None
        case _:
            return "u_d tanh(q_d + k_d)", U[head].double() * (q + k).tanh(), None


SCORES = [Dot(), Dot(scale=TEMPERATURE), Dot(cap=2.0), Cosine(TEMPERATURE), Bilinear(W), Location(PLACES), Additive(U)]


@pytest.mark.parametrize("score", SCORES, ids=lambda score: type(score).__name__)
@pytest.mark.parametrize("selected", [False, True])
def test_the_terms_sum_to_the_score(score, selected):
    A = weights(Q, K, score=score, mask=Causal(), bias=Alibi(H))
    batch, head, i, j = 1, 3, 6, 2
    exact = weights(Q.double(), K.double(), score=score, mask=Causal(), bias=Alibi(H))
    if selected:
        steps = pair_steps(A.select(heads=[1, 3]), i, j, head=1, batch=batch)
    else:
        steps = pair_steps(A, i, j, head=head, batch=batch)
    formula, terms, scale = written_out(score, Q[batch, head, i].double(), K[batch, head // 2, j].double(), head, j)
    assert steps.formula == formula
    assert torch.allclose(steps.terms, terms, rtol=1e-7)
    assert steps.scale == pytest.approx(scale)
    total = float(terms.sum()) * (1.0 if scale is None else scale)
    if getattr(score, "cap", None):
        total = score.cap * math.tanh(total / score.cap)
    assert steps.score == pytest.approx(total, rel=1e-6)
    assert steps.bias == pytest.approx(-(2.0 ** (-2 * (head + 1))) * (i - j))
    assert steps.total == pytest.approx(steps.score + steps.bias)
    assert steps.statistic == pytest.approx(float(exact.lse[batch, head, i]), rel=1e-6)
    assert steps.weight == pytest.approx(math.exp(steps.total - steps.statistic), rel=1e-9)
    assert steps.weight == pytest.approx(float(exact[batch, head, i, j]), rel=1e-6)


def test_a_hidden_pair_has_no_weight():
    steps = pair_steps(weights(Q, K, mask=Causal()), 2, 5)
    assert (steps.visible, steps.weight, steps.bias) == (False, 0.0, None)
    assert math.isfinite(steps.score)


def test_normalizers_say_their_own_number():
    assert pair_steps(weights(Q, K, normalize=Sigmoid()), 2, 5).statistic is None
    with_sink = pair_steps(weights(Q, K, normalize=SinkSoftmax(3.0)), 2, 5)
    without = pair_steps(weights(Q, K), 2, 5)
    assert with_sink.statistic == pytest.approx(math.log(math.exp(without.statistic) + math.exp(3.0)))


def test_a_function_of_the_score_is_in_the_score():
    A = weights(Q, K, score=Score.of(lambda s, b, h, i, j: 2 * s + j))
    steps = pair_steps(A, 2, 5)
    assert steps.formula == "q_d k_d"
    assert steps.score == pytest.approx(2 * float(steps.terms.sum()) * D**-0.5 + 5)


@pytest.mark.parametrize("wrong", [{"query": N, "key": 0}, {"query": 0, "key": -1}, {"query": 0, "key": 0, "head": H}])
def test_pairs_that_are_not_there_are_named(wrong):
    with pytest.raises((IndexError, ValueError), match="must be"):
        pair_steps(weights(Q, K), **wrong)
