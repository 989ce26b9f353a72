"""The groups of `tests/groups.toml` match pyproject.toml, the test files, .ci/run and CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_ignore_collect

ROOT = Path(__file__).parents[1]
GROUPS = tomllib.loads((ROOT / "tests" / "groups.toml").read_text(encoding="utf8"))
NAMES = GROUPS.keys() - {"core"}
APART = {"slow", "gpu", "nightly", "mutants"}  # run by nothing but their own command
BUILT_IN = {"parametrize", "usefixtures", "filterwarnings", "skipif", "skip", "xfail"}
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["tool"]["pytest"]["ini_options"]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
# Files whose absence from the core would be a hole in it.
CORE = ("test_conformance.py", "test_invariants.py", "test_conventions.py", "lens/test_capture.py")


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "tests"))


def marks(node: ast.AST) -> set[str]:
    """Names of the marks below a node of the syntax tree."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Attribute)
        and each.value.attr == "mark"
        and ast.unparse(each.value) == "pytest.mark"
    } - BUILT_IN


def file_marks(path: Path) -> set[str]:
    """Marks of every test of a file."""
    found = set()
    for node in syntax_tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found |= marks(node.value)
    return found


@cache
def has_core_tests(path: Path) -> bool:
    """Whether a test of the file has no mark."""
    if file_marks(path):
        return False
    tests = [(node, parents) for node, parents in functions(syntax_tree(path), ()) if node.name.startswith("test_")]
    return any(not set().union(*(marks_of(each) for each in (node, *parents))) for node, parents in tests)


def functions(node: ast.AST, parents: tuple[ast.ClassDef, ...]):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child, parents
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, (*parents, child))


def marks_of(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Marks of a whole test; a mark of one parameter, `pytest.param(..., marks=...)`, leaves the others in the core."""
    found = set()
    for decorator in node.decorator_list:
        inside = [each for each in ast.walk(decorator) if isinstance(each, ast.Call)]
        if not any("parametrize" in ast.unparse(each.func) for each in inside):
            found |= marks(decorator)
    return found


@pytest.fixture(scope="module")
def used() -> dict[Path, set[str]]:
    """The marks in each test file."""
    return {path: marks(syntax_tree(path)) for path in FILES}


def test_groups_are_the_marks_that_pyproject_declares():
    assert {line.partition(":")[0] for line in PYTEST["markers"]} == NAMES | APART


@pytest.mark.parametrize("name", sorted(NAMES))
def test_of_a_group_no_file_without_its_mark_is_imported(name, used):
    config = SimpleNamespace(option=SimpleNamespace(markexpr=f"({name}) and not slow and not gpu"))
    ignored = {path for path in FILES if pytest_ignore_collect(path, config)}
    assert ignored == {path for path in FILES if name not in used[path]} | {
        path for path in FILES if name in file_marks(path) and {"slow", "gpu"} & file_marks(path)
    }


def test_of_the_core_every_file_is_imported():
    config = SimpleNamespace(option=SimpleNamespace(markexpr=PYTEST["addopts"][PYTEST["addopts"].index("-m") + 1]))
    assert not any(pytest_ignore_collect(path, config) for path in FILES)


def test_plain_pytest_runs_the_core_alone():
    expression = PYTEST["addopts"][PYTEST["addopts"].index("-m") + 1]
    assert set(expression.strip().split(" and ")) == {f"not {name}" for name in NAMES | APART}


def test_every_mark_in_use_is_in_the_list(used):
    assert set().union(*used.values()) <= NAMES | APART


@pytest.mark.parametrize("name", sorted(NAMES))
def test_no_group_is_empty(name, used):
    assert any(name in marked for marked in used.values())


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_a_group_says_what_it_holds_and_how_long_it_takes(name):
    group = GROUPS[name]
    assert group.keys() == {"holds", "minutes", "ci"}
    assert len(group["holds"].split()) >= 5
    assert group["minutes"] > 0


def test_every_test_file_is_in_the_core_or_in_a_group(used):
    for path in FILES:
        assert has_core_tests(path) or used[path] & (NAMES | APART), path


@pytest.mark.parametrize("room", sorted({path.parent for path in FILES if path.parent.name not in APART}), ids=name_of)
def test_every_folder_of_tests_has_some_in_the_core(room):
    assert any(has_core_tests(path) for path in FILES if path.parent == room)


@pytest.mark.parametrize("name", CORE)
def test_what_everything_rests_on_is_in_the_core(name):
    assert has_core_tests(ROOT / "tests" / name)


def test_continuous_integration_runs_the_core_and_its_groups_within_25_minutes():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf8").splitlines()
    assert "make test" in lines
    [command] = [line for line in lines if line.startswith("make test-group")]
    run = re.search(r"GROUP='([^']*)'", command)[1].split(" or ")
    assert sorted(run) == sorted(name for name in NAMES if GROUPS[name]["ci"])
    assert sum(group["minutes"] for group in GROUPS.values() if group["ci"]) <= 25


def test_the_core_takes_at_most_seven_minutes():
    assert GROUPS["core"]["ci"]
    assert GROUPS["core"]["minutes"] <= 7


def test_contributing_has_every_group_with_its_minutes():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
    listed = dict(re.findall(r"^\| `(\w+)` \| .* \| (\d+) \|", text, flags=re.MULTILINE))
    assert {name: int(minutes) for name, minutes in listed.items()} == {
        name: group["minutes"] for name, group in GROUPS.items()
    }


def test_the_readme_says_how_long_the_core_takes():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf8").split())
    assert f"the tests at most {GROUPS['core']['minutes']}" in text
