"""Progress of a run: a bar on a terminal, lines elsewhere, and nothing that a terminal would obey."""

import io
from dataclasses import replace

import pytest

from regard.train import Bar, Lines, Report
from regard.train.progress import default_progress
from tests.train.small_run import RECIPE, small

REPORT = Report(step=7, epoch=1, steps=20, loss=2.34567, rate=1e-3, speed=12345.6, unit="tokens", left=3725.0)


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
    warned, *said = file.getvalue().splitlines()
    assert warned.startswith("the warm-up takes 4 of 4 steps")
    assert said[0].startswith("step 2/4 · epoch 0 · loss ")
    assert said[1].startswith("step 3 · evaluation · loss ")
    assert said[1].endswith(" · best so far")
    assert said[-2].startswith("step 4 · evaluation · ")
    assert said[-1].startswith("ended after 4 steps by steps; best: ")
