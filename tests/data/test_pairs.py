"""Pairs: two files line by line, two columns of one, or two fields of JSON lines."""

import gzip
import json

import pytest

from regard.data import DataError, DataWarning, Lines, Pair, pairs_jsonl, pairs_tsv, parallel


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


def test_json_lines_pair_two_fields(write):
    rows = [{"body": "long\ntext", "subject": "short", "n": 1}, {"subject": "b", "body": "a"}]
    pairs = pairs_jsonl(write("a.jsonl", "\n".join(map(json.dumps, rows))), source="body", target="subject")
    assert list(pairs) == [("long\ntext", "short"), ("a", "b")]


def test_lines_of_a_pair_keep_their_tabs_and_spaces(write):
    assert parallel(write("a", " a\tb \n"), write("b", "c\n"))[0] == Pair(" a\tb ", "c")
    assert repr(Lines(write("c", "x"))).startswith("Lines('")


@pytest.mark.parametrize("first", ["source\ttarget", "de\ten", "Document\tSummary"])
def test_first_line_of_column_names_is_a_header_and_reported(write, first):
    path = write("a.tsv", f"{first}\nein Haus\ta house\n")
    with pytest.warns(DataWarning, match=r"a.tsv line 1 was read as a header, .* and .*; if it is an example, pass"):
        pairs = pairs_tsv(path)
    assert list(pairs) == [("ein Haus", "a house")]
    assert len(pairs_tsv(path, header=False)) == 2
    assert len(pairs_tsv(path, header=True)) == 1


def test_first_line_of_words_is_an_example(write):
    assert len(pairs_tsv(write("a.tsv", "Haus\thouse\nHund\tdog\n"))) == 2


def test_several_files_are_read_one_after_the_other(write):
    sources, targets = [write("a.de", "a\nb\n"), write("b.de", "c\n")], [write("a.en", "1\n2\n"), write("b.en", "3\n")]
    pairs = parallel(sources, targets)
    assert list(pairs) == [pairs[n] for n in range(len(pairs))] == [("a", "1"), ("b", "2"), ("c", "3")]
    assert pairs.where(2).endswith("b.de line 1")
    with pytest.raises(ValueError, match=r"must come in pairs that match line by line, got 2 \(.*a.de, .*\) and 1 \("):
        parallel(sources, targets[0])
    tables = [write("a.tsv", "a\t1\n"), write("b.tsv", "b\t2\n")]
    assert list(pairs_tsv(tables)) == [("a", "1"), ("b", "2")]
    lines = [write("a.jsonl", '{"s": "a", "t": "1"}\n'), write("b.jsonl", '{"s": "b", "t": "2"}\n')]
    assert list(pairs_jsonl(lines, source="s", target="t")) == [("a", "1"), ("b", "2")]
