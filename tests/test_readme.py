"""Every snippet of the README and the docs runs, every file they name exists, and the examples run with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf8"), flags=re.DOTALL)


def test_the_readme_has_snippets():
    assert snippets(ROOT / "README.md")


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run_one_after_the_other(page, tmp_path):
    run = _run(["-c", "\n".join(snippets(page))], tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    run = _run([str(path)], tmp_path)
    assert run.returncode == 0, run.stderr
    assert list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_a_page_names_exist(page):
    for name in re.findall(r"\]\(((?!http)[^)#]+)\)", page.read_text(encoding="utf8")):
        assert (page.parent / name).exists(), name


def _run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
