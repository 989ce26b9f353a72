"""Notebooks, frames and the widget of the chapters; `tests/test_docs.py` runs the notebooks."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STEMS = [path.stem for path in sorted((DOCS / "book").glob("[0-9]*.md"))]


def site_script(name: str):
    spec = spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS, LIVE = site_script("notebooks"), site_script("live_chapters")


@pytest.mark.parametrize("stem", STEMS)
def test_the_notebook_of_a_chapter_has_all_of_its_example(stem):
    made = NOTEBOOKS.notebook(stem)
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    code = "\n".join(cell["source"] for cell in made["cells"] if cell["cell_type"] == "code")
    text = NOTEBOOKS.MARKER.sub("", (ROOT / "examples" / f"{stem}.py").read_text(encoding="utf8"))
    missing = [line for line in text.splitlines() if line.strip() and line not in code]
    assert missing == []
    assert "--8<--" not in code
    assert not any("```python" in cell["source"] for cell in made["cells"])


def test_a_notebook_is_run_cell_by_cell_and_shows_its_last_expression():
    cells = [NOTEBOOKS.code_cell("x = 1"), NOTEBOOKS.markdown_cell("text"), NOTEBOOKS.code_cell("x + 1")]
    assert NOTEBOOKS.run({"cells": cells}) is None
    shown = "class Shown:\n    def _repr_html_(self):\n        return '<p>'\nShown()"
    assert NOTEBOOKS.run({"cells": [NOTEBOOKS.code_cell(shown)]}) == "<p>"


@pytest.mark.parametrize("stem", STEMS)
def test_a_chapter_has_its_living_parts(stem):
    text = (DOCS / "book" / f"{stem}.md").read_text(encoding="utf8")
    page = LIVE.with_living_parts(text, stem)
    assert f'href="{stem}.ipynb"' in page
    assert f'data-src="viewers/{stem}.html"' in page
    assert (DOCS / "tapes" / f"{stem}.py").is_file()
    assert ("softmax-widget" in page) == (stem == "04_scores")
    assert "Exercise" in page
    assert " src=" not in page[page.index("<iframe") :].partition(">")[0]  # a script sets it when the frame is seen


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
def test_the_widget_has_the_numbers_of_torch():
    script = (
        "const w = require(process.argv[1]); const found = JSON.parse(process.argv[2]).map(([q, scale, visible, c]) =>"
        " [w.weights(q, w.KEYS, scale, visible), w.gradient(q, w.KEYS, scale, visible, c)]);"
        " console.log(JSON.stringify([w.KEYS, found]));"
    )
    torch.manual_seed(0)
    cases = [
        [torch.randn(2).tolist(), scale, (torch.rand(6) > hidden).tolist(), chosen]
        for scale, hidden, chosen in ((0.0, 0.0, 0), (1.0, 0.3, 2), (7.5, 0.5, 5), (20.0, 0.0, 1), (2.0, 1.0, 3))
    ]
    command = ["node", "-e", script, str(DOCS / "softmax_widget.js"), json.dumps(cases)]
    keys, found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    k = torch.tensor(keys, dtype=torch.float64)
    for (query, scale, visible, chosen), (weights, gradient) in zip(cases, found, strict=True):
        q = torch.tensor(query, dtype=torch.float64, requires_grad=True)
        scores = (scale * (k @ q)).masked_fill(~torch.tensor(visible), -torch.inf)
        A = scores.softmax(-1) if any(visible) else scores * 0
        A = A.nan_to_num()
        torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), A.detach())
        want = torch.autograd.grad(A[chosen], q)[0] if any(visible) else torch.zeros(2, dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), want)
