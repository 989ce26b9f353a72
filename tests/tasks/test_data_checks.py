"""What a run says about its data before it begins."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from regard.data import Answer, ImageFolder, Images, Pair, Question, captions_tsv
from regard.tasks.data_checks import MIN_LINE, question_key, report_images, report_lines, report_rows
from regard.tasks.setup import Start
from regard.train import Group


@pytest.fixture
def said():
    return []


@pytest.fixture
def start(said):
    return Start(None, Group(), said.append)


def test_empty_repeated_and_shared_pairs_are_counted(start, said):
    pairs = [Pair("a", "1"), Pair("", "2"), Pair("a", "1")]
    report_rows(start, pairs, [Pair("a", "other"), Pair("b", "3")], "pairs")
    assert said == [
        "1 of 3 training pairs have an empty text",
        "1 of 3 training pairs repeat an earlier one",
        "1 of 2 validation pairs have an input that is also in the training data",
    ]


def test_clean_data_and_other_processes_are_silent(start, said):
    report_rows(start, [("a", "1"), ("b", "2")], [("c", "3")], "pairs")
    report_rows(Start(None, Group(1, 2), said.append), [("a", "1")] * 2, None, "pairs")
    report_lines(start, ["x" * MIN_LINE], None)
    assert said == []


def test_long_lines_of_both_texts_are_counted(start, said):
    line = "x" * MIN_LINE
    report_lines(start, [line, "short"], [line, "short", line + "y"])
    assert said == ["1 of 2 validation lines of at least 40 characters are also in the training text"]


def test_a_question_is_the_same_about_the_same_document():
    one, other = (
        Question(id=id, title="", context=context, question="who?", answers=(Answer("x", 0),))
        for id, context in (("1", "x y"), ("2", "x z"))
    )
    assert question_key(one) != question_key(other)
    assert question_key(one)[1] == "who?"


def test_images_that_repeat_or_are_in_both_data_are_counted(start, said, tmp_path):
    train, valid = tmp_path / "train", tmp_path / "valid"
    for folder, name, shade in (
        (train, "a/1", 0),
        (train, "a/2", 9),
        (train, "b/3", 0),
        (valid, "a/x", 9),
        (valid, "b/y", 5),
    ):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((3, 3), shade, np.uint8)).save(path)
    report_images(start, ImageFolder(train), ImageFolder(valid))
    expected = [
        "1 of 3 training images repeat an earlier one",
        "1 of 2 validation images are also in the training data",
    ]
    assert said == expected
    said.clear()
    arrays = [
        np.array([[0, 9, 0]], np.uint8).repeat(2, 0).reshape(2, 3).T.reshape(3, 2, 1),
        np.full((1, 2, 1), 9, np.uint8),
    ]
    report_images(start, *(Images(array, [0] * len(array)) for array in arrays))
    assert said == [expected[0], "1 of 1 validation images are also in the training data"]
    said.clear()
    names = tmp_path / "captions.tsv"
    names.write_text("a/1.png\tone\na/2.png\ttwo\na/1.png\tone again\n")
    report_images(start, captions_tsv(names, train), captions_tsv(names, train))
    assert said == ["2 of 2 validation images are also in the training data"]
    said.clear()
    report_images(start, [1, 2], [1])  # data without digests
    assert said == []
