"""Equations of the book become MathML when the site is built."""

from __future__ import annotations

import re
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "docs" / "book").glob("[0-9]*.md"))

pytestmark = [
    pytest.mark.chapters,
    pytest.mark.skipif(find_spec("latex2mathml") is None, reason="pip install 'regard[docs]'"),
]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = spec_from_file_location("equations", ROOT / "docs" / "site" / "equations.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_every_equation_of_a_chapter_is_converted(page, hook):
    seen = SimpleNamespace()
    markdown = hook.on_page_markdown(page.read_text(encoding="utf8"), page=seen)
    assert seen.equations
    for equation in seen.equations:
        assert equation.count("<math") == 1
        # what the converter does not know it leaves as letters
        assert not re.search(r"<m[io]>(?:&(?!#)|\\)|\\\w|<mtext>\\", equation), equation
    assert "```math" not in markdown
    assert "$" not in re.sub(r"^ *```.*?^ *```|`[^`]*`", "", markdown, flags=re.DOTALL | re.MULTILINE)


def test_code_keeps_its_dollars_and_an_equation_its_underscores(hook):
    page = SimpleNamespace()
    text = "Set `$OUT`.\n\n    ```\n$a_1$\n    ```\n\nAn $a_1 + b_2$ here.\n\n```math\nc_i = 1\n```\n"
    markdown = hook.on_page_markdown(text, page=page)
    assert "`$OUT`" in markdown
    assert "\n$a_1$\n" in markdown
    html = hook.on_page_content("<p>An mathml0equation here.</p>\n<p>mathml1equation</p>", page=page)
    assert html.startswith("<p>An <math")
    assert html.count("<p>") == 1
    assert '<div class="equation"><math' in html
    assert html.count("<msub>") == 3
