"""Make text drawable: find fonts that have its characters, and escape the characters that no font has.

matplotlib ships a font for most alphabets; the font for Chinese, Japanese and Korean comes from a dependency.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from matplotlib import font_manager

SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
PICTOGRAMS = "\u2600-\u27bf\U0001f000-\U0001f3fa\U0001f400-\U0001faff"
SKIN_AND_STYLE = "\ufe0e\ufe0f\u20e3\U0001f3fb-\U0001f3ff"
JOINERS = re.compile(f"[\u200d{SKIN_AND_STYLE}]")
# Joiners and modifiers count as part of an emoji behind one alone: elsewhere they stay visible.
EMOJI = re.compile(f"[{PICTOGRAMS}](?:[{SKIN_AND_STYLE}]|\u200d[{PICTOGRAMS}])*")
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
BOXES = "Last Resort"  # a font that draws every character as a box
EAST_ASIAN = "noto_cjk_sans_jp_regular", "NotoSansCJKjp-Regular.otf"  # the package and its font file


class DrawableText(NamedTuple):
    """Drawable texts, and the font families to draw them with, in order of preference."""

    texts: list[str]
    families: list[str]


def drawable(texts: Iterable[str]) -> DrawableText:
    """Make every character visible: drawn by an installed font that has it, or else written as its code point.

    >>> drawable(["a\\u200bb", " ", "$x$"]).texts
    ['a\\\\u200bb', '␣', '$x$']

    Control, zero-width and bidirectional characters are always code points, and a token of spaces is drawn as ␣. Emoji
    that no font has are named, "[woman+laptop]" say, without the joiners between them and without shades of skin.
    Draw the result with `parse_math=False`, so that dollars stay dollars.
    """
    texts = [EMOJI.sub(_drop_joiners, text) for text in texts]
    texts = ["␣" * len(text) if text and not text.strip(" ") else text for text in texts]
    wanted = {char for text in texts for char in text if unicodedata.category(char) not in INVISIBLE}
    families, covered = _families(frozenset(wanted))
    unnamed = ["".join(char if char in covered or _is_emoji(char) else _escape(char) for char in x) for x in texts]
    return DrawableText([_name_emoji(text, covered) for text in unnamed], [*families])


def _drop_joiners(found: re.Match[str]) -> str:
    return JOINERS.sub("", found[0])


def _is_emoji(char: str) -> bool:
    return EMOJI.fullmatch(char) is not None


def _name_emoji(text: str, covered: frozenset[str]) -> str:
    """Write the names of emoji in a row that no font has, in brackets."""
    rows = groupby(text, lambda char: _is_emoji(char) and char not in covered)
    return "".join(f"[{'+'.join(map(_emoji_name, chars))}]" if named else "".join(chars) for named, chars in rows)


def _emoji_name(char: str) -> str:
    name = unicodedata.name(char, f"u{ord(char):x}").lower()
    return name.removeprefix("regional indicator symbol letter ").removesuffix(" face")


def _escape(char: str) -> str:
    code = ord(char)
    return SHORT.get(char) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


@lru_cache(maxsize=64)
def _families(wanted: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Return font families that cover as much as installed fonts can, the default first, and what they cover."""
    usual = font_manager.findfont(font_manager.FontProperties(), fallback_to_default=True)
    families = [font_manager.FontProperties(fname=usual).get_name()]
    covered = wanted & _characters(usual)
    ours = _bundled_font()
    if ours is not None and (held := (wanted - covered) & _characters(ours)):
        families.append(_register(ours))
        covered |= held
    while covered != wanted:
        best, name = _best(wanted - covered)
        if not best:
            break
        families.append(name)
        covered |= best
    return families, covered


@cache
def _bundled_font() -> str | None:
    """Return the font file of the dependency, None if it is not installed."""
    package, name = EAST_ASIAN
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).with_name(name))


def _register(path: str) -> str:
    """Register a font file with matplotlib and return its family."""
    manager = font_manager.fontManager
    if not any(font.fname == path for font in manager.ttflist):
        manager.addfont(path)
    return font_manager.FontProperties(fname=path).get_name()


def _best(missing: frozenset[str]) -> tuple[frozenset[str], str]:
    """Return the family that covers most of the missing characters, the first by name among equals."""
    found: tuple[frozenset[str], str] = (frozenset(), "")
    for name, path in _installed_families().items():
        held = missing & _characters(path)
        if len(held) > len(found[0]):
            found = held, name
    return found


def _installed_families() -> dict[str, str]:
    """Return a font file for each family by name, upright and of normal weight if it has one."""
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
    except (OSError, RuntimeError):  # fonts that matplotlib cannot load, such as coloured bitmaps
        return frozenset()
