"""Differential attention beside its equations, written out in float64."""

import math

import pytest
import torch

from regard import Causal
from regard.nn import DifferentialAttention, Rotary

D = torch.float64


def written_out(layer, x, hidden=None):
    """Equations 1 to 3 of the paper, head by head."""
    h, g, d = layer.heads, layer.kv_heads, layer.head_dim
    n = x.shape[1]
    q, k, v = (part(x).unflatten(-1, (-1, 2 * d)) for part in (layer.query, layer.key, layer.value))
    (a, b), (e, f) = layer.exponents.detach()
    start = layer.start
    share = math.exp(float(a @ b)) - math.exp(float(e @ f)) + start
    causal = torch.ones(n, n, dtype=torch.bool).triu(1)
    outs = []
    for head in range(h):
        maps = []
        for part in (slice(0, d), slice(d, 2 * d)):
            left, right = q[:, :, head, part], k[:, :, head * g // h, part]
            if layer.rotary is not None:
                left, right = (layer.rotary(y[:, None], torch.arange(n))[:, 0] for y in (left, right))
            s = (left @ right.mT / d**0.5).masked_fill(causal, -math.inf)
            maps.append((s if hidden is None else s.masked_fill(hidden[:, None], -math.inf)).softmax(-1))
        out = (maps[0] - share * maps[1]) @ v[:, :, head * g // h]
        out = out / (out.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight
        outs.append(out * (1 - start))
    return layer.out(torch.cat(outs, -1))


def made(rotary=True, **options):
    rotary = Rotary(4) if rotary else None
    layer = DifferentialAttention(32, heads=4, kv_heads=2, depth=3, mask=Causal(), rotary=rotary, **options).to(D)
    torch.nn.init.normal_(layer.norm.weight)
    return layer


@pytest.mark.parametrize("rotary", [True, False])
def test_it_is_the_difference_of_two_softmaxes_written_out(rotary):
    layer, x = made(rotary), torch.randn(2, 9, 32, dtype=D)
    torch.testing.assert_close(layer(x), written_out(layer, x), atol=1e-10, rtol=0)
    hidden = torch.arange(9) >= torch.tensor([9, 5])[:, None]
    want = written_out(layer, x, hidden)
    torch.testing.assert_close(layer(x, keep=torch.tensor([9, 5])), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 4], [9]])
def test_it_decodes_with_a_cache(steps):
    layer, x = made(), torch.randn(2, 9, 32, dtype=D)
    cache = layer.new_cache()
    with torch.no_grad():
        parts = [layer(part, cache=cache) for part in x.split(steps, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-10, rtol=0)
    assert cache.length == 9


def test_its_weights_are_those_of_both_softmaxes():
    layer, x = made(), torch.randn(2, 9, 32, dtype=D)
    A, B = layer.weights(x)
    v = layer.value(x).unflatten(-1, (2, -1)).transpose(1, 2)
    heads = layer.norm(A @ v - layer.share * (B @ v)) * (1 - layer.start)
    torch.testing.assert_close(layer.out(heads.transpose(1, 2).flatten(2)), layer(x), atol=1e-10, rtol=0)


def test_every_parameter_learns():
    layer = made()
    layer(torch.randn(2, 9, 32, dtype=D)).square().sum().backward()
    assert all((p.grad != 0).any() for p in layer.parameters())


def test_the_first_share_grows_with_the_depth():
    starts = [DifferentialAttention(8, heads=2, depth=n).start for n in (1, 2, 30)]
    assert starts[0] == pytest.approx(0.2)
    assert starts == sorted(starts)
    assert starts[-1] < 0.8


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"dim must be a multiple of 2 \* heads .* got dim=12, heads=4"):
        DifferentialAttention(12, heads=4)
    with pytest.raises(ValueError, match="kv_heads=3"):
        DifferentialAttention(16, heads=4, kv_heads=3)
