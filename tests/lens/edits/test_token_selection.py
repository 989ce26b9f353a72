"""Tokens selected by position, slice and function, in texts with padding."""

import pytest
import torch

from regard.lens import generated
from regard.lens.edits.token_selection import TokenAxis, checked_selection

REAL = torch.tensor([[True] * 5, [False, True, True, True, False]])


def axis(**given):
    positions = REAL.long().cumsum(1) - 1
    return TokenAxis(positions, REAL, REAL.sum(1, keepdim=True), **given)


@pytest.mark.parametrize(
    ("selection", "first", "second"),
    [
        (0, "10000", "01000"),
        (-1, "00001", "00010"),
        (3, "00010", "00000"),
        (-4, "01000", "00000"),
        (slice(1, None), "01111", "00110"),
        (slice(-2, None), "00011", "00110"),
        (slice(None, -1), "11110", "01100"),
        (slice(None, -7), "00000", "00000"),
        (slice(0, None, 2), "10101", "01010"),
        (slice(-3, None, 2), "00101", "01010"),
        ([0, -1, 2], "10101", "01010"),
        (range(1, 3), "01100", "00110"),
        (torch.tensor([1]), "01000", "00100"),
        ([], "00000", "00000"),
    ],
)
def test_positions_count_real_tokens_as_a_list_does(selection, first, second):
    found = axis().select(checked_selection("keys", selection))
    assert ["".join(map(str, row)) for row in found.int().tolist()] == [first, second]


def test_a_function_selects_by_the_tokens_of_each_row():
    texts = [list("abcde"), list("bca")]
    found = axis(texts=texts).select(lambda text: text.index("a"))
    assert found.nonzero().tolist() == [[0, 0], [1, 3]]
    with pytest.raises(ValueError, match=r"<lambda> selects by tokens, .* write edit\(model, edits, tokens\)"):
        axis().select(lambda text: 0)
    with pytest.raises(TypeError, match="its tokens must be positions of tokens, got 'a'"):
        axis(texts=texts).select(lambda text: "a")


def test_generated_tokens_are_those_behind_the_prompt():
    found = axis(prompt=torch.tensor([[3], [2]])).select(generated)
    assert found.int().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]
    with pytest.raises(ValueError, match="only if the prompt runs within the block"):
        axis().select(generated)
