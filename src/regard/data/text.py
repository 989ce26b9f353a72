"""Checks of texts: valid Unicode, and lists of texts rather than a single one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(text: object, name: str = "text") -> None:
    """Raise unless it is a text without lone surrogates, which UTF-8 cannot encode.

    They come from bytes of an argument or a file name that are not UTF-8, and from JSON escapes such as \\ud800.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} must be text, got {text!r} ({type(text).__name__})")
    if found := SURROGATE.search(text):
        raise ValueError(
            f"{name} must be Unicode, got the lone surrogate {found[0]!r} as character {found.start() + 1}; "
            "write it in UTF-8"
        )


def check_not_a_string(texts: object, name: str = "texts") -> None:
    """Raise if it is a single text, whose characters would be taken for texts."""
    if isinstance(texts, str):
        raise TypeError(f"{name} must be a list of texts, got a single text; pass [text]")


def check_reiterable(texts: object, name: str = "texts") -> None:
    """Raise for a generator, which can be read once only: a vocabulary is learned from the texts before encoding."""
    if iter(texts) is texts:  # type: ignore[call-overload]
        raise TypeError(f"{name} must be readable more than once, got a {type(texts).__name__}; pass a list")


def check_class_names(classes: Sequence[str] | None) -> None:
    """Raise if it is a single text, or if two classes share a name; None is valid."""
    check_not_a_string(classes, "classes")
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise ValueError(f"class names must be unique, got {twice[0]!r} more than once")


def lines_in(text: str) -> list[str]:
    """Split a text into lines at line feeds only, as in files.

    >>> lines_in("one\\u2028line\\nand another\\n")
    ['one\\u2028line', 'and another']
    """
    return text.removesuffix("\n").split("\n")
