"""The context of a linear attention is taken off the tape once it is multiplied with queries."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.lens import capture

from .mixers import DIM, B, D, H, Mixer, N, attention, left_out


def qkv(m, x):
    """Queries, keys and values of one head, from three maps; keys have fewer features than values."""
    return m.to_q(x)[..., :D], F.linear(x, m.to_k.weight[:D]), m.to_v(x)


def of_one_head(m, x):
    q, k, v = m.to_q(x), m.to_k(x), m.to_v(x)
    return q @ (k.softmax(1).mT @ v)


def of_relu_queries(m, x):
    q, k, v = qkv(m, x)
    context = torch.einsum("bnd,bne->bde", k.softmax(1), v) * D**-0.5
    return torch.einsum("bnd,bde->bne", F.relu(q), context)


def of_queries_softmaxed_late(m, x):
    q, k, v = qkv(m, x)
    context = k.softmax(1).mT @ v
    return q.softmax(-1) @ context


def of_turned_context(m, x):
    q, k, v = qkv(m, x)
    context = (v.mT @ k.softmax(1)).contiguous()
    return (context @ q.mT).mT


def of_heads_of_unknown_origin(m, x):
    q = k = v = x.unflatten(-1, (H, D))
    context = torch.einsum("bnhd,bnhe->bhde", k.softmax(1), v)
    return torch.einsum("bnhd,bhde->bnhe", q, context).flatten(2)


def of_linear_function(m, x):
    """Without a batch."""
    q, k, v = qkv(m, x[0])
    return F.linear(q, (k.softmax(0).mT @ v).mT)[None]


@pytest.mark.parametrize(
    "mix",
    [
        of_one_head,
        of_relu_queries,
        of_queries_softmaxed_late,
        of_turned_context,
        of_heads_of_unknown_origin,
        of_linear_function,
    ],
    ids=lambda f: f.__name__,
)
def test_a_context_that_queries_read_is_no_attention(mix):
    assert left_out(mix) == {"linear attention"}


def pool(m, x):
    """Five learned queries over the tokens."""
    return m.seeds(x).softmax(1).mT @ m.to_v(x)


def pooled_and_mixed(m, x):
    return F.linear(pool(m, x).mT, m.gate.weight[:, :5]).mT


def pooled_and_mixed_by_a_normed_parameter(m, x):
    return F.normalize(m.kernel[:5], dim=0).T @ pool(m, x)


def pooled_and_projected(m, x):
    """Tokens that take from the pooled ones after a layer of their own."""
    return m.gate(x) @ m.to_q(pool(m, x))[:, :4]


def pooled_and_weighed(m, x):
    """One average of the pooled tokens."""
    return m.seeds(x[:, :1]) @ pool(m, x)


@pytest.mark.parametrize(
    "mix",
    [pooled_and_mixed, pooled_and_mixed_by_a_normed_parameter, pooled_and_projected, pooled_and_weighed],
    ids=lambda f: f.__name__,
)
def test_learned_queries_stay_on_the_tape(mix):
    model = Mixer(mix)
    with capture(model) as tape, torch.no_grad():
        model(torch.randn(B, N, DIM))
    assert tape.layers == [""]
    assert not tape.unseen


def test_attention_over_pooled_tokens_stays_on_the_tape():
    def both(m, x):
        pooled = pool(m, x)
        return (m.to_q(x) @ m.to_k(pooled).mT).softmax(-1) @ pooled

    model = Mixer(both)
    with capture(model) as tape, torch.no_grad():
        model(torch.randn(B, N, DIM))
    assert [A.shape[-2:] for A in tape.values()] == [(5, N), (N, 5)]


@pytest.mark.parametrize("options", [{}, {"values": True}, {"keep": ["entropy"]}])
def test_other_calls_of_the_layer_keep_their_order(options):
    def three(m, x):
        a = attention(m, x)
        b = of_one_head(m, a)
        return attention(m, b)

    model = Mixer(three)
    with torch.no_grad(), pytest.warns(UserWarning, match="not recorded"), capture(model, **options) as tape:
        model(torch.randn(B, N, DIM))
    assert list(tape) == [("", 0), ("", 1)]
    assert [each.kind for each in tape.unseen] == ["linear attention"]
    assert {A.shape[-2:] for A in tape.values()} == {(N, N)}
    assert not tape.guessed


def test_gradients_of_a_context_are_those_of_the_model():
    model, x = nn.Sequential(Mixer(attention), Mixer(of_one_head)), torch.randn(B, N, DIM)
    want = torch.autograd.grad(model(x).sum(), list(model[1].to_k.parameters()))
    with pytest.warns(UserWarning, match="not recorded"), capture(model, gradients=True, values=True) as tape:
        got = torch.autograd.grad(model(x).sum(), list(model[1].to_k.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert tape.layers == ["0"]
