"""Gallery: what a tour has made, on one page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..train import checkpoint as checkpoints

POLICY = "default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'"
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h2{margin-top:3rem}img{max-width:100%;margin:.5rem 0;border:1px solid #ddd}"
    "td{padding:.1rem 1.5rem .1rem 0}td.wrong{color:#b00}"
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a model was given, what it made of it, and what would have been right."""

    given: str
    found: str
    right: str

    def __str__(self) -> str:
        aside = "" if self.found == self.right else f"   (right: {self.right})"
        return f"  {self.given}  ->  {self.found}{aside}"


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """One model: how good it is, a few examples, pictures of its attention, and the page to look inside."""

    title: str
    quality: str
    examples: Sequence[Example]
    pictures: Sequence[Path]
    page: Path

    def __str__(self) -> str:
        return "\n".join([self.quality, *map(str, self.examples)])

    def html(self, folder: Path) -> str:
        """The chapter as part of the page in a folder."""
        rows = "".join(
            f"<tr><td>{escape(one.given)}</td><td{'' if one.found == one.right else ' class=wrong'}>"
            f"{escape(one.found)}</td></tr>"
            for one in self.examples
        )
        shown = "".join(
            f'<img src="{escape(path.relative_to(folder).as_posix())}" alt="{escape(path.stem)}">'
            for path in self.pictures
        )
        link = escape(self.page.relative_to(folder).as_posix())
        return (
            f"<h2>{escape(self.title)}</h2><p>{escape(self.quality)}</p><table>{rows}</table>{shown}"
            f'<p><a href="{link}">Look inside: every layer, head and token</a></p>'
        )


def save(chapters: Sequence[Chapter], folder: Path) -> Path:
    """Write the page of all chapters."""
    path = folder / "index.html"
    inside = "".join(chapter.html(folder) for chapter in chapters)
    checkpoints.write_text(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf8"><title>regard demo</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head>'
        f"<body><h1>What four models look at</h1>{inside}</body></html>\n",
    )
    return path
