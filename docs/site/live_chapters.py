"""A mkdocs hook: chapters get their notebook, the viewer over a tape of their own, a widget, and their exercises.

`docs/tapes/NAME.py` makes the tape of a chapter; its page is written beside the chapter when the site is built, and a
frame loads it when it comes into sight. `docs/exercises/NAME.md` takes the place of the section "Exercises".
"""

from __future__ import annotations

import json
import re
from html import escape
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
TAPES, EXERCISES, WIDGETS = DOCS / "tapes", DOCS / "exercises", {"04_scores": "softmax_widget.html"}
CHAPTER = re.compile(r"book/(\d\d_\w+)\.md")
MEGABYTES = 1  # the page holds all weights of a short text and stays below 0.5 MB


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Add the living parts to a chapter."""
    found = CHAPTER.fullmatch(page.file.src_uri)
    return with_living_parts(markdown, found[1]) if found else markdown


def with_living_parts(markdown: str, stem: str) -> str:
    """Return a chapter with its notebook, widget, viewer and exercises."""
    head, mark, rest = markdown.partition("\n## ")
    link = f'<p><a href="{stem}.ipynb" download>This chapter as a notebook</a></p>'
    body, _, _ = f"{head}\n{link}\n{mark}{rest}".partition("\n## Exercises\n")
    parts = [body.rstrip()]
    if stem in WIDGETS:
        parts.append((Path(__file__).parent / WIDGETS[stem]).read_text(encoding="utf8").strip())
    parts.append(frame(stem))
    parts.append((EXERCISES / f"{stem}.md").read_text(encoding="utf8").strip())
    return "\n\n".join(parts) + "\n"


def frame(stem: str) -> str:
    """Return the section with the viewer of a chapter."""
    caption = caption_of(stem)
    return (
        f"## Look at it\n\n{caption} Click a head to open its map; `?` explains the views.\n\n"
        f'<iframe class="viewer" sandbox="allow-scripts allow-downloads" data-src="viewers/{stem}.html" '
        f'title="{escape(caption)}"></iframe>\n\n'
        f'<p><a href="viewers/{stem}.html" target="_blank">Open it in a window of its own</a></p>'
    )


def caption_of(stem: str) -> str:
    """Return the first comment of the file that makes a tape."""
    lines = (TAPES / f"{stem}.py").read_text(encoding="utf8").splitlines()
    text = " ".join(line[2:] for line in lines[: next(n for n, x in enumerate(lines) if not x.startswith("# "))])
    return text if text.endswith(".") else f"{text}."


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the notebooks of all chapters and the pages of their tapes."""
    folder = Path(config["site_dir"]) / "book"
    (folder / "viewers").mkdir(exist_ok=True)
    spec = spec_from_file_location("notebooks", Path(__file__).with_name("notebooks.py"))
    assert spec is not None
    assert spec.loader is not None
    notebooks = module_from_spec(spec)
    spec.loader.exec_module(notebooks)
    for path in sorted((DOCS / "book").glob("[0-9]*.md")):
        text = json.dumps(notebooks.notebook(path.stem), ensure_ascii=False, indent=1)
        (folder / f"{path.stem}.ipynb").write_text(text, encoding="utf8")
    for path in sorted(TAPES.glob("*.py")):
        tape_of(path).page(name=path.stem, megabytes=MEGABYTES).save(folder / "viewers" / f"{path.stem}.html")


def tape_of(path: Path) -> Any:
    """Return the tape that a file makes."""
    names: dict[str, Any] = {"__name__": "tape"}
    exec(compile(path.read_text(encoding="utf8"), str(path), "exec"), names)
    return names["tape"]
