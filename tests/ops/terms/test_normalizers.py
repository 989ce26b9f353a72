"""Normalizers where a row leaves them a choice."""

import pytest
import torch

from regard import Causal, Diagonal, Entmax, Hard, SinkSoftmax, Softmax, Sparsemax, Window, weights
from regard.ops.dispatch import BACKENDS

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.usefixtures("small_blocks")]


def even(mask, normalize, backend):
    """All scores are 0."""
    return weights(torch.zeros(1, 2, 40, 4), torch.randn(1, 2, 40, 4), mask=mask, normalize=normalize, backend=backend)


def test_hard_takes_the_first_of_equal_scores(backend):
    chosen = even(Window(before=9, after=2), Hard(), backend).dense().argmax(-1)
    assert torch.equal(chosen, (torch.arange(40) - 9).clamp(min=0).expand(1, 2, 40))


@pytest.mark.parametrize("normalize", [Sparsemax(), Entmax(1.2), Entmax(1.5)], ids=repr)
def test_equal_scores_share_the_row_evenly(backend, normalize):
    A = even(Causal(), normalize, backend).dense()
    torch.testing.assert_close(A, torch.ones(1, 2, 40, 40).tril() / torch.arange(1, 41)[:, None])


@pytest.mark.parametrize("normalize", [Sparsemax(), Entmax(1.5)], ids=repr)
def test_one_score_far_ahead_takes_the_whole_row(backend, normalize):
    k = torch.zeros(1, 1, 30, 1)
    k[:, :, 17] = 100.0
    A = weights(torch.ones(1, 1, 5, 1), k, normalize=normalize, backend=backend).dense()
    assert torch.equal(A.nonzero()[:, -1], torch.full((5,), 17))
    assert (A[..., 17] == 1).all()


@pytest.mark.parametrize("first", ["statistic", "summary", "entropy"])
@pytest.mark.parametrize("normalize", [Softmax(), SinkSoftmax(0.0), Sparsemax()], ids=repr)
def test_a_row_with_a_score_that_is_nan_is_nan_whatever_is_asked_first(backend, normalize, first):
    k = torch.randn(1, 1, 5, 4)
    k[:, :, 2] = torch.nan
    A = weights(torch.randn(1, 1, 3, 4), k, normalize=normalize, backend=backend)
    {"statistic": lambda: A.statistic, "summary": A.summary, "entropy": A.entropy}[first]()
    assert A.statistic.isnan().all()
    assert A.dense().isnan().all()
    assert A.summary().entropy.isnan().all()


@pytest.mark.parametrize("grad", [False, True])
def test_a_score_that_is_nan_is_not_hidden_by_hard(backend, grad):
    q, k, v = torch.randn(3, 1, 1, 5, 4).unbind()
    k[:, :, 2] = torch.nan
    q.requires_grad_(grad)
    A = weights(q, k, mask=Causal(), normalize=Hard(), backend=backend)
    if backend in ("tiled", "reference"):
        assert (A @ v).isnan().all(-1).tolist() == NAN_FROM_2
    assert A.dense().isnan().any(-1).tolist() == NAN_FROM_2
    assert A.entropy().isnan().tolist() == NAN_FROM_2
    assert A.max().isnan().tolist() == NAN_FROM_2
    if grad:
        A.dense().sum().backward()
        assert q.grad.isnan().any(-1).tolist() == NAN_FROM_2


NAN_FROM_2 = [[[False, False, True, True, True]]]


@pytest.mark.parametrize(("low", "dtype"), [(-120.0, torch.float32), (-800.0, torch.float64)])
def test_a_row_that_sees_nothing_but_a_low_sink_has_gradients_of_zero(backend, low, dtype):
    q = torch.randn(1, 1, 3, 4, dtype=dtype, requires_grad=True)
    k, sink = torch.randn(1, 1, 3, 4, dtype=dtype), torch.full((1,), low, dtype=dtype, requires_grad=True)
    A = weights(q, k, mask=Causal() & ~Diagonal(), normalize=SinkSoftmax(sink), backend=backend)
    A.entropy().sum().backward()
    assert (q.grad[:, :, 0] == 0).all()
    assert q.grad.isfinite().all()
    assert sink.grad.isfinite().all()
    assert A.statistic[0, 0, 0] == low
