"""Exponentials and their divisors: a softmax, one with a sink, or other weights."""

import pytest
import torch

from regard.lens.eager.matmul import Average, MatrixProduct
from regard.lens.eager.symbolic_scores import Scores
from regard.lens.eager.unnormalized import Exponentials, UndividedAverage
from regard.ops.terms.normalizers import SinkSoftmax

Q, K, V = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
S = Q @ K.mT
E = S.exp()
TOTAL = E.sum(-1, keepdim=True)


def exponentials(scores=None):
    return Exponentials(Scores.of(MatrixProduct(Q, K)) if scores is None else scores, S)


def dense(scores):
    x = scores.scale * scores.q @ scores.k.mT
    return x.masked_fill(scores.hidden[0], -torch.inf) if scores.hidden else x


def test_divided_by_its_sums_it_is_a_softmax():
    weights = exponentials().divide(E, TOTAL)
    assert weights.normalize is None
    torch.testing.assert_close(dense(weights.scores), S)
    assert weights.logits is S


def test_a_small_number_beside_the_sums_is_none_to_speak_of():
    assert exponentials().divide(E, TOTAL + 1e-9).normalize is None


def test_one_more_is_a_sink():
    weights = exponentials().divide(E, 1 + TOTAL)
    assert weights.normalize == SinkSoftmax(0.0)
    torch.testing.assert_close(dense(weights.scores), S)


def test_a_sink_of_each_row_is_part_of_queries_and_keys():
    extra = torch.linspace(0.5, 3, 5)[:, None]
    weights = exponentials().divide(E, TOTAL + extra)
    shifted = dense(weights.scores)
    torch.testing.assert_close(shifted, S - extra.log())
    torch.testing.assert_close(weights.logits, S - extra.log())
    torch.testing.assert_close(shifted.exp() / (1 + shifted.exp().sum(-1, keepdim=True)), E / (TOTAL + extra))


def test_the_shift_of_a_row_counts_as_the_sink_does():
    shift = torch.linspace(-1, 1, 5)[:, None]
    scores = Scores.of(MatrixProduct(Q, K)).plus(shift, S.shape[:-2])
    e = (S + shift).exp()
    weights = Exponentials(scores).divide(e, e.sum(-1, keepdim=True) + shift.exp())
    assert weights.normalize == SinkSoftmax(0.0)
    torch.testing.assert_close(weights.logits, S)


def test_hidden_keys_have_no_exponentials():
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)
    e = E.masked_fill(hidden, 0.0)
    weights = exponentials().without(hidden, S.shape[:-2]).divide(e, e.sum(-1, keepdim=True))
    torch.testing.assert_close(dense(weights.scores).softmax(-1), e / e.sum(-1, keepdim=True))
    torch.testing.assert_close(weights.logits.softmax(-1), e / e.sum(-1, keepdim=True))


def test_keys_are_the_dim_that_the_divisor_lacks():
    weights = exponentials(Scores.of(MatrixProduct(K, Q))).divide(E.mT, TOTAL.mT)
    assert weights.behind == 1
    torch.testing.assert_close(dense(weights.scores), S)


@pytest.mark.parametrize("divisor", [TOTAL * 2, TOTAL / 2, E.amax(-1, keepdim=True)])
def test_another_divisor_of_unknown_scores_makes_no_weights(divisor):
    assert Exponentials(None).divide(E, divisor) is None


@pytest.mark.parametrize("divisor", [TOTAL / 2, E.amax(-1, keepdim=True)])
def test_another_divisor_of_scores_makes_weights_that_are_no_softmax(divisor):
    assert exponentials().divide(E, divisor).changes == ("scaled",)


@pytest.mark.parametrize("divisor", [torch.ones(()), torch.ones(7), E, torch.ones(3, 1, 1)])
def test_only_one_number_per_row_divides(divisor):
    assert exponentials().divide(E, divisor) is None


def test_exponentials_that_sum_to_one_are_weights_already():
    assert exponentials().as_weights(E) is None
    assert Exponentials(None).as_weights(E / TOTAL).behind == 0
    assert Exponentials(None).as_weights((E / TOTAL).mT).behind == 1


def test_a_product_is_an_average_once_it_is_divided():
    product = UndividedAverage(exponentials(), E, V, Average(V, lambda out: out), lambda weights, values: None)
    softmaxed, weights = product.divide(TOTAL)
    torch.testing.assert_close(weights, S.softmax(-1))
    assert softmaxed.averaged is product.averaged
    assert product.divide(TOTAL.mT) is None
