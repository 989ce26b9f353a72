"""explain: the choice of a backend, its cost, and why not the others."""

from __future__ import annotations

import torch

import regard as R
from regard import explain
from regard.ops.call import Call
from regard.ops.explanation import cost


def test_explain_names_the_choice_the_cost_and_every_objection():
    q, k, v = torch.randn(3, 1, 8, 1024, 64)
    text = explain(q, k, v, mask=R.Causal() & R.Window(128), score=R.Dot(cap=5.0))
    assert "-> tiled      chosen" in text
    assert "   sdpa       Dot with a cap is no plain product of queries and keys" in text
    assert "   flex       it is compiled for GPUs, and q is on cpu" in text
    assert "   reference  could, storing the matrix; ask for it by name" in text
    assert "cost       " in text
    assert "  summary    block by block, in PyTorch" in text
    assert "attend 1 x 8 x 1024 x 1024, d = 64, float32, cpu" in text


def test_cost_counts_the_tiles_that_are_not_empty():
    q, k, v = torch.randn(3, 1, 2, 1024, 16)
    plain, banded = cost(Call.of(q, k, v)), cost(Call.of(q, k, v, mask=R.Window(128)))
    assert plain.flops == 2 * 1024 * 1024 * (16 + 16) * 2
    assert plain.share == 1.0
    assert banded.share == (8 + 7 + 7) / 64  # of 8 x 8 tiles, the diagonal and its neighbours
    assert banded.flops == plain.flops * 22 / 64
    assert plain.moved == 4 * 2 * 1024 * 16 * 4
    assert plain.matrix == 2 * 1024 * 1024 * 4
    assert str(plain) == "134 MFLOP over 100 % of the matrix, 524 kB moved; the matrix would take 8.39 MB"
