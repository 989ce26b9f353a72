"""The house: imports run downward only, `import regard` stays light, no file runs what it reads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "regard"
FILES = sorted(SOURCE.rglob("*.py"))

# What each room may import of ours.
ROOMS = {
    "kernels": set(),
    "ops": {"kernels"},
    "nn": {"ops", "kernels"},
    "models": {"nn", "ops", "kernels"},
    "data": set(),
    "train": set(),
    "decode": set(),
    "lens": {"nn", "ops", "kernels"},
    "tasks": {"models", "nn", "ops", "kernels", "data", "train", "decode", "lens"},
    "views": {"lens", "nn", "ops", "kernels"},
}
LEAVES = {"checks"}  # files that every room may import, and that import no room
LATER = (
    "triton",
    "matplotlib",
    "transformers",
    "starlette",
    "uvicorn",
    "typer",
    "rich",
    "tokenizers",
    "PIL",
    "sklearn",
    "sacrebleu",
    "rouge_score",
    "flash_attn",
    "flash_attn_interface",
    "xformers",
)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms of ours a file imports."""
    package = ["regard", *path.relative_to(SOURCE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
        found |= {name.split(".")[1] for name in names if name.startswith("regard.")}
    return found & (ROOMS.keys() | LEAVES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_downward_only(path):
    if room(path) in ROOMS:
        assert imported(path) <= ROOMS[room(path)] | LEAVES | {room(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_command_line_is_the_roof(path):
    if room(path) != "cli":
        text = path.read_text(encoding="utf8")
        assert "from ..cli" not in text
        assert "regard.cli" not in text


def test_every_room_is_on_the_plan():
    rooms = {room(path) for path in FILES}
    assert rooms <= ROOMS.keys() | LEAVES | {"__init__", "cli", "__main__"}


def test_within_ops_terms_know_nothing_of_backends():
    for path in (SOURCE / "ops" / "terms").rglob("*.py"):
        text = path.read_text(encoding="utf8")
        assert "backends" not in text
        assert "dispatch" not in text


def test_import_regard_alone_is_light():
    code = f"import sys, regard; print([m for m in {LATER!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_commands_do_not_wait_for_the_compiler():
    slow = ["torch.nn.attention.bias", "torch._dynamo"]
    code = f"import sys, regard.cli; print([m for m in {slow} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_executes_what_it_reads(path):
    banned_calls = {"eval", "exec", "compile", "__import__"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"pickle", "marshal", "shelve", "dill"}
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in banned_calls
            if isinstance(node.func, ast.Attribute):
                assert ast.unparse(node.func) not in {"torch.load", "yaml.load", "os.system"}
            assert not any(keyword.arg == "shell" for keyword in node.keywords)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_hold_one_idea_each(path):
    assert len(path.read_text(encoding="utf8").splitlines()) <= 460
    assert path.stem not in {"utils", "util", "common", "base", "misc", "helpers"}
