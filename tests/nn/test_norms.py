"""Norms: against the formula, in the dtypes they keep."""

import torch

from regard.nn import PostNorm, PreNorm, RMSNorm

D = torch.float64


def test_rms_norm_is_its_formula():
    norm = RMSNorm(7, eps=1e-3).to(D)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 7, dtype=D)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_rms_norm_squares_in_float32():
    x = torch.full((1, 7), 1000.0, dtype=torch.float16)
    out = RMSNorm(7).half()(x)
    assert out.dtype == torch.float16
    assert torch.equal(out, torch.ones_like(x))


def test_norms_stand_before_and_after():
    x = torch.randn(2, 3, 7)
    before, after = PreNorm(7), PostNorm(7, norm=RMSNorm)
    assert torch.equal(before(x, torch.sin), x + torch.sin(before.norm(x)))
    assert torch.equal(after(x, torch.sin), after.norm(x + torch.sin(x)))
    assert isinstance(after.norm, RMSNorm)
