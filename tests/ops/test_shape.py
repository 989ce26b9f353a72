"""Sizes: each term of a call checks itself against the letters of that call."""

from __future__ import annotations

import pytest
import torch

import regard as R
from regard.ops.call import Call
from regard.ops.shape import Sizes


@pytest.fixture
def seen(monkeypatch):
    """The sizes that calls pass to their scores."""
    sizes: list[Sizes] = []
    monkeypatch.setattr(R.Bilinear, "check", lambda term, given: sizes.append(given))
    return sizes


def score(d, k_width):
    return R.Bilinear(torch.randn(d, k_width))


def test_each_letter_is_a_dim_of_the_queries_or_keys(seen):
    Call.of(torch.randn(2, 6, 7, 5), torch.randn(2, 3, 11, 4), torch.randn(2, 3, 11, 9), score=score(5, 4))
    assert seen == [Sizes(b=2, h=6, g=3, i=7, j=11, d=5, k_width=4, readable=True)]


def test_leading_dims_are_one_batch(seen):
    for lead in ((3,), (2, 5), (2, 0, 5)):
        Call.of(torch.randn(*lead, 6, 7, 5), torch.randn(*lead, 3, 11, 4), score=score(5, 4))
    assert [sizes.b for sizes in seen] == [3, 10, 0]


def test_every_term_of_a_call_gets_the_same_sizes(seen, monkeypatch):
    for cls in (R.Causal, R.Alibi, R.Softmax):
        monkeypatch.setattr(cls, "check", lambda term, given: seen.append(given))
    q, k = torch.randn(2, 6, 7, 5), torch.randn(2, 3, 11, 4)
    Call.of(q, k, score=score(5, 4), mask=R.Causal(), bias=R.Alibi(6), normalize=R.Softmax())
    assert len(seen) == 4
    assert len(set(seen)) == 1


def test_values_are_readable_unless_tensors_are_those_of_torch_func(seen):
    q, k, term = torch.randn(3, 1, 6, 7, 5), torch.randn(3, 1, 6, 11, 4), score(5, 4)
    Call.of(q[0], k[0], score=term)
    torch.vmap(lambda q, k: Call.of(q, k, score=term).q)(q, k)
    assert [sizes.readable for sizes in seen] == [True, False]
