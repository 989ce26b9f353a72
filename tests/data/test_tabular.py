"""Rows: columns by number or by name, JSON lines, streams, and errors that name the line."""

import pytest

from regard.data import DataError, DataWarning, Pair, pairs_jsonl, pairs_tsv


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
    with pytest.warns(DataWarning, match=r"a.tsv has 3 columns, and only columns 0 and 1 are read"):
        assert len(pairs_tsv(path, source=1, target=0, header=False)) == 2
    assert list(pairs_tsv(path, source=2, target=0, header=False)) == [("id", "de"), ("1", "Haus")]
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


def test_line_with_more_cells_than_the_others_is_reported_with_its_count(write):
    path = write("a.tsv", "Haus\thouse\n" * 8 + "Hund\ta dog\tthat barks\n")
    with pytest.warns(DataWarning, match=r"has 2 columns, but 1 of 9 lines have more or fewer, up to 3; only columns"):
        len(pairs_tsv(path))


@pytest.mark.parametrize("columns", [{"source": 0, "target": 3}, {"source": "a", "target": "b"}])
def test_columns_that_were_chosen_leave_others_without_a_warning(write, columns):
    assert len(pairs_tsv(write("a.tsv", "a\tb\tc\td\n1\t2\t3\t4\n"), **columns)) in (1, 2)


def test_cells_between_commas_may_be_quoted(write):
    path = write("a.csv", 'de,en\n"ein Haus, ein Hund","a ""house"", a dog"\nja,yes\n')
    assert list(pairs_tsv(path, source="de", target="en")) == [
        ("ein Haus, ein Hund", 'a "house", a dog'),
        ("ja", "yes"),
    ]


def test_quoted_cell_that_goes_on_in_the_next_line_is_refused(write):
    with pytest.raises(DataError, match=r"a.csv line 2: not a line of comma-separated cells .* must end on its line"):
        len(pairs_tsv(write("a.csv", 'de,en\n"ein\nHaus",a house\n'), source="de", target="en"))
    with pytest.raises(DataError, match=r"b.csv line 1: not a line of comma-separated cells"):
        pairs_tsv(write("b.csv", '"de,en\n'), source="de", target="en")
    with pytest.raises(DataError, match=r"c.csv line 1: expected at least 2 columns, got 1; separate them by commas"):
        len(pairs_tsv(write("c.csv", "a\tb\n")))
