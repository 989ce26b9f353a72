"""Questions in the format of SQuAD: read whole, and every fault named by its place."""

import copy
import gzip
import json

import pytest

from regard.data import Answer, DataError, questions

CONTEXT = "The œil opened in 1973."
GOOD = {
    "version": "1.1",
    "data": [
        {
            "title": "Eye",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "a",
                            "question": "When?",
                            "answers": [
                                {"text": "1973", "answer_start": 18},
                                {"text": "in 1973", "answer_start": 15},
                            ],
                        },
                        {
                            "id": "b",
                            "question": "Why?",
                            "is_impossible": True,
                            "answers": [],
                            "plausible_answers": [{"text": "The", "answer_start": 0}],
                        },
                    ],
                }
            ],
        }
    ],
}


def read(tmp_path, tree, packed=False):
    data = json.dumps(tree).encode()
    (tmp_path / "squad.json").write_bytes(gzip.compress(data) if packed else data)
    return questions(tmp_path / "squad.json")


@pytest.mark.parametrize("packed", [False, True])
def test_questions_answers_and_unanswerable_ones_are_read(tmp_path, packed):
    first, second = read(tmp_path, GOOD, packed)
    assert (first.id, first.title, first.context, first.question) == ("a", "Eye", CONTEXT, "When?")
    assert first.answers == (Answer("1973", 18), Answer("in 1973", 15))
    assert all(CONTEXT[start : start + len(text)] == text for text, start in first.answers)
    assert second.answers == ()


def test_what_is_marked_says_whether_there_are_answers(tmp_path):
    answers = [{"text": "The", "answer_start": 0}]
    [impossible, possible] = ({"is_impossible": mark, "answers": answers} for mark in (True, False))
    tree = copy.deepcopy(GOOD)
    tree["data"][0]["paragraphs"][0]["qas"][0] |= possible
    tree["data"][0]["paragraphs"][0]["qas"][1] |= impossible
    assert [one.answers for one in read(tmp_path, tree)] == [(Answer("The", 0),), ()]


def changed(path, value):
    tree = copy.deepcopy(GOOD)
    at = tree
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return tree


QA = ("data", 0, "paragraphs", 0, "qas", 0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], r"the top: expected an object, got list"),
        ({}, r"the top: expected a list in 'data', got nothing; expected the format of SQuAD"),
        ({"data": []}, r"squad.json: holds no questions; expected the format of SQuAD"),
        (changed(("data", 0), 3), r"data\[0\]: expected an object, got int"),
        (changed(("data", 0, "title"), 3), r"data\[0\]: expected text in 'title', got int"),
        (changed(("data", 0, "paragraphs"), "x"), r"data\[0\]: expected a list in 'paragraphs', got str"),
        (
            changed(("data", 0, "paragraphs", 0, "context"), None),
            r"paragraphs\[0\]: expected text in 'context', got noth",
        ),
        (changed((*QA, "id"), 7), r"qas\[0\]: expected text in 'id', got int"),
        (
            changed((*QA, "id"), "b"),
            r"data\[0\].paragraphs\[0\].qas\[1\]: the id 'b' is already used by data\[0\].paragraphs\[0\].qas\[0\]",
        ),
        (
            changed((*QA, "id"), "\ud800"),
            r"squad.json: data\[0\].*qas\[0\]: 'id' must be Unicode, got the lone surrogate '\\ud800'",
        ),
        (changed((*QA, "question"), None), r"qas\[0\]: expected text in 'question'"),
        (changed((*QA, "answers"), None), r"qas\[0\]: expected a list in 'answers'"),
        (
            changed((*QA, "answers", 1, "text"), "1974"),
            r"answers\[1\]: the context does not contain '1974' at character 15",
        ),
        (
            changed((*QA, "answers", 1, "answer_start"), -8),
            r"answers\[1\]: the context does not contain .* at character -8",
        ),
        (changed((*QA, "answers", 1, "text"), ""), r"answers\[1\]: the context does not contain ''"),
        (changed((*QA, "answers", 0, "answer_start"), "18"), r"expected a whole number in 'answer_start', got '18'"),
        (changed((*QA, "answers", 0, "answer_start"), True), r"expected a whole number in 'answer_start', got True"),
    ],
)
def test_faults_are_named_by_their_place(tmp_path, tree, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, tree)
