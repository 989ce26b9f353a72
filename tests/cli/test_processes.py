"""Commands as processes of their own: pipes, signals, and several that train together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from regard.train import checkpoint
from tests.cli.commands import SMALL, SOURCE, well

pytestmark = pytest.mark.processes

REGARD = [sys.executable, "-m", "regard"]
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(*arguments):
    process = subprocess.Popen(
        [*REGARD, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ALONE,
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


def test_lines_go_in_at_one_end_and_come_out_at_the_other(translator):
    with started("translate", translator, "--beam", 1) as process:
        out, err = process.communicate("".join(f"{line}\n" for line in SOURCE))
    assert process.returncode == 0, err
    assert out.splitlines() == well("translate", translator, "--beam", 1, stdin="\n".join(SOURCE)).lines


@pytest.mark.parametrize(
    ("task", "data", "use", "given"),
    [
        (
            "summarization",
            "--documents {files}/news --summaries {files}/headlines",
            "summarize {run}",
            "The fox met Ute\n",
        ),
        ("answering", "--data {files}/squad.json", "answer {run} --document {files}/bridge.txt", "What?\n"),
    ],
)
def test_a_task_goes_from_files_to_what_its_model_says(task, data, use, given, files, tmp_path):
    places = {"files": files, "run": tmp_path / "run"}
    with started("train", task, *data.format(**places).split(), *SMALL, "--out", places["run"]) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == f"{places['run'] / 'step-00000004'}\n"
    with started(*use.format(**places).split()) as process:
        out, err = process.communicate(given)
    assert process.returncode == 0, err
    assert out == well(*use.format(**places).split(), stdin=given).out
    assert out.count("\n") == 1


def test_bad_input_ends_a_process_with_2_and_one_line(files, tmp_path):
    data = ["--source", files / "none", "--target", files / "a.en"]
    with started("train", "translation", *data, "--out", tmp_path / "run") as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == f"error: {files / 'none'}: no such file; check the path\n"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_is_no_error(translator):
    with started("translate", translator, "--beam", 1) as process:
        process.stdout.close()
        process.stdin.write("das Haus\n" * 3)
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_a_signal_saves_the_run_and_it_goes_on_as_if_nothing_had_been(files, tmp_path):
    flags = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", "--dim", 8, "--log-every", 1]
    flags += ["--warmup", 400]  # the default depends on the number of steps
    with started("train", "translation", *flags, "--steps", 100_000, "--out", tmp_path / "run") as process:
        while "step 3/" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        err = process.communicate()[1]
    assert process.returncode == 143
    assert "saved, resume from" in err
    assert "Traceback" not in err
    step = checkpoint.step_of(checkpoint.all_checkpoints(tmp_path / "run")[-1])
    ended = well("train", "translation", "--out", tmp_path / "run", "--resume", "--steps", step + 1)
    assert f"step {step + 1}/{step + 1}" in ended.err
    well("train", "translation", *flags, "--steps", step + 1, "--save-every", step + 1, "--out", tmp_path / "whole")
    weights = [checkpoint.path_of(tmp_path / run, step + 1) / "model.safetensors" for run in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_two_processes_train_one_run(files, tmp_path):
    flags = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", "--dropout", 0, *SMALL]
    command = ["train", "translation", *flags, "--batch-tokens", 16, "--limit", 8, "--out", tmp_path / "run"]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(29_000 + os.getpid() % 999),
    ]
    run = subprocess.run(
        [sys.executable, *torchrun, "-m", "regard", *map(str, command)], env=ALONE, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [str(tmp_path / "run" / "step-00000004")]
    numbers = json.loads((tmp_path / "run" / "step-00000004" / "training.json").read_text())
    assert numbers["batches"]["settings"]["ranks"] == 2
    assert len(well("translate", tmp_path / "run", stdin="das\n").lines) == 1


def test_full_disk_behind_standard_output_ends_a_process_with_5(translator):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "regard", "explain", "--shape", "1,1,8,8"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 5
    assert ended.stderr == (
        "error: standard output could not be written: No space left on device; make room on the disk, then try again\n"
    )


def test_two_processes_do_not_train_in_one_folder(files, tmp_path):
    command = [sys.executable, "-m", "regard", "train", "translation", "--out", str(tmp_path / "run")]
    command += ["--source", str(files / "a.de"), "--target", str(files / "a.en"), "--model", "rnn", "--dim", "16"]
    both = [
        subprocess.Popen([*command, "--steps", "60", "--seed", seed], stderr=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    refused = next(text for process, text in zip(both, said, strict=True) if process.returncode == 2)
    assert re.search(r"error: .*run (is in use by process \d+ on |already |is not empty)", refused)
    rows = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert len(rows) == len(set(rows)) == 2
