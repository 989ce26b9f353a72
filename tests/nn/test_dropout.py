"""Dropout against what a coin must be."""

import pytest
import torch
from torch import nn

from regard.nn.dropout import Dropout


@pytest.fixture(autouse=True)
def drawn_here(monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    torch.manual_seed(0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93, 1e-3])
def test_share_p_is_dropped_and_the_rest_scaled_to_keep_the_mean(p):
    x = torch.full((1001, 999), 2.0, dtype=torch.float64)
    y = Dropout(p)(x)
    n = x.numel()
    assert abs((y == 0).double().mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5
    assert torch.allclose(y[y != 0], torch.tensor(2 / (1 - p), dtype=torch.float64), rtol=1e-3)
    assert abs(y.mean().item() - 2) < 10 * (p / (1 - p) / n) ** 0.5


def test_coins_are_independent_of_their_neighbours():
    dropped = (Dropout(0.3)(torch.ones(2_000_000)) == 0).double()
    for lag in (1, 2, 3, 4, 5, 64):
        both = (dropped[:-lag] * dropped[lag:]).mean().item()
        assert abs(both - 0.09) < 5 * (0.09 * 0.91 / 2e6) ** 0.5 * 1.5


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 1, 7), (2, 0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_shape_and_dtype(shape, dtype):
    y = Dropout(0.5)(torch.ones(shape, dtype=dtype))
    assert (y.shape, y.dtype) == (shape, dtype)
    assert set(y.flatten().tolist()) <= {0.0, 2.0}


def test_gradient_passes_where_the_value_did():
    x = torch.randn(7, 13, dtype=torch.float64, requires_grad=True)
    y = Dropout(0.4)(x)
    y.sum().backward()
    assert torch.allclose(x.grad * x, y)
    assert set((x.grad == 0).flatten().tolist()) == {True, False}


def test_same_seed_gives_the_same_coins():
    x = torch.randn(63, 129)
    torch.manual_seed(3)
    first = Dropout(0.2)(x)
    second = Dropout(0.2)(x)
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.2)(x), first)
    assert not torch.equal(first, second)


def test_evaluation_and_the_ends_are_those_of_pytorch():
    x = torch.randn(5, 7)
    assert Dropout(0.3).eval()(x) is x
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(5, 7))
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(1.5)
    assert repr(Dropout(0.1)) == repr(nn.Dropout(0.1))
