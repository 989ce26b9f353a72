"""`regard check`: a class of a file, a function of a module, the folder of a model; findings end with exit code 1."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.cli.commands import run, well

pytestmark = pytest.mark.commands

CODE = """
import torch
from torch import nn

class Split(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        q, k, v = (self.move(part) for part in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).flatten(2)

    def move(self, x):
        return x

class Swapped(Split):
    def __init__(self, num_heads, dim):
        super().__init__(dim, num_heads)

    def move(self, x):
        return x.transpose(1, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

def function(q, k, v):
    return (q @ k.mT / 8**0.5).softmax(-1) @ v

number = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "own_attention.py"
    path.write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield path
    sys.modules.pop("own_attention", None)


def test_a_finding_is_printed_and_ends_with_1(file):
    ended = run("check", f"{file}:Split", "--dim", 24, "--heads", 4)
    assert ended.code == 1
    assert "FOUND  heads that attend to heads [heads-to-heads]" in ended.out
    assert run("check", f"{file}:Split(24, heads=4)").out == ended.out
    assert "no finding" in well("check", f"{file}:Split(24, 4)", "--ignore", "heads-to-heads").out


def test_classes_functions_and_modules_are_checked(file):
    assert "Swapped, 3 texts" in well("check", f"{file}:Swapped", "--dim", 24, "--heads", 4).out
    assert "function, 3 texts" in well("check", f"{file}:function", "--not-causal").out
    shown = well("check", "torch.nn:MultiheadAttention(24, 4)", "--sequence-first").out
    assert shown.startswith("MultiheadAttention, 3 texts of 7 tokens, vectors 24 wide")


def test_the_folder_of_a_model_is_checked(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 4, "vocab_size": 40, "n_positions": 32}
    torch.manual_seed(0)
    transformers.GPT2Model(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    assert "GPT2Model, 3 texts of 7 tokens, token ids, float64: no finding" in well("check", tmp_path).out


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("{file}", "names no class or function; write"),
        ("{file}:Missing", "has no 'Missing'; it has Split, Swapped"),
        ("{file}:number", "number is int; name a class, a function or a layer"),
        ("{file}:Split", "Split cannot be built: "),
        ("{file}:Split(open('x'))", "is no name and no call with numbers or texts; write NAME or NAME(64, heads=4)"),
        ("nothing.py:Layer", "nothing.py is not a file"),
        ("nothing.at_all:Layer", "cannot import nothing.at_all"),
    ],
)
def test_a_bad_target_is_refused_with_the_next_step(file, target, reason):
    ended = run("check", target.format(file=file))
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert reason in ended.err
