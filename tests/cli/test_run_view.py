"""The curves of a run folder, as a picture and as a page."""

import json
import os
import re
import shutil
import socket

import pytest
import torch

from regard.cli.run_view import is_run, read_heads, read_run, write_plot
from regard.lens import HeadHistory
from regard.train import Recipe, Shuffled, fit

from .commands import run as command


class Line(torch.nn.Linear):
    def loss(self, x):
        return self(x).square().mean()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "line"
    recipe = Recipe(steps=4, evaluate_every=2, save_every=2, log_every=1)
    fit(Line(1, 1), Shuffled([torch.ones(1, 1)] * 3), recipe, folder=folder, evaluate=lambda model: {"loss": 1.5})
    return folder


def test_state_of_a_run_is_that_of_its_folder(run):
    assert is_run(run)
    state = read_run(run)
    assert (state.name, state.steps, state.best, state.trainer) == ("line", 4, 2, None)
    assert state.curves["evaluation/loss"] == ([2, 4], [1.5, 1.5])
    assert state.settings["recipe"]["log_every"] == 1


def test_process_that_trains_is_named_until_it_ends(run):
    lock = run / "run.lock"
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "start": "2026-01-01 00:00:00 UTC"}
    try:
        lock.write_text(json.dumps(holder))
        assert read_run(run).trainer == f"process {os.getpid()} on {holder['host']}, which began at {holder['start']}"
        lock.write_text(json.dumps(holder | {"pid": 2**22 + 1}))
        assert read_run(run).trainer is None
    finally:
        lock.unlink()


def test_picture_is_in_the_folder_of_the_run(run):
    assert write_plot(run).read_bytes().startswith(b"\x89PNG")
    assert (run / "curves.png").exists()


def test_offline_page_of_a_run_has_its_curves(run, tmp_path):
    done = command("view", run, "--html", tmp_path / "line.html")
    assert done.code == 0
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "line.html").read_text(), re.DOTALL)[1]
    assert json.loads(data)["run"]["panels"][0]["name"] == "loss"
    assert json.loads(data)["heads"] is None


def test_a_copy_with_a_folder_in_place_of_the_link_has_the_same_best_step(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")  # it follows links
    assert not (tmp_path / "copy" / "best").is_symlink()
    assert read_run(tmp_path / "copy").best == 2


def test_heads_of_a_monitor_are_in_the_page_and_not_among_the_curves(run, tmp_path):
    folder = tmp_path / "watched"
    shutil.copytree(run, folder)
    history = HeadHistory(("logit",))
    history.save(folder)
    assert read_run(folder).heads_version is None
    versions = []
    for step in (1, 3):
        history.add(step, {"a": {"logit": torch.tensor([2.5])}})
        history.append_to(folder)
        versions.append(read_run(folder).heads_version)
    assert len({*versions, None}) == 3
    assert read_run(folder).curves == read_run(run).curves
    assert read_heads(folder).steps == [1, 3]
    assert write_plot(folder).exists()
    assert command("view", folder, "--html", tmp_path / "heads.html").code == 0
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "heads.html").read_text(), re.DOTALL)[1]
    assert json.loads(data)["heads"]["measures"][0]["values"] == [[2.5, 2.5]]


def test_flags_of_captures_and_folders_without_a_log_are_refused(run, tmp_path):
    assert "--layers is for captures, got the folder of a run" in command("view", run, "--layers", "0").err
    assert "shows one run at a time, got 2 names" in command("view", run, run).err
    (tmp_path / "recipe.json").write_text("{}")
    assert "holds no log.csv with a row" in command("view", tmp_path, "--html", tmp_path / "x.html").err
