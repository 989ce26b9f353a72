"""What is said to Python, said to the command line."""

from __future__ import annotations

import pytest

from regard.cli.flags import Flag, with_flag_names

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
