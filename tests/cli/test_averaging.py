"""`regard average` and `--average`: the newest checkpoints of a run as one."""

from __future__ import annotations

import pytest
import torch

from regard.train import checkpoint
from tests.cli.commands import run, well

pytestmark = pytest.mark.commands


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
