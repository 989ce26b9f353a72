"""What counts as text: Unicode that can be written down, and many texts told from one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(text: object, name: str = "text") -> None:
    """Raise unless it is a text of whole characters: half of one, a lone surrogate, has no bytes in UTF-8.

    Python makes one of each byte of an argument or a file name that is not UTF-8, JSON of an escape such as \\ud800.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} must be text, got {text!r} ({type(text).__name__})")
    if found := SURROGATE.search(text):
        raise ValueError(
            f"{name} must be Unicode, got the lone surrogate {found[0]!r} as character {found.start() + 1}; "
            "write it in UTF-8"
        )


def check_not_a_string(texts: object, name: str = "texts") -> None:
    """Raise if it is one text, which would be taken for its characters."""
    if isinstance(texts, str):
        raise TypeError(f"{name} must be many texts, got one; pass [text]")


def check_reiterable(texts: object, name: str = "texts") -> None:
    """Raise if it can be read only once, as a generator can: a vocabulary is learned from it before it is encoded."""
    if iter(texts) is texts:  # type: ignore[call-overload]
        raise TypeError(f"{name} must come again each time they are read, got a {type(texts).__name__}; pass a list")


def check_class_names(classes: Sequence[str] | None) -> None:
    """Raise if it is one text, or if two classes share a name; None are those found."""
    check_not_a_string(classes, "classes")
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise ValueError(f"classes must have a name each, got {twice[0]!r} more than once; name it once")


def lines_in(text: str) -> list[str]:
    """The lines of a text: they end with a line feed, as those of files do, and with nothing else.

    >>> lines_in("one\\u2028line\\nand another\\n")
    ['one\\u2028line', 'and another']
    """
    return text.removesuffix("\n").split("\n")
