"""Header lines of tab- and comma-separated files: recognized by the names of their columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXTS = _words(
    "text sentence review document content body source src input article question premise tweet comment message title "
    "sentence1"
)
LABELS = _words("label labels class category target sentiment gold polarity score rating stars tag y")
TARGETS = _words("target tgt trg translation summary abstract output headline highlights reference")
LANGUAGES = _words(
    "ar bg bn ca cs cy da de el en es et eu fa fi fr ga he hi hr hu hy id is it ja ka kk ko lt lv mk ms mt nl no pl pt "
    "ro ru sk sl sq sr sv sw ta te th tr uk ur vi zh"
)
NAME = re.compile(r"[^\W\d][\w .-]{0,30}")
MAX_WORDS = 2


def is_pair_header(source: str, target: str) -> bool:
    """Return whether two cells are names of columns of pairs: source and target, document and summary, de and en.

    >>> is_pair_header("src", "tgt"), is_pair_header("de", "en"), is_pair_header("ein Haus", "a house")
    (True, True, False)
    """
    first, second = source.strip().casefold(), target.strip().casefold()
    named = {first, second} <= TEXTS | TARGETS or {first, second} <= LANGUAGES
    return named and first != second


def is_label_header(text: str, label: str) -> bool:
    """Return whether two cells are names of a column of texts and one of labels, in any order."""
    cells = text.strip().casefold(), label.strip().casefold()
    return any(a in TEXTS and b in LABELS for a, b in (cells, cells[::-1]))


def is_swapped(text: str, label: str) -> bool:
    """Return whether a header names the column of the texts as labels, and that of the labels as texts."""
    return text.strip().casefold() in LABELS and label.strip().casefold() in TEXTS


def may_be_label_header(text: str, labels: Sequence[str]) -> bool:
    """Return whether the first line may be a header: its label alone occurs once, and both cells look like names.

    >>> may_be_label_header("utterance", ["intent", "play", "stop", "play", "stop"])
    True
    >>> may_be_label_header("utterance", ["play", "stop", "play", "stop"])
    False
    """
    once = [name for name, count in Counter(labels).items() if count == 1]
    cells = (text.strip(), labels[0].strip())
    return (
        len(labels) > 2
        and once == labels[:1]
        and all(NAME.fullmatch(cell) and len(cell.split()) <= MAX_WORDS for cell in cells)
    )
