"""Rectified: ReLU weights and their powers, lazily as any other weights."""

import pytest
import torch

from regard import weights
from regard.lens.terms.rectified import Rectified
from regard.ops.terms.masks import Causal

Q, K, V = (torch.randn(2, 3, 65, 4, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize(("power", "factor"), [(1.0, 1.0), (2.0, 0.25), (1.5, 3.0)])
def test_weights_are_those_of_the_formula(power, factor):
    A = weights(Q, K, mask=Causal(), normalize=Rectified(power, factor))
    want = factor * (Q @ K.mT / 2).clamp(min=0).pow(power).tril()
    torch.testing.assert_close(A[:], want)
    torch.testing.assert_close(A @ V, want @ V)
    torch.testing.assert_close(A.received(), want.sum(-2))


def test_a_factor_and_a_power_are_applied_to_the_weights():
    assert Rectified().times(0.5).raise_to(2.0) == Rectified(2.0, 0.25)
    assert Rectified(2.0, 3.0).times(2.0) == Rectified(2.0, 6.0)


@pytest.mark.parametrize("name", ["power", "factor"])
def test_fields_are_numbers(name):
    with pytest.raises(TypeError, match=f"Rectified {name} must be a number"):
        Rectified(**{name: "two"})
