"""SQuAD's numbers: what counts in an answer, and which gold one it is held against."""

from __future__ import annotations

import pytest

from regard.tasks.squad import judged, normalized


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower"),
        ("  an  apple,\n a day. ", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),  # articles are words
        ("A", ""),
        ("Œil — 1973", "œil — 1973"),  # ASCII punctuation only, as in the official script
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(answer, expected):
    assert normalized(answer) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "exact"),
    [
        ("Denver Broncos", ["the Denver Broncos!"], 1, 1),
        ("Broncos", ["Denver Broncos"], 2 / 3, 0),
        ("the", ["Denver"], 0, 0),
        ("red red blue", ["red blue blue"], 2 / 3, 0),  # words count as often as they come on both sides
        ("1889", ["May 1889", "1889", "the year 1889"], 1, 1),  # the nearest of several
        ("", ["1889"], 0, 0),
        ("1889", [], 0, 0),
        ("", [], 1, 1),
        ("an", [], 1, 1),  # nothing is left of it
    ],
)
def test_an_answer_is_held_against_the_nearest_gold_one(answer, gold, f1, exact):
    found = judged([answer], [gold])
    assert found["f1"].value == pytest.approx(100 * f1)
    assert found["exact"].value == 100 * exact


def test_questions_with_and_without_answers_are_told_apart():
    found = judged(["1889", "x", "", "y y"], [["1889"], [], [], ["y", "z"]])
    assert found["f1"].value == pytest.approx(100 * (1 + 0 + 1 + 2 / 3) / 4)
    assert found["exact"].value == 50
    assert found["possible"].value == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert found["impossible"].value == 50
    assert str(found["impossible"]) == "50.00  SQuAD, 2 questions"
    assert judged(["", "x"], [[], []]).keys() == {"f1", "exact", "impossible"}
    assert judged(["x"], [["x"]]).keys() == {"f1", "exact"}


@pytest.mark.parametrize(("answers", "gold"), [([], []), (["a"], []), ([], [["a"]])])
def test_answers_and_questions_come_in_equal_numbers(answers, gold):
    with pytest.raises(ValueError, match="answers must be one for each of one or more questions, got"):
        judged(answers, gold)
