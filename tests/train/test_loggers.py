"""Loggers: CSV tables, TensorBoard, Weights & Biases, and loggers of the user."""

import csv
import importlib.machinery
import sys
import types

import pytest
import torch

from regard.train import Callback, CsvLogger, Logger, Recipe, Shuffled, TensorBoardLogger, WandbLogger, fit
from regard.train.loggers import Table, check_installed, flat_numbers, make_loggers, read_curves


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


@pytest.fixture
def package(monkeypatch):
    """Install a module that takes down what is called in it."""

    def install(name, module=None, **members):
        package = types.ModuleType(name)
        package.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
        inner = package if module is None else types.ModuleType(module)
        monkeypatch.setitem(sys.modules, inner.__name__, inner)
        for member, value in members.items():
            setattr(inner, member, value)

    return install


def test_tensorboard_gets_every_number_and_drops_later_steps(tmp_path, package):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    package("tensorboard", "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    logger = TensorBoardLogger()
    logger.begin(tmp_path, 3)
    logger.log(4, {"training/loss": 0.5, "mine/heads": torch.tensor([1.0, 2.0])})
    logger.close()
    folder = str(tmp_path / "tensorboard")
    assert written[:2] == [(folder, 4), ("training/loss", 0.5, 4)]
    assert written[2:] == [("mine/heads/0", 1.0, 4), ("mine/heads/1", 2.0, 4), "closed"]


def test_weights_and_biases_goes_on_with_a_resumed_run_and_begins_a_new_one(tmp_path, package):
    began, sent = [], []

    class Run:
        def define_metric(self, name, step_metric):
            sent.append((name, step_metric))

        def log(self, row):
            sent.append(row)

        def finish(self):
            sent.append("finished")

    def init(**settings):
        began.append(settings)
        return Run()

    package("wandb", init=init)
    for step in (0, 5, 0):
        logger = WandbLogger(project="mine")
        logger.begin(tmp_path, step)
        logger.log(step + 1, {"training/loss": 0.5})
        logger.close()
    ids = [one["id"] for one in began]
    assert ids[0] == ids[1] != ids[2]
    assert began[0] | {"id": ""} == {
        "project": "mine",
        "name": tmp_path.name,
        "id": "",
        "resume": "allow",
        "dir": str(tmp_path),
    }
    assert sent[:3] == [("*", "step"), {"step": 1, "training/loss": 0.5}, "finished"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_logger_without_its_package_names_the_command_that_installs_it(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"needs the package {name}, which is not installed; run pip install {name}"):
        make_loggers([name])
    check_installed("csv")


def test_names_without_a_group_and_large_tensors_are_refused():
    for name in ("loss", "/loss", "training/", "../up/x"):
        with pytest.raises(ValueError, match="must be a group, a slash and a name"):
            list(flat_numbers({name: 1.0}))
    assert len(list(flat_numbers({"a/b": torch.zeros(64, 64)}))) == 4096
    with pytest.raises(ValueError, match="at most 4,096 numbers, got 4,097 for 'a/b'; log a mean"):
        list(flat_numbers({"a/b": torch.zeros(4097)}))


def test_tensors_are_written_by_index_and_scalars_by_name():
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    found = dict(flat_numbers({"a/x": x, "a/n": torch.tensor(7), "a/empty": torch.zeros(0, 2)}))
    assert found == {f"a/x/{i}/{j}": 3.0 * i + j for i in range(2) for j in range(3)} | {"a/n": 7}


class Line(torch.nn.Linear):
    def loss(self, x):
        return self(x).square().mean()


class Norms(Callback):
    """Logs the weight's numbers at each step."""

    def begin(self, log):
        self.log = log

    def step(self, report):
        self.log(report.step, {"weights/line": torch.full((2,), float(report.step)), "weights/sum": 0.5})


class Taken(Logger):
    def __init__(self):
        self.calls = []

    def begin(self, run, step):
        self.calls.append(("begin", run.name, step))

    def log(self, step, values):
        self.calls.append((step, sorted(values)))

    def close(self):
        self.calls.append("close")


def train(folder, steps, **settings):
    recipe = Recipe(steps=steps, evaluate_every=2, save_every=2, log_every=1)
    batches = Shuffled([torch.ones(1, 1)] * 3)
    return fit(Line(1, 1), batches, recipe, folder=folder, evaluate=lambda model: {"loss": 1.5}, **settings)


def test_loggers_of_the_user_take_the_place_of_the_tables(tmp_path):
    taken = Taken()
    train(tmp_path / "run", 2, loggers=[taken], callbacks=[Norms()])
    rows = ["training/batches_per_second", "training/epoch", "training/loss", "training/norm", "training/rate"]
    assert taken.calls == [
        ("begin", "run", 0),
        (1, rows),
        (1, ["weights/line", "weights/sum"]),
        (2, rows),
        (2, ["weights/line", "weights/sum"]),
        (2, ["evaluation/epoch", "evaluation/loss"]),
        "close",
    ]
    assert not list((tmp_path / "run").glob("*.csv"))


def test_loggers_are_closed_after_an_error(tmp_path):
    class Fails(Callback):
        def step(self, report):
            raise RuntimeError("enough")

    taken = Taken()
    with pytest.raises(RuntimeError, match="enough"):
        train(tmp_path, 2, loggers=[taken], callbacks=[Fails()])
    assert taken.calls[-1] == "close"


def test_table_of_a_callback_is_that_of_an_uninterrupted_run_after_a_resume(tmp_path):
    class Stops(Norms):
        def step(self, report):
            super().step(report)
            if report.step == 3:
                raise KeyError

    with pytest.raises(KeyError):
        train(tmp_path / "a", 4, callbacks=[Stops()])
    train(tmp_path / "a", 4, callbacks=[Norms()], resume=True)
    train(tmp_path / "b", 4, callbacks=[Norms()])
    a, b = ((tmp_path / name / "weights.csv").read_text() for name in "ab")
    assert a == b == "step,line/0,line/1,sum\n" + "".join(f"{n},{n}.0,{n}.0,0.5\n" for n in range(1, 5))
    assert (tmp_path / "a" / "evaluations.csv").read_text() == (tmp_path / "b" / "evaluations.csv").read_text()


def test_curves_are_the_numbers_of_the_tables(tmp_path):
    logger = CsvLogger()
    logger.begin(tmp_path, 0)
    logger.log(10, {"training/loss": 2.0, "training/rate": 0.1, "mine/x": torch.tensor([1.0, 3.0])})
    logger.log(20, {"training/loss": float("nan"), "evaluation/bleu": 5.0})
    logger.log(30, {"training/loss": 1.0})
    with (tmp_path / "log.csv").open("a") as file:
        file.write("40,0.")  # a line that is being written
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    (tmp_path / "heads.csv").write_text("step,layer,head,logit\n1,a,0,2.5\n")  # a monitor's, not a logger's
    curves = read_curves(tmp_path)
    assert list(curves) == ["training/loss", "training/rate", "evaluation/bleu", "mine/x/0", "mine/x/1"]
    assert curves["training/loss"][0] == [10, 20, 30]
    assert str(curves["training/loss"][1]) == "[2.0, nan, 1.0]"
    assert curves["training/rate"] == ([10], [0.1])
    assert curves["mine/x/1"] == ([10], [3.0])
