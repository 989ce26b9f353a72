"""The house: imports run downward only, `import regard` stays light, no file runs what it reads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import house
from tests.house import ROOMS

SOURCE = house.ROOT / "src" / "regard"
FILES = house.sources(house.ROOT)
# Files that every room may import, and that import no room.
LEAVES = {
    "argument_hints",
    "atomic_files",
    "checks",
    "data_fingerprint",
    "graph_recorder",
    "printable",
    "torch_internals",
}
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


# File names in two rooms: files about the same thing, beside the pairs of tasks/ and cli/. May only shrink.
SAME_FILE_NAMES = {
    "answering.py",  # the data, the task and its command
    "captioning.py",  # the task and its command
    "classification.py",  # the task and its command
    "language.py",  # the data, the task and its command
    "look.py",  # the task and its command
    "summarization.py",  # the task and its command
    "translation.py",  # the task and its command
    "flex.py",  # FlexAttention as the lens sees it and as a backend
    "sdpa.py",  # scaled_dot_product_attention as the lens sees it and as a backend
    "pairs.py",  # the data of a task, and its examples
    "batching.py",  # batches of examples, and a task's settings of them
    "averaging.py",  # the mean of checkpoints, the model made of it, and which ones a command takes
    "losses.py",  # the losses, and the protocol that training asks of them
    "padding.py",  # of batches, and as a model reads it
}
# Public classes that share a name. May only shrink.
SAME_CLASS_NAMES: set[str] = set()
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "os.system"}
PARTICIPLE_FUNCTIONS = 13  # may only fall
UPWARD = {"lens/tape/tape.py": {"regard.views"}}  # tape.view() opens the viewer, whose room is above


def room(path: Path) -> str:
    return house.room(path, house.ROOT)


def imported(path: Path) -> set[str]:
    """The rooms of ours a file imports."""
    names = {name for _, names in house.imports(path, house.ROOT) for name in names}
    return {name.split(".")[1] for name in names if name.startswith("regard.")} & (ROOMS.keys() | LEAVES)


def test_imports_run_downward_only():
    for path in FILES:
        if room(path) in ROOMS:
            assert imported(path) <= ROOMS[room(path)] | LEAVES | {room(path)}, path


def test_the_command_line_is_the_roof():
    for path in FILES:
        if room(path) != "cli":
            text = path.read_text(encoding="utf8")
            assert "from ..cli" not in text, path
            assert "regard.cli" not in text, path


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


def calls_that_execute(tree: ast.Module) -> list[str]:
    """Calls and imports that run what they read: eval, pickle, a shell."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += sorted({alias.name.split(".")[0] for alias in node.names} & BANNED_MODULES)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in BANNED_CALLS else []
            found += ["shell"] if any(keyword.arg == "shell" for keyword in node.keywords) else []
    return found


def test_no_file_executes_what_it_reads():
    for path in FILES:
        assert calls_that_execute(house.tree(path)) == [], path


@pytest.mark.parametrize("code", ["eval('1')", "import pickle", "torch.load('x')", "run('ls', shell=True)", "exec('')"])
def test_a_file_that_executes_what_it_reads_is_found(code):
    assert calls_that_execute(ast.parse(code)) != []


def test_functions_are_named_by_a_verb_and_its_object():
    """A name that is one participle says what was done, and not to what. The number may only fall."""
    assert len(house.participle_functions(house.ROOT)) <= PARTICIPLE_FUNCTIONS


def test_every_file_has_a_test_file_of_its_name():
    assert house.untested_files(house.ROOT) == []


def test_files_have_names_that_say_something():
    assert not {path.stem for path in FILES} & {"utils", "util", "common", "base", "misc", "helpers"}


def test_no_file_name_occurs_twice_within_a_room():
    for name, paths in house.files_by_name(house.ROOT).items():
        rooms = [path.parts[0] for path in paths]
        assert len(rooms) == len(set(rooms)), name


def test_few_file_names_occur_in_two_rooms():
    assert house.files_by_name(house.ROOT).keys() <= SAME_FILE_NAMES


def test_no_public_class_name_occurs_twice():
    assert house.classes_by_name(house.ROOT, public=True).keys() <= SAME_CLASS_NAMES


def test_no_files_import_each_other():
    assert house.circles(house.ROOT) == []


def test_names_of_a_room_above_are_not_reached_through_the_package_either():
    for place in house.upward_imports(house.ROOT):
        path, _, name = place.split(":")
        assert name.strip() in UPWARD.get(path, ()), place


def test_an_import_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d", "a"}, "e": set()}
    assert [part for part in house.strongly_connected(graph) if len(part) > 1] == [{"b", "c"}]


def private_symbols(path: Path) -> set[str]:
    """Names of PyTorch that begin with an underscore, and two that are private without one."""
    found = set()
    for node in ast.walk(house.tree(path)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {f"{node.module}: {name}" for name in names if name.startswith("_") and name != "__future__"}
        elif isinstance(node, ast.Attribute) and (node.attr.startswith("_") or node.attr == "next_id"):
            name = ast.unparse(node)
            private = re.fullmatch(r"(torch|torch_module|F|aten|forward_ad|overrides)(\.\w+)*\._[a-zA-Z]\w*", name)
            found |= {name} if private or name == "RemovableHandle.next_id" else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if node.value.startswith("_torchdynamo") else set()
    return found


def test_private_symbols_of_pytorch_are_in_one_file():
    named = {path.name: private_symbols(path) for path in FILES if path.name != "torch_internals.py"}
    assert {name: symbols for name, symbols in named.items() if symbols} == {}
    assert len(private_symbols(SOURCE / "torch_internals.py")) > 15
