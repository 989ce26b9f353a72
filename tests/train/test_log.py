"""Tables, TensorBoard and what is shown."""

import csv
import importlib.machinery
import io
import sys
import types
from dataclasses import replace

import pytest

from regard.train import Bar, Lines, Report
from regard.train.log import Board, Table
from regard.train.progress import default_progress
from tests.train.small_run import RECIPE, small

REPORT = Report(step=7, epoch=1, steps=20, loss=2.34567, rate=1e-3, speed=12345.6, unit="tokens", left=3725.0)


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


def test_report_is_one_line():
    line = "step 7/20 · epoch 1 · loss 2.3457 · rate 1.00e-03 · 12,346 tokens/s · 1:02:05 left"
    assert str(REPORT) == line
    assert str(replace(REPORT, steps=None, left=None)) == line.replace("/20", "").removesuffix(" · 1:02:05 left")
    assert str(replace(REPORT, left=65.2)).endswith("1:05 left")


def test_lines_come_when_due():
    file = io.StringIO()
    lines = Lines(every=5, file=file)
    for step in range(1, 13):
        lines.advance(replace(REPORT, step=step, steps=12))
    lines.say("done")
    assert [line.partition("/")[0] for line in file.getvalue().splitlines()] == ["step 5", "step 10", "step 12", "done"]


def test_bar_shows_loss_speed_and_time_left():
    file = io.StringIO()
    bar = Bar(file=file)
    bar.bar.console.width = 160
    bar.advance(REPORT)
    bar.say("[red]plain words[/red]")
    bar.close()
    shown = file.getvalue()
    assert "7/20" in shown
    assert "loss 2.3457" in shown
    assert "12,346 tokens/s · 1:02:05 left" in shown
    assert "[red]plain words[/red]" in shown


@pytest.mark.parametrize("kind", [lambda file: Lines(every=1, file=file), lambda file: Bar(file=file)])
def test_what_a_terminal_would_obey_is_spelled_out(kind):
    file = io.StringIO()
    show = kind(file)
    show.say("classes \x1b[2J, größer")
    show.close()
    assert r"classes \x1b[2J, größer" in file.getvalue()


def test_lines_where_nobody_watches(monkeypatch):
    assert isinstance(default_progress(every=1), Lines)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(default_progress(every=1), Bar)


def test_run_tells_its_steps_evaluations_and_end(scratch):
    file = io.StringIO()
    small(scratch / "run", recipe=replace(RECIPE, steps=4, log_every=2), show=Lines(every=2, file=file))
    said = file.getvalue().splitlines()
    assert said[0].startswith("step 2/4 · epoch 0 · loss ")
    assert said[1].startswith("step 3 · evaluation · loss ")
    assert said[1].endswith(" · best so far")
    assert said[-2].startswith("step 4 · evaluation · ")
    assert said[-1].startswith("ended after 4 steps by steps; best: ")
