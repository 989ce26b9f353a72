"""Attention written out with a sink: one more logit in each softmax, whose weight is dropped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Causal, SinkSoftmax
from regard.lens import capture

B, H, N, D = 2, 3, 5, 4
HIDDEN = torch.ones(N, N, dtype=torch.bool).triu(1)


class Layer(nn.Module):
    """Attends by a function of q, k, v, each b h n d, and sinks, b h n 1, that says which weights it used."""

    num_heads = H

    def __init__(self, attention):
        super().__init__()
        self.qkv, self.sinks, self.attention = nn.Linear(H * D, 3 * H * D), nn.Parameter(torch.randn(H)), attention

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out, self.found = self.attention(q, k, v, self.sinks.view(1, H, 1, 1).expand(B, H, N, 1))
        return out


def last(q, k, v, sink):
    weights = torch.cat([q @ k.mT / 2, sink], -1).softmax(-1)[..., :-1]
    return weights @ v, weights


def first(q, k, v, sink):
    """As in x-transformers."""
    weights = torch.cat((sink, q @ k.mT / 2), dim=-1).softmax(-1)
    weights = weights[..., 1:]
    return F.dropout(weights, 0.5, training=False) @ v, weights


def dropped_before(q, k, v, sink):
    weights = F.dropout(torch.cat([q @ k.mT / 2, sink], -1).softmax(-1), 0.0)[:, :, :, :N]
    return weights @ v, weights


def less_the_largest(q, k, v, sink):
    """As in transformers."""
    scores = torch.cat([(q @ k.mT / 2).masked_fill(HIDDEN, -torch.inf), sink], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights, v), weights


def less_the_largest_in_place(q, k, v, sink):
    scores = torch.cat([q @ k.mT / 2, sink], dim=-1).float()
    scores -= scores.amax(-1, keepdim=True)
    weights = scores.softmax(-1)[..., :-1]
    return weights @ v, weights


def softmax_one(q, k, v, sink):
    weights = F.pad(q @ k.mT, (1, 0)).softmax(-1)[..., 1:]
    return torch.einsum("bhij,bhjd->bihd", weights, v), weights


def by_groups(q, k, v, sink):
    """One text, heads in groups, as OpenAI wrote it."""
    q, k, v = (x[0].transpose(0, 1)[:, :, None] for x in (q, k, v))
    scores = torch.einsum("qhmd,khmd->hmqk", q, k)
    scores *= 0.5
    scores = scores + torch.zeros(N, N).masked_fill(HIDDEN, -torch.inf)
    scores = torch.cat([scores, sink[0][:, None]], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :-1]
    return torch.einsum("hmqk,khmd->qhmd", weights, v), weights.transpose(0, 1)


STYLES = [last, first, dropped_before, less_the_largest, less_the_largest_in_place, softmax_one, by_groups]


@pytest.mark.parametrize("attention", STYLES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_a_sink_is_a_normalizer(attention, context):
    layer, x = Layer(attention), torch.randn(B, N, H * D)
    with context():
        plain = layer(x)
        with capture(layer) as tape:
            assert torch.equal(layer(x), plain)
    torch.testing.assert_close(tape[0].dense(), layer.found.detach(), atol=1e-6, rtol=1e-5)
    call = tape[0].call
    assert isinstance(call.normalize, SinkSoftmax)
    sinks = torch.zeros(H) if attention is softmax_one else layer.sinks.detach()
    assert torch.equal(call.normalize.sink, sinks)
    assert isinstance(call.mask, Causal) == (attention in (less_the_largest, by_groups))


def kept(q, k, v, sink):
    weights = torch.cat([q @ k.mT, sink], -1).softmax(-1)
    return weights @ torch.cat([v, v[:, :, :1]], 2), weights


def other_columns(q, k, v, sink):
    weights = torch.cat([q @ k.mT, sink], -1).softmax(-1)[..., 1:]
    return weights @ v, weights


def of_rows(q, k, v, sink):
    weights = torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)[..., :-1]
    return weights @ v, weights


def test_other_columns_than_the_sink_are_shown_as_the_weights_that_they_are():
    layer = Layer(other_columns)
    with torch.no_grad(), capture(layer) as tape:
        layer(torch.randn(B, N, H * D))
    torch.testing.assert_close(tape[0].dense(), layer.found, atol=1e-6, rtol=1e-5)
    assert list(tape.changed) == [""]


@pytest.mark.parametrize("attention", [kept, of_rows], ids=lambda f: f.__name__)
def test_what_is_no_sink_of_heads_is_told_of(attention):
    told = (
        "4 was not recorded: the weights that it multiplies with v are not the softmax"
        if attention is of_rows
        else r"4 was not recorded: it computes softmax\(q @ k.mT\), but the result was never"
    )
    model = nn.Sequential(Layer(last), nn.Flatten(1, 2), nn.Unflatten(1, (N, H)), nn.Flatten(2), Layer(attention))
    with torch.no_grad(), pytest.warns(UserWarning, match=told), capture(model) as tape:
        model(torch.randn(B, N, H * D))
    assert tape.layers == ["0"]
