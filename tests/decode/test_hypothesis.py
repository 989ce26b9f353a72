"""Hypothesis: its attention aligns tokens with the source."""

from __future__ import annotations

import pytest
import torch

from regard.decode import greedy
from tests.decode.searches import END
from tests.decode.steppers import Recurrent


def test_a_hypothesis_aligns_each_token_with_a_source_position():
    one = greedy(Recurrent(vocabulary=9), torch.tensor([[3, 5, 2, 7]]), [[1]], end=END, max_length=6)[0]
    assert one.alignment("source") == tuple(one.attention["source"][0].argmax(-1).tolist())
    with pytest.raises(ValueError, match=r"name must be one of \['source'\], got 'cross'"):
        one.alignment("cross")
