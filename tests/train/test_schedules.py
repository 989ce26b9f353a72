"""Learning rates against formulas and PyTorch's own schedulers."""

import math

import pytest
import torch

from regard.train import Constant, Cosine, InverseSquareRoot, Plateau

STEPS = range(1, 60)


def torch_rates(make, steps):
    """The rates a PyTorch scheduler gives to the first steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = make(optimizer)
    rates = []
    for step in steps:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*([] if not isinstance(steps, list) else [step]))
    return rates


def test_inverse_square_root_is_the_formula_of_the_transformer():
    dim, warmup = 512, 17
    schedule = InverseSquareRoot(1 / math.sqrt(dim * warmup), warmup=warmup)
    for step in STEPS:
        assert math.isclose(schedule(step), dim**-0.5 * min(step**-0.5, step * warmup**-1.5), rel_tol=1e-12)


def test_cosine_without_warmup_is_pytorchs():
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40, eta_min=0.1), range(41))
    schedule = Cosine(0.3, steps=40, lowest=0.1)
    assert [schedule(step) for step in range(41)] == pytest.approx(expected, abs=1e-12)
    assert schedule(1000) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [Constant(0.3, warmup=5), Cosine(0.3, warmup=5, steps=20), Plateau(0.3, warmup=5)])
def test_warmup_climbs_in_equal_steps_to_the_peak(schedule):
    assert [schedule(step) for step in (1, 2, 3, 4, 5)] == pytest.approx([0.06, 0.12, 0.18, 0.24, 0.3])
    assert schedule(6) <= 0.3


def test_constant_stays():
    assert {Constant(0.3)(step) for step in STEPS} == {0.3}


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_falls_when_pytorchs_does(patience):
    scores = torch.randn(50, generator=torch.Generator().manual_seed(patience)).tolist()

    def make(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=patience, threshold=0.0, min_lr=0.01, eps=0.0
        )

    expected = torch_rates(make, scores)
    schedule = Plateau(0.3, factor=0.5, patience=patience, lowest=0.01)
    assert [schedule(9, scores[:n]) for n in range(50)] == pytest.approx(expected)
    assert min(expected) < 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(0.0), "peak must be a rate above 0, got 0.0"),
        (lambda: Constant(float("nan")), "peak must be a rate above 0, got nan"),
        (lambda: Constant("fast"), "peak must be a number, got 'fast'"),
        (lambda: Constant(0.1, warmup=1.5), "warmup must be a whole number, got 1.5"),
        (lambda: Constant(0.1, warmup=-1), "warmup must be at least 0 steps, got -1"),
        (lambda: InverseSquareRoot(0.1, warmup=0), "warmup must be at least 1, got 0"),
        (lambda: Cosine(0.1, steps=5, warmup=5), "steps must be more than warmup, got steps=5 and warmup=5"),
        (lambda: Cosine(0.1, steps=5, lowest=0.2), "lowest must be between 0 and peak=0.1, got 0.2"),
        (lambda: Plateau(0.1, factor=1.0), "factor must be between 0 and 1, got 1.0"),
        (lambda: Plateau(0.1, patience=-1), "patience must be at least 0, got -1"),
        (lambda: Plateau(0.1, lowest=-1.0), "lowest must be between 0 and peak=0.1, got -1.0"),
    ],
)
def test_bad_schedules_are_answered(make, message):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert message in str(error.value)
