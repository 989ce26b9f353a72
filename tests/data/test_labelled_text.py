"""Labelled text: classes are numbered in one order, and a bad label names its line."""

import pytest

from regard.data import DataError, Labelled, labelled, labelled_tsv


def test_labels_are_numbered_in_sorted_order(write):
    train = labelled_tsv(write("a.tsv", "pos\tgood\nneg\tbad\n neu \tso so\n"))
    assert train.classes == ("neg", "neu", "pos")
    assert list(train) == [train[n] for n in range(len(train))]
    assert train[0] == Labelled("good", 2)
    assert train.labels.tolist() == [2, 0, 1]


def test_test_set_counts_as_the_training_set_does(write):
    test = labelled(write("t.txt", "a\nb\n"), write("t.labels", "pos\npos\n"), classes=("neg", "pos"))
    assert test.labels.tolist() == [1, 1]
    assert test.where(1).endswith("t.txt line 2")


def test_unknown_label_names_its_line(write):
    path = write("a.tsv", "label\tsentence\n0\tbad\n2\tgood\n")
    with pytest.raises(DataError, match=r"a.tsv line 3: unknown label '2'; expected one of 0, 1"):
        labelled_tsv(path, text="sentence", label="label", classes=("0", "1"))


def test_empty_label_names_its_line(write):
    with pytest.raises(DataError, match=r"a.tsv line 2: the label is empty; expected the name of a class"):
        labelled_tsv(write("a.tsv", "0\tbad\n \tgood\n"))
