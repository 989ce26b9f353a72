"""Bad input to every command: exit code 2, one line that says what is wrong and where, nothing written.

The cases are in `malformed.toml`, which says how to add one.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path
from string import Formatter

import pytest

from tests.cli.commands import run

pytestmark = pytest.mark.commands

TABLE = tomllib.loads(Path(__file__).with_name("malformed.toml").read_text(encoding="utf8"))
CASES = [(name, *case) for cases in TABLE["cases"].values() for name, case in cases.items()]


def content(value: object) -> bytes:
    """The bytes of a bad file."""
    match value:
        case str(text):
            return text.encode()
        case {"spaces": int(count)}:
            return b" " * count
        case {"bytes": str(literal)}:
            return ast.literal_eval(f"b'{literal}'")
    raise TypeError(f"a file must be text, spaces or bytes, got {value!r}")


def command_line(line: str) -> str:
    """A command line with the lines it begins with, and with bytes that are not UTF-8."""
    for name, beginning in TABLE["lines"].items():
        line = line.replace(f"{{{name}}}", beginning)
    return line.replace(r"\udcff", "\udcff")


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong") / "bad"
    folder.mkdir()
    for name, value in TABLE["files"].items():
        (folder / name).write_bytes(content(value))
    return folder


@pytest.mark.parametrize(("line", "pattern"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_is_answered_in_one_line(line, pattern, files, bad, tmp_path, request):
    line = command_line(line)
    places = {"files": files, "bad": bad, "out": tmp_path / "out"}
    runs = {name for _, name, _, _ in Formatter().parse(line) if name and name not in places}
    places |= {name: request.getfixturevalue(name) for name in runs}
    kept = [bad, *(places[name] for name in runs)]
    before = {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*")}
    ended = run(*shlex.split(line.format(**places)), stdin="ein Haus\n")
    assert ended.code == 2, ended
    [said] = ended.err.splitlines()
    assert said.startswith("error: ")
    assert re.search(pattern, said), said
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*")} == before


def test_input_that_is_not_text_is_named_by_its_line(translator):
    ended = run("translate", translator, stdin=b"ein Haus\nsch\xf6n\n")
    assert ended.code == 2
    assert ended.err == "error: standard input line 2: byte 4 is not valid UTF-8; convert it with iconv\n"


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(tmp_path):
    ended = run("train", "language", "--text", "\x1b[2J.txt", "--out", tmp_path / "out")
    assert ended.err == "error: \\x1b[2J.txt: no such file; check the path\n"


def test_names_of_cases_are_unique():
    names = [case[0] for case in CASES]
    assert len(set(names)) == len(names)
