"""Normalizers of weights that a model changed after the softmax: every question of `Weights` answered from them."""

import pytest
import torch

from regard import Causal, Softmax, weights
from regard.lens.terms.changed_weights import Given, Scaled, holds_for_all_rows

B, H, I, J = 2, 3, 130, 70


def given(x):
    q, k = torch.zeros(B, H, x.shape[2], 1, dtype=x.dtype), torch.zeros(B, H, x.shape[3], 1, dtype=x.dtype)
    return weights(q, k, normalize=Given(x))


def scaled(factor):
    q, k = (torch.randn(B, H, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (I, J))
    return weights(q, k, normalize=Scaled(Softmax(), factor)), weights(q, k).dense() * factor


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


CASES = {
    "given": (given(random(B, H, I, J)), random(B, H, I, J)),
    "given, sparse": (given(random(B, H, I, J).relu()), random(B, H, I, J).relu()),
    "scaled by row": scaled(random(B, H, I, 1)),
    "scaled by key": scaled(random(1, H, 1, J)),
    "scaled by head": scaled(random(1, H, 1, 1)),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_entries_and_products_are_those_of_the_matrix(case):
    A, dense = case
    assert torch.equal(A.dense(), A[...])
    torch.testing.assert_close(A.dense(), dense, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(A[1, :, [5, 100], 3:9], dense[1, :, [5, 100], 3:9])
    torch.testing.assert_close(A.select(heads=[2, 0]).dense(), dense[:, [2, 0]])
    x, y = random(B, H, J, 5), random(B, H, I, 5)
    torch.testing.assert_close(A @ x, dense @ x)
    torch.testing.assert_close(A.T @ y, dense.mT @ y)
    assert ((A.dense() == 0) == (dense == 0)).all()


def test_measures_are_those_of_the_matrix(case):
    A, dense = case
    torch.testing.assert_close(A.received(), dense.sum(-2))
    torch.testing.assert_close(A.max(), dense.amax(-1))
    torch.testing.assert_close(A.topk(4).values, dense.topk(4, -1).values)
    torch.testing.assert_close(A.pool(I, J), dense)
    torch.testing.assert_close(A.pool(10, 7, how="max"), dense.view(B, H, 10, 13, 7, 10).amax((3, 5)))
    groups = torch.arange(I) // 13, torch.arange(J) // 10
    torch.testing.assert_close(A.mass(*groups), dense.view(B, H, 10, 13, 7, 10).sum(5).mean(3))
    summary = A.summary()
    torch.testing.assert_close(summary.received, dense.sum(-2))
    torch.testing.assert_close(summary.max, dense.amax(-1))
    assert A.statistic is None or isinstance(A.call.normalize, Scaled)


def test_entropy_takes_rows_as_they_are():
    x = random(B, H, I, J).abs()
    expected = -(x * x.log()).sum(-1)
    torch.testing.assert_close(given(x).entropy(), expected)
    torch.testing.assert_close(given(x).summary().entropy, expected)


def test_negative_weights_have_no_entropy():
    x = random(B, H, I, J).abs()
    x[0, 1, 5, 3] *= -1
    A = given(x)
    with pytest.raises(ValueError, match=r"entropy is not defined for negative weights, .* 1 of 780 rows have one"):
        A.entropy()
    found = A.summary().entropy
    assert found[0, 1, 5].isnan()
    assert found.isnan().sum() == 1


def test_a_hidden_key_has_no_weight():
    x = random(B, H, I, I)
    zeros = torch.zeros(B, H, I, 1, dtype=x.dtype)
    torch.testing.assert_close(weights(zeros, zeros, mask=Causal(), normalize=Given(x)).dense(), x.tril())


@pytest.mark.parametrize("make", [Given, lambda x: Scaled(Softmax(), x)], ids=["Given", "Scaled"])
def test_other_shapes_are_refused(make):
    q = torch.zeros(B, H, I, 1)
    with pytest.raises(ValueError, match="must broadcast to"):
        weights(q, q, normalize=make(torch.zeros(H + 1, 1, 1)))


def test_scaled_takes_a_normalizer():
    with pytest.raises(TypeError, match=r"write Scaled\(Softmax\(\), x\)"):
        Scaled(torch.zeros(1), torch.zeros(1))


def test_numbers_of_single_rows_do_not_hold_for_later_rows():
    assert holds_for_all_rows(None)
    assert holds_for_all_rows(Softmax())
    assert holds_for_all_rows(Scaled(Softmax(), torch.ones(1, H, 1, 1)))
    assert not holds_for_all_rows(Scaled(Softmax(), torch.ones(B, H, 1, 1)))
    assert not holds_for_all_rows(Scaled(Softmax(), torch.ones(I, 1)))
    assert not holds_for_all_rows(Scaled(Given(torch.ones(1, 1)), torch.ones(1)))


def test_weights_that_are_given_have_no_logit():
    A = given(torch.rand(B, H, 7, 7))
    with pytest.raises(ValueError, match="the scores of these weights are not known: the model changed the weights"):
        A.logit()
    assert A.summary().logit.isnan().all()
    assert A.measures()["logit"].isnan().all()
