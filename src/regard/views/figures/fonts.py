"""Text that can be seen: fonts that hold its characters, and escapes for those that none holds.

matplotlib brings a font of most alphabets; one of Chinese, Japanese and Korean comes with a package this one needs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from matplotlib import font_manager

SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
BOXES = "Last Resort"  # a font that has every character, each of them a box
EAST_ASIAN = "noto_cjk_sans_jp_regular", "NotoSansCJKjp-Regular.otf"  # a package and the font in it


class Shown(NamedTuple):
    """Texts as they can be drawn, and the font families to draw them with, in order of preference."""

    texts: list[str]
    families: list[str]


def shown(texts: Iterable[str]) -> Shown:
    """Texts with every character visible: from an installed font that has it, or else as its code point.

    >>> shown(["a\\u200bb", " ", "$x$"]).texts
    ['a\\\\u200bb', '␣', '$x$']

    Control, zero-width and bidirectional characters are code points always, and a token of spaces is drawn as such.
    Draw the result with `parse_math=False`, so that dollars stay dollars.
    """
    texts = ["␣" * len(text) if text and not text.strip(" ") else text for text in texts]
    wanted = {char for text in texts for char in text if unicodedata.category(char) not in INVISIBLE}
    families, covered = _families(frozenset(wanted))
    return Shown(["".join(char if char in covered else _escape(char) for char in text) for text in texts], [*families])


def _escape(char: str) -> str:
    code = ord(char)
    return SHORT.get(char) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


@lru_cache(maxsize=64)
def _families(wanted: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Families that together hold as much as can be held, the usual one first; and what they hold."""
    usual = font_manager.findfont(font_manager.FontProperties(), fallback_to_default=True)
    families = [font_manager.FontProperties(fname=usual).get_name()]
    covered = wanted & _characters(usual)
    ours = _brought_along()
    if ours is not None and (held := (wanted - covered) & _characters(ours)):
        families.append(_named(ours))
        covered |= held
    while covered != wanted:
        best, name = _best(wanted - covered)
        if not best:
            break
        families.append(name)
        covered |= best
    return families, covered


@cache
def _brought_along() -> str | None:
    """The file of the font that comes with a package; None where somebody left the package out."""
    package, name = EAST_ASIAN
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).with_name(name))


def _named(path: str) -> str:
    """The family of a font file, which matplotlib then finds by it."""
    manager = font_manager.fontManager
    if not any(font.fname == path for font in manager.ttflist):
        manager.addfont(path)
    return font_manager.FontProperties(fname=path).get_name()


def _best(missing: frozenset[str]) -> tuple[frozenset[str], str]:
    """The family that holds most of what is missing, the first by name among equals."""
    found: tuple[frozenset[str], str] = (frozenset(), "")
    for name, path in _installed().items():
        held = missing & _characters(path)
        if len(held) > len(found[0]):
            found = held, name
    return found


def _installed() -> dict[str, str]:
    """A file of each family by name, upright and of normal weight where there is one."""
    fonts = [font for font in font_manager.fontManager.ttflist if not font.name.startswith(BOXES)]
    found: dict[str, str] = {}
    for font in sorted(fonts, key=lambda font: (font.name, font.style != "normal", abs(_weight(font.weight) - 400))):
        found.setdefault(font.name, font.fname)
    return found


def _weight(weight: int | str) -> int:
    return weight if isinstance(weight, int) else font_manager.weight_dict.get(weight, 400)


@lru_cache(maxsize=4096)
def _characters(path: str) -> frozenset[str]:
    try:
        return frozenset(map(chr, font_manager.get_font(path).get_charmap()))
    except (OSError, RuntimeError):  # not a font that can be drawn with, as those of coloured bitmaps
        return frozenset()
