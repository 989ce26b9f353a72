"""Labelled text: classes are numbered in one order, and a bad label names its line."""

import pytest

from regard.data import DataError, DataWarning, Labelled, labelled, labelled_tsv


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


def test_header_is_recognized_by_the_names_of_its_columns_and_reported(write):
    path = write("a.tsv", "label\tsentence\n0\tbad\n1\tgood\n0\tdull\n")
    with pytest.warns(DataWarning, match=r"a.tsv line 1 was read as a header, label and sentence; if it is an example"):
        read = labelled_tsv(path)
    assert read.classes == ("0", "1")
    assert len(read) == 3
    assert read.where(0).endswith("a.tsv line 2")
    assert labelled_tsv(path, header=False).classes == ("0", "1", "label")
    assert labelled_tsv(path, header=True).classes == ("0", "1")
    with pytest.warns(DataWarning, match="was read as a header"):
        assert len(labelled_tsv(path, classes=("0", "1"))) == 3


def test_header_that_names_the_columns_the_other_way_round_is_refused(write):
    path = write("a.tsv", "sentence\tlabel\nbad\t0\n")
    with pytest.raises(DataError, match=r"the header names column 1, read as texts, 'label', .*--text-column sen"):
        labelled_tsv(path)


def test_first_line_that_may_be_a_header_is_refused_until_the_user_says(write):
    path = write("a.tsv", "intent\tutterance\nplay\tplay it\nstop\tstop it\nplay\tplay\nstop\tenough\n")
    with pytest.raises(DataError, match=r"the first line may be a header: no other line has the label 'intent'"):
        labelled_tsv(path)
    assert len(labelled_tsv(path, header=True)) == 4
    assert len(labelled_tsv(path, header=False)) == 5


def test_labels_of_several_files_are_numbered_together(write):
    files = [write("a.tsv", "b\tone\n"), write("b.tsv", "a\ttwo\nc\tthree\n")]
    read = labelled_tsv(files)
    assert (read.classes, read.labels.tolist()) == (("a", "b", "c"), [1, 0, 2])
    assert read.where(2).endswith("b.tsv line 2")
    with pytest.raises(DataError, match=r"b.tsv line 2: unknown label 'c'"):
        labelled_tsv(files, classes=("a", "b"))
    texts = labelled([write("a.txt", "x\n"), write("b.txt", "y\n")], [write("a.l", "1\n"), write("b.l", "0\n")])
    assert texts.labels.tolist() == [1, 0]
