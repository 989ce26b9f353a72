"""Checks of texts: valid Unicode, lists and not single texts, names that differ."""

import numpy as np
import pytest

from regard.data import Images, labelled_tsv
from regard.data.text import check_not_a_string, check_reiterable, check_text, lines_in


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


def test_a_text_is_unicode():
    check_text("größer 𝄞")
    with pytest.raises(TypeError, match=r"caption must be text, got 3 \(int\)"):
        check_text(3, "caption")
    with pytest.raises(
        ValueError, match=r"caption must be Unicode, got the lone surrogate '\\ud800' as character 3; write"
    ):
        check_text("ab\ud800", "caption")


def test_a_single_text_or_a_generator_is_no_list_of_texts():
    for texts in (["a"], ("a",)):
        check_not_a_string(texts)
        check_reiterable(texts)
    with pytest.raises(TypeError, match=r"lines must be a list of texts, got a single text; pass \[text\]"):
        check_not_a_string("ab", "lines")
    with pytest.raises(TypeError, match="lines must be readable more than once, got a generator; pass a list"):
        check_reiterable((text for text in "ab"), "lines")


@pytest.mark.parametrize("text", ["", "a", "a\n\nb", "a\r\nb\x0b\u2028c\x85"])
def test_lines_end_at_line_feeds_alone(text):
    assert "\n".join(lines_in(text)) == text
    assert lines_in(text + "\n") == lines_in(text)
