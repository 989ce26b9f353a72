"""Penalties of beam search: the formulas of GNMT, and the table of divisors."""

from __future__ import annotations

import math

import pytest
import torch

from regard.decode import Coverage, Gnmt
from regard.decode.penalties import LengthDivisors
from tests.decode.searches import LENGTHS
from tests.decode.steppers import D


def test_unattended_positions_cost_much_but_not_everything():
    penalty = Coverage(1.0, "x")(torch.tensor([[0.0, 1.0, 3.0]], dtype=D), torch.tensor([0]))
    assert penalty.item() == pytest.approx(math.log(1e-9))


def test_gnmt_is_equation_14():
    assert Gnmt(0.6)(1) == 1.0
    assert 0 < Gnmt(-50)(10**6) < Gnmt(50)(10**6) < math.inf
    assert Gnmt(0.6)(13) == pytest.approx(3**0.6)
    assert repr(Gnmt(0.6)) == "Gnmt(alpha=0.6)"
    assert Gnmt(0.6) == Gnmt(0.6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Gnmt("x"), TypeError, r"Gnmt alpha must be a number, got 'x' \(str\)"),
        (lambda: Gnmt(math.nan), ValueError, "Gnmt alpha must be finite, got nan"),
        (lambda: Gnmt(1e308), ValueError, r"Gnmt alpha must be from -50 to 50, got 1e\+308; 0.6 is usual"),
        (lambda: Gnmt(-51), ValueError, "Gnmt alpha must be from -50 to 50, got -51"),
        (lambda: Coverage(-1.0, "x"), ValueError, "Coverage beta must be 0 or more, got -1.0"),
        (
            lambda: Coverage(1.0, "x", torch.ones(2, 3)),
            ValueError,
            r"must be bool of dims b source, .* got torch.float32 of shape \(2, 3\)",
        ),
    ],
    ids=["alpha", "nan", "huge", "tiny", "beta", "keep"],
)
def test_penalties_say_what_they_cannot_do(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("length", [*LENGTHS, lambda n: 1 + n % 3])
@pytest.mark.parametrize("last", [1, 2, 7, 20])
def test_divisors_are_those_of_a_table_of_all_lengths(length, last):
    values = [1.0] + [1.0 if length is None else float(length(n)) for n in range(1, last + 1)]
    divisors = LengthDivisors(length, last, torch.device("cpu"))
    for n in range(last + 1):
        divisors.extend(n + 1)
        assert divisors.at(torch.tensor([n])).item() == values[n]
        assert divisors.most(torch.tensor([n + 1])).item() == max(values[n + 1 :], default=values[-1])
