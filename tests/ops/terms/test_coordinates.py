"""Coordinates: what terms written by users read from them."""

from __future__ import annotations

import torch

from regard import weights
from regard.ops.terms.coordinates import Block, Point
from regard.ops.terms.masks import Mask
from regard.ops.terms.term import term


@term
class KeptKeys(Mask):
    """keep[b, j], read by the earlier name of `slice_of`."""

    keep: torch.Tensor

    def over(self, at):
        return at.cut(self.keep, "bj")


def test_masks_written_with_the_earlier_name_of_slice_of_still_work():
    assert Point.cut is Point.slice_of
    assert Block.cut is Block.slice_of
    keep = torch.tensor([[True, False, True]])
    A = weights(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), mask=KeptKeys(keep)).dense()
    assert torch.equal(A > 0, keep[:, None, None].expand_as(A))
