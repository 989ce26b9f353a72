"""One intercepted attention call: read, or replaced by another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Causal, Dot
from regard.lens import NotUnderstood
from regard.lens.interception.intercept import intercept
from regard.lens.interception.intercepted import HEADS_SECOND, HEADS_THIRD
from tests.lens.kernel_layers import QkvLayer, qkv


class Replacing:
    """Consumer that computes another attention instead."""

    def __init__(self, change):
        self.change = change

    def observe(self, attention):
        return attention.replaced_by(self.change(attention.interpret_or_raise()))


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Weighted(nn.Module):
    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in x.chunk(3, -1))
        scores = q.sum(-1, keepdim=True) + k.sum(-1)[..., None, :]
        return (scores.softmax(-1) * torch.linspace(0, 1, 7, dtype=q.dtype) @ v).transpose(1, 2)


class Mixed(nn.Module):
    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in x.chunk(3, -1))
        return ((q @ k.mT).softmax(-1).roll(1, 1) @ v).transpose(1, 2)


def test_weights_that_were_changed_after_the_softmax_can_be_replaced():
    model, x = nn.Sequential(Mixed()), qkv()
    plain = model(x)
    with intercept(model, Replacing(lambda seen: seen._replace(v=-seen.v))):
        torch.testing.assert_close(model(x), -plain)


def test_a_call_that_is_not_understood_cannot_be_replaced():
    model = nn.Sequential(Weighted())
    message = "the attention of 0 cannot be replaced: the weights that"
    with pytest.raises(NotUnderstood, match=message), intercept(model, Replacing(lambda seen: seen)):
        model(qkv())


def test_arguments_of_a_call_can_be_replaced():
    model, x = nn.Sequential(QkvLayer(sdpa)), qkv()
    with intercept(model, Replacing(lambda seen: seen._replace(score=Dot(scale=0.0)))):
        out = model(x)
    torch.testing.assert_close(out, x.chunk(3, -1)[2].mean(1, keepdim=True).expand_as(out))


@pytest.mark.parametrize(("layout", "shape"), [(HEADS_SECOND, (2, 4, 7, 8)), (HEADS_THIRD, (2, 7, 4, 8))])
def test_a_layout_finds_the_heads_of_an_output_and_makes_one_of_them(layout, shape):
    out = torch.randn(shape)
    assert layout.heads(out).shape == (2, 4, 7, 8)
    again = layout.output(layout.heads(out))
    assert torch.equal(again, out)
    assert again.is_contiguous()


class Watching:
    """Consumer that keeps the calls it sees."""

    def __init__(self):
        self.seen, self.terms, self.projections = [], [], []

    def observe(self, attention):
        self.seen.append(attention)
        attention.await_projection(self.projections.append)
        self.terms.append(attention.interpret())
        return attention.out


def test_a_call_is_read_in_terms_with_its_heads_and_its_projection():
    class Projecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(32, 32).double()

        def forward(self, x):
            q, k, v = (part.transpose(1, 2) for part in x.chunk(3, -1))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(out.transpose(1, 2).flatten(2))

    model, watching, x = nn.Sequential(Projecting()), Watching(), qkv()
    with intercept(model, watching):
        model(x)
    (attention,), (terms,) = watching.seen, watching.terms
    assert attention.layer == "0"
    assert terms.mask == Causal()
    torch.testing.assert_close(terms.weights @ terms.v, attention.heads)
    assert torch.equal(attention.with_heads(attention.heads), attention.out)


def test_a_call_that_is_not_understood_is_read_as_its_reason():
    model, watching = nn.Sequential(Weighted()), Watching()
    with intercept(model, watching):
        model(qkv())
    (reason,) = watching.terms
    assert isinstance(reason, NotUnderstood)
    assert "not the softmax" in str(reason)
