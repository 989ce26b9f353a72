"""Rows of several files as one data set."""

import pytest

from regard.data import DataError, JoinedRows, Lines, pairs_tsv
from regard.data.joined_rows import as_paths, join_rows


def test_rows_are_those_of_the_files_in_order(write):
    rows = JoinedRows([Lines(write("a", "one\ntwo\n")), Lines(write("b", "three\n")), Lines(write("c", "four\n"))])
    assert list(rows) == [rows[n] for n in range(4)] == ["one", "two", "three", "four"]
    assert (rows[-1], len(rows)) == ("four", 4)
    assert [rows.where(n).rpartition("/")[2] for n in range(4)] == ["a line 1", "a line 2", "b line 1", "c line 1"]
    assert str(rows.error(2, "is bad", hint="mend it")).endswith("b line 1: is bad; mend it")
    with pytest.raises(IndexError, match="there is no row 4: there are 4, counted from 0"):
        rows[4]


def test_a_bad_line_of_a_later_file_is_found_at_the_first_look(write):
    rows = JoinedRows([pairs_tsv(write("a", "x\ty\n")), pairs_tsv(write("b", "x\ty\nz\n"))])
    with pytest.raises(DataError, match="b line 2: expected at least 2 columns"):
        rows[0]
    stream = rows.stream()
    assert next(iter(stream)) == ("x", "y")


def test_one_file_is_itself_and_none_is_refused(write):
    lines = Lines(write("a", "one\n"))
    assert join_rows([lines]) is lines
    assert as_paths("a")[0].name == "a"
    with pytest.raises(ValueError, match="give at least one file, got none"):
        as_paths([])
