"""Confusion: counts, and what follows from them."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from regard.tasks.confusion import Confusion

RIGHT = [0, 0, 0, 1, 1, 2, 2, 2, 2, 0]
FOUND = [0, 1, 2, 1, 1, 2, 0, 2, 2, 0]
NAMES = ("ant", "bee", "cat")


def test_figures_are_those_of_scikit_learn():
    confusion = Confusion.of(RIGHT, FOUND, NAMES)
    assert confusion.counts.tolist() == confusion_matrix(RIGHT, FOUND).tolist()
    assert confusion.accuracy.value == pytest.approx(100 * accuracy_score(RIGHT, FOUND))
    assert confusion.f1.value == pytest.approx(100 * f1_score(RIGHT, FOUND, average="macro"))


def test_a_class_that_never_occurs_does_not_count():
    with_another = Confusion.of(RIGHT, FOUND, (*NAMES, "dog"))
    assert with_another.f1 == Confusion.of(RIGHT, FOUND, NAMES).f1


def test_the_worst_are_the_most_frequent_mistakes():
    confusion = Confusion(torch.tensor([[9, 3, 0], [0, 9, 0], [5, 0, 9]]), NAMES)
    assert confusion.worst() == [("cat", "ant", 5), ("ant", "bee", 3)]
    assert confusion.worst(1) == [("cat", "ant", 5)]


def test_a_table_is_as_wide_as_its_numbers_and_names():
    assert str(Confusion(torch.tensor([[12345, 0], [7, 1]]), ("cat", "x" * 20))).splitlines() == [
        "                          cat xxxxxxxxxxxx",
        "    cat                 12345            0",
        "    xxxxxxxxxxxx            7            1",
    ]


def test_of_many_classes_only_the_mistakes_are_told():
    names = tuple(f"class{n}" for n in range(21))
    assert str(Confusion.of([3, 3, 4], [3, 5, 4], names)) == "       1 x class3 taken for class5"
    assert str(Confusion.of([3], [3], names)) == "    nothing was taken for anything else"
