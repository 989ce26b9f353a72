"""Tests that prove themselves: each seeded bug turns the test named beside it red; without it that test is green."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant

pytestmark = pytest.mark.mutants

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KILLERS: dict[str, set[str]] = defaultdict(set)  # by file
for mutant in MUTANTS:
    KILLERS[mutant.killer.split("::")[0]].add(mutant.killer)

# What judges by the reference, the oracle or another backend counts for no mutant.
COMPARISONS = (
    "test_conformance.py",
    "test_invariants.py::test_every_pair_of_backends_agrees",
    "test_invariants.py::test_huge_scores",
    "ops/test_weights.py::TestAgainstTheMatrix",
    "ops/test_weights.py::test_the_gradient_is_that_of_the_reference",
    "ops/test_weights.py::test_blocks_of_the_usual_size",
    "ops/test_weights.py::TestStatistic::test_it_is_that_of_the_reference",
    "ops/test_weights.py::TestStatistic::test_a_row_that_sees_no_key",
    "ops/test_indexing.py::test_an_index",
    "ops/test_indexing.py::test_any_index",
    "ops/test_indexing.py::test_every_term",
    "ops/test_indexing.py::test_parts_have_the_gradient_of_the_reference",
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The library, to be broken at will."""
    return shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))


def run(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """The outcome of those tests over that copy of the library."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.mutants.import_guard", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not gpu and not nightly"]  # a killer may be in any group
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "REGARD_"))}
    path = os.pathsep.join(map(str, (copy, ROOT)))
    env = clean | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "REGARD_COPY": str(copy)}
    tests = tuple(f"tests/{test}" for test in tests)
    return subprocess.run([*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug.replace(" ", "-"))
def test_a_seeded_bug_turns_its_test_red(mutant: Mutant, copy: Path):
    file = copy / "regard" / mutant.file
    text = file.read_text(encoding="utf8")
    assert text.count(mutant.old) == 1, f"no longer applies: {mutant.file} must hold once\n{mutant.old}"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf8")
    done = run(copy, mutant.killer)
    # A broken import or an unknown test fails too, and proves nothing: the test itself must be what failed.
    red = f"\nFAILED tests/{mutant.killer}" in done.stdout
    assert red, f"survived, exit {done.returncode}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("file", KILLERS)
def test_without_a_bug_the_same_tests_are_green(file: str, copy: Path):
    done = run(copy, *sorted(KILLERS[file]))
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


def test_no_bug_is_left_to_a_comparison_with_the_reference():
    assert [mutant.bug for mutant in MUTANTS if mutant.killer.startswith(COMPARISONS)] == []


def test_every_bug_is_seeded_once():
    patches = {(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}
    assert len({mutant.bug for mutant in MUTANTS}) == len(patches) == len(MUTANTS) >= 45
