"""Tables of a run, and TensorBoard."""

import csv
import importlib.machinery
import sys
import types

import pytest
import torch

from regard.nn import Loss
from regard.train import Recipe, Shuffled, fit
from regard.train.log import Board, Table


def test_table_is_taken_up_at_a_step(tmp_path):
    path = tmp_path / "log.csv"
    for step in (1, 2, 3):
        Table(path, upto=step - 1).add({"step": step, "loss": step / 3})
    with path.open("a") as file:
        file.write("4,0.3")  # what a killed process may leave
    table = Table(path, upto=2)
    assert path.read_text() == f"step,loss\n1,{1 / 3}\n2,{2 / 3}\n"
    table.add({"step": 3, "loss": 9.0})
    assert path.read_text().endswith("\n3,9.0\n")


def test_a_row_of_other_columns_widens_the_table(tmp_path):
    path = tmp_path / "evaluations.csv"
    Table(path, upto=0).add({"step": 1, 'odd, "name"': 0.5})
    Table(path, upto=1).add({"step": 2, "bleu": 1.0})
    table = Table(path, upto=2)
    table.add({"step": 3, 'odd, "name"': 0.25})
    table.add({"step": 4, "chrf": 7.0, "bleu": 2.0})
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", 'odd, "name"', "bleu", "chrf"]
    assert rows[1:] == [["1", "0.5", "", ""], ["2", "", "1.0", ""], ["3", "0.25", "", ""], ["4", "", "2.0", "7.0"]]
    assert [one.name for one in tmp_path.iterdir()] == ["evaluations.csv"]


def test_table_that_was_edited_is_refused(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n1,2\nmy notes\n")
    with pytest.raises(ValueError, match=r"log.csv must have a step at the start of each row; move it away"):
        Table(tmp_path / "log.csv", upto=3)


def test_half_a_header_is_no_header(tmp_path):
    (tmp_path / "log.csv").write_text("step,lo")
    Table(tmp_path / "log.csv", upto=9).add({"step": 1, "loss": 0.5})
    assert (tmp_path / "log.csv").read_text() == "step,loss\n1,0.5\n"


def test_tensorboard_gets_every_number_where_installed(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    package = types.ModuleType("tensorboard")
    package.__spec__ = importlib.machinery.ModuleSpec("tensorboard", None)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Board() as board:
        board.add(tmp_path, "training", {"step": 3, "loss": 0.5})
    assert written == [(str(tmp_path / "tensorboard"), 4), ("training/loss", 0.5, 3), "closed"]


def test_without_tensorboard_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Board() as board:
        board.add(tmp_path, "training", {"step": 3, "loss": 0.5})
    assert not list(tmp_path.iterdir())


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
