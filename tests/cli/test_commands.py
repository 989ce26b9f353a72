"""What holds for every command: help with an example, one way to fail, and the rest of the house."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import warnings
from typing import Annotated

import pytest
import torch
import typer

import regard
from regard import cli
from regard.cli.runs import EVALUATIONS, shared_flags, task_settings
from regard.train import CheckpointError, NonFiniteError, ResourceError, checkpoint
from tests.cli.commands import SMALL, run, well

TRAINED = [("train", command.name) for command in cli.train.registered_commands]
USED = [(command.name or command.callback.__name__,) for command in cli.app.registered_commands]


@pytest.mark.parametrize("command", [*TRAINED, *USED], ids=" ".join)
def test_help_has_an_example_and_a_word_on_every_option(command):
    shown = well(*command, "--help").out
    assert re.search(r"Examples?:", shown)
    assert f"regard {' '.join(command)} " in shown
    for line in shown.splitlines():
        if match := re.match(r"│ \*? *(--[\w-]+)(?:\s+--no-[\w-]+)?\s+<[^>]*>(.*)│", line):
            assert match[2].strip(), match[1]


def test_help_groups_the_flags():
    shown = well("train", "translation", "--help").out
    for panel in ("Run", "Training data", "Validation data", "Vocabulary", "Model", "Batching", "Training"):
        assert f"─ {panel} ─" in shown


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

    monkeypatch.setattr(cli, "app", fails)
    assert run("anything") == (code, "", f"error: {line}\n")


def test_memory_that_the_machine_does_not_have_ends_a_command_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda **options: torch.empty(2**60))
    ended = run("anything")
    assert ended.code == 5
    assert re.fullmatch("error: out of memory: .*; use a smaller batch, beam or model\n", ended.err)


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_that_names_no_place_in_the_code(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda **options: warnings.warn("the epoch restarts", stacklevel=1))
    assert run("anything") == (0, "", "warning: the epoch restarts\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupted_command_says_nothing(error, monkeypatch):
    def fails(**options):
        raise error

    monkeypatch.setattr(cli, "app", fails)
    assert run("anything") == (130, "", "")


def test_a_bug_is_not_taken_for_bad_input(monkeypatch):
    def fails(**options):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(ZeroDivisionError):
        run("anything")


def test_explain_says_who_would_run_an_attention():
    shown = well("explain", "--shape", "1,8,4096,64", "--mask", "Causal() & Window(256)").out
    assert "attend 1 x 8 x 4096 x 4096, d = 64, float32" in shown
    assert "mask       Causal() & Window(256)" in shown
    assert "-> " in shown
    few = ["--keys", 9, "--kv-heads", 2, "--bias", "Alibi(8)", "--score", "Dot(cap=30.0)", "--normalize", "Entmax(1.5)"]
    shown = well("explain", "--shape", "2,8,5,16", *few, "--dtype", "float64", "--device", "cpu").out
    assert "attend 2 x 8 x 5 x 9, d = 16, float64, cpu" in shown
    assert "Entmax(" in shown


def test_explain_does_not_go_by_what_memory_held_before(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: torch.full(sizes, torch.nan, **options))
    assert "-> sdpa" in well("explain", "--shape", "1,8,64,16", "--mask", "Causal()").out


def test_benchmarks_are_those_of_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr("regard.cli.explain.REPOSITORY", tmp_path)
    assert run("bench") == (
        2,
        "",
        "error: the installed package does not contain the benchmarks; run this in a clone of the repository\n",
    )
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text(
        "import sys; open('told', 'w').write(' '.join(sys.argv[1:])); raise SystemExit(7)"
    )
    assert run("bench", "operator", "--only", "Causal").code == 7
    assert (tmp_path / "told").read_text() == "operator --only Causal"


def test_averages_are_of_the_last_checkpoints_of_a_run(translator, tmp_path):
    printed = well("average", translator, "--last", 2, "--out", tmp_path / "mean").lines
    assert printed == [str(tmp_path / "mean")]
    saved = [checkpoint.read_tensors(path) for path in checkpoint.all_checkpoints(translator)[-2:]]
    for name, x in checkpoint.read_tensors(tmp_path / "mean").items():
        torch.testing.assert_close(x, (saved[0][name] + saved[1][name]) / 2)
    chosen = checkpoint.all_checkpoints(translator)[-2:]
    well("average", *chosen, "--out", tmp_path / "again")
    assert checkpoint.read_tensors(tmp_path / "again").keys() == saved[0].keys()
    assert len(well("translate", tmp_path / "mean", stdin="ein Haus\n").lines) == 1


@pytest.mark.parametrize(("name", "marked"), [("plan.toml", False), ("plan.json", False), ("plan.json", True)])
def test_a_config_file_says_what_flags_say_and_flags_override_it(name, marked, files, tmp_path):
    plan = {
        "data": {"source": str(files / "a.de"), "target": str(files / "a.en")},
        "vocabulary": {"kind": "char"},
        "model": {"kind": "rnn", "dim": 8, "dropout": 0},
        "training": {"steps": 3, "rate": 0.5},
    }
    toml = "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for section, values in plan.items()
    )
    encoding = "utf-8-sig" if marked else "utf-8"
    (tmp_path / name).write_text(toml if name.endswith("toml") else json.dumps(plan), encoding=encoding)
    well("train", "translation", "--config", tmp_path / name, "--steps", 1, "--dim", 12, "--out", tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "step-00000001" / "plan.json").read_text())
    assert saved["training"]["steps"] == 1
    assert saved["training"]["rate"] == 0.5
    assert saved["model"] == {
        "kind": "rnn",
        "dim": 12,
        "hidden": None,
        "depth": None,
        "heads": 4,
        "cell": "gru",
        "dropout": 0,
        "smoothing": 0.1,
        "tied": None,
    }
    assert "valid" not in saved


def test_the_plan_of_a_run_is_a_config_file(translator, tmp_path):
    plan = translator / "best" / "plan.json"
    well("train", "translation", "--config", plan, "--steps", 4, "--out", tmp_path / "again")
    weights = [(run / "step-00000004" / "model.safetensors").read_bytes() for run in (translator, tmp_path / "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        (
            ["--schedule", "cosine", "--warmup", 1],
            {"kind": "Cosine", "peak": 1e-3, "steps": 4, "warmup": 1, "lowest": 0.0},
        ),
        (["--schedule", "inverse-sqrt", "--warmup", 9], {"kind": "InverseSquareRoot", "peak": 1e-3, "warmup": 9}),
        (["--forcing", "linear", "--forcing-k", 50], {"kind": "InverseSquareRoot", "peak": 1e-3, "warmup": 400}),
        (["--forcing", "inverse-sigmoid"], {"kind": "InverseSquareRoot", "peak": 1e-3, "warmup": 400}),
    ],
)
def test_schedules_have_names(flags, rate, files, tmp_path):
    data = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", *SMALL]
    well("train", "translation", *data, *flags, "--out", tmp_path / "run")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["rate"] == rate
    forcing = {
        "linear": {"kind": "Linear", "steps": 50, "lowest": 0.0},
        "inverse-sigmoid": {"kind": "InverseSigmoid", "k": 1000},
    }
    assert recipe["forcing"] == forcing.get(flags[1])


def test_the_best_checkpoint_is_chosen_by_the_metric_named(files, tmp_path):
    data = ["--pairs", files / "a.tsv", "--valid-pairs", files / "a.tsv", "--model", "rnn", *SMALL]
    well("train", "translation", *data, "--metric", "loss", "--schedule", "plateau", "--out", tmp_path / "run")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert (recipe["metric"], recipe["better"]) == ("loss", "lower")
    assert recipe["rate"]["kind"] == "Plateau"


def test_a_task_that_cannot_be_asked_is_named(translator):
    with pytest.raises(ValueError, match=r"is a run of the task 'translation', expected 'painting' or 'music'"):
        task_settings({"painting": None, "music": None}, [translator], {})


def test_a_flag_of_several_tasks_is_one_and_tells_what_each_takes_it_for():
    panels = shared_flags(EVALUATIONS)
    names = [flag.name for some in panels.values() for flag in some]
    assert len(names) == len(set(names))
    [beam] = [flag for flag in panels["Several tasks"] if flag.name == "--beam"]
    assert all(f"{task}: " in beam.help for task in ("Translation", "Summarization", "Captioning"))
    assert "Default: 3" in beam.help


def test_flags_of_one_name_that_mean_different_things_are_a_mistake():
    number = dataclasses.make_dataclass("Number", [("size", Annotated[int, "how many"], 3)])
    text = dataclasses.make_dataclass("Text", [("size", Annotated[str, "which"], "a")])
    with pytest.raises(TypeError, match="--size has different fields or types in painting, music; rename one"):
        shared_flags({"painting": number, "music": text})


def test_a_run_ends_with_the_average_it_was_asked_for(files, tmp_path):
    flags = ["--pairs", files / "a.tsv", "--model", "rnn", "--dim", 8, "--steps", 5, "--save-every", 1, "--keep", 1]
    for more in ([], ["--resume"]):  # the second time around, in place of the first
        ended = well("train", "translation", *flags, "--average", 3, "--out", tmp_path / "run", *more)
    assert ended.lines == [str(tmp_path / "run" / "averaged")]
    saved = [checkpoint.read_tensors(checkpoint.path_of(tmp_path / "run", step)) for step in (3, 4, 5)]
    for name, x in checkpoint.read_tensors(tmp_path / "run" / "averaged").items():
        torch.testing.assert_close(x, sum(tensors[name] for tensors in saved) / 3)


def test_weights_before_the_first_step_are_never_averaged(files, tmp_path):
    out = tmp_path / "run"
    flags = ["--pairs", files / "a.tsv", "--model", "rnn", "--dim", 8, "--steps", 4, "--save-every", 2]
    told = well("train", "translation", *flags, "--average", 3, "--out", out).err
    first, *trained = checkpoint.all_checkpoints(out)
    assert checkpoint.step_of(first) == 0
    more = "to keep more, train with a smaller --save-every and a larger --keep"
    few = f"{out} holds 2 checkpoints instead of the 3 to average; {more}"
    which = f"averaged {trained[0]}, {trained[1]}"
    assert told.splitlines()[-2:] == [few, which]
    again = well("average", out, "--last", 3, "--out", tmp_path / "mean")
    assert again.err.splitlines() == [few, which]
    well("average", *trained, "--out", tmp_path / "named")
    assert len({checkpoint.read_text(x, "manifest.sha256") for x in (out / "averaged", *tmp_path.glob("[mn]*"))}) == 1
    refused = run("average", first, *trained, "--out", tmp_path / "none")
    message = f"{first} is the checkpoint of step 0, which is untrained; name checkpoints of later steps"
    assert refused.err == f"error: {message}\n"
    for path in trained:
        checkpoint.remove(path)
    refused = run("average", out, "--out", tmp_path / "none")
    assert refused.err == f"error: {out} holds only the checkpoint of step 0, which is untrained; train the run first\n"
    assert not (tmp_path / "none").exists()


def test_checkpoints_from_before_and_after_a_run_was_told_otherwise_are_averaged(files, tmp_path):
    flags = ["--pairs", files / "a.tsv", "--model", "rnn", "--dim", 8, "--save-every", 1, "--out", tmp_path / "run"]
    well("train", "translation", *flags, "--steps", 1)
    told = well("train", "translation", *flags, "--steps", 2, "--average", 2, "--resume").err
    assert told.splitlines()[-1] == f"averaged {tmp_path}/run/step-00000001, {tmp_path}/run/step-00000002"


def test_different_models_are_not_averaged(translator, recurrent, tmp_path):
    ended = run("average", translator, recurrent, "--out", tmp_path / "mean")
    assert ended.code == 3
    assert "are of different models: config.json differs; average checkpoints of one run" in ended.err
    assert not (tmp_path / "mean").exists()
