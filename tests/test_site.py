"""The built site: no request to the network, every public name, a table of parameters."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import regard

DOCS = Path(__file__).parents[1] / "docs"
UNEXPLAINED = 50  # parameters without a meaning in their table; may only fall

pytestmark = [
    pytest.mark.chapters,
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; pip install 'regard[docs]'"),
]


def test_a_page_of_the_site_requests_nothing_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    for page in pages:
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.https?:[^>]+", page.read_text("utf8")), page


@pytest.mark.parametrize("room", ["", *regard.ROOMS])
def test_the_reference_has_every_public_name(site, room):
    package = f"regard.{room}".rstrip(".")
    html = (site / "reference" / f"{room or 'operator'}.html").read_text("utf8")
    found = set(re.findall(r'id="([^"]+)"', html))
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if f"{package}.{name}" not in found] == []


def test_attend_comes_first(site):
    html = (site / "reference" / "operator.html").read_text("utf8")
    names = re.findall(r'<h3 id="[\w.]+\.(\w+)"', html)
    assert names[:3] == ["attend", "weights", "explain"]


def test_parameters_are_tables_with_a_meaning(site):
    pages = {path.stem: path.read_text("utf8") for path in (site / "reference").glob("*.html")}
    assert sum(html.count("doc-section-item") for html in pages.values()) > 1000
    assert sum(html.count("<p>–</p>") for html in pages.values()) <= UNEXPLAINED
    capture = pages["lens"].partition('id="regard.lens.capture.capture"')[2].partition("<h2")[0]
    assert "<table>" in capture
    assert "<code>layout</code>" in capture
    for meaning in re.findall(r"<td>\s*<code>\w+</code>(?:(?!</tr>).)*", capture, flags=re.DOTALL):
        assert "<p>–</p>" not in meaning


def test_chapters_papers_and_reference_link_to_each_other(site):
    chapter = (site / "book" / "04_scores.html").read_text("utf8")
    assert 'href="papers.html#vaswani-et-al-2017"' in chapter
    assert 'href="../reference/operator.html#regard.ops.terms.scores.Cosine"' in chapter
    papers = (site / "book" / "papers.html").read_text("utf8")
    assert 'href="https://arxiv.org/abs/1706.03762"' in papers
    assert 'href="04_scores.html"' in papers
    assert 'href="../book/04_scores.html"' in (site / "reference" / "operator.html").read_text("utf8")
