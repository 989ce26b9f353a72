"""One observed attention call: the position of its first query, and its weights."""

import pytest
import torch

from regard import Alibi, Causal, Window, weights
from regard.lens.recording.observed import ObservedAttention, weights_of_observed

NO_TERMS = dict.fromkeys(("score", "mask", "bias", "normalize", "offset"))


def tensors():
    return torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)


@pytest.mark.parametrize(("offset", "first"), [(None, 4), (0, 0), (2, 2)])
def test_the_last_query_is_at_the_last_key_unless_an_offset_is_known(offset, first):
    assert ObservedAttention(*tensors(), offset=offset).first_position == first


@pytest.mark.parametrize("offset", [None, 1])
def test_its_weights_are_those_of_the_terms_without_gradients(offset):
    q, k, v = (x.requires_grad_() for x in tensors())
    terms = {"mask": Causal() & Window(3), "bias": Alibi(4), "offset": offset}
    A = ObservedAttention(q, k, v, **terms).weights
    assert torch.equal(A.dense(), weights(q, k, **terms).dense())
    assert not A.dense().requires_grad


def test_terms_of_chosen_heads_count_all_heads_of_the_layer():
    q, k, _ = tensors()
    k = k.repeat_interleave(2, 1)
    some = weights_of_observed(q[:, [3, 1]], k[:, [3, 1]], [3, 1], **{**NO_TERMS, "bias": Alibi(4)})
    assert torch.equal(some.dense(), weights(q, k, bias=Alibi(4)).dense()[:, [3, 1]])


def test_a_known_statistic_is_not_computed_again():
    q, k, _ = tensors()
    statistic = weights(q, k).lse
    assert torch.equal(weights_of_observed(q, k, None, **NO_TERMS, statistic=statistic).lse, statistic)
