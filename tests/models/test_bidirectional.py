"""Bidirectional: a row of a padded batch reads as if it stood alone."""

import pytest
import torch

from regard.models.bidirectional import Bidirectional


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("layers", [1, 2])
def test_padding_is_not_read_whatever_it_holds(cell, layers):
    rnn, lengths = Bidirectional(5, 6, cell=cell, layers=layers).double(), torch.tensor([3, 7, 1, 5])
    x = torch.randn(4, 9, 5, dtype=torch.float64)
    real = torch.arange(9) < lengths[:, None]
    states = rnn(torch.where(real[..., None], x, torch.nan), lengths)
    assert states.shape == (4, 9, 6)
    assert not states[~real].any()
    for row, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(states[row, :n], rnn(x[row : row + 1, :n])[0], rtol=0, atol=1e-12)


def test_it_reads_from_both_ends():
    rnn, x = Bidirectional(5, 6).double(), torch.randn(1, 7, 5, dtype=torch.float64)
    before = rnn(x)
    x[0, 3] += 1
    changed = (rnn(x) - before).abs() > 1e-9
    assert not changed[0, :3, :3].any()
    assert changed[0, 3:, :3].all()
    assert changed[0, :4, 3:].all()
    assert not changed[0, 4:, 3:].any()


def test_hidden_is_split_over_two_directions():
    with pytest.raises(ValueError, match="hidden must be even, half for each direction, got 7"):
        Bidirectional(5, 7)


@pytest.mark.parametrize(("lengths", "got"), [([3, 10], "10"), ([-1, 2], "-1"), ([3], "1 numbers")], ids=str)
def test_lengths_are_of_the_rows(lengths, got):
    with pytest.raises(ValueError, match=f"lengths must be one number per row, from 0 to 9, for 2 rows, got {got}$"):
        Bidirectional(5, 6)(torch.randn(2, 9, 5), torch.tensor(lengths))
