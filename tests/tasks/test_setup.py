"""The steps of a run: everything is checked and prepared before anything is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.nn import cross_entropy
from regard.tasks import run_folder
from regard.tasks.setup import Setup, run
from regard.train import Constant, Recipe, Shuffled, Silence, checkpoint

RECIPE = Recipe(steps=2, rate=Constant(1e-2), save_every=1, seed=5)


class Guess(nn.Module):
    """Guesses the next of three tokens; its first weights come from the generator of PyTorch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 3)

    def loss(self, tokens, forcing=1.0):
        return cross_entropy(self.table(tokens[:, :-1]), tokens[:, 1:])


def prepared(start):
    seen.append((start.checkpoint, start.group.leads))
    start.say("prepared")
    batches = Shuffled([torch.tensor([[0, 1, 2]]), torch.tensor([[1, 0, 2]])], seed=5)
    return Setup(model=Guess(), batches=batches, evaluate=None, files={"config.json": "{}\n", "own.json": "1\n"})


seen = []


class Heard(Silence):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.fixture(autouse=True)
def _forget():
    seen.clear()


def test_a_new_run_starts_from_no_checkpoint_and_a_resumed_one_from_its_last(tmp_path):
    heard = Heard()
    outcome = run(prepared, RECIPE, out=tmp_path / "run", device="cpu", show=heard)
    again = run(prepared, replace(RECIPE, steps=3), out=tmp_path / "run", resume=True, device="cpu", show=heard)
    assert seen == [(None, True), (outcome.best.resolve(), True)]
    assert (outcome.step, again.step) == (2, 3)
    assert heard.lines.count("prepared") == 2


def test_each_checkpoint_holds_the_files_of_the_task_and_of_its_caller(tmp_path):
    run(prepared, RECIPE, out=tmp_path, files={"plan.json": "2\n", "own.json": "3\n"}, device="cpu", show=Silence())
    saved = checkpoint.all_checkpoints(tmp_path)
    assert len(saved) >= 2
    for path in saved:
        texts = [run_folder.read_text(path, name) for name in ("config.json", "own.json", "plan.json")]
        assert texts == ["{}\n", "3\n", "2\n"]  # the caller's own.json replaces the task's


def test_the_first_weights_depend_on_the_seed_of_the_recipe_alone(tmp_path):
    found = []
    for number, seed in enumerate((5, 5, 6)):
        torch.manual_seed(number)
        outcome = run(prepared, replace(RECIPE, seed=seed, steps=0), out=tmp_path / str(number), show=Silence())
        found.append(checkpoint.read_tensors(outcome.best)["table.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_an_error_in_the_data_leaves_no_folder(tmp_path):
    def fails(start):
        raise ValueError("line 3 has no target")

    with pytest.raises(ValueError, match="line 3 has no target"):
        run(fails, RECIPE, out=tmp_path / "run", device="cpu", show=Silence())
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_taken_is_refused_before_anything_is_prepared(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="is not empty; name another folder"):
        run(prepared, RECIPE, out=tmp_path, device="cpu", show=Silence())
    assert seen == []
