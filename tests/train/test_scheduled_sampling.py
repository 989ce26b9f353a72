"""Scheduled sampling against the formulas of Bengio et al."""

import math

import pytest

from regard.train import Exponential, InverseSigmoid, Linear


def test_forcing_follows_the_formulas_of_bengio():
    for i in (0, 1, 7, 100, 5000):
        assert Linear(steps=100, lowest=0.25)(i) == max(0.25, 1 - 0.75 * i / 100)
        assert Exponential(0.99)(i) == 0.99**i
        assert math.isclose(InverseSigmoid(20.0)(i), 20 / (20 + math.exp(i / 20)), rel_tol=1e-12)
    assert InverseSigmoid(1.0)(100_000) == 0.0
    assert InverseSigmoid(1000.0)(0) == pytest.approx(1000 / 1001)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(steps=0), "steps must be at least 1, got 0"),
        (lambda: Linear(steps=3, lowest=1.5), "lowest must be a probability, got 1.5"),
        (lambda: Exponential(1.0), "k must be between 0 and 1, got 1.0"),
        (lambda: InverseSigmoid(0.5), "k must be at least 1, got 0.5"),
        (lambda: Linear(steps=1.5), "steps must be a whole number, got 1.5"),
    ],
)
def test_bad_schedules_are_answered(make, message):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert message in str(error.value)
