"""The table of commands: help and bad flags are answered by it, and nothing heavy is imported for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from regard.cli import command_table, commands
from regard.cli.command_table import TableGroup, read_table
from tests.cli.commands import run, well

ANSWERED = [("--help",), ("--version",), ("look", "--nope"), ("train", "translation", "--stepz", "4"), ("nope",)]


def test_what_the_table_answers_needs_no_torch():
    code = f"""
import sys
from regard.cli import main
for arguments in {ANSWERED!r}:
    try:
        main(arguments)
    except SystemExit:
        pass
print([name for name in ("torch", "numpy", "regard.cli.commands") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    assert "No such option: --stepz (Possible options: --seed, --steps, --tied); see --help" in done.stderr


@pytest.mark.parametrize("command", [("view",), ("train", "language"), ("average",), ("bench",)], ids=" ".join)
def test_the_table_shows_the_help_of_the_command_itself(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    shown = well(*command, "--help").out
    commands.app([*command, "--help"], standalone_mode=False, prog_name="regard")
    assert shown == capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lok", "x"), "No such command 'lok'"),
        (("average", "x"), "Missing option '--out'"),
        (("demo", "--steps", "x"), "Invalid value for '--steps'"),
        (("look", "x", "--device", "tpu"), "Invalid value for '--device'"),
        (("look", "x", "--device", "cpu", "--device", "cpu"), "--device was given 2 times"),
    ],
)
def test_bad_arguments_are_answered_before_the_command_is_imported(arguments, said, monkeypatch):
    monkeypatch.setattr(commands, "app", lambda **options: pytest.fail("the command ran"))
    done = run(*arguments)
    assert done.code == 2
    assert said in done.err


def test_arguments_that_are_right_reach_the_command(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "app", lambda args, **options: seen.append(args))
    for arguments in (
        ["demo", "--out", "a"],
        ["bench", "operator", "--only", "window"],
        ["train", "language", "--out", "a"],
    ):
        assert run(*arguments).code == 0
        assert seen.pop() == arguments


def test_the_shell_completes_commands_and_flags(monkeypatch):
    group = TableGroup(name="regard")
    assert {"look", "train", "translate"} <= set(group.list_commands(None))
    assert group.get_command(None, "nothing") is None
    assert "--show-completion" in well("--help").out
    monkeypatch.setenv("_REGARD_COMPLETE", "complete_bash")
    for words, place, expected in (("regard tra", 1, ["train", "translate"]), ("regard view --me", 2, ["--megabytes"])):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(place))
        assert run().out.split() == expected


def test_the_table_is_read_once():
    assert read_table() is command_table.read_table()
