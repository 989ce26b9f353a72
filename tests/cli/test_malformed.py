"""Bad input to every command: exit code 2, one line that says what is wrong and where, nothing written.

The cases are in `malformed.toml`, which says how to add one.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from string import Formatter

import pytest

from tests.cli.commands import run

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


def test_more_attention_than_a_tape_holds_is_refused_before_anything_is_printed(translator, tmp_path):
    ended = run("translate", translator, "--attention", tmp_path / "a.safetensors", stdin="das\n" * 501)
    assert ended.code == 2
    assert ended.err == "error: --attention a.safetensors can hold 500 examples, got more; process fewer at a time\n"
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


ONTO = {
    "an image with where a classifier looked": "classify {seer} {tmp}/0.png --attention {tmp}/0.png",
    "an image with where words looked": "caption {captioner} {tmp}/0.png --attention {tmp}/0.png",
    "questions with their answers": "answer {answerer} --data {tmp}/squad.json --out {tmp}/squad.json",
    "weights with where sentences looked": "translate {translator} --attention {translator}/{weights}",
    "weights with links": "translate {translator} --alignments {translator}/{weights}",
    "weights with where documents looked": "summarize {summarizer} --attention {summarizer}/{weights}",
    "weights with where a text looked": "generate {writer} --attention {writer}/{weights}",
    "weights with where questions looked": "answer {answerer} --data {tmp}/squad.json --attention {answerer}/{weights}",
}


@pytest.mark.parametrize("line", ONTO.values(), ids=ONTO)
def test_what_is_read_is_not_written_over(line, files, tmp_path, request):
    for name in ("scenes/0.png", "squad.json"):
        shutil.copy(files / name, tmp_path)
    runs = [name for _, name, _, _ in Formatter().parse(line) if name not in (None, "tmp", "weights")]
    places = {name: request.getfixturevalue(name) for name in runs}
    folder = places[runs[0]]
    places |= {"tmp": tmp_path, "weights": next(folder.rglob("model.safetensors")).relative_to(folder)}
    before = {path: path.stat().st_mtime_ns for kept in (tmp_path, folder) for path in kept.rglob("*")}
    ended = run(*shlex.split(line.format(**places)), stdin="ein Haus\n")
    assert ended.code == 2, ended
    refused = "(is an input of this command|exists already in .*, an input of this command)"
    assert re.fullmatch(f"error: .* {refused}.*\n", ended.err)
    assert {path: path.stat().st_mtime_ns for kept in (tmp_path, folder) for path in kept.rglob("*")} == before


def test_standard_input_is_not_written_over(translator, tmp_path):
    (tmp_path / "in.de").write_text("ein Haus\n")
    command = [sys.executable, "-m", "regard", "translate", translator, "--alignments", tmp_path / "in.de"]
    with (tmp_path / "in.de").open() as lines:
        ended = subprocess.run(command, stdin=lines, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.fullmatch("error: .*in.de is the standard input of this command and would be .*\n", ended.stderr)
    assert (tmp_path / "in.de").read_text() == "ein Haus\n"


def test_names_of_cases_are_unique():
    names = [case[0] for case in CASES]
    assert len(set(names)) == len(names)
