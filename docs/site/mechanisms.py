"""A mkdocs hook: `<!-- mechanisms -->` in a page becomes a table of all terms, each drawn and linked to its test.

The equation is the first line of the term's docstring. The picture is its matrix over the same queries and keys, and
the test the case of `tests/cases.py` that compares it with plain Python.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

import regard
from regard.ops.map_image import image_of_maps
from regard.ops.operator import weights

MARK = "<!-- mechanisms -->"
TOKENS, WIDTH = 24, 16
# For each slot: the term, a call that builds it, and the paper, as it is cited.
MECHANISMS = {
    "score": [
        ("Dot", "Dot()", "Vaswani et al. 2017"),
        ("Cosine", "Cosine(0.3)", "Graves et al. 2014"),
        ("Bilinear", "Bilinear(torch.randn(16, 16) / 4)", "Luong et al. 2015"),
        ("Additive", "Additive(torch.randn(16))", "Bahdanau et al. 2015"),
        ("Location", "Location(torch.randn(24, 16))", "Luong et al. 2015"),
    ],
    "mask": [
        ("Causal", "Causal()", "Vaswani et al. 2017"),
        ("Prefix", "Causal() | Prefix(8)", "Liu et al. 2018"),
        ("Window", "Causal() & Window(6)", "Beltagy et al. 2020"),
        ("Dilated", "Dilated(8, 3)", "Child et al. 2019"),
        ("Chunked", "Causal() & Chunked(8)", ""),
        ("Global", "Window(4) | Global(2)", "Beltagy et al. 2020"),
        ("Diagonal", "~Diagonal()", ""),
        ("Neighborhood", "Neighborhood((4, 6), 3)", ""),
        ("Near", "Near(torch.arange(24) * 0.5 + 6, 4)", "Luong et al. 2015"),
        ("Padding", "Padding((17,))", ""),
        ("Documents", "Documents(torch.arange(24) // 9)", "Krell et al. 2021"),
        ("Blocks", "Blocks(torch.eye(3).flip(0).bool() | torch.eye(3).bool(), 8)", "Zaheer et al. 2020"),
        ("Dense", "Dense(torch.rand(24, 24) > 0.5)", ""),
        ("Rule", "Rule(lambda b, h, i, j: (i + j) % 5 == 0)", ""),
    ],
    "bias": [
        ("Alibi", "Alibi(slopes=torch.tensor([0.5]))", "Press et al. 2022"),
        ("Relative", "Relative.shaw(torch.randn(9, 16) * 2)", "Shaw et al. 2018"),
        ("Gaussian", "Gaussian(torch.arange(24) * 0.5 + 6, 2.0)", "Yang et al. 2018"),
        ("Added", "Added(torch.randn(24, 24) * 2)", ""),
    ],
    "normalize": [
        ("Softmax", "Softmax()", "Vaswani et al. 2017"),
        ("SinkSoftmax", "SinkSoftmax(2.0)", "Miller 2023"),
        ("Sigmoid", "Sigmoid(-3.0)", "Ramapuram et al. 2024"),
        ("Sparsemax", "Sparsemax()", "Martins & Astudillo 2016"),
        ("Entmax", "Entmax(1.5)", "Peters et al. 2019"),
        ("Hard", "Hard()", "Bengio et al. 2013"),
        ("Tapered", "Tapered(Softmax(), Gaussian(torch.arange(24) * 0.5 + 6, 2.0))", "Luong et al. 2015"),
    ],
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark of a page."""
    return markdown.replace(MARK, "\n".join(map(section, MECHANISMS))) if MARK in markdown else markdown


def section(slot: str) -> str:
    """Return the heading and the table of one slot."""
    rows = [row(slot, *entry) for entry in MECHANISMS[slot]]
    head = "| paper | equation | one line of regard | picture | test |\n|---|---|---|---|---|"
    return "\n".join([f"\n## {slot.capitalize()}\n", head, *rows, ""])


def row(slot: str, name: str, code: str, paper: str) -> str:
    """Return one row of a table."""
    anchor = re.sub(r"[^a-z0-9]+", "-", paper.lower()).strip("-")
    cited = f"[{paper}](book/papers.md#{anchor})" if paper else "–"
    cells = (
        cited,
        f"`{equation(name)}`",
        f"[`{name}`][{getattr(regard, name).__module__}.{name}] `attend(q, k, v, {slot}={code})`",
        image_of_maps(matrix(slot, code)[:1, :1], cell_pixels=4, alt=f"{slot}={code}"),
        f"`{case(name)}`",
    )
    return f"| {' | '.join(cells)} |"


def equation(name: str) -> str:
    """Return the first line of a docstring, without what follows the formula."""
    line = (inspect.getdoc(getattr(regard, name)) or "").split("\n")[0]
    line = re.sub(r" \([^()]*\d{4}[^()]*\)", "", line)
    return re.split(r"[:;] |\. (?=[A-Z])|, any |, where ", line)[0].rstrip(".").replace("`", "")


def matrix(slot: str, code: str) -> torch.Tensor:
    """Return the weights of a term over queries and keys that change slowly, as those of a text do."""
    torch.manual_seed(0)
    q = k = torch.randn(1, 1, TOKENS, WIDTH).cumsum(2) / 3
    term = eval(code, {"torch": torch, **{name: getattr(regard, name) for name in regard.__all__}})
    return weights(q, k, **{slot: term}).dense()


def case(name: str) -> str:
    """Return the name of the term's case in `tests/cases.py`."""
    return {"Prefix": "Prefix-LM", "Relative": "Relative-shaw", "Global": "Longformer", "Softmax": "Dot"}.get(
        name, name
    )
