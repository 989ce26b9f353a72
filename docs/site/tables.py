"""A mkdocs hook: `<!-- table: FILE.csv -->` in a page becomes the table of that file, so that no number is retyped.

Links to source files, which the site does not hold, become their text.

Columns that say the same in every row, as machine and versions do, stand in a line above the table; spread and repeats
are left to the file.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEFT = ("what", "repeats", "met", "quartiles")
SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./(?:src|tests)/[^)]+\)")
MARK = re.compile(r"<!-- table: (\S+\.csv) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page before it is rendered."""
    markdown = SOURCE_LINK.sub(lambda link: link[1] if link[1].startswith("`") else f"`{link[1]}`", markdown)
    return MARK.sub(lambda mark: table(ROOT / mark[1]), markdown)


def table(path: Path) -> str:
    """A CSV file as Markdown."""
    with path.open(encoding="utf8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return f"`{path.relative_to(ROOT)}` holds no rows yet."
    names = [name for name in rows[0] if any(row[name] for row in rows) and not name.endswith(LEFT)]
    shared = [name for name in names if len(rows) > 1 and len({row[name] for row in rows}) == 1]
    shown = [name for name in names if name not in shared]
    above = ", ".join(f"{_plain(name)} {rows[0][name]}" for name in shared)
    lines = [[_plain(name) for name in shown], ["---"] * len(shown), *([row[name] for name in shown] for row in rows)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"`{path.relative_to(ROOT)}`{': ' if above else ''}{above}\n\n{table}"


def _plain(name: str) -> str:
    return name.replace("_", " ")
