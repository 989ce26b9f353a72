"""Rows, pairs and labelled text: one example a line, and errors that name the line."""

import gzip
import json

import numpy as np
import pytest

from regard.data import (
    DataError,
    Images,
    Labelled,
    Lines,
    Pair,
    labelled,
    labelled_tsv,
    pairs_jsonl,
    pairs_tsv,
    parallel,
)


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_two_files_pair_line_by_line(write):
    pairs = parallel(write("a.de", "ein Haus\n\nein Hund"), write("a.en", gzip.compress(b"a house\n\na dog\n")))
    assert len(pairs) == 3
    assert list(pairs) == [pairs[n] for n in range(3)] == [("ein Haus", "a house"), ("", ""), ("ein Hund", "a dog")]
    assert pairs[-1] == Pair("ein Hund", "a dog")
    assert pairs.where(2).endswith("a.de line 3")
    with pytest.raises(IndexError, match=r"there is no row 3: there are 3, counted from 0"):
        pairs[3]


@pytest.mark.parametrize("read", [len, list, lambda rows: rows[0], lambda rows: list(rows.stream())])
@pytest.mark.parametrize("swapped", [False, True])
def test_unequal_line_counts_name_the_first_line_without_a_partner(write, read, swapped):
    files = [write("a.de", "1\n2\n3\n"), write("a.en", "1\n2\n")]
    with pytest.raises(
        DataError, match=r"a.de line 3: has 3 lines but .*a.en has 2; the files must match line by line"
    ):
        read(parallel(*reversed(files)) if swapped else parallel(*files))


def test_a_bad_line_anywhere_is_found_before_the_first_row(write):
    pairs = pairs_tsv(write("a.tsv", "a\tb\n" * 9 + "only one\n"))
    with pytest.raises(DataError, match=r"a.tsv line 10: expected at least 2 columns, got 1; separate them by tabs"):
        pairs[0]


def test_a_stream_gives_what_stands_before_a_bad_line(write):
    stream = iter(pairs_tsv(write("a.tsv", "a\tb\nc\n")).stream())
    assert next(stream) == Pair("a", "b")
    with pytest.raises(DataError, match=r"line 2"):
        next(stream)


def test_columns_by_number_or_by_name(write):
    path = write("a.tsv", "de\ten\tid\nHaus\thouse\t1\n")
    assert list(pairs_tsv(path, source=1, target=0)) == [("en", "de"), ("house", "Haus")]
    named = pairs_tsv(path, source="en", target="de")
    assert (len(named), named[0], list(named)) == (1, ("house", "Haus"), [("house", "Haus")])
    assert named.where(0).endswith("line 2")
    assert list(named.stream()) == list(named)
    assert named.stream().where(0) == named.where(0)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (
            {"source": "fr", "target": "en"},
            DataError,
            "line 1: the header has no column 'fr', only de, en; name a",
        ),
        ({"source": "de", "target": 1}, ValueError, "all names or all numbers"),
        ({"source": -1, "target": 1}, ValueError, "a column must be a name or a number from 0, got -1"),
        ({"source": True, "target": 1}, ValueError, "a column must be a name or a number from 0, got True"),
    ],
)
def test_columns_that_cannot_be_are_named(write, columns, error, message):
    with pytest.raises(error, match=message):
        pairs_tsv(write("a.tsv", "de\ten\n"), **columns)


def test_a_column_that_the_header_has_twice_is_refused(write):
    with pytest.raises(DataError, match="line 1: the header has 2 columns 'de'; give each its own name"):
        pairs_tsv(write("a.tsv", "de\ten\tde\n"), source="de", target="en")


@pytest.mark.parametrize("read", [len, list])
def test_a_header_alone_is_no_corpus(write, read):
    with pytest.raises(DataError, match=r"a.tsv: holds no examples; expected one per line"):
        read(pairs_tsv(write("a.tsv", "de\ten\n"), source="de", target="en"))


def test_an_empty_file_has_no_header(write):
    with pytest.raises(DataError, match=r"got an empty file"):
        pairs_tsv(write("a.tsv", ""), source="de", target="en")


def test_json_lines_pair_two_fields(write):
    rows = [{"body": "long\ntext", "subject": "short", "n": 1}, {"subject": "b", "body": "a"}]
    pairs = pairs_jsonl(write("a.jsonl", "\n".join(map(json.dumps, rows))), source="body", target="subject")
    assert list(pairs) == [("long\ntext", "short"), ("a", "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "a"}', "expected text in the field 'subject'; the line has body"),
        ("{}", "expected text in the field 'body'; the line has no fields"),
        ('{"body": 1, "subject": "b"}', "expected text in the field 'body'"),
        (
            r'{"body": "a", "subject": "b\ud800"}',
            r"the field 'subject' must be Unicode, got the lone surrogate '\\ud800' as character 2",
        ),
        ("[1]", "expected a JSON object, got list"),
        ('{"body"', "expected one JSON object per line"),
        ("[" * 100_000, "expected one JSON object per line"),
    ],
)
def test_bad_json_names_its_line(write, line, message):
    path = write("a.jsonl", '{"body": "a", "subject": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a.jsonl line 2: .*" + message):
        len(pairs_jsonl(path, source="body", target="subject"))


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


def test_lines_of_a_pair_keep_their_tabs_and_spaces(write):
    assert parallel(write("a", " a\tb \n"), write("b", "c\n"))[0] == Pair(" a\tb ", "c")
    assert repr(Lines(write("c", "x"))).startswith("Lines('")


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        (("a", "b", "a"), ValueError, "class names must be unique, got 'a' more than once"),
        ("ab", TypeError, r"classes must be a list of texts, got a single text; pass \[text\]"),
    ],
)
def test_every_class_has_a_name_of_its_own(tmp_path, classes, error, message):
    path = tmp_path / "a.tsv"
    path.write_text("a\tein Haus\n")
    pixels = np.zeros((1, 4, 4), np.uint8)
    for read in (lambda: labelled_tsv(path, classes=classes), lambda: Images(pixels, [0], classes=classes)):
        with pytest.raises(error, match=message):
            read()
