"""Every snippet of the README and the contributing guide runs, and the examples with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def test_the_readme_has_snippets():
    assert SNIPPETS


def test_snippets_run_one_after_the_other(tmp_path):
    run = _run(["-c", "\n".join(SNIPPETS)], tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    run = _run([str(path)], tmp_path)
    assert run.returncode == 0, run.stderr
    assert list(tmp_path.rglob("*.png"))


def test_files_the_readme_names_exist():
    for name in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / name).exists(), name


def _run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
