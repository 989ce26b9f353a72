"""Dry runs print what training would read, learn and need, and write nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from regard.data import Batches, Pair, Tokenizer
from regard.tasks import Batching, PairVocabulary, translation
from regard.tasks.dry_run import (
    class_line,
    cost_lines,
    dry_run,
    example_lines,
    is_dry_run,
    length_line,
    unknown_line,
)
from regard.train import Recipe, Shuffled

PAIRS = [Pair("ein Haus", "a house"), Pair("ein Hund", "a dog"), Pair("", "nothing"), Pair("ein Hund", "a dog")]


class Line(nn.Linear):
    def loss(self, x):
        return self(x).square().mean()


def test_training_within_it_reports_and_writes_nothing(tmp_path):
    with dry_run() as lines:
        assert is_dry_run()
        outcome = translation.train(
            PAIRS,
            valid=[Pair("ein Haus", "the house")],
            out=tmp_path / "run",
            model=translation.Model(kind="rnn", dim=8, hidden=8),
            vocabulary=PairVocabulary(kind="word", size=8),
            batching=Batching(tokens=256),
        )
    assert not is_dry_run()
    assert outcome.reason == "dry run"
    assert list(tmp_path.iterdir()) == []
    assert "1 of 4 training pairs have an empty text" in lines
    assert "1 of 4 training pairs repeat an earlier one" in lines
    assert "1 of 1 validation pairs have an input that is also in the training data" in lines
    assert "training source: 4 texts of 1 to 3 tokens, median 3, 95 % have at most 3; 10 tokens" in lines
    assert any(line.startswith("source 1: ▁ein | ") for line in lines)
    unknown = r"validation target: vocabulary of 8 tokens; \d of 3 tokens are unknown, .*%"
    assert any(re.fullmatch(unknown, line) for line in lines)
    assert any(re.fullmatch(r"time: .* s a step on cpu, about \d+:\d\d:\d\d for 10,000 steps, .*", x) for x in lines)


def test_nothing_is_changed_outside(tmp_path):
    assert not is_dry_run()
    with pytest.raises(ValueError, match="x"), dry_run():
        raise ValueError("x")
    assert not is_dry_run()


def test_lengths_are_those_of_a_loop():
    counts = [5, 1, 2, 9, 2]
    assert length_line("a", "texts", counts) == "a: 5 texts of 1 to 9 tokens, median 2, 95 % have at most 9; 19 tokens"


def test_unknown_words_are_counted():
    tokenizer = Tokenizer.words(["ein Haus"])
    rows = [np.array(row) for row in tokenizer.encode_all(["ein Hund", "kein Haus ein"])]
    line = unknown_line("words", tokenizer, rows)
    assert line == f"words: vocabulary of {len(tokenizer)} tokens; 2 of 5 tokens are unknown, 40.00%"
    assert example_lines("a", [rows[0].tolist()], tokenizer)[0].startswith("a 1: ▁ein | ")


def test_classes_are_counted_with_their_share():
    assert class_line("a", [1, 1, 0, 1], ["x", "y"]) == "a: 4 examples; y 3 (75.0 %), x 1 (25.0 %)"
    many = class_line("a", [0], [str(n) for n in range(25)])
    assert many.endswith("and 5 other classes")


def test_costs_are_those_of_the_model_and_its_first_steps():
    model = Line(10, 10)
    model.bias.requires_grad_(False)
    batches = Shuffled([torch.ones(50, 10)] * 4)
    lines = cost_lines(model, batches, Recipe(steps=100, keep=3), torch.device("cpu"))
    assert lines[0] == "model: Line, 100 of 110 parameters are trained"
    assert lines[1].startswith("memory: about ")
    assert "weights 440 B, gradients 400 B, optimizer 800 B, activations of a batch " in lines[1]
    held = float(re.search(r"batch ([\d.]+) kB", lines[1])[1])
    assert 2 <= held <= 8  # 50 x 10 inputs or outputs of 4 bytes, and what the loss needs
    assert re.match(r"time: \S+ s a step on cpu, about 0:00:0\d for 100 steps", lines[2])
    assert lines[3] == "disk: about 1.24 kB a checkpoint, at most 5 at a time"
    assert model.weight.grad is None


def test_steps_of_epochs_are_estimated_from_the_share_that_was_read():
    batches = Batches([{"x": [1.0] * 10}] * 40, rows=10, seed=0)

    class Model(Line):
        def loss(self, batch):
            return super().loss(batch["x"])

    lines = cost_lines(Model(10, 1), batches, Recipe(epochs=5), torch.device("cpu"))
    assert " for 20 steps" in lines[2]
