"""Order of the site's search: the glossary and the book come before guides, and guides before the reference."""

from __future__ import annotations

from typing import Any

BOOSTS = {"glossary.md": 20, "book/": 3, "guides/": 1.5, "reference/": 0.01}


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> None:
    """Set the boost of a page in the index of the search."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
