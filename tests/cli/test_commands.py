"""What holds for every command: help with an example, one way to fail, and the rest of the house."""

from __future__ import annotations

import errno
import re
import warnings

import pytest
import torch
import typer

import regard
from regard.cli import commands
from regard.train import CheckpointError, NonFiniteError, ResourceError
from tests.cli.commands import run, well

TRAINED = [("train", command.name) for command in commands.train.registered_commands]
USED = [(command.name or command.callback.__name__,) for command in commands.app.registered_commands]


@pytest.mark.parametrize("command", [*TRAINED, *USED], ids=" ".join)
def test_help_has_an_example_and_a_word_on_every_option(command):
    shown = well(*command, "--help").out
    assert re.search(r"Examples?:", shown)
    assert f"regard {' '.join(command)} " in shown
    for line in shown.splitlines():
        if match := re.match(r"│ \*? *(--[\w-]+)(?:\s+--no-[\w-]+)?(?:\s+[A-Z]\S*| {3,}\S+\|\S+)?(.*)│", line):
            assert match[2].strip(), match[1]


def test_help_groups_the_flags():
    shown = well("train", "translation", "--help").out
    for panel in ("Run", "Training data", "Validation data", "Vocabulary", "Model", "Batching", "Training"):
        assert f"─ {panel} ─" in shown


def test_help_shows_no_types_of_python():
    for command in (("view",), ("train", "translation"), ()):
        shown = well(*command, "--help").out
        assert not re.search(r"<(bool|str|int|float|list|Path)", shown)
    assert "Usage: regard translate [OPTIONS] RUN..." in well("translate", "--help").out


def test_help_of_a_run_has_the_flags_of_its_task_only(translator):
    shown = well("evaluate", translator, "--help").out
    assert "--tokenize" in shown
    assert "--document-column" not in shown
    assert "--document-column" in well("evaluate", "--help").out


def test_flags_that_a_task_cannot_use_are_not_offered():
    assert "--forcing" in well("train", "translation", "--help").out
    for task in ("language", "answering", "classification", "captioning"):
        assert "--forcing" not in well("train", task, "--help").out


def test_the_version_is_that_of_the_package():
    assert well("--version").out == f"regard {regard.__version__}\n"


def test_help_begins_with_training():
    shown = well("--help").out
    assert shown.index("Train a model") < shown.index("built-in data") < shown.index("Translate standard input")


def test_without_a_command_help_is_shown_and_the_exit_code_is_2():
    for arguments in ((), ("train",)):
        ended = run(*arguments)
        assert ended.code == 2
        assert "Usage: " in ended.out
        assert ended.err == "error: expected a command; see --help\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("first\nsecond \x1b[2J"), 2, r"first second \x1b[2J"),
        (OSError(errno.EACCES, "Permission denied", "a.txt"), 2, "a.txt: Permission denied"),
        (CheckpointError("torn"), 3, "torn"),
        (NonFiniteError("nan"), 4, "nan"),
        (ResourceError("full"), 5, "full"),
        (torch.OutOfMemoryError("no memory"), 5, "out of memory: no memory; use a smaller batch, beam or model"),
    ],
)
def test_each_failure_has_its_exit_code_and_one_printable_line(error, code, line, monkeypatch):
    def fails(**options):
        raise error

    monkeypatch.setattr(commands, "app", fails)
    assert run("demo") == (code, "", f"error: {line}\n")


def test_memory_that_the_machine_does_not_have_ends_a_command_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(commands, "app", lambda **options: torch.empty(2**60))
    ended = run("demo")
    assert ended.code == 5
    assert re.fullmatch("error: out of memory: .*; use a smaller batch, beam or model\n", ended.err)


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_that_names_no_place_in_the_code(monkeypatch):
    monkeypatch.setattr(commands, "app", lambda **options: warnings.warn("the epoch restarts", stacklevel=1))
    assert run("demo") == (0, "", "warning: the epoch restarts\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupted_command_says_nothing(error, monkeypatch):
    def fails(**options):
        raise error

    monkeypatch.setattr(commands, "app", fails)
    assert run("demo") == (130, "", "")


def test_a_bug_is_not_taken_for_bad_input(monkeypatch):
    def fails(**options):
        raise ZeroDivisionError

    monkeypatch.setattr(commands, "app", fails)
    with pytest.raises(ZeroDivisionError):
        run("demo")
