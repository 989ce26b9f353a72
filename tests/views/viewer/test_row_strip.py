"""Strips: rows of a tensor brought a piece at a time, each once."""

import pytest
import torch

from regard.views.viewer import row_strip as strip
from regard.views.viewer.row_strip import Strip


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(strip, "PIECE", 4)


@pytest.mark.parametrize(
    ("rows", "come"),
    [
        (slice(0, 0), []),
        (slice(5, 6), [4, 5, 6, 7]),
        (slice(3, 5), [0, 1, 2, 3, 4, 5, 6, 7]),
        (slice(8, 11), [8, 9, 10]),
        (torch.tensor([10, 1, 9]), [0, 1, 2, 3, 8, 9, 10]),
    ],
)
def test_the_pieces_that_hold_some_rows_come(rows, come):
    source = torch.arange(1.0, 34.0).view(1, 1, 11, 3)
    some = Strip(source, source.device)
    some.here.zero_()
    some.need(rows)
    expected = torch.zeros_like(source)
    expected[:, :, come] = source[:, :, come]
    assert torch.equal(some.here, expected)


def test_rows_that_came_do_not_come_again():
    source = torch.ones(1, 1, 11, 3)
    some = Strip(source, source.device)
    some.need(slice(0, 11))
    source.zero_()
    some.need(slice(0, 11))
    assert bool((some.here == 1).all())
