"""What a run says about its data before it begins."""

from __future__ import annotations

import pytest

from regard.data import Answer, Pair, Question
from regard.tasks.data_checks import MIN_LINE, question_key, report_lines, report_rows
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
