"""`regard evaluate` and `score`: the flags of all tasks in one command, and the task of the run that takes them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pytest

from regard.cli.runs import EVALUATIONS, print_evaluation, print_scores, shared_flags, task_settings
from tests.cli.commands import run


def test_a_task_that_cannot_be_asked_is_named(translator):
    with pytest.raises(ValueError, match=r"is a run of the task 'translation', expected 'painting' or 'music'"):
        task_settings({"painting": None, "music": None}, [translator], {})


def test_a_flag_of_several_tasks_is_one_and_tells_what_each_takes_it_for():
    panels = shared_flags(EVALUATIONS)
    names = [flag.name for some in panels.values() for flag in some]
    assert len(names) == len(set(names))
    [beam] = [flag for flag in panels["Several tasks"] if flag.name == "--beam"]
    assert all(f"{task}: " in beam.help for task in ("Translation", "Summarization", "Captioning"))
    assert "Default: 3" in beam.help


def test_flags_of_one_name_that_mean_different_things_are_a_mistake():
    number = dataclasses.make_dataclass("Number", [("size", Annotated[int, "how many"], 3)])
    text = dataclasses.make_dataclass("Text", [("size", Annotated[str, "which"], "a")])
    with pytest.raises(TypeError, match="--size has different fields or types in painting, music; rename one"):
        shared_flags({"painting": number, "music": text})


def test_flags_of_another_task_are_refused(writer, translator, files):
    ended = run("evaluate", writer, "--source", files / "a.de")
    assert ended.code == 2
    assert "is a run of the task 'language'; it takes --text, --overlap, got --source" in ended.err
    ended = run("score", translator, "--text", files / "a.de")
    assert "is a run of the task 'translation'; it takes --source, --target, --pairs, got --text" in ended.err


def test_metrics_stand_in_columns_and_scores_in_lines(capsys):
    print_evaluation({"bleu": "31.20  nrefs:1", "loss": 2})
    print_scores([-1.25, -3.000049])
    assert capsys.readouterr().out.splitlines() == ["bleu        31.20  nrefs:1", "loss        2", "-1.2500", "-3.0000"]


def test_an_average_of_none_or_of_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ([tmp_path, "--last", 0], "last must be at least 1, got 0"),
        ([tmp_path / "file"], f"{tmp_path / 'file'} is not a folder; expected a run or a checkpoint"),
    ):
        assert run("average", *arguments, "--out", tmp_path / "out") == (2, "", f"error: {message}\n")
    assert not (tmp_path / "out").exists()
