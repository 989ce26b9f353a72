"""`regard evaluate` and `score`: the flags of all tasks in one command, and the task of the run that takes them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pytest

from regard.cli.runs import EVALUATIONS, print_evaluation, print_scores, shared_flags, task_settings
from tests.cli.commands import SMALL, run, well

pytestmark = pytest.mark.commands


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
    taken = "--source, --target, --pairs, --source-column, --target-column, --header"
    assert f"is a run of the task 'translation'; it takes {taken}, got --text" in ended.err


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


@pytest.fixture(scope="module")
def sentiment(files, tmp_path_factory):
    """A classifier of texts whose columns have names."""
    out = tmp_path_factory.mktemp("sentiment") / "run"
    columns = ["--text-column", "text", "--label-column", "class"]
    valid = ["--valid-labelled", files / "named.tsv"]
    well("train", "classification", "--labelled", files / "named.tsv", *columns, *valid, *SMALL, "--out", out)
    return out


def test_run_remembers_the_columns_of_its_data(sentiment, files, tmp_path):
    (tmp_path / "test.tsv").write_text("text\tclass\na great film\tgood\nso dull\tbad\n")
    ended = well("evaluate", sentiment, "--labelled", tmp_path / "test.tsv")
    assert "as in training: --text-column text --label-column class\n" in ended.err
    assert "2 examples" in ended.out
    (tmp_path / "other.tsv").write_text("body\tclass\na great film\tgood\n")
    well("evaluate", sentiment, "--labelled", tmp_path / "other.tsv", "--text-column", "body")


def test_evaluation_on_the_training_data_is_reported(sentiment, files):
    ended = well("evaluate", sentiment, "--labelled", files / "named.tsv")
    assert (
        f"warning: --labelled {files / 'named.tsv'} has the content of the training data of {sentiment}\n" in ended.err
    )


def test_evaluation_says_how_it_differs_from_those_in_training(translator, writer, files):
    data = ["--source", files / "a.de", "--target", files / "a.en"]
    said = "beam search with --beam 5; evaluations in training use greedy search, --beam 1\n"
    assert said in well("evaluate", translator, *data).err
    assert "beam search" not in well("evaluate", translator, *data, "--beam", 1).err
    said = (
        "each token is predicted from at least 4 tokens; evaluations in training cut the text into windows, --overlap 0"
    )
    assert said in well("evaluate", writer, "--text", files / "a.en").err
    assert "evaluations in training" not in well("evaluate", writer, "--text", files / "a.en", "--overlap", 0).err


def test_run_of_another_task_names_the_command_that_takes_it(sentiment):
    ended = run("translate", sentiment)
    assert "is a checkpoint of the task 'classification', expected 'translation'; use regard classify\n" in ended.err
