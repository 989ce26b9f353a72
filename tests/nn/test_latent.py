"""Multi-head latent attention beside its equations, written out in float64, and its small cache."""

import math

import pytest
import torch

from regard import Causal
from regard.nn import LatentAttention

D = torch.float64


def written_out(layer, x, hidden=None):
    """Section 2.1 of the paper, head by head."""
    n, d, r, e = x.shape[1], layer.head_dim, layer.rotary.width, layer.value_dim
    short = x if layer.query_down is None else layer.query_norm(layer.query_down(x))
    down = layer.down(x)
    c, shared = down[..., : layer.latent], layer.rotary(down[:, None, :, layer.latent :], torch.arange(n))[:, 0]
    c = c / (c.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight
    q, up = layer.query(short).unflatten(-1, (layer.heads, -1)), layer.up(c).unflatten(-1, (layer.heads, -1))
    causal = torch.ones(n, n, dtype=torch.bool).triu(1)
    outs = []
    for head in range(layer.heads):
        turned = layer.rotary(q[:, None, :, head, d:], torch.arange(n))[:, 0]
        s = (q[:, :, head, :d] @ up[:, :, head, :d].mT + turned @ shared.mT) / (d + r) ** 0.5
        s = s.masked_fill(causal, -math.inf)
        A = (s if hidden is None else s.masked_fill(hidden[:, None], -math.inf)).softmax(-1)
        outs.append(A @ up[:, :, head, d : d + e])
    return layer.out(torch.cat(outs, -1))


def made(**options):
    sizes = {"latent": 12, "head_dim": 8, "rotary_dim": 4, "value_dim": 6, **options}
    layer = LatentAttention(32, heads=4, mask=Causal(), **sizes).to(D)
    torch.nn.init.normal_(layer.norm.weight)
    return layer


@pytest.mark.parametrize("query_latent", [None, 10])
def test_it_is_attention_over_keys_and_values_written_out(query_latent):
    layer, x = made(query_latent=query_latent), torch.randn(2, 9, 32, dtype=D)
    torch.testing.assert_close(layer(x), written_out(layer, x), atol=1e-10, rtol=0)
    hidden = torch.arange(9) >= torch.tensor([9, 5])[:, None]
    want = written_out(layer, x, hidden)
    torch.testing.assert_close(layer(x, keep=torch.tensor([9, 5])), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 4], [9]])
@pytest.mark.parametrize("latent", [3, 12, 40])
def test_it_decodes_with_a_cache_of_latent_vectors(steps, latent, monkeypatch):
    layer, x = made(latent=latent), torch.randn(2, 9, 32, dtype=D)
    for absorbed in (None, True, False):
        if absorbed is not None:
            monkeypatch.setattr(layer, "_is_cheaper_absorbed", lambda queries, absorbed=absorbed: absorbed)
        cache = layer.new_cache()
        with torch.no_grad():
            parts = [layer(part, cache=cache) for part in x.split(steps, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-10, rtol=0)
        k, v = cache.append(torch.zeros(2, 1, 1, 4, dtype=D), torch.zeros(2, 1, 1, latent, dtype=D))
        assert (k.shape, v.shape) == ((2, 1, 10, 4), (2, 1, 10, latent))


def test_a_padded_row_decodes_as_it_does_alone():
    layer, x = made(), torch.randn(2, 6, 32, dtype=D)
    keep = torch.tensor([[True] * 6, [False, False, True, True, True, True]])
    positions = (keep.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        cache = layer.new_cache()
        parts = [layer(x[:, :4], keep=keep[:, :4], positions=positions[:, :4], cache=cache)]
        parts += [
            layer(x[:, n : n + 1], keep=keep[:, : n + 1], positions=positions[:, n : n + 1], cache=cache)
            for n in (4, 5)
        ]
        torch.testing.assert_close(torch.cat(parts, 1)[1, 2:], layer(x[1:, 2:])[0], atol=1e-10, rtol=0)


def test_few_queries_are_absorbed_and_many_are_not():
    layer = made(latent=12)
    assert layer._is_cheaper_absorbed(1)
    assert not layer._is_cheaper_absorbed(100)


def test_every_parameter_learns():
    layer = made(query_latent=10)
    layer(torch.randn(2, 9, 32, dtype=D)).square().sum().backward()
    assert all((p.grad != 0).any() for p in layer.parameters())


def test_widths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="latent must be 1 or more, got 0"):
        made(latent=0)
    with pytest.raises(ValueError, match="width must be even"):
        made(rotary_dim=3)
