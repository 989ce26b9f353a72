"""Masks combined by &, | and ~, drawn, and never taken for true or false."""

from __future__ import annotations

import pytest
import torch

from regard import (
    Blocks,
    Causal,
    Chunked,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Global,
    Near,
    Neighborhood,
    Padding,
    Prefix,
    Rule,
    Window,
)
from regard.ops.terms.masks.mask_algebra import And, Or, conjuncts

DRAWN = [
    (Causal() & Window(2), 4, "■···/■■··/·■■·/··■■"),
    (Causal() | Prefix(2), 4, "■■··/■■··/■■■·/■■■■"),
    (~Diagonal(), 3, "·■■/■·■/■■·"),
    (Causal() - Diagonal(), 3, "···/■··/■■·"),
    (Causal() ^ Prefix(2), 4, "·■··/····/··■·/··■■"),
    (Causal() & torch.tensor([[True, False], [False, True]]), None, "■·/·■"),
    (torch.tensor([[True, False], [False, True]]) - Diagonal(), None, "··/··"),
    (torch.tensor([[False, True], [False, True]]) | Diagonal(), None, "■■/·■"),
    (torch.tensor([[False, True], [False, True]]) ^ Diagonal(), None, "■■/··"),
    (Causal() & Chunked(2), 4, "■···/■■··/··■·/··■■"),
    (Neighborhood((1, 4), (1, 2)), 4, "■■··/■■··/·■■·/··■■"),
    (Neighborhood((2, 2), (1, 2)), None, "■■··/■■··/··■■/··■■"),
    (Window((2, 9)), 3, "■■·/■■■/·■■"),
    (Documents.from_cu_seqlens(torch.tensor([0, 2, 3])), None, "■■·/■■·/··■"),
    (Window(before=0, after=1), 3, "■■·/·■■/··■"),
    (Dilated(2, 2), 4, "■·■·/·■·■/■·■·/·■·■"),
    (Global(1), 3, "■■■/■··/■··"),
    (Global((1,)), 3, "·■·/■■■/·■·"),
    (Global(torch.tensor([[2], [0]])), 3, "··■/··■/■■■"),
    (Rule(lambda b, h, i, j: j > i), 3, "·■■/··■/···"),
    (Padding((2, 4)), 3, "■■·/■■·/■■·"),
    (Prefix(torch.tensor([1, 3])), 3, "■··/■··/■··"),
    (Padding(torch.tensor([[True, False, True]])), None, "■·■/■·■/■·■"),
    (Documents(torch.tensor([0, 0, 1])), None, "■■·/■■·/··■"),
    (Documents(torch.tensor([0, 1]), torch.tensor([1, 1, 0])), None, "··■/■■·"),
    (Blocks(torch.eye(2, dtype=torch.bool), 2), None, "■■··/■■··/··■■/··■■"),
    (Dense(torch.tensor([[True, False, True], [False, True, True]])), None, "■·■/·■■"),
    (Causal() & Documents(torch.tensor([0, 0, 1])), None, "■··/■■·/··■"),
    (~Dense(torch.eye(2, dtype=torch.bool)), None, "·■/■·"),
    (Near(torch.tensor([0.0, 1.5, 2.0]), 0.5), 3, "■··/·■■/··■"),
    (Near(torch.tensor([0.0, 1.5, 2.0]), 0.5), None, "■··/·■■/··■"),
]


@pytest.mark.parametrize(("mask", "n", "picture"), DRAWN, ids=repr)
def test_masks_draw_themselves(mask, n, picture):
    drawing = "\n".join(" ".join(line) for line in picture.split("/"))
    assert mask.draw(n) == drawing
    if n is None:
        assert str(mask) == f"{mask!r}\n{drawing}"


def test_printing_a_mask_of_no_size_draws_twelve_by_twelve(capsys):
    print(Causal() & Window(4))
    source, *lines = capsys.readouterr().out.splitlines()
    assert source == "Causal() & Window(4)"
    assert len(lines) == 12
    assert lines[0] == "■" + " ·" * 11
    assert lines[11] == "· " * 8 + "■ ■ ■ ■"


def test_drawing_takes_rows_and_columns_and_stays_small():
    assert Causal().draw(2, 3) == "■ ■ ·\n■ ■ ■"
    assert len(Dense(torch.ones(100, 70, dtype=torch.bool)).draw().splitlines()) == 24
    assert Padding((2, 4)).draw() == "\n".join(["■ ■ · · · ·"] * 6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Causal() and Window(2),
        lambda: Causal() or Window(2),
        lambda: not Causal(),
        lambda: bool(Dense(torch.eye(3, dtype=torch.bool))),
        lambda: Causal() & Window(2) if Causal() | Prefix(1) else None,
    ],
    ids=["and", "or", "not", "bool", "if"],
)
def test_a_mask_is_neither_true_nor_false(wrong):
    with pytest.raises(TypeError, match=r"neither true nor false; combine masks with & \| ~, not with and, or, not"):
        wrong()


def test_conjuncts_are_the_masks_joined_by_and_at_the_top_in_order():
    either, hidden = Diagonal() | Prefix(2), ~(Causal() & Window(3))
    assert list(conjuncts((Causal() & either) & (Window(4) & hidden))) == [Causal(), either, Window(4), hidden]
    assert list(conjuncts(Causal())) == [Causal()]
    assert list(conjuncts(None)) == []


def test_and_binds_closer_than_or():
    mask = Causal() & Window(3) | Diagonal()
    assert mask == Or(And(Causal(), Window(3)), Diagonal())
