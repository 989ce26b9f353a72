"""Callbacks are called after steps, evaluations and checkpoints, and at the end."""

from __future__ import annotations

import pytest
import torch

from regard.train import Callback, Recipe, Shuffled, fit


class Line(torch.nn.Linear):
    def loss(self, x):
        return self(x).square().mean()


class Record(Callback):
    def __init__(self):
        self.calls = []

    def step(self, report):
        self.calls.append(("step", report.step, report.loss > 0))

    def evaluate(self, step, metrics):
        self.calls.append(("evaluate", step, dict(metrics)))

    def save(self, step, path):
        assert (path / "model.safetensors").exists()
        self.calls.append(("save", step, path.name))

    def end(self, outcome):
        self.calls.append(("end", outcome.step, outcome.reason))


def train(folder, *callbacks, **settings):
    settings = {"steps": 2, "evaluate_every": 2, "save_every": 1} | settings
    batches = Shuffled([torch.ones(1, 1)] * 3)
    return fit(
        Line(1, 1),
        batches,
        Recipe(**settings),
        folder=folder,
        evaluate=lambda model: {"loss": 1.5},
        callbacks=callbacks,
    )


def test_calls_come_in_the_order_of_the_run(tmp_path):
    record = Record()
    train(tmp_path, record)
    assert record.calls == [
        ("save", 0, "step-00000000"),
        ("step", 1, True),
        ("save", 1, "step-00000001"),
        ("step", 2, True),
        ("save", 2, "step-00000002"),
        ("evaluate", 2, {"loss": 1.5}),
        ("end", 2, "steps"),
    ]


def test_every_callback_is_called_and_none_must_override(tmp_path):
    first, second = Record(), Record()
    train(tmp_path, first, Callback(), second)
    assert first.calls == second.calls != []


def test_error_of_a_callback_ends_the_run_and_leaves_the_checkpoint(tmp_path):
    class Fails(Callback):
        def step(self, report):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        train(tmp_path, Fails())
    assert (tmp_path / "step-00000000").exists()
    assert not (tmp_path / "run.lock").exists()
