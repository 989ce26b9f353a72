"""The rows that a run logs: losses, speeds, and their unit."""

import csv

import pytest
import torch

from regard.nn import Loss
from regard.train import Recipe, Shuffled, fit


class Counted(torch.nn.Linear):
    """Counts 100 items a batch, or is a scalar."""

    def __init__(self, count):
        super().__init__(1, 1)
        self.items = count

    def loss(self, x):
        loss = self(x).square().mean()
        return loss if self.items is None else Loss(self.items * loss, torch.tensor(float(self.items)))


def speeds(folder, model, clock, **settings):
    """The unit, and the speeds of the rows of a run whose steps take a second, and whose evaluations take a hundred."""

    def evaluate(model):
        clock.now += 100.0
        return {"loss": 1.0}

    class Slow(Shuffled):
        def __iter__(self):
            for n, batch in enumerate(super().__iter__()):
                clock.now += 1.0 if n < 4 else 3.0
                yield batch

    recipe = Recipe(steps=6, log_every=2, evaluate_every=1, save_every=9)
    fit(model, Slow([torch.ones(1, 1)] * 6), recipe, folder=folder, evaluate=evaluate, **settings)
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    [column] = [name for name in rows[0] if name.endswith("_per_second")]
    return column.removesuffix("_per_second"), [float(row[column]) for row in rows]


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("regard.train.log.time", clock)
    return clock


def test_speed_is_that_since_the_last_row_without_evaluations(tmp_path, clock):
    assert speeds(tmp_path, Counted(100), clock) == ("tokens", pytest.approx([100.0, 100.0, 100 / 3]))


def test_scalar_loss_counts_batches_unless_the_user_names_a_unit(tmp_path, clock):
    assert speeds(tmp_path / "a", Counted(None), clock) == ("batches", pytest.approx([1.0, 1.0, 1 / 3]))
    assert speeds(tmp_path / "b", Counted(None), clock, unit="rows")[0] == "rows"
