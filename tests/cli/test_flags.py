"""What is said to Python, said to the command line."""

from __future__ import annotations

import json

import pytest

from regard.cli.flags import Flag, with_flag_names
from tests.cli.commands import SMALL, run, well

pytestmark = pytest.mark.commands

FLAGS = [
    Flag("vocabulary", "kind", "--tokenizer", str, ""),
    Flag("model", "kind", "--model", str, ""),
    Flag("model", "kv_heads", "--kv-heads", int, ""),
    Flag("model", "heads", "--heads", int, ""),
    Flag("model", "mask", "--mask", str, ""),
    Flag("model", "joint", "--joint", bool, ""),
    Flag("data", "source", "--source", str, ""),
    Flag("valid", "source", "--valid-source", str, ""),
]


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("[model]: got kind='rnn'; choose kind='gpt'", "[model]: got --model rnn; choose --model gpt"),
        ("got kind='rnn'", "got kind='rnn'"),
        ("got heads=6 and kv_heads=4; pass kv_heads=1, 2", "got --heads 6 and --kv-heads 4; pass --kv-heads 1, 2"),
        ("pass heads=, or kv_heads=", "pass --heads, or --kv-heads"),
        ("got mask='Window(3) & Causal()': no", "got --mask 'Window(3) & Causal()': no"),
        ("pass joint=True, not joint=False", "pass --joint, not --no-joint"),
        ("a.toml [valid]: write source=a.de", "a.toml [valid]: write --valid-source a.de"),
        ("data/heads=3/a.txt: no", "data/heads=3/a.txt: no"),
        ("kv_heads must be 1 or more, got 0", "--kv-heads must be 1 or more, got 0"),
        ("[model]: kind must be 'gpt', got 'rnn'", "[model]: --model must be 'gpt', got 'rnn'"),
        ("kind must be 'gpt', got 'rnn'", "kind must be 'gpt', got 'rnn'"),
        ("the source must be a file", "the source must be a file"),
        ("write Alibi(heads=4), max_heads=3", "write Alibi(heads=4), max_heads=3"),
    ],
)
def test_names_of_fields_become_flags(python, shell):
    assert with_flag_names(python, FLAGS) == shell


def test_flag_given_twice_is_a_list_of_files_and_all_are_read(files, tmp_path):
    both = ["--source", files / "a.de", "--source", files / "news", "--target", files / "a.en"]
    shape = ["--model", "rnn", *SMALL]
    ended = run("train", "translation", *both, *shape, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "error: files must come in pairs that match line by line, got 2 (" in ended.err
    well("train", "translation", *both, "--target", files / "headlines", *shape, "--out", tmp_path / "run")
    last = tmp_path / "run" / "step-00000004"
    plan = json.loads((last / "plan.json").read_text())
    assert plan["data"]["source"] == [str(files / "a.de"), str(files / "news")]
    assert json.loads((last / "training.json").read_text())["batches"]["settings"]["examples"] == 14
    resume = ["train", "translation", "--resume", "--out", tmp_path / "run", "--steps"]
    well(*resume, 6)
    ended = run(*resume, 8, "--source", files / "news", "--source", files / "a.de")
    assert f"but this differs: --source {files / 'news'} {files / 'a.de'}; give the same data" in ended.err


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["train", "translation", "--rate", "1e-3", "--rate", "5e-3", "--out", "run"], "--rate"),
        (["train", "translation", "--out", "a", "--out", "b"], "--out"),
        (["train", "language", "--joint", "--no-joint", "--out", "b"], None),
        (["train", "translation", "--joint", "--no-joint", "--out", "b"], "--joint"),
        (["translate", "run", "--beam", "1", "--beam", "2"], "--beam"),
        (["explain", "--shape", "1,1,8,8", "--shape", "1,1,9,9"], "--shape"),
    ],
)
def test_option_with_one_value_is_refused_twice(command, flag):
    ended = run(*command)
    assert ended.code == 2
    if flag:
        assert f"error: {flag} was given 2 times, and takes one value; give it once" in ended.err


def test_option_that_takes_several_may_be_repeated(files, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name} line\n" * 20)
    flags = ["--tokenizer", "char", "--length", 4, "--batch-tokens", 8, "--depth", 1, "--heads", 2, *SMALL]
    both = ["--text", tmp_path / "one", "--text", tmp_path / "two"]
    well("train", "language", *both, *flags, "--out", tmp_path / "run")
    vocabulary = (tmp_path / "run" / "step-00000004" / "tokenizer.json").read_text()
    assert '"w"' in vocabulary
    assert '"o"' in vocabulary
