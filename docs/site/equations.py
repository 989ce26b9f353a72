"""A mkdocs hook: LaTeX of a page, in ```math fences and between dollar signs, becomes MathML when the site is built.

latex2mathml is pure Python and browsers draw MathML by themselves, so a reader needs neither a network nor a script.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

SOURCE = re.compile(
    r"^(?P<fence>`{3,})math\n(?P<shown>.*?)^(?P=fence)$|^ *`{3,}.*?^ *`{3,}$|`[^`]+`|\$(?P<inline>[^$\n]+)\$",
    re.DOTALL | re.MULTILINE,
)
PLACE = "mathml{}equation"  # a word that Markdown leaves alone
PLACES = re.compile(f"(?:<p>)?{PLACE.format('([0-9]+)')}(?:</p>)?")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put a placeholder for each equation, so that Markdown does not read its underscores."""
    page.equations = []

    def placeholder(found: re.Match[str]) -> str:
        display = found["shown"] is not None
        if not display and found["inline"] is None:
            return found[0]
        page.equations.append(mathml(found["shown"] if display else found["inline"], display=display))
        word = PLACE.format(len(page.equations) - 1)
        return f"\n{word}\n" if display else word

    return SOURCE.sub(placeholder, markdown)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Put the MathML where the placeholders are."""
    return PLACES.sub(lambda found: replaced(found, page.equations), html)


def replaced(found: re.Match[str], equations: list[str]) -> str:
    """The equation of a placeholder, with the tags around it if it is inline."""
    equation = equations[int(found[1])]
    if equation.startswith("<div"):
        return equation
    return found[0].replace(PLACE.format(found[1]), equation)


def mathml(latex: str, *, display: bool) -> str:
    """LaTeX as MathML, a display in a box that scrolls."""
    if not display:
        return convert(latex.strip())
    return f'<div class="equation">{convert(latex.strip(), display="block")}</div>'
