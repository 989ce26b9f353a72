"""Rows that are probably mistakes are counted, and can be left out."""

import pytest

from regard.data import DataError, Pair, labelled_tsv, parallel
from regard.data.row_checks import KeptRows, RowChecks, label_key, numbers_to_keep, pair_key

KEYS = [("a", "1"), (" ", "2"), ("b", "\t"), ("a", "1"), ("a", "2"), ("c", "3"), ("a", "1")]


def test_counts_are_those_of_a_loop():
    others = [("c", "x"), ("d", "y"), ("c", "z")]
    checks = RowChecks.of(KEYS, others=others)
    inputs = {key[0] for key in others}
    assert checks.empty.tolist() == [not (key[0].strip() and key[1].strip()) for key in KEYS]
    assert checks.repeated.tolist() == [key in KEYS[:n] for n, key in enumerate(KEYS)]
    assert checks.shared.tolist() == [key[0] in inputs for key in KEYS]
    assert checks.leaked.tolist() == [True, False, True]


def test_each_kind_that_occurs_has_a_line_with_its_count():
    assert RowChecks.of(KEYS, others=[("c", "")]).lines("training pairs", "validation pairs") == [
        "2 of 7 training pairs have an empty text",
        "2 of 7 training pairs repeat an earlier one",
        "1 of 1 validation pairs have an input that is also in the training data",
    ]
    assert RowChecks.of([("a", "1"), ("b", "1")]).lines("pairs", "others") == []


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"empty": True}, [0, 3, 4, 5, 6]),
        ({"duplicates": True}, [0, 1, 2, 4, 5]),
        ({"others": [("a", "9")]}, [1, 2, 5]),
        ({"empty": True, "duplicates": True, "others": [("c", "")]}, [0, 4]),
    ],
)
def test_rows_are_left_out_by_kind(settings, kept):
    assert numbers_to_keep(KEYS, **settings).tolist() == kept


def test_data_of_which_nothing_is_left_is_refused():
    with pytest.raises(DataError, match="no example is left after dropping; leave out the flags that drop examples"):
        numbers_to_keep([("", "")], empty=True)


def test_kept_rows_know_their_places(write):
    rows = parallel(write("a.de", "a\n\nb\nc\n"), write("a.en", "1\n2\n3\n4\n"))
    kept = KeptRows(rows, numbers_to_keep(map(pair_key, rows), empty=True))
    assert len(kept) == 3
    assert list(kept) == [kept[n] for n in range(3)] == [Pair("a", "1"), Pair("b", "3"), Pair("c", "4")]
    assert kept.where(1).endswith("a.de line 3")
    assert str(kept.error(2, "is bad")).endswith("a.de line 4: is bad")


def test_labelled_texts_that_are_kept_have_the_same_classes(write):
    read = labelled_tsv(write("a.tsv", "x\tone\ny\t\nx\tone\nx\ttwo\n"))
    kept = read.only(numbers_to_keep(map(label_key, read), empty=True, duplicates=True))
    assert [example.text for example in kept] == ["one", "two"]
    assert (kept.classes, kept.labels.tolist()) == (("x", "y"), [0, 0])
