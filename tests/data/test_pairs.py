"""Pairs: two files line by line, two columns of one, or two fields of JSON lines."""

import gzip
import json

import pytest

from regard.data import DataError, Lines, Pair, pairs_jsonl, parallel


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
