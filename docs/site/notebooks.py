"""Make a notebook of a chapter, and run one: `python docs/site/notebooks.py 04_scores folder`.

Text becomes Markdown cells, and Python, with the parts of the example that the page embeds, code cells. The last cell
captures attention and shows the tape. Running writes the figures into the folder and prints what the chapter quotes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BOOK, TAPES = ROOT / "docs" / "book", ROOT / "docs" / "tapes"
PYTHON = re.compile(r'^(?:\?\?\? note "[^"]*"\n\n)?(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$', re.S | re.M)
EMBEDDED = re.compile(r'--8<-- "(?P<path>[^":]+)(?::(?P<part>\w+))?"')
MARKER = re.compile(r"^ *# --8<-- \[(?:start|end):\w+\]\n", re.MULTILINE)
STYLE = (ROOT / "examples" / "book.mplstyle").read_text(encoding="utf8")
SETUP = f"""# Figures are written into this folder, in the style of the book.
import sys
from pathlib import Path

sys.argv = ["notebook", "."]
__file__ = str(Path("notebook.py").resolve())
Path("book.mplstyle").write_text({STYLE!r})"""


def notebook(stem: str) -> dict[str, Any]:
    """Return the notebook of a chapter."""
    text = (BOOK / f"{stem}.md").read_text(encoding="utf8").partition("\n## Exercises")[0]
    made = [markdown_cell(opening(stem)), code_cell(SETUP), *cells(text)]
    tape = TAPES / f"{stem}.py"
    if tape.is_file():
        made += [markdown_cell("## Look at it"), code_cell(tape.read_text(encoding="utf8"))]
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def opening(stem: str) -> str:
    """Return the line above a notebook."""
    return f"A chapter of the book of `regard`, generated from `docs/book/{stem}.md`; pictures and exercises are there."


def cells(text: str) -> Iterator[dict[str, Any]]:
    """Yield the cells of a page."""
    at = 0
    for found in PYTHON.finditer(text):
        yield from shown(text[at : found.start()])
        yield code_cell(embedded(re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)))
        at = found.end()
    yield from shown(text[at:])


def shown(text: str) -> Iterator[dict[str, Any]]:
    """Yield the Markdown cell of a text; pictures are left out, and equations are written between dollar signs."""
    text = re.sub(r"^!\[.*?\]\(.*?\)$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```math\n(.*?)^```$", r"$$\n\1$$", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    if text:
        yield markdown_cell(text)


def embedded(code: str) -> str:
    """Return code with the files, or parts of files, that it embeds."""
    return EMBEDDED.sub(lambda found: part_of(ROOT / found["path"], found["part"]), code)


def part_of(path: Path, part: str | None) -> str:
    """Return a file, or the parts of it between markers of a name."""
    text = path.read_text(encoding="utf8")
    if part is not None:
        text = "".join(re.findall(rf"# --8<-- \[start:{part}\]\n(.*?)# --8<-- \[end:{part}\]", text, re.DOTALL))
    return MARKER.sub("", text).strip()


def markdown_cell(text: str) -> dict[str, Any]:
    """Return a cell of text."""
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code_cell(code: str) -> dict[str, Any]:
    """Return a cell of code that has not run."""
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": code.strip()}


def run(book: dict[str, Any]) -> str | None:
    """Run the code cells one after the other, as a kernel would, and return what the last expression shows as HTML."""
    names: dict[str, Any] = {"__name__": "__main__"}
    value = None
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            tree, value = ast.parse(cell["source"]), None
            last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), names)
            if last is not None:
                value = eval(compile(last, "<cell>", "eval"), names)
    show = getattr(value, "_repr_html_", None)
    return None if show is None else show()


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    html = run(json.loads(json.dumps(notebook(stem := sys.argv[1]))))
    if (TAPES / f"{stem}.py").is_file() and (html is None or "<iframe" not in html):
        sys.exit("the last cell shows no tape")
