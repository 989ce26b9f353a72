"""The built site: no request to the network, every public name, a table of parameters."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import regard

DOCS = Path(__file__).parents[1] / "docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
UNEXPLAINED = 50  # parameters without a meaning in their table; may only fall

pytestmark = [
    pytest.mark.chapters,
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; pip install 'regard[docs]'"),
]


def test_a_page_of_the_site_requests_nothing_from_the_network(site):
    pages = list(site.rglob("*.html"))
    written = [path for path in DOCS.rglob("*.md") if path.parent.name != "exercises"]  # parts of the chapters
    assert len(pages) >= len(written)
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


def test_a_chapter_has_a_notebook_and_a_page_of_the_viewer(site):
    for path in sorted((DOCS / "book").glob("[0-9]*.md")):
        assert json.loads((site / "book" / f"{path.stem}.ipynb").read_text("utf8"))["cells"]
    pages = sorted((site / "book" / "viewers").glob("*.html"))
    assert [page.stem for page in pages] == sorted(path.stem for path in (DOCS / "tapes").glob("*.py"))
    assert all(page.stat().st_size <= 500_000 for page in pages)


@pytest.mark.skipif(find_spec("playwright") is None or BROWSER is None, reason="playwright or chromium is not here")
def test_the_widget_is_moved_by_keys_and_the_viewer_is_loaded_when_seen(site):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        asked, failed = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failed.append(error))
        page.goto((site / "book" / "04_scores.html").as_uri())
        page.wait_for_selector(".softmax-words")
        assert not any("viewers" in url for url in asked)
        before = page.inner_text(".softmax-words")
        page.focus(".softmax-widget svg")
        page.keyboard.press("ArrowUp")
        assert page.inner_text(".softmax-words") != before
        page.focus(".softmax-widget input[type=checkbox]")
        page.keyboard.press("Space")
        assert page.inner_text(".softmax-row output").strip() == "0.000"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("document.querySelector('iframe.viewer').scrollIntoView()")
        page.frame_locator("iframe.viewer").locator(".stage > *").first.wait_for(timeout=20_000)
        browser.close()
    assert failed == []
