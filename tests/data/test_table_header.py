"""Header lines are recognized by the names of columns."""

import pytest

from regard.data.table_header import is_label_header, is_pair_header, is_swapped, may_be_label_header


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (("source", "target"), True),
        (("SRC ", "tgt"), True),
        (("de", "en"), True),
        (("document", "summary"), True),
        (("no", "no"), False),
        (("ein Haus", "a house"), False),
        (("source", "a house"), False),
        (("text", "en"), False),
    ],
)
def test_pairs_have_a_header_if_both_cells_are_names(cells, found):
    assert is_pair_header(*cells) == found


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (("sentence", "label"), True),
        (("label", "sentence"), True),
        (("label", "class"), False),
        (("good", "pos"), False),
    ],
)
def test_labels_have_a_header_if_one_cell_names_texts_and_one_labels(cells, found):
    assert is_label_header(*cells) == found


def test_header_of_swapped_columns_is_known():
    assert is_swapped("label", "sentence")
    assert not is_swapped("sentence", "label")


@pytest.mark.parametrize(
    ("text", "labels", "found"),
    [
        ("utterance", ["intent", "play", "stop", "play", "stop"], True),
        ("utterance", ["intent", "play", "stop"], False),  # every label occurs once
        ("utterance", ["play", "play"], False),
        ("play it now", ["intent", "play", "play"], False),  # a text, no name
        ("1", ["intent", "play", "play"], False),
    ],
)
def test_first_line_may_be_a_header_if_its_label_alone_occurs_once(text, labels, found):
    assert may_be_label_header(text, labels) == found
