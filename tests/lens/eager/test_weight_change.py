"""How final weights differ from a softmax: not at all, by a factor, by a mask, or otherwise."""

import pytest
import torch

from regard.lens.eager.weight_change import WeightChange, given_call
from regard.lens.terms.changed_weights import Given
from regard.ops.terms.normalizers import SinkSoftmax

B, H, N = 2, 3, 5
LOGITS = torch.randn(B, H, N, N, generator=torch.Generator().manual_seed(0))
A = LOGITS.softmax(-1)


def change(found, logits=LOGITS, normalize=None):
    return WeightChange.of(found, logits, normalize)


@pytest.mark.parametrize("found", [A, A + 1e-9, A.clone().requires_grad_().detach()])
def test_rounding_is_no_change(found):
    assert change(found).is_none


def test_a_softmax_with_a_sink_is_no_change():
    sink = torch.arange(H) / 2
    logits = torch.cat((LOGITS, sink.view(-1, 1, 1).expand(B, H, N, 1)), -1)
    assert change(logits.softmax(-1)[..., :-1], normalize=SinkSoftmax(sink)).is_none
    assert not change(A, normalize=SinkSoftmax(sink)).is_none


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, H, 1, 1), (B, H, N, 1), (B, H, 1, N), (1, 1, 1, N)])
def test_a_factor_has_as_few_dims_as_it_needs(shape):
    factor = torch.linspace(-2, 0.5, torch.Size(shape).numel()).view(shape)
    found = change(A * factor)
    assert found.factor.shape == shape
    torch.testing.assert_close(found.factor, factor)
    assert found.hidden is None


def test_a_mask_is_a_mask_of_the_softmax_and_a_factor_of_its_rows():
    hidden = torch.ones(N, N).triu(1).bool()
    found = change(A.masked_fill(hidden, 0.0))
    assert torch.equal(found.hidden, hidden.expand_as(A))
    torch.testing.assert_close(found.factor, A.masked_fill(hidden, 0.0).sum(-1, keepdim=True))


def test_rows_that_are_hidden_throughout_have_the_factor_of_others():
    keep = torch.arange(N) != 2
    found = change(A * keep[:, None])
    assert found.hidden[:, :, 2].all()
    assert torch.equal(found.factor, torch.ones(1, 1, 1, 1))


@pytest.mark.parametrize("found", [A + 0.01, A.flip(1), A.square(), A.mT])
def test_any_other_change_has_no_factor(found):
    assert change(found) == WeightChange(False)


def test_a_small_change_in_half_precision_is_a_change():
    logits = LOGITS.bfloat16()
    weights = logits.softmax(-1)
    assert change(weights, logits).is_none
    assert not change(weights * 0.95, logits).is_none


def test_given_weights_have_no_queries_or_keys():
    call = given_call(A, torch.randn(B, H, N, 4), ("scaled", "clamped"))
    assert isinstance(call.normalize, Given)
    assert call.normalize.weights is not A
    assert call.q.shape == call.k.shape == (B, H, N, 1)
    assert call.changed == "scaled, clamped"
