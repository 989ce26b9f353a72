"""A mkdocs hook that links: names of the library to the reference, citations to the papers, papers to the chapters.

In the book, the guides and the other pages, the first `Name` of each section that is public becomes a link to its
entry, and an author with a year to the line of the paper. Each paper lists the chapters that name it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import regard

DOCS = Path(__file__).parents[1]
PAPERS = "book/papers.md"
FIRST_ROOMS = ("regard", "regard.nn", "regard.models", "regard.lens", "regard.views", "regard.decode", "regard.tasks")
# Names in lower case are words too; these are linked without their package.
FUNCTIONS = {
    "attend",
    "capture",
    "weights",
    "explain",
    "check_term",
    "rollout",
    "head_roles",
    "ablate",
    "value_norms",
    "greedy",
    "beam",
    "fit",
    "cross_entropy",
    "heatmap",
    "head_clusters",
}
ITEM = re.compile(r"^- (?P<name>[^:\n]+?): ", re.MULTILINE)
CODE = re.compile(r"(?<![`\[])`(?P<code>[^`\n]+)`(?![`\]])")
FENCE = re.compile(r"(^(?P<mark>```+|~~~+).*?^(?P=mark)$)", re.DOTALL | re.MULTILINE)
KEPT = re.compile(r"(\[[^\]]*\]\([^)]*\)|\[[^\]]*\]\[[^\]]*\]|<[^>\n]+>|^#.*$|^\|.*$|^ {4}.*$)", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Link the names and papers of a page."""
    uri = page.file.src_uri
    if uri == PAPERS:
        return papers_page(markdown)
    if uri.startswith("reference/") or uri in ("glossary.md", "index.md"):
        return markdown
    depth = uri.count("/")
    return "\n## ".join(linked(section, "../" * depth + PAPERS) for section in markdown.split("\n## "))


def linked(section: str, papers: str) -> str:
    """Link the first mention of each name and of each paper in a section, outside of code blocks and links."""
    seen: set[str] = set()

    def code(match: re.Match[str]) -> str:
        path = target(match["code"])
        if path is None or path in seen:
            return match[0]
        seen.add(path)
        return f"[`{match['code']}`][{path}]"

    def paper(match: re.Match[str]) -> str:
        slug = slug_of(match[0])
        if slug in seen:
            return match[0]
        seen.add(slug)
        return f"[{match[0]}]({papers}#{slug})"

    def plain(text: str) -> str:
        parts = CODE.split(text)
        # CODE has one group, so parts alternate between text and code
        return "".join(
            citations().sub(paper, part) if n % 2 == 0 else CODE.sub(code, f"`{part}`") for n, part in enumerate(parts)
        )

    def outside(text: str) -> str:
        return "".join(part if n % 2 else plain(part) for n, part in enumerate(KEPT.split(text)))

    pieces, at = [], 0
    for fence in FENCE.finditer(section):
        pieces += [outside(section[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*pieces, outside(section[at:])])


@cache
def targets() -> dict[str, str]:
    """Return the place of each public name, with its package and without."""
    found: dict[str, str] = {}
    rooms = [*FIRST_ROOMS, *(f"regard.{room}" for room in regard.ROOMS if f"regard.{room}" not in FIRST_ROOMS)]
    for room in rooms:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                path = f"{value.__module__}.{value.__qualname__}"
                found[f"{room}.{name}"] = path
                if name in FUNCTIONS or re.fullmatch(r"[A-Z]+[a-z]\w*", name):
                    found.setdefault(name, path)
    found["regard.capture"], found["regard.check"] = found["regard.lens.capture"], found["regard.lens.check"]
    return found


def target(code: str) -> str | None:
    """Return where the name at the start of a piece of code is documented, None for other code."""
    name = re.match(r"([A-Za-z_][\w.]*)(?:\(.*\))?$", code)
    return targets().get(name[1]) if name else None


@cache
def papers() -> list[str]:
    """Return the papers of the list, as they are cited."""
    return ITEM.findall((DOCS / PAPERS).read_text(encoding="utf8"))


@cache
def citations() -> re.Pattern[str]:
    """Return the pattern of all citations: author and year, or author (year)."""
    forms = []
    for name in sorted(papers(), key=len, reverse=True):
        *words, year = name.split()
        author = r"\s+".join(re.escape(word).replace(r"\&", "(?:&|and)") for word in words)
        forms.append(rf"{author}\s+\(?{year}\b")
    return re.compile("|".join(forms))


def slug_of(citation: str) -> str:
    """Return the anchor of a citation."""
    return re.sub(r"[^a-z0-9]+", "-", citation.lower().replace(" and ", " & ")).strip("-")


@cache
def chapters_of() -> dict[str, list[str]]:
    """Return for each anchor the chapters that cite the paper, as links from the page of papers."""
    found: dict[str, list[str]] = {}
    for path in sorted((DOCS / "book").glob("[0-9]*.md")):
        text = path.read_text(encoding="utf8")
        for slug in sorted({slug_of(" ".join(x.split())) for x in citations().findall(text)}):
            found.setdefault(slug, []).append(f"[{int(path.stem[:2])}]({path.name})")
    return found


def papers_page(markdown: str) -> str:
    """Give each paper an anchor, and the chapters that name it."""

    def item(text: str) -> str:
        name = ITEM.match(text)
        if name is None:
            return text
        slug = slug_of(name["name"])
        chapters = chapters_of().get(slug, [])
        words = f"\n  {'Chapters' if len(chapters) > 1 else 'Chapter'} {', '.join(chapters)}." if chapters else ""
        return f'- <a id="{slug}"></a>{text.rstrip()[2:]}{words}\n'

    head, *items = re.split(r"^(?=- )", markdown, flags=re.MULTILINE)
    return head + "".join(map(item, items))
