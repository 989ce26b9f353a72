"""A mkdocs hook: SVG drawings stand in the page itself, so that their ink follows its light or dark scheme."""

from __future__ import annotations

import re
from html import escape, unescape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
IMAGE = re.compile(r'<p><img alt="([^"]*)" src="[^"]*?images/(diagrams/\w+\.svg)" ?/?></p>')


def on_page_content(html: str, **_: Any) -> str:
    """Put each drawing in place of its <img>."""
    return IMAGE.sub(lambda found: drawing(DOCS / "images" / found[2], unescape(found[1])), html)


def drawing(path: Path, caption: str) -> str:
    """The drawing as a figure; the site's style sheet, not the file's own, says which colour its ink has."""
    svg = path.read_text(encoding="utf8")
    svg = re.sub(r"<style[^>]*>[^<]*</style>", "", svg[svg.index("<svg") :])  # it would style the whole page
    svg = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    ids = re.findall(r'\bid="([^"]+)"', svg)
    for name in sorted(set(ids), key=len, reverse=True):  # several drawings share a page
        svg = re.sub(rf'(id="|#){re.escape(name)}(?=["\)])', rf"\g<1>{path.stem}-{name}", svg)
    points = float(re.search(r'width="([0-9.]+)pt"', svg)[1])
    narrowest = f"min-width: {0.82 * points:.0f}px"  # with smaller words a phone scrolls instead
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption, quote=True)}" style="{narrowest}" ', 1)
    return f'<div class="diagram" data-search-exclude>{svg}</div>'
